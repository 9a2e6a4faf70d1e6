"""The training objectives by name, and their flags.

A user's objective is a class of its own, named by --task: see docs/new_objective.md. As in training.py the line under
a field is its help text. Standard library only.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

from lm_experiments_tools.config.flags import COUNT, HARMLESS, PART, Ignored, is_given
from lm_experiments_tools.config.options import checked_options, parameters_of, read_options
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name, source_imports

ModelKind = Literal["encoder-decoder", "decoder", "encoder"]

_OF_TOKEN_FILES = Ignored(
    lambda args: getattr(args, "streaming", False), "is not for --streaming: tokenize first (lmtools tokenize)"
)
PAPER_DENOISERS = ("R:3:0.15", "R:8:0.15", "X:3:0.5", "X:8:0.5", "X:64:0.15", "X:64:0.5", "S:0.25@1.5")


@dataclass(frozen=True, kw_only=True)
class ObjectiveFacts:
    """Facts about a training objective, such as span corruption: its class, its models and its flags.

    Attributes:
        objective_class: `module:Class` of the `Objective`.
        models: kinds of model that can be trained with it ("encoder", "encoder-decoder", "decoder").
    """

    objective_class: str = ""
    models: tuple[ModelKind, ...]
    reads: tuple[str, ...] = ()

    @property
    def has_targets(self) -> bool:
        """True if the targets are a sequence separate from the inputs."""
        return "target_seq_len" in self.reads

    @property
    def varies_in_length(self) -> bool:
        """True if the examples of the objective differ in length, so that batches group them by length."""
        return "mix_rows" in self.reads

    @property
    def parts_documents(self) -> bool:
        """True if the objective needs documents to be separated by an EOS token."""
        return "append_eos" in self.reads


MlmPositions = Annotated[Literal["labels", "all"] | None, HARMLESS]

_HOME = "lm_experiments_tools.data.objectives"
OBJECTIVE = r"lm_experiments_tools(\.data\.objectives|\s+import[\s(]+(\w+\s*,\s*)*Objective)\b"
OBJECTIVES = {
    "span_corruption": ObjectiveFacts(
        objective_class=f"{_HOME}.span_corruption:SpanCorruption",
        models=("encoder-decoder",),
        reads=("target_seq_len", "noise_density", "mean_noise_span_length"),
    ),
    "prefix_lm": ObjectiveFacts(
        objective_class=f"{_HOME}.prefix_lm:PrefixLM",
        models=("encoder-decoder",),
        reads=("target_seq_len", "mix_rows", "append_eos"),
    ),
    "ul2": ObjectiveFacts(
        objective_class=f"{_HOME}.ul2:UL2",
        models=("encoder-decoder",),
        reads=("target_seq_len", "denoisers", "mode_tokens", "mix_rows", "append_eos"),
    ),
    "causal_lm": ObjectiveFacts(
        objective_class=f"{_HOME}.causal_lm:CausalLM",
        models=("decoder", "encoder-decoder"),
        reads=("append_eos",),
    ),
    "mlm": ObjectiveFacts(
        objective_class=f"{_HOME}.mlm:MaskedLM",
        models=("encoder",),
        reads=("mlm_probability", "mlm_positions"),
    ),
}
# module:name, whose examples seqio makes
REGISTERED_TASK = ObjectiveFacts(models=("encoder-decoder",), reads=("target_seq_len",))


@dataclass(frozen=True)
class DenoiserSpec:
    """One denoiser of UL2's mixture.

    Attributes:
        mode: "R", "X" or "S", which selects the mode token.
        mean_noise_span_length: tokens per masked span; None for prefix LM (S).
        noise_density: fraction of tokens that the model predicts.
    """

    mode: str
    mean_noise_span_length: float | None
    noise_density: float
    weight: Fraction = Fraction(1)

    def __str__(self) -> str:
        mean = "" if self.mean_noise_span_length is None else f":{self.mean_noise_span_length:g}"
        return f"{self.mode}{mean}:{self.noise_density:g}"

    @classmethod
    def parse(cls, text: str) -> "DenoiserSpec":
        """Parse R:3:0.15, X:64:0.5@2 or S:0.25. Raises UserError for other text or a number out of range."""
        number = r"(\d+\.?\d*|\.\d+)"
        match = re.fullmatch(rf"(?:([RX]):{number}:{number}|(S):{number})(?:@{number})?", text)
        if match is None:
            raise UserError(
                f"--denoisers: {text!r} is neither R:3:0.15 or X:64:0.5 (mean span length, fraction of tokens) nor "
                "S:0.25 (fraction), with an optional weight as in R:3:0.15@2."
            )
        mode, mean, density, prefix, prefix_density, weight = match.groups()
        length = None if prefix else float(mean)
        spec = cls(mode or prefix, length, float(density or prefix_density), Fraction(weight or "1"))
        in_range = 0.0 < spec.noise_density < 1.0 and not (prefix and spec.noise_density > 0.5)
        for holds, what in (
            (in_range, f"fraction of {text}: above 0, {'at most 0.5' if prefix else 'below 1'}"),
            (length is None or length >= 1.0, f"mean span length of {text}: at least 1"),
            (spec.weight > 0, f"weight of {text}: above 0"),
        ):
            if not holds:
                raise UserError(f"--denoisers: {what}.")
        return spec


def parse_denoisers(texts: Sequence[str]) -> list[DenoiserSpec]:
    """Parse the denoisers of UL2's mixture; a text may hold several, separated by spaces. Raises UserError."""
    return [DenoiserSpec.parse(text) for text in " ".join(texts).split()]


_READ_BY_USERS = {"target_seq_len", "mix_rows", "append_eos"}
_NO_ARGUMENTS = {"mix_rows", "append_eos", "mlm_positions", "target_seq_len"}  # of the class: others read these flags


@dataclass(frozen=True, kw_only=True)
class ObjectiveArgs:
    """The training objective."""

    task: str = "span_corruption"
    """span_corruption, prefix_lm, ul2 (encoder-decoders); causal_lm (decoders, encoder-decoders); mlm (encoders);
    module:Class, an objective of your own; or module:name, a seqio Task or Mixture in that module."""
    task_options: tuple[str, ...] = ()
    """--task module:Class: arguments of that class, as NAME=VALUE."""
    input_seq_len: Annotated[int, COUNT] = 128
    """Encoder length, in tokens, eos included. causal_lm, mlm: tokens of a block."""
    target_seq_len: Annotated[int, COUNT] = 128
    """Longest decoder length, in tokens, eos included; the length that span corruption needs must fit in it."""
    noise_density: Annotated[float, PART] = 0.15
    """Fraction of tokens that span corruption removes, between 0 and 1."""
    mean_noise_span_length: Annotated[float, COUNT] = 3.0
    """Mean length of a removed span, in tokens."""
    denoisers: tuple[str, ...] = PAPER_DENOISERS
    """ul2: mode:mean span length:fraction of tokens, or S:fraction (prefix LM); each with @weight where that is not
    1."""
    mode_tokens: bool = True
    """ul2: begin each input with the token of its mode."""
    mlm_probability: Annotated[float, PART] = 0.15
    """mlm: probability of a token to be predicted, between 0 and 1."""
    mlm_positions: MlmPositions = None
    """mlm: tokens whose words are scored, only those with a label or all. None: those with a label, in our
    BERT and ModernBERT."""
    mix_rows: Annotated[int | None, COUNT, _OF_TOKEN_FILES] = None
    """prefix_lm, ul2: rows that hold all lengths in their shares, in order of length, so that micro-batches pad
    little. None: all rows of a step, over all workers; 1: rows in random order."""
    append_eos: bool = True
    """prefix_lm, ul2, causal_lm: end each document of raw text with EOS. Token files are as `lmtools tokenize
    --append_eos` made them or not."""

    def check(self) -> None:
        if self.task not in OBJECTIVES and ":" not in self.task:
            raise UserError(f"--task {self.task} does not exist: choose {', '.join(OBJECTIVES)}, or module:Class.")
        self.options_of_objective()
        if not self.denoisers:
            raise UserError(f"--denoisers is empty: give at least one, for example {PAPER_DENOISERS[0]}.")
        parse_denoisers(self.denoisers)
        known = {**OBJECTIVES, "module:Class": ObjectiveFacts(models=(), reads=("task_options",))}
        for flag in dict.fromkeys(flag for objective in known.values() for flag in objective.reads):
            if flag not in self.objective().reads and is_given(self, flag):
                readers = ", ".join(name for name, objective in known.items() if flag in objective.reads)
                may_read = ":" in self.task and flag in _READ_BY_USERS
                own = f", or by a class with reads = ({flag!r},)" if may_read else ""
                raise UserError(f"--{flag} is not read by --task {self.task} but by {readers}{own}.")

    def objective(self) -> ObjectiveFacts:
        """The objective that `--task` names. Raises UserError if its module has no such objective."""
        if ":" not in self.task or self.is_registered_task():
            return OBJECTIVES.get(self.task, REGISTERED_TASK)
        found = resolve_name(self.task, said=f"--task {self.task}")
        models, reads = getattr(found, "models", None), getattr(found, "reads", ())
        if not (models and isinstance(models, tuple) and set(models) <= set(get_args(ModelKind))) or not (
            isinstance(reads, tuple) and set(reads) <= _READ_BY_USERS
        ):
            raise UserError(
                f"--task {self.task} is no Objective with `models`, a tuple of {', '.join(get_args(ModelKind))}, and "
                f"`reads`, a tuple of {', '.join(sorted(_READ_BY_USERS))}: docs/new_objective.md shows one."
            )
        return ObjectiveFacts(objective_class=self.task, models=models, reads=(*reads, "task_options"))

    def options_of_objective(self) -> dict[str, Any]:
        """Return the arguments of the objective's class, flags or `--task_options`. Raises UserError."""
        options = read_options("task_options", self.task_options)
        if ":" not in self.task:
            flags = set(self.objective().reads) - _NO_ARGUMENTS
            return {flag: getattr(self, flag) for flag in sorted(flags)}
        if self.is_registered_task():
            return options
        known = parameters_of(resolve_name(self.objective().objective_class))
        needed = [name for name, parameter in known.items() if parameter.default is parameter.empty]
        if missing := [name for name in needed if name not in options]:
            raise UserError(f"--task {self.task} needs --task_options {' '.join(f'{name}=...' for name in missing)}")
        return checked_options(f"--task {self.task}", options, known, {})

    def highest_rate(self) -> float:
        """Fraction of tokens to predict for masked language modelling (`--task mlm`)."""
        return self.mlm_probability

    def ends_documents(self) -> bool:
        """True if an EOS token is appended to each document of raw text."""
        return self.append_eos and self.objective().parts_documents

    def is_registered_task(self) -> bool:
        """True if `--task module:name` is a Task or Mixture of seqio's registry, not an objective of this package.

        The module's source decides: it is not imported, because it may import TensorFlow.
        """
        return ":" in self.task and not source_imports(self.task.partition(":")[0], OBJECTIVE)
