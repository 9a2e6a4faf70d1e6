"""The trainers `Trainer` and `TrainerAccelerate`, for current arguments and for those of t5-experiments.

With t5-experiments' arguments, each start is a new run, checkpoints are named `model_N` and `model_best`, `load` also
restores optimizer and step, and `validate` after training logs to TensorBoard.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lm_experiments_tools.ancestor.arguments import check_rate, settings_of
from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint.legacy import write_old_checkpoint
from lm_experiments_tools.checkpoint.manifest import step_directory_name
from lm_experiments_tools.checkpoint.train_state import load_initial
from lm_experiments_tools.config import training as today
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.run_directory import RunDirectory, setup_logging
from lm_experiments_tools.tracking.tracker import Tracker
from lm_experiments_tools.training.trainer import TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelerate import Accelerator

    from lm_experiments_tools.backends.backend import Backend

    StopCondition = Callable[[float], bool]  # of the best optimize_metric so far

logger = logging.getLogger(__name__)


class _CompatibleTrainer(TrainingLoop):
    """Methods and attributes of t5-experiments' trainers; with current arguments it behaves as its base class."""

    _old = False  # the arguments are t5-experiments'
    _stops: StopCondition | None = None
    _written: tuple[str, int] | None = None  # name and step of the last of t5-experiments' checkpoints

    def save(
        self,
        save_path: str | Path | None = None,
        suffix: str = "",
        *,
        is_best: bool = False,
        unless_last: bool = False,
    ) -> None:
        """Write a checkpoint; every worker calls it.

        Args:
            save_path: folder for a file `model_{suffix}` or `model_{step}` of t5-experiments; None writes a checkpoint
                of this package to the run directory.
            is_best: mark it as the best checkpoint so far.
            unless_last: do nothing at the last step of the run, which is saved anyway.
        """
        if save_path is not None:
            self._write_old(Path(save_path), suffix or str(self.state.step))
            return
        super().save(is_best, unless_last=unless_last and not self._old)  # the old files are made of each
        if self._old and self.saver.writer is not None:
            every = self.args.save_interval
            name = "best" if is_best else str(self.state.step) if every and self.state.step % every == 0 else None
            if name is not None and self._written != (name, self.state.step):
                self._write_old(Path(self.args.model_path), name)
                self._written = name, self.state.step

    def _write_old(self, folder: Path, name: str) -> None:
        """`folder`/model_`name`.pth, as t5-experiments' Trainer wrote it."""
        weights, tree, state = self.backend.state.model_state(), self.backend.state.optimizer_state(), self.state
        epoch = 0 if self.stream is None else self.stream.epoch

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"model_{name}.pth"
            write_old_checkpoint(path, weights, tree["optimizer"], state.step, epoch, state.metrics)
            logger.info("model was saved to %s", path)

        on_main(self.backend, write)

    def load(
        self,
        source: str | Path,
        reset_optimizer: bool = False,
        reset_lr: bool = False,
        reset_iteration: bool = False,
    ) -> None:
        """Load a checkpoint into the model; with t5-experiments' arguments also optimizer, schedule and step."""
        super().load(source)
        if self._old:
            loaded, _ = load_initial(Path(source), self.backend, with_optimizer=not reset_optimizer)
            self.state.go_on_from(loaded, schedule=not reset_lr, step=not reset_iteration)
            if not reset_lr:
                self.learning_rate.resume(loaded.plateau)

    def validate(self, dataloader: Iterable, split: str = "valid", write_tb: bool = True) -> dict[str, float] | None:
        """Evaluate the model on `dataloader`; with t5-experiments' arguments also log to TensorBoard."""
        if not self._old or not write_tb or self.tracker is not None:
            return super().validate(dataloader, split, write_tb)
        last = max(self.args.iters, self.state.step)  # nothing that was recorded is of a later step
        with Tracker(self.args.model_path, rank=self.backend.rank, start_step=last) as self.tracker:
            try:
                return super().validate(dataloader, split, write_tb)
            finally:
                self.tracker = None

    def is_over(self) -> bool:
        best = self.state.best_metric
        return super().is_over() or (self._stops is not None and best is not None and bool(self._stops(best)))

    # ---- names of t5-experiments' attributes
    @property
    def n_iter(self) -> int:
        """Number of optimizer updates applied."""
        return self.state.step

    @property
    def n_epoch(self) -> int:
        """Number of completed epochs."""
        return 0 if self.stream is None else self.stream.epoch

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The newest metrics of each split."""
        return self.state.metrics

    @property
    def model(self) -> nn.Module:
        """The model, wrapped for distributed training."""
        return self.backend.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, wrapped for distributed training."""
        return self.backend.optimizer

    @property
    def per_worker_batch_size(self) -> int:
        """Examples per worker and optimizer update."""
        return self.args.rows_per_worker()

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer update, over all workers."""
        return self.args.global_batch_size(self.backend.world_size)


class Trainer(_CompatibleTrainer):
    """t5-experiments' trainer on Horovod.

    Call: `Trainer(args, model, optimizer, train_dataloader, valid_dataloader, ...)`; other arguments are
    `train_sampler`, `batch_transform_fn`, `batch_metrics_fn`, `keep_for_metrics_fn`, `metrics_fn`, `forward_kwargs`,
    `generate_kwargs` and `callbacks` of `lm_experiments_tools.training.trainer.TrainingLoop`, whose `help` tells more.
    """

    def __new__(cls, args: Any, model: Any, *others: Any, **options: Any) -> Any:
        """Return a `TrainerAccelerate` if the second argument is an Accelerator, as in some forks."""
        if hasattr(model, "prepare_model"):
            return TrainerAccelerate(args, model, *others, **options)
        return super().__new__(cls)

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        optimizer: Optimizer | None,
        train_dataloader: Iterable | None,
        valid_dataloader: Iterable | None = None,
        *others: Any,
        stop_metric_condition: StopCondition | None = None,
        **options: Any,
    ) -> None:
        self._old, self._stops = not isinstance(args, today.TrainerArgs), stop_metric_condition
        if self._old:
            args = settings_of(args, validates=valid_dataloader is not None)
        check_rate(args, optimizer)
        from lm_experiments_tools.backends.horovod import HorovodBackend

        backend = HorovodBackend.from_args(args)
        _show_progress(args, backend)
        if self._old and args.model_path:
            start = on_main(backend, lambda: _set_aside(Path(args.model_path), args.init_checkpoint))
            args = replace(args, init_checkpoint=start)
        super().__init__(args, backend, model, optimizer, train_dataloader, valid_dataloader, *others, **options)


class TrainerAccelerate(_CompatibleTrainer):
    """t5-experiments' trainer on an `accelerate.Accelerator`.

    Call: `TrainerAccelerate(args, accelerator, model, optimizer, ...)`, with the other arguments of `Trainer`.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer | None,
        train_dataloader: Iterable | None,
        valid_dataloader: Iterable | None = None,
        *others: Any,
        stop_metric_condition: StopCondition | None = None,
        **options: Any,
    ) -> None:
        self._old, self._stops = not isinstance(args, today.TrainerArgs), stop_metric_condition
        if self._old:
            args = settings_of(args, accelerator.mixed_precision, validates=valid_dataloader is not None)
            model, optimizer = _unprepared(accelerator, model, optimizer)
        check_rate(args, optimizer)
        from lm_experiments_tools.backends.accelerate import AccelerateBackend

        backend = AccelerateBackend.from_accelerator(accelerator, args)
        _show_progress(args, backend)
        if self._old and args.model_path:
            start = on_main(backend, lambda: _set_aside(Path(args.model_path), args.init_checkpoint))
            args = replace(args, init_checkpoint=start)
        super().__init__(args, backend, model, optimizer, train_dataloader, valid_dataloader, *others, **options)

    def _write_old(self, folder: Path, name: str) -> None:
        """`folder`/model_`name`, a folder as t5-experiments' accelerate trainer wrote: a checkpoint of today."""
        writer = self.saver.writer
        if writer is None or folder.resolve() != writer.links_in.resolve():
            raise UserError(f"a trainer on Accelerate saves in its --model_path, not in {folder}: leave save_path out")
        checkpoint = writer.root / step_directory_name(self.state.step)
        self.saver.wait()
        on_main(self.backend, lambda: _copy_links(checkpoint, folder / f"model_{name}"))


def _show_progress(args: today.TrainerArgs, backend: Backend) -> None:
    """Log to the console and the run directory, as the scripts do, unless the program has handlers of its own."""
    if all(getattr(handler, "set_up_by_run", False) for handler in logging.getLogger().handlers):
        on_all(backend, lambda: setup_logging(args.model_path, backend.rank))


def _set_aside(run: Path, start: str | None) -> str | None:
    """Rename the files of an earlier start in the run directory: t5-experiments always started a new run.

    Returns the new path of the checkpoint `start`, which may be one of them.
    """
    RunDirectory(run).claim()  # not the files of a run that is going on
    source = Path(start).resolve() if start else run.resolve()
    for name in ("last", "best"):
        (run / name).unlink(missing_ok=True)
    for old in (run / "checkpoints", run / "metrics.jsonl"):
        if old.exists():
            count = 1
            while (aside := old.with_name(f"{old.stem}.{count}{old.suffix}")).exists():
                count += 1
            if old.resolve() in source.parents:
                start = str(aside / source.relative_to(old.resolve()))
            os.rename(old, aside)
            logger.warning("%s is from an earlier start, and this is a new run: renamed to %s", old, aside.name)
    return start


def _copy_links(source: Path, target: Path) -> None:
    """Give the files of a checkpoint a second folder, without copying where the disk knows hard links."""
    new = target.with_name(f".{target.name}.new")
    for folder in (new, target):
        if folder.is_dir():
            shutil.rmtree(folder)
    try:
        shutil.copytree(source, new, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(source, new)
    os.rename(new, target)
    logger.info("model was saved to %s", target)


def _unprepared(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer | None
) -> tuple[nn.Module, Optimizer | None]:
    """Model and optimizer as before `accelerator.prepare`, which the trainer calls itself. UserError if sharded."""
    kind = accelerator.distributed_type.value
    if not getattr(model, "_is_accelerate_prepared", False) and not hasattr(optimizer, "accelerator_state"):
        return model, optimizer
    if kind in ("FSDP", "DEEPSPEED"):
        raise UserError(
            f"accelerator.prepare has sharded the model ({kind}) before the trainer could: take the model and the "
            "optimizer out of that call, the trainer prepares them"
        )
    plain = accelerator.unwrap_model(model)
    accelerator.free_memory()
    if plain is not model:
        vars(model).pop("reducer", None)  # its hooks and buckets; the program still holds the wrapper
    vars(plain).pop("_is_accelerate_prepared", None)
    return plain, getattr(optimizer, "optimizer", optimizer)
