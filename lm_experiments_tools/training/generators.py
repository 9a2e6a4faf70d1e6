"""Save, restore and seed random number generators: the process's global ones, and those inside a data loader."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import to_jsonable
from lm_experiments_tools.names import is_of_user

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_COUNTERS = ("epoch", "iteration", "initial_seed")  # what torch's, Accelerate's and most samplers derive an order from
_NOT_ENTERED = (str, bytes, bytearray, type, ModuleType, torch.Tensor, torch.nn.Module, np.ndarray)
_MOST_OBJECTS, _MOST_ITEMS = 2000, 64  # rows of a dataset are no place for generators


def random_state() -> dict[str, Any]:
    """Read the states of the global random generators of Python, numpy and torch (CPU and this worker's GPU)."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        **torch_random_state(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators to the states that `random_state` has returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), position, has_gauss, cached))
    set_torch_random_state(state)


def torch_random_state(with_gpu: bool | None = None) -> dict[str, Tensor]:
    """Read the states of torch's global random generators.

    Args:
        with_gpu: True to include this worker's GPU; None includes it if there is one.
    """
    with_gpu = torch.cuda.is_available() if with_gpu is None else with_gpu
    gpu = {"cuda": torch.cuda.get_rng_state()} if with_gpu else {}
    return {"torch": torch.get_rng_state(), **gpu}


def set_torch_random_state(state: Mapping[str, Any]) -> None:
    """Set torch's global random generators to the states that `torch_random_state` has returned."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*key: int) -> None:
    """Seed the global random generators of Python, numpy and torch with a hash of the integers `key`.

    Args:
        key: non-negative integers, such as a seed and a rank.
    """
    first, second, third, fourth = np.random.SeedSequence(key).generate_state(4).tolist()
    torch.manual_seed(first << 32 | second)  # GPUs too
    np.random.seed(third)
    random.seed(fourth)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Context that restores the global random states at its end."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


class Generators:
    """The random generators and epoch counters inside an object such as a data loader, for saving in checkpoints.

    They are found by searching the object's attributes, and named by their path, such as
    `batch_sampler.sampler.generator`. Counters are the `epoch`, `iteration` and `initial_seed` of samplers.

    A user's functions are searched too: closures, defaults and globals. In containers of more than 64 entries only the
    entries themselves are examined.

    Raises:
        UserError: a generator's state cannot be saved (random.SystemRandom).
    """

    def __init__(self, root: Any) -> None:
        self.held: dict[str, Any] = {}
        self.counting: dict[str, tuple[Any, str]] = {}
        seen, todo = {id(root)}, [("", root)]
        for path, value in todo:  # breadth first, so that the path to each is the shortest
            if isinstance(value, random.SystemRandom):
                raise UserError(
                    f"the training data loader draws from {path}, a random.SystemRandom, which has no state: a "
                    "resumed run would read other rows; use random.Random(seed)"
                )
            if isinstance(value, _GENERATORS):
                self.held[path] = value
                continue
            for name, part in _parts(value):
                inner = f"{path}.{name}" if path else name
                if name in _COUNTERS and type(part) is int:
                    self.counting[inner] = (value, name)
                if id(part) not in seen and len(todo) < _MOST_OBJECTS:
                    seen.add(id(part))
                    todo.append((inner, part))

    def state(self) -> dict[str, Any]:
        """Read the states of all generators and the values of all counters, as {path: state or value}."""
        counts = {path: getattr(owner, name) for path, (owner, name) in self.counting.items()}
        return {**{path: _state_of(generator) for path, generator in self.held.items()}, **counts}

    def restore(self, state: Mapping[str, Any]) -> set[str]:
        """Set the generators and counters to a result of `state`.

        Returns:
            Paths that only the object or only `state` has, for example of a generator that is created later.
        """
        for path in state.keys() & self.held.keys():
            _set_state(self.held[path], state[path])
        for path in state.keys() & self.counting.keys():
            owner, name = self.counting[path]
            setattr(owner, name, state[path])
        return state.keys() ^ (self.held.keys() | self.counting.keys())


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Attributes or items of a value that may hold generators."""
    if isinstance(value, _NOT_ENTERED):
        return []
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        is_short = len(value) <= _MOST_ITEMS
        return [(str(key), item) for key, item in items if is_short or isinstance(item, _GENERATORS)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if (owner := getattr(value, "__self__", None)) is not None:  # a method
        return [("__self__", owner)]
    if isinstance(value, FunctionType):
        return list(_parts_of_function(value)) if is_of_user(value) else []
    attributes = getattr(value, "__dict__", None)  # the iterator of a loader holds queues and processes
    held = [item for item in attributes.items() if item[0] != "_iterator"] if isinstance(attributes, dict) else []
    return held + [part for cls in type(value).__mro__ if is_of_user(cls) for part in _parts_of_class(cls, value)]


def _parts_of_class(cls: type, instance: Any) -> Iterator[tuple[str, Any]]:
    """Values in `__slots__`, attributes of the class and its methods."""
    for name, part in vars(cls).items():
        if isinstance(part, MemberDescriptorType):
            yield name, getattr(instance, name, None)
        elif isinstance(part, (staticmethod, classmethod, FunctionType, *_GENERATORS)):
            yield f"{cls.__name__}.{name}", getattr(part, "__func__", part)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Values of the closure and of defaults; generators and functions among the globals that the code names."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    yield from ((str(i), value) for i, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    for name in sorted(_names(code)):
        if isinstance(value := function.__globals__.get(name), (FunctionType, *_GENERATORS)):
            yield name, value


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function's code and in that of the functions inside it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, internal, gauss_next = generator.getstate()
        return [version, list(internal), gauss_next]
    numpy_state = (
        generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state
    )
    return to_jsonable(numpy_state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, internal, gauss_next = state
        generator.setstate((version, tuple(internal), gauss_next))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
