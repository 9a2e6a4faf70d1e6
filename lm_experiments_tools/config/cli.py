"""Parse the command line and YAML files into a frozen dataclass of arguments.

Values are parsed by the type of their field, so `lr: 1e-4` is a number. The command line overrides YAML files, and
later files override earlier ones. The origin of each value is recorded.
"""

import contextlib
import dataclasses
import inspect
import io
import logging
import os
import platform
import signal
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import yaml

from lm_experiments_tools.config import exits
from lm_experiments_tools.config.flags import AUTO, COMMAND_LINE, DEFAULT, RUNS, Flag, describe, flags_of, help_groups
from lm_experiments_tools.config.help import help_text, help_topic
from lm_experiments_tools.config.launchers import launcher_rank, on_several_machines
from lm_experiments_tools.config.lengths import Tokens
from lm_experiments_tools.config.settings import Setting, read_settings
from lm_experiments_tools.config.suggestions import own_name, suggestion
from lm_experiments_tools.errors import LostWorkerError, RunError, UserError, os_sentence
from lm_experiments_tools.names import resolve_name

Args = TypeVar("Args")

BASE = "base"  # in YAML: the files that this one changes
_BASE = Flag(BASE, tuple[str, ...], (), object)
DRY_RUN = "lm_experiments_tools.tools.dry_run:show"
SPEED = "lm_experiments_tools.models.speed:choose_speed"  # `resolve` of the scripts: a name, because it imports torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArgs:
    """Settings from files: they override the defaults, and the command line overrides them."""

    config: tuple[str, ...] = ()
    """YAML file of settings, one `name: value` a line; may be repeated, the later file wins. `base: FILE` in it, or a
    list of files, are read before it, from where it lies."""
    print_config: bool = False
    """Print the merged settings, with the origin of each that is not the default, as YAML and exit."""
    dry_run: bool = False
    """Of a training script: print settings, data with a first example, memory and time of the run and exit. Nothing is
    trained or saved."""


def parse(
    args_class: type[Args],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    inherit: Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, str]]] | None = None,
    program: str | None = None,
    resolve: str | None = None,
) -> tuple[Args, dict[str, str]]:
    """Build `args_class` from the command line and the YAML files that `--config` names.

    Args:
        args_class: dataclass whose base classes are the groups of `--help`.
        description: first paragraph of `--help`.
        inherit: given the settings so far, returns name -> (value, origin) of values that override the defaults.
        resolve: `module:function` that fills in automatic choices for `--print_config`, from arguments and origins.

    Returns:
        The arguments, and for each field where its value came from: "default", "FILE line N", "command line" or an
        origin of `inherit`.

    Raises:
        UserError: an unknown name, a value of the wrong type, a missing required flag, or flags in conflict.
        SystemExit: code 0, after `--help`, `--print_config` or `--dry_run`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if (topic := help_topic(argv)) is not None:
        program = program or os.path.basename(sys.argv[0])
        _print(help_text(args_class, ConfigArgs, topic, description, program))
        sys.exit(0)
    flags = flags_of(args_class)
    written = _read_command_line(argv, flags | flags_of(ConfigArgs))
    settings: dict[str, Setting] = {}
    for path in written.get("config", ()):
        settings |= _read_yaml(path, flags)
    settings |= {name: Setting(value, COMMAND_LINE) for name, value in written.items() if name in flags}
    for name, flag in flags.items():
        if flag.default is dataclasses.MISSING and name not in settings:
            raise UserError(f"--{name} is missing: --help says what it takes.")
    if inherit:
        settings |= {n: Setting(*found) for n, found in inherit({n: s.value for n, s in settings.items()}).items()}
    # Scripts save their run unless they are told not to; the classes of arguments have no folder by default.
    if resolve is not None and os.environ.get(RUNS, AUTO) != "none":
        settings = {"model_path": Setting(AUTO, DEFAULT)} | settings
    try:
        args = args_class(**{name: setting.value for name, setting in settings.items()})
    except UserError as error:
        raise UserError(_with_origins(str(error), settings)) from None
    origins = {name: settings[name].origin if name in settings else DEFAULT for name in flags}
    if hasattr(args, "check_origins"):
        args.check_origins(origins)
    if written.get("dry_run") and resolve is None:
        raise UserError("--dry_run is for the training scripts: leave it out.")
    if written.get("print_config") or written.get("dry_run"):
        _show(args, origins, resolve, is_dry_run=bool(written.get("dry_run")))
        sys.exit(0)
    if resolve is not None and "torch" not in sys.modules and launcher_rank() == 0:
        _print("settings are read; loading torch")  # which takes seconds; on stdout: stderr is for errors
    return args, origins


def _show(args: Any, origins: dict[str, str], resolve: str | None, *, is_dry_run: bool) -> None:
    if is_dry_run and launcher_rank() != 0:
        return
    if resolve is not None:
        args, origins = resolve_name(resolve)(args, origins)
    if is_dry_run:
        resolve_name(DRY_RUN)(args, origins)
    else:
        _print(to_yaml(args, origins), end="")


def to_yaml(args: Any, origins: Mapping[str, str] | None = None) -> str:
    """Write all settings as YAML for `--config`, in groups, with the origins as comments."""
    lines = []
    for group in help_groups(type(args)):
        lines.append(f"# {(group.__doc__ or group.__name__).splitlines()[0]}")
        for name in inspect.get_annotations(group):
            if name == "iters" and getattr(args, "phases", ()):
                continue  # each phase has its own
            value = getattr(args, name)
            value = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Tokens) else value
            braced = yaml.safe_dump({name: value}, default_flow_style=True, width=10**6, allow_unicode=True)
            text = braced.strip().removeprefix("{").removesuffix("}")
            origin = origins[name] if origins else DEFAULT
            lines.append(text if origin == DEFAULT else f"{text}  # {origin}")
        lines.append("")
    return "\n".join(lines)


def run_main(main: Callable[[], int | None]) -> typing.NoReturn:
    """Run an entry point and exit with its code.

    - UserError: message on stderr, code 2
    - RunError: message with rank and step, code 1
    - Ctrl-C: code 130
    - any other exception: traceback, then one line with rank, step, type and reason, code 1
    """
    use_utf8()
    sys.excepthook = _report_crash
    exits.note_interrupts()
    try:
        code = main()
    except UserError as error:
        _say(f"error: {_machine(error)}{error}")
        sys.exit(2)
    except RunError as error:
        _say(f"error: {_where(error)}: {error}")
        if isinstance(error, LostWorkerError):
            exits.leave(1)
        sys.exit(1)
    except OSError as error:
        if error.errno is None:  # raised by a library for reasons of its own
            raise
        _say(f"error: {_where(error)}: {os_sentence(error)}")
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    sys.exit(code or 0)


def use_utf8() -> None:
    """Have this process read and write UTF-8, and escape what a console cannot show.

    In a locale without UTF-8 the program starts again, in the same process: libraries take file names in UTF-8.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # An encoding cannot be set any more once a program has read its input.
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.encoding.lower() != "utf-8":
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def _machine(error: UserError) -> str:
    """The beginning of a sentence about a file that may be missing on this machine alone."""
    return f"on {platform.node()}: " if on_several_machines() and not getattr(error, "agreed", False) else ""


def _report_crash(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    reason = str(error).strip().splitlines()
    _say(f"{_where(error)}: {kind.__name__}: {reason[0] if reason else 'no message'}")


def _say(sentence: str) -> None:
    """Print the last sentence of a run, and keep it in the log files that the run has opened.

    In the files first: a launcher that has ended takes the console with it.
    """
    record = logging.LogRecord("run", logging.ERROR, __file__, 0, sentence, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
    with contextlib.suppress(BrokenPipeError):
        print(sentence, file=sys.stderr, flush=True)


def _where(error: BaseException) -> str:
    step = getattr(error, "step", None)
    return f"rank {launcher_rank()}" + ("" if step is None else f" step {step}")


def _print(text: str, end: str = "\n") -> None:
    """Print to stdout; a reader that leaves early, as in `--help | head`, is no error."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # the rest of the buffer would fail once more when the interpreter closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- command line ---------------------------------------------------------------------------------------------------
def _read_command_line(argv: Sequence[str], flags: Mapping[str, Flag]) -> dict[str, Any]:
    """The values of a command line by flag. The last value of a repeated flag wins; a repeated list is refused."""
    given: dict[str, Any] = {}
    unknown: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        written, equals, attached = word.partition("=")
        if not written.startswith("--") or written == "--":
            hint = suggestion(written, flags, prefix="--") if written.strip("-") and word.startswith("-") else ""
            raise UserError(f"{word!r} belongs to no flag; flags begin with two dashes{hint or ' (see --help).'}")
        name = own_name(written[2:], flags)
        positive = flags.get(name.removeprefix("no_"))
        is_negated = name not in flags and positive is not None and positive.annotation is bool
        flag = positive if is_negated else flags.get(name)
        words = [attached] if equals else _take_values(rest, several=flag is None or flag.is_list)
        if flag is None:
            unknown.append(f"{written}{suggestion(written, flags, prefix='--')}")
            continue
        if flag.annotation is bool:
            words = words or ["true"]
        elif not words or (words == [""] and flag.default != ""):
            raise UserError(f"{written} needs a value: {describe(flag.annotation)}.")
        try:
            values = tuple(flag.read(text) for text in words)
        except ValueError as error:
            raise UserError(f"{written} {error}.") from None
        if not flag.is_list:
            given[flag.name] = not values[0] if is_negated else values[0]
        elif flag.name in given and flag.name != "config":
            # The last one of the two would lose values, and both of them together would keep those to be replaced.
            raise UserError(f"--{flag.name} is given twice: write all of its values after one.")
        else:
            given[flag.name] = (*given.get(flag.name, ()), *values)
    if unknown:
        raise UserError(f"unknown flag{'s' * (len(unknown) > 1)} {' '.join(unknown)}")
    return given


def _take_values(rest: list[str], several: bool) -> list[str]:
    """Pop the next word, or all up to the next flag."""
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not taken):
        taken.append(rest.pop(0))
    return taken


# ---- YAML -----------------------------------------------------------------------------------------------------------
def _read_yaml(
    path: str, flags: Mapping[str, Flag], origin: str = "", above: Sequence[str] = ()
) -> dict[str, Setting]:
    """The settings of one YAML file over those of its `base`.

    Args:
        origin: the line whose `base` names this file.
        above: the files whose `base` led here.
    """
    called = f"{origin}: base {path}" if origin else f"--config {path}"
    if os.path.realpath(path) in above:
        raise UserError(f"{called} leads back to itself.")
    items, inherited = _yaml_items(path, called), {}
    settings = read_settings(items, {**flags, BASE: _BASE}, lambda key: f"{path} line {key.start_mark.line + 1}")
    names, origin = settings.pop(BASE, Setting((), ""))
    for name in names:
        base = os.path.normpath(os.path.join(os.path.dirname(path), name))
        inherited |= _read_yaml(base, flags, origin, [*above, os.path.realpath(path)])
    return inherited | settings


def _yaml_items(path: str, called: str) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a YAML file as nodes, which know their line. Error messages begin with `called`."""
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{called} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{called} is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{called} is not valid YAML: {' '.join(str(error).split())}.") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{called} must hold lines of `name: value`.")
    return [] if root is None else root.value


def _with_origins(message: str, settings: Mapping[str, Setting]) -> str:
    """Add the origin of each flag that an error message names, unless it is the command line."""
    words = {word.strip(",.:;()").removeprefix("--") for word in message.split() if word.startswith("--")}
    from_files = [
        f"{name} is set in {settings[name].origin}"
        for name in sorted(words & settings.keys())
        if settings[name].origin != COMMAND_LINE
    ]
    return f"{message.removesuffix('.')} ({'; '.join(from_files)})." if from_files else message
