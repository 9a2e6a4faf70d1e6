"""Start of a run: from random weights, from its own checkpoint, or from the checkpoint of another run.

Every checkpoint records the settings and the model of its run. A restarted run compares these facts with its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.collective import on_all, on_main, say
from lm_experiments_tools.checkpoint.finding import behind_link, find_resume
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.train_state import (
    TrainState,
    load_initial,
    load_state,
    load_weights_for_all,
    read_state_file,
)
from lm_experiments_tools.checkpoint.weights import load_weights, read_state
from lm_experiments_tools.config.flags import harmless_flags
from lm_experiments_tools.config.phases import may_change
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import to_jsonable
from lm_experiments_tools.modules.devices import align_model
from lm_experiments_tools.modules.inspection import saved_state
from lm_experiments_tools.tracking.run_directory import differences, refuse_or_report
from lm_experiments_tools.training.batches import BatchStream
from lm_experiments_tools.training.metrics import LoggingInterval
from lm_experiments_tools.training.phases import Phase, data_start
from lm_experiments_tools.training.schedules import LearningRate

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)

# Keys of a Hugging Face configuration that describe files and versions, not computation. The forward pass of a
# classifier sets problem_type.
_UNCOMPARED = {"_name_or_path", "_commit_hash", "architectures", "transformers_version", "dtype", "torch_dtype"}
_UNCOMPARED |= {"problem_type"}
_KERNELS = {"foreach", "fused", "capturable", "differentiable", "initial_lr"}


@dataclass
class Start:
    """Where a run starts.

    Attributes:
        saved_at: step and samples of the run's checkpoint that holds this state; None if none does.
        interval, outputs: metrics and times since the last log line, and the model outputs accumulated since then.
    """

    state: TrainState = field(default_factory=TrainState)
    saved_at: tuple[int, int] | None = None
    interval: LoggingInterval = field(default_factory=LoggingInterval)
    outputs: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Restorer:
    """Restores a run from checkpoints into its model, optimizer, data stream and schedule.

    The saver knows which checkpoints are this run's own; `valid_data` is a `data_identity`. There is no stream to
    validate only, and no phase in a run without phases.
    """

    args: TrainerArgs
    backend: Backend
    saver: Saver
    learning_rate: LearningRate
    stream: BatchStream | None
    valid_data: str | None = None
    phase: Phase | None = None

    def restore(self, model: nn.Module, optimizer: Optimizer | None) -> Start:
        """Load weights, wrap the model for the backend, and restore a checkpoint's state; collective."""
        args, backend, phase = self.args, self.backend, self.phase
        find = partial(find_resume, args.resume, args.model_path, continues=not args.validate_only)
        resume_from = on_main(backend, find)
        if resume_from is None and phase is not None:
            resume_from = phase.branch
        source = resume_from
        # A checkpoint of this run comes before --init_checkpoint: the same command starts a job and continues it.
        if source is None and args.init_checkpoint:
            source = on_main(backend, lambda: behind_link(Path(args.init_checkpoint)))
        if source is not None:
            report = load_weights_for_all(model, source, args, backend, resumes=resume_from is not None)
            say(backend, f"weights from {source}: {report}")
        elif args.validate_only and not args.names_weights():
            raise UserError(
                "--validate_only has nothing to validate: no checkpoint in --model_path and no --init_checkpoint, so "
                "the weights would be random"
            )
        # A model that is set up already may have parameters that are views of DeepSpeed's buffers, and stays as it is.
        if backend.unwrap() is not model:
            align_model(model)
        # Facts are those of the model as it was built: wrappers change its modules.
        facts = run_facts(args, args.virtual_size(backend.world_size), model, optimizer)
        backend.setup(model, optimizer)
        say(backend, str(backend))
        start = Start()
        if resume_from is not None:
            begins = phase is not None and self._begins(resume_from, facts)
            start = self._begin_phase(resume_from) if begins else self._resume(resume_from, facts)
        elif source is not None:
            start = Start(self._initialized_from(source))
        if not args.validate_only and (warning := self.learning_rate.check_end(start.state)) and backend.is_main:
            logger.warning(warning)
        # Recorded last: until here the state has the facts of the checkpoint, to compare with.
        self._record_facts(start.state, facts)
        return start

    def _resume(self, path: Path, facts: Mapping[str, Any]) -> Start:
        """Restore weights, optimizer and trainer state from a checkpoint of the same run, after comparing facts."""
        state, per_rank = load_state(path, self.backend)
        self._check_facts(state, path, facts)
        self.learning_rate.resume(state.plateau)
        start = Start(state, self._saved_at(state, path))
        if per_rank is not None:
            start.interval, start.outputs = LoggingInterval.from_state(per_rank["window"]), per_rank["kept"]
        else:
            logger.warning("%s was saved by another number of workers: dropout draws other noise from here on", path)
        if self.stream is not None:
            self.stream.seek(state, per_rank and per_rank["stream"])
            if per_rank is not None:
                self.stream.restore_random_state(per_rank["random_state"])
        say(self.backend, f"resumed from {path}: step {state.step}, {state.consumed_samples} samples consumed")
        return start

    def _saved_at(self, state: TrainState, path: Path) -> tuple[int, int] | None:
        """Step and samples of a checkpoint of this run, as rank 0 sees it: a folder may be another one elsewhere."""
        return (state.step, state.consumed_samples) if self.backend.broadcast(self.saver.is_own(path)) else None

    def _begins(self, path: Path, facts: Mapping[str, Any]) -> bool:
        """True if this phase begins at a checkpoint: that of the phase before, or of the run that it branches from.

        A branch with the settings of its trunk continues the trunk's phase. UserError for a branch that changes what
        no phase can, and if the phases before this one have other lengths now.
        """
        phase, state = self.phase, on_main(self.backend, lambda: read_state_file(path))
        if path != phase.branch:
            if state.phase == phase.number and phase.number and state.schedule_start != phase.start:
                raise UserError(
                    f"phase {phase.number + 1} began at step {state.schedule_start}, and the phases before it now end "
                    f"at step {phase.start}: restore their lengths, batch sizes or number of workers."
                )
            if not phase.run.phases or state.phase == phase.number:
                return False
            if (state.phase, state.step) != (phase.number - 1, phase.start):
                raise UserError(
                    f"phase {phase.number + 1} begins at step {phase.start}, but {path} is of phase {state.phase + 1} "
                    f"and step {state.step}: restore the lengths of the phases, or start a new --model_path."
                )
            return True
        differing = differences(state.facts, facts)
        fixed = {name: differing[name] for name in differing if not may_change(type(self.args), name)}
        on_all(self.backend, lambda: refuse_or_report(path.parent.parent, fixed, resume=False), only_main=True)
        return bool(differing)

    def _begin_phase(self, path: Path) -> Start:
        """Start a phase from the previous phase's last checkpoint, or a branch from a checkpoint of another run.

        The optimizer's state is kept for parameters of the same name. Schedule, patience and drops start anew.
        """
        state, per_rank = load_state(path, self.backend, by_name=True)
        position, reason = data_start(self.args, state, self.stream)
        state.data_offset, state.data_fingerprint = position - state.consumed_samples, self.stream.fingerprint
        self.stream.loader.seek(position)
        if per_rank is not None:
            self.stream.restore_random_state(per_rank["random_state"])
        state.schedule_start, state.plateau, state.patience = state.step, {}, 0
        self._check_validation(state)
        say(self.backend, f"phase {self.phase.number + 1} begins at step {state.step} of {path}; data: {reason}")
        return Start(state, self._saved_at(state, path))

    def _initialized_from(self, source: Path) -> TrainState:
        """`--init_checkpoint`: another run's state without what the --reset flags drop; data begins at its start."""
        args, state = self.args, TrainState()
        loaded, per_rank = load_initial(
            source, self.backend, with_optimizer=not args.reset_optimizer, allow_pickle=args.allow_pickle
        )
        state.go_on_from(loaded, schedule=not args.reset_lr, step=not args.reset_iteration)
        if not args.reset_lr:
            self.learning_rate.resume(loaded.plateau)
        if args.skip_used_data:
            state.consumed_samples, state.consumed_tokens = loaded.consumed_samples, loaded.consumed_tokens
            state.data_offset, state.data_fingerprint = loaded.data_offset, loaded.data_fingerprint
            if self.stream is not None:
                self.stream.seek(state, per_rank and per_rank["stream"], loaded.data_order)
        say(self.backend, f"initialized from {source}: starting at step {state.step}")
        if state.step >= args.iters and not args.validate_only:
            raise UserError(
                f"--init_checkpoint {source} is at step {state.step} and --iters is {args.iters}, so nothing is left "
                "to train; raise --iters, or count from 0 with --reset_iteration"
            )
        return state

    def load_weights(self, source: Path) -> None:
        """Load the weights of a checkpoint into the model that the backend has wrapped; collective."""
        args, backend = self.args, self.backend
        self.saver.wait()

        def read() -> dict[str, Tensor]:
            model = backend.unwrap()
            if backend.state.shards_weights:
                return read_state(model, source, args.allow_pickle)
            allow_partial = args.allow_partial_checkpoint
            load_weights(model, source, allow_partial=allow_partial, allow_pickle=args.allow_pickle)
            return saved_state(model)

        backend.state.load_model_state(on_all(backend, read, only_main=True))
        say(backend, f"weights from {source}")

    def _check_facts(self, state: TrainState, path: Path, now: Mapping[str, Any]) -> None:
        """Compare a loaded checkpoint with this start; the schedule keeps its length.

        UserError for facts that differ, unless `--resume PATH` named the checkpoint, which only logs them.
        """
        resumes, differing = self.args.resume_path() is not None, differences(state.facts, now)
        # The data may have moved: its fingerprint is compared when the loader's position is restored.
        differing.pop("data_path", None)
        # `_resume` warns of another number of workers.
        if state.facts.get("WORLD_SIZE") != now["WORLD_SIZE"]:
            differing.pop("global_batch_size", None)
        on_all(self.backend, lambda: refuse_or_report(path.parent.parent, differing, resume=resumes), only_main=True)
        self._check_validation(state)
        if change := self.learning_rate.keep_length(state):
            say(self.backend, change)

    def _check_validation(self, state: TrainState) -> None:
        if None not in (self.valid_data, state.valid_fingerprint) and self.valid_data != state.valid_fingerprint:
            say(self.backend, "validation data is not that of the checkpoint: best metric and patience start afresh")
            state.best_metric, state.best_step, state.patience = None, None, 0

    def _record_facts(self, state: TrainState, facts: dict[str, Any]) -> None:
        """Put into the state what the next restart compares."""
        state.facts, state.schedule_steps = facts, self.learning_rate.length
        state.valid_fingerprint = self.valid_data or state.valid_fingerprint
        state.data_order = self.stream and self.stream.order
        state.samples_per_epoch = getattr(self.stream and self.stream.loader, "samples_per_epoch", None)
        if self.phase is not None:
            state.phase, state.first_step = self.phase.number, self.phase.first_step


# ---- facts that a restart compares ----------------------------------------------------------------------------------
def run_facts(args: TrainerArgs, world_size: int, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Collect what a restart compares with the checkpoint, as JSON: settings, model configuration, optimizer settings.

    The model is as built, before a backend wraps it. `world_size` counts virtual ranks with `--reproducible elastic`.
    """
    # data_path may differ after a restart, but is recorded: a phase with other data reads them from their beginning.
    harmless = harmless_flags(type(args)) - {"data_path"}
    facts = {name: value for name, value in asdict(args).items() if name not in harmless}
    facts |= {"WORLD_SIZE": world_size, **_model_facts(model)}
    # With flags for the optimizer, the settings above say it all.
    if optimizer is not None and not hasattr(args, "optimizer"):
        groups = optimizer.param_groups
        names = sorted(name for name in groups[0] if name != "params" and name not in _KERNELS)
        facts |= {f"optimizer.{name}": [_plain(group.get(name)) for group in groups] for name in names}
    return to_jsonable(facts)


def data_identity(loader: Any) -> str | None:
    """The loader's fingerprint; for loaders without one the number of rows, if it is known."""
    if (fingerprint := getattr(loader, "fingerprint", None)) is not None:
        return fingerprint
    try:
        return f"{len(loader.dataset)} rows"
    except (AttributeError, TypeError):  # no dataset; wrappers of an unsized one have a `__len__` that fails
        return None


def _model_facts(model: nn.Module) -> dict[str, Any]:
    """The configuration; for a model without one, the hyperparameters that its modules print."""
    base = getattr(model, "base_fingerprint", None)
    facts = {} if base is None else {"weights of the base model": base}
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return {**facts, "modules of the model": hashlib.sha256(repr(model).encode()).hexdigest()[:12]}
    config = model.config.to_dict()
    return {**facts, **{f"model_config.{key}": value for key, value in config.items() if key not in _UNCOMPARED}}


def _plain(value: Any) -> Any:
    """A setting of an optimizer as JSON; numbers may be tensors, and what has no JSON form is left out."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, (bool, int, float, str, tuple, list)) else None
