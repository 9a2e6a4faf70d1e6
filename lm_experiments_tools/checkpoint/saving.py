"""Save the checkpoints of a run: training waits while the state is copied, and continues while files are written."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.backends.process_groups import last_to_report
from lm_experiments_tools.backends.slices import assign
from lm_experiments_tools.checkpoint.conversion import is_converted
from lm_experiments_tools.checkpoint.manifest import describe_files, list_files
from lm_experiments_tools.checkpoint.train_state import TrainState
from lm_experiments_tools.checkpoint.tree import WorkersFiles, save_tree, sharded_name, slice_ranges
from lm_experiments_tools.checkpoint.weights import save_all_but_weights, save_model, write_index
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.modules.inspection import is_adapted, saved_state, untied

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Saver:
    """Saves checkpoints, one at a time; all methods are collective.

    Rank 0 writes all files, because machines need not share a folder. Where a backend shards, each worker writes its
    own part into one folder that all machines see.

    Args:
        writer: writes into the run directory; None disables saving.
        in_background: write in a thread while training continues. A writing worker then holds a second copy of its
            part of weights and optimizer state in memory until the files are written.
        tokenizer_dir: folder whose tokenizer files are copied into every checkpoint.
        resume: checkpoint that `--resume` names; a later start by the same command reads it in the manifest.

    Attributes:
        failed: True if the last checkpoint could not be written; `wait` raises the reason.
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
        # Python joins the thread at the end of the process, so a started write is finished.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str | None] | None = None
        self.failed = False
        self._key = ""  # of the last save, equal on all workers

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
                # This only logs, because another exception may be on its way.
                logger.error("%s", error)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises RunError on all workers if it could not be written."""
        if self.writer is None:
            return
        # Writing may take longer than a collective may wait (--stall_timeout), so workers ask each other every second.
        while any(self.backend.gather(self._is_writing())):
            pass
        message = on_all(self.backend, self._finish_writing)
        if message and self.backend.is_main:
            logger.info(message)

    def _is_writing(self) -> bool:
        """True if files are still being written after a second; False as soon as they are not."""
        return self._writing is not None and bool(wait([self._writing], timeout=1.0).not_done)

    def _finish_writing(self) -> str | None:
        """The message for the log, unless this worker has logged it."""
        (writing, self._writing), self.failed = (self._writing, None), False
        return None if writing is None else writing.result()

    def save(self, state: TrainState, per_worker: dict[str, Any], *, is_best: bool = False) -> None:
        """Start to write a checkpoint of weights, optimizer and trainer state, then prune older ones.

        The method first waits until the previous checkpoint is complete. A checkpoint becomes visible only as a whole.
        `per_worker` is state of this worker only, such as its random states. RunError if this or the previous
        checkpoint cannot be written, UserError for a state with objects that no checkpoint can hold.
        """
        self.wait()
        backend, writer, step = self.backend, self.writer, state.step
        files = WorkersFiles(is_postponed=self.in_background and self._is_training)
        workers = backend.gather(per_worker)
        # A key of its own, because what a failed save has reported stays in the store.
        path, self._key = on_main(backend, lambda: (writer.begin(step), secrets.token_hex(8)))
        try:
            # One after the other: gathered weights are freed before the optimizer's state is copied.
            self._save_weights(path, step, files)
            tree = backend.state.optimizer_state()
            ranges = backend.gather(slice_ranges(tree)) if backend.state.is_sharded else None
            stem, write = path / "optimizer", files.keep
            self._write(step, lambda: _save(stem, tree, write=write, rank=backend.rank, ranges=ranges))
            del tree
            tree = self._trainer_tree(state, workers)
            self._write(step, lambda: _save(path / "trainer_state", tree, write=write), only_main=True)
            # Listed before any worker writes postponed files.
            own = set(self._write(step, lambda: list_files(path).values(), only_main=True) or ())
        except (RunError, UserError):
            if backend.is_main:
                writer.discard(step)
            raise
        own.difference_update(*backend.gather(files.written)[1:])
        complete = partial(self._complete, path, step, files, own.union(files.written), is_best=is_best)
        if backend.is_main or backend.state.is_sharded:
            self._writing = self._thread.submit(complete)
            self._writing.add_done_callback(self._note_failure)
        if not files.is_postponed:
            self.wait()

    def _note_failure(self, writing: Future[str | None]) -> None:
        self.failed = writing.exception() is not None

    def _write(self, step: int, function: Callable[[], T], *, only_main: bool = False) -> T | None:
        """Run a function on the files of this worker and return its result, None where it was not run; collective."""

        def guarded() -> T:
            with self.writer.guarded(step, removes=False):
                return function()

        return on_all(self.backend, guarded, only_main=only_main or not self.backend.state.is_sharded)

    def _save_weights(self, path: Path, step: int, files: WorkersFiles) -> None:
        """Write the model. Where a backend shards, each worker writes the full tensors that are assigned to it.

        Adapters are small, and weights with conversions must be together, so rank 0 writes these.
        """
        backend, model = self.backend, self.backend.unwrap()
        if not backend.state.is_sharded or is_adapted(model) or is_converted(model):
            weights = backend.state.model_state()
            # A backend that shards has made copies already.
            write = files.keep if backend.state.is_sharded else files.copy
            save = partial(save_model, path, model, weights, self.tokenizer_dir, write)
            return self._write(step, save, only_main=True)
        rest = partial(save_all_but_weights, path, model, self.tokenizer_dir)
        names = backend.broadcast(self._write(step, rest, only_main=True))
        tensors = untied(saved_state(model))
        sizes = {n: getattr(t, "ds_numel", t.numel()) for n, t in tensors.items() if isinstance(t, nn.Parameter)}
        # Buffers differ between workers, and only those of one worker belong together.
        writers = {**dict.fromkeys(tensors, 0), **assign(sizes, backend.world_size)}
        held = backend.state.model_state(writers)
        held = {name: held[name].contiguous() for name in names if name in held}
        file = path / sharded_name("model", backend.rank, backend.world_size)
        self._write(step, lambda: files.keep(held, file, {"format": "pt"}))
        parts = backend.gather((list(held), sum(tensor.nbytes for tensor in held.values())))
        names_of, num_bytes = zip(*parts, strict=True)
        self._write(step, lambda: write_index(path, list(names_of), sum(num_bytes)), only_main=True)

    def _complete(self, path: Path, step: int, files: WorkersFiles, own: set[Path], *, is_best: bool) -> str | None:
        """Write this worker's postponed files; the last worker to finish commits the checkpoint.

        `own` are all files that this worker has written and is going to write. Returns a message for the log if
        another worker commits.
        """
        backend, writer, entries = self.backend, self.writer, None
        try:
            with writer.guarded(step, removes=False):
                files.write()
                entries = describe_files(path, own)
        # The report must be made after an error too: without it the other workers' files would never be removed.
        finally:
            key = f"checkpoint {self._key}"
            reports = last_to_report(key, entries) if backend.state.is_sharded else [entries]
            if reports is not None and None in reports:
                writer.discard(step)
        # Nothing here waits for another worker, so a lost one cannot keep the others' threads from ending. Its
        # checkpoint stays unfinished, and the next save removes it.
        message = f"saved checkpoint of step {step}{' (the best so far)' if is_best else ''}"
        if reports is None or None in reports:
            return message
        entries = dict(chain.from_iterable(report.items() for report in reports))
        manifest = {"world_size": backend.world_size, "backend": str(backend), "resume": self.resume}
        writer.commit(step, is_best=is_best, extra_manifest=manifest, files=entries)
        logger.info(message)
        return None

    def _trainer_tree(self, state: TrainState, workers: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "state": asdict(state),
            "world_size": self.backend.world_size,
            "reproducible": self.backend.reduction.reproducible,
            "threads": torch.get_num_threads(),
            "optimizer": self.backend.state.optimizer_kind,
            "workers": workers,
        }


def _save(stem: Path, tree: dict[str, Any], **options: Any) -> None:
    try:
        save_tree(stem, tree, **options)
    # The object is in an optimizer's or a loader's state_dict, or among accumulated outputs.
    except TypeError as error:
        raise UserError(f"a checkpoint cannot be saved: {error}") from error
