"""A saved model as a folder for the Hugging Face Hub, loaded back and compared before it gets its name."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from lm_experiments_tools.checkpoint.source import CONFIG
from lm_experiments_tools.checkpoint.weights import copy_tokenizer, read_weights, without_progress_bars
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import apply_umask, dump_json, read_json
from lm_experiments_tools.models.saved import loaded
from lm_experiments_tools.modules.inspection import forward_names

if TYPE_CHECKING:
    from lm_experiments_tools.models.saved import Opened

_READERS = {
    "encoder-decoder": "AutoModelForSeq2SeqLM",
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
}
_LIBRARIES = {"transformers", "torch", "modeling_t5", "modeling_bert", "lm_experiments_tools", "peft"}
_OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
_SECONDS = 600
_STRANGER = """
import sys, torch
folder = sys.argv[1]
{snippet}
inputs = torch.load(sys.argv[2])
with torch.no_grad():
    output = model.eval().float()(**inputs)
names = [name for name in {outputs} if name in output]
torch.save(output[names[0] if names else 0], sys.argv[3])
"""


@dataclass(frozen=True)
class Loading:
    """How the folder is loaded.

    Attributes:
        code: Python whose `model` is the model, of a variable `folder`.
        note: a sentence on what has to be installed or trusted; empty for a class of transformers.
        files: code of the model's own that lies in the folder.
    """

    code: str
    note: str = ""
    files: tuple[str, ...] = ()


@contextmanager
def new_folder(folder: Path, flag: str = "--to") -> Iterator[Path]:
    """A folder beside `folder` that gets its name at the end of the block, or is removed if that fails.

    Raises:
        UserError: there is something in `folder`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{flag} {folder}: it is there already, and nothing is overwritten: name another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        apply_umask(*temporary.iterdir())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        if folder.is_dir():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_files(opened: Opened, folder: Path, max_shard_size: str) -> None:
    """Configuration, weights and tokenizer, the first two as they are in the checkpoint, of an adapter merged."""
    source, model = opened.source, opened.model
    if source.path is None or opened.is_merged:
        with without_progress_bars():
            model.save_pretrained(folder, max_shard_size=max_shard_size)
    else:
        for name in (CONFIG, "generation_config.json"):
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
        save_weights(read_weights(source.path), folder, max_shard_size)
    if source.path is None or not copy_tokenizer(source.path, folder):
        opened.tokenizer.save_pretrained(folder)


def save_weights(weights: dict[str, Tensor], folder: Path, max_shard_size: str) -> None:
    """Write model.safetensors, or shards and their index; of weights that share memory one name is kept."""
    logging.disable(logging.INFO)  # it tells of the folder by the name that it does not keep
    try:
        save_torch_state_dict(weights, str(folder), max_shard_size=max_shard_size)
    finally:
        logging.disable(logging.NOTSET)


def same_logits(opened: Opened, folder: Path) -> Loading:
    """How a stranger loads the folder, which was tried: the logits are those of the model, bit for bit.

    Raises:
        UserError: they are not, or it cannot be loaded.
    """
    inputs = example_inputs(opened.model)
    expected = logits_of(opened.model, inputs)
    if opened.is_own:
        return _own_class(opened, folder, inputs, expected)
    auto, cls = opened.reader, type(opened.model)
    home = cls.__module__.partition(".")[0]
    ours = home != "transformers"
    if auto is None:
        name, code = (
            cls.__name__,
            f"from {home} import {cls.__name__}\n\nmodel = {cls.__name__}.from_pretrained(folder)",
        )
        reader: Any = cls
    else:
        import transformers

        own = f"import {home}  # makes transformers know this kind of model\n" if ours else ""
        name, reader = auto, getattr(transformers, auto)
        code = f"{own}from transformers import {auto}\n\nmodel = {auto}.from_pretrained(folder)"
    model = loaded(
        lambda: reader.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True), str(folder), name
    )
    check_same(logits_of(model.eval(), inputs), expected, folder)
    return Loading(code, "The class is one of `lm_experiments_tools`, which has to be installed." if ours else "")


def example_inputs(model: torch.nn.Module) -> dict[str, Tensor]:
    """A batch of two rows of 12 ids, for an encoder-decoder with ids for the decoder."""
    generator = torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().num_embeddings
    inputs = {"input_ids": torch.randint(rows, (2, 12), generator=generator)}
    if "attention_mask" in forward_names(model):
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(rows, (2, 7), generator=generator)
    return inputs


def logits_of(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The scores, or of a model without a head its hidden states."""
    with torch.no_grad():
        output = model(**inputs)
    return output[next((name for name in _OUTPUTS if name in output), 0)]


def check_same(found: Tensor, expected: Tensor, folder: Path) -> None:
    """Raises UserError unless the two are equal in every bit; `folder` is what was written."""
    if found.shape != expected.shape or not torch.equal(found, expected):
        differ = (
            f"by up to {float((found - expected).abs().max()):.3g}" if found.shape == expected.shape else "in shape"
        )
        raise UserError(f"{folder} loads as another model: its logits differ {differ}; nothing was written.")


# ---- a user's class


def _own_class(opened: Opened, folder: Path, inputs: dict[str, Tensor], expected: Tensor) -> Loading:
    """Load in a process of its own, from another folder: by an Auto class with the code that lies beside the weights,
    else, where that code is looked for by its name, with the folder among those of modules."""
    files = _own_files(opened.model)
    for file in files.values():
        shutil.copyfile(file, folder / file.name)
    cls, config = type(opened.model), type(opened.model.config)
    auto = _READERS.get(opened.kind, "AutoModel")
    before = read_json(folder / CONFIG)
    mapped = {
        f"Auto{kind}": f"{owner.__module__}.{owner.__name__}"
        for kind, owner in (("Config", config), (auto.removeprefix("Auto"), cls))
        if owner.__module__ in files
    }
    (folder / CONFIG).write_text(dump_json({**before, "auto_map": mapped}), encoding="utf-8")
    by_auto = f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained(folder, trust_remote_code=True)"
    names = tuple(sorted(file.name for file in files.values()))
    said = _try_stranger(by_auto, folder, inputs, expected)
    if said is None:
        return Loading(by_auto, f"Its code is in the folder ({', '.join(names)}): read it before you trust it.", names)
    (folder / CONFIG).write_text(dump_json(before), encoding="utf-8")
    by_name = (
        f"import sys\n\nsys.path.insert(0, folder)  # {', '.join(names)}\n"
        f"from {cls.__module__} import {cls.__name__}\n\nmodel = {cls.__name__}.from_pretrained(folder)"
    )
    said = _try_stranger(by_name, folder, inputs, expected)
    if said is not None:
        raise UserError(
            f"{cls.__module__}:{cls.__name__} does not load outside of the folder of its code ({said}): put all that "
            "it needs into files that it imports by a plain name, or export where that is installed."
        )
    note = "Its code is in the folder, and needs `lm_experiments_tools` to be installed: it loads by its own class."
    return Loading(by_name, note, names)


def _own_files(model: torch.nn.Module) -> dict[str, Path]:
    """Module -> file of the classes that are neither transformers' nor ours; of packages none, which are installed."""
    classes = {*type(model).__mro__, *type(model.config).__mro__}
    classes |= {cls for part in model.modules() for cls in type(part).__mro__}
    found = {}
    for module in sorted({cls.__module__ for cls in classes}):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and "." not in module and module not in _LIBRARIES | sys.stdlib_module_names:
            found[module] = Path(file)
    return found


def _try_stranger(code: str, folder: Path, inputs: dict[str, Tensor], expected: Tensor) -> str | None:
    """None if a new process that runs `code` gets these logits; else what it says."""
    with tempfile.TemporaryDirectory() as other:
        asked, answered = Path(other, "inputs.pt"), Path(other, "logits.pt")
        torch.save(inputs, asked)
        paths = [path for path in sys.path if path and Path(path, "transformers").is_dir()]
        package = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "HF_MODULES_CACHE": other, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([package, *paths])
        program = _STRANGER.format(snippet=code, outputs=_OUTPUTS)
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder.resolve()), str(asked), str(answered)],
            cwd=other, env=environment, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        try:
            check_same(torch.load(answered), expected, folder)
        except UserError as error:
            return str(error)
    return None
