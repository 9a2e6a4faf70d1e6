"""Arguments of run_finetuning.py: the task and its data, the pre-trained model, what is measured, how memory is saved.

As in training.py: a class that declares fields is a group of `--help`, the line under a field is its help text.
Standard library only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from lm_experiments_tools.config.finetuning_notes import (
    BEAM_SEARCH,
    BESIDE_ADAPTER,
    BEST,
    EVALUATION,
    EVALUATION_PROMPTS,
    GENERATION,
    LABEL_TASKS,
    NO_BLOCKS,
    NOTHING_TRAINED,
    OF_BLEU,
    OF_EXAMPLES,
    OF_INSTRUCTIONS,
    OF_LENGTHS,
    OF_PRETRAINING,
    OF_SENTENCES,
    OF_SOURCES,
    PREDICTION,
    RUN_DIRECTORY,
    SENTENCE_TASKS,
    TO_BE_WRITTEN,
    WEIGHTS_READ,
)
from lm_experiments_tools.config.flags import (
    COUNT,
    DROPOUT,
    HARMLESS,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    Unread,
    at_least,
    check_conflict,
    needs,
    notes_of,
    only,
)
from lm_experiments_tools.config.training import ExperimentArgs, TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.metrics import is_own, lower_is_better, metrics_of, usual_metrics, values_of

DEFAULT_ORIGIN, COMMAND_LINE = "default", "command line"  # those of cli.py, without its imports
TASKS_OF = {
    "encoder": ("classification", "multi_label", "regression"),
    "encoder-decoder": ("text_to_text", "classification", "regression", "instructions"),
    "decoder": ("causal_lm", "text_to_text", "instructions"),
}
# What --lr is where it is not given: the usual ones, of ADAMW; soft prompts hardly move below 0.1 (peft issue 2642).
LEARNING_RATES = {
    "encoder": 2e-5,
    "encoder-decoder": 1e-4,
    "decoder": 2e-5,
    "lora": 1e-3,
    "prompt_tuning": 0.3,
    "prefix_tuning": 1e-2,
    "new_tokens": 1e-2,
}
ADAMW = ("AdamW", "Adam", "FusedAdam")  # also as torch.optim:AdamW
# (optimizer, kind of model): Adafactor's of T5 (Raffel et al. 2020, section 3.1.2), AdamWScale's of `make finetune`.
OTHER_RATES = {("Adafactor", "encoder-decoder"): 1e-3, ("AdamWScale", "encoder-decoder"): 1e-2}
# Saved beside the weights, and the defaults of what is done with them (see models/inherited.py).
PROMPT = ("add_task_name", "add_task_definition", "num_pos_examples", "num_neg_examples", "add_explanation")
SAVED = ("model_type", "task", "prefix", "suffix", "input_seq_len", "target_seq_len", "thresholds", *PROMPT)


@dataclass(frozen=True, kw_only=True)
class TaskArgs:
    """The task and its data."""

    model_type: Literal["encoder", "encoder-decoder", "decoder"] = "encoder-decoder"
    """Kind of model: BERT is an encoder, T5 an encoder-decoder, GPT a decoder. Not given: as the weights are."""
    task: Literal["text_to_text", "classification", "multi_label", "regression", "instructions", "causal_lm"] = (
        "text_to_text"
    )
    """text_to_text, classification and regression of sentences or pairs, multi_label (any number of labels for each),
    instructions (Super-Natural-Instructions), causal_lm (any text, in blocks). Not given: what --from_pretrained was
    fine-tuned for, with its prefix, lengths and prompt, where it says so."""
    data_path: tuple[str, ...] = ()
    """Training data: .jsonl, .json, .csv, .tsv or .parquet files, a GLUE folder, a Super-Natural-Instructions folder;
    text for causal_lm."""
    valid_data_path: Annotated[str | None, HARMLESS] = None
    """Validation data, in any form --data_path takes."""
    test_data_path: Annotated[str | None, HARMLESS] = None
    """Test data: evaluated once, after training, with the best checkpoint (--save_best) or the last. Without labels or
    targets in any row it is predicted, not measured."""
    source_id: Annotated[str | None, only("task", "text_to_text")] = None
    """Field of the source text. None: s, source, input, text or article, whichever there is."""
    target_id: Annotated[str | None, only("task", "text_to_text")] = None
    """Field of the target text, or of a list of references. None: t, target, targets, output or summary."""
    id_field: Annotated[str | None, HARMLESS, OF_SOURCES] = None
    """Field of the id that predictions carry. None: id or, for text_to_text, pid, where there is one, else the number
    of the row. For evaluation of text_to_text, rows of one id are one example with several references."""
    prefix: Annotated[str, OF_SOURCES] = ""
    """Text put before every source, for example "summarize: "."""
    suffix: Annotated[str, OF_SOURCES, TO_BE_WRITTEN] = ""
    """Text put after every source and never cut off, for example " Summary:" for a decoder."""
    text_fields: Annotated[tuple[str, ...], OF_SENTENCES] = ()
    """classification, multi_label, regression: fields of the sentence or of the two sentences, in the order in which
    they are read. Empty: by GLUE's names."""
    label_field: Annotated[str | None, OF_SENTENCES] = None
    """classification, multi_label, regression: field of the label or the labels. None: label, gold_label, score,
    is_duplicate or Quality; for multi_label first of all labels."""
    label_names: Annotated[tuple[str, ...], only("task", *LABEL_TASKS)] = ()
    """classification, multi_label: all labels, in the order of their numbers. Empty: those of the training data,
    sorted."""
    label_words: Annotated[tuple[str, ...], only("task", "classification"), only("model_type", "encoder-decoder")] = ()
    """classification by an encoder-decoder: the word it generates for each label. Empty: the labels themselves."""
    max_bad_lines: Annotated[int | None, HARMLESS, NOT_NEGATIVE] = 0
    """Unreadable rows to leave out (file and line are reported) before the data is refused. None: 100, or 0.1 % of the
    rows read so far where that is more."""
    max_train_samples: Annotated[int | None, COUNT] = None
    """Training examples to use, a fixed random choice (of causal_lm the first blocks). None: all."""
    valid_samples: Annotated[int | None, HARMLESS, COUNT, needs("valid_data_path")] = None
    """Validation examples to use, the same random ones each time. None: all."""
    test_samples: Annotated[int | None, HARMLESS, COUNT, needs("test_data_path")] = None
    """Test examples to use, the same random ones each time. None: all."""

    def check(self) -> None:
        if self.task not in TASKS_OF[self.model_type]:
            able = " or ".join(kind for kind, tasks in TASKS_OF.items() if self.task in tasks)
            raise UserError(
                f"--task {self.task} is not for --model_type {self.model_type}: choose --model_type {able}, or one of "
                f"{', '.join(TASKS_OF[self.model_type])}."
            )
        if len(self.text_fields) > 2:
            raise UserError(f"--text_fields names {len(self.text_fields)} fields: give one sentence or a pair.")
        if self.label_words and self.label_names and len(self.label_words) != len(self.label_names):
            raise UserError(
                f"--label_words has {len(self.label_words)} words for {len(self.label_names)} --label_names: give one "
                "for each."
            )


@dataclass(frozen=True, kw_only=True)
class LengthArgs:
    """Lengths of examples, and how they are put together."""

    input_seq_len: Annotated[int, at_least(2)] = 512
    """Most tokens of a source (of source and target together for a decoder; of a block of causal_lm). What is cut off
    is counted and reported."""
    target_seq_len: Annotated[int, at_least(2), NO_BLOCKS, TO_BE_WRITTEN] = 128
    """Most tokens of a target, end of sequence included."""
    bucket_rows: Annotated[int | None, COUNT, OF_LENGTHS] = None
    """Rows of similar length to put together. None: all rows of a step, over all workers; 1: none."""
    packing: Annotated[bool, NO_BLOCKS] = False
    """Several examples in one row, which do not see each other. Not for every model: see docs/finetuning_data.md."""


@dataclass(frozen=True, kw_only=True)
class InstructionArgs:
    """Super-Natural-Instructions: the prompt, and how much of each task."""

    sni_split: Annotated[str, OF_INSTRUCTIONS] = "default"
    """Folder below splits/ with train_tasks.txt and test_tasks.txt."""
    add_task_name: Annotated[bool, OF_INSTRUCTIONS, EVALUATION_PROMPTS] = False
    """Begin the prompt with the name of the task."""
    add_task_definition: Annotated[bool, OF_INSTRUCTIONS, EVALUATION_PROMPTS] = True
    """Put the definition of the task into the prompt."""
    num_pos_examples: Annotated[int, NOT_NEGATIVE, OF_INSTRUCTIONS, EVALUATION_PROMPTS] = 2
    """Positive examples in the prompt."""
    num_neg_examples: Annotated[int, NOT_NEGATIVE, OF_INSTRUCTIONS, EVALUATION_PROMPTS] = 0
    """Negative examples in the prompt."""
    add_explanation: Annotated[bool, OF_INSTRUCTIONS, OF_EXAMPLES, EVALUATION_PROMPTS] = False
    """Add their explanations to the examples."""
    tk_instruct: Annotated[bool, OF_INSTRUCTIONS] = False
    """Choose for each training example at random what stands in the prompt, as Tk-Instruct did."""
    max_instances_per_task: Annotated[int | None, COUNT, OF_INSTRUCTIONS] = None
    """Training instances of each task, the first ones. None: all."""
    max_instances_per_eval_task: Annotated[int | None, HARMLESS, COUNT, OF_INSTRUCTIONS, EVALUATION] = 100
    """Validation and test instances of each task, the first ones. None: all."""


@dataclass(frozen=True, kw_only=True)
class PretrainedArgs:
    """The pre-trained model."""

    from_pretrained: str | None = None
    """Weights to start from: Hugging Face name or folder, a run directory or checkpoint of ours, a t5-experiments
    .pth or nanoT5 .bin file (these two with --model_cfg)."""
    tokenizer: str | None = None
    """Hugging Face tokenizer (name or folder) or a SentencePiece .model file. None: the one beside the weights."""

    def check(self) -> None:
        check_conflict(self, "from_pretrained", "init_checkpoint", "both name the weights to start from")
        check_conflict(self, "from_pretrained", "base_model", "both name the model")


@dataclass(frozen=True, kw_only=True)
class MemoryArgs:
    """Small memory: what is trained, and in which form the rest is held."""

    freeze: tuple[str, ...] = ()
    """Parts not to train: encoder, decoder, embeddings, head, or patterns of parameter names such as "*.layer.0.*"."""
    peft: Literal["lora", "prompt_tuning", "prefix_tuning", "new_tokens"] | None = None
    """Train little beside a frozen model: low-rank matrices, a soft prompt, soft prefixes of every layer, or the
    embeddings of new tokens put before every source."""
    lora_r: Annotated[int, COUNT, only("peft", "lora")] = 8
    """Rank of the matrices."""
    lora_alpha: Annotated[float, NOT_NEGATIVE, only("peft", "lora")] = 16.0
    """Scale of their product, divided by the rank."""
    lora_dropout: Annotated[float, DROPOUT, only("peft", "lora")] = 0.0
    """Dropout probability before them."""
    lora_targets: Annotated[tuple[str, ...], only("peft", "lora")] = ()
    """Names of the layers they are added to. Empty: those peft knows for the kind of model; all-linear: every one."""
    num_virtual_tokens: Annotated[int, COUNT, only("peft", "prompt_tuning", "prefix_tuning", "new_tokens")] = 20
    """Length of a soft prompt or prefix, or new tokens."""
    prompt_init_text: Annotated[str | None, only("peft", "prompt_tuning")] = None
    """prompt_tuning: text whose embeddings the prompt starts from. None: those of random words."""
    num_prompts: Annotated[int, COUNT, only("peft", "prompt_tuning")] = 1
    """prompt_tuning: prompts trained side by side on one frozen model, which vote on the prediction."""
    quantize: Annotated[Literal["int8", "nf4", "fp4"] | None, BESIDE_ADAPTER] = None
    """Hold weights that nothing trains in 8 or 4 bits (bitsandbytes): the base model under --peft, or the whole one
    with --validate_only."""
    inference_dtype: Annotated[Literal["bf16", "fp16"] | None, HARMLESS, NOTHING_TRAINED] = None
    """--validate_only: hold all weights (with --quantize what is not in fewer bits) in 16 bits. None: in 32."""
    device_map: str | None = None
    """Place layers on several devices: auto, balanced, sequential, or a JSON file {module: device}."""
    embeddings_on_cpu: bool = False
    """Keep the token embeddings in the main memory, not on the GPU."""

    def check(self) -> None:
        if self.peft == "new_tokens" and self.task in ("instructions", "causal_lm"):
            raise UserError(f"--peft new_tokens begins sources with them, which --task {self.task} has none of.")
        if self.packing and self.peft in ("prompt_tuning", "prefix_tuning"):
            raise UserError(f"--packing puts several examples behind the prompt of --peft {self.peft}: choose one.")
        if self.task == "multi_label" and self.num_prompts > 1:
            raise UserError("--num_prompts: the prompts vote for one label, and --task multi_label may have several.")
        check_conflict(self, "peft", "freeze", "--peft freezes the whole base model already")


@dataclass(frozen=True, kw_only=True)
class EvaluationArgs:
    """Metrics, and how text is generated for them."""

    thresholds: Annotated[tuple[float, ...], HARMLESS, only("task", "multi_label")] = (0.5,)
    """multi_label: a label is predicted from this probability on; one for all, or one for each, in their order."""
    metrics: Annotated[tuple[str, ...], HARMLESS, EVALUATION] = ()
    """Metrics besides the loss, by the names in docs/finetuning.md (an unknown name is answered with those of the
    task), or functions of your own as module:function (docs/new_metric.md). Empty: the usual ones of the task; none:
    the loss alone."""
    bleu_tokenize: Annotated[
        Literal["13a", "intl", "zh", "char", "none", "ja-mecab", "ko-mecab"], HARMLESS, OF_BLEU
    ] = "13a"
    """bleu: sacreBLEU's tokenizer. zh for Chinese, char for any text without spaces; ja-mecab and ko-mecab need
    sacrebleu[ja] and sacrebleu[ko]."""
    show_valid_examples: Annotated[int, HARMLESS, NOT_NEGATIVE, PREDICTION, EVALUATION] = 0
    """Examples, with their predictions, to print at every validation, in TensorBoard too."""
    num_beams: Annotated[int, HARMLESS, COUNT, GENERATION, EVALUATION] = 1
    """Beams of a beam search; 1 decodes greedily."""
    do_sample: Annotated[bool, HARMLESS, GENERATION, EVALUATION] = False
    """Draw tokens at random instead of taking the most likely."""
    temperature: Annotated[float, HARMLESS, POSITIVE, needs("do_sample")] = 1.0
    """--do_sample: divides the logits."""
    top_k: Annotated[int, HARMLESS, NOT_NEGATIVE, needs("do_sample")] = 0
    """--do_sample: among the k most likely tokens; 0: all."""
    top_p: Annotated[
        float,
        HARMLESS,
        Range(lambda value: 0 < value <= 1, "it is a probability above 0, at most 1"),
        needs("do_sample"),
    ] = 1.0
    """--do_sample: among the most likely tokens that have this probability together."""
    length_penalty: Annotated[float | None, HARMLESS, BEAM_SEARCH, GENERATION, EVALUATION] = None
    """Beam search: above 0 favours longer texts. None: as the model's generation_config.json says, or 1."""
    no_repeat_ngram_size: Annotated[int | None, HARMLESS, NOT_NEGATIVE, GENERATION, EVALUATION] = None
    """No n-gram of this size occurs twice; 0: no such rule. None: as the model says, or 0."""
    repetition_penalty: Annotated[float | None, HARMLESS, POSITIVE, GENERATION, EVALUATION] = None
    """Divides the logits of tokens that have occurred; 1 does nothing. None: as the model says, or 1."""
    min_new_tokens: Annotated[int | None, HARMLESS, NOT_NEGATIVE, GENERATION, EVALUATION] = None
    """Least tokens to generate. None: as the model says, or 0."""
    max_new_tokens: Annotated[int | None, HARMLESS, COUNT, GENERATION, EVALUATION] = None
    """Most tokens to generate. None: --target_seq_len."""

    def check(self) -> None:
        most = self.max_new_tokens or self.target_seq_len
        if self.min_new_tokens is not None and self.min_new_tokens > most:
            longest = "--max_new_tokens" if self.max_new_tokens else "--target_seq_len"
            raise UserError(f"--min_new_tokens {self.min_new_tokens} is more than {longest} {most}: raise that.")
        wrong = [value for value in self.thresholds if not 0 < value < 1]
        if wrong or not self.thresholds:
            raise UserError(f"--thresholds {' '.join(map(str, wrong))}: each is a probability between 0 and 1.")
        self._check_metrics()

    def _check_metrics(self) -> None:
        allowed = metrics_of(self.task)
        own = [name for name in self.metrics if is_own(name) and self.task != "causal_lm"]
        for name in self.metrics:
            if name not in (*allowed, *own, "none"):
                yours = "" if self.task == "causal_lm" else ", or module:function of your own"
                raise UserError(
                    f"--metrics {name} is not a metric of --task {self.task}: there are {', '.join(allowed)}, or none"
                    f"{yours}."
                )
        if "none" in self.metrics and len(self.metrics) > 1:
            raise UserError(f"--metrics {' '.join(self.metrics)}: none means none besides the loss; leave it out.")
        produced = self.metric_values()
        if self.optimize_metric not in produced:
            if own and self.optimize_mode is not None:
                return  # its values are known when it is called
            if own:
                raise UserError(
                    f"--optimize_metric {self.optimize_metric} is none of {', '.join(produced)}: where it is a value "
                    f"of {' or '.join(own)}, give --optimize_mode min or max."
                )
            raise UserError(
                f"--optimize_metric {self.optimize_metric} is not produced by validation, which gives "
                f"{', '.join(produced)}: choose one of them, or name another metric in --metrics."
            )
        better = "min" if lower_is_better(self.optimize_metric) else "max"
        if self.optimize_mode not in (None, better):
            raise UserError(
                f"--optimize_mode {self.optimize_mode} would keep the worst model: --optimize_metric "
                f"{self.optimize_metric} is better when {'low' if better == 'min' else 'high'}."
            )

    def metric_names(self) -> tuple[str, ...]:
        """The metrics to compute besides the loss."""
        return () if "none" in self.metrics else self.metrics or usual_metrics(self.task)

    def metric_values(self) -> tuple[str, ...]:
        """Names of the values that validation gives, without those of a user's own metrics."""
        values = [value for name in self.metric_names() if not is_own(name) for value in values_of(name)]
        if self.needs_generation() and self.task in SENTENCE_TASKS:
            values.append("unknown_answers")
        return tuple(dict.fromkeys(["loss", *values]))

    def needs_generation(self) -> bool:
        """True if a metric looks at generated text."""
        writes = self.task in ("text_to_text", "instructions") or self.model_type == "encoder-decoder"
        return writes and bool(self.metric_names())

    def generation_options(self) -> dict[str, int | float | bool]:
        """Arguments of `generate`."""
        options: dict[str, int | float | bool] = {
            "max_new_tokens": self.max_new_tokens or self.target_seq_len,
            "num_beams": self.num_beams,
            "do_sample": self.do_sample,
        }
        if self.do_sample:
            options |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        for flag in ("length_penalty", "no_repeat_ngram_size", "repetition_penalty", "min_new_tokens"):
            if getattr(self, flag) is not None:
                options[flag] = getattr(self, flag)
        return options


@dataclass(frozen=True, kw_only=True)
class EpochArgs:
    """Length of the training in epochs."""

    epochs: Annotated[float | None, HARMLESS, POSITIVE] = 3.0
    """Passes over the training data; where --iters is given, that many updates are made instead."""


@dataclass(frozen=True, kw_only=True)
class FinetuningArgs(
    ExperimentArgs, EpochArgs, EvaluationArgs, MemoryArgs, PretrainedArgs, InstructionArgs, LengthArgs, TaskArgs
):
    """All arguments of run_finetuning.py."""

    model_cls: str | None = None
    """Model class, as module:Class. None: transformers' class for --model_type and --task."""
    optimize_mode: Annotated[Literal["min", "max"] | None, BEST] = None
    """A lower (min) or a higher (max) --optimize_metric is better. None: as the metric is."""
    pad_to_multiple_of: int | None = 8
    use_generate_on_valid: Annotated[bool, GENERATION, EVALUATION] = False
    report: Annotated[bool, OF_PRETRAINING] = False
    eval_batch_size: Annotated[int | None, EVALUATION] = None
    optimize_metric: Annotated[str, BEST] = "loss"
    allow_partial_checkpoint: Annotated[bool, WEIGHTS_READ] = False
    allow_pickle: Annotated[bool, WEIGHTS_READ] = False
    keep_checkpoints: Annotated[int | None, RUN_DIRECTORY] = 3
    resume: Annotated[str, RUN_DIRECTORY] = "auto"

    def precision_options(self) -> dict[str, Any]:
        """As every script's; weights in bf16 are computed with under autocast, whose losses are of 32 bits."""
        options = super().precision_options()
        return {**options, "bf16": options["bf16"] or self.inference_dtype == "bf16"}

    def trim_to(self) -> int:
        """Never None: rows are as wide as the longest of those that a worker makes at once, whose number says nothing
        of the run."""
        return self.pad_to_multiple_of or 1

    def lacks_validation(self) -> bool:
        return self.valid_data_path is None

    def measures_nothing(self) -> bool:
        return self.valid_data_path is None and self.test_data_path is None

    def check_model(self) -> None:
        if self.from_pretrained is None and self.model_cfg is None and self.init_checkpoint is None:
            raise UserError(
                "no model is named: give --from_pretrained, a Hugging Face name, a folder or a checkpoint, or "
                "--model_cfg for a new one with random weights."
            )

    def check_profile(self) -> None:
        if self.epochs is None:  # else the number of updates is known when the data is
            super().check_profile()

    def names_weights(self) -> bool:
        return self.from_pretrained is not None or self.init_checkpoint is not None

    def learning_rate(self) -> float | None:
        if self.lr is not None:
            return self.lr
        name, kind = self.optimizer.removeprefix("torch.optim:"), self.peft or self.model_type
        return LEARNING_RATES[kind] if name in ADAMW else OTHER_RATES.get((name, kind))

    def lacking_rate(self) -> str:
        kind = self.peft or self.model_type
        return (
            f"--lr is missing: no usual rate of --optimizer {self.optimizer} is known for "
            f"{'--peft' if self.peft else '--model_type'} {kind}: give one (AdamW's is {LEARNING_RATES[kind]:g})."
        )

    def resolved(self) -> "FinetuningArgs":
        """The same arguments with what follows from others put in for the loop to read.

        Raises:
            UserError: no data is named.
        """
        if not self.data_path and not self.validate_only:
            raise UserError("--data_path is missing: name the training data, such as train.jsonl or train.tsv.")
        mode = self.optimize_mode or ("min" if lower_is_better(self.optimize_metric) else "max")
        lr = None if self.relative_step else self.learning_rate()
        return replace(self, lr=lr, optimize_mode=mode, use_generate_on_valid=self.needs_generation())

    def without_epochs_beside_iters(self, origins: Mapping[str, str]) -> "FinetuningArgs":
        """The same arguments with either `--iters` or `--epochs`: what is given, on the command line if both are.

        Args:
            origins: of each argument, as `cli.parse` returns them.

        Raises:
            UserError: both were given.
        """
        if origins["iters"] == DEFAULT_ORIGIN or self.epochs is None:
            return self
        stronger = [origins[name] == COMMAND_LINE for name in ("iters", "epochs")]  # than a file, as ever
        if origins["epochs"] == DEFAULT_ORIGIN or stronger == [True, False]:
            return replace(self, epochs=None)
        if stronger == [False, True]:
            return self
        raise UserError("--iters and --epochs exclude each other: both say how long to train.")

    def task_settings(self) -> dict[str, Any]:
        """The settings by which a text becomes what the model reads, those that the task has: see `SAVED`."""
        notes = notes_of(type(self))
        unread = {n for n in SAVED if any(isinstance(r, Unread) and not r.in_run and r.when(self) for r in notes[n])}
        return {name: getattr(self, name) for name in SAVED if name not in unread}

    def with_epochs(self, samples_per_epoch: int, world_size: int) -> "FinetuningArgs":
        """The same arguments with `--iters` from `--epochs`, and a validation each epoch where none is asked for."""
        rows, changes = self.global_batch_size(world_size), {}
        if self.valid_interval is None and self.valid_data_path is not None:
            changes["valid_interval"] = max(1, round(samples_per_epoch / rows))
        if self.epochs is not None:
            changes["iters"] = max(1, math.ceil(self.epochs * samples_per_epoch / rows))
        args = replace(self, **changes)
        TrainerArgs.check_profile(args)
        return args
