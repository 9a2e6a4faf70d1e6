"""Names of flags that do not exist, and the ones that were meant: misspelt, abbreviated, or of other programs."""

import difflib
from collections.abc import Mapping
from typing import Any

# What other programs of the field call these things.
SYNONYMS = {
    "learning_rate": "lr",
    "max_steps": "iters",
    "num_steps": "iters",
    "train_steps": "iters",
    "output_dir": "model_path",
    "train_file": "data_path",
    "validation_file": "valid_data_path",
    "test_file": "test_data_path",
    "train_data": "data_path",
    "train_dataset": "data_path",
    "eval_dataset": "valid_data_path",
    "model_name_or_path": "from_pretrained",
    "tokenizer_name": "tokenizer",
    "config_name": "model_cfg",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "max_grad_norm": "clip_grad_norm",
    "grad_clip": "clip_grad_norm",
    "warmup_steps": "num_warmup_steps",
    "lr_scheduler_type": "lr_scheduler",
    "eval_steps": "valid_interval",
    "max_eval_samples": "valid_samples",
    "max_predict_samples": "test_samples",
    "load_best_model_at_end": "save_best",
    "metric_for_best_model": "optimize_metric",
    "greater_is_better": "optimize_mode",
    "compute_metrics": "metrics",
    "metrics_fn": "metrics",
    "generation_num_beams": "num_beams",
    "generation_max_length": "max_new_tokens",
    "val_max_target_length": "max_new_tokens",
    "text_column": "source_id",
    "summary_column": "target_id",
    "label_column_name": "label_field",
    "lora_rank": "lora_r",
    "target_modules": "lora_targets",
    "load_in_8bit": "quantize",
    "load_in_4bit": "quantize",
    "optim_args": "optimizer_options",
    "lr_scheduler_kwargs": "lr_scheduler_options",
    "save_steps": "save_interval",
    "logging_steps": "log_interval",
    "save_total_limit": "keep_checkpoints",
    "resume_from_checkpoint": "resume",
    "optim": "optimizer",
    "max_seq_length": "input_seq_len",
    "max_source_length": "input_seq_len",
    "max_target_length": "target_seq_len",
    "torch_compile": "compile",
    "tokenizer_path": "vocab",
    "input_prefix": "prefix",
    "source_prefix": "prefix",
}
# Flags of t5-experiments without a namesake, where they are not flags still.
GONE = {
    "task_name": "--data_path names the data and --task its kind",
    "data_n_workers": "leave it out, batches need no processes of their own",
}


def suggestion(written: str, names: Mapping[str, Any], prefix: str = "") -> str:
    """The end of a sentence about an unknown name, with the nearest one that exists."""
    wanted = written.strip("-").replace("-", "_").lower()
    if SYNONYMS.get(wanted) in names:
        return f": here it is called {prefix}{SYNONYMS[wanted]}."
    if wanted in GONE:
        return f": {GONE[wanted]}."
    abbreviated = [name for name in names if _abbreviates(wanted, name)]
    known = {name: name for name in names} | {word: name for word, name in SYNONYMS.items() if name in names}
    nearest = [known[word] for word in difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)] or abbreviated
    nearest = nearest or difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    return f": did you mean {prefix}{nearest[0]}?" if nearest else ": --help lists what exists."


def _abbreviates(short: str, name: str) -> bool:
    """True if each word of `short` begins a word of `name`, in order: grad_acc, gradient_accumulation_steps."""
    words = iter(name.split("_"))
    return all(part and any(word.startswith(part) for word in words) for part in short.split("_"))
