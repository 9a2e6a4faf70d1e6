"""The parts of a text as tasks of datatrove's executors, each `tokenize --shard i/n`, and their merge.

datatrove starts the tasks, and starts those again that were not finished; nothing else of it is used.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.text.documents import plan_pieces
from lm_experiments_tools.data.text.encoding import Encoding
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.indexed import finished_record
from lm_experiments_tools.data.tokens.merge import merge_datasets
from lm_experiments_tools.data.tokens.pieces import part_of_plan, plan_fingerprint, shard_prefix
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import UserError, os_sentence
from lm_experiments_tools.files import write_atomic
from lm_experiments_tools.tools import merge
from lm_experiments_tools.tools.tokenize import TokenizeArgs

_PROGRAMS = ("launch_pickled_pipeline", "merge_stats")  # of datatrove, in its Slurm jobs


def tokenize_parts(args: TokenizeArgs) -> None:
    """Run the parts and merge them, or on Slurm submit both.

    Raises:
        UserError: an engine that is not installed or not there, text or vocabulary that cannot be read, a part that
            failed.
    """
    _check_installed(args.on)
    folder = _prepare(args)
    {"local": _run_local, "ray": _run_ray, "slurm": _submit}[args.on](args, folder)
    if args.on == "slurm":
        return
    if failed := sorted((folder / "failed").glob("*")):
        raise UserError(f"part {int(failed[0].name)} of {args.shards}: {failed[0].read_text(encoding='utf-8')}")
    merge.run(merge.MergeArgs(input=_parts(args), output=args.output, overwrite=args.overwrite))


def _check_installed(engine: str) -> None:
    for package in ("datatrove", *(["ray"] if engine == "ray" else [])):
        if importlib.util.find_spec(package) is None:
            wanted = "datatrove 'ray[train]'" if engine == "ray" else "datatrove"
            raise UserError(f"--on {engine} needs {package}, which is not installed: pip install {wanted}")
    if engine == "slurm" and shutil.which("sbatch") is None:
        raise UserError("sbatch is not installed here: start this on a login node of the cluster.")
    if engine == "slurm" and "SLURM_ARRAY_TASK_ID" in os.environ:
        raise UserError(
            "this is a job array's task already, from where --on slurm submits nothing: start it elsewhere."
        )


def _prepare(args: TokenizeArgs) -> Path:
    """The folder of datatrove's records, one for each text, vocabulary and cut; and no mark of a part that is gone."""
    vocabulary = Vocabulary.load(args.vocab)
    encoding = Encoding.of(vocabulary, args.text_key, args.append_eos, args.encode_by).identity()
    plan = plan_fingerprint(plan_pieces(args.input), encoding)
    _, shard = part_of_plan(args.input, 0, args.shards, encoding)
    folder = Path(f"{os.path.abspath(args.output)}.parts") / f"{plan[:12]}-{args.shards}"
    shutil.rmtree(folder / "failed", ignore_errors=True)
    (folder / "failed").mkdir(parents=True)
    for number, part in enumerate(_parts(args)):
        record = finished_record(part, "shard")
        if record is None or record["shard"].get("source") != shard["source"]:
            (folder / "completions" / f"{number:05d}").unlink(missing_ok=True)
    (folder / "merge" / "completions" / "00000").unlink(missing_ok=True)
    return folder


def _parts(args: TokenizeArgs) -> tuple[str, ...]:
    return tuple(shard_prefix(args.output, number, args.shards) for number in range(args.shards))


def _part(args: TokenizeArgs, start: str, folder: Path, data: Any, rank: int, world_size: int) -> None:
    """A step of a pipeline: make part `rank` of `world_size`; what its user can mend is said in one sentence."""
    os.chdir(start)
    try:
        tokenize_corpus(
            args.input,
            args.vocab,
            args.output,
            workers=args.workers or 1,
            append_eos=args.append_eos,
            text_key=args.text_key,
            max_bad_lines=args.max_bad_lines,
            encode_by=args.encode_by,
            shard=(rank, world_size),
            overwrite=args.overwrite,
        )
    except (UserError, OSError) as error:
        said = str(error) if isinstance(error, UserError) else os_sentence(error)
        if args.on == "slurm":  # its own queue tells that a task has failed
            sys.exit(f"error: {said}")
        write_atomic(folder / "failed" / f"{rank:05d}", said)


def _merged(args: TokenizeArgs, start: str, data: Any, rank: int, world_size: int) -> None:
    """A step of a pipeline: merge the parts."""
    os.chdir(start)
    try:
        merge_datasets(_parts(args), args.output, overwrite=args.overwrite)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error if isinstance(error, UserError) else os_sentence(error)}")


def _steps(args: TokenizeArgs, folder: Path) -> dict[str, Any]:
    """What each executor is given."""
    step = partial(_part, args, os.getcwd(), folder)
    return {"pipeline": [step], "tasks": args.shards, "logging_dir": str(folder)}


def _run_local(args: TokenizeArgs, folder: Path) -> None:
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.utils.logging import logger

    logger.remove()  # what it says of each part is in its folder's logs
    at_once = max(available_cores() // (args.workers or 1), 1)
    LocalPipelineExecutor(**_steps(args, folder), workers=min(at_once, args.shards)).run()


def _run_ray(args: TokenizeArgs, folder: Path) -> None:
    import ray
    from datatrove.executor.ray import RayPipelineExecutor
    from datatrove.utils.logging import logger

    logger.remove()
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        raise UserError(
            "--on ray finds no Ray cluster: set RAY_ADDRESS, or start one here: ray start --head"
        ) from None
    try:
        RayPipelineExecutor(**_steps(args, folder), cpus_per_task=args.workers or 1).run()
    finally:
        ray.shutdown()


def _submit(args: TokenizeArgs, folder: Path) -> None:
    from datatrove.executor.slurm import SlurmPipelineExecutor

    python = shlex.quote(sys.executable)  # whose programs need not be on the PATH of a job
    programs = [f'{name}() {{ {python} -m datatrove.tools.{name} "$@"; }}' for name in _PROGRAMS]
    how = {"partition": args.partition, "qos": None, "env_command": "; ".join(programs), "with_srun": False}
    parts = SlurmPipelineExecutor(
        **_steps(args, folder), **how, time=args.time, job_name="tokenize", cpus_per_task=args.workers or 1
    )
    merged = SlurmPipelineExecutor(
        [partial(_merged, args, os.getcwd())], tasks=1, logging_dir=str(folder / "merge"), **how,
        time=args.time, job_name="merge", depends=parts, run_on_dependency_fail=True,
    )  # fmt: skip
    merged.run()
    print(
        f"submitted {args.shards} parts and their merge (job {merged.job_id}) to {args.output}.bin, .idx; "
        f"what they say: {folder}/slurm_logs, {folder}/merge/slurm_logs; the same command again makes what is missing"
    )
