"""Nested Python state in a JSON file (structure and scalars) and a safetensors file (arrays), without pickle.

    save_tree(dir / "optimizer", {"state": {0: {"step": tensor(3.)}}, "lr": 0.1, "betas": (0.9, float("inf"))})
    optimizer.json         {"state": {"$dict": [[0, {"step": {"$tensor": "0"}}]]}, "lr": 0.1,
                            "betas": {"$tuple": [0.9, {"$float": "inf"}]}}
    optimizer.safetensors  "0": F32 []

Dicts with string keys stay JSON objects; other types are marked by a `$` key. Where workers hold slices of tensors
(`SlicedTensor`), each writes a file of its own::

    optimizer.json         {"$files": 2, "tree": {"exp_avg": {"$slices": ["slice 0", [2, 3], [[0, 3], [3, 6]]]}}}
    optimizer-00001-of-00002.safetensors   "slice 0": F32 [3]
    optimizer-00002-of-00002.safetensors   "slice 0": F32 [3]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lm_experiments_tools.backends.slices import SlicedTensor
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import apply_umask, naming

WriteTensors = Callable[..., None]  # (tensors, file, metadata=None)
_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_UNSUPPORTED_DTYPES = (torch.complex128, torch.complex32)


# ---- safetensors files ----------------------------------------------------------------------------------------------
def write_now(tensors: dict[str, Tensor], file: Path | str, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file that has the permissions of the umask. Raises OSError, SafetensorError."""
    save_file(tensors, file, metadata=metadata)
    apply_umask(Path(file))


class WorkersFiles:
    """Safetensors files that this worker writes of a checkpoint, at once or, postponed, on the call of `write`.

    Postponed tensors stay in host memory. `written` are the files, in the order of their writing.
    """

    def __init__(self, *, is_postponed: bool) -> None:
        self.is_postponed = is_postponed
        self.written: list[Path] = []
        self._waiting: list[tuple[dict[str, Tensor], Path, dict[str, str] | None]] = []

    def copy(self, tensors: Mapping[str, Tensor], file: Path | str, metadata: dict[str, str] | None = None) -> None:
        """Write tensors that may change later, of which postponed files need copies."""
        if self.is_postponed:
            contiguous = torch.contiguous_format
            tensors = {n: t.detach().to("cpu", copy=True, memory_format=contiguous) for n, t in tensors.items()}
        self.keep(dict(tensors), file, metadata)

    def keep(self, tensors: dict[str, Tensor], file: Path | str, metadata: dict[str, str] | None = None) -> None:
        """Write tensors that nothing else changes. Raises OSError, SafetensorError."""
        self.written.append(Path(file))
        if self.is_postponed:
            self._waiting.append((tensors, Path(file), metadata))
        else:
            write_now(tensors, file, metadata)

    def write(self) -> None:
        """Write all postponed files and free their tensors. Raises OSError, SafetensorError."""
        while self._waiting:
            write_now(*self._waiting.pop(0))


def sharded_name(stem: str, rank: int, number: int) -> str:
    """Name of a worker's file, in the format of Hugging Face's shards, such as model-00001-of-00008.safetensors."""
    return f"{stem}-{rank + 1:05}-of-{number:05}.safetensors"


def load_tensors(file: Path, advice: str = "it is truncated or corrupt; copy it again") -> dict[str, Tensor]:
    """Load a safetensors file on the CPU, memory-mapped. Raises UserError, whose message ends with `advice`."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}): {advice}.") from error


def as_os_error(error: Exception, path: Path) -> OSError:
    """Convert the exception of a Rust library, whose text contains such as "(os error 28)", to an OSError."""
    if isinstance(error, OSError):
        return error
    text = str(error)
    number = text.partition("(os error ")[2].partition(")")[0]
    return OSError(int(number), text, str(path)) if number.isdigit() else OSError(f"{path}: {text}")


# ---- trees ----------------------------------------------------------------------------------------------------------
def tree_files(path_stem: Path | str) -> list[Path]:
    """List the files of a state that `save_tree` has saved: STEM.json, and STEM.safetensors or those of workers."""
    stem = Path(path_stem)
    sharded = sorted(stem.parent.glob(f"{stem.name}-*-of-*.safetensors"))
    return [Path(f"{stem}.json"), *(sharded or [Path(f"{stem}.safetensors")])]


Ranges = list[list[list[int]]]  # [worker][slice of its tree] = [start, stop]


def slice_ranges(tree: Any) -> list[list[int]]:
    """Ranges of elements, [start, stop], of the slices in this worker's tree, in the tree's order."""
    parts = [leaf.parts for leaf in tree_leaves(tree) if isinstance(leaf, SlicedTensor)]
    return [[part[0][0], part[0][0] + len(part[0][1])] if part else [0, 0] for part in parts]


def save_tree(
    path_stem: Path | str, tree: Any, *, write: WriteTensors = write_now, rank: int = 0, ranges: Ranges | None = None
) -> None:
    """Save nested Python state to STEM.json and STEM.safetensors, bit-exactly.

    Supported are dict, list, tuple, None, bool, int, float (also NaN and infinity), str, dense tensors, and real
    numpy arrays and scalars, which are loaded as tensors and Python numbers. Dict keys keep their type and order. A
    tensor that occurs twice is stored once and loaded as one object. `requires_grad` and shared storage are lost.

    Args:
        write: f(tensors, file), which gets copies of the tensors.
        rank: of this worker. Workers other than rank 0 write only their slices.
        ranges: `slice_ranges` of all workers' trees, if they hold slices.

    Raises:
        TypeError: another type; the message names its place in the tree.
        OSError, SafetensorError: the files cannot be written.
    """
    encoder = _Encoder(rank, ranges)
    structure = encoder.encode(tree, "")
    if ranges is not None:
        structure = {"$files": len(ranges), "tree": structure}
    stem = Path(path_stem)
    name = f"{stem.name}.safetensors" if ranges is None else sharded_name(stem.name, rank, len(ranges))
    write(encoder.tensors, stem.with_name(name))
    if rank == 0:
        json_file = Path(f"{stem}.json")
        # The file is flushed to the disk with the others, before the checkpoint is committed.
        with naming(json_file):
            json_file.write_text(json.dumps(structure, allow_nan=False, ensure_ascii=True), encoding="utf-8")


def load_tree(path_stem: Path | str, *, mapped: bool = False) -> Any:
    """Load the result of `save_tree`, with tensors on the CPU, and `SlicedTensor`s of the files of all workers.

    Tensors may stay memory-mapped (`mapped`), as long as the file exists. UserError for a missing or corrupt file.
    """
    stem, advice = Path(path_stem), "restore the file or use an older checkpoint"
    json_file = Path(f"{stem}.json")
    try:
        structure = json.loads(json_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{json_file} cannot be read ({error}): {advice}.") from error
    names = [f"{stem.name}.safetensors"]
    if isinstance(structure, dict) and "$files" in structure:
        number, structure = structure["$files"], structure["tree"]
        names = [sharded_name(stem.name, rank, number) for rank in range(number)]
    files = [load_tensors(stem.with_name(name), advice) for name in names]
    if not mapped:
        files = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in files]
    try:
        return _decode(structure, files)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{json_file} and {names[0]} are not from the same save ({error!r}).") from error


class _Encoder:
    def __init__(self, rank: int, ranges: Ranges | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._is_main = rank == 0
        self._slices = enumerate(zip(*(ranges or []), strict=True))  # ranges of each slice, by worker
        self._names: dict[int, str] = {}
        # An id stays unique only while its object lives.
        self._alive: list[Any] = []

    def encode(self, node: Any, where: str) -> Any:
        if isinstance(node, np.generic):
            node = node.item()
        kind = type(node)
        if node is None or kind in (bool, int, str):
            return node
        if kind is float:
            return node if math.isfinite(node) else {"$float": str(node)}
        if isinstance(node, dict):
            return self._encode_dict(node, where)
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(node)]
            return items if kind is list else {"$tuple": items}
        if isinstance(node, (Tensor, np.ndarray)):
            return {"$tensor": self._store(node, where)} if self._is_main else None
        if isinstance(node, SlicedTensor):
            # All workers hold slices of the same tensors in the same order, so a number names a tensor on all of them.
            number, ranges = next(self._slices)
            for _, values in node.parts:
                self.tensors[f"slice {number}"] = _dense_copy(values, where)
            return {"$slices": [f"slice {number}", list(node.shape), list(ranges)]}
        raise _unsupported(node, where)

    def _encode_dict(self, node: dict, where: str) -> Any:
        items = []
        for key, value in node.items():
            key = key.item() if isinstance(key, np.generic) else key
            if key is not None and type(key) not in (bool, int, float, str):
                raise TypeError(f"key {key!r} of {where or 'the tree'} is a {type(key).__name__}, not str or a number")
            items.append((key, self.encode(value, f"{where}[{key!r}]")))
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": [[self.encode(key, where), value] for key, value in items]}

    def _store(self, array: Tensor | np.ndarray, where: str) -> str:
        if id(array) not in self._names:
            name = self._names[id(array)] = str(len(self.tensors))
            self.tensors[name] = _dense_copy(array, where)
            self._alive.append(array)
        return self._names[id(array)]


def _dense_copy(array: Tensor | np.ndarray, where: str) -> Tensor:
    """A contiguous CPU tensor that shares memory with no other: safetensors refuses shared and strided ones."""
    if isinstance(array, np.ndarray):
        if type(array) not in (np.ndarray, np.memmap) or array.dtype.kind not in "biuf":
            raise _unsupported(array, where)
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    is_dense = type(array) in _TENSOR_CLASSES and array.layout == torch.strided and not array.is_quantized
    if not is_dense or array.is_meta or array.dtype in _UNSUPPORTED_DTYPES:
        raise _unsupported(array, where)
    return torch.empty(array.shape, dtype=array.dtype).copy_(array.detach())


def _unsupported(node: Any, where: str) -> TypeError:
    detail = f" ({node.dtype}, {node.layout}, {node.device})" if isinstance(node, Tensor) else ""
    name = f"{type(node).__module__}.{type(node).__qualname__}"
    return TypeError(f"{where or 'the tree'} is a {name}{detail}, which a checkpoint cannot hold without pickle")


def _decode(node: Any, files: list[dict[str, Tensor]]) -> Any:
    """`files` are those of the workers; plain tensors are in the first."""
    if isinstance(node, list):
        return [_decode(item, files) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        (tag, content), *_ = node.items()
        if tag == "$tensor":
            return files[0][content]
        if tag == "$slices":
            name, shape, ranges = content
            parts = [(start, files[rank][name]) for rank, (start, stop) in enumerate(ranges) if start < stop]
            # Only a tensor without elements has no slice with elements.
            if not parts:
                return torch.empty(shape)
            return SlicedTensor(torch.Size(shape), tuple(sorted(parts, key=lambda part: part[0])))
        if tag == "$tuple":
            return tuple(_decode(item, files) for item in content)
        if tag == "$float":
            return float(content)
        if tag == "$dict":
            return {_decode(key, files): _decode(value, files) for key, value in content}
    return {key: _decode(value, files) for key, value in node.items()}
