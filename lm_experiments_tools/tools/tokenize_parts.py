"""The parts of a text as tasks of datatrove's executors, each `tokenize --shard i/n`, and their merge.

datatrove starts the tasks and restarts unfinished ones; nothing else of it is used.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.tokens.files import (
    check_replaceable,
    dataset_paths,
    load_vocabulary,
    recorded_inputs,
)
from lm_experiments_tools.data.tokens.indexed import finished_record
from lm_experiments_tools.data.tokens.merge import merge_datasets
from lm_experiments_tools.data.tokens.pipeline import part_of_plan, plan_fingerprint, shard_prefix
from lm_experiments_tools.data.tokens.tokenize import TextEncoder, tokenize_corpus
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import UserError, os_sentence
from lm_experiments_tools.files import write_atomic

if TYPE_CHECKING:
    from lm_experiments_tools.tools.tokenize import TokenizeArgs

_PROGRAMS = ("launch_pickled_pipeline", "merge_stats")  # of datatrove, in its Slurm jobs


def _merge(args: TokenizeArgs) -> dict[str, Any]:
    """Join the parts; returns the content of OUTPUT.json."""
    return merge_datasets(_prefixes(args), args.output, overwrite=args.overwrite)


def _prefixes(args: TokenizeArgs) -> tuple[str, ...]:
    return tuple(shard_prefix(args.output, number, args.shards) for number in range(args.shards))


def tokenize_parts(args: TokenizeArgs) -> None:
    """Make the parts and merge them, or on Slurm submit both.

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
    meta = _merge(args)
    print(
        f"{meta['num_documents']:,} documents, {meta['num_tokens']:,} tokens of {args.shards} parts: "
        f"{args.output}.bin, .idx, .json"
    )


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
    """The folder of datatrove's records, one for each text, vocabulary and number of parts; parts to make are removed.

    Otherwise the merge could take a part of an earlier text in place of one that failed.
    """
    vocabulary = load_vocabulary(args.vocab)
    encoding = TextEncoder.of(vocabulary, args.text_key, args.append_eos, args.encode_by).identity
    plan = plan_fingerprint(plan_shards(args.input), encoding)
    _, shard = part_of_plan(args.input, 0, args.shards, encoding)
    folder = Path(f"{os.path.abspath(args.output)}.parts") / f"{plan[:12]}-{args.shards}"
    left = {
        number: prefix
        for number, prefix in enumerate(_prefixes(args))
        if not _is_done(folder, number, prefix, shard["source"])
    }
    if not args.overwrite:
        texts = recorded_inputs(args.input)
        for prefix in left.values():
            check_replaceable(prefix, texts, vocabulary.recorded_as, vocabulary.sha256, vocabulary.identity)
    for number, prefix in left.items():
        bin_path, idx_path, meta_path = dataset_paths(prefix)
        for path in (idx_path, meta_path, bin_path):  # the index first: without it there is no part
            path.unlink(missing_ok=True)
        for mark in folder.parent.glob(f"*-{args.shards}/completions/{number:05d}"):
            mark.unlink()
    shutil.rmtree(folder / "failed", ignore_errors=True)
    (folder / "failed").mkdir(parents=True)
    (folder / "merge" / "completions" / "00000").unlink(missing_ok=True)
    return folder


def _is_done(folder: Path, number: int, prefix: str, source: str) -> bool:
    """True for a part that is marked as completed, did not fail, and exists."""
    if not (folder / "completions" / f"{number:05d}").exists() or (folder / "failed" / f"{number:05d}").exists():
        return False
    record = finished_record(prefix, "shard")
    return record is not None and record["shard"].get("source") == source


def _part(args: TokenizeArgs, start: str, folder: Path, data: Any, rank: int, world_size: int) -> None:
    """A pipeline step: make part `rank` of `world_size`; errors of the user are one line."""
    os.chdir(start)
    try:
        tokenize_corpus(**args.settings(), workers=args.workers or 1, shard=(rank, world_size))
    except (UserError, OSError) as error:
        message = str(error) if isinstance(error, UserError) else os_sentence(error)
        if args.on == "slurm":  # its queue reports failed tasks
            sys.exit(f"error: {message}")
        write_atomic(folder / "failed" / f"{rank:05d}", message)


def _merged(args: TokenizeArgs, start: str, data: Any, rank: int, world_size: int) -> None:
    """A pipeline step: merge the parts."""
    os.chdir(start)
    try:
        _merge(args)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error if isinstance(error, UserError) else os_sentence(error)}")


def _steps(args: TokenizeArgs, folder: Path) -> dict[str, Any]:
    """Arguments of every executor."""
    step = partial(_part, args, os.getcwd(), folder)
    return {"pipeline": [step], "tasks": args.shards, "logging_dir": str(folder)}


def _run_local(args: TokenizeArgs, folder: Path) -> None:
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.utils.logging import logger

    logger.remove()  # the messages of each part are in its folder's logs
    num_parallel = max(available_cores() // (args.workers or 1), 1)
    LocalPipelineExecutor(**_steps(args, folder), workers=min(num_parallel, args.shards)).run()


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
    array = SlurmPipelineExecutor(
        **_steps(args, folder), **how, time=args.time, job_name="tokenize", cpus_per_task=args.workers or 1
    )
    merged = SlurmPipelineExecutor(
        [partial(_merged, args, os.getcwd())], tasks=1, logging_dir=str(folder / "merge"), **how,
        time=args.time, job_name="merge", depends=array, run_on_dependency_fail=True,
    )  # fmt: skip
    merged.run()
    print(
        f"submitted {args.shards} parts and their merge (job {merged.job_id}) to {args.output}.bin, .idx; "
        f"their logs: {folder}/slurm_logs, {folder}/merge/slurm_logs; the same command again makes what is missing"
    )
