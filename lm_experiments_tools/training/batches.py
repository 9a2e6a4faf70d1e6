"""Endless batches of a user's data loader, from a position that checkpoints save and a restarted run restores.

How a restarted run finds its position in the data depends on the methods of the loader:

- `seek(consumed_samples)`, as in `data.loader.TrainLoader`: jumps there in O(1).
- `state_dict` and `load_state_dict`, as in torchdata's `StatefulDataLoader`: restores the loader's own state.
- any other iterable, such as a torch `DataLoader`: starts the epoch again with the random states of its start, and
  skips the batches that were used. The random states are those of the process, and of a `torch.Generator` that the
  loader, a sampler or the dataset has as its attribute `generator`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.training.generators import preserved_random_state, random_state, set_random_state
from lm_experiments_tools.training.micro_batches import has_rows
from lm_experiments_tools.training.profiling import DATA_WAIT

if TYPE_CHECKING:
    from lm_experiments_tools.checkpoint.train_state import TrainState

logger = logging.getLogger(__name__)

_END = object()  # of an epoch


class BatchStream:
    """Endless iterator over the training batches of this worker, whose position can be saved and restored.

    Each item is a pair: the batch, and the seconds that the worker waited for it.

    Args:
        loader: yields dicts of tensors with equal first dimension.
        sampler: its `set_epoch` is called at the start of each epoch, as that of each part of the loader.

    Attributes:
        seeks: True if the loader has `seek`. It must then draw no global random numbers.
    """

    def __init__(self, loader: Iterable[Mapping[str, Any]], sampler: Any = None) -> None:
        self.loader, self.sampler = loader, sampler
        self.epoch = self.rows_in_epoch = 0
        self.seeks = hasattr(loader, "seek")
        # Accelerate's wrapper defines these methods for every loader. They work only if the wrapped loader has them.
        inner = getattr(loader, "base_dataloader", loader)
        self._is_stateful = hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")
        self._epoch_start: dict[str, Any] | None = None  # random states; None before the first epoch
        self._restart: Mapping[str, Any] | None = None  # `state_dict` to restore before the next batch
        self._random_state: dict[str, Any] | None = None  # global random states to restore before the next batch

    @property
    def fingerprint(self) -> str | None:
        """Hash of the training data and its order; a resumed run must read the same. None if the loader has none."""
        return getattr(self.loader, "fingerprint", None)

    @property
    def order(self) -> str | None:
        """Hash of only the order in which rows of the token files are read; None if the loader has none."""
        return getattr(getattr(self.loader, "dataset", None), "order", None)

    def seek(self, run: TrainState, state: Mapping[str, Any] | None, order: str | None = None) -> None:
        """Continue the iteration at the position in the data that a checkpoint has saved. Raises UserError.

        `state` is this worker's saved `state_dict`; None if the number of workers has changed. `order` is the property
        of the saved run, given if a new run skips the rows that it used (`--skip_used_data`).
        """
        fingerprint, same_rows = run.data_fingerprint, order is not None and order == self.order
        if not same_rows and fingerprint != self.fingerprint:
            raise UserError(
                "the training data, its vocabulary, sequence lengths, span lengths, order (--bucket_rows, --mix_rows) "
                "or --seed are not those of the checkpoint, so its position in the data has no meaning; restore them, "
                "or start a new --model_path by --init_checkpoint without --skip_used_data"
            )
        if state is None and not self.seeks:
            raise UserError(
                "the checkpoint was saved by another number of workers, and this data loader has no seek() to find "
                "the position for the new number; continue with the same number of workers"
            )
        if self.seeks:
            self.loader.seek(run.data_position())
            return
        self.epoch, self.rows_in_epoch = state["epoch"], state["rows_in_epoch"]
        self._restart = state

    def state_dict(self) -> dict[str, Any]:
        """This worker's position in the training data before the next batch, for a checkpoint."""
        if self._restart is not None:
            return dict(self._restart)
        state = {"epoch": self.epoch, "rows_in_epoch": self.rows_in_epoch, "epoch_start": self._epoch_start}
        if self._is_stateful and self._epoch_start is not None:
            state["loader"] = self.loader.state_dict()
        return state

    def random_state(self) -> dict[str, Any]:
        """The process's random states before the next batch, which a checkpoint saves together with `state_dict`."""
        return self._random_state or random_state()

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Set this process's random states, saved by `random_state`, just before the next batch is fetched."""
        self._random_state = state

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], float]]:
        """Batches without end. Raises RunError where a loader with `seek` ends."""
        started = time.perf_counter()
        batches = self._first_epoch()
        while True:
            with torch.profiler.record_function(DATA_WAIT):
                while (batch := next(batches, _END)) is _END:
                    self._end_epoch()
                    batches = self._start_epoch()
            if batch is None:
                raise UserError(
                    f"the training data loader gave None in place of a batch in epoch {self.epoch}: leave bad rows "
                    "out in the dataset, or return the others from collate_fn"
                )
            if not self.seeks:
                self.rows_in_epoch += num_rows_in(batch)
            yield batch, time.perf_counter() - started
            started = time.perf_counter()

    def _first_epoch(self) -> Iterator[Mapping[str, Any]]:
        """The rest of the checkpoint's epoch, or a new epoch if there is none."""
        restart, self._restart = self._restart, None
        rest = None if restart is None or restart["epoch_start"] is None else self._rest_of_epoch(restart)
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        return self._start_epoch() if rest is None else rest

    def _start_epoch(self) -> Iterator[Mapping[str, Any]]:
        if not self.seeks:
            self._set_epoch()
            generators = [None if g is None else g.get_state() for g in _generators_of(self.loader)]
            self._epoch_start = {"random_state": random_state(), "generators": generators}
        return iter(self.loader)

    def _set_epoch(self) -> None:
        for part in (self.sampler, *_parts_of(self.loader)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)

    def _end_epoch(self) -> None:
        if self.seeks:
            raise RunError("the training data loader has come to an end, but one with seek() must go on for ever")
        if self.rows_in_epoch == 0:
            raise UserError(
                f"the training data gave no batch in epoch {self.epoch}: the dataset is empty, or smaller than one "
                "batch with drop_last=True"
            )
        self.epoch, self.rows_in_epoch = self.epoch + 1, 0

    def _rest_of_epoch(self, restart: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The epoch of `restart` without the batches used before the checkpoint. Global random states are kept."""
        self._set_epoch()
        self._epoch_start = restart["epoch_start"]
        with preserved_random_state():
            is_stateful = self._is_stateful and "loader" in restart
            if getattr(self.loader, "persistent_workers", False) and not is_stateful:
                logger.warning(
                    "the training data loader has persistent_workers, whose random numbers no checkpoint holds: a "
                    "dataset that draws any draws others after this restart; it is exact with persistent_workers=False"
                )
                # Persistent workers draw their base seed once, when they start. Without the interruption that was in
                # the first epoch, so here they start before the random states of a later epoch are restored.
                if self.epoch:
                    iter(getattr(self.loader, "base_dataloader", self.loader))
            set_random_state(self._epoch_start["random_state"])
            for generator, state in zip(_generators_of(self.loader), self._epoch_start["generators"], strict=False):
                if generator is not None and state is not None:
                    generator.set_state(state)
            # After the random states: torchdata draws the epoch's order again, unless the sampler has saved it.
            if is_stateful:
                self.loader.load_state_dict(restart["loader"])
                return iter(self.loader)
            return self._skip_used(iter(self.loader))

    def _skip_used(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Skip `rows_in_epoch` rows of an epoch's batches. Raises UserError if there are fewer."""
        # Rows are counted, not batches, so that a restart may have another batch size.
        used = 0
        while used < self.rows_in_epoch:
            if (batch := next(batches, _END)) is _END:
                raise UserError(
                    f"the checkpoint had used {self.rows_in_epoch} rows of epoch {self.epoch}, but the training data "
                    f"now gives only {used}: it is not the data the run was started with"
                )
            used += (rows := num_rows_in(batch))
        if used == self.rows_in_epoch:
            return batches
        # The batches may have another size than before the restart, so one of them may be used in part.
        unused = slice(rows - (used - self.rows_in_epoch), None)
        rest = {name: value[unused] if has_rows(value, rows) else value for name, value in batch.items()}
        return chain([rest], batches)


def _parts_of(loader: Any) -> list[Any]:
    """The loader, its samplers and datasets."""
    found = [loader]
    for part in found:
        inner = (getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset"))
        found += [one for one in inner if one is not None and not any(one is seen for seen in found)]
    return found


def _generators_of(loader: Any) -> list[torch.Generator | None]:
    """The attribute `generator` of each part of a loader; None if it is no `torch.Generator`."""
    declared = (getattr(part, "generator", None) for part in _parts_of(loader))
    return [generator if isinstance(generator, torch.Generator) else None for generator in declared]


def sampler_of(loader: Any) -> Any:
    """The sampler from which a torch `DataLoader` takes the numbers of rows; None if there is none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader if batch_sampler is None else batch_sampler, "sampler", None)


def is_split(loader: Any) -> bool:
    """True if a loader declares that it yields only this worker's part of the data.

    Accelerate's loaders do, those with `world_size`, and those with a sampler or batch sampler with `num_replicas`.
    """
    samplers = sampler_of(loader), getattr(loader, "batch_sampler", None)
    is_declared = hasattr(loader, "world_size") or any(hasattr(sampler, "num_replicas") for sampler in samplers)
    return is_declared or hasattr(loader, "end_of_dataloader")


def num_rows_in(batch: Any) -> int:
    """Rows of a batch: the length of its first tensor; 1 where there is none."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)
