"""Notes on the flags of run_finetuning.py (see flags.py): beside which others each has no effect."""

from lm_experiments_tools.config.flags import Unread, only

LABEL_TASKS = ("classification", "multi_label")  # tasks whose examples have labels with names
SENTENCE_TASKS = (*LABEL_TASKS, "regression")

# Flags that have no effect beside others, and why.
OF_SENTENCES = only("task", *SENTENCE_TASKS)
OF_SOURCES = only("task", "text_to_text", *SENTENCE_TASKS)
OF_INSTRUCTIONS = only("task", "instructions")
TO_BE_WRITTEN = Unread(
    lambda args: args.model_type == "encoder",
    "is about a text to be written, and an encoder writes none: leave it out",
)
BESIDE_ADAPTER = Unread(
    lambda args: not args.peft and not args.validate_only,
    "{quantize} holds weights that cannot be trained: add --peft lora (or another kind), which trains a few beside "
    "them, or --validate_only",
    in_run=True,
)
NOTHING_TRAINED = Unread(
    lambda args: not args.validate_only,
    "{inference_dtype} holds weights that are too coarse to be trained: add --validate_only, or leave it out (--bf16 "
    "computes in 16 bits and trains weights of 32)",
    in_run=True,
)
NO_BLOCKS = Unread(
    lambda args: args.task == "causal_lm",
    "is not read by --task {task}, whose blocks have --input_seq_len tokens: leave it out",
)
OF_LENGTHS = Unread(
    lambda args: args.packing or args.task == "causal_lm",
    "puts rows of similar length together, and with --packing and with --task causal_lm all are: leave it out",
)
OF_EXAMPLES = Unread(
    lambda args: args.num_pos_examples == args.num_neg_examples == 0,
    "is about examples in the prompt, and --num_pos_examples and --num_neg_examples are 0: leave it out",
)
BEAM_SEARCH = Unread(lambda args: args.num_beams == 1, "compares texts of a beam search: give --num_beams too")
OF_BLEU = Unread(lambda args: "bleu" not in args.metric_names(), "is of --metrics bleu: add it, or leave --{flag} out")
GENERATION = Unread(
    lambda args: not args.needs_generation(), "is about generated text, and no metric looks at any: leave it out"
)
PREDICTION = Unread(
    lambda args: args.task == "causal_lm" or not args.metric_names(),
    "shows predictions, and --task causal_lm and --metrics none make none: drop one",
)
OF_PRETRAINING = Unread(
    lambda args: True, "is of pre-training: predictions/ in --model_path holds what this run predicts"
)
# What only a run does not read: `FineTuner` may evaluate, or load weights, later.
EVALUATION = Unread(
    lambda args: args.measures_nothing(),
    "is about evaluation: add --valid_data_path or --test_data_path, or leave --{flag} out",
    in_run=True,
)
EVALUATION_PROMPTS = Unread(
    lambda args: args.tk_instruct and args.measures_nothing(),
    "is of evaluation's prompts where --tk_instruct draws those of training: add data for it, or drop one",
    in_run=True,
)
BEST = Unread(
    lambda args: args.lacks_validation(),
    "is about validation: give --valid_data_path, or leave --{flag} out",
    in_run=True,
)
WEIGHTS_READ = Unread(
    lambda args: not args.names_weights() and not args.may_resume(),
    "is about weights to start from, and none are named: leave it out",
    in_run=True,
)
RUN_DIRECTORY = Unread(
    lambda args: args.model_path is None and args.resume_path() is None,
    "is about the checkpoints in --model_path, which is not given: add it, or leave --{flag} out",
    in_run=True,
)
