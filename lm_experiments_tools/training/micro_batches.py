"""Split a loader's batches into micro-batches on the device, and count their valid labels and tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL, LABEL_POSITIONS
from lm_experiments_tools.modules.devices import aligned
from lm_experiments_tools.modules.inspection import base_of, forward_names, takes_any_name
from lm_experiments_tools.names import is_own
from lm_experiments_tools.training.losses import LABELS_MASK, NUM_ITEMS, Loss, Targets

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)

_IDS = {"input_ids", "labels", "decoder_input_ids", "attention_mask", "decoder_attention_mask", "token_type_ids"}
_READ_ELSEWHERE = {"example", "prompt_ids", "prompt_mask", "input_ids_generate", "attention_mask_generate"}
_ALL_LABELS = Targets()
_ARRAYS = (Tensor, np.ndarray)


class GlobalCounts(NamedTuple):
    """Counts of one optimizer step over all workers.

    Attributes:
        weights: {label entry of the batch: number of valid labels}.
        num_micro_batches: maximum over workers.
        failed: number of workers that could not write their checkpoint.
        save: 1 if it is time for a checkpoint, by rank 0's clock.
    """

    weights: dict[str, int]
    samples: int
    tokens: int
    num_micro_batches: int
    failed: int
    save: int


@dataclass
class MicroBatch:
    """Rows that one forward pass reads, with the number of their valid labels.

    Attributes:
        inputs: arguments of the model's forward, at most `batch_size` rows.
        batch: all entries of the batch, for metric functions.
        weights: {label entry: number of labels other than -100}; number of rows if the batch lacks the entry.
        num_bytes: UTF-8 bytes of the text of valid `labels`; 0 if not counted.
        rows, tokens: numbers of rows, and of unpadded input tokens plus target tokens of a decoder. With a mask over
            queries and keys all input tokens count.
    """

    inputs: dict[str, Any]
    batch: dict[str, Any]
    weights: dict[str, int]
    num_bytes: int = 0
    rows: int = 0
    tokens: int = 0

    def is_padding(self) -> bool:
        """True if no label is valid, and no row is to be predicted, by a number of at least 0 in `example`."""
        numbers = self.batch.get("example")
        return not any(self.weights.values()) and not (isinstance(numbers, Tensor) and bool((numbers >= 0).any()))

    def as_padding(self) -> MicroBatch:
        """Copy the micro-batch with weight 0, so that it adds nothing to gradients and metrics."""
        batch = {name: value for name, value in self.batch.items() if name != "example"}
        return MicroBatch(self.inputs, batch, dict.fromkeys(self.weights, 0)).with_a_label()

    def with_a_label(self) -> MicroBatch:
        """Copy a micro-batch without valid labels, with one at weight 0: a mean over no labels would be NaN."""
        inputs = dict(self.inputs)
        for name in (name for name, weight in self.weights.items() if weight == 0 and name in inputs):
            inputs[name] = inputs[name].clone()
            # It is the last label, because causal models drop the first.
            inputs[name][(-1,) * inputs[name].dim()] = 0
            if name == "labels" and isinstance(inputs.get(LABELS_MASK), Tensor):
                inputs[LABELS_MASK] = inputs[LABELS_MASK].clone()
                inputs[LABELS_MASK][-1] = 1
        return replace(self, inputs=inputs)

    def with_valid_labels_only(self, most: int) -> MicroBatch:
        """Reduce `labels` to a tensor [1, most] with the valid ones first, for models that compute logits only there.

        The flat indices of these labels are added as `label_positions`. The micro-batch is unchanged if more than
        `most` labels are valid, or if there are no more than `most` labels.
        """
        labels = self.inputs["labels"].flatten()
        if not self.weights["labels"] <= most < len(labels):
            return self
        positions = (labels == IGNORED_LABEL).byte().argsort(stable=True)[:most]
        picked = {"labels": labels[positions][None]}
        inputs = {**self.inputs, **picked, LABEL_POSITIONS: positions}
        return replace(self, inputs=inputs, batch={**self.batch, **picked})


def _of_virtual_ranks(batch: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
    """A worker's batch split over its virtual ranks, row i to rank i % `number`; ranks without rows are left out."""
    rows = next((len(value) for value in batch.values() if isinstance(value, _ARRAYS) and value.ndim), 0)
    if rows == 0:
        return [batch]
    parts = [_select_rows(batch, rows, slice(virtual, None, number)) for virtual in range(min(number, rows))]
    return [{k: v.contiguous() if isinstance(v, Tensor) else v for k, v in part.items()} for part in parts]


def has_rows(value: Any, num_rows: int) -> bool:
    """True if a batch entry has one item for each of the `num_rows` rows."""
    is_list = isinstance(value, (list, tuple)) or (isinstance(value, _ARRAYS) and value.ndim > 0)
    return is_list and len(value) == num_rows


def _select_rows(batch: Mapping[str, Any], rows: int, selected: slice) -> dict[str, Any]:
    return {name: value[selected] if has_rows(value, rows) else value for name, value in batch.items()}


def split_batch(
    batch: Mapping[str, Any],
    batch_size: int,
    names: set[str],
    device: torch.device,
    has_decoder: bool = False,
    label_names: Sequence[str] = ("labels",),
    trim_to: int | None = None,
    targets: Targets = _ALL_LABELS,
    token_bytes: Tensor | None = None,
) -> list[MicroBatch]:
    """Split a worker's batch into micro-batches of at most `batch_size` rows, and count their tokens and valid labels.

    Args:
        batch: tensors with equal first dimension (rows); other values are passed on unchanged.
        names: arguments of the model's forward; other entries reach only metric functions.
        has_decoder: labels are a second sequence, whose tokens are counted too.
        trim_to: cut columns that are padding in all rows, to a width that is a multiple of this.
        token_bytes: int64 [vocabulary], UTF-8 bytes of each token, to count the bytes of valid `labels`.
    """
    tensors, num_rows = _checked(batch, names)
    # What is counted is read here, on the host, so that counting never waits for the device.
    loaded = {k: v for k, v in tensors.items() if v.dim()}
    labels = {name: batch.get(name) for name in label_names}
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    attended = mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
    is_split = {k: has_rows(v, num_rows) for k, v in batch.items()}
    batch = {k: to_device(v, device, is_ids=k in _IDS) if k in tensors else v for k, v in batch.items()}
    micro_batches = []
    for start in range(0, num_rows, batch_size):
        span = slice(start, start + batch_size)
        rows = min(batch_size, num_rows - start)
        part = {k: v[span] if is_split[k] else v for k, v in batch.items()}
        host = {k: v[span] for k, v in loaded.items()}
        if trim_to is not None:
            widths = used_widths(host, trim_to, has_decoder)
            part |= {k: part[k][:, :width].contiguous() for k, width in widths.items()}
        inputs = {k: v for k, v in part.items() if k in names}
        inputs |= {k: aligned(v) for k, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        found = {k: None if v is None else v[span] for k, v in labels.items()}
        weights, num_bytes = targets.count(found, rows, inputs, host, token_bytes)
        if targets.takes_count:
            inputs[NUM_ITEMS] = torch.tensor(max(next(iter(weights.values())), 1), device=device)
        tokens = ids[span].numel() if attended is None and ids is not None else 0
        tokens += 0 if attended is None else int(attended[span].sum())
        tokens += weights["labels"] if has_decoder else 0
        micro_batches.append(MicroBatch(inputs, part, weights, num_bytes, rows, tokens))
    return micro_batches


def _checked(batch: Mapping[str, Any], names: set[str]) -> tuple[dict[str, Tensor], int]:
    """Tensors of a batch to pass to forward, and their number of rows. Raises UserError."""
    tensors = {name: value for name, value in batch.items() if name in names and isinstance(value, Tensor)}
    rows = {name: len(value) for name, value in tensors.items() if value.dim()}
    if not rows:
        raise UserError(
            f"no entry of the batch ({', '.join(batch) or 'it is empty'}) is a tensor and an argument of the model's "
            f"forward ({', '.join(sorted(names))}): convert and name them in collate_fn or batch_transform_fn"
        )
    num_rows = next(iter(rows.values()))
    if len(set(rows.values())) > 1 or num_rows == 0:
        raise UserError(
            f"the entries of a batch must have the same, positive number of rows, but they have {rows}; what belongs "
            "to no row goes into forward_kwargs"
        )
    mask = tensors.get("attention_mask")
    if mask is not None and mask.dim() == 2 and mask.is_floating_point() and (mask < 0).any():
        raise UserError("attention_mask has values below 0: give 1 for tokens and 0 for padding")
    return tensors, num_rows


def to_device(values: Tensor, device: torch.device, is_ids: bool = False) -> Tensor:
    """Copy a tensor to a device, asynchronously to a GPU.

    `is_ids` says that int64 values fit into int32: they are sent to a GPU as int32, which halves the traffic.
    """
    if device.type != "cuda" or values.device.type != "cpu" or values.is_pinned():
        return values.to(device, non_blocking=True)
    sent_as = torch.int32 if is_ids and values.dtype == torch.int64 else values.dtype
    pinned = torch.empty(values.shape, dtype=sent_as, pin_memory=True).copy_(values)
    return pinned.to(device, non_blocking=True).to(values.dtype)


def used_widths(rows: Mapping[str, Tensor], multiple: int, has_decoder: bool) -> dict[str, int]:
    """Find the widths {name: columns} to which entries can be cut, because all further columns are padding.

    `attention_mask` shows the padding of inputs, together with `labels` unless there is a decoder. `labels` show the
    padding of a decoder's entries. Widths are rounded up to a `multiple`.
    """
    labels = rows.get("labels")
    mask = rows.get("attention_mask")
    sides = {
        "attention_mask": mask != 0 if mask is not None and mask.dim() == 2 else None,
        "labels": None if labels is None else labels != IGNORED_LABEL,
    }
    mask, valid = sides["attention_mask"], sides["labels"]
    if not has_decoder and mask is not None and valid is not None:
        # Labels of another shape belong to rows, not to tokens.
        sides = {"attention_mask": mask | valid if mask.shape == valid.shape else mask}
    widths = {}
    for side, used in sides.items():
        if used is None or used.dim() != 2:
            continue
        columns = used.any(dim=0).nonzero()
        width = -(-(int(columns[-1]) + 1) // multiple) * multiple if len(columns) else multiple
        for name, value in rows.items():
            of_decoder = has_decoder and (name == "labels" or name.startswith("decoder_"))
            if of_decoder == (side == "labels") and value.dim() > 1 and value.shape[1] == used.shape[1] > width:
                # A mask over queries and keys is not cut: in one dimension alone it would not fit.
                if used.shape[1] in value.shape[2:]:
                    return {}
                widths[name] = width
    return widths


class BatchSplitter:
    """Splits the batches of a training loop into micro-batches, and counts their valid labels and tokens.

    Attributes:
        is_repeatable: a batch that is split again gives the same; a user's transform may draw random numbers.
    """

    def __init__(
        self, args: TrainerArgs, backend: Backend, model: nn.Module, loss: Loss, targets: Targets,
        transform: Callable | None,
    ) -> None:  # fmt: skip
        self.backend, self.loss, self.transform = backend, loss, transform
        self.is_repeatable = is_own(transform)
        self.names, self.model_name = forward_names(model), type(model).__name__
        self.has_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.takes_any_name = takes_any_name(type(base_of(model)))
        self._counting = self.has_decoder, loss.label_names(), args.trim_to(), targets, loss.token_bytes
        self._shares = args.shares(backend.world_size)
        self._names_of: dict[tuple[str, ...], set[str]] = {}  # of batches with the same entries
        self._warned: set[str] = set()

    def __call__(
        self, batch: Any, batch_size: int, num_counted: Callable[[int], int] | None = None
    ) -> list[MicroBatch]:
        """Split this worker's batch into micro-batches of at most `batch_size` rows; None if its data has ended.

        One label is valid, at weight 0, in micro-batches without any. `num_counted(rows)` is the number of leading
        rows that count; the others repeat rows of another worker.
        """
        if batch is None:
            return []
        batch = batch if self.transform is None else self.transform(batch)
        if not isinstance(batch, Mapping):
            raise UserError(
                f"a batch is a {type(batch).__name__}, but must be a dict of the arguments of the model's forward: "
                "return one from the data loader's collate_fn, or from batch_transform_fn"
            )
        if (names := self._names_of.get(tuple(batch))) is None:
            names = self._names_of[tuple(batch)] = self._names(batch)
        is_padding = False
        if num_counted is not None:
            rows = next((len(v) for k, v in batch.items() if k in names and isinstance(v, _ARRAYS) and v.ndim), 0)
            counted = num_counted(rows)
            is_padding = rows > 0 and counted == 0
            if 0 < counted < rows:
                batch = _select_rows(batch, rows, slice(counted))
        found = []
        for part in [batch] if self._shares == 1 else _of_virtual_ranks(batch, self._shares):
            found += split_batch(part, batch_size, names, self.backend.device, *self._counting)
        if is_padding:
            return [micro_batch.as_padding() for micro_batch in found]
        if (most := self.loss.most_labels) is not None:
            found = [m.with_valid_labels_only(most(len(m.inputs["labels"]))) for m in found]
        return [m if all(m.weights.values()) else m.with_a_label() for m in found]

    def _names(self, batch: Mapping[str, Any]) -> set[str]:
        """Entries of a batch that forward takes: those it names; for a user's `**kwargs` all but lists and dicts."""
        names = self.names
        if self.takes_any_name:
            others = batch.keys() - _READ_ELSEWHERE
            names = names | {k for k in others if not isinstance(batch[k], (list, tuple, Mapping))}
        unread = batch.keys() - names - _READ_ELSEWHERE - self._warned
        if unread and names & batch.keys() and (unread := {k for k in unread if isinstance(batch[k], Tensor)}):
            self._warned |= unread
            if self.backend.is_main:
                logger.warning(
                    "batch entries that %s.forward does not take, and that only metrics functions see: %s",
                    self.model_name, ", ".join(sorted(unread)),
                )  # fmt: skip
        return names
