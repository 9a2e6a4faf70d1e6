"""Arguments of pre-training on text: where it comes from and what is asked of the model.

As in args.py: a class that declares fields is a group of `--help`, the line under a field is its help text. Standard
library only.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lm_experiments_tools.config.training import ExperimentArgs, check_minimum
from lm_experiments_tools.errors import UserError

NATIVE_TASKS = ("span_corruption", "prefix_lm", "ul2", "causal_lm", "mlm")
SEQIO_TASKS = ("span_corruption", "prefix_lm")  # besides any registered one, module:name
PAPER_DENOISERS = ("R:3:0.15", "R:8:0.15", "X:3:0.5", "X:8:0.5", "X:64:0.15", "X:64:0.5", "S:0.25@1.5")

# What only some objectives read; registered tasks of seqio have settings of their own and read the lengths.
_READ_BY = {
    "target_seq_len": ("span_corruption", "prefix_lm", "ul2"),
    "noise_density": ("span_corruption",),
    "mean_noise_span_length": ("span_corruption",),
    "denoisers": ("ul2",),
    "mode_tokens": ("ul2",),
    "mlm_probability": ("mlm",),
    "bucket_rows": ("prefix_lm", "ul2"),
}


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """Where text and vocabulary come from."""

    data_path: tuple[str, ...] = ()
    """Token prefix of `lmtools tokenize`, text (.jsonl, .jsonl.gz, .txt, a folder) or a Hugging Face dataset
    (name[:config][:split]); several are mixed. Needed unless --task module:name brings data of its own."""
    data_weights: tuple[float, ...] = ()
    """Weight of each --data_path. Empty: 1 for each."""
    data_blending: Literal["proportional", "megatron"] = "proportional"
    """proportional: weight 2 takes each sample of a source twice an epoch; megatron: weights are shares of it."""
    valid_data_path: str | None = None
    """Validation data, in any form --data_path takes."""
    vocab: str | None = None
    """SentencePiece .model file. None: the one recorded beside a token prefix."""
    data_pipeline: Literal["auto", "native", "seqio"] = "auto"
    """native: token files, O(1) resume; seqio: Google's t5/seqio on text, in a process of its own;
    auto: seqio for raw text where seqio is installed, else native."""
    streaming: bool = False
    """Tokenize while training, from the first document on, instead of before it."""
    streams: int = 16
    """With --streaming: streams that the text is dealt to, at most; part of its order. As many workers, or fewer that
    divide them, read disjoint parts."""
    text_key: str = "text"
    """Key of a .jsonl line that holds the text."""
    max_bad_lines: int = 100
    """Unreadable lines of raw text to set aside (file and line are reported) before the run refuses to go on. With
    --streaming: in what each worker reads, counted the first time it is read."""
    data_n_workers: int | None = None
    """Processes that tokenize raw text. None: one per core."""
    valid_samples: int | None = None
    """Validation examples to use, the same random ones each time. None: all."""

    def check(self) -> None:
        check_minimum(self, 1, "data_n_workers", "valid_samples", "streams")
        check_minimum(self, 0, "max_bad_lines")
        if not self.data_path and ":" not in getattr(self, "task", ""):
            raise UserError("--data_path is missing: --help says what it takes.")
        check_weights(self)


def check_weights(args: "DataArgs") -> None:
    """One weight for each `data_path`, or none at all."""
    if args.data_weights and len(args.data_weights) != len(args.data_path):
        raise UserError(
            f"--data_weights has {len(args.data_weights)} numbers for {len(args.data_path)} of --data_path: give one "
            "for each, or leave it out."
        )
    if any(not weight > 0.0 or weight == float("inf") for weight in args.data_weights):
        raise UserError(f"--data_weights {args.data_weights}: each must be above 0 and finite.")
    if len(args.data_path) == 1:
        for flag in ("data_weights", "data_blending"):
            if getattr(args, flag) != getattr(DataArgs, flag):
                raise UserError(f"--{flag} mixes several --data_path, and there is one: leave it out.")


@dataclass(frozen=True)
class DenoiserSpec:
    """One denoiser of UL2's mixture.

    Attributes:
        mode: R, X or S, which picks the mode token.
        mean_noise_span_length: in tokens; None for prefix LM (S).
        noise_density: fraction of the tokens that the targets hold.
        weight: of its rows among all.
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
        """Read R:3:0.15, X:64:0.5@2 or S:0.25.

        Raises:
            UserError: not of this form, or a number out of its range.
        """
        number = r"(\d+\.?\d*|\.\d+)"
        match = re.fullmatch(rf"(?:([RX]):{number}:{number}|(S):{number})(?:@{number})?", text)
        if match is None:
            raise UserError(
                f"--denoisers: {text!r} is no denoiser; write R:3:0.15 or X:64:0.5 (mean span length, fraction of "
                "tokens) or S:0.25 (fraction), with a weight as in R:3:0.15@2 where it is not 1."
            )
        mode, mean, density, prefix, prefix_density, weight = match.groups()
        spec = cls(
            mode or prefix,
            None if prefix else float(mean),
            float(density or prefix_density),
            Fraction(weight or "1"),
        )
        if not 0.0 < spec.noise_density < 1.0 or (prefix and spec.noise_density > 0.5):
            most = "at most 0.5" if prefix else "below 1"
            raise UserError(f"--denoisers: the fraction of {text} must be above 0 and {most}.")
        if mean is not None and spec.mean_noise_span_length < 1.0:
            raise UserError(f"--denoisers: the mean span length of {text} must be at least 1.")
        if spec.weight == 0:
            raise UserError(f"--denoisers: the weight of {text} must be above 0; leave the denoiser out instead.")
        return spec


@dataclass(frozen=True, kw_only=True)
class ObjectiveArgs:
    """The training objective."""

    task: str = "span_corruption"
    """span_corruption, prefix_lm, ul2 (encoder-decoders); causal_lm (decoders, encoder-decoders); mlm (encoders);
    or module:name, a seqio Task or Mixture in that module."""
    input_seq_len: int = 128
    """Encoder length, in tokens, eos included. causal_lm, mlm: tokens of a block."""
    target_seq_len: int = 128
    """Longest decoder length, in tokens, eos included; the length that span corruption needs must fit in it."""
    noise_density: float = 0.15
    """Fraction of tokens that span corruption removes, between 0 and 1."""
    mean_noise_span_length: float = 3.0
    """Mean length of a removed span, in tokens."""
    denoisers: tuple[str, ...] = PAPER_DENOISERS
    """ul2: mode:mean span length:fraction of tokens, or S:fraction (prefix LM); each with @weight where that is not
    1."""
    mode_tokens: bool = True
    """ul2: begin each input with the token of its mode."""
    mlm_probability: float = 0.15
    """mlm: probability of a token to be predicted, between 0 and 1."""
    bucket_rows: int | None = None
    """prefix_lm, ul2: rows of like length to put together. None: all rows of a step, over all workers; 1: none."""

    def check(self) -> None:
        if self.task not in NATIVE_TASKS and ":" not in self.task:
            raise UserError(
                f"--task {self.task} does not exist: there are {', '.join(NATIVE_TASKS)}, and seqio's registered "
                "tasks as module:name."
            )
        check_minimum(self, 1, "input_seq_len", "target_seq_len", "bucket_rows")
        check_minimum(self, 1.0, "mean_noise_span_length")
        for flag in ("noise_density", "mlm_probability"):
            if not 0.0 < getattr(self, flag) < 1.0:
                raise UserError(f"--{flag} is {getattr(self, flag)}: it must lie between 0 and 1, for example 0.15.")
        if not self.denoisers:
            raise UserError(f"--denoisers is empty: give at least one, for example {PAPER_DENOISERS[0]}.")
        self.denoiser_specs()
        self._check_unread()

    def _check_unread(self) -> None:
        for flag, tasks in _READ_BY.items():
            if ":" in self.task and flag == "target_seq_len":
                continue
            if self.task not in tasks and getattr(self, flag) != getattr(ObjectiveArgs, flag):
                raise UserError(f"--{flag} is not read by --task {self.task} but by {', '.join(tasks)}: leave it out.")

    def denoiser_specs(self) -> list[DenoiserSpec]:
        """`--denoisers`, read; the text of a YAML scalar may hold several."""
        return [DenoiserSpec.parse(text) for text in " ".join(self.denoisers).split()]

    def varies_in_length(self) -> bool:
        """Whether examples are padded to a common length."""
        return self.task in ("prefix_lm", "ul2")


@dataclass(frozen=True, kw_only=True)
class T5PretrainingArgs(ExperimentArgs, ObjectiveArgs, DataArgs):
    """All arguments of run_t5_pretraining.py."""

    pad_to_multiple_of: int | None = 8

    def trim_to(self) -> int | None:
        """Objectives of one length keep it: a short last row is not worth another shape."""
        return super().trim_to() if self.varies_in_length() or ":" in self.task else None

    def check(self) -> None:
        if ":" in self.task:
            self._check_registered_task()
            return
        if self.data_pipeline == "seqio":
            self._check_seqio_on_text()
        if self.use_generate_on_valid and self.task in ("causal_lm", "mlm"):
            raise UserError(
                f"--use_generate_on_valid compares what an encoder-decoder generates with its targets, but --task "
                f"{self.task} has no targets apart from its inputs: leave it out."
            )
        if self.report and self.task == "mlm":
            raise UserError(
                "--report shows text that a model generates, which --task mlm does not teach: leave it out."
            )
        if self.valid_data_path is None and self.needs_validation():
            raise UserError(f"--{self.needs_validation()[0]} needs validation data: give --valid_data_path.")
        if self.valid_data_path is None and self.report:
            raise UserError("--report shows what the model makes of held-out text: give --valid_data_path.")

    def _check_registered_task(self) -> None:
        """A Task or Mixture of seqio's registry has data and splits of its own."""
        if self.data_pipeline == "native" or self.streaming:
            flag = "--streaming" if self.streaming else "--data_pipeline native"
            raise UserError(f"{flag} reads text by itself, but --task {self.task} is a task of seqio: leave it out.")
        for flag in ("data_path", "valid_data_path"):
            if getattr(self, flag):
                raise UserError(f"--{flag} is not read by --task {self.task}, which has its own data: leave it out.")
        if self.vocab is None:
            raise UserError(f"--task {self.task} needs --vocab: the SentencePiece .model file of its features.")
        if self.report:
            raise UserError(f"--report fills in blanks of held-out text, which --task {self.task} has none of.")

    def _check_seqio_on_text(self) -> None:
        if self.task not in SEQIO_TASKS:
            raise UserError(
                f"--data_pipeline seqio has no --task {self.task}: it has {', '.join(SEQIO_TASKS)} and registered "
                "ones, module:name; choose --data_pipeline native."
            )
        for flag in self.of_native_pipeline():
            raise UserError(
                f"--{flag} is of --data_pipeline native: leave it out, or leave out --data_pipeline seqio."
            )

    def of_native_pipeline(self) -> list[str]:
        """Names of the flags in use that seqio's reading of text knows nothing of."""
        blended = self.data_blending != DataArgs.data_blending
        used = [flag for flag in ("streaming", "data_weights", "bucket_rows") if getattr(self, flag)]
        return [*used, *(["data_blending"] if blended else [])]
