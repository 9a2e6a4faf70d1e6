"""Checks that a user's model, optimizer and loaders fit together, and that workers read different rows."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.config.flags import is_given
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.batches import BatchStream
    from lm_experiments_tools.training.targets import Targets

logger = logging.getLogger(__name__)

OF_VALIDATION = ("save_best", "early_stopping_patience", "use_lr_drop")
_SURE_BITS = 20.0  # equal rows are by accident in less than one of 2^20 runs


def check_parts(args: TrainerArgs, model: nn.Module, optimizer: Optimizer | None, train: Any, valid: Any) -> None:
    """Check that model, optimizer and data loaders can be trained with `args`. Raises UserError."""
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "the model was compiled by torch.compile, which renames its weights: give the trainer the model itself, "
            "and TrainerArgs compile=True"
        )
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    unread = [name for name in OF_VALIDATION if is_given(args, name)]
    if unread and train is not None and valid is None and not args.validate_only:
        raise UserError(f"no validation data for {', '.join(unread)}: give valid_dataloader, or leave them out")
    if args.reproducible == "elastic" and train is not None and not hasattr(train, "seek"):
        raise UserError(
            "--reproducible elastic needs a training data loader with seek(), as data.loader.TrainLoader has, whose "
            f"rows are the same for any number of workers; {type(train).__name__} has none."
        )


def check_loss(args: TrainerArgs, backend: Backend, model: nn.Module, targets: Targets) -> None:
    """Log what a loss is assumed to be a mean over, and refuse one that cannot be computed in parts.

    Args:
        targets: result of `targets_of`.

    Raises:
        UserError: a loss over whole batches, and steps of several micro-batches or workers.
    """
    parts, name = args.gradient_accumulation_steps * args.virtual_size(backend.world_size), type(model).__name__
    if targets.mean_over == "batch" and parts > 1 and not args.split_in_batch_loss:
        raise UserError(
            f"the loss of {name} compares the rows of a batch, and each step has {parts} parts that would see only "
            "their own rows: use --gradient_accumulation_steps 1 and one worker, or accept it by --split_in_batch_loss"
        )
    if not targets.is_declared and backend.is_main:
        shift = ", the first of a row left out" if targets.shifts_labels else ""
        logger.log(
            logging.WARNING if parts > 1 else logging.INFO,
            "%s declares no divisor of its loss, so that is taken as a mean over labels other than -100%s (without "
            "labels: over rows). With another (class weights, in-batch negatives) the gradient depends on the split "
            "into micro-batches and workers. Declare loss_mean_over = 'labels', 'rows' or 'batch' and shifts_labels "
            "in the class, take num_items_in_batch, or return loss_sum and num_labels (docs/new_variant.md)",
            name, shift,
        )  # fmt: skip


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained.isdisjoint(optimized):
        raise UserError(
            f"the optimizer has none of the {len(trained)} trained parameters of the model, so nothing would be "
            "trained: make it with this model's parameters(), after any change of the model"
        )
    if foreign := len(optimized.difference(map(id, model.parameters()))):
        logger.warning(
            "%d of the %d parameters of the optimizer are not the model's, and %d of the model's %d trained ones are "
            "not the optimizer's: make it after any change of the model",
            foreign, len(optimized), len(trained - optimized), len(trained),
        )  # fmt: skip
    sparse = (nn.Embedding, nn.EmbeddingBag)
    for name, module in model.named_modules():
        if isinstance(module, sparse) and module.sparse and module.weight.requires_grad:
            raise UserError(
                f"{name} has sparse gradients, whose norm cannot be computed: make the {type(module).__name__} with "
                "sparse=False"
            )


def check_trainable(stream: Any, optimizer: Optimizer | None) -> None:
    """Refuse to train if the trainer was built without optimizer or training data. Raises UserError."""
    missing = [name for name, part in {"train_dataloader": stream, "optimizer": optimizer}.items() if part is None]
    if missing:
        raise UserError(f"the trainer was made without {' and '.join(missing)}, so it can only validate")


class LoaderCheck:
    """Check on the first batches of a run that workers read different rows of the training data.

    Loaders with the method `seek` are not checked, because they divide the rows by rank.
    """

    def __init__(self, stream: BatchStream, backend: Backend, args: TrainerArgs) -> None:
        self._stream, self._backend, self._args = stream, backend, args
        self._digest, self._counts = hashlib.blake2b(digest_size=16), Counter()  # of the rows read so far
        self._first_epoch = stream.epoch
        self._is_first = self._compares = not hasattr(stream.loader, "seek")

    def __call__(self, batch: Any) -> None:
        """Check the next batch; collective for the first ones.

        Raises:
            UserError: two workers read the same rows.
        """
        if self._is_first:
            self._is_first = False
            self._compares = self._backend.world_size > 1
            self._check_size(batch)
        if self._compares:
            rows = _rows(batch)
            self._digest.update(b"".join(rows))
            self._counts.update(rows)
            self._compares = self._may_be_equal()

    def _check_size(self, batch: Any) -> None:
        args, rows, wanted = self._args, len(_rows(batch)), self._args.rows_per_worker()
        if self._backend.is_main and rows != wanted:
            logger.warning(
                "the training data gives %d rows a batch, but a step takes one batch of batch_size %d x "
                "gradient_accumulation_steps %d = %d rows: make the loader with batch_size=args.rows_per_worker()",
                rows, args.batch_size, args.gradient_accumulation_steps, wanted,
            )  # fmt: skip

    def _may_be_equal(self) -> bool:
        """True if two workers have read equal rows that are too few to be sure; one small collective.

        Rows of a toy data set that are all equal prove nothing; neither does an epoch with fewer rows than workers,
        to which samplers add rows.
        """
        number, bits = self._counts.total(), 0.0
        if number:  # -log2 of the chance that as many rows, drawn from these, are the same in the same order
            bits = -number * math.log2(sum((count / number) ** 2 for count in self._counts.values()))
        digest = self._digest.hexdigest() if number else None
        reports = self._backend.gather((digest, bits, self._stream.epoch != self._first_epoch))
        if any(ended for _, _, ended in reports):
            return False
        first: dict[str, int] = {}
        rows = [(rank, digest, bits) for rank, (digest, bits, _) in enumerate(reports) if digest is not None]
        repeated = [(first[d], rank, bits) for rank, d, bits in rows if first.setdefault(d, rank) != rank]
        for one, other, bits in repeated:
            if bits >= _SURE_BITS:
                raise UserError(
                    f"workers {one} and {other} train on the same rows: give the DataLoader a "
                    "torch.utils.data.DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, "
                    "seed=seed)"
                )
        return bool(repeated)


def rows_digest(batch: Any) -> str:
    """Hash of all rows of a batch, by which workers compare what they read."""
    return hashlib.blake2b(b"".join(_rows(batch)), digest_size=16).hexdigest()


def _rows(batch: Any) -> list[bytes]:
    """A hash of each row of a batch: of its tensors that have as many rows as the first one."""
    values = [batch[name] for name in sorted(batch)] if isinstance(batch, Mapping) else batch
    values = values if isinstance(values, (list, tuple)) else [values]
    tensors = [v.detach().cpu().contiguous() for v in values if isinstance(v, Tensor) and v.dim() and v.numel()]
    count = len(tensors[0]) if tensors else 0
    columns = [t.view(count, -1).view(torch.uint8).numpy() for t in tensors if len(t) == count]
    return [hashlib.blake2b(b"".join(c[i].tobytes() for c in columns), digest_size=8).digest() for i in range(count)]


def same_on_all(fingerprint: str | None, backend: Backend) -> str | None:
    """Check that all workers read the same training data, and return its fingerprint.

    Args:
        fingerprint: hash of this worker's training data; None if unknown.

    Raises:
        UserError: the fingerprints of two workers differ.
    """
    fingerprints = backend.gather(fingerprint)
    if len(set(fingerprints)) > 1:
        other = next(rank for rank, f in enumerate(fingerprints) if f != fingerprints[0])
        raise UserError(
            f"worker {other} reads other training data than worker 0: copy the same files to every machine, or "
            "train from a shared folder"
        )
    return fingerprint
