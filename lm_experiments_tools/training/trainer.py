"""The trainer: one optimizer step, and the loop that repeats it, for every backend. One step is::

    samples = workers * `gradient_accumulation_steps` * `batch_size` rows
    loss    = sum of the losses of their valid target tokens / number of their valid target tokens

The gradient does not depend on how the rows are split into workers, accumulation steps and micro-batches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.tracking.tracker import Tracker, save_metrics
from lm_experiments_tools.training.callbacks import Callback, Every
from lm_experiments_tools.training.checks import check_training_data, warn_of_batch_size
from lm_experiments_tools.training.losses import MODEL_LOSS, Loss
from lm_experiments_tools.training.metrics import (
    AccumulatedOutputs,
    Collector,
    LoggingInterval,
    MetricSums,
    StepInfo,
    storable,
)
from lm_experiments_tools.training.non_finite import report_skipped
from lm_experiments_tools.training.signals import failures_located
from lm_experiments_tools.training.start import build_parts
from lm_experiments_tools.training.validation import validate, warn_of_unsplit_validation

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend, PendingStep
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.micro_batches import GlobalCounts
    from lm_experiments_tools.training.phases import Phase

logger = logging.getLogger(__name__)
# Without --save_interval, a killed run loses at most so much training. Both are far above the time of a checkpoint,
# seconds even for large models, so saving costs less than 1 %.
SAVE_SECONDS, SAVE_STEPS = 600.0, 1000


class TrainingDiverged(RunError):
    """Error: too many consecutive optimizer steps had a non-finite gradient."""


@dataclass(frozen=True)
class InFlightStep:
    """A launched optimizer step whose result has not been read from the device yet.

    Attributes:
        non_finite: the first module of this worker whose output is not finite; None if there is none.
    """

    pending: PendingStep
    non_finite: str | None
    counts: GlobalCounts
    metrics: MetricSums
    seconds: float
    data_seconds: float


class TrainingLoop:
    """Trains `model` for `args.iters` optimizer steps.

    Args:
        args: `TrainerArgs`; never changed.
        backend: a backend that is not set up yet.
        model: called as `model(**batch, **forward_kwargs)`; its output has a `loss`, the mean over valid `labels`, or
            over rows if a batch has no labels.
        optimizer: optimizer over this model's parameters; None to evaluate only.
        train_dataloader: yields `args.rows_per_worker()` rows per step on each worker (fewer at the end of an epoch).
            A loader with `seek(consumed_samples)` resumes in O(1), one with `state_dict` and `load_state_dict` by its
            state; any other is read again up to its position.
        valid_dataloader: this worker's part of the validation set, or the whole set (see `validation.is_split`).
        train_sampler: its `set_epoch` is called before each epoch, as that of the loader's own parts.
        batch_transform_fn: f(batch) -> batch with the model's argument names.
        batch_metrics_fn: f(batch, outputs) -> {name: mean over the micro-batch, or (sum, count)}, besides the loss.
        keep_for_metrics_fn: f(batch, outputs) -> {name: tensor or list} to accumulate.
        metrics_fn: f(everything accumulated on all workers) -> {name: value}.
        collect: f(split) -> `Collector` for an evaluation of that split, instead of `keep_for_metrics_fn`.
        forward_kwargs, generate_kwargs: passed to every forward pass, and to `generate` on validation.
        callbacks: run in addition to those of the flags.
        tokenizer_dir: folder whose tokenizer files are copied into every checkpoint.
        loss: terms of the loss.
        phase: the phase of the run that `args` belong to; None for a run without phases.

    Raises:
        UserError: arguments, data or a checkpoint that cannot work.
    """

    def __init__(
        self,
        args: TrainerArgs,
        backend: Backend,
        model: nn.Module,
        optimizer: Optimizer | None,
        train_dataloader: Iterable | None,
        valid_dataloader: Iterable | None = None,
        train_sampler: Any = None,
        batch_transform_fn: Callable | None = None,
        batch_metrics_fn: Callable = lambda batch, outputs: {},
        keep_for_metrics_fn: Callable | None = None,
        metrics_fn: Callable | None = None,
        forward_kwargs: Mapping[str, Any] | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        tokenizer_dir: Path | None = None,
        loss: Loss = MODEL_LOSS,
        collect: Callable[[str], Collector] | None = None,
        phase: Phase | None = None,
    ) -> None:
        parts = build_parts(
            args, backend, model, optimizer, train_dataloader, valid_dataloader, train_sampler, loss=loss, phase=phase,
            tokenizer_dir=tokenizer_dir, batch_transform_fn=batch_transform_fn, batch_metrics_fn=batch_metrics_fn,
            forward_kwargs=forward_kwargs,
        )  # fmt: skip
        self.args, self.backend, self.phase, self.valid_dataloader = args, backend, phase, valid_dataloader
        self.stream, self.step, self.signals = parts.stream, parts.step, parts.step.signals
        self.learning_rate, self.saver, self.meter = parts.learning_rate, parts.saver, parts.meter
        self._watch, self._restorer = parts.watch, parts.restorer
        self.state, self.interval = parts.start.state, parts.start.interval
        self.saved_at = parts.start.saved_at  # step and samples of the last checkpoint
        self.generate_kwargs = dict(generate_kwargs or {})
        accumulated = partial(AccumulatedOutputs, keep_for_metrics_fn, metrics_fn)
        self.outputs, self.collect = accumulated(), collect or (lambda split: accumulated())
        self.outputs.data = parts.start.outputs
        self.tracker: Tracker | None = None
        self._in_flight: InFlightStep | None = None
        self._parameters = list(backend.unwrap().parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._splits_seen: set[str] = set()  # validated so far
        self.valid_interval = None if valid_dataloader is None else args.effective_valid_interval()
        self._saves = Every(args.save_interval or SAVE_STEPS, lambda trainer: trainer.save(unless_last=True))
        self._save_is_due = False  # by the clock, after the step that is being made
        self._saves_by_time = args.save_interval is None and parts.saver.writer is not None and backend.is_main
        self._last_save = time.monotonic()
        self.callbacks: list[Callback] = [
            *parts.first,
            Every(args.log_interval, lambda trainer: trainer.log_train()),
            Every(self.valid_interval, lambda trainer: trainer.validate_and_judge()),
            self._saves,
            *callbacks,
            *parts.last,
        ]

    # ---- the loop ---------------------------------------------------------------------------------------------------
    def train(self) -> None:
        """Train until `args.iters` updates have been applied, patience has run out, or a signal stops the run.

        Raises:
            TrainingDiverged: `args.max_skipped_updates` consecutive steps had a non-finite gradient.
            SystemExit: with 128 + signal number, after a checkpoint has been saved (143 for SIGTERM).
        """
        self.state.data_fingerprint = check_training_data(self.stream, self.backend.optimizer, self.backend)
        if self.state.step >= self.args.iters and not (self.phase and self.phase.run.phases):
            self.say(f"all {self.args.iters} updates have been made; raise --iters (or --epochs) to go on")
        # signals outermost: a launcher's SIGTERM must not end this worker while it reports the one that is lost
        with (
            self.signals,
            failures_located(self.state, self.backend),
            self.tracking(),
            self.saver.alongside(),
            self._watch or nullcontext(),
        ):
            self._validate_at_start()
            self.backend.model.train()
            batches, is_first = iter(self.stream), True
            while not self.signals.agreed and not self.is_over():
                batch, data_seconds = next(batches)
                if is_first and self.backend.is_main and not self.stream.seeks:
                    warn_of_batch_size(batch, self.args)
                info = self.train_step(batch, data_seconds)
                # By now all workers have read their data and compiled the model, so none is late for these reasons.
                if is_first:
                    self.backend.limit_waiting()
                    is_first = False
                for callback in self._due(info.step) if info is not None and info.applied else ():
                    callback.on_step_end(self, info)
                    # The callback may have evaluated the model.
                    self.backend.model.train()
            self._finish()
            # Workers must agree on a signal between two phases; after the last phase the run ends anyway.
            if self.phase is not None and self.args.iters < self.phase.last_step:
                self.step.count(())
        self.tracker = None
        if self.signals.agreed:
            raise SystemExit(128 + self.signals.agreed)

    def is_over(self) -> bool:
        """True after the last update, or when patience has run out."""
        state, args = self.state, self.args
        return state.step >= args.iters or 0 < args.early_stopping_patience <= state.patience

    def _due(self, step: int) -> list[Callback]:
        timed = self._saves if self._save_is_due else None
        return [c for c in self.callbacks if c.every and step > 0 and (step % c.every == 0 or c is timed)]

    def _validate_at_start(self) -> None:
        """Validate the untrained model (`--valid_at_start`), or make up for a validation that a signal cut short."""
        state, every = self.state, self.valid_interval
        if state.step == 0 and self.args.valid_at_start and "start" not in state.metrics:
            # A validation that a signal has stopped is made by the restarted run.
            if (values := self.validate(self.valid_dataloader)) is not None:
                state.metrics["start"] = storable(values)
        elif every and state.step % every == 0 and state.last_validated_step < state.step and self.saved_at:
            self.validate_and_judge()

    def _finish(self) -> None:
        """End a run with the log line of the last interval, a validation and a checkpoint."""
        state = self.state
        if not self.signals.agreed:
            if 0 < self.args.early_stopping_patience <= state.patience:
                self.say(f"early stopping at step {state.step}: no better validation for {state.patience} evaluations")
            if self.interval.steps:
                self.log_train()
                # A checkpoint that was saved at this step lacks the log line.
                self.saved_at = None
            if self.valid_interval and state.last_validated_step < state.step:
                self.validate_and_judge()
                self.saved_at = None
        self.save()
        self.saver.wait()

    # ---- one step ---------------------------------------------------------------------------------------------------
    def train_step(self, batch: Mapping[str, Any], data_seconds: float = 0.0) -> StepInfo | None:
        """Run forward and backward over the micro-batches of `batch`, and one optimizer step.

        On a GPU the optimizer step is launched asynchronously and its result is read one step later, unless a callback
        is due. The model must be in training mode.

        Returns:
            The result; None if the step is still in flight, or was not run because a signal stops the run.
        """
        started, args, backend, step = time.perf_counter(), self.args, self.backend, self.step
        # Reductions and shards are those of the parameters that were trained at the start.
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            self._finalize_step()
            self.save()
            raise UserError(
                "parameters were frozen or unfrozen after the trainer was made: do so before, or use --phases"
            )
        micro_batches = step.split(batch, args.batch_size)
        # The workers' clocks differ, so rank 0 decides for all whether the last checkpoint is too old.
        is_old = self._saves_by_time and time.monotonic() - self._last_save >= SAVE_SECONDS
        counts = step.count(micro_batches, self.saver.failed, is_old)
        self._save_is_due = bool(counts.save)
        if counts.failed:
            # This raises the reason on all workers.
            self.saver.wait()
        # A launcher kills a few seconds after its signal, so the step is left out if a restart reads the same batch
        # again: the position of a loader with `seek` is the samples of finished steps. Another loader, or a transform
        # that is not of this package, may have drawn random numbers, so that step is finished.
        if self.signals.agreed and self.stream.seeks and step.split.is_repeatable:
            self._finalize_step()
            return None
        # A worker whose batch is shorter makes as many passes as the others, which sharded models wait for.
        if missing := counts.num_micro_batches - len(micro_batches):
            micro_batches += [micro_batches[-1].as_padding()] * missing
        if self.meter is not None:
            # The extra pass that counts FLOPs, once a run, is no part of the step.
            started += self.meter.add(micro_batches, step.forward_kwargs)
        metrics = step.forward_backward(micro_batches, counts, self.outputs, self.state.consumed_samples)
        non_finite = None if self._watch is None else self._watch.take()
        self._finalize_step()  # the step before: the learning rate depends on whether it was applied
        self.learning_rate.set(backend.optimizer, self.state.step - self.state.schedule_start)
        is_last = self.state.step + 1 >= args.iters or bool(self.signals.agreed)
        wait = is_last or bool(self._due(self.state.step + 1))
        # Without a wait, the result of this update is read after the next step's passes have been launched.
        pending = backend.clip_and_step(args.clip_grad_norm, args.clip_grad_value, wait=wait)
        seconds = time.perf_counter() - started
        self._in_flight = InFlightStep(pending, non_finite, counts, metrics, seconds, data_seconds)
        return self._finalize_step() if pending.is_done else None

    def _finalize_step(self) -> StepInfo | None:
        """Add the last step, applied or skipped, to the state and metrics, unless that has been done.

        TrainingDiverged if it is the last of `args.max_skipped_updates` in a row that were skipped.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return None
        grad_norm, applied = step.pending.result()
        state, counts = self.state, step.counts
        state.step += int(applied)
        has_labels, is_declared = any(counts.weights.values()), self.step.targets.is_declared
        if state.step == 1 and applied and grad_norm == 0.0 and has_labels and not is_declared:
            raise UserError(
                "the gradient of the first step is 0: the loss does not depend on what is trained, or compares the "
                "rows of micro-batches of one row (in-batch negatives: see Loss in docs/new_variant.md)"
            )
        state.consumed_samples += counts.samples
        state.consumed_tokens += counts.tokens
        times = step.seconds, step.data_seconds
        info = StepInfo(state.step, applied, grad_norm, counts.samples, counts.tokens, *times)
        self.interval.add(step.metrics, info)
        if applied:
            state.skipped_in_a_row = 0
            if self.tracker is not None and self.tracker.bar is not None:
                self.tracker.bar.update()
        else:
            self._count_skipped(info, step)
        return info

    def _count_skipped(self, info: StepInfo, step: InFlightStep) -> None:
        state = self.state
        state.skipped_updates += 1
        state.skipped_in_a_row += 1
        position = state.consumed_samples - info.samples + state.data_offset
        logger.warning(
            "gradient norm %s after step %d: update skipped on all workers (samples %d to %d; %d skipped so far)",
            info.grad_norm, info.step, position, position + info.samples - 1, state.skipped_updates,
        )  # fmt: skip
        names, is_watched = step.pending.non_finite(), self._watch is not None
        report_skipped(state.step + 1, names, self.backend, step.non_finite, is_watched=is_watched)
        if state.skipped_in_a_row >= self.args.max_skipped_updates:
            raise TrainingDiverged(
                f"{state.skipped_in_a_row} updates in a row had a non-finite gradient (--max_skipped_updates); the "
                "weights are those of the last applied one; lower --lr, set --clip_grad_norm, or use --bf16 not --fp16"
            )

    # ---- validation, logs, checkpoints ------------------------------------------------------------------------------
    def validate(self, dataloader: Iterable, split: str = "valid", write_tb: bool = True) -> dict[str, float] | None:
        """Compute metrics over `dataloader` on all workers, each example once. Random states do not change.

        Returns:
            {metric: value} (no loss without labels), or None if a signal stopped it.
        """
        if split not in self._splits_seen:
            self._splits_seen.add(split)
            warn_of_unsplit_validation(dataloader, split, self.backend)
        values = validate(self.step, dataloader, split, self.collect(split), self.generate_kwargs)
        if values is not None:
            self.state.metrics[split] = storable(values)
            self.log(split, values, write_tb=write_tb)
        return values

    def validate_and_judge(self) -> None:
        """Validate, and update best metric, patience, drops of the learning rate and the best checkpoint; collective.

        Raises:
            UserError: validation does not give `--optimize_metric`, or not as a number; a checkpoint is saved first.
        """
        args, state, metric = self.args, self.state, self.args.optimize_metric
        values = self.validate(self.valid_dataloader)
        # A signal has stopped the validation, and the restarted run makes up for it.
        if values is None:
            return
        if not isinstance(value := storable(values).get(metric), float | int):
            # A mistyped name must not cost the updates made so far.
            self.save()
            raise UserError(
                f"--optimize_metric {metric} is no number of validation, which gives {', '.join(sorted(values))}; "
                "choose one of these (metrics of generated text need --use_generate_on_valid)"
            )
        state.last_validated_step = state.step
        sign = -1 if args.optimize_mode == "max" else 1
        improved = not math.isnan(value) and (state.best_metric is None or sign * value < sign * state.best_metric)
        if improved:
            state.best_metric, state.best_step, state.patience = value, state.step, 0
            if args.save_best:
                self.say(f"step {state.step}: best {metric} on validation so far: {value:.4f}")
        else:
            state.patience += 1
        self.log("valid", {}, patience=state.patience)
        if self.learning_rate.plateau is not None:
            self.learning_rate.plateau.update(value)
        if improved and args.save_best:
            self.save(is_best=True, unless_last=True)

    def say(self, message: str) -> None:
        """Log a message, on rank 0 only."""
        if self.backend.is_main:
            logger.info(message)

    def tracking(self) -> Tracker:
        """Context in which metrics are also written to the files of the run directory."""
        path, resumed = None if self.args.validate_only else self.args.model_path or None, self.saved_at is not None
        # Without a resume, nothing that was logged in this folder before belongs to the run.
        start = self.state.step if resumed else -1
        unlogged = {"train": self.interval.steps > 0, "valid": self.state.last_validated_step < self.state.step}
        # A start that was killed after its checkpoint has not logged these.
        again = [split for split, lacks in unlogged.items() if resumed and lacks]
        rank, total = self.backend.rank, self.args.iters
        self.tracker = Tracker(path, rank=rank, start_step=start, again=again, total_steps=total)
        return self.tracker

    def log_train(self) -> None:
        """Reduce and write the metrics since the last log line; collective."""
        backend, (interval, self.interval) = self.backend, (self.interval, LoggingInterval())
        values = self.step.loss.with_total({**interval.sums.reduce(backend), **self.outputs.reduce(backend)})
        self.state.metrics["train"] = storable(values)
        groups = backend.optimizer.param_groups
        rates = [{k: float(group[k]) for k in ("lr", "scaled_lr") if group.get(k) is not None} for group in groups]
        self.log(
            "train",
            values,
            **interval.means(backend.device),
            weights_global_norm=backend.state.weights_norm(),
            **({} if self.meter is None else self.meter.utilization(interval)),
            skipped_updates=self.state.skipped_updates,
            param_groups=rates,
        )

    def log(self, split: str, values: dict[str, float], *, write_tb: bool = True, **extra: Any) -> None:
        """Write metrics of a split to the run directory, or to the console if there is none."""
        if self.tracker is not None and write_tb:
            state = self.state
            self.tracker.log(split, state.step, state.consumed_samples, state.consumed_tokens, values, extra=extra)
        elif values:
            self.say(f"{split}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items() if isinstance(v, float)))

    def save(self, is_best: bool = False, *, unless_last: bool = False) -> None:
        """Save a checkpoint of the current step unless it exists; collective, and asynchronous inside `train`.

        Args:
            unless_last: skip it at the last step, which saves a checkpoint anyway.
        """
        position = (self.state.step, self.state.consumed_samples)
        if is_best:
            # A checkpoint that was saved at this step does not know that it is the best.
            self.saved_at = None
        if self.saver.writer is None or self.saved_at == position or (unless_last and self.is_over()):
            return
        if self.learning_rate.plateau is not None:
            self.state.plateau = self.learning_rate.plateau.state_dict()
        is_best = is_best or (self.args.save_best and self.state.best_step == self.state.step)
        self.saver.save(self.state, self._rank_state(), is_best=is_best)
        self.saved_at, self._last_save = position, time.monotonic()

    def _rank_state(self) -> dict[str, Any]:
        """What a checkpoint holds of each worker; with `--reproducible`, rank 0 has the sums and outputs of all."""
        backend, is_exact = self.backend, self.backend.reduction.is_exact
        return {
            "random_state": self.stream.random_state(),
            "stream": self.stream.state_dict(),
            "window": self.interval.full_state(backend) if is_exact else self.interval.state_dict(),
            "kept": self.outputs.full_data(backend) if is_exact else self.outputs.data,
        }

    def load(self, source: str | Path) -> None:
        """Load the weights in the folder of a checkpoint into the model, for example the best before an evaluation."""
        self._restorer.load_weights(Path(source))

    def save_metrics(self, save_path: str | Path | None) -> None:
        """Write the last metrics of every split to `save_path`/metrics.json."""
        if save_path is not None and self.backend.is_main:
            save_metrics(Path(save_path) / "metrics.json", self.state.metrics)
