"""Checkpoints of a run: the state is copied while training waits, and written while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint.tensor_files import PostponedFiles, WriteTensors, write_now
from lm_experiments_tools.checkpoint.train_state import TrainState
from lm_experiments_tools.checkpoint.tree import save_tree
from lm_experiments_tools.checkpoint.weights import save_model
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)


class Saver:
    """Saves checkpoints, one at a time; its verbs are collective, so every worker calls them.

    Files are written by rank 0 alone, to which a sharded model or optimizer is gathered.

    Args:
        writer: of the run directory; None saves nothing.
        in_background: let rank 0 write while training goes on. Its memory then holds another copy of weights and
            optimizer state until they are written, of a sharded model (FSDP) the gathered ones.
        tokenizer_dir: its tokenizer files are put into every checkpoint.
    """

    def __init__(
        self,
        backend: Backend,
        writer: CheckpointWriter | None,
        *,
        in_background: bool = True,
        tokenizer_dir: Path | None = None,
    ) -> None:
        self.backend, self.writer, self.tokenizer_dir = backend, writer, tokenizer_dir
        self._postpones = in_background
        self._alongside = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # the end of the process waits for it
        self._writing: Future[None] | None = None

    @classmethod
    def of_run(cls, args: TrainerArgs, backend: Backend, tokenizer_dir: Path | None) -> Saver:
        """The saver into `--model_path`, if there is one."""
        writer = None
        if args.model_path:
            run = Path(args.model_path)
            writer = CheckpointWriter(run / "checkpoints", args.keep_checkpoints, rank=backend.rank, links_in=run)
        return cls(backend, writer, in_background=args.save_in_background, tokenizer_dir=tokenizer_dir)

    def is_own(self, checkpoint: Path) -> bool:
        """True for a checkpoint among those that are written here."""
        return self.writer is not None and checkpoint.resolve().parent == self.writer.root.resolve()

    @contextmanager
    def alongside(self) -> Iterator[None]:
        """While entered, `save` returns before the files are written. The end waits for them, however it comes."""
        self._alongside = True
        try:
            yield
        finally:
            self._alongside = False
            if self._writing is not None and (error := self._writing.exception()) is not None:
                logger.error("%s", error)  # beside another exception, which is on its way

    @property
    def failed(self) -> bool:
        """True if the last checkpoint could not be written; `wait` raises why."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def wait(self) -> None:
        """Return when the last checkpoint is complete. Raises RunError on every worker if it could not be written."""
        if self.writer is not None:
            on_all(self.backend, self._finish_writing, only_main=True, takes_long=True)

    def _finish_writing(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def save(self, state: TrainState, per_worker: dict[str, Any], *, is_best: bool = False) -> None:
        """Begin a checkpoint of weights, optimizer and trainer state, once the one before it is complete.

        It is atomic, and older ones are pruned after it.

        Raises:
            RunError: this one or the one before it cannot be written.
            UserError: the state has what no checkpoint can hold.
        """
        self.wait()
        backend, writer, step = self.backend, self.writer, state.step
        postponed = PostponedFiles() if self._postpones and self._alongside else None
        all_workers = backend.gather(per_worker)
        path = on_main(backend, lambda: writer.begin(step))
        copy, keep = (write_now, write_now) if postponed is None else (postponed.copy, postponed.keep)
        self._save_weights(path, step, copy)  # first: what was gathered of them is gone when the optimizer's state is
        self._save_optimizer(path, step, keep)
        self._on_main(step, lambda: self._save_trainer(path, state, all_workers, keep))
        manifest = {"world_size": backend.world_size, "backend": backend.describe()}

        def complete() -> None:
            if postponed is not None:
                with writer.guarded(step):
                    postponed.write()
            writer.commit(step, is_best=is_best, extra_manifest=manifest)
            logger.info("saved checkpoint of step %d%s", step, " (the best so far)" if is_best else "")

        if postponed is None:
            on_all(backend, complete, only_main=True)
        elif backend.is_main:
            self._writing = self._thread.submit(complete)

    def _save_weights(self, path: Path, step: int, write: WriteTensors) -> None:
        weights, model = self.backend.model_state(), self.backend.unwrap()
        self._on_main(
            step, lambda: save_model(path, model, state_dict=weights, tokenizer_dir=self.tokenizer_dir, write=write)
        )

    def _save_optimizer(self, path: Path, step: int, write: WriteTensors) -> None:
        tree = self.backend.optimizer_state()
        self._on_main(step, lambda: save_tree(path / "optimizer", tree, write=write))

    def _on_main(self, step: int, write: Callable[[], None]) -> None:
        def guarded() -> None:
            with self.writer.guarded(step):
                write()

        on_all(self.backend, guarded, only_main=True)

    def _save_trainer(
        self, path: Path, state: TrainState, all_workers: list[dict[str, Any]], write: WriteTensors
    ) -> None:
        tree = {
            "state": asdict(state),
            "world_size": self.backend.world_size,
            "reproducible": self.backend.reproducible,
            "threads": torch.get_num_threads(),
            "optimizer": self.backend.optimizer_kind,
            "workers": all_workers,
        }
        try:
            save_tree(path / "trainer_state", tree, write=write)
        except TypeError as error:  # of a loader's state_dict, or what keep_for_metrics_fn keeps
            raise UserError(f"a checkpoint cannot be saved: {error}") from error
