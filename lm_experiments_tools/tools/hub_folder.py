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
from transformers.dynamic_module_utils import get_imports

from lm_experiments_tools.checkpoint.conversion import without_progress_bars
from lm_experiments_tools.checkpoint.source import CONFIG
from lm_experiments_tools.checkpoint.weights import copy_tokenizer, read_weights
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
_OURS = ("lm_experiments_tools", "modeling_bert", "modeling_t5")
_LIBRARIES = {"transformers", "torch", "peft", *_OURS}
_SITES = ("site-packages", "dist-packages")  # folders of installed packages
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
        is_complete: another process loaded the folder; False if it also needs code that could not be copied.
    """

    code: str
    note: str = ""
    is_complete: bool = True


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
    """Write configuration and weights as they are in the checkpoint (an adapter is merged), and the tokenizer, which
    for a decoder does not append EOS."""
    source, model = opened.source, opened.model
    if source.path is None or opened.is_merged:
        with without_progress_bars():
            model.save_pretrained(folder, max_shard_size=max_shard_size)
    else:
        for name in (CONFIG, "generation_config.json"):
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
        save_weights(read_weights(source.path), folder, max_shard_size)
    if source.path is None or opened.writes_on or not copy_tokenizer(source.path, folder):
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
        code = f"from {home} import {cls.__name__}\n\nmodel = {cls.__name__}.from_pretrained(folder)"
        reader: Any = cls
    else:
        import transformers

        own = f"import {home}  # makes transformers know this kind of model\n" if ours else ""
        reader = getattr(transformers, auto)
        code = f"{own}from transformers import {auto}\n\nmodel = {auto}.from_pretrained(folder)"
    model = loaded(reader, str(folder))
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
    """Load in a new process whose path has installed packages only.

    First by an Auto class, which takes the code next to the weights; then by the class's own name, with the folder on
    sys.path. If both fail, the code is more than the copied files: this process checks the logits, and the note says
    what else is needed.
    """
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
    names = ", ".join(sorted(file.name for file in files.values()))
    by_class = f"from {cls.__module__} import {cls.__name__}\n\nmodel = {cls.__name__}.from_pretrained(folder)"
    if _try_stranger(by_auto, folder, inputs, expected) is None:
        return Loading(by_auto, f"Its code is in the folder ({names}): read it before you trust it.")
    (folder / CONFIG).write_text(dump_json(before), encoding="utf-8")
    by_name = f"import sys\n\nsys.path.insert(0, folder)  # {names}\n{by_class}"
    said = _try_stranger(by_name, folder, inputs, expected)
    if said is None:
        note = (
            "Its code is in the folder, and needs `lm_experiments_tools` to be installed: it loads by its own class."
        )
        return Loading(by_name, note)
    for file in files.values():
        (folder / file.name).unlink()
    model = loaded(cls, str(folder))
    check_same(logits_of(model.eval(), inputs), expected, folder)
    note = (
        f"The code of its class is not in this folder: install `{cls.__module__}`, or put the folder that holds it on "
        f"PYTHONPATH. Without it the model does not load ({said})."
    )
    return Loading(by_class, note, is_complete=False)


def _own_files(model: torch.nn.Module) -> dict[str, Path]:
    """Module -> file of the model's own code: of its classes and of what their files import.

    Excluded are packages, and modules that are installed.
    """
    classes = {*type(model).__mro__, *type(model.config).__mro__}
    classes |= {cls for part in model.modules() for cls in type(part).__mro__}
    left, found = {cls.__module__ for cls in classes}, {}
    while left:
        module = left.pop()
        file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
        libraries = _LIBRARIES | sys.stdlib_module_names | found.keys()
        if file.suffix == ".py" and file.name != "__init__.py" and "." not in module and module not in libraries:
            if file.parent.name not in _SITES:
                found[module] = file
                left |= set(get_imports(file))
    return found


def _try_stranger(code: str, folder: Path, inputs: dict[str, Tensor], expected: Tensor) -> str | None:
    """None if a new process that runs `code` gets these logits; else what it says."""
    with tempfile.TemporaryDirectory() as other:
        asked, answered = Path(other, "inputs.pt"), Path(other, "logits.pt")
        torch.save(inputs, asked)
        packages = Path(other, "packages")
        packages.mkdir()
        for name in _OURS:
            (packages / name).symlink_to(Path(__file__).resolve().parents[2] / name)
        paths = [str(packages), *(path for path in sys.path if Path(path).name in _SITES)]
        environment = {**os.environ, "HF_MODULES_CACHE": other, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        program = _STRANGER.format(snippet=code, outputs=_OUTPUTS)
        # -S: the .pth file of an editable install would put the folder of the user's code on the path
        done = subprocess.run(
            [sys.executable, "-S", "-c", program, str(folder.resolve()), str(asked), str(answered)],
            cwd=other, env=environment, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        try:
            check_same(torch.load(answered), expected, folder)
        except UserError as error:
            return str(error)
    return None
