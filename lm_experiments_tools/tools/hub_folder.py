"""Write a model as a folder for the Hugging Face Hub, and verify the logits of the loaded folder."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers import dynamic_module_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from lm_experiments_tools.checkpoint.conversion import quiet_loading
from lm_experiments_tools.checkpoint.weights import copy_tokenizer, quiet_saving
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import apply_umask
from lm_experiments_tools.models.build import pretrained_config, refusals_named
from lm_experiments_tools.models.saved import LIBRARIES, OURS, Opened
from lm_experiments_tools.modules.inspection import forward_names

_OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
_AUTO = {
    "encoder-decoder": "AutoModelForSeq2SeqLM",
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
}
_CARD = """---
{data}
---
# {name}

A `{cls}` ({kind}) of {parameters:,} parameters{merged}.

**Licence: not chosen yet.** Whoever publishes this model puts one here and in `license` above.

## How to load it

{note}
```python
folder = "{name}"
{code}
```
"""
_TOKENIZER = "\n\nfrom transformers import AutoTokenizer\n\ntokenizer = AutoTokenizer.from_pretrained(folder)"


class Loading(NamedTuple):
    """Description of how another program loads a model from its folder, for the model card and for a check.

    Attributes:
        code: Python code that loads `model` from a variable `folder`.
        reader: f(folder) -> the class whose `from_pretrained` the code calls.
    """

    code: str
    note: str
    reader: Callable[[str], type]
    options: dict[str, Any] = {}


@contextmanager
def new_folder(folder: Path, flag: str = "--to") -> Iterator[Path]:
    """Context that creates a folder as a whole or not at all. UserError if `folder` exists and is not empty.

    It yields a temporary folder, which is renamed to `folder` at the end, or removed after an error.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{flag} {folder} exists, and nothing is overwritten: name another folder.")
    temporary = folder.with_name(f".{folder.name}.tmp{secrets.token_hex(6)}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        apply_umask(*temporary.iterdir())
        if folder.is_dir():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_folder(opened: Opened, folder: Path, max_shard_size: str) -> Loading:
    """Write a model as a folder for the Hugging Face Hub, then load the folder and compare the logits.

    The folder gets configuration, weights in the dtype in which they were saved, tokenizer and the user's code.
    UserError if its logits are not bit-identical to the model's.
    """
    source, model = opened.source, opened.model
    inputs = example_inputs(model)
    expected = logits_of(model, inputs)
    loading = _user_class(opened) if opened.is_own else _library_class(opened)
    config = pretrained_config(source.name).to_dict() if source.path is None else source.config
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    if not all(torch.equal(weight.to(dtype).float(), weight) for weight in model.parameters()):
        dtype = torch.float32  # some weights were saved in a wider dtype than the configuration names
    # Parameters alone: buffers such as the frequencies of rotary positions would lose digits.
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    with quiet_saving():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    # Save the tokenizer of a decoder again: it must not append EOS to prompts.
    if source.path is None or opened.writes_on or not copy_tokenizer(source.path, folder):
        opened.tokenizer.save_pretrained(folder)
    check_folder(folder, loading, inputs, expected)
    return loading


def check_folder(folder: Path, loading: Loading, inputs: dict[str, Tensor], expected: Tensor) -> None:
    """Check that the model in a folder loads and gives the expected logits of `inputs`. Raises UserError if not."""
    modules = dynamic_module_utils.HF_MODULES_CACHE
    with tempfile.TemporaryDirectory() as temporary:
        dynamic_module_utils.HF_MODULES_CACHE = temporary  # the copy of a user's code is of no use afterwards
        try:
            with refusals_named(f"{folder}: it cannot be loaded"), quiet_loading():
                cls = loading.reader(str(folder))
                model = cls.from_pretrained(folder, dtype=torch.float32, **loading.options)
        finally:
            dynamic_module_utils.HF_MODULES_CACHE = modules
    if differs := difference(logits_of(model.eval(), inputs), expected):
        raise UserError(f"{folder} {differs}; nothing was written.")


def example_inputs(model: torch.nn.Module) -> dict[str, Tensor]:
    """Build a small batch on which logits are compared: two rows of 12 token ids."""
    generator = torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().num_embeddings
    inputs = {"input_ids": torch.randint(rows, (2, 12), generator=generator)}
    if "attention_mask" in forward_names(model):
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(rows, (2, 7), generator=generator)
    return inputs


def logits_of(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Compute a model's logits, or the last hidden states of a model without a head."""
    with torch.no_grad():
        output = model(**inputs)
    return output[next((name for name in _OUTPUTS if name in output), 0)]


def difference(found: Tensor, expected: Tensor) -> str:
    """Describe how the logits of a loaded model differ from the expected ones; "" if they are bit-identical."""
    if found.shape == expected.shape and torch.equal(found, expected):
        return ""
    size = f"by up to {float((found - expected).abs().max()):.3g}" if found.shape == expected.shape else "in shape"
    return f"loads as another model: its logits differ {size}"


def _library_class(opened: Opened) -> Loading:
    cls = type(opened.model)
    package = _package(cls)
    name, is_ours = opened.reader or cls.__name__, package != "transformers"
    source = "transformers" if opened.reader else package
    register = f"import {package}  # makes transformers know this kind of model\n" if is_ours and opened.reader else ""
    note = "The class is one of `lm_experiments_tools`, which has to be installed." if is_ours else ""
    code = f"{register}from {source} import {name}\n\nmodel = {name}.from_pretrained(folder)"
    return Loading(code, note, lambda folder: getattr(transformers, opened.reader) if opened.reader else cls)


def _user_class(opened: Opened) -> Loading:
    """A user's class, whose file and the files that it imports relatively `save_pretrained` copies into the folder."""
    cls, auto = type(opened.model), _AUTO.get(opened.kind, "AutoModel")
    cls.register_for_auto_class(auto)
    config_cls = type(opened.model.config)
    if _package(config_cls) not in LIBRARIES:
        config_cls.register_for_auto_class()
    note = (
        "Its code is in the folder: read it before you trust it. Other modules that it imports have to be installed."
    )
    if any(_package(base) in OURS for base in cls.__mro__):  # AutoConfig reads our classes alone
        name = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
        loader = "get_class_from_dynamic_module"
        code = (
            f"from transformers.dynamic_module_utils import {loader}\n\n"
            f'model = {loader}("{name}", folder).from_pretrained(folder)'
        )
        return Loading(code, note, partial(get_class_from_dynamic_module, name))
    code = f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained(folder, trust_remote_code=True)"
    return Loading(code, note, lambda folder: getattr(transformers, auto), {"trust_remote_code": True})


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def write_card(opened: Opened, folder: Path, name: str, loading: Loading) -> None:
    """Write the model card README.md into `folder`, whose final name is `name`."""
    model, pipelines = opened.model, {"encoder": "fill-mask", "decoder": "text-generation"}
    classifies = opened.reader == "AutoModelForSequenceClassification"
    data = ModelCardData(
        library_name="transformers",
        license="other",
        license_name="to-be-chosen",
        pipeline_tag="text-classification" if classifies else pipelines.get(opened.kind),
        tags=[model.config.model_type],
    )
    text = _CARD.format(
        data=data.to_yaml(),
        name=name,
        cls=type(model).__name__,
        kind=opened.kind or model.config.model_type,
        parameters=sum(weight.numel() for weight in model.parameters()),
        merged=", into whose weights an adapter is merged" if opened.is_merged else "",
        note=f"{loading.note}\n" if loading.note else "",
        code=loading.code + (_TOKENIZER if any(folder.glob("tokenizer*")) else ""),
    )
    ModelCard(text).save(folder / "README.md")
