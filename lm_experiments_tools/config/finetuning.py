"""Arguments of run_finetuning.py: the task and its data, the pre-trained model, metrics, memory.

A class that declares fields is a group of `--help`; the line under a field is its help text. Standard library only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from lm_experiments_tools.config.flags import (
    COMMAND_LINE,
    COUNT,
    DEFAULT,
    DROPOUT,
    HARMLESS,
    NOT_NEGATIVE,
    POSITIVE,
    Ignored,
    Range,
    at_least,
    check_conflict,
    needs,
    rules_of,
)
from lm_experiments_tools.config.training import ExperimentArgs, TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.metrics import is_own, lower_is_better, metrics_of, usual_metrics, values_of

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
# Saved next to the weights, as defaults of a later run or prediction (see models/inherited.py).
PROMPT = ("add_task_name", "add_task_definition", "num_pos_examples", "num_neg_examples", "add_explanation")
SAVED = ("model_type", "task", "prefix", "suffix", "input_seq_len", "target_seq_len", "thresholds", "positive_label")
SAVED += PROMPT
LABEL_TASKS = ("classification", "multi_label")  # tasks whose examples have labels with names
SENTENCE_TASKS = (*LABEL_TASKS, "regression")
PROMPT_KINDS = ("prompt_tuning", "prefix_tuning", "new_tokens")

# Flags that are ignored next to others, and therefore refused.
_OF_SENTENCES = needs("task", *SENTENCE_TASKS)
_OF_SOURCES = needs("task", "text_to_text", *SENTENCE_TASKS)
_OF_INSTRUCTIONS = needs("task", "instructions")
_WRITTEN = Ignored(lambda args: args.model_type == "encoder", "is about written text, and an encoder writes none")
_OF_BLOCKS = Ignored(lambda args: args.task == "causal_lm", "is not read by --task causal_lm, which reads blocks")
_LENGTHS = Ignored(
    lambda args: args.packing or args.task == "causal_lm", "has no effect with --packing or --task causal_lm"
)
_IN_PROMPT = Ignored(
    lambda args: args.num_pos_examples == args.num_neg_examples == 0, "needs --num_pos_examples or --num_neg_examples"
)
_BEAM_SEARCH = Ignored(lambda args: args.num_beams == 1, "compares texts of a beam search: give --num_beams too")
_OF_BLEU = Ignored(lambda args: "bleu" not in args.metric_names(), "needs --metrics bleu")
_GENERATION = Ignored(
    lambda args: not args.needs_generation(), "is about generated text, and no metric of --metrics reads any"
)
_PREDICTION = Ignored(
    lambda args: args.task == "causal_lm" or not args.metric_names(),
    "shows predictions, and --task causal_lm and --metrics none make none",
)
_PRETRAINING = Ignored(lambda args: True, "is of pre-training; predictions are in predictions/ of --model_path")
# Refused only in a run of the script: `FineTuner` may evaluate or load weights later.
_QUANTIZED = Ignored(
    lambda args: not args.peft and not args.validate_only,
    "{quantize} makes weights that cannot be trained: add --peft lora (or another kind) or --validate_only",
    in_run=True,
)
_EVALUATION = Ignored(
    lambda args: args.measures_nothing(), "is about evaluation: add --valid_data_path or --test_data_path", in_run=True
)
_EVALUATION_PROMPTS = Ignored(
    lambda args: args.tk_instruct and args.measures_nothing(),
    "is about evaluation where --tk_instruct draws the prompts of training",
    in_run=True,
)
_BEST = Ignored(
    lambda args: args.lacks_validation(), "is about validation data, which --valid_data_path names", in_run=True
)
_WEIGHTS_READ = Ignored(
    lambda args: not args.names_weights() and not args.may_resume(),
    "is about weights to start from, and none are named",
    in_run=True,
)
_RUN_DIRECTORY = Ignored(
    lambda args: args.model_path is None and args.resume_path() is None,
    "is about the checkpoints in --model_path, which is not given",
    in_run=True,
)


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
    data_path: Annotated[tuple[str, ...], HARMLESS] = ()  # the data's fingerprint is compared
    """Training data: .jsonl, .json, .csv, .tsv or .parquet files, a GLUE folder, a Super-Natural-Instructions folder;
    text for causal_lm."""
    valid_data_path: Annotated[str | None, HARMLESS] = None
    """Validation data, in any form --data_path takes."""
    test_data_path: Annotated[str | None, HARMLESS] = None
    """Test data: evaluated once, after training, with the best checkpoint (--save_best) or the last. Without labels or
    targets in any row it is predicted, not measured."""
    source_id: Annotated[str | None, needs("task", "text_to_text")] = None
    """Field of the source text. None: s, source, input, text or article, whichever there is."""
    target_id: Annotated[str | None, needs("task", "text_to_text")] = None
    """Field of the target text, or of a list of references. None: t, target, targets, output or summary."""
    id_field: Annotated[str | None, HARMLESS, _OF_SOURCES] = None
    """Field of the id that predictions carry. None: id or, for text_to_text, pid, where there is one, else the number
    of the row. For evaluation of text_to_text, rows of one id and source are one example with several references."""
    prefix: Annotated[str, _OF_SOURCES] = ""
    """Text put before every source, for example "summarize: "."""
    suffix: Annotated[str, _OF_SOURCES, _WRITTEN] = ""
    """Text put after every source and never cut off, for example " Summary:" for a decoder."""
    text_fields: Annotated[tuple[str, ...], _OF_SENTENCES] = ()
    """classification, multi_label, regression: fields of the sentence or of the two sentences, in the order in which
    they are read. Empty: by GLUE's names."""
    label_field: Annotated[str | None, _OF_SENTENCES] = None
    """classification, multi_label, regression: field of the label or the labels. None: label, gold_label, score,
    is_duplicate or Quality; for multi_label first of all labels."""
    label_names: Annotated[tuple[str, ...], needs("task", *LABEL_TASKS)] = ()
    """classification, multi_label: all labels, in the order of their numbers. Empty: those of the training data,
    sorted, without -1."""
    label_words: Annotated[
        tuple[str, ...], needs("task", "classification"), needs("model_type", "encoder-decoder")
    ] = ()
    """classification by an encoder-decoder: the word it generates for each label. Empty: the labels themselves."""
    table_columns: Annotated[tuple[str, ...], _OF_SOURCES] = ()
    """Names of the columns of each .csv or .tsv whose first line has none of these names, such as source label mark
    sentence for CoLA. Empty: the first line of every table names its columns."""
    max_bad_lines: Annotated[int, HARMLESS, NOT_NEGATIVE] = 0
    """Unreadable rows to leave out (file and line are reported) before the data is refused."""
    max_train_samples: Annotated[int | None, COUNT] = None
    """Training examples to use, a fixed random choice (of causal_lm the first blocks). None: all."""
    valid_samples: Annotated[int | None, HARMLESS, COUNT, needs("valid_data_path")] = None
    """Validation examples to use, the same random ones each time. None: all."""
    test_samples: Annotated[int | None, HARMLESS, COUNT, needs("test_data_path")] = None
    """Test examples to use, the same random ones each time. None: all."""

    def check(self) -> None:
        if self.task not in TASKS_OF[self.model_type]:
            kinds = " or ".join(kind for kind, tasks in TASKS_OF.items() if self.task in tasks)
            if not kinds:
                tasks = ", ".join(TASKS_OF[self.model_type])
                raise UserError(f"--task {self.task} does not exist; --model_type {self.model_type} has {tasks}.")
            raise UserError(f"--task {self.task} is not for --model_type {self.model_type}: choose {kinds}.")
        if len(self.text_fields) > 2:
            raise UserError(f"--text_fields names {len(self.text_fields)} fields: give one sentence or a pair.")
        if self.label_words and self.label_names and len(self.label_words) != len(self.label_names):
            raise UserError("--label_words and --label_names differ in number: give one word for each label.")


@dataclass(frozen=True, kw_only=True)
class LengthArgs:
    """Lengths of examples, and how examples are grouped or packed into rows."""

    input_seq_len: Annotated[int, at_least(2)] = 512
    """Most tokens of a source (of source and target together for a decoder; of a block of causal_lm). What is cut off
    is counted and reported."""
    target_seq_len: Annotated[int, at_least(2), _OF_BLOCKS, _WRITTEN] = 128
    """Most tokens of a target, end of sequence included."""
    bucket_rows: Annotated[int | None, COUNT, _LENGTHS] = None
    """Rows of similar length to put together. None: all rows of a step, over all workers; 1: none."""
    packing: Annotated[bool, _OF_BLOCKS] = False
    """Several examples in one row, which do not see each other. Not for every model: see docs/finetuning_data.md."""


@dataclass(frozen=True, kw_only=True)
class InstructionArgs:
    """Super-Natural-Instructions: what the prompt contains, and how many examples of each task are used."""

    sni_split: Annotated[str, _OF_INSTRUCTIONS] = "default"
    """Folder below splits/ with train_tasks.txt and test_tasks.txt."""
    add_task_name: Annotated[bool, _OF_INSTRUCTIONS, _EVALUATION_PROMPTS] = False
    """Begin the prompt with the name of the task."""
    add_task_definition: Annotated[bool, _OF_INSTRUCTIONS, _EVALUATION_PROMPTS] = True
    """Put the definition of the task into the prompt."""
    num_pos_examples: Annotated[int, NOT_NEGATIVE, _OF_INSTRUCTIONS, _EVALUATION_PROMPTS] = 2
    """Positive examples in the prompt."""
    num_neg_examples: Annotated[int, NOT_NEGATIVE, _OF_INSTRUCTIONS, _EVALUATION_PROMPTS] = 0
    """Negative examples in the prompt."""
    add_explanation: Annotated[bool, _OF_INSTRUCTIONS, _IN_PROMPT, _EVALUATION_PROMPTS] = False
    """Add their explanations to the examples."""
    tk_instruct: Annotated[bool, _OF_INSTRUCTIONS] = False
    """Choose for each training example at random what stands in the prompt, as Tk-Instruct did."""
    max_instances_per_task: Annotated[int | None, COUNT, _OF_INSTRUCTIONS] = None
    """Training instances of each task, the first ones. None: all."""
    max_instances_per_eval_task: Annotated[int | None, HARMLESS, COUNT, _OF_INSTRUCTIONS, _EVALUATION] = 100
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
    """Training in little memory: which weights are trained, and in which precision the others are stored."""

    freeze: tuple[str, ...] = ()
    """Parts not to train: encoder, decoder, embeddings, head, or patterns of parameter names such as "*.layer.0.*"."""
    peft: Literal["lora", "prompt_tuning", "prefix_tuning", "new_tokens"] | None = None
    """Train little beside a frozen model: low-rank matrices, a soft prompt, soft prefixes of every layer, or the
    embeddings of new tokens put before every source."""
    lora_r: Annotated[int, COUNT, needs("peft", "lora")] = 8
    """Rank of the matrices."""
    lora_alpha: Annotated[float, NOT_NEGATIVE, needs("peft", "lora")] = 16.0
    """Scale of their product, divided by the rank."""
    lora_dropout: Annotated[float, DROPOUT, needs("peft", "lora")] = 0.0
    """Dropout probability before them."""
    lora_targets: Annotated[tuple[str, ...], needs("peft", "lora")] = ()
    """Names of the layers they are added to. Empty: those peft knows for the kind of model; all-linear: every one."""
    num_virtual_tokens: Annotated[int, COUNT, needs("peft", *PROMPT_KINDS)] = 20
    """Length of a soft prompt or prefix, or new tokens."""
    prompt_init_text: Annotated[str | None, needs("peft", "prompt_tuning")] = None
    """prompt_tuning: text whose embeddings the prompt starts from. None: those of random words."""
    quantize: Annotated[Literal["int8", "nf4", "fp4"] | None, _QUANTIZED] = None
    """Hold weights that nothing trains in 8 or 4 bits (bitsandbytes): the base model under --peft, or the whole one
    with --validate_only."""
    device_map: str | None = None
    """Place layers on several devices: auto, balanced, sequential, or a JSON file {module: device}."""
    embeddings_on_cpu: bool = False
    """Keep the token embeddings in the main memory, not on the GPU."""

    def check(self) -> None:
        if self.peft == "new_tokens" and self.task in ("instructions", "causal_lm"):
            raise UserError(f"--peft new_tokens is not for --task {self.task}, which has no sources.")
        if self.packing and self.peft in ("prompt_tuning", "prefix_tuning"):
            raise UserError(f"--packing and --peft {self.peft} exclude each other.")
        check_conflict(self, "peft", "freeze", "--peft freezes the whole base model already")


@dataclass(frozen=True, kw_only=True)
class EvaluationArgs:
    """Metrics, and how text is generated for them."""

    thresholds: Annotated[tuple[float, ...], HARMLESS, needs("task", "multi_label")] = (0.5,)
    """multi_label: a label is predicted from this probability on; one for all, or one for each, in their order."""
    metrics: Annotated[tuple[str, ...], HARMLESS, _EVALUATION] = ()
    """Metrics besides the loss, by the names in docs/finetuning.md (an unknown name is answered with those of the
    task), or functions of your own as module:function (docs/extending.md). Empty: the usual ones of the task; none:
    the loss alone."""
    bleu_tokenize: Annotated[
        Literal["13a", "intl", "zh", "char", "none", "ja-mecab", "ko-mecab"] | None, HARMLESS, _OF_BLEU
    ] = None
    """bleu: sacreBLEU's tokenizer; ja-mecab and ko-mecab need sacrebleu[ja] and sacrebleu[ko]. None: 13a."""
    positive_label: Annotated[str | None, HARMLESS, needs("task", "classification")] = None
    """classification with two labels: the one that f1, precision and recall are about. None: the second."""
    show_valid_examples: Annotated[int, HARMLESS, NOT_NEGATIVE, _PREDICTION, _EVALUATION] = 0
    """Examples, with their predictions, to print at every validation."""
    num_beams: Annotated[int, HARMLESS, COUNT, _GENERATION, _EVALUATION] = 1
    """Beams of a beam search; 1 decodes greedily."""
    do_sample: Annotated[bool, HARMLESS, _GENERATION, _EVALUATION] = False
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
    length_penalty: Annotated[float | None, HARMLESS, _BEAM_SEARCH, _GENERATION, _EVALUATION] = None
    """Beam search: above 0 favours longer texts. None: as the model's generation_config.json says, or 1."""
    no_repeat_ngram_size: Annotated[int | None, HARMLESS, NOT_NEGATIVE, _GENERATION, _EVALUATION] = None
    """No n-gram of this size occurs twice; 0: no such rule. None: as the model says, or 0."""
    repetition_penalty: Annotated[float | None, HARMLESS, POSITIVE, _GENERATION, _EVALUATION] = None
    """Divides the logits of tokens that have occurred; 1 does nothing. None: as the model says, or 1."""
    min_new_tokens: Annotated[int | None, HARMLESS, NOT_NEGATIVE, _GENERATION, _EVALUATION] = None
    """Least tokens to generate. None: as the model says, or 0."""
    max_new_tokens: Annotated[int | None, HARMLESS, COUNT, _GENERATION, _EVALUATION] = None
    """Most tokens to generate. None: --target_seq_len."""

    def check(self) -> None:
        longest = "max_new_tokens" if self.max_new_tokens else "target_seq_len"
        if self.min_new_tokens is not None and self.min_new_tokens > getattr(self, longest):
            raise UserError(f"--min_new_tokens {self.min_new_tokens} is more than --{longest}.")
        if not self.thresholds or not all(0 < value < 1 for value in self.thresholds):
            raise UserError("--thresholds: each is a probability between 0 and 1.")
        self._check_metrics()

    def _check_metrics(self) -> None:
        """Each metric must be one of the task, and `--optimize_metric` one of the values that they give."""
        allowed = (*metrics_of(self.task), "none")
        own = [name for name in self.metrics if is_own(name) and self.task != "causal_lm"]
        for name in self.metrics:
            if name not in (*allowed, *own):
                raise UserError(f"--metrics {name} is not for --task {self.task}, which has {', '.join(allowed)}.")
        if "none" in self.metrics and len(self.metrics) > 1:
            raise UserError("--metrics: none means the loss alone; leave it out.")
        metric, mode, values = self.optimize_metric, self.optimize_mode, self.metric_values()
        if metric not in values:
            if own and mode is not None:
                return  # the values of a user's function are known when it is called
            hint = ", or give --optimize_mode for a value of your own metric" if own else ""
            raise UserError(f"--optimize_metric {metric} is not one of {', '.join(values)}{hint}.")
        if mode not in (None, "min" if lower_is_better(metric) else "max"):
            raise UserError(f"--optimize_mode {mode} would select the worst --optimize_metric {metric}.")

    def metric_names(self) -> tuple[str, ...]:
        """The metrics to compute besides the loss."""
        return () if "none" in self.metrics else self.metrics or usual_metrics(self.task)

    def metric_values(self) -> tuple[str, ...]:
        """Names of the metric values that validation reports, except those of a user's own metrics."""
        values = [value for name in self.metric_names() if not is_own(name) for value in values_of(name)]
        if self.needs_generation() and self.task in SENTENCE_TASKS:
            values.append("unknown_answers")
        return tuple(dict.fromkeys(["loss", *values]))

    def needs_generation(self) -> bool:
        """True if a metric needs generated text."""
        writes = self.task in ("text_to_text", "instructions") or self.model_type == "encoder-decoder"
        return writes and bool(self.metric_names())

    def generation_options(self) -> dict[str, int | float | bool]:
        """Return the keyword arguments for the model's `generate`."""
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
    optimize_mode: Annotated[Literal["min", "max"] | None, _BEST] = None
    """A lower (min) or a higher (max) --optimize_metric is better. None: as the metric is."""
    pad_to_multiple_of: int | None = 8
    use_generate_on_valid: Annotated[bool, _GENERATION, _EVALUATION] = False
    report: Annotated[bool, _PRETRAINING] = False
    eval_batch_size: Annotated[int | None, _EVALUATION] = None
    optimize_metric: Annotated[str, _BEST] = "loss"
    allow_partial_checkpoint: Annotated[bool, _WEIGHTS_READ] = False
    allow_pickle: Annotated[bool, _WEIGHTS_READ] = False
    keep_checkpoints: Annotated[int | None, _RUN_DIRECTORY] = 3
    resume: Annotated[str, _RUN_DIRECTORY] = "auto"

    def trim_to(self) -> int:
        """Multiple (in tokens) to which the width of a micro-batch is rounded up when padding columns are cut off."""
        return self.pad_to_multiple_of or 1

    def lacks_validation(self) -> bool:
        return self.valid_data_path is None

    def measures_nothing(self) -> bool:
        return self.valid_data_path is None and self.test_data_path is None

    def check_model(self) -> None:
        if self.from_pretrained is None and self.model_cfg is None and self.init_checkpoint is None:
            raise UserError("no model is named: give --from_pretrained, or --model_cfg for random weights.")

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
        return f"--lr is missing: --optimizer {self.optimizer} has no default for {self.peft or self.model_type}."

    def resolved(self, origins: Mapping[str, str] | None = None) -> "FinetuningArgs":
        """Return the arguments with all values filled in that follow from others. Raises UserError.

        If both `--iters` and `--epochs` are set, the one of the command line is used, by `origins` of the settings.
        """
        if not self.data_path and not self.validate_only:
            raise UserError("--data_path is missing: name the training data, such as train.jsonl or train.tsv.")
        args, origins = self, origins or {}
        length = [origins.get(name, DEFAULT) for name in ("iters", "epochs")]
        if self.epochs is not None and length[0] != DEFAULT:
            if length[1] != DEFAULT and (length[0] == COMMAND_LINE) == (length[1] == COMMAND_LINE):
                raise UserError("--iters and --epochs exclude each other: both say how long to train.")
            if length[1] != COMMAND_LINE:
                args = replace(self, epochs=None)
        mode = self.optimize_mode or ("min" if lower_is_better(self.optimize_metric) else "max")
        lr = None if self.relative_step else self.learning_rate()
        return replace(args, lr=lr, optimize_mode=mode, use_generate_on_valid=self.needs_generation())

    def task_settings(self) -> dict[str, Any]:
        """Return the task's settings that turn a text into the model's input, such as `prefix`, by name."""
        rules = rules_of(type(self))
        ignored = {n for n in SAVED if any(isinstance(r, Ignored) and not r.in_run and r.when(self) for r in rules[n])}
        return {name: getattr(self, name) for name in SAVED if name not in ignored}

    def with_epochs(self, samples_per_epoch: int, world_size: int) -> "FinetuningArgs":
        """Replace `--epochs` by `--iters`, and validate each epoch if no `--valid_interval` is given."""
        rows, changes = self.global_batch_size(world_size), {}
        if self.valid_interval is None and self.valid_data_path is not None:
            changes["valid_interval"] = max(1, round(samples_per_epoch / rows))
        if self.epochs is not None:
            changes["iters"] = max(1, math.ceil(self.epochs * samples_per_epoch / rows))
        args = replace(self, **changes)
        TrainerArgs.check_profile(args)
        return args
