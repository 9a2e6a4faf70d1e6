"""The state that must survive a restart, in one object, and its way back from disk (see saving.py for the way there).

What differs between workers (random states, unreduced metric sums) is kept per worker; the rest is equal on all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.backends.peers import all_peers, lost_peer
from lm_experiments_tools.checkpoint.legacy import read_old_training_state, regrouped
from lm_experiments_tools.checkpoint.manifest import OF_TRAINING, is_listed, verify_model
from lm_experiments_tools.checkpoint.tree import load_tree, tree_files
from lm_experiments_tools.checkpoint.weights import LoadReport, load_weights
from lm_experiments_tools.errors import LostWorkerError, UserError
from lm_experiments_tools.optimizers import CHOSEN

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)
_RANKS = {"fixed": "worker(s)", "elastic": "virtual ranks"}
SETTINGS = ("weight_decay", "scale_parameter", "relative_step", "warmup_init")  # flags, whatever a checkpoint says


@dataclass
class TrainState:
    """Equal on every worker.

    Attributes:
        step: optimizer updates applied so far; the one meaning of "step" in logs, schedules and file names.
        consumed_samples, consumed_tokens: over all workers, skipped updates included.
        skipped_updates, skipped_in_a_row: updates not applied because the gradient was not finite.
        schedule_start: step at which the learning rate schedule began (moved by `--reset_lr`).
        best_metric, best_step: of `optimize_metric` on validation.
        patience: validations in a row without improvement.
        last_validated_step: a restart makes up for a validation that a signal cut short.
        plateau: state of the `--use_lr_drop` schedule.
        data_fingerprint: of the training data and its order; None for loaders that have none.
        data_order: of the order of rows alone, which several objectives may share; None where unknown.
        valid_fingerprint: of the validation data that `best_metric` was measured on.
        schedule_steps: length of the learning-rate schedule.
        facts: what a restart compares (see training/resume.py).
        metrics: the last ones of each split.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    schedule_start: int = 0
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UserError(
                f"the checkpoint's trainer state has entries this version does not know ({', '.join(unknown)}): it "
                "was written by a newer one; update lm_experiments_tools"
            )
        return cls(**values)

    def go_on_from(self, loaded: TrainState, *, schedule: bool, step: bool) -> None:
        """Take over the step of another run's state, and the place in its schedule; what is False starts afresh."""
        self.step = loaded.step if step else self.step
        into_schedule = loaded.step - loaded.schedule_start if schedule else 0
        self.schedule_start = self.step - into_schedule  # negative where updates are counted from 0


@contextmanager
def failures_located(state: TrainState, backend: Backend) -> Iterator[None]:
    """An exception that leaves this block says, as its attribute `step`, how many updates had been applied.

    Raises:
        LostWorkerError: another worker is gone; names it where that can be known.
    """
    peers = all_peers(backend)
    try:
        yield
    except Exception as error:
        error.step = state.step
        if (sentence := lost_peer(error, peers, backend)) is None:
            raise
        located = LostWorkerError(sentence)
        located.step = state.step
        raise located from error


def load_weights_for_all(
    model: nn.Module, source: Path, args: TrainerArgs, backend: Backend, *, resumes: bool
) -> LoadReport | None:
    """`load_weights` by rank 0, which alone reads them and returns the report, into a model that is not set up yet.

    Args:
        resumes: `source` is the verified checkpoint that the run resumes from, so all its weights must match.
    """

    def load() -> LoadReport:
        partial = None if resumes else args.allow_partial_checkpoint
        return load_weights(model, source, allow_partial=partial, allow_pickle=args.allow_pickle, verified=resumes)

    report = on_all(backend, load, only_main=True)
    backend.share_weights(model)
    return report


def load_state(
    path: Path, backend: Backend, *, with_optimizer: bool = True, initial: bool = False
) -> tuple[TrainState, dict[str, Any] | None]:
    """Trainer state of a checkpoint, and this worker's own part (None if another number of workers saved it).

    The state of the optimizer and of the loss scaler goes into `backend`, which is set up, if that has an optimizer.

    Args:
        initial: another run begins from it, so that `--reproducible` need not be the same.

    Raises:
        UserError: a newer version's state, another optimizer's, or one sharded for other workers; one saved under
            another `--reproducible`, or with `fixed` by another number of workers.
    """
    tree = on_main(backend, lambda: load_tree(path / "trainer_state"))
    state, workers = TrainState.from_dict(tree["state"]), tree["workers"]
    if not initial:
        _check_reproducible(path, backend, tree)
    if with_optimizer and backend.optimizer is not None:
        _load_optimizer(path, backend, tree)
    if backend.reproducible[0] == "elastic" and not initial:  # rank 0's part is of all
        nothing = {"window": {**workers[0]["window"], "sums": {"sums": {}, "counts": {}}}, "kept": {}}
        return state, workers[0] if backend.is_main else {**workers[0], **nothing}
    return state, workers[backend.rank] if len(workers) == backend.world_size else None


def _check_reproducible(path: Path, backend: Backend, tree: dict[str, Any]) -> None:
    """A run keeps `--reproducible` and its virtual ranks; those of a fixed one are its workers."""
    then = tree.get("reproducible", ["off", None])
    if then == backend.reproducible:
        now = torch.get_num_threads()
        if then[0] != "off" and backend.is_main and (was := tree.get("threads", now)) != now:
            logger.warning(
                "%s was saved by a process of %d threads, and this one has %d: torch may sum in another order, so the "
                "bits of --reproducible may differ; set OMP_NUM_THREADS=%d.", path, was, now, was,
            )  # fmt: skip
        return
    was, now = (how + (f" of {ranks} {_RANKS[how]}" if ranks else "") for how, ranks in (then, backend.reproducible))
    raise UserError(
        f"{path} is of a run with --reproducible {was}, and this start is {now}: it would go on to other bits; start "
        "it as it was, or begin a new run from it by --init_checkpoint."
    )


def load_initial(
    source: Path, backend: Backend, *, with_optimizer: bool = True, allow_pickle: bool = False
) -> tuple[TrainState, dict[str, Any] | None]:
    """As `load_state`, of a checkpoint to begin another run from: ours, or an ancestor's, which has only a step.

    Of others, such as those of transformers' Trainer, only the weights are of use here.
    """
    if on_main(backend, lambda: is_ours(source)):
        on_all(backend, lambda: _verify_state(source, backend, with_optimizer), only_main=True)
        return load_state(source, backend, with_optimizer=with_optimizer, initial=True)
    with_optimizer = with_optimizer and backend.optimizer is not None

    def read() -> tuple[int, Any]:
        old = read_old_training_state(source, allow_pickle=allow_pickle)
        if not with_optimizer or not old.get("optimizer_state"):
            return old.get("iteration", -1), None
        optimizer_state = regrouped(old["optimizer_state"], backend.unwrap(), backend.whole_optimizer)
        return old.get("iteration", -1), {"optimizer": optimizer_state, "precision": {}}

    iteration, tree = on_all(backend, read, only_main=True) or (None, None)
    iteration, has_optimizer = backend.broadcast((iteration, tree is not None))
    if has_optimizer:
        _restore_optimizer(backend, tree, source)
    return TrainState(step=iteration + 1), None  # the ancestor stores the last update's index


def is_ours(source: Path) -> bool:
    """True for a folder that has, or lost, a trainer state of ours; that of transformers' Trainer has no tensors."""
    return (source / OF_TRAINING).is_file() or is_listed(source / OF_TRAINING)


def _verify_state(path: Path, backend: Backend, with_optimizer: bool) -> None:
    """Compare what `load_state` is going to read with the manifest, if the checkpoint still has one."""
    needed = tree_files(path / "trainer_state")
    if missing := [file.name for file in needed if not file.is_file()]:
        raise UserError(
            f"{path} has no {missing[0]}: copy the checkpoint again, or give its weights alone, by the name of their "
            "file (model.safetensors)."
        )
    if with_optimizer and backend.optimizer is not None:
        needed += tuple(file for file in tree_files(path / "optimizer") if file.exists())
    verify_model(path, [file.name for file in needed])


def _load_optimizer(path: Path, backend: Backend, saved: dict[str, Any]) -> None:
    def read() -> Any:
        if not (path / "optimizer.json").exists():
            slices = (path / "optimizer_rank_00000.json").exists()
            how = "its optimizer state in slices, as earlier versions saved it" if slices else "no optimizer state"
            raise UserError(
                f"{path} has {how}: pass the checkpoint as --init_checkpoint with "
                "--reset_optimizer" + (", or continue with the version that saved it" if slices else "")
            )
        return load_tree(path / "optimizer", mapped=True)

    tree = on_all(backend, read, only_main=True)
    if saved["optimizer"] != (kind := backend.optimizer_kind):
        raise UserError(
            f"{path} holds the state of the optimizer {saved['optimizer']}, which {kind} cannot continue; choose the "
            "same --optimizer, or start from it by --init_checkpoint with --reset_optimizer"
        )
    _restore_optimizer(backend, tree, path)


def _restore_optimizer(backend: Backend, tree: Any, source: Path) -> None:
    """`backend.load_optimizer_state`, keeping this run's settings, with what does not fit as a sentence."""
    before = [dict(group) for group in backend.optimizer.param_groups]
    try:
        backend.load_optimizer_state(tree)
    except ValueError as error:
        raise UserError(
            f"the optimizer state of {source} does not fit this model's parameters ({error}); start with "
            "--reset_optimizer to take the weights only"
        ) from error
    for group, own in zip(backend.optimizer.param_groups, before, strict=True):
        names = {*SETTINGS, *group.pop(CHOSEN, ()), *own.get(CHOSEN, ()), CHOSEN}
        group.update({name: own[name] for name in names if name in own})
