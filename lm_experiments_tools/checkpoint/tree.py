"""Nested Python state <-> one JSON file (structure and scalars) plus one safetensors file (arrays). No pickle.

    save_tree(dir / "optimizer", {"state": {0: {"step": tensor(3.)}}, "lr": 0.1, "betas": (0.9, float("inf"))})
    optimizer.json         {"state": {"$dict": [[0, {"step": {"$tensor": "0"}}]]}, "lr": 0.1,
                            "betas": {"$tuple": [0.9, {"$float": "inf"}]}}
    optimizer.safetensors  "0": F32 []

Dicts with plain string keys stay JSON objects; what JSON cannot say carries a `$` tag.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lm_experiments_tools.checkpoint.tensor_files import WriteTensors, write_now
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import naming

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_UNSUPPORTED_DTYPES = (torch.complex128, torch.complex32)


def tree_files(path_stem: Path | str) -> tuple[Path, Path]:
    """The two files of a tree: `STEM.json`, `STEM.safetensors` (dots inside the stem are kept)."""
    return Path(f"{path_stem}.json"), Path(f"{path_stem}.safetensors")


def save_tree(path_stem: Path | str, tree: Any, *, write: WriteTensors = write_now) -> None:
    """Write `tree` to `STEM.json` and `STEM.safetensors`, bit-exactly; neither is flushed to the disk yet.

    Leaves: None, bool, int, float (NaN and infinities too), str, dense torch tensors on any device, numpy scalars
    (become Python numbers) and numeric numpy arrays (become tensors). Nodes: dict (keys None, bool, int, float, str,
    kept with their type and order), list, tuple. A tensor met twice is stored once and comes back as one object;
    different views of one storage come back as separate tensors. `requires_grad` and subclasses of dict are not kept.

    Args:
        write: gets copies of the tensors.

    Raises:
        TypeError: names the place in the tree of anything else.
        OSError: the disk refused.
    """
    encoder = _Encoder()
    structure = encoder.encode(tree, "")
    json_file, tensor_file = tree_files(path_stem)
    try:
        write(encoder.tensors, tensor_file)
    except SafetensorError as error:
        raise as_os_error(error, tensor_file) from error
    with naming(json_file):  # flushed with the whole checkpoint, which takes its name after that
        json_file.write_text(json.dumps(structure, allow_nan=False, ensure_ascii=True), encoding="utf-8")


def load_tree(path_stem: Path | str, *, mapped: bool = False) -> Any:
    """Read back what `save_tree` wrote; tensors are on the CPU and own their memory.

    Args:
        mapped: leave the tensors in the file, from which they are read when they are copied; for a tree that nobody
            keeps, because the file of a checkpoint that is pruned or overwritten is gone.

    Raises:
        UserError: a file is missing, truncated or is not a tree; names the file.
    """
    json_file, tensor_file = tree_files(path_stem)
    try:
        structure = json.loads(json_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{json_file} cannot be read ({error}): restore the file or use an older checkpoint."
        ) from error
    tensors = load_tensors(tensor_file, "restore the file or use an older checkpoint")
    if not mapped:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        return _decode(structure, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{json_file} does not describe the tensors in {tensor_file.name} ({error!r}): the two files are not from "
            "the same save."
        ) from error


def load_tensors(file: Path, advice: str = "it is truncated or corrupt; copy it again") -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU, mapped from the file. Raises UserError, with `advice`."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}): {advice}.") from error


@contextmanager
def disk_errors_named(path: Path) -> Iterator[None]:
    """Name `path` where a library's error of a full disk names no file; tokenizers raises a bare Exception for it."""
    try:
        with naming(path):
            yield
    except Exception as error:
        if type(error) is not Exception or "(os error " not in str(error):
            raise
        raise as_os_error(error, path) from error


def as_os_error(error: Exception, path: Path) -> OSError:
    """The operating system's error inside a library's ("... (os error 28) ..."), as Python would raise it."""
    if isinstance(error, OSError):
        return error
    text = str(error)
    _, found, tail = text.partition("(os error ")
    number = tail.partition(")")[0]
    return OSError(int(number), text, str(path)) if found and number.isdigit() else OSError(f"{path}: {text}")


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # ids stay unique only while the objects live

    def encode(self, node: Any, where: str) -> Any:
        if isinstance(node, np.generic):
            node = self._from_numpy_scalar(node, where)
        kind = type(node)
        if node is None or kind in (bool, int, str):
            return node
        if kind is float:
            return node if math.isfinite(node) else {"$float": str(node)}
        if isinstance(node, dict):
            return self._encode_dict(node, where)
        if kind is list:
            return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(node)]
        if kind in (tuple, torch.Size):
            return {"$tuple": [self.encode(item, f"{where}[{i}]") for i, item in enumerate(node)]}
        if isinstance(node, (torch.Tensor, np.ndarray)):
            return {"$tensor": self._store(node, where)}
        raise self._unsupported(node, where)

    def _encode_dict(self, node: dict, where: str) -> Any:
        items = []
        for key, value in node.items():
            key = self._from_numpy_scalar(key, where) if isinstance(key, np.generic) else key
            if key is not None and type(key) not in (bool, int, float, str):
                raise TypeError(f"key {key!r} of {where or 'the tree'} is a {type(key).__name__}, not str or a number")
            items.append((key, self.encode(value, f"{where}[{key!r}]")))
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": [[self.encode(key, where), value] for key, value in items]}

    def _store(self, array: torch.Tensor | np.ndarray, where: str) -> str:
        if id(array) in self._names:
            return self._names[id(array)]
        name = str(len(self.tensors))
        self.tensors[name] = self._dense_copy(array, where)
        self._names[id(array)] = name
        self._alive.append(array)
        return name

    def _dense_copy(self, array: torch.Tensor | np.ndarray, where: str) -> torch.Tensor:
        """A contiguous CPU tensor that shares memory with no other: safetensors refuses shared and strided ones."""
        if isinstance(array, np.ndarray):
            if type(array) not in (np.ndarray, np.memmap):  # a masked array would lose its mask
                raise self._unsupported(array, where)
            try:
                return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
            except TypeError as error:
                raise TypeError(
                    f"{where or 'the tree'}: numpy dtype {array.dtype} has no tensor equivalent"
                ) from error
        plain = type(array) in _TENSOR_CLASSES and array.layout == torch.strided and not array.is_quantized
        if not plain or array.is_meta or array.dtype in _UNSUPPORTED_DTYPES:
            raise self._unsupported(array, where)
        copy = torch.empty(array.shape, dtype=array.dtype)
        return copy.copy_(array.detach())

    def _from_numpy_scalar(self, scalar: np.generic, where: str) -> Any:
        plain = scalar.item()
        if plain is not None and type(plain) not in (bool, int, float, str):
            raise self._unsupported(scalar, where)
        return plain

    @staticmethod
    def _unsupported(node: Any, where: str) -> TypeError:
        detail = f" ({node.dtype}, {node.layout}, {node.device})" if isinstance(node, torch.Tensor) else ""
        name = f"{type(node).__module__}.{type(node).__qualname__}"
        return TypeError(f"{where or 'the tree'} is a {name}{detail}, which a checkpoint cannot hold without pickle")


def _decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        (tag, content), *_ = node.items()
        if tag == "$tensor":
            return tensors[content]
        if tag == "$tuple":
            return tuple(_decode(item, tensors) for item in content)
        if tag == "$float":
            return _FLOATS[content]
        if tag == "$dict":
            return {_decode(key, tensors): _decode(value, tensors) for key, value in content}
    return {key: _decode(value, tensors) for key, value in node.items()}
