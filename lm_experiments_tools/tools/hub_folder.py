"""Write a model as a folder for the Hugging Face Hub, and verify it by loading it in another process."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers.dynamic_module_utils import get_imports

from lm_experiments_tools.checkpoint.source import CONFIG
from lm_experiments_tools.checkpoint.weights import copy_tokenizer, quiet_saving
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import apply_umask, dump_json, read_json
from lm_experiments_tools.models.build import pretrained_config
from lm_experiments_tools.models.saved import Opened, position_of, run_folder
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.tools.compare import read_run

_OURS = ("lm_experiments_tools", "modeling_bert", "modeling_t5")
_SECONDS = 600  # for the loading check
_SITES = ("site-packages", "dist-packages")  # folders of installed packages
_OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
_AUTO = {"encoder-decoder": "Seq2SeqLM", "decoder": "CausalLM", "encoder": "MaskedLM"}
# The model card's code, and the logits of a given batch.
_PROGRAM = """
import sys, torch
folder = sys.argv[1]
{code}
with torch.no_grad():
    output = model.eval().float()(**torch.load(sys.argv[2]))
torch.save(output[next((name for name in {outputs} if name in output), 0)], sys.argv[3])
"""

_SETTINGS = (
    "task", "data_path", "valid_data_path", "input_seq_len", "target_seq_len", "batch_size",
    "gradient_accumulation_steps", "WORLD_SIZE", "optimizer", "lr", "lr_scheduler", "seed", "COMMIT",
)  # fmt: skip
_CARD = """---
{data}
---
# {name}

A `{cls}` ({kind}) of {parameters:,} parameters{merged}.

**Licence: not chosen yet.** Whoever publishes this model puts one here and in `license` above.

## Training

{training}

## How to load it

{note}
```python
folder = "{name}"
{code}
```
{task}"""
_TOKENIZER = "\n\nfrom transformers import AutoTokenizer\n\ntokenizer = AutoTokenizer.from_pretrained(folder)"


class Loading(NamedTuple):
    """Python code that assigns `model` from a variable `folder`, and the packages that it imports."""

    code: str
    note: str = ""
    is_complete: bool = True  # False if it needs code that is neither in the folder nor installed


@contextmanager
def new_folder(folder: Path, flag: str = "--to") -> Iterator[Path]:
    """Context manager: create a temporary folder that becomes `folder` at the end, or is removed after an error.

    Args:
        flag: name of the flag, for error messages.

    Raises:
        UserError: `folder` exists and is not empty.
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


def write_files(opened: Opened, folder: Path, max_shard_size: str) -> None:
    """Write configuration, weights in the saved dtype and the tokenizer. A LoRA adapter is merged."""
    source, model = opened.source, opened.model
    config = pretrained_config(source.name).to_dict() if source.path is None else source.config
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    if not all(torch.equal(weight.to(dtype).float(), weight) for weight in model.parameters()):
        dtype = torch.float32  # some weights were saved in a wider dtype than the configuration names
    # Parameters alone: buffers such as the frequencies of rotary positions would lose digits.
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    with quiet_saving():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    for weight in model.parameters():
        weight.data = weight.data.float()
    # Save the tokenizer of a decoder again: it must not append EOS to prompts.
    if source.path is None or opened.writes_on or not copy_tokenizer(source.path, folder):
        opened.tokenizer.save_pretrained(folder)


def check_folder(opened: Opened, folder: Path) -> Loading:
    """Load the folder in another process, compare logits and return the loading code.

    The files of a user's own model classes are copied into the folder.

    Raises:
        UserError: the folder cannot be loaded, or its logits differ from those of the model.
    """
    inputs = example_inputs(opened.model)
    expected, reason = logits_of(opened.model, inputs), ""
    for loading in _user_class(opened, folder) if opened.is_own else _library_class(opened):
        reason = _failure(loading, folder, inputs, expected)
        if not reason:
            return loading
    raise UserError(f"{folder} {reason}; nothing was written.")


def example_inputs(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a batch of two rows of 12 token ids, for an encoder-decoder with decoder ids."""
    generator = torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().num_embeddings
    inputs = {"input_ids": torch.randint(rows, (2, 12), generator=generator)}
    if "attention_mask" in forward_names(model):
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(rows, (2, 7), generator=generator)
    return inputs


def logits_of(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits, or the last hidden states of a model without a head."""
    with torch.no_grad():
        output = model(**inputs)
    return output[next((name for name in _OUTPUTS if name in output), 0)]


def difference(found: Tensor, expected: Tensor) -> str:
    """Describe how the logits of a loaded model differ from the expected ones; "" if they are bit-identical."""
    if found.shape == expected.shape and torch.equal(found, expected):
        return ""
    size = f"by up to {float((found - expected).abs().max()):.3g}" if found.shape == expected.shape else "in shape"
    return f"loads as another model: its logits differ {size}"


def _library_class(opened: Opened) -> Iterator[Loading]:
    """A class of transformers or of this package."""
    cls = type(opened.model)
    package = cls.__module__.partition(".")[0]
    is_ours = package != "transformers"
    note = "The class is one of `lm_experiments_tools`, which has to be installed." if is_ours else ""
    reader, source = opened.reader or cls.__name__, package if opened.reader is None else "transformers"
    register = f"import {package}  # makes transformers know this kind of model\n" if is_ours and opened.reader else ""
    yield Loading(f"{register}from {source} import {reader}\n\nmodel = {reader}.from_pretrained(folder)", note)


def _user_class(opened: Opened, folder: Path) -> Iterator[Loading]:
    """A user's class: by an Auto class and the files in the folder, by its name from these files, or as installed."""
    files = _user_files(opened.model)
    for file in files.values():
        shutil.copyfile(file, folder / file.name)
    cls, config = type(opened.model), read_json(folder / CONFIG)
    names = ", ".join(sorted(file.name for file in files.values()))
    auto = f"AutoModelFor{_AUTO[opened.kind]}" if opened.kind in _AUTO else "AutoModel"
    owners = {"AutoConfig": type(opened.model.config), auto: cls}
    mapped = {reader: f"{c.__module__}.{c.__name__}" for reader, c in owners.items() if c.__module__ in files}
    (folder / CONFIG).write_text(dump_json({**config, "auto_map": mapped}), encoding="utf-8")
    yield Loading(
        f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained(folder, trust_remote_code=True)",
        f"Its code is in the folder ({names}): read it before you trust it.",
    )
    (folder / CONFIG).write_text(dump_json(config), encoding="utf-8")
    by_class = f"from {cls.__module__} import {cls.__name__}\n\nmodel = {cls.__name__}.from_pretrained(folder)"
    yield Loading(
        f"import sys\n\nsys.path.insert(0, folder)  # {names}\n{by_class}",
        "Its code is in the folder, and needs `lm_experiments_tools` to be installed: it loads by its own class.",
    )
    for file in files.values():
        (folder / file.name).unlink()
    note = (
        f"The code of its class is not in this folder: install `{cls.__module__}`, or put the folder that holds it on "
        "PYTHONPATH. Without it the model does not load."
    )
    yield Loading(by_class, note, is_complete=False)


def _user_files(model: torch.nn.Module) -> dict[str, Path]:
    """Module -> file of the user's modules that define the model's classes, and of those that they import.

    Packages and installed modules are excluded.
    """
    classes = {cls for part in (*model.modules(), model.config) for cls in type(part).__mro__}
    left, found = {cls.__module__ for cls in classes}, {}
    while left:
        name = left.pop()
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        is_package = "." in name or file.name == "__init__.py" or file.suffix != ".py"
        is_installed = file.parent.name in _SITES or name in sys.stdlib_module_names
        if not is_package and not is_installed and name not in found:
            found[name] = file
            left |= set(get_imports(file))
    return found


def _failure(loading: Loading, folder: Path, inputs: dict[str, Tensor], expected: Tensor) -> str:
    """Why a new process, in another folder, does not get these logits by `loading.code`; empty if it does.

    It imports installed packages only, unless the loading is incomplete.
    """
    with tempfile.TemporaryDirectory() as other:
        inputs_file, logits_file, packages = (Path(other, name) for name in ("inputs.pt", "logits.pt", "packages"))
        torch.save(inputs, inputs_file)
        packages.mkdir()
        for name in _OURS:
            (packages / name).symlink_to(Path(__file__).resolve().parents[2] / name)
        paths = [path for path in sys.path if not loading.is_complete or Path(path).name in _SITES]
        environment = {**os.environ, "HF_MODULES_CACHE": other, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *map(os.path.abspath, paths)])
        program = _PROGRAM.format(code=loading.code, outputs=_OUTPUTS)
        # -S: the .pth file of an editable install would put the folder of the user's code on the path
        try:
            done = subprocess.run(
                [sys.executable, "-S", "-c", program, str(folder.resolve()), str(inputs_file), str(logits_file)],
                cwd=other, env=environment, capture_output=True, text=True, timeout=_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"was not loaded within {_SECONDS} s"
        if done.returncode != 0:
            return f"cannot be loaded ({(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]})"
        return difference(torch.load(logits_file), expected)


def write_card(opened: Opened, folder: Path, name: str, loading: Loading) -> None:
    """Write the model card README.md into `folder`, with settings and metrics of the model's run.

    Args:
        name: final name of the folder.
        loading: code that loads the model.
    """
    model, pipelines = opened.model, {"encoder": "fill-mask", "decoder": "text-generation"}
    classifies = opened.reader == "AutoModelForSequenceClassification"
    data = ModelCardData(
        library_name="transformers",
        license="other",
        license_name="to-be-chosen",
        pipeline_tag="text-classification" if classifies else pipelines.get(opened.kind),
        tags=[model.config.model_type],
    )
    task = [(key, value) for key, value in opened.source.task.items() if value not in (None, "", [], ())]
    text = _CARD.format(
        data=data.to_yaml(),
        name=name,
        cls=type(model).__name__,
        kind=opened.kind or model.config.model_type,
        parameters=sum(weight.numel() for weight in model.parameters()),
        merged=", into whose weights an adapter is merged" if opened.is_merged else "",
        training=_training(opened),
        note=f"{loading.note}\n" if loading.note else "",
        code=loading.code + (_TOKENIZER if any(folder.glob("tokenizer*")) else ""),
        task=f"\n## What it was fine-tuned for\n\n{_table(task)}\n" if task else "",
    )
    ModelCard(text).save(folder / "README.md")


def _training(opened: Opened) -> str:
    """A table of what the run recorded up to the checkpoint's step."""
    path = run_folder(opened.source)
    if path is None:
        return "The files that this was exported from do not record it."
    run, position = read_run(path), position_of(opened.source.path)
    step = position["step"]
    rows: list[tuple[str, Any]] = [("updates" if key == "step" else key, f"{n:,}") for key, n in position.items()]
    for key in run.metrics("train"):
        values = [record[key] for record in run.of("train") if record["step"] <= step and record.get(key)]
        rows += [(f"training {key}", f"{value:.4g}") for value in values[-1:]]
    valid = next((record for record in reversed(run.of("valid")) if record["step"] == step), {})
    rows += [(f"validation {key}", f"{valid[key]:.4g}") for key in run.metrics("valid") if valid.get(key) is not None]
    for name in _SETTINGS:
        value = run.config.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        # Only the last part of a path: folders are those of one machine.
        texts = [Path(entry).name if name.endswith("path") else str(entry) for entry in values if entry is not None]
        rows += [(name, ", ".join(texts))] if texts else []
    return _table(rows)


def _table(rows: list[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])
