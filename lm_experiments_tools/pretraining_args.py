"""Arguments of pre-training on text: where it comes from and what is asked of the model.

As in args.py: a class that declares fields is a group of `--help`, the line under a field is its help text. Standard
library only.
"""

from dataclasses import dataclass
from typing import Literal

from lm_experiments_tools.args import ExperimentArgs, check_minimum
from lm_experiments_tools.errors import UserError

NATIVE_TASKS = ("span_corruption", "prefix_lm", "ul2", "causal_lm", "mlm")
SEQIO_TASKS = ("span_corruption", "prefix_lm")  # besides any registered one, module:name


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
    text_key: str = "text"
    """Key of a .jsonl line that holds the text."""
    max_bad_lines: int = 100
    """Unreadable lines of raw text to set aside (file and line are reported) before the run refuses to go on."""
    data_n_workers: int | None = None
    """Processes that tokenize raw text. None: one per core."""
    valid_samples: int | None = None
    """Validation examples to use, the same random ones each time. None: all."""

    def check(self) -> None:
        check_minimum(self, 1, "data_n_workers", "valid_samples")
        check_minimum(self, 0, "max_bad_lines")
        if not self.data_path and ":" not in getattr(self, "task", ""):
            raise UserError("--data_path is missing: --help says what it takes.")
        if self.data_weights and len(self.data_weights) != len(self.data_path):
            raise UserError(
                f"--data_weights has {len(self.data_weights)} numbers for {len(self.data_path)} of --data_path: give "
                "one for each, or leave it out."
            )
        if any(not weight > 0.0 or weight == float("inf") for weight in self.data_weights):
            raise UserError(f"--data_weights {self.data_weights}: each must be above 0 and finite.")


@dataclass(frozen=True, kw_only=True)
class ObjectiveArgs:
    """The training objective."""

    task: str = "span_corruption"
    """span_corruption, prefix_lm, ul2, causal_lm, mlm; or module:name, a seqio Task or Mixture in that module."""
    input_seq_len: int = 128
    """Encoder length, in tokens, eos included."""
    target_seq_len: int = 128
    """Longest decoder length, in tokens, eos included; the length that span corruption needs must fit in it."""
    noise_density: float = 0.15
    """Fraction of tokens that span corruption removes, between 0 and 1."""
    mean_noise_span_length: float = 3.0
    """Mean length of a removed span, in tokens."""

    def check(self) -> None:
        if self.task not in NATIVE_TASKS and ":" not in self.task:
            raise UserError(
                f"--task {self.task} does not exist: there are {', '.join(NATIVE_TASKS)}, and seqio's registered "
                "tasks as module:name."
            )
        check_minimum(self, 1, "input_seq_len", "target_seq_len")
        check_minimum(self, 1.0, "mean_noise_span_length")
        if not 0.0 < self.noise_density < 1.0:
            raise UserError(f"--noise_density is {self.noise_density}: it must lie between 0 and 1, for example 0.15.")


@dataclass(frozen=True, kw_only=True)
class T5PretrainingArgs(ExperimentArgs, ObjectiveArgs, DataArgs):
    """All arguments of run_t5_pretraining.py."""

    def check(self) -> None:
        if ":" in self.task:
            self._check_registered_task()
            return
        if self.data_pipeline == "seqio":
            self._check_seqio_on_text()
        if self.valid_data_path is None and self.needs_validation():
            raise UserError(f"--{self.needs_validation()[0]} needs validation data: give --valid_data_path.")
        if self.valid_data_path is None and self.report:
            raise UserError("--report shows blanks filled in on held-out text: give --valid_data_path.")

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
        if self.streaming or self.data_weights:
            flag = "--streaming" if self.streaming else "--data_weights"
            raise UserError(f"{flag} is of --data_pipeline native: leave it out, or leave out --data_pipeline seqio.")
