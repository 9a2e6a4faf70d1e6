"""The run directory (`--model_path`): settings, code version, environment and logs of a run.

runs/name/config.json config.yaml git.diff git_status.txt env.json model_config.json  (first start)
          config.1.json config.1.yaml ...  (second start)
          logs/rank0.log ...   metrics.jsonl  metrics.json  events.out.tfevents.*
          checkpoints/step_000500/   best -> checkpoints/step_...   last -> checkpoints/step_...
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import itertools
import json
import logging
import logging.handlers
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from lm_experiments_tools.config.flags import harmless_flags
from lm_experiments_tools.config.pretraining import INHERITED
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import dump_json, read_json, to_jsonable, write_atomic
from lm_experiments_tools.tracking.progress import shows_progress
from lm_experiments_tools.tracking.services import choose_services

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs

logger = logging.getLogger(__name__)

# the ancestor's extra keys of config.json; everything else in it is an argument
_EXTRA_KEYS = ("ENV", "MACHINE", "COMMIT", "WORLD_SIZE")
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
# A setting that only one script has.
_SCRIPTS = {
    "peft": "run_finetuning.py", "use_nsp": "run_bert_pretraining.py", "noise_density": "run_t5_pretraining.py",
}  # fmt: skip
_STARTED_IN = os.getcwd()  # a run enters --working_dir
_claims: dict[Path, IO[str]] = {}  # directories this process writes to; their files are open until it ends
_LOG_BYTES = 100 * 2**20
_GIT_SECONDS = 30
_LONGEST_SHOWN = 200  # characters of a setting in an error message


def _leave_claims_to_parent() -> None:
    """Release locks in forked processes: a data loader's worker may outlive a killed run by seconds."""
    for file in _claims.values():
        file.close()
    _claims.clear()


os.register_at_fork(after_in_child=_leave_claims_to_parent)


class RunDirectory:
    """The run directory (`--model_path`), which holds the settings, logs and checkpoints of a run.

    Only rank 0 uses it. The folder is created if it does not exist.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        _make_directory(self.path)

    def claim(self) -> None:
        """Lock the directory until this process ends. Raises UserError if another process holds the lock."""
        if self.path.resolve() in _claims:
            return
        file = open(self.path / ".lock", "a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{self.path} is in use by a run that has not ended ({holder}): wait for it or stop it, or choose "
                "another --model_path."
            ) from None
        except OSError as error:  # file systems without locks
            logger.warning(
                "%s cannot be locked (%s): do not start two runs there at the same time", self.path, error.strerror
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        _claims[self.path.resolve()] = file

    def write_start(
        self,
        args: Mapping[str, Any],
        origins: Mapping[str, str],
        model_config: Mapping[str, Any] | None = None,
        *,
        world_size: int | None = None,
    ) -> None:
        """Write settings, code version, command line and environment of the run, each time its job is started.

        The first start writes config.json, a restart writes config.1.json, the next one config.2.json. Origins of
        arguments become comments in config.yaml. `world_size` is the number of workers, if known.
        """
        config, start = dict(args), _starts(self.path)
        config["ENV"] = {name: os.environ.get(name, "") for name in _ENVIRONMENT}
        config["MACHINE"] = platform.node()
        config["COMMIT"] = git_output("rev-parse", "HEAD").decode("ascii", "replace").strip()
        if world_size is not None:
            config["WORLD_SIZE"] = world_size
        files = {"config.yaml": config_yaml(args, origins), "env.json": dump_json(describe_environment()) + "\n"}
        diff, status = git_output("diff", "HEAD"), git_output("status", "--porcelain=v1", "--branch")
        if status:
            files |= {"git.diff": diff, "git_status.txt": status}
        if model_config is not None:
            files["model_config.json"] = dump_json(dict(model_config)) + "\n"
        files["config.json"] = dump_json(config, indent=4) + "\n"  # last: it marks the start as recorded
        for name, content in files.items():
            write_atomic(self.path / _numbered(name, start), content)

    def check_compatible(
        self,
        args: Mapping[str, Any],
        resume: bool,
        *,
        world_size: int | None = None,
        harmless: Collection[str] = (),
    ) -> dict[str, tuple[Any, Any]]:
        """Compare this job's arguments with those recorded for the run in this directory; returns `differences`.

        UserError if any differ, unless `resume` logs them. With a `world_size` only the global batch size must agree.
        """
        before = settings_in_use(self.path)
        if before is None:
            return {}
        check_script(self.path, before, args)
        differing = differences(before, {**args, "WORLD_SIZE": world_size}, harmless)
        refuse_or_report(self.path, differing, resume=resume)
        return differing


def claim_run(args: TrainerArgs, world_size: int | None, *, once_more: bool = False) -> RunDirectory:
    """Open and lock the run directory `args.model_path`, and compare its settings. Call it on rank 0.

    UserError for other settings, a process that still writes there, or a service of `--log_to` that is not installed.

    Args:
        world_size: number of workers, to compare global batch sizes; None compares the flags of the batch.
        once_more: with `--resume PATH`, do not log the differing settings again.
    """
    run = RunDirectory(args.model_path)
    run.claim()
    choose_services(args, run.path)
    resume, harmless = args.resume_path() is not None, harmless_flags(type(args))
    if not (resume and once_more):
        run.check_compatible(asdict(args), resume, world_size=world_size, harmless=harmless)
    return run


def check_script(run_dir: Path, before: Mapping[str, Any], args: Mapping[str, Any]) -> None:
    """Raise UserError if a run directory holds a run of another script, by its recorded settings `before`."""
    then, now = (next((s for name, s in _SCRIPTS.items() if name in settings), None) for settings in (before, args))
    if None not in (then, now) and then != now:
        raise UserError(f"{run_dir} holds a run of {then}, which {now} cannot continue: choose another --model_path.")


def refuse_or_report(run_dir: Path, differing: Mapping[str, tuple[Any, Any]], *, resume: bool) -> None:
    """Log the settings that differ, name -> (recorded, new), if the run resumes, otherwise raise UserError."""
    if not differing:
        return
    follow = INHERITED if "from_pretrained" in differing else ()
    named = {name: values for name, values in differing.items() if name not in follow}
    shown = ", ".join(f"{name} ({_show(then)} then, {_show(now)} now)" for name, (then, now) in named.items())
    if not resume:
        raise UserError(f"{run_dir} holds a run with other settings: {shown}; {_way_on(run_dir, differing)}.")
    logger.warning("continuing %s with other settings: %s", run_dir, shown)


def settings_in_use(run_dir: Path) -> dict[str, Any] | None:
    """Read the settings with which a run trains, from its run directory. Raises UserError.

    A restarted run records its settings each time. These are the newest ones with which it trained, so a later job
    with `--validate_only` does not count. None if the directory has no checkpoints and no metrics.
    """
    metrics = run_dir / "metrics.jsonl"
    if not any((run_dir / "checkpoints").glob("*")) and not (metrics.exists() and metrics.stat().st_size > 0):
        return None
    for number in reversed(range(_starts(run_dir))):
        path = run_dir / _numbered("config.json", number)
        try:
            config = read_json(path)
        except UserError as error:
            raise UserError(f"{error} Fix or remove it, or choose another --model_path.") from error
        if not config.get("validate_only"):
            return config
    return None


def _starts(run_dir: Path) -> int:
    return next(i for i in itertools.count() if not (run_dir / _numbered("config.json", i)).exists())


def setup_logging(run_dir: Path | str | None, rank: int) -> None:
    """Log to the console (rank 0 only) and to `run_dir`/logs/rank{rank}.log (every rank).

    Log files rotate at 100 MiB. Without `run_dir`, other ranks log errors to stderr. A second call replaces the
    handlers of the first.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, "set_up_by_run", False)]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = []
    if rank == 0 or run_dir is None:
        handlers.append(ConsoleHandler(sys.stderr))
        handlers[0].setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if run_dir is not None:
        file = Path(run_dir) / "logs" / f"rank{rank}.log"
        _make_directory(file.parent)
        handlers.append(LogFile(file, maxBytes=_LOG_BYTES, backupCount=2, encoding="utf-8"))
        handlers[-1].setFormatter(logging.Formatter(f"%(asctime)s rank{rank} %(levelname)s %(name)s: %(message)s"))
    for handler in handlers:
        handler.set_up_by_run = True
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # recommends a package for weights of 4 bits as soon as anything imports it, as transformers' schedules do
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class LogFile(logging.handlers.RotatingFileHandler):
    """A log file whose handler reports a full or failing disk once, in one line."""

    is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_reported:
            self.is_reported = True
            print(f"warning: {self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


class ConsoleHandler(logging.StreamHandler):
    """Log to the console: warnings and errors begin with their level, and a tqdm bar stays intact."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None or not shows_progress(self.stream):
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def config_yaml(args: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Write a run's arguments as a YAML file for `--config`, one a line, with their origins as comments."""
    import yaml

    lines = []
    for name, value in args.items():
        text = yaml.safe_dump({name: to_jsonable(value)}, default_flow_style=True, width=10**6, allow_unicode=True)
        lines.append(text.strip()[1:-1] + (f"  # {origins[name]}" if name in origins else ""))
    return "\n".join(lines) + "\n"


def describe_environment() -> dict[str, Any]:
    """Return this process's command, the versions of Python and all packages, the platform, CPU, memory and GPUs."""
    description = {
        "command": sys.orig_argv,
        "folder": _STARTED_IN,
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total},
        "gpus": [],
        "packages": installed_packages(),
    }
    torch = sys.modules.get("torch")  # imported already in a run
    if torch is not None and torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        description["gpus"] = [{"name": p.name, "memory_bytes": p.total_memory} for p in properties]
        description["cuda"] = torch.version.cuda
    return description


@functools.cache
def installed_packages() -> dict[str, str]:
    """Versions of all installed packages, read once in a process: it takes half a second."""
    headers = (distribution.metadata for distribution in importlib.metadata.distributions())
    found = {header["Name"]: header["Version"] for header in headers if header["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
        return found[1] if found else platform.machine()
    return platform.processor() or platform.machine()


def git_output(*arguments: str) -> bytes:
    """Return the output of a git command; empty if it fails or takes too long."""
    command = ["git", "--no-optional-locks", *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def _way_on(path: Path, differing: Collection[str]) -> str:
    if {"reproducible", "virtual_ranks"}.isdisjoint(differing):
        product = "keep the product of --batch_size, --gradient_accumulation_steps and workers, "
        advice = product if "global_batch_size" in differing else ""
        last = path / "last"
        return f"{advice}choose another --model_path, or pass --resume {last} to continue that run with the new ones"
    # With --resume too these are refused: the bits would be others.
    return f"start it as it was, or begin a new one in another --model_path, by --init_checkpoint {path / 'last'}"


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], harmless: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Compare two sets of recorded settings; returns name -> (recorded, new) for those in both that differ.

    If both have a WORLD_SIZE, and `--reproducible` is off, `global_batch_size` is compared instead of its factors.
    Settings named in `harmless` may differ.
    """
    then = dict(before)
    now = {name: to_jsonable(value) for name, value in now.items()}
    for config in (then, now):
        parts = [config.get(name) for name in ("batch_size", "gradient_accumulation_steps", "WORLD_SIZE")]
        config["global_batch_size"] = (
            parts[0] * parts[1] * parts[2] if all(isinstance(p, int) for p in parts) else None
        )
    for rows in ("bucket_rows", "mix_rows"):
        if then.get(rows) or now.get(rows):  # none means the rows of a step
            for config in (then, now):
                config[rows] = config.get(rows) or config["global_batch_size"]
    if not (then.get("text_fields") and now.get("text_fields")):  # none means by names; the data's fingerprint tells
        then.pop("text_fields", None)
    split: set[str] = set()
    if now.get("reproducible", "off") == "off" and then["global_batch_size"] and now["global_batch_size"]:
        split = {"batch_size", "gradient_accumulation_steps"}
    else:
        del then["global_batch_size"], now["global_batch_size"]
    ignored = {*harmless, *split, *_EXTRA_KEYS}
    compared = [name for name in now if name in then and name not in ignored]
    return {name: (then[name], now[name]) for name in compared if not _is_same(name, then[name], now[name])}


def _is_same(name: str, then: Any, now: Any) -> bool:
    is_path = name.endswith(("path", "dir", "vocab", "vocab_file", "_cfg", "_checkpoint", "_pretrained", "base_model"))
    return _spelled(then) == _spelled(now) if is_path else then == now


def _spelled(value: Any) -> Any:
    """A setting with its paths in their shortest spelling."""
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    return os.path.normpath(value) if isinstance(value, str) and os.sep in value else value


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the directory {path} cannot be made ({error.strerror}); check --model_path.") from error


def _numbered(name: str, count: int) -> str:
    stem, dot, suffix = name.partition(".")
    return f"{stem}.{count}{dot}{suffix}" if count else name
