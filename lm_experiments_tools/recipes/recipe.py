"""Base classes of the training scripts' runs: `Recipe` for all, `Pretraining` for T5 and BERT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.backends.collective import on_all, on_main, say
from lm_experiments_tools.checkpoint.finding import find_resume
from lm_experiments_tools.checkpoint.train_state import read_state_file
from lm_experiments_tools.config.flags import AUTO
from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.config.phases import timeline
from lm_experiments_tools.data.tokens.holdout import hold_out
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.models.freezing import train_only
from lm_experiments_tools.models.from_args import ModelSource, model_from_args, model_source, optimizer_from_args
from lm_experiments_tools.models.speed import choose_speed
from lm_experiments_tools.planning.fit import out_of_memory_explained
from lm_experiments_tools.recipes.common import described, seed_worker, show_run, start_run, warn_of_data
from lm_experiments_tools.recipes.t5_sources import CACHE
from lm_experiments_tools.training.losses import with_bytes
from lm_experiments_tools.training.phases import Phase
from lm_experiments_tools.training.run_folder import with_run_directory
from lm_experiments_tools.training.trainer import TrainingLoop

if TYPE_CHECKING:
    from torch import nn

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import ExperimentArgs
    from lm_experiments_tools.data.loader import ValidLoader
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from lm_experiments_tools.recipes.common import PretrainingArgs, PretrainingData
    from lm_experiments_tools.tracking.run_directory import RunDirectory


TRAINED_PER_VALIDATED = 20  # examples, without --valid_interval
# Without --valid_samples. The loss of 50,000 target tokens (T5's of 512 rows) has a standard error of about 0.01.
VALID_SAMPLES = 512


class Recipe(ABC):
    """Base class of a training script's run, which builds and executes it from its arguments.

    Attributes:
        backend, data, trainer: set by `run`; data and trainer change with each phase.
    """

    script: str
    backend: Backend
    data: Any
    trainer: TrainingLoop

    def __init__(self, args: ExperimentArgs, origins: Mapping[str, str]) -> None:
        self.args, self.origins = args, origins

    def run(self) -> None:
        """Execute the run: train, or validate with `--validate_only`."""
        self.args, self.origins = choose_speed(self.args, self.origins)
        self.backend = get_backend(self.args)  # a launcher names files from this folder, which `train` leaves
        is_new, self.args = self.args.model_path == AUTO, with_run_directory(self.args, self.backend, self.script)
        options = {"trained": lambda: self.trainer, "commands": self.commands}
        with described(self.args, self.backend, is_new=is_new, **options):
            self.train()
            self.finish()
        self.close_data()
        self.backend.close()

    @abstractmethod
    def train(self) -> None:
        """Open the run directory, build data, model and trainer, and call `train_or_validate`."""

    @abstractmethod
    def finish(self) -> None:
        """Write the results; fine-tuning evaluates the trained model first."""

    @abstractmethod
    def commands(self, folder: str) -> list[str]:
        """Shell commands that try the trained model in the run directory `folder`, a quoted path."""

    def close_data(self) -> None:
        """Stop the data's worker processes, if the data has been opened."""
        if hasattr(self, "data") and self.data.train is not None:
            self.data.train.close()

    def train_or_validate(self) -> None:
        args, trainer = self.trainer.args, self.trainer
        with out_of_memory_explained(args):
            if not args.validate_only:
                trainer.train()
            elif trainer.valid_dataloader is not None:
                trainer.validate(trainer.valid_dataloader)


class Pretraining(Recipe):
    """Base class of pre-training runs, which have one or several phases (parts with different settings)."""

    data: PretrainingData
    before: Pretraining | None = None  # on the same backend; freed once the settings of this run are accepted
    stretches_schedule = False  # with --epochs: the schedule of a resumed run gets the length of this start

    @property
    @abstractmethod
    def special_tokens(self) -> dict[str, int | None]:
        """Id of each special token of the vocabulary, for the configuration of a new model; collective."""

    @abstractmethod
    def check(self, args: PretrainingArgs, source: ModelSource) -> None:
        """Check that the model of a phase fits data and objective, before data is tokenized. Raises UserError."""

    @abstractmethod
    def build_data(self, phase: Phase, source: ModelSource) -> PretrainingData:
        """Open the training and validation data of a phase."""

    @abstractmethod
    def training_tokens(self, phase: Phase) -> list[IndexedDataset]:
        """Open the token files of the training data of a phase. Text is tokenized first."""

    def hold_out(self, phase: Phase) -> PretrainingArgs:
        """Arguments of a phase, with token files in place of `--data_path` and `--valid_fraction`."""
        paths, held_out = hold_out(self.training_tokens(phase), phase.args.valid_fraction, CACHE)
        return replace(phase.args, data_path=tuple(paths), valid_data_path=held_out, valid_fraction=None)

    @abstractmethod
    def loop_options(self, args: PretrainingArgs, source: ModelSource, model: nn.Module) -> dict[str, Any]:
        """Return the objective-specific keyword arguments of `TrainingLoop`, such as `loss`."""

    @abstractmethod
    def metric_names(self, args: PretrainingArgs) -> Sequence[str]:
        """Names of the metrics that validation gives besides the loss and its terms."""

    @abstractmethod
    def report(self) -> None:
        """Write the report with losses and predicted examples, if `--report` is set."""

    def train(self) -> None:
        phases, run = start_phases(self.args, self.backend)
        parts = with_models(phases, self.backend, self.special_tokens)
        for phase, source in parts:
            self.check(phase.args, source)
        if self.before is not None:
            self.before.free()
            self.before = None
        for phase, source in parts:
            built = self.build(phase, source)
            show_run(built.args, self.origins, run, self.backend, self.backend.unwrap(), self.data, built)
            self.train_or_validate()
            if phase is not phases[-1]:
                self.free()
                run = None  # its start is recorded

    def free(self) -> None:
        """Drop data, model and trainer, if they have been built, before others are built on this backend."""
        if hasattr(self, "data"):
            self.close_data()
            self.backend.release(forget=True)
            self.__dict__.pop("trainer", None)
            del self.data

    def build(self, phase: Phase, source: ModelSource) -> Phase:
        """Build data, model, loss, optimizer and trainer of a phase; returns it with `--epochs` in updates."""
        backend = self.backend
        if phase.args.valid_fraction is not None:
            phase = replace(phase, args=on_all(backend, lambda: self.hold_out(phase)))
        phase = replace(phase, args=with_valid_samples(phase.args))
        self.data = data = self.build_data(phase, source)
        if phase.args.epochs is not None and data.train is not None:
            phase = in_updates_of_epochs(phase, data.train.samples_per_epoch, backend.world_size)
            if self.stretches_schedule:
                phase = replace(phase, args=replace(phase.args, num_training_steps=phase.last_step))
        args = with_valid_interval(phase.args, data.valid, backend)
        if backend.is_main:
            warn_of_data(args, data)
        model = model_from_args(args, source, data.vocabulary_size)
        options = self.loop_options(args, source, model)
        options["loss"] = with_bytes(options["loss"], data.vocabulary.token_bytes, model)
        optimizer = optimizer_from_args(args, model)
        seed_worker(args.seed, backend.rank)
        train = None if args.validate_only else data.train
        options |= {"tokenizer_dir": data.tokenizer_dir, "phase": phase}
        self.trainer = TrainingLoop(args, backend, model, optimizer, train, data.valid, **options)
        if data.valid is not None:
            self._check_metric(args)
        return phase

    def _check_metric(self, args: PretrainingArgs) -> None:
        """Refuse an `--optimize_metric` that validation will not give, before the first step."""
        loss = self.trainer.step.loss
        names = ["loss", *loss.labels, *self.metric_names(args)]
        names += ["bits_per_byte"] if loss.token_bytes is not None else []
        if args.optimize_metric not in names:
            given = ", ".join(dict.fromkeys(names))
            raise UserError(f"--optimize_metric {args.optimize_metric}: validation of this run gives {given}.")

    def finish(self) -> None:
        self.trainer.save_metrics(self.args.model_path)
        if self.args.report:
            self.report()


def in_updates_of_epochs(phase: Phase, samples_per_epoch: int, world_size: int) -> Phase:
    """The only phase of a run, with the updates of `--epochs`, which are recorded in its place."""
    args = phase.args
    length = {"epochs": None, "iters": ceil(args.epochs * samples_per_epoch / args.global_batch_size(world_size))}
    return replace(phase, args=replace(args, **length), run=replace(phase.run, **length), last_step=length["iters"])


def with_valid_samples(args: PretrainingArgs) -> PretrainingArgs:
    """Limit `--valid_samples` where it is not given, except for a single validation (`--validate_only`)."""
    has_validation = args.valid_data_path is not None or args.needs_validation()
    if args.valid_samples is not None or args.validate_only or not has_validation:
        return args
    return replace(args, valid_samples=VALID_SAMPLES)


def with_valid_interval(args: PretrainingArgs, valid: ValidLoader | None, backend: Backend) -> PretrainingArgs:
    """Choose `--valid_interval` where it is not given, from numbers that a restart has too, not from times."""
    if valid is None or args.valid_interval is not None or args.validate_only:
        return args
    # A validation batch has as many rows as that of a step, and no backward pass.
    steps = len(valid) * TRAINED_PER_VALIDATED
    steps += -steps % args.log_interval
    of = "examples that the model reads"
    # A short run would be validated at its end alone. A validated batch takes a third of the time of a trained one.
    if steps >= args.iters and len(valid) * TRAINED_PER_VALIDATED <= 3 * args.iters:
        steps, of = ceil(args.iters / 2), "time"
    share = "; text that is generated costs more" if args.use_generate_on_valid else ""
    say(
        backend,
        f"validation every {steps} steps, of {len(valid)} batches: at most {100 / TRAINED_PER_VALIDATED:.0f} % of the "
        f"{of} (--valid_interval, --valid_samples){share}",
    )
    return replace(args, valid_interval=steps)


def start_phases(args: PretrainingArgs, backend: Backend) -> tuple[list[Phase], RunDirectory | None]:
    """Open the run directory with `start_run`, and list the phases of the run that remain to be trained.

    Lengths in tokens are converted to updates. The first remaining phase is that of the newest checkpoint, even if it
    has no steps left. A run without `--phases` has one phase. UserError for fewer phases than the run has completed.
    """
    whole = args if args.phases else in_updates(args, backend.world_size)
    run = start_run(whole, backend)
    number, first, branch = 0, 0, None
    if args.phases or args.branch_from:
        number, first, branch = on_main(backend, lambda: _place(args))
    parts = timeline(args, backend.world_size, first)
    if number >= len(parts):
        raise UserError(f"--phases has {len(parts)} phases, and {args.model_path} is in phase {number + 1}.")
    starts = [first, *(part.iters for part in parts)]
    recorded, end = args if args.phases else parts[0], starts[-1]
    phases = [Phase(part, recorded, k, starts[k], first, end, branch) for k, part in enumerate(parts)][number:]
    later = [replace(phase, args=replace(phase.args, resume="auto")) for phase in phases[1:]]
    return [phases[0], *later], run


def _place(args: PretrainingArgs) -> tuple[int, int, Path | None]:
    """Number of the phase that the run is in, the step that it began at, and for a new branch its checkpoint."""
    if args.branch_from is not None and args.model_path is not None:
        trunk, own_folder = Path(args.branch_from).resolve(), Path(args.model_path).resolve()
        if own_folder in (trunk, *trunk.parents):
            raise UserError(f"--branch_from {args.branch_from} is in --model_path: give a branch a folder of its own.")
    own = find_resume(args.resume, args.model_path)
    if own is not None:
        state = read_state_file(own)
        return state.phase, state.first_step, None
    if args.branch_from is None:
        return 0, 0, None
    branch = find_resume(args.branch_from, None, flag="branch_from")
    return 0, read_state_file(branch).step, branch


def with_models(
    phases: Sequence[Phase], backend: Backend, tokens: Mapping[str, int | None]
) -> list[tuple[Phase, ModelSource]]:
    """Find the model source of each phase, and check the patterns of `--trained`. Raises UserError."""
    found = [(phase, model_source(phase.args, backend, tokens)) for phase in phases]

    def check(phase: Phase, source: ModelSource) -> None:
        with torch.device("meta"):
            train_only(build_model(source.cls, source.config, seed=0), phase.args.trained)

    for phase, source in found:
        if phase.args.trained:
            on_all(backend, lambda phase=phase, source=source: check(phase, source))
    return found
