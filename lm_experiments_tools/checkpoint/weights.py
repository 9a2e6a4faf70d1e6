"""Model weights on disk: written in Hugging Face format, read from this and other projects' formats."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lm_experiments_tools.checkpoint.adapter_files import read_adapter, read_adapter_into, save_adapter
from lm_experiments_tools.checkpoint.conversion import to_model_names, without_progress_bars
from lm_experiments_tools.checkpoint.legacy import read_pickle, state_dict_of, strip_wrappers
from lm_experiments_tools.checkpoint.manifest import is_listed, named_checkpoint, shards_of, verify_model
from lm_experiments_tools.checkpoint.source import ADAPTER_CONFIG, TASK_FILE
from lm_experiments_tools.checkpoint.t5x import is_t5x, read_t5x
from lm_experiments_tools.checkpoint.tree import WriteTensors, as_os_error, load_tensors, sharded_name, write_now
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import apply_umask, naming
from lm_experiments_tools.modules.inspection import is_adapted, saved_state

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.model", "vocab*", "merges.txt")
_TOKENIZER_FILES += ("chat_template*", TASK_FILE)


@dataclass(frozen=True)
class LoadReport:
    """Result of `load_weights`: which parameters were loaded, are missing, or do not fit.

    Parameters are listed by name. `mismatched` holds (name, shape in the file, shape in the model), and so do `grown`
    and `dropped`: embeddings with more rows than in the file, which are loaded too, and those of another shape.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    grown: list[Mismatch] = field(default_factory=list)
    dropped: list[Mismatch] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        shapes = [f"{name}: {_by(a)} in the file, {_by(b)} in the model" for name, a, b in self.mismatched]
        parts = [f"{len(self.matched)} weights loaded"]
        parts += [f"{name} with new rows ({_by(a)} in the file, {_by(b)} in the model)" for name, a, b in self.grown]
        for what, names in (("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", shapes)):
            shown = names[:3] + ["..."] * (len(names) > 3)
            parts.append(f"{len(names)} {what}" + (f" ({', '.join(shown)})" if names else ""))
        return ", ".join(parts)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


# ---- saving ---------------------------------------------------------------------------------------------------------
def save_model(
    path: Path,
    model: nn.Module,
    state_dict: dict[str, Tensor] | None = None,
    tokenizer_dir: Path | None = None,
    write: WriteTensors = write_now,
) -> None:
    """Write an unwrapped model into the existing directory `path`, in the format that `from_pretrained` loads.

    A model without the method `save_pretrained` is written as model.safetensors. For a model with an adapter only the
    trained parameters are written (see adapter_files.py). Tied weights are stored once.

    Args:
        state_dict: gathered weights, if the model's own are sharded (FSDP, ZeRO 3); None takes the model's.
        tokenizer_dir: folder whose tokenizer files are copied; None copies none.
        write: f(tensors, file), which writes the weights. It may get the model's own tensors.

    Raises:
        OSError: the files cannot be written.
        UserError: `tokenizer_dir` has no tokenizer.
    """
    path = Path(path)
    try:
        if is_adapted(model):
            save_adapter(path, model, state_dict, write)
        elif hasattr(model, "save_pretrained"):
            _save_pretrained(path, model, state_dict, write)
        else:
            weights = state_dict if state_dict is not None else model.state_dict()
            write(_unshared(weights), path / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise as_os_error(error, path) from error
    # A model may write further files in its own `save_pretrained`.
    apply_umask(*path.rglob("*.safetensors"))
    if tokenizer_dir is not None and not copy_tokenizer(Path(tokenizer_dir), path):
        raise UserError(f"{tokenizer_dir} has no tokenizer files (tokenizer*.json, *.model, vocab*).")


def save_all_but_weights(path: Path, model: nn.Module, tokenizer_dir: Path | None) -> list[str]:
    """Write what `save_model` does, without weights: it saves meta tensors, with a writer that only notes their names.

    Returns the names of the weights that belong into the files: those of the state dict, each tied weight once.
    """
    names: list[str] = []
    shapes: dict[int, Tensor] = {}
    for tensor in (own := saved_state(model)).values():
        shape = getattr(tensor, "ds_shape", tensor.shape)
        shapes.setdefault(id(tensor), torch.empty(shape, dtype=tensor.dtype, device="meta"))

    def note(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
        names.extend(tensors)

    save_model(path, model, {name: shapes[id(tensor)] for name, tensor in own.items()}, tokenizer_dir, note)
    # For large models `save_pretrained` writes an index of shards, which are not those of the workers.
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    return names


def write_index(path: Path, names: list[list[str]], num_bytes: int) -> None:
    """Write Hugging Face's index of weights that workers have written: `names` of each worker's file."""
    files = [sharded_name("model", rank, len(names)) for rank in range(len(names))]
    weight_map = {name: file for file, of_file in zip(files, names, strict=True) for name in of_file}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    with naming(file := path / "model.safetensors.index.json"):
        file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_pretrained(path: Path, model: Any, state_dict: dict[str, Tensor] | None, write: WriteTensors) -> None:
    """`save_pretrained`, which decides what to store under which names, with our writer of tensors."""
    with quiet_saving(), _patched("transformers.modeling_utils", "safe_save_file", write):
        model.save_pretrained(path, state_dict=state_dict)


@contextlib.contextmanager
def quiet_saving() -> Iterator[None]:
    """Context for `save_pretrained` without progress bars and without its slow import of DeepSpeed."""
    with without_progress_bars(), contextlib.ExitStack() as stack:
        if "deepspeed" not in sys.modules:
            stack.enter_context(_patched("accelerate.utils.other", "is_deepspeed_available", lambda: False))
        yield


@contextlib.contextmanager
def _patched(module_name: str, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module, if both exist, inside the block."""
    module = sys.modules.get(module_name)
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, value)
    try:
        yield
    finally:
        if original is not None:
            setattr(module, name, original)


def _unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous weights, one name for each; views that overlap without being the same weight are copied."""
    first: dict[tuple, str] = {}
    storages: set[int] = set()
    result = {}
    for name, tensor in weights.items():
        if first.setdefault(_identity(tensor), name) != name:
            continue
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.detach().clone() if storage in storages else tensor.detach().contiguous()
        storages.add(storage)
    return result


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy a model's tokenizer and the description of its fine-tuning task; False if there is no tokenizer."""
    files = {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}
    for file in files:
        shutil.copyfile(file, target / file.name)
    return any(file.name != TASK_FILE for file in files)


# ---- loading --------------------------------------------------------------------------------------------------------
def load_weights(
    model: nn.Module,
    source: Path | str,
    *,
    allow_partial: bool | None = False,
    allow_pickle: bool = False,
    verified: bool = False,
) -> LoadReport:
    """Load all weights of `source` into `model`, or none of them; dtype and device are the model's.

    Args:
        source: a checkpoint of ours, a Hugging Face directory, a `.safetensors` file, a t5-experiments `model_N.pth`,
            a nanoT5 `pytorch_model.bin`, or a t5x folder.
        allow_partial: load weights that match by name and shape, and report the others. None is False with an error
            message that does not suggest --allow_partial_checkpoint.
        allow_pickle: see `legacy.read_pickle`.
        verified: the files have already been compared with the manifest.

    Missing weights are allowed if the model ties them to loaded ones or never saves them.

    Raises:
        UserError: `source` cannot be read, nothing matches, tied weights differ, or, without `allow_partial`, a weight
            is missing, unexpected or of another shape.
    """
    path = Path(source)
    if is_adapted(model):
        return LoadReport(matched=read_adapter_into(model, path))
    return place_weights(model, read_weights(path, allow_pickle, verified=verified), path, allow_partial=allow_partial)


def place_weights(
    model: nn.Module, weights: dict[str, Tensor], path: Path, *, allow_partial: bool | None = False
) -> LoadReport:
    """Copy weights, by the names of the model, into it, with the checks of `load_weights`; messages name `path`."""
    # All checks come before the first copy: a refused file leaves the model as it was.
    own, weights = model.state_dict(keep_vars=True), to_model_names(model, weights)
    report = _compare(model, own, weights, may_grow=allow_partial is not None)
    if not report.matched:
        raise UserError(
            f"no weight in {path} fits the model: {report}; the file is of another architecture, or its parameters "
            "have other names."
        )
    if report.dropped or (not allow_partial and not report.is_complete):
        advice = "" if allow_partial is None else ", or pass --allow_partial_checkpoint to load only what fits"
        if report.dropped:
            advice = f"; {report.dropped[0][0]} is never dropped: it may get more rows, not fewer or others"
        raise UserError(f"{path} does not fit the model: {report}; check --model_cfg and --model_cls{advice}.")
    _check_tied(own, weights, report, path)
    with torch.no_grad():
        for name in report.matched:
            own[name][tuple(map(slice, weights[name].shape))].copy_(weights[name])
    return report


def _compare(model: nn.Module, own: dict[str, Tensor], weights: dict[str, Tensor], may_grow: bool) -> LoadReport:
    # Classes of transformers list patterns of weights that old files have and the model does not.
    obsolete = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    common = [name for name in weights if name in own]
    differing = {n: (tuple(weights[n].shape), tuple(own[n].shape)) for n in common if weights[n].shape != own[n].shape}
    rows = _rows_of_embeddings(model, own, differing)
    grown = [(name, *differing[name]) for name in rows if may_grow and rows[name] and not weights[name].is_meta]
    names = {name for name, _, _ in grown}
    matched = [name for name in common if name not in differing or name in names]
    mismatched = [(name, *shapes) for name, shapes in differing.items() if name not in names]
    dropped = [entry for entry in mismatched if entry[0] in rows]
    loaded = {_identity(own[name]) for name in matched}
    absent = [name for name in own if name not in weights and name not in unsaved]
    missing = [name for name in absent if _identity(own[name]) not in loaded]
    unexpected = [
        name for name in weights if name not in own and not any(re.search(pattern, name) for pattern in obsolete)
    ]
    return LoadReport(matched, missing, unexpected, mismatched, grown, dropped)


def _rows_of_embeddings(
    model: nn.Module, own: dict[str, Tensor], differing: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> dict[str, bool]:
    """Weights of another shape with a value for each token or position: {name: True if only rows are new}.

    They are embeddings, the output layer and its bias; not tables of relative distances, whose rows change meaning.
    """
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not re.search("rel|distance", name)
    }
    output = getattr(model, "get_output_embeddings", lambda: None)()
    tables |= {name for name in differing if output is not None and own[name] is output.weight}
    changes = {(then[0], now[0]) for name, (then, now) in differing.items() if name in tables}
    found = {}
    for name, (then, now) in differing.items():
        changed = [pair for pair in zip(then, now, strict=False) if pair[0] != pair[1]]
        if name in tables or ("bias" in name and changed and changed[0] in changes):
            found[name] = len(then) == len(now) and len(changed) == 1 and changed[0] in changes and then < now
    return found


def _check_tied(own: dict[str, Tensor], weights: dict[str, Tensor], report: LoadReport, path: Path) -> None:
    """In a tied model the lm_head of a v1.1 file would silently overwrite the embedding."""
    first: dict[tuple, str] = {}
    for name in report.matched:
        other = first.setdefault(_identity(own[name]), name)
        if other != name and not torch.equal(weights[other], weights[name]):
            raise UserError(
                f"{path} has different values for {other} and {name}, but the model ties them into one weight: set "
                "tie_word_embeddings to false in --model_cfg (T5 v1.1), or use the configuration of the file."
            )


def _identity(tensor: Tensor) -> tuple:
    """Equal for two names of one weight. Empty and meta tensors, which have no address, are compared by object."""
    pointer = tensor.data_ptr() if not tensor.is_meta else 0
    return (tensor.device, pointer, tuple(tensor.shape), tensor.stride()) if pointer else (id(tensor),)


def read_state(model: nn.Module, path: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Read the weights in `path` and convert them to the names of `model.state_dict()`.

    For a model with a PEFT adapter these are only the adapter's weights.
    """
    if is_adapted(model):
        return read_adapter(model, path)
    weights, own = to_model_names(model, read_weights(path, allow_pickle)), model.state_dict(keep_vars=True)
    by_tensor = {id(tensor): weights[name] for name, tensor in own.items() if name in weights}
    tied = {n: by_tensor[id(tensor)] for n, tensor in own.items() if n not in weights and id(tensor) in by_tensor}
    return {**weights, **tied}


def read_weights(path: Path, allow_pickle: bool = False, *, verified: bool = False) -> dict[str, Tensor]:
    """Read the state dict in `path` on the CPU; see `load_weights` for the formats. Raises UserError."""
    if path.is_dir():
        return _read_directory(path, allow_pickle, verified)
    if not path.is_file():
        raise UserError(f"the checkpoint {path} does not exist.")
    if not verified and is_listed(path):
        verify_model(path.parent, [path.name])
    return _read_file(path, allow_pickle)


def _read_directory(path: Path, allow_pickle: bool, verified: bool) -> dict[str, Tensor]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        index, read = f"{single}.index.json", []
        if (path / index).is_file():
            read, names = [index], shards_of(path / index)
        elif (path / single).is_file():
            names = [single]
        else:
            continue
        if missing := [name for name in names if not (path / name).is_file()]:
            raise UserError(f"{path / missing[0]} is missing, though {index} lists it: copy it again.")
        if not verified:
            verify_model(path, [*read, *names])
        weights: dict[str, Tensor] = {}
        for name in names:
            weights.update(_read_file(path / name, allow_pickle))
        return weights
    if is_t5x(path):
        return read_t5x(path)
    if (path / ADAPTER_CONFIG).is_file():
        raise UserError(f"{path} holds an adapter, not a whole model: name it by --from_pretrained.")
    is_run = named_checkpoint(path / "last").is_dir()
    hint = f": name {path / 'last'} or {path / 'best'} of this run directory" if is_run else ""
    raise UserError(f"{path} has no weights (model.safetensors, its shards or pytorch_model.bin){hint}.")


def _read_file(path: Path, allow_pickle: bool) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        return state_dict_of(read_pickle(path, allow_pickle=allow_pickle), path)
    return strip_wrappers(load_tensors(path))


@torch.no_grad()
def mean_state(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the weights of several state dicts, summed in float64; integer tensors are those of the first.

    The states are read one after another, so only one of them and the sums are in memory.
    """
    others = iter(states)
    first, number = dict(next(others)), 1
    floats = {name: value for name, value in first.items() if value.is_floating_point()}
    sums = {name: value.to("cpu", torch.float64, copy=True) for name, value in floats.items()}
    for state in others:
        number += 1
        for name, total in sums.items():
            total += state[name].cpu()
    return {**first, **{name: (total / number).to(first[name].dtype) for name, total in sums.items()}}
