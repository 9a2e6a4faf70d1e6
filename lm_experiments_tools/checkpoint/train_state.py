"""The state of the trainer in a checkpoint, and how a run loads it (saving.py writes it).

`TrainState` holds what is equal on all workers. Random states, unreduced metric sums and the position of the data
loader differ between workers; they are the per-rank state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lm_experiments_tools.backends.collective import agreed, on_all, on_main
from lm_experiments_tools.checkpoint.legacy import read_old_training_state, regrouped
from lm_experiments_tools.checkpoint.manifest import TRAINER_STATE, is_listed, sha256_of, verify_model
from lm_experiments_tools.checkpoint.tree import load_tree, tree_files
from lm_experiments_tools.checkpoint.weights import LoadReport, load_weights
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.optimizers import CHOSEN

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)
SETTINGS = ("weight_decay", "scale_parameter", "relative_step", "warmup_init")  # flags, whatever a checkpoint says


@dataclass
class TrainState:
    """Trainer state that is equal on all workers and saved in checkpoints.

    Attributes:
        step: optimizer updates applied so far, as in logs, schedules and file names.
        consumed_samples, consumed_tokens: over all workers, including skipped updates.
        skipped_updates, skipped_in_a_row: updates that were skipped because the gradient was not finite.
        schedule_start: step at which the learning-rate schedule began (`--reset_lr` and phases change it).
        phase: number of the phase that saved this, from 0.
        first_step: step at which the run began; above 0 if it branches from another run.
        data_offset: position in the data minus `consumed_samples`.
        samples_per_epoch: of the training data; None if unknown.
        best_metric, best_step: best value of `optimize_metric` on validation, and its step.
        patience: number of consecutive validations without improvement.
        last_validated_step: step of the last complete validation. A restart repeats one that a signal stopped.
        plateau: state of `--use_lr_drop`.
        data_fingerprint: hash of the training data and its order; None if the loader has none.
        data_order: hash of the order of rows alone; None if unknown.
        valid_fingerprint: hash of the validation data of `best_metric`.
        schedule_steps: length of the learning-rate schedule in updates; None where it has no end.
        facts: settings that a restart compares (see training/resume.py).
        metrics: {split, such as "train" or "valid": its last metrics}.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    schedule_start: int = 0
    phase: int = 0
    first_step: int = 0
    data_offset: int = 0
    samples_per_epoch: int | None = None
    best_metric: float | None = None
    best_step: int | None = None
    patience: int = 0
    last_validated_step: int = 0
    plateau: dict[str, Any] = field(default_factory=dict)
    data_fingerprint: str | None = None
    data_order: str | None = None
    valid_fingerprint: str | None = None
    schedule_steps: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def data_position(self) -> int:
        """Position in the training data: the index of the next sample in the order of the data."""
        return self.consumed_samples + self.data_offset

    def go_on_from(self, loaded: TrainState, *, schedule: bool, step: bool) -> None:
        """Adopt another run's step, and its progress in the learning-rate schedule, unless False (`--reset_...`)."""
        self.step = loaded.step if step else self.step
        into_schedule = loaded.step - loaded.schedule_start if schedule else 0
        # The start is negative where updates are counted from 0 and the schedule goes on.
        self.schedule_start = self.step - into_schedule


def load_weights_for_all(
    model: nn.Module, source: Path, args: TrainerArgs, backend: Backend, *, resumes: bool
) -> LoadReport | None:
    """Load the weights in `source` on rank 0 and copy them to all workers; call it before `Backend.setup`.

    All weights of this run's verified checkpoint (`resumes`) must match. The report is rank 0's.
    """

    def load() -> LoadReport:
        partial = None if resumes else args.allow_partial_checkpoint
        return load_weights(model, source, allow_partial=partial, allow_pickle=args.allow_pickle, verified=resumes)

    report = on_all(backend, load, only_main=True)
    backend.state.share_weights(model)
    return report


def load_state(
    path: Path, backend: Backend, *, with_optimizer: bool = True, initial: bool = False, by_name: bool = False
) -> tuple[TrainState, dict[str, Any] | None]:
    """Load the trainer state of a checkpoint, and the state of optimizer and loss scaler into `backend`.

    A new run that starts from the checkpoint (`initial`) may have another `--reproducible`. `by_name` loads optimizer
    state only for parameters with the same name and shape. Also returns this worker's per-rank state, which is None if
    the number of workers has changed. UserError for a checkpoint of another optimizer or `--reproducible`.
    """
    tree = on_main(backend, lambda: load_tree(path / "trainer_state"))
    state, workers = _state(path, tree), tree["workers"]
    if not initial:
        _check_reproducible(path, backend, tree)
    if with_optimizer and backend.optimizer is not None:
        _load_optimizer(path, backend, tree["optimizer"], by_name=by_name)
    # Rank 0 has saved the sums and outputs of all workers, so only rank 0 gets them back.
    if backend.reduction.reproducible[0] == "elastic" and not initial:
        empty = {"window": {**workers[0]["window"], "sums": {"sums": {}, "counts": {}}}, "kept": {}}
        return state, workers[0] if backend.is_main else {**workers[0], **empty}
    return state, workers[backend.rank] if len(workers) == backend.world_size else None


def read_state_file(path: Path) -> TrainState:
    """Read the `TrainState` of a checkpoint without its weights and optimizer. Raises UserError."""
    return _state(path, load_tree(path / "trainer_state"))


def _state(path: Path, tree: dict[str, Any]) -> TrainState:
    if unknown := sorted(set(tree["state"]) - {field.name for field in fields(TrainState)}):
        raise UserError(f"{path} has {', '.join(unknown)}, which a newer version wrote: update lm_experiments_tools.")
    return TrainState(**tree["state"])


def _check_reproducible(path: Path, backend: Backend, tree: dict[str, Any]) -> None:
    """A run keeps `--reproducible` and its number of virtual ranks (fixed: of workers)."""
    then, threads = tree.get("reproducible", ["off", None]), tree.get("threads", torch.get_num_threads())
    now = backend.reduction.reproducible
    if then != now:
        was, now = (f"{how} with {ranks} ranks" if ranks else how for how, ranks in (then, now))
        raise UserError(
            f"{path} was saved under --reproducible {was}, and this start has {now}: start it as it was, or start a "
            "new run from it by --init_checkpoint."
        )
    if then[0] != "off" and backend.is_main and threads != torch.get_num_threads():
        logger.warning(
            "%s was saved by a process of %d threads, and this one has %d: torch may sum in another order, so the "
            "bits of --reproducible may differ; set OMP_NUM_THREADS=%d.",
            path, threads, torch.get_num_threads(), threads,
        )  # fmt: skip


def load_initial(
    source: Path, backend: Backend, *, with_optimizer: bool = True, allow_pickle: bool = False
) -> tuple[TrainState, dict[str, Any] | None]:
    """Load trainer and optimizer state for a new run that starts from a checkpoint of another; see `load_state`.

    A checkpoint of t5-experiments has a step and an optimizer state. Others, such as those of transformers' Trainer,
    have weights only.
    """
    if on_main(backend, lambda: (source / TRAINER_STATE).is_file() or is_listed(source / TRAINER_STATE)):
        on_all(backend, lambda: _verify_state(source, backend, with_optimizer), only_main=True)
        return load_state(source, backend, with_optimizer=with_optimizer, initial=True)
    with_optimizer = with_optimizer and backend.optimizer is not None

    def read() -> tuple[int, Any]:
        step, old = read_old_training_state(source, allow_pickle=allow_pickle)
        if not with_optimizer or not old:
            return step, None
        return step, {"optimizer": regrouped(old, backend.unwrap(), backend.state.whole_optimizer), "precision": {}}

    step, tree = on_all(backend, read, only_main=True) or (None, None)
    step, has_optimizer = backend.broadcast((step, tree is not None))
    if has_optimizer:
        _restore_optimizer(backend, tree, source)
    return TrainState(step=step), None


def _verify_state(path: Path, backend: Backend, with_optimizer: bool) -> None:
    """Compare what `load_state` is going to read with the manifest, if the checkpoint still has one."""
    needed = tree_files(path / "trainer_state")
    if missing := [file.name for file in needed if not file.is_file()]:
        raise UserError(f"{path} has no {missing[0]}: copy it again, or name its model.safetensors alone.")
    if with_optimizer and backend.optimizer is not None:
        needed += [file for file in tree_files(path / "optimizer") if file.exists()]
    verify_model(path, [file.name for file in needed])


def _load_optimizer(path: Path, backend: Backend, saved_kind: str, *, by_name: bool) -> None:
    def read() -> Any:
        if not (path / "optimizer.json").exists():
            raise UserError(f"{path} has no optimizer state: name it by --init_checkpoint with --reset_optimizer")
        return load_tree(path / "optimizer", mapped=True)

    if backend.state.is_sharded:
        index = path / "optimizer.json"
        if len({*backend.gather(sha256_of(index) if index.is_file() else None)}) > 1:
            message = f"{path} differs between machines: FSDP and ZeRO read a part of it on each, so share the folder"
            raise agreed(UserError(message))
    tree = on_all(backend, read, only_main=not backend.state.is_sharded)
    kind = backend.state.optimizer_kind
    if by_name:
        number = backend.state.load_optimizer_state_by_name(tree, same_kind=saved_kind == kind)
        if backend.is_main:
            logger.info("the optimizer, %s, continues the state of %d parameters", kind, number)
        return
    if saved_kind != kind:
        raise UserError(
            f"{path} holds the state of the optimizer {saved_kind}, which {kind} cannot continue; choose the "
            "same --optimizer, or start from it by --init_checkpoint with --reset_optimizer"
        )
    _restore_optimizer(backend, tree, path)


def _restore_optimizer(backend: Backend, tree: Any, source: Path) -> None:
    """`backend.state.load_optimizer_state` with this run's settings. Raises UserError if it does not fit."""
    before = [dict(group) for group in backend.optimizer.param_groups]
    try:
        backend.state.load_optimizer_state(tree)
    except ValueError as error:
        raise UserError(
            f"the optimizer state of {source} does not fit this model's parameters ({error}); start with "
            "--reset_optimizer to take the weights only"
        ) from error
    # Settings that are flags keep the values of this start; the checkpoint's are those of its own.
    for group, own in zip(backend.optimizer.param_groups, before, strict=True):
        names = {*SETTINGS, *group.pop(CHOSEN, ()), *own.get(CHOSEN, ()), CHOSEN}
        group.update({name: own[name] for name in names if name in own})
