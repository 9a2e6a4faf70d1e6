"""Phases: consecutive parts of a run with different settings, such as a longer context at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import yaml

from lm_experiments_tools.config.flags import DEFAULT, HARMLESS, check_conflict, flags_of, is_given
from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.config.options import read_options
from lm_experiments_tools.config.settings import read_settings
from lm_experiments_tools.config.training import IN_RUN_DIRECTORY
from lm_experiments_tools.errors import UserError

# Flags that a phase may set: those of these groups, and these.
_GROUPS = {
    "OptimizerArgs", "ScheduleArgs", "BatchArgs", "ObjectiveArgs", "BertObjectiveArgs", "MixtureArgs",
    "DistillationArgs",
}  # fmt: skip
_FLAGS = {
    "iters", "data_path", "valid_data_path", "dropout_rate", "trained", "model_options", "save_interval",
    "log_interval", "valid_interval",
}  # fmt: skip
_TWO_LENGTHS = "--iters and --phases exclude each other: give each phase its own length."


@dataclass(frozen=True, kw_only=True)
class PhaseArgs:
    """Phases of a run (parts with different settings), branches of a run, and model settings that these change."""

    phases: Annotated[tuple[str, ...], HARMLESS] = ()
    """Parts of the run, in YAML a list of mappings, each with its length (iters: or tokens:) and any flags of task,
    data, lengths, batch, optimizer and schedule that it changes; see docs/phases.md."""
    branch_from: Annotated[str | None, HARMLESS, IN_RUN_DIRECTORY] = None
    """Start as an exact continuation of another run, or of one of its checkpoints, and make --iters more updates. A
    new learning-rate schedule starts there."""
    trained: tuple[str, ...] = ()
    """Patterns of the names of the parameters to train ("*.embed_tokens.*"); the others are frozen. Empty: all."""
    model_options: tuple[str, ...] = ()
    """Values of the model's configuration to replace, as NAME=VALUE, for example rope_theta=160000."""

    def check(self) -> None:
        read_options("model_options", self.model_options)
        for flag in ("init_checkpoint", "validate_only"):
            check_conflict(self, "branch_from", flag, "a branch starts from its trunk, and is trained")
        if self.branch_from and getattr(self, "resume", "auto") != "auto":
            raise UserError("--branch_from starts a new run, which --resume auto continues: leave --resume out.")
        check_phased_run(self)
        phases_of(self)

    def check_origins(self, origins: Mapping[str, str]) -> None:
        """Raise UserError for `--iters` beside `--phases` if it is given, even as its default."""
        if self.phases and origins["iters"] != DEFAULT:
            raise UserError(_TWO_LENGTHS)


def check_phased_run(args: Any) -> None:
    """Refuse flags that cannot be combined with `--phases`. Raises UserError."""
    if not args.phases:
        return
    if is_given(args, "iters"):
        raise UserError(_TWO_LENGTHS)
    if args.validate_only:
        raise UserError("--validate_only and --phases exclude each other: leave one out.")
    if args.init_checkpoint and not (args.reset_iteration and args.reset_lr):
        raise UserError("--init_checkpoint with --phases needs --reset_iteration and --reset_lr: phases count from 0.")
    if args.model_path is None:
        raise UserError("--phases needs --model_path: a phase starts from the checkpoint of the one before.")
    if args.early_stopping_patience > 0:
        raise UserError("--early_stopping_patience and --phases exclude each other: phases have a fixed length.")


def phases_of(args: Any) -> list[Any]:
    """Return the arguments of each phase: the run's, overridden by the settings of the phase. Raises UserError.

    `--phases "{iters: 900}" "{iters: 100, lr: 1e-5}"` gives two, with `iters` 900 and 100. Without `--phases` the
    result is [args].
    """
    if not getattr(args, "phases", ()):
        return [args]
    phases = []
    for number, text in enumerate(args.phases, 1):
        said = f"--phases: phase {number}"
        settings = _settings(type(args), text, said)
        try:
            phases.append(replace(args, phases=(), **settings))
        except UserError as error:
            raise UserError(f"{said}: {error}") from None
    return phases


def may_change(args_class: type, name: str) -> bool:
    """Return True if a phase may change a setting: a flag, "global_batch_size" or "model_config.NAME"."""
    flag = flags_of(args_class).get(name)
    is_own = flag is not None and name != "packing" and (name in _FLAGS or flag.group.__name__ in _GROUPS)
    return is_own or name == "global_batch_size" or name.startswith("model_config.")


def _settings(args_class: type, text: str, said: str) -> dict[str, Any]:
    """The flags that a phase sets, by name; error messages begin with `said`."""
    flags = flags_of(args_class)
    allowed = {name: flag for name, flag in flags.items() if may_change(args_class, name)}
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{said} is not valid YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{said} must be a mapping, such as {{iters: 1000, lr: 1e-4}}.")
    items = [_as_length(key, value) for key, value in node.value]
    for name in (str(key.value).replace("-", "_") for key, _ in items):
        if name in flags and name not in allowed:
            raise UserError(f"{said}: {name} cannot change between phases: set it for the whole run.")
    settings = read_settings(items, allowed, lambda key: said)
    if "iters" not in settings:
        raise UserError(f"{said} has no length: give iters (updates) or tokens.")
    return {name: setting.value for name, setting in settings.items()}


def _as_length(key: yaml.Node, value: yaml.Node) -> tuple[yaml.Node, yaml.Node]:
    """`tokens: N` as `iters: Ntok`."""
    if key.value != "tokens" or not isinstance(value, yaml.ScalarNode):
        return key, value
    length = f"{value.value.removesuffix('tok')}tok"
    return yaml.ScalarNode(key.tag, "iters"), yaml.ScalarNode(value.tag, length, style="'")


def timeline(args: Any, world_size: int, first_step: int = 0) -> Sequence[Any]:
    """List the phases of a run with the optimizer step at which each one ends, from `first_step` on.

    Returned are the arguments of each phase, whose `iters` is this step. Phases of 900 and 100 updates get `iters` 900
    and 1000. Lengths in tokens are converted to optimizer updates.
    """
    found, end = [], first_step
    for phase in phases_of(args):
        phase = in_updates(phase, world_size)
        end += phase.iters
        found.append(replace(phase, iters=end))
    return found
