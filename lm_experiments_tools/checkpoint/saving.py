"""Save the checkpoints of a run: training waits while the state is copied, and continues while files are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.checkpoint.train_state import TrainState
from lm_experiments_tools.checkpoint.tree import PostponedFiles, WriteTensors, save_tree, write_now
from lm_experiments_tools.checkpoint.weights import save_model
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)


class Saver:
    """Saves checkpoints, one at a time; all methods are collective.

    Rank 0 gathers sharded state and writes all files, because machines need not share a folder.

    Args:
        writer: writes into the run directory; None disables saving.
        in_background: write in a thread while training continues. Rank 0 then holds a second copy of weights and
            optimizer state in memory until the files are written.
        tokenizer_dir: folder whose tokenizer files are copied into every checkpoint.
        resume: checkpoint that `--resume` names; a later start by the same command reads it in the manifest.
    """

    def __init__(
        self,
        backend: Backend,
        writer: CheckpointWriter | None,
        *,
        in_background: bool = True,
        tokenizer_dir: Path | None = None,
        resume: str | None = None,
    ) -> None:
        self.resume = resume
        self.backend, self.writer, self.tokenizer_dir = backend, writer, tokenizer_dir
        self.in_background = in_background
        self._is_training = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # joined at the end of the process
        self._writing: Future[None] | None = None

    @classmethod
    def of_run(
        cls, args: TrainerArgs, backend: Backend, tokenizer_dir: Path | None, resume: str | None = None
    ) -> Saver:
        """Create the saver of `--model_path`; without this flag it saves nothing."""
        writer = None
        if args.model_path:
            run = Path(args.model_path)
            writer = CheckpointWriter(run / "checkpoints", args.keep_checkpoints, links_in=run)
        return cls(backend, writer, in_background=args.save_in_background, tokenizer_dir=tokenizer_dir, resume=resume)

    def is_own(self, checkpoint: Path) -> bool:
        """True if this saver's run wrote the checkpoint."""
        return self.writer is not None and checkpoint.resolve().parent == self.writer.root.resolve()

    @contextmanager
    def alongside(self) -> Iterator[None]:
        """Context in which `save` may write while training continues; its end waits, and logs a failure."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False
            if self._writing is not None and (error := self._writing.exception()) is not None:
                logger.error("%s", error)  # another exception may be on its way

    @property
    def failed(self) -> bool:
        """True if the last checkpoint could not be written; `wait` raises the reason."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises RunError on all workers if it could not be written."""
        if self.writer is None:
            return
        # Writing may take longer than a collective may wait (--stall_timeout), so the others ask rank 0 every second.
        while self.backend.broadcast(self._is_writing()):
            pass
        on_all(self.backend, self._finish_writing, only_main=True)

    def _is_writing(self) -> bool:
        """True if files are still being written after a second; False as soon as they are not."""
        return self._writing is not None and bool(wait([self._writing], timeout=1.0).not_done)

    def _finish_writing(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def save(self, state: TrainState, per_worker: dict[str, Any], *, is_best: bool = False) -> None:
        """Start to write a checkpoint of weights, optimizer and trainer state, then prune older ones.

        The method first waits until the previous checkpoint is complete. A checkpoint becomes visible only as a whole.

        Args:
            state: trainer state that is equal on all workers.
            per_worker: state of this worker only, such as its random states.
            is_best: True if the last validation was the best so far.

        Raises:
            RunError: this or the previous checkpoint cannot be written.
            UserError: the state has objects that no checkpoint can hold.
        """
        self.wait()
        backend, writer, step = self.backend, self.writer, state.step
        postponed = PostponedFiles() if self.in_background and self._is_training else None
        copy, keep = (write_now, write_now) if postponed is None else (postponed.copy, postponed.keep)
        workers = backend.gather(per_worker)
        path = on_main(backend, lambda: writer.begin(step))

        def save_weights(weights: dict[str, Tensor] | None) -> None:
            save_model(path, backend.unwrap(), weights, self.tokenizer_dir, copy)

        def write(save: Callable[[Any], None], content: Any) -> None:
            def guarded() -> None:
                with writer.guarded(step):
                    save(content)

            on_all(backend, guarded, only_main=True)

        # one after the other: gathered weights are freed before the optimizer's state is gathered
        write(save_weights, backend.model_state())
        write(lambda tree: save_tree(path / "optimizer", tree, write=keep), backend.optimizer_state())
        write(lambda tree: _save_trainer(path, tree, keep), self._trainer_tree(state, workers))
        manifest = {"world_size": backend.world_size, "backend": backend.describe(), "resume": self.resume}

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

    def _trainer_tree(self, state: TrainState, workers: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "state": asdict(state),
            "world_size": self.backend.world_size,
            "reproducible": self.backend.reproducible,
            "threads": torch.get_num_threads(),
            "optimizer": self.backend.optimizer_kind,
            "workers": workers,
        }


def _save_trainer(path: Path, tree: dict[str, Any], write: WriteTensors) -> None:
    try:
        save_tree(path / "trainer_state", tree, write=write)
    except TypeError as error:  # of a loader's state_dict, or of accumulated outputs
        raise UserError(f"a checkpoint cannot be saved: {error}") from error
