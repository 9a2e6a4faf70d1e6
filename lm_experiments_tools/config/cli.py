"""Command line and YAML -> a frozen dataclass of arguments.

One function reads the values of both, each by the type of its field: `lr: 1e-4` is a number. The last place that sets
a flag wins, and is kept for error messages. Anything a user can fix raises UserError with one sentence.
"""

import contextlib
import dataclasses
import inspect
import logging
import os
import platform
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import yaml

from lm_experiments_tools.config import restart
from lm_experiments_tools.config.arguments import NULL_WORDS, Flag, describe, flags_of
from lm_experiments_tools.config.flags import help_groups
from lm_experiments_tools.config.help import help_text, help_topic
from lm_experiments_tools.config.launchers import launcher_rank, on_several_machines
from lm_experiments_tools.config.suggestions import suggestion
from lm_experiments_tools.errors import LostWorkerError, RunError, UserError, os_sentence
from lm_experiments_tools.names import resolve_name

Args = TypeVar("Args")

COMMAND_LINE = "command line"
DEFAULT = "default"
BASE = "base"  # in YAML: the files that this one changes
_BASE = Flag(BASE, tuple[str, ...], (), object)
EMPTY: Mapping[str, str] = types.MappingProxyType({})
SPEED = "lm_experiments_tools.models.speed:choose_speed"  # `settle` of the scripts: a name, as it imports torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArgs:
    """Settings from files; the command line beats them, and they beat the defaults."""

    config: tuple[str, ...] = ()
    """YAML file of settings, one `name: value` a line; may be repeated, the later file wins. `base: FILE` in it, or a
    list of files, are read before it, from where it lies."""
    print_config: bool = False
    """Print the merged settings, with the origin of each that is not the default, as YAML and exit."""


class Setting(NamedTuple):
    """A value, and where it was written."""

    value: Any
    origin: str


def parse(
    args_class: type[Args],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    inherit: Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, str]]] | None = None,
    program: str | None = None,
    settle: str | None = None,
) -> tuple[Args, dict[str, str]]:
    """Build `args_class` from the command line and the YAML files it names.

    Args:
        args_class: flat dataclass whose base classes are the groups of `--help` (see `flags.help_groups`).
        argv: arguments without the program's name; `sys.argv[1:]` by default.
        description: first paragraph of `--help`.
        inherit: {name: (value, origin)} of settings that follow from those that are given, and beat the defaults.
        program: what `--help` says is used; the script's name by default.
        settle: module:name of a function of arguments and origins that returns them with what the run would choose by
            itself; called for `--print_config` alone, because it may need torch.

    Returns:
        The arguments, and for each field where its value was written: "default", "FILE line N", "command line" or the
        origin that `inherit` gave.

    Raises:
        UserError: an unknown name, a value of the wrong type, a required one that is missing, or flags in conflict.
        SystemExit: code 0, after `--help` or `--print_config`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if (topic := help_topic(argv)) is not None:
        with _reader_may_leave():
            program = program or os.path.basename(sys.argv[0])
            print(help_text(args_class, ConfigArgs, topic, description, program), flush=True)
        sys.exit(0)
    flags = flags_of(args_class)
    written = _read_command_line(argv, flags | flags_of(ConfigArgs))
    settings = _settings(written, flags)
    values = {name: setting.value for name, setting in settings.items()}
    for name, (value, origin) in (inherit(values) if inherit else {}).items():
        values[name], settings[name] = value, Setting(value, origin)
    try:
        args = args_class(**values)
    except UserError as error:
        raise UserError(_with_origins(str(error), settings)) from None
    origins = {name: settings[name].origin if name in settings else DEFAULT for name in flags}
    if written.get("print_config"):
        if settle is not None:
            args, origins = resolve_name(settle)(args, origins)
        with _reader_may_leave():
            print(to_yaml(args, origins), end="", flush=True)
        sys.exit(0)
    is_run = sys.excepthook is _report_crash and hasattr(args, "model_path")  # `run_main` runs, and trains
    if is_run and "torch" not in sys.modules and launcher_rank() == 0:
        # seconds of silence would follow; on stdout, because a refusal is the one line of stderr
        with _reader_may_leave():
            print("settings are read; loading torch", flush=True)
    return args, origins


def to_yaml(args: Any, origins: Mapping[str, str] | None = None) -> str:
    """YAML of all settings, in groups, that `--config` reads back to equal arguments; origins follow as comments."""
    lines = []
    for group in help_groups(type(args)):
        lines.append(f"# {(group.__doc__ or group.__name__).splitlines()[0]}")
        for name in inspect.get_annotations(group):
            value = getattr(args, name)
            value = list(value) if isinstance(value, tuple) else value
            braced = yaml.safe_dump({name: value}, default_flow_style=True, width=10**6, allow_unicode=True)
            text = braced.strip().removeprefix("{").removesuffix("}")
            origin = origins[name] if origins else DEFAULT
            lines.append(text if origin == DEFAULT else f"{text}  # {origin}")
        lines.append("")
    return "\n".join(lines)


def run_main(main: Callable[[], int | None]) -> typing.NoReturn:
    """Run an entry point and exit with its code.

    UserError: its sentence on stderr, code 2. RunError: its sentence with rank and step, code 1; in an elastic job a
    worker that has lost another, or is left when that one was told to leave, begins anew. Ctrl-C: code 130. Any
    other exception keeps its traceback, code 1, and a last line repeats rank, step (where the exception carries one as
    `step`), type and reason, because the traceback of one rank drowns in the output of the others.
    """
    sys.excepthook = _report_crash
    restart.note_interrupts()
    try:
        code = main()
    except UserError as error:
        _say(f"error: {_machine(error)}{error}")
        sys.exit(2)
    except RunError as error:
        _say(f"error: {_where(error)}: {error}")
        if isinstance(error, LostWorkerError):
            restart.begin_anew() if restart.is_elastic() else restart.leave(1)
        sys.exit(1)
    except OSError as error:
        if error.errno is None:  # raised by a library for reasons of its own
            raise
        _say(f"error: {_where(error)}: {os_sentence(error)}")
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if restart.is_restart(error.code):
            restart.begin_anew()
        raise
    sys.exit(code or 0)


def _machine(error: UserError) -> str:
    """The beginning of a sentence about a file that may be missing on this machine alone."""
    return f"on {platform.node()}: " if on_several_machines() and not getattr(error, "agreed", False) else ""


def _report_crash(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    reason = str(error).strip().splitlines()
    _say(f"{_where(error)}: {kind.__name__}: {reason[0] if reason else 'no message'}")
    if restart.is_elastic() and kind.__name__ == "HorovodInternalError":  # while the job starts
        restart.begin_anew()


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


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`--help | head` is no error."""
    try:
        yield
    except BrokenPipeError:
        # what is still buffered would fail once more when the interpreter closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _settings(written: Mapping[str, Any], flags: Mapping[str, Flag]) -> dict[str, Setting]:
    """The settings of a command line and of the files that its `--config` names."""
    settings: dict[str, Setting] = {}
    for path in written.get("config", ()):
        settings |= _read_yaml(path, flags)
    settings |= {name: Setting(value, COMMAND_LINE) for name, value in written.items() if name in flags}
    for name, flag in flags.items():
        if flag.default is dataclasses.MISSING and name not in settings:
            raise UserError(f"--{name} is missing: --help says what it takes.")
    return settings


def _read_command_line(argv: Sequence[str], flags: Mapping[str, Flag]) -> dict[str, Any]:
    """The values of a command line by flag; the last value of a repeated flag wins, except for `--config`."""
    given: dict[str, Any] = {}
    unknown: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        written, equals, attached = word.partition("=")
        if not written.startswith("--") or written == "--":
            raise UserError(_not_a_flag(word, flags))
        flag, is_negated = _named(written[2:], flags)
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
        before = given.get("config", ()) if flag.name == "config" else ()
        if flag.is_list:
            given[flag.name] = (*before, *values)
        else:
            given[flag.name] = not values[0] if is_negated else values[0]
    if unknown:
        raise UserError(f"unknown flag{'s' * (len(unknown) > 1)} {' '.join(unknown)}")
    return given


def _named(written: str, flags: Mapping[str, Flag]) -> tuple[Flag | None, bool]:
    """The flag of a name, in which dashes stand for underscores, and True if `no_` negates a boolean."""
    name = written.replace("-", "_")
    positive = flags.get(name.removeprefix("no_"))
    if name not in flags and positive is not None and positive.annotation is bool:
        return positive, True
    return flags.get(name), False


def _take_values(rest: list[str], several: bool) -> list[str]:
    """Pop the next word, or all up to the next flag."""
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not taken):
        taken.append(rest.pop(0))
    return taken


def _not_a_flag(word: str, flags: Mapping[str, Flag]) -> str:
    if word.startswith("-") and word.strip("-"):
        flag = "-" + word.partition("=")[0].lstrip("-")
        return f"{flag} begins with one dash, flags with two{suggestion(flag, flags, prefix='--')}"
    return f"{word!r} belongs to no flag: every value follows a --flag, one value each (see --help)."


def _read_yaml(path: str, flags: Mapping[str, Flag], trail: Mapping[str, str] = EMPTY) -> dict[str, Setting]:
    """The settings of one YAML file.

    Args:
        trail: the files whose `base` led here, each with the line that names the next one.
    """
    root = _compose(path, f"{list(trail.values())[-1]}: base {path}" if trail else f"--config {path}")
    inherited: dict[str, Setting] = {}
    settings: dict[str, Setting] = {}
    for key, value in root.value if root is not None else ():
        origin = f"{path} line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{origin}: a setting's name cannot be {_kind(key)}.")
        name = key.value.replace("-", "_")
        flag = _BASE if name == BASE else flags.get(name)
        if flag is None:
            raise UserError(f"{origin}: unknown setting {key.value!r}{suggestion(key.value, flags)}")
        if name in settings:
            raise UserError(f"{origin}: {name} is set a second time, it stands in {settings[name].origin} already.")
        settings[name] = Setting(_yaml_value(flag, value, origin), origin)
    if BASE in settings:
        names, origin = settings.pop(BASE)
        trail = {**trail, os.path.realpath(path): origin}
        for name in names:
            base = os.path.normpath(os.path.join(os.path.dirname(path), name))
            if os.path.realpath(base) in trail:
                raise UserError(f"{origin}: base {base} leads back to itself, by {', then '.join(trail.values())}.")
            inherited |= _read_yaml(base, flags, trail)
    return inherited | settings


def _compose(path: str, said: str) -> yaml.MappingNode | None:
    """The top of a YAML file, None if it is empty. Errors begin with `said`."""
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{said} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{said} is not UTF-8 text (byte {error.start}).") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or "not readable").split())
        raise UserError(f"{said}{where} is not valid YAML: {problem}.") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UserError(f"{said} must hold lines of `name: value`, but it holds {_kind(root)}.")
    return root


def _yaml_value(flag: Flag, node: yaml.Node, origin: str) -> Any:
    items = node.value if isinstance(node, yaml.SequenceNode) and flag.is_list else [node]
    for item in items:
        if not isinstance(item, yaml.ScalarNode):
            raise UserError(f"{origin}: {flag.name} is {_kind(item)}, but it takes {describe(flag.annotation)}.")
    if items == [node] and node.style is None and node.value.lower() in NULL_WORDS:
        if not flag.takes_none:
            raise UserError(f"{origin}: {flag.name} has no value, but it takes {describe(flag.annotation)}.")
        return None
    try:
        values = tuple(flag.read(item.value) for item in items)
    except ValueError as error:
        raise UserError(f"{origin}: {flag.name} {error}.") from None
    return values if flag.is_list else values[0]


def _kind(node: yaml.Node) -> str:
    return {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list"}.get(type(node), "a single value")


def _with_origins(sentence: str, settings: Mapping[str, Setting]) -> str:
    """Add where the flags a conflict names were written, unless all stand on the command line."""
    words = {word.strip(",.:;()").removeprefix("--") for word in sentence.split() if word.startswith("--")}
    from_files = sorted(
        f"{name} is set in {settings[name].origin}"
        for name in words & settings.keys()
        if settings[name].origin != COMMAND_LINE
    )
    return f"{sentence.removesuffix('.')} ({'; '.join(from_files)})." if from_files else sentence
