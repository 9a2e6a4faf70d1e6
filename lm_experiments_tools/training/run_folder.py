"""The run directory of a job: one folder shared by all machines, or one folder on each machine.

Rank 0 writes all files except the other ranks' logs, and chooses the checkpoint to resume from. Separate folders work
if rank 0 stays on the same machine. Backends that shard need a shared folder: each worker writes its part.
"""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm_experiments_tools.backends.collective import agreed, on_all, on_main
from lm_experiments_tools.checkpoint.manifest import parse_step
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.config.flags import AUTO, RUNS
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.run_directory import RunDirectory, claim_run

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import ExperimentArgs, TrainerArgs
    from lm_experiments_tools.training.phases import Phase


def with_run_directory(args: ExperimentArgs, backend: Backend, script: str) -> ExperimentArgs:
    """Replace `--model_path auto` by a new folder runs/SCRIPT-DATE below `--working_dir`, the same on all workers.

    Collective. UserError if the folder cannot be made, or a restart of the job would not find it.
    """
    if args.model_path != AUTO:
        return args
    # A validation writes no files.
    if args.validate_only:
        return replace(args, model_path=None)
    return replace(args, model_path=on_main(backend, lambda: _make_folder(args.working_folder(), script)))


def _make_folder(root: str, script: str) -> str:
    # A restarted job would start a new run in a folder of its own.
    for name, value in (("TORCHELASTIC_MAX_RESTARTS", "0"), ("HOROVOD_ELASTIC", "0"), ("SLURM_RESTART_COUNT", "0")):
        if os.environ.get(name, value) != value:
            raise UserError(
                "this job may be started again by its launcher: give --model_path DIR, which a restart continues, or "
                "--model_path none to save nothing"
            )
    runs, date = os.environ.get(RUNS, "runs"), time.strftime("%Y-%m-%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path(runs, f"{script}-{date}" + f"-{number}" * (number > 1))
        try:
            Path(root, folder).mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror}): give a --model_path, or none.") from error
    raise AssertionError


def claim_for_all(args: TrainerArgs, backend: Backend, *, once_more: bool = False) -> RunDirectory | None:
    """Lock and return the run directory on rank 0; other ranks get None; collective. Raises UserError.

    With `once_more` the run has been compared with its recorded settings before: differences are not logged again.
    """
    # An elastic job changes its number of workers, and with it the global batch; its other settings stay.
    is_elastic = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    workers = None if is_elastic else args.virtual_size(backend.world_size)
    run = on_all(backend, lambda: claim_run(args, workers, once_more=once_more), only_main=True)
    folder = Path(args.model_path)
    # Network folders cache which names exist, so the mark has a new one.
    mark = folder / f".seen-{backend.broadcast(secrets.token_hex(6))}"
    on_main(backend, mark.touch)
    try:
        reports = backend.gather((platform.node(), mark.exists(), newest_step(folder)))
    finally:
        if backend.is_main:
            mark.unlink(missing_ok=True)
    main, _, newest = reports[0]
    apart = {host: step for host, sees, step in reports if not sees}
    if apart and backend.state.is_sharded and not args.validate_only:
        raise agreed(
            UserError(
                f"{folder} on {main} is not the folder of that name on {', '.join(apart)}: FSDP and ZeRO write a part "
                "of each checkpoint on each machine, so give a --model_path in a folder that all machines share"
            )
        )
    host, step = max(apart.items(), key=lambda item: item[1], default=(main, newest))
    if args.resume == "auto" and step > newest:
        raise agreed(
            UserError(
                f"{folder} on {host} has the checkpoint of step {step}, and that on {main}, where rank 0 is now, "
                f"{f'ends at step {newest}' if newest >= 0 else 'has none'}: the folder is not shared, so start with "
                f"{host} as the first machine, or copy its folder to {main}"
            )
        )
    return run


def open_saver(args: TrainerArgs, backend: Backend, tokenizer_dir: Path | None, phase: Phase | None) -> Saver:
    """Claim the run directory, and create the saver of its checkpoints; collective. Without one it saves nothing."""
    if not args.model_path:
        return Saver(backend, None)
    run = args if phase is None else phase.run
    claim_for_all(run, backend, once_more=True)
    folder = Path(args.model_path)
    return Saver(
        backend,
        CheckpointWriter(folder / "checkpoints", args.keep_checkpoints, links_in=folder),
        in_background=args.save_in_background,
        tokenizer_dir=tokenizer_dir,
        resume=run.resume_path(),
    )


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint in a run directory, complete or not; -1 if there is none."""
    root = folder / "checkpoints"
    steps = [parse_step(entry.name) for entry in root.iterdir()] if root.is_dir() else []
    return max((step for step in steps if step is not None), default=-1)
