"""The training loop, once, for every backend.

`TrainingLoop` knows models, batches, steps and metrics and speaks to the workers only through the verbs of
`backends/backend.py`. A step is::

    global step = sum over workers of `gradient_accumulation_steps` micro-batches of `batch_size` rows
    loss        = sum of losses of its valid target tokens / number of its valid target tokens (see losses.py)

so any split of the same rows into micro-batches, accumulation steps and workers has the same gradient.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_experiments_tools.backends.backend import saved_state
from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint import writer as checkpoint
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.train_state import (
    TrainState,
    failures_located,
    load_initial,
    load_state,
    load_weights_for_all,
)
from lm_experiments_tools.config.flags import telling_settings
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.alignment import align_model
from lm_experiments_tools.tracking.tracker import Tracker, save_metrics
from lm_experiments_tools.training.attempt import Attempt
from lm_experiments_tools.training.first_bad import Replay
from lm_experiments_tools.training.first_batches import checked, same_on_all
from lm_experiments_tools.training.flops import FlopMeter
from lm_experiments_tools.training.generation import generate
from lm_experiments_tools.training.generators import preserved_random_state, random_state, set_random_state
from lm_experiments_tools.training.hooks import Hook, ValidateHook, VerbHook, is_due, watching_hooks, with_profile
from lm_experiments_tools.training.losses import MODEL_LOSS, Loss
from lm_experiments_tools.training.metrics import Collector, KeptOutputs, MetricSums, Window, storable
from lm_experiments_tools.training.micro_batches import BatchStream, StepBatch, padded
from lm_experiments_tools.training.parts import check_parts, check_trainable
from lm_experiments_tools.training.passes import check_source, make_gradients, measure
from lm_experiments_tools.training.record import check_facts, record_facts, run_facts
from lm_experiments_tools.training.run_folder import claim_for_all
from lm_experiments_tools.training.schedules import LearningRate
from lm_experiments_tools.training.signals import StopSignals
from lm_experiments_tools.training.splitting import Splitter
from lm_experiments_tools.training.step import StepInfo
from lm_experiments_tools.training.validation_rows import aligned

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Trains `model` for `args.iters` optimizer updates.

    Args:
        args: `TrainerArgs`; read, never changed.
        backend: the workers; not yet set up (the loop does that, after any checkpoint has been loaded).
        model: called as `model(**batch, **forward_kwargs)`; its output has a `loss` that is a mean over the valid
            entries of `labels`, or over rows where a batch has no labels.
        optimizer: made for this model's parameters.
        train_dataloader: yields this worker's part of a global step, `args.rows_per_worker()` rows (fewer at an
            epoch's end); a loader with `seek(consumed_samples)` resumes in O(1), any other is replayed.
        valid_dataloader: this worker's part of the validation set; parts may differ in length.
        train_sampler: its `set_epoch` is called before each epoch.
        batch_transform_fn: f(batch) -> batch with the model's argument names.
        batch_metrics_fn: f(batch, outputs) -> {name: mean over the micro-batch, or (sum, count)}, besides the loss.
        keep_for_metrics_fn, metrics_fn: f(batch, outputs) -> {name: tensor or list} to keep, and f(all that was kept,
            from all workers) -> {name: value}.
        collect: f(split) -> what an evaluation of that split adds its outputs to, instead of `keep_for_metrics_fn`.
        forward_kwargs, generate_kwargs: passed to every forward pass, and to `generate` on validation.
        hooks: more things to do every n steps.
        tokenizer_dir: folder whose tokenizer files are put into every checkpoint.
        loss: the terms of the loss, each with labels of its own.

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
        hooks: Sequence[Hook] = (),
        tokenizer_dir: Path | None = None,
        loss: Loss = MODEL_LOSS,
        collect: Callable[[str], Collector] | None = None,
    ) -> None:
        check_parts(args, model, optimizer, train_dataloader, valid_dataloader)
        self.args, self.backend, self.tokenizer_dir, self.loss = args, backend, tokenizer_dir, loss
        self.stream = BatchStream(train_dataloader, train_sampler) if train_dataloader is not None else None
        backend.reproduce(args)
        check_source(args, self.stream)
        self.valid_dataloader = valid_dataloader
        self.batch_metrics_fn = batch_metrics_fn
        self.forward_kwargs, self.generate_kwargs = dict(forward_kwargs or {}), dict(generate_kwargs or {})
        self.split = Splitter(args, backend, model, loss, batch_transform_fn, self.forward_kwargs)
        if "use_cache" in self.split.names:  # else keys and values of every layer live to the step's end, unused
            self.forward_kwargs.setdefault("use_cache", False)
        self.has_decoder, self.compared_splits = self.split.has_decoder, set()

        self.state, self.window = TrainState(), Window()
        self.kept = KeptOutputs(keep_for_metrics_fn, metrics_fn)
        self.collect = collect or (lambda split: KeptOutputs(keep_for_metrics_fn, metrics_fn))
        self.learning_rate = LearningRate(args, optimizer)
        self.signals, self.tracker = StopSignals(), None
        self._attempt: Attempt | None = None  # an update of which a device has yet to say what became
        self._random_state: dict[str, Any] | None = None  # of the process once training goes on, if not that it has
        self._saved_at: tuple[int, int] | None = None
        self._set_up_model(model, optimizer)
        self.meter = None if args.validate_only else FlopMeter(args, backend, self.window, self.say)
        self.validate_hook = ValidateHook(
            args.effective_valid_interval() if valid_dataloader is not None else None,
            metric=args.optimize_metric,
            mode=args.optimize_mode,
            save_best=args.save_best,
        )
        log = VerbHook(args.log_interval, lambda loop: loop.log_train())
        save = VerbHook(args.save_interval, lambda loop: loop.save(unless_last=True))
        own: list[Hook] = [log, *watching_hooks(args, self), self.validate_hook, save]
        self.hooks = with_profile([*own, *hooks], args, self.state.step, self.say)

    # ---- set-up and restart -----------------------------------------------------------------------------------------
    def _set_up_model(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Weights before wrapping (so that sharding backends shard the loaded ones), optimizer state after it."""
        args, backend = self.args, self.backend
        if args.model_path:
            claim_for_all(args, backend, once_more=True)
        self.saver = Saver.of_run(args, backend, self.tokenizer_dir)
        resume_from = on_main(backend, lambda: checkpoint.find_resume(args.resume, args.model_path), takes_long=True)
        source = resume_from
        if source is None and args.init_checkpoint:
            source = on_main(backend, lambda: checkpoint.behind_link(Path(args.init_checkpoint)))
        if source is not None:
            report = load_weights_for_all(model, source, args, backend, resumes=resume_from is not None)
            self.say(f"weights from {source}: {report}")
        elif args.validate_only and not args.names_weights():
            raise UserError(
                "--validate_only has nothing to validate: no checkpoint in --model_path and no --init_checkpoint, so "
                "the weights would be random"
            )
        if not backend.holds(model):  # DeepSpeed makes parameters views of its own buffers
            align_model(model)
        facts = run_facts(args, args.virtual_size(backend.world_size), model, optimizer)
        backend.setup(model, optimizer)
        self.say(backend.describe())
        if resume_from is not None:
            self._resume(resume_from, facts)
        elif source is not None:
            self._initialize_from(source)
        record_facts(self, facts)

    def _resume(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Continue exactly where the checkpoint was taken."""
        self.state, own = load_state(path, self.backend)
        check_facts(self, path, facts)
        self.learning_rate.resume(self.state.plateau)
        if own is not None:
            self.window, self._random_state = Window.from_state(own["window"]), own["random_state"]
            self.kept.data = own["kept"]
        else:
            logger.warning("%s was saved by another number of workers: dropout draws other noise from here on", path)
        self._seek(own)
        if self.backend.broadcast(self.saver.is_own(path)):  # a folder may be another one elsewhere
            self._saved_at = (self.state.step, self.state.consumed_samples)
        self.say(f"resumed from {path}: step {self.state.step}, {self.state.consumed_samples} samples consumed")

    def _seek(self, own: Mapping[str, Any] | None, order: str | None = None) -> None:
        if self.stream is not None:
            self.stream.seek(self.state, own and own["stream"], order)

    def _initialize_from(self, source: Path) -> None:
        """`--init_checkpoint`: the run so far, less what the --reset flags drop; data is read from its start."""
        args = self.args
        loaded, own = load_initial(
            source, self.backend, with_optimizer=not args.reset_optimizer, allow_pickle=args.allow_pickle
        )
        self.state.go_on_from(loaded, schedule=not args.reset_lr, step=not args.reset_iteration)
        if not args.reset_lr:
            self.learning_rate.resume(loaded.plateau)
        if args.skip_used_data:
            self.state.consumed_samples, self.state.consumed_tokens = loaded.consumed_samples, loaded.consumed_tokens
            self.state.data_fingerprint = loaded.data_fingerprint
            self._seek(own, loaded.data_order)
        self.say(f"initialized from {source}: starting at step {self.state.step}")
        if self.state.step >= args.iters and not args.validate_only:
            raise UserError(
                f"--init_checkpoint {source} is at step {self.state.step} and --iters is {args.iters}, so nothing is "
                "left to train; raise --iters, or count from 0 with --reset_iteration"
            )

    # ---- the loop ---------------------------------------------------------------------------------------------------
    def train(self) -> None:
        """Make updates until `args.iters` have been applied, patience has run out, or a signal asks to stop.

        Raises:
            TrainingDiverged: `args.max_skipped_updates` updates in a row were not finite.
            SystemExit: with 128 + signal number, after everything has been saved (143 for SIGTERM).
        """
        check_trainable(self.stream, self.backend.optimizer)
        self.state.data_fingerprint = same_on_all(self.stream.fingerprint, self.backend)
        if self.state.step >= self.args.iters:
            self.say(f"all {self.args.iters} updates have been made; raise --iters (or --epochs) to go on")
        # signals outermost: a launcher's SIGTERM must not end this worker while it looks for the one that is lost
        with self.signals, failures_located(self.state, self.backend), self.tracking(), self.saver.alongside():
            self._validate_before()
            self.backend.model.train()
            batches = checked(self._timed_batches(), self.stream, self.backend, self.args)
            while not self.signals.agreed and not self._is_over():
                info = self.train_step(*next(batches))
                if info is not None and info.applied:
                    self._run_hooks(info)
            self._finish()
        self.tracker = None
        if self.signals.agreed:
            raise SystemExit(128 + self.signals.agreed)

    def _is_over(self) -> bool:
        return self.state.step >= self.args.iters or 0 < self.args.early_stopping_patience <= self.state.patience

    def _validate_before(self) -> None:
        """The validation of the untrained model (`--valid_at_start`), or one that a signal cut short."""
        state, hook = self.state, self.validate_hook
        if state.step == 0 and self.args.valid_at_start and "start" not in state.metrics:
            if (values := self.validate(self.valid_dataloader)) is not None:  # else a restart does it
                state.metrics["start"] = storable(values)
        elif is_due(hook, state.step) and state.last_validated_step < state.step and self._saved_at is not None:
            self._validate_now()

    def _validate_now(self) -> None:
        self.validate_hook(self, StepInfo(self.state.step, True, 0.0, 0, 0, 0.0, 0.0))

    def _run_hooks(self, info: StepInfo) -> None:
        for hook in self.hooks:
            if is_due(hook, info.step):
                hook(self, info)
                self.backend.model.train()  # the hook may have evaluated

    def _timed_batches(self) -> Iterator[tuple[Mapping[str, Any], float]]:
        """Batches with the seconds each was waited for; a restarted run's random numbers go on from its last ones."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        yield from self.stream.timed()

    def train_step(self, batch: Mapping[str, Any], data_seconds: float = 0.0) -> StepInfo | None:
        """Forward and backward over the micro-batches of `batch`, and one update of the weights.

        A device with a queue of its own is given each step while it computes the one before, and is asked what became
        of that one's update just before it gets the next: it never waits for us. Where a hook is due, we wait.

        `train` has put the model into training mode; that walks over all modules, so it is not done every step.

        Returns:
            What became of the update; None where the device has yet to say, or a signal asked to stop.
        """
        started, backend = time.perf_counter(), self.backend
        part = self.split(batch, self.args.batch_size)
        weights, samples, tokens, num_micro_batches = self.agree(part)
        if self.signals.agreed:  # no pass more: a launcher kills a few seconds after its signal
            self._settle()
            self._random_state = self.stream.put_back()
            return None
        micro_batches = self.micro_batches = list(padded(part.micro_batches, num_micro_batches))
        started += self.meter.add(micro_batches, self.forward_kwargs)
        replay = Replay(self, micro_batches, weights)
        sums = make_gradients(self, micro_batches, weights)
        self._settle()  # the learning rate depends on whether the update before was applied
        self._set_lr()
        clip, due = (self.args.clip_grad_norm, self.args.clip_grad_value), self._is_due(self.state.step + 1)
        outcome = None if due else backend.begin_update(*clip)
        known = backend.update(*clip) if outcome is None else None
        seconds = time.perf_counter() - started
        self._attempt = Attempt(outcome or (lambda: known), sums, samples, tokens, seconds, data_seconds, replay)
        return self._settle() if outcome is None else None

    def _is_due(self, step: int) -> bool:
        """True if something is to be done after this step that needs to know what became of it."""
        return step >= self.args.iters or any(is_due(hook, step) for hook in self.hooks)

    def _settle(self) -> StepInfo | None:
        """Count the update that was made last, if that has not been done."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        info = attempt.settle(self.state, self.window, self.args.max_skipped_updates)
        if info.applied and self.tracker is not None:
            self.tracker.advance(info.step)
        return info

    def agree(self, part: StepBatch) -> tuple[dict[str, int], int, int, int]:
        """Global weights, samples and tokens, the largest number of micro-batches, and any signal: one collective."""
        passes = [len(part.micro_batches) * (rank == self.backend.rank) for rank in range(self.backend.world_size)]
        counts = [
            part.rows,
            part.tokens,
            *self.signals.pending,
            int(self.saver.failed),
            *part.weights.values(),
            *passes,
        ]
        totals = self.backend.sum(torch.tensor(counts)).tolist()
        self.signals.agree(totals[2:4])
        if totals[4]:  # with a checkpoint that could not be written
            self.saver.wait()
        weights = dict(zip(part.weights, totals[5 : -len(passes)], strict=True))
        return weights, totals[0], totals[1], max(totals[-len(passes) :])

    def _set_lr(self) -> None:
        self.learning_rate.set(self.backend.optimizer, self.state.step - self.state.schedule_start)

    def _finish(self) -> None:
        """End a run with the log line of the last part window, a validation and a checkpoint."""
        if not self.signals.agreed:
            step, patience = self.state.step, self.state.patience
            if 0 < self.args.early_stopping_patience <= patience:
                self.say(f"early stopping at step {step}: no better validation for {patience} evaluations")
            if self.window.steps:
                self.log_train()
                self._saved_at = None  # what a checkpoint of this step holds has changed
            if self.validate_hook.every and self.state.last_validated_step < self.state.step:
                self._validate_now()
                self._saved_at = None
        self.save()
        self.saver.wait()
        self.tracker.hparams(telling_settings(self.args))

    # ---- validation -------------------------------------------------------------------------------------------------
    def validate(self, dataloader: Iterable, split: str = "valid", write_tb: bool = True) -> dict[str, float] | None:
        """Metrics over all of `dataloader` on all workers, each example once; training's random numbers are untouched.

        Returns:
            {metric: value} (no loss without labels), or None when a signal cut it short.
        """
        model, options = self.backend.unwrap(), self.generate_kwargs
        self.backend.model.eval()
        sums, kept = MetricSums(exact=self.backend.sums_exactly), self.collect(split)
        with torch.no_grad(), preserved_random_state():
            for micro_batch in aligned(self, dataloader, split):
                with self.backend.autocast():
                    texts = None
                    if self.args.use_generate_on_valid:
                        seed = self.args.seed if self.backend.sums_exactly else None
                        texts = generate(model, micro_batch, options, synced=self.backend.shards_model, seed=seed)
                    outputs = self.backend.model(**micro_batch.inputs, **self.forward_kwargs)
                if texts is not None:
                    outputs["generation_outputs"] = texts
                measure(self, micro_batch, self.loss.means(micro_batch.inputs, outputs), outputs, sums, kept)
                del outputs  # logits would otherwise live on while the next texts are generated
        if self.signals.agreed:
            return None
        values = self.loss.with_total({**sums.reduce(self.backend), **kept.reduce(self.backend)})
        self.state.metrics[split] = storable(values)
        self._log(split, values, write_tb=write_tb)
        return values

    # ---- logs and checkpoints ---------------------------------------------------------------------------------------
    def say(self, message: str) -> None:
        """An event of the run, logged once (by rank 0)."""
        if self.backend.is_main:
            logger.info(message)

    def tracking(self) -> Tracker:
        """A context in which what is measured is also written to the run directory."""
        path, begun = None if self.args.validate_only else self.args.model_path or None, self._saved_at is not None
        start = self.state.step if begun else -1  # nothing logged here before is of this run
        unlogged = {"train": self.window.steps > 0, "valid": self.state.last_validated_step < self.state.step}
        again = [split for split, lacks in unlogged.items() if begun and lacks]  # by a start that was then killed
        rank, total = self.backend.rank, self.args.iters
        self.tracker = Tracker(path, rank=rank, start_step=start, again=again, total_steps=total)
        return self.tracker

    def log_train(self) -> None:
        """Reduce and write what has been added up since the last log line; every worker calls it."""
        window, self.window = self.window, Window()
        values = self.loss.with_total({**window.sums.reduce(self.backend), **self.kept.reduce(self.backend)})
        self.state.metrics["train"] = storable(values)
        steps, seconds = max(window.steps, 1), max(window.seconds, 1e-9)
        self._log(
            "train",
            values,
            gradients_global_norm=window.grad_norm_sum / steps,
            weights_global_norm=self.backend.weights_norm(),
            seconds_per_step=seconds / steps,
            tokens_per_second=window.tokens / seconds,
            **self.meter.share(window),
            data_wait_fraction=window.data_seconds / seconds,
            **self.backend.memory(),
            skipped_updates=self.state.skipped_updates,
            param_groups=[
                {k: float(group[k]) for k in ("lr", "scaled_lr") if group.get(k) is not None}
                for group in self.backend.optimizer.param_groups
            ],
        )

    def log_patience(self) -> None:
        self._log("valid", {}, patience=self.state.patience)

    def _log(self, split: str, values: dict[str, float], *, write_tb: bool = True, **extra: Any) -> None:
        if self.tracker is not None and write_tb:
            state = self.state
            self.tracker.log(split, state.step, state.consumed_samples, state.consumed_tokens, values, extra=extra)
        elif values:
            self.say(f"{split}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items() if isinstance(v, float)))

    def save(self, is_best: bool = False, *, unless_last: bool = False) -> None:
        """Begin a checkpoint of this very moment, unless there is one, or (`unless_last`) the run ends with one here.

        Every worker calls it. Within `train` it is written while training goes on.
        """
        here = (self.state.step, self.state.consumed_samples)
        if is_best:
            self._saved_at = None  # a checkpoint of this step does not know that it is
        if self.saver.writer is None or self._saved_at == here or (unless_last and self._is_over()):
            return
        if self.learning_rate.plateau is not None:
            self.state.plateau = self.learning_rate.plateau.state_dict()
        is_best = is_best or (self.args.save_best and self.state.best_step == self.state.step)
        own = {
            "random_state": random_state() if self._random_state is None else self._random_state,
            "stream": self.stream.state_dict(),
            "window": self.window.state_dict(),
            "kept": self.kept.data,
        }
        if self.backend.exact is not None:  # as it would be with any number of workers
            own |= {"window": self.window.whole_state(self.backend), "kept": self.kept.whole_data(self.backend)}
        self.saver.save(self.state, own, is_best=is_best)
        self._saved_at = here

    def load(self, source: str | Path) -> None:
        """Put the weights of a checkpoint into the model, for example the best one before a last evaluation."""
        self.saver.wait()

        def read() -> dict[str, Tensor]:
            model, allow_pickle = self.backend.unwrap(), self.args.allow_pickle
            if self.backend.shards_model:
                return checkpoint.read_state(model, Path(source), allow_pickle)
            allow_partial = self.args.allow_partial_checkpoint
            checkpoint.load_weights(model, source, allow_partial=allow_partial, allow_pickle=allow_pickle)
            return saved_state(model)

        self.backend.load_model_state(on_all(self.backend, read, only_main=True))
        self.say(f"weights from {source}")

    def save_metrics(self, save_path: str | Path | None) -> None:
        """Write the last metrics of every split, and the memory, to `save_path`/metrics.json."""
        if save_path is not None and self.backend.is_main:
            save_metrics(Path(save_path) / "metrics.json", self.state.metrics)
