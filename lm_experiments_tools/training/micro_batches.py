"""Batches for the loop: an endless stream from any loader, at a position that survives a restart, in micro-batches.

Three kinds of loaders are read. One that knows its place (`seek(consumed_samples)`, as `data.loader.TrainLoader`) is
sought in O(1). One with `state_dict` and `load_state_dict` (torchdata's `StatefulDataLoader`) is trusted with its own
place. Any other iterable, such as a torch `DataLoader`, is replayed: its epoch is started again with the random states
it was first started with, also of generators that it holds, and the batches already used are passed over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.alignment import aligned
from lm_experiments_tools.modules.labelled_head import LABEL_POSITIONS
from lm_experiments_tools.training.generators import (
    Generators,
    preserved_random_state,
    random_state,
    set_random_state,
)
from lm_experiments_tools.training.profile_table import DATA_WAIT
from lm_experiments_tools.training.targets import LABELS_MASK, Targets

if TYPE_CHECKING:
    from lm_experiments_tools.checkpoint.train_state import TrainState

logger = logging.getLogger(__name__)

_IDS = {"input_ids", "labels", "decoder_input_ids", "attention_mask", "decoder_attention_mask", "token_type_ids"}
_ALL_LABELS = Targets()
_EPOCH_START = {"epoch_random_state", "epoch_generators"}


class BatchStream:
    """This worker's batches, epoch after epoch.

    Args:
        loader: yields dicts of tensors with equal first dimension.
        sampler: optional; its `set_epoch` is called at the start of each epoch.

    Raises:
        UserError: the loader draws from what no checkpoint can hold.
    """

    def __init__(self, loader: Iterable[Mapping[str, Any]], sampler: Any = None) -> None:
        self.loader, self.sampler = loader, sampler
        self.epoch = self.rows_in_epoch = 0
        self._epoch_start: dict[str, Any] = dict.fromkeys(_EPOCH_START)
        self._restart: Mapping[str, Any] | None = None  # the `state_dict` that the next batch is fetched from
        self._seeks = hasattr(loader, "seek")
        inner = getattr(loader, "base_dataloader", loader)  # what Accelerate's wrapper, which has both, calls them of
        self._knows_place = not self._seeks and hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")
        self._generators = self._find_generators()
        self._workers_stay = bool(getattr(inner, "persistent_workers", False))
        held = [
            path for path in self._generators.held if path.startswith(("dataset", "collate_fn", "base_dataloader.d"))
        ]
        if self._workers_stay and held and not self._knows_place:
            raise UserError(
                f"the training data loader's workers draw from copies of {held[0]}, which live on from epoch to epoch "
                "out of a checkpoint's reach: set persistent_workers=False"
            )

    @property
    def fingerprint(self) -> str | None:
        """Of the training data and its order; None for loaders that have none."""
        return getattr(self.loader, "fingerprint", None)

    @property
    def order(self) -> str | None:
        """Of the order of rows alone, which objectives on rows of one length share; None where unknown."""
        return getattr(getattr(self.loader, "dataset", None), "order", None)

    def seek(self, run: TrainState, state: Mapping[str, Any] | None, order: str | None = None) -> None:
        """Go to where a checkpoint was taken.

        Args:
            run: samples consumed over all workers, and the data's fingerprint.
            state: this worker's `state_dict`; None where another number of workers saved it.
            order: of the checkpoint's rows, for another run that skips them (`--skip_used_data`).

        Raises:
            UserError: the data is not the checkpoint's, or the position cannot be found without `state`.
        """
        fingerprint, same_rows = run.data_fingerprint, order is not None and order == self.order
        if not same_rows and fingerprint not in (self.fingerprint, *getattr(self.loader, "earlier_fingerprints", ())):
            raise UserError(position_lost(fingerprint, self.fingerprint))
        if state is None and fingerprint is None:
            raise UserError(
                "the checkpoint was saved by another number of workers, and this data loader has no seek() to find "
                "the position for the new number; continue with the same number of workers"
            )
        if self._seeks:
            self.loader.seek(run.consumed_samples)
            return
        self.epoch, self.rows_in_epoch = state["epoch"], state["rows_in_epoch"]
        self._restart = state

    def state_dict(self) -> dict[str, Any]:
        """This worker's place: of the next batch to be fetched."""
        if self._restart is not None:
            return dict(self._restart)
        state = {"epoch": self.epoch, "rows_in_epoch": self.rows_in_epoch, **self._epoch_start}
        if self._knows_place:
            state["loader"] = self.loader.state_dict()
        return {**state, "generators": self._generators.state()}

    def timed(self) -> Iterator[tuple[Mapping[str, Any], float]]:
        """Batches, each with the seconds it was waited for. Raises RunError where they end."""
        batches = iter(self)
        while True:
            started = time.perf_counter()
            self._before = random_state(), self.state_dict()
            with torch.profiler.record_function(DATA_WAIT):
                batch = next(batches, None)
            if batch is None:
                raise RunError("the training data loader has come to an end, but one with seek() must go on for ever")
            yield batch, time.perf_counter() - started

    def put_back(self) -> dict[str, Any]:
        """Take back the batch that was fetched last. Returns the process's random state before it."""
        before, self._restart = self._before
        return before

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        if self._seeks:
            yield from self.loader
            return
        while True:
            yield from self._epoch()
            self.epoch, self.rows_in_epoch = self.epoch + 1, 0

    def _epoch(self) -> Iterator[Mapping[str, Any]]:
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        batches = self._start_epoch()
        empty = self.rows_in_epoch == 0
        for batch in batches:
            self.rows_in_epoch += _num_rows(batch)
            if empty:  # some samplers make their generator when they are first asked
                self._generators = self._find_generators()
            empty = False
            yield batch
        if empty:
            raise UserError(
                f"the training data gave no batch in epoch {self.epoch}: the dataset is empty, or smaller than one "
                "batch with drop_last=True"
            )

    def _find_generators(self) -> Generators:
        return Generators(None if self._seeks else self.loader)

    def _start_epoch(self) -> Iterator[Mapping[str, Any]]:
        """The epoch's iterator, past the batches already used; training's random numbers stay where they are."""
        restart, self._restart = self._restart, None
        if restart is None or restart["epoch_random_state"] is None:
            self._epoch_start = {"epoch_random_state": random_state(), "epoch_generators": self._generators.state()}
            return iter(self.loader)
        self._epoch_start = {"epoch_generators": {}, **{name: restart[name] for name in _EPOCH_START & restart.keys()}}
        with preserved_random_state():
            batches = self._replay(restart)
            self._generators = self._find_generators()
            lost = self._generators.restore(restart.get("generators", {}))
            if lost and ("generators" in restart or self._generators.held):  # counters alone: an older checkpoint
                logger.warning(
                    "the checkpoint and the training data loader do not hold the same random states (%s): the rest of "
                    "epoch %d may repeat rows and leave others out", ", ".join(sorted(lost)), self.epoch,
                )  # fmt: skip
        return batches

    def _replay(self, restart: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The epoch of `restart` from its beginning, past the batches used then."""
        if self._workers_stay:
            logger.warning(
                "the training data loader has persistent_workers, whose random numbers no checkpoint holds: a dataset "
                "that draws any draws others after this restart; it is exact with persistent_workers=False"
            )
            if self.epoch:  # they were made in an earlier epoch, and the one to be replayed did not draw their seed
                iter(getattr(self.loader, "base_dataloader", self.loader))
        set_random_state(restart["epoch_random_state"])
        self._generators.restore(restart.get("epoch_generators") or {})
        if self._knows_place and "loader" in restart:
            self.loader.load_state_dict(restart["loader"])
            return iter(self.loader)
        batches, used = iter(self.loader), 0
        while used < self.rows_in_epoch:
            if (batch := next(batches, None)) is None:
                raise UserError(
                    f"the checkpoint had used {self.rows_in_epoch} rows of epoch {self.epoch}, but the training data "
                    f"now gives only {used}: it is not the data the run was started with"
                )
            used += (rows := _num_rows(batch))
        if used == self.rows_in_epoch:
            return batches
        unused = slice(rows - (used - self.rows_in_epoch), None)  # batches of another size than before
        rest = {name: value[unused] if _has_rows(value, rows) else value for name, value in batch.items()}
        return chain([rest], batches)


@dataclass
class MicroBatch:
    """The input of one forward pass, and how much it weighs.

    Attributes:
        inputs: arguments of the model's forward, first dimension at most `batch_size`.
        batch: all entries of the batch, for the metrics functions.
        weights: name of a label entry -> its valid labels (those that are not -100), or rows where it is absent.
    """

    inputs: dict[str, Any]
    batch: dict[str, Any]
    weights: dict[str, int]

    @property
    def weight(self) -> int:
        """Valid entries of the first labels, for metrics that are a mean over them."""
        return next(iter(self.weights.values()))

    def counts(self) -> bool:
        """False if it only fills up: nothing in it is learned, measured or (`example`) predicted."""
        numbers = self.batch.get("example")
        return any(self.weights.values()) or (isinstance(numbers, Tensor) and bool((numbers >= 0).any()))

    def without_weight(self) -> MicroBatch:
        """The same shapes, to be multiplied by zero."""
        batch = {name: value for name, value in self.batch.items() if name != "example"}
        return MicroBatch(self.inputs, batch, dict.fromkeys(self.weights, 0)).computable()

    def computable(self) -> MicroBatch:
        """Set one label, to be multiplied by zero, where none is valid: a mean over no label would be NaN."""
        inputs = dict(self.inputs)
        for name in (name for name, weight in self.weights.items() if weight == 0 and name in inputs):
            inputs[name] = inputs[name].clone()
            inputs[name][(-1,) * inputs[name].dim()] = 0  # not the first, which causal models drop
            if name == "labels" and isinstance(inputs.get(LABELS_MASK), Tensor):
                inputs[LABELS_MASK] = inputs[LABELS_MASK].clone()
                inputs[LABELS_MASK][-1] = 1
        return MicroBatch(inputs, self.batch, self.weights)

    def with_labels_alone(self, most: int) -> MicroBatch:
        """`labels` [1, most], the valid ones in their order and then others, with their places as `label_positions`;
        all as they are where these would be too few, or no fewer."""
        labels = self.inputs["labels"].flatten()
        if not self.weights["labels"] <= most < len(labels):
            return self
        positions = (labels == IGNORED_LABEL).byte().argsort(stable=True)[:most]
        picked = {"labels": labels[positions][None]}
        inputs = {**self.inputs, **picked, LABEL_POSITIONS: positions}
        return MicroBatch(inputs, {**self.batch, **picked}, self.weights)


@dataclass
class StepBatch:
    """One worker's part of a global step."""

    micro_batches: list[MicroBatch]
    rows: int
    weights: dict[str, int]
    tokens: int

    def with_labels_alone(self, most: Callable[[int], int]) -> StepBatch:
        """Micro-batches with as many labels as their rows have at most."""
        micro_batches = [m.with_labels_alone(most(len(m.inputs["labels"]))) for m in self.micro_batches]
        return replace(self, micro_batches=micro_batches)

    def without_weight(self) -> StepBatch:
        """The same passes, of which nothing is counted."""
        micro_batches = [m.without_weight() for m in self.micro_batches]
        return StepBatch(micro_batches, 0, dict.fromkeys(self.weights, 0), 0)

    @classmethod
    def nothing(cls, label_names: Sequence[str]) -> StepBatch:
        """The part of a worker that has no more batches."""
        return cls([], 0, dict.fromkeys(label_names, 0), 0)


def in_shares(batch: Mapping[str, Any], shares: int, split: Callable[[Mapping[str, Any]], StepBatch]) -> StepBatch:
    """A worker's batch cut by `split` for each of its virtual ranks: row i is one of the (i % `shares`)-th.

    At the end of an evaluation the last ones may have none.
    """
    rows = next((len(value) for value in batch.values() if isinstance(value, Tensor)), 0)
    if shares == 1 or rows == 0:
        return split(batch)

    def of(share: int) -> dict[str, Any]:
        taken = _rows_of(batch, rows, slice(share, None, shares))
        return {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in taken.items()}

    parts = [split(of(share)) for share in range(min(shares, rows))]
    weights = {name: sum(part.weights[name] for part in parts) for name in parts[0].weights}
    micro_batches = [micro_batch for part in parts for micro_batch in part.micro_batches]
    return StepBatch(micro_batches, rows, weights, sum(part.tokens for part in parts))


def first_rows(batch: Mapping[str, Any], rows: int, number: int) -> Mapping[str, Any]:
    """The first `number` rows of a batch of `rows`."""
    return batch if number >= rows else _rows_of(batch, rows, slice(number))


def _rows_of(batch: Mapping[str, Any], rows: int, taken: slice) -> dict[str, Any]:
    return {name: value[taken] if _has_rows(value, rows) else value for name, value in batch.items()}


def split_batch(
    batch: Mapping[str, Any],
    batch_size: int,
    names: set[str],
    device: torch.device,
    has_decoder: bool = False,
    label_names: Sequence[str] = ("labels",),
    trim_to: int | None = None,
    targets: Targets = _ALL_LABELS,
) -> StepBatch:
    """Cut a worker's batch into micro-batches of at most `batch_size` rows and count what it weighs.

    Args:
        batch: tensors with equal first dimension (rows); anything else is handed on whole.
        names: the model's forward arguments; other entries reach only the metrics functions.
        has_decoder: labels are a sequence of their own and count as tokens beside the inputs.
        label_names: entries whose valid labels are counted.
        trim_to: cut columns that are padding in every row of a micro-batch, down to a multiple of this.
        targets: how valid entries of `labels` are counted.

    Raises:
        UserError: a batch without rows, or with entries of different lengths.
    """
    rows = {name: len(value) for name, value in batch.items() if name in names and isinstance(value, Tensor)}
    if not rows and (given := [name for name in batch if name in names]):
        raise UserError(
            f"the entries of a batch must be tensors, but {given[0]} is a {type(batch[given[0]]).__name__}: convert "
            "them in the data loader's collate_fn or in batch_transform_fn"
        )
    if not rows:
        raise UserError(
            f"no entry of the batch ({', '.join(batch) or 'it is empty'}) is an argument of the model's forward "
            f"({', '.join(sorted(names))}); map the names with batch_transform_fn"
        )
    num_rows = next(iter(rows.values()))
    if len(set(rows.values())) > 1 or num_rows == 0:
        raise UserError(f"the entries of a batch must have the same, positive number of rows, but they have {rows}")
    attended, ids = batch.get("attention_mask"), batch.get("input_ids")
    tokens = int(attended.sum()) if attended is not None else (ids.numel() if ids is not None else 0)
    cut = {k for k, v in batch.items() if _has_rows(v, num_rows)}
    loaded = {k: batch[k] for k in rows}  # not on the device: looking at it is no wait
    labels = {name: batch.get(name) for name in label_names}
    mask = loaded.get(LABELS_MASK)
    batch = {k: to_device(v, device, is_ids=k in _IDS) if k in rows else v for k, v in batch.items()}
    micro_batches = []
    for start in range(0, num_rows, batch_size):
        span = slice(start, start + batch_size)
        part = {k: v[span] if k in cut else v for k, v in batch.items()}
        if trim_to is not None:
            widths = used_widths({k: v[span] for k, v in loaded.items()}, trim_to, has_decoder)
            part |= {k: part[k][:, :width].contiguous() for k, width in widths.items()}
        here = min(batch_size, num_rows - start)
        weights = {k: here if v is None else int((v[span] != IGNORED_LABEL).sum()) for k, v in labels.items()}
        if labels.get("labels") is not None:
            weights["labels"] = targets.count(labels["labels"][span], None if mask is None else mask[span])
        inputs = {k: aligned(v) if isinstance(v, Tensor) else v for k, v in part.items() if k in names}
        micro_batches.append(MicroBatch(inputs, part, weights))
    weights = {name: sum(m.weights[name] for m in micro_batches) for name in label_names}
    return StepBatch(micro_batches, num_rows, weights, tokens + (weights["labels"] if has_decoder else 0))


def to_device(values: Tensor, device: torch.device, is_ids: bool = False) -> Tensor:
    """The same tensor on a device; to a GPU by a copy that the host does not wait for, ids in half the bytes.

    Args:
        is_ids: the values of an int64 tensor are those of an int32.
    """
    if device.type != "cuda" or values.device.type != "cpu" or values.is_pinned():
        return values.to(device, non_blocking=True)
    sent_as = torch.int32 if is_ids and values.dtype == torch.int64 else values.dtype
    pinned = torch.empty(values.shape, dtype=sent_as, pin_memory=True).copy_(values)
    return pinned.to(device, non_blocking=True).to(values.dtype)


def used_widths(rows: Mapping[str, Tensor], multiple: int, has_decoder: bool) -> dict[str, int]:
    """Number of columns of each entry of a micro-batch that hold more than padding.

    What goes with the inputs is as wide as `attention_mask` (labels too, unless `has_decoder`), what goes with a
    decoder's labels as these.

    Args:
        rows: entries [rows, columns, ...]; those of other widths are left alone.
        multiple: widths are rounded up to it, but not beyond what there is.

    Returns:
        {name: width} of the entries to cut.
    """
    labels = rows.get("labels")
    sides = {
        "attention_mask": rows.get("attention_mask"),
        "labels": None if labels is None else labels != IGNORED_LABEL,
    }
    mask, valid = sides["attention_mask"], sides["labels"]
    if not has_decoder and mask is not None and valid is not None:
        sides = {"attention_mask": mask.bool() | valid if mask.shape == valid.shape else mask}  # else labels of rows
    widths = {}
    for side, used in sides.items():
        if used is None or used.dim() != 2:
            continue
        columns = used.any(dim=0).nonzero()
        width = -(-(int(columns[-1]) + 1) // multiple) * multiple if len(columns) else multiple
        for name, value in rows.items():
            of_decoder = has_decoder and (name == "labels" or name.startswith("decoder_"))
            if of_decoder == (side == "labels") and value.dim() > 1 and value.shape[1] == used.shape[1] > width:
                widths[name] = width
    return widths


def position_lost(then: str | None, now: str | None) -> str:
    """A sentence on why a checkpoint's position in its data has no meaning in other data.

    Args:
        then, now: their fingerprints, which may end in /bucket_rows=N or /mix_rows=N (see data/buckets.py).
    """
    data, flag, rows = _arrangement(then)
    data_now, flag_now, rows_now = _arrangement(now)
    if rows and rows_now and data == data_now:
        kinds = {"bucket_rows": "buckets", "mix_rows": "mixed steps"}
        return (
            f"the checkpoint's data stood in {kinds[flag]} of {rows} rows and this run's stands in {kinds[flag_now]} "
            f"of {rows_now}, so its position has no meaning; give --{flag} {rows} to continue"
        )
    return (
        "the training data, its vocabulary, sequence lengths, span lengths or --seed are not those of the checkpoint, "
        "so its position in the data has no meaning; restore them, or start a new --model_path by --init_checkpoint "
        "without --skip_used_data"
    )


def _arrangement(fingerprint: str | None) -> tuple[str, str, str]:
    """Of a fingerprint that ends in /FLAG=N what stands before it, FLAG and N; else no N."""
    data, _, arrangement = (fingerprint or "").rpartition("/")
    flag, _, rows = arrangement.partition("=")
    return (data, flag, rows) if flag in ("bucket_rows", "mix_rows") else ("", "", "")


def num_rows_of(dataset: Any) -> int | None:
    """Length of a dataset; None if it has none, or wraps one that has none."""
    try:
        return len(dataset)
    except TypeError:
        return None


def _num_rows(batch: Any) -> int:
    """Rows of a batch: the length of its first tensor; 1 where there is none."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)


def _has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, (Tensor, list, tuple, np.ndarray)) and len(value) == num_rows


def padded(micro_batches: list[MicroBatch], number: int) -> Iterator[MicroBatch]:
    """`number` micro-batches: every worker makes equally many passes (sharding needs that), spare ones weigh 0."""
    for micro_batch in micro_batches:
        yield micro_batch.computable()
    for _ in range(number - len(micro_batches)):
        yield micro_batches[-1].without_weight()
