"""Random states of the process and of a data loader's generators: captured, restored, seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from lm_experiments_tools.files import to_jsonable

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_COUNTERS = ("epoch", "iteration", "initial_seed")  # samplers derive their order from these
_NOT_ENTERED = (type, ModuleType, FunctionType, torch.Tensor, torch.nn.Module)


def random_state() -> dict[str, Any]:
    """State of every generator a training step may draw from: Python, numpy, torch, this worker's GPU."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state = {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*key: int) -> None:
    """Seed every generator of `random_state` with a hash of non-negative integers."""
    first, second, third, fourth = np.random.SeedSequence(key).generate_state(4).tolist()
    torch.manual_seed(first << 32 | second)  # GPUs too
    np.random.seed(third)
    random.seed(fourth)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random states on exit."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


class Generators:
    """Random generators and epoch counters of a data loader, by path: `batch_sampler.sampler.generator`.

    Found are generators in attributes of the loader, at any depth of attributes (`vars`), and the `epoch`, `iteration`
    and `initial_seed` from which samplers derive an order.
    """

    def __init__(self, root: Any) -> None:
        self.held: dict[str, Any] = {}
        self.counters: dict[str, tuple[Any, str]] = {}
        seen, todo = {id(root)}, [("", root)]
        for path, owner in todo:  # breadth first: the path to each generator is the shortest
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                inner = f"{path}.{name}" if path else name
                if name in _COUNTERS and type(value) is int:
                    self.counters[inner] = (owner, name)
                if id(value) in seen or isinstance(value, _NOT_ENTERED) or name == "_iterator":
                    continue
                seen.add(id(value))
                if isinstance(value, _GENERATORS):
                    self.held[inner] = value
                else:
                    todo.append((inner, value))

    def state(self) -> dict[str, Any]:
        """State of each generator and counter, by path."""
        counts = {path: getattr(owner, name) for path, (owner, name) in self.counters.items()}
        return {**{path: _state_of(generator) for path, generator in self.held.items()}, **counts}

    def restore(self, state: Mapping[str, Any]) -> set[str]:
        """Restore what `state` returned. Returns the paths that only one of the two has."""
        for path in state.keys() & self.held.keys():
            _set_state(self.held[path], state[path])
        for path in state.keys() & self.counters.keys():
            owner, name = self.counters[path]
            setattr(owner, name, state[path])
        return state.keys() ^ (self.held.keys() | self.counters.keys())


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
