"""The trainer: one optimizer step, and the loop that repeats it, for every backend. One step is::

    samples = workers * `gradient_accumulation_steps` * `batch_size` rows
    loss    = sum of the losses of their valid target tokens / number of their valid target tokens

The gradient does not depend on how the rows are split into workers, accumulation steps and micro-batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.checkpoint.train_state import failures_located
from lm_experiments_tools.config.flags import telling_settings
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.names import is_own
from lm_experiments_tools.tracking.tracker import Tracker, save_metrics
from lm_experiments_tools.training.batches import BatchStream
from lm_experiments_tools.training.callbacks import Callback, Every, ValidateCallback, is_due
from lm_experiments_tools.training.checks import (
    check_loss,
    check_parts,
    check_trainable,
    same_on_all,
    warn_of_batch_size,
    warn_of_unsplit_data,
)
from lm_experiments_tools.training.flops import FlopMeter
from lm_experiments_tools.training.generators import seed_all
from lm_experiments_tools.training.losses import BYTES_PER_TOKEN, MODEL_LOSS, Loss, loss_for
from lm_experiments_tools.training.metrics import (
    AccumulatedOutputs,
    Collector,
    LoggingInterval,
    MetricSums,
    StepInfo,
    storable,
)
from lm_experiments_tools.training.micro_batches import BatchSplitter, GlobalCounts, MicroBatch, StepBatch
from lm_experiments_tools.training.non_finite import OutputWatch, names_line
from lm_experiments_tools.training.phases import Phase
from lm_experiments_tools.training.profiling import with_profile
from lm_experiments_tools.training.resume import Restorer, data_identity, load_weights
from lm_experiments_tools.training.run_folder import open_saver
from lm_experiments_tools.training.schedules import LearningRate
from lm_experiments_tools.training.signals import StopSignals
from lm_experiments_tools.training.validation import validate

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend, PendingStep
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)

_MAX_EMPTY = 10  # first steps of a run that may have no targets


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
        check_parts(args, model, optimizer, train_dataloader, valid_dataloader)
        self.args, self.backend = args, backend
        targets = loss.targets(model)
        self.loss = loss = loss_for(model, targets, loss)
        self.phase = phase
        self.stream = None
        if train_dataloader is not None:
            self.stream = BatchStream(train_dataloader, train_sampler)
        backend.reproduce(args)
        self.valid_dataloader, self.batch_metrics_fn = valid_dataloader, batch_metrics_fn
        self.forward_kwargs, self.generate_kwargs = dict(forward_kwargs or {}), dict(generate_kwargs or {})
        self.split = BatchSplitter(args, backend, model, loss, targets, batch_transform_fn)
        check_loss(args, backend, model, targets)
        if "use_cache" in self.split.names:  # else keys and values of every layer live to the step's end, unused
            self.forward_kwargs.setdefault("use_cache", False)
        self.has_decoder = self.split.has_decoder
        self.warned_unsplit: set[str] = set()  # evaluated splits that each worker reads whole

        accumulated = partial(AccumulatedOutputs, keep_for_metrics_fn, metrics_fn)
        self.outputs, self.collect = accumulated(), collect or (lambda split: accumulated())
        self.learning_rate = LearningRate(args, optimizer, 0 if phase is None else phase.start)
        self.signals, self.tracker = StopSignals(), None
        self._in_flight: InFlightStep | None = None
        self._num_empty: int | None = 0  # steps without targets so far; None after a step with targets
        self.saver = open_saver(args, backend, tokenizer_dir, phase)
        valid_data = data_identity(valid_dataloader)
        restorer = Restorer(args, backend, self.saver, self.learning_rate, self.stream, valid_data, phase)
        start = restorer.restore(model, optimizer)
        self.state, self.interval, self.outputs.data = start.state, start.interval, start.outputs
        self.saved_at = start.saved_at  # step and samples of the last checkpoint
        self._watch = OutputWatch(backend.unwrap()) if args.debug_non_finite else None
        self._parameters = list(backend.unwrap().parameters())
        self._trained = self._trained_parameters()
        self.meter = None if args.validate_only else FlopMeter(args, backend, self.interval, self.say)
        self.validate_callback = ValidateCallback(args, has_data=valid_dataloader is not None)
        self.callbacks: list[Callback] = [
            Every(args.log_interval, lambda trainer: trainer.log_train()),
            self.validate_callback,
            Every(args.save_interval, lambda trainer: trainer.save(unless_last=True)),
            *callbacks,
        ]
        self.callbacks = with_profile(self.callbacks, args, self.state.step, self.say)

    # ---- the loop ---------------------------------------------------------------------------------------------------
    def train(self) -> None:
        """Train until `args.iters` updates have been applied, patience has run out, or a signal stops the run.

        Raises:
            TrainingDiverged: `args.max_skipped_updates` consecutive steps had a non-finite gradient.
            SystemExit: with 128 + signal number, after a checkpoint has been saved (143 for SIGTERM).
        """
        check_trainable(self.stream, self.backend.optimizer)
        warn_of_unsplit_data(self.stream.loader, self.backend)
        self.state.data_fingerprint = same_on_all(self.stream.fingerprint, self.backend)
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
                if is_first:  # all workers have read their data, and compiled the model
                    self.backend.limit_waiting()
                    is_first = False
                if info is not None and info.applied:
                    self._run_callbacks(info)
            self._finish()
            if self.phase is not None and self.args.iters < self.phase.last_step:  # else the run ends anyway
                self.signals.agree(self.backend.sum(torch.tensor(self.signals.pending)).tolist())
        self.tracker = None
        if self.signals.agreed:
            raise SystemExit(128 + self.signals.agreed)

    def is_over(self) -> bool:
        return self.state.step >= self.args.iters or self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        return 0 < self.args.early_stopping_patience <= self.state.patience

    def _validate_at_start(self) -> None:
        """Validate the untrained model (`--valid_at_start`), or make up for a validation that a signal cut short."""
        state = self.state
        if state.step == 0 and self.args.valid_at_start and "start" not in state.metrics:
            if (values := self.validate(self.valid_dataloader)) is not None:  # else a restart does it
                state.metrics["start"] = storable(values)
        elif is_due(self.validate_callback, state.step) and state.last_validated_step < state.step and self.saved_at:
            self.validate_callback.on_step_end(self)

    def _run_callbacks(self, info: StepInfo) -> None:
        for callback in self.callbacks:
            if is_due(callback, info.step):
                callback.on_step_end(self, info)
                self.backend.model.train()  # the callback may have evaluated

    def _finish(self) -> None:
        """End a run with the log line of the last interval, a validation and a checkpoint."""
        state = self.state
        if not self.signals.agreed:
            if self._is_out_of_patience():
                self.say(f"early stopping at step {state.step}: no better validation for {state.patience} evaluations")
            if self.interval.steps:
                self.log_train()
                self.saved_at = None  # a checkpoint of this step would lack the log line
            if self.validate_callback.every and state.last_validated_step < state.step:
                self.validate_callback.run(self)
                self.saved_at = None
        self.save()
        self.saver.wait()
        self.tracker.hparams(telling_settings(self.args))

    # ---- one step ---------------------------------------------------------------------------------------------------
    def train_step(self, batch: Mapping[str, Any], data_seconds: float = 0.0) -> StepInfo | None:
        """Run forward and backward over the micro-batches of `batch`, and one optimizer step.

        On a GPU the optimizer step is launched asynchronously and its result is read one step later, unless a callback
        is due. The model must be in training mode.

        Returns:
            The result; None if the step is still in flight, or was not run because a signal stops the run.
        """
        started, args, backend = time.perf_counter(), self.args, self.backend
        if (trained := self._trained_parameters()) != self._trained:  # a callback has frozen or unfrozen some
            self._finalize_step()
            backend.follow_frozen()
            self._trained = trained
        part = self.split(batch, args.batch_size)
        counts = self.global_counts(part)
        # A launcher kills a few seconds after its signal, so the step is left out if a restart reads the same batch
        # again: the position of a loader with `seek` is the samples of finished steps. Another loader, or a transform
        # that is not of this package, may have drawn random numbers, so that step is finished.
        if self.signals.agreed and self.stream.seeks and is_own(self.split.transform):
            self._finalize_step()
            return None
        self._check_targets(counts.weights)
        micro_batches = part.padded(counts.num_micro_batches)
        started += self.meter.add(micro_batches, self.forward_kwargs)
        metrics = self._forward_backward(micro_batches, counts.weights)
        non_finite = None if self._watch is None else self._watch.take()
        self._finalize_step()  # the step before: the learning rate depends on whether it was applied
        self._set_lr()
        wait = self._is_waited_for(self.state.step + 1)
        before_update = time.perf_counter()
        pending = backend.clip_and_step(args.clip_grad_norm, args.clip_grad_value, wait=wait)
        now = time.perf_counter()
        seconds, self.interval.update_seconds = now - started, self.interval.update_seconds + now - before_update
        self._in_flight = InFlightStep(pending, non_finite, counts, metrics, seconds, data_seconds)
        return self._finalize_step() if pending.is_done else None

    def _trained_parameters(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def global_counts(self, part: StepBatch) -> GlobalCounts:
        """Add up the counts of a step and the pending signals over all workers.

        This is the only collective of a step besides the gradients'.

        Args:
            part: this worker's micro-batches of the step.
        """
        backend, names = self.backend, self.loss.label_names()
        num_micro_batches = [0] * backend.world_size  # of each worker: their sum is a gather
        num_micro_batches[backend.rank] = len(part.micro_batches)
        counts = [part.rows, part.tokens, *self.signals.pending, self.saver.failed]
        local = [*counts, *map(part.weight, names), *num_micro_batches]
        totals = backend.sum(torch.tensor(local)).tolist()
        samples, tokens, *events, has_failed = totals[: len(counts)]
        self.signals.agree(events)
        if has_failed:
            self.saver.wait()  # raises why the checkpoint could not be written
        weights = dict(zip(names, totals[len(counts) :], strict=False))
        return GlobalCounts(weights, samples, tokens, max(totals[-backend.world_size :]))

    def _check_targets(self, weights: Mapping[str, int]) -> None:
        """Raise UserError if the first steps of a run have no targets over all workers: it would learn nothing."""
        if self._num_empty is None or not weights or weights.get("labels", sum(weights.values())):
            self._num_empty = None
            return
        self._num_empty += 1
        if self._num_empty == min(_MAX_EMPTY, self.args.iters):
            raise UserError(
                f"the first {self._num_empty} steps have nothing to predict: all their labels are ignored "
                f"({IGNORED_LABEL}). Look at the data by `lmtools inspect`; are all of its tokens unknown?"
            )

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], weights: Mapping[str, int]) -> MetricSums:
        """Leave the gradient of the step's loss in the parameters, summed over all workers' micro-batches.

        Args:
            weights: valid entries of the global step, by label name.

        Returns:
            Losses and metrics of this worker's micro-batches.
        """
        backend, loss, before = self.backend, self.loss, self.outputs.copy()
        metrics, divisors = (MetricSums(exact=backend.exact is not None) for _ in range(2))
        for i, micro_batch in enumerate(micro_batches):
            if backend.exact is not None:
                self._seed_noise(i)
            with backend.accumulate(sync=i == len(micro_batches) - 1):
                with backend.autocast():
                    outputs = backend.model(**micro_batch.inputs, **self.forward_kwargs)
                means = loss.means(micro_batch.inputs, outputs)
                self.add_metrics(micro_batch, means, outputs, metrics, self.outputs)
                divisors.add(
                    {k: (v[1] * (micro_batch.weight > 0), 1) for k, v in means.items() if isinstance(v, tuple)}, 0
                )
                scaled = loss.part(means, micro_batch.weights, weights) * backend.averaged_over
                del outputs, means  # logits would otherwise live on through the backward pass and the update
                backend.backward(scaled)
        if backend.must_repeat():  # an exact sum of gradients had too few bits
            self.outputs.data = before
            return self._forward_backward(micro_batches, weights)
        for divisor in divisors.sums.values():  # of a model that returns `loss_sum` and `num_labels`
            total = backend.sum(torch.tensor([float(divisor)], dtype=torch.float64)).item()
            backend.scale_gradients(next(iter(weights.values())) / total if total else 0.0)
        return metrics

    def add_metrics(
        self, part: MicroBatch, means: Mapping[str, Tensor], outputs: Any, sums: MetricSums, collector: Collector
    ) -> None:
        """Add a micro-batch's losses and metrics to `sums` and its outputs to `collector`, unless it is padding."""
        if part.is_padding():
            return
        values = self.batch_metrics_fn(part.batch, outputs)
        for term in self.loss.labels.keys() - values.keys():
            if weight := part.weights[self.loss.labels[term]]:
                sums.add({term: means[term]}, weight)
        sums.add(values, part.weight)
        if self.loss.token_bytes is not None:
            sums.add({BYTES_PER_TOKEN: (part.num_bytes, part.weights["labels"])}, 0)
        collector.add(part.batch, outputs)

    def _seed_noise(self, i: int) -> None:
        """Seed dropout for this worker's i-th micro-batch by its position in the data, for `--reproducible`."""
        # the virtual ranks of a worker are `rank`, `rank` + workers, ...; each has `accumulated` micro-batches
        accumulated = self.args.gradient_accumulation_steps
        virtual, k = divmod(i, accumulated)
        number = (virtual * self.backend.world_size + self.backend.rank) * accumulated + k
        seed_all(self.args.seed, self.state.consumed_samples, number)

    def _is_waited_for(self, step: int) -> bool:
        is_last = step >= self.args.iters or bool(self.signals.agreed)
        return is_last or any(is_due(callback, step) for callback in self.callbacks)

    def _set_lr(self) -> None:
        self.learning_rate.set(self.backend.optimizer, self.state.step - self.state.schedule_start)

    def _finalize_step(self) -> StepInfo | None:
        """Add the last step, applied or skipped, to the state and metrics, unless that has been done.

        Raises:
            TrainingDiverged: it is the last of `args.max_skipped_updates` in a row that were skipped.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return None
        grad_norm, applied = step.pending.result()
        state, counts = self.state, step.counts
        state.step += int(applied)
        has_labels, is_declared = any(counts.weights.values()), self.split.targets.is_declared
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
            if self.tracker is not None:
                self.tracker.advance(info.step)
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
        if names := step.pending.non_finite():
            step_number = state.step + 1
            logger.warning("step %d: parameters whose gradient norm is not finite: %s", step_number, names_line(names))
        if self._watch is not None:
            self._report_module(step.non_finite)
        if state.skipped_in_a_row >= self.args.max_skipped_updates:
            raise TrainingDiverged(
                f"{state.skipped_in_a_row} updates in a row had a non-finite gradient (--max_skipped_updates); the "
                "weights are those of the last applied one; lower --lr, set --clip_grad_norm, or use --bf16 not --fp16"
            )

    def _report_module(self, found: str | None) -> None:
        """Log the first module with a non-finite output in a skipped step, of the first worker that has one."""
        step = self.state.step + 1
        bad = [(rank, found) for rank, found in enumerate(self.backend.gather(found)) if found is not None]
        if bad and self.backend.is_main:
            logger.warning("step %d, rank %d: first not finite: %s", step, *bad[0])
        elif not bad:
            self.say(f"step {step}: the output of every module is finite; the loss, a backward pass or a sum was not")

    # ---- validation, logs, checkpoints ------------------------------------------------------------------------------
    def validate(self, dataloader: Iterable, split: str = "valid", write_tb: bool = True) -> dict[str, float] | None:
        """Compute metrics over `dataloader` on all workers, each example once. Random states do not change.

        Returns:
            {metric: value} (no loss without labels), or None if a signal stopped it.
        """
        values = validate(self, dataloader, split)
        if values is not None:
            self.state.metrics[split] = storable(values)
            self.log(split, values, write_tb=write_tb)
        return values

    def say(self, message: str) -> None:
        """Log a message, on rank 0 only."""
        if self.backend.is_main:
            logger.info(message)

    def tracking(self) -> Tracker:
        """Context in which metrics are also written to the files of the run directory."""
        path, resumed = None if self.args.validate_only else self.args.model_path or None, self.saved_at is not None
        start = self.state.step if resumed else -1  # nothing logged here before is of this run
        unlogged = {"train": self.interval.steps > 0, "valid": self.state.last_validated_step < self.state.step}
        again = [split for split, lacks in unlogged.items() if resumed and lacks]  # by a start that was then killed
        rank, total = self.backend.rank, self.args.iters
        self.tracker = Tracker(path, rank=rank, start_step=start, again=again, total_steps=total)
        return self.tracker

    def log_train(self) -> None:
        """Reduce and write the metrics since the last log line; collective."""
        backend, (interval, self.interval) = self.backend, (self.interval, LoggingInterval())
        values = self.loss.with_total({**interval.sums.reduce(backend), **self.outputs.reduce(backend)})
        self.state.metrics["train"] = storable(values)
        if backend.device.type == "cpu" and interval.steps == self.state.step:  # a GPU's update is asynchronous
            self.say(f"time of the first {interval.steps} steps: {interval.shares()}")
        groups = backend.optimizer.param_groups
        rates = [{k: float(group[k]) for k in ("lr", "scaled_lr") if group.get(k) is not None} for group in groups]
        self.log(
            "train",
            values,
            **interval.means(),
            weights_global_norm=backend.weights_norm(),
            **self.meter.utilization(interval),
            memory_mib=backend.peak_memory_mib(),
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
            self.saved_at = None  # a checkpoint of this step does not know that it is
        if self.saver.writer is None or self.saved_at == position or (unless_last and self.is_over()):
            return
        if self.learning_rate.plateau is not None:
            self.state.plateau = self.learning_rate.plateau.state_dict()
        is_best = is_best or (self.args.save_best and self.state.best_step == self.state.step)
        self.saver.save(self.state, self._rank_state(), is_best=is_best)
        self.saved_at = position

    def _rank_state(self) -> dict[str, Any]:
        """What a checkpoint holds of each worker; with `--reproducible`, rank 0 has the sums and outputs of all."""
        backend, is_exact = self.backend, self.backend.exact is not None
        return {
            "random_state": self.stream.random_state(),
            "stream": self.stream.state_dict(),
            "window": self.interval.full_state(backend) if is_exact else self.interval.state_dict(),
            "kept": self.outputs.full_data(backend) if is_exact else self.outputs.data,
        }

    def load(self, source: str | Path) -> None:
        """Load the weights of a checkpoint into the model, for example the best ones before a final evaluation.

        Args:
            source: folder of the checkpoint.
        """
        self.saver.wait()
        load_weights(Path(source), self.args, self.backend)

    def save_metrics(self, save_path: str | Path | None) -> None:
        """Write the last metrics of every split to `save_path`/metrics.json."""
        if save_path is not None and self.backend.is_main:
            save_metrics(Path(save_path) / "metrics.json", self.state.metrics)
