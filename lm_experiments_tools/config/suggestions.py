"""Suggest the right flag for a misspelt or abbreviated one, or for the name that another program uses."""

import difflib
from collections.abc import Mapping
from typing import Any

# Flags and what other programs of the field call them; of several flags the first that a program has.
SYNONYMS = {
    "batch_size": "micro_batch_size per_device_train_batch_size per_gpu_train_batch_size train_batch_size",
    "bucket_rows": "group_by_length sortish_sampler",
    "clip_grad_norm": "grad_clip max_grad_norm",
    "compile": "torch_compile torch_compile_backend torch_compile_mode",
    "data_path": "dataset_name train_data train_dataset train_file",
    "debug_non_finite": "debug detect_anomaly",
    "epochs": "num_epochs num_train_epochs",
    "eval_batch_size": "per_device_eval_batch_size per_gpu_eval_batch_size",
    "from_pretrained": "model_name model_name_or_path",
    "gradient_checkpointing": "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing_kwargs",
    "init_checkpoint": "model_name model_name_or_path",
    "input_seq_len": "block_size max_seq_length max_source_length",
    "iters": "max_steps num_steps steps train_steps",
    "keep_checkpoints": "save_total_limit",
    "label_field": "label_column_name",
    "log_interval": "logging_steps logging_strategy",
    "log_to": "report_to",
    "lora_r": "lora_rank",
    "lora_targets": "target_modules",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "lr_scheduler_options": "lr_scheduler_kwargs",
    "max_new_tokens": "generation_max_length val_max_target_length",
    "metrics": "compute_metrics metric_name metrics_fn",
    "mlm_prob": "mlm_probability",
    "model_cfg": "config_name config_overrides",
    "model_path": "logging_dir output_dir run_name",
    "num_beams": "generation_num_beams",
    "num_warmup_steps": "warmup_steps",
    "optimize_metric": "metric_for_best_model",
    "optimize_mode": "greater_is_better",
    "optimizer": "optim",
    "optimizer_options": "optim_args",
    "prefix": "input_prefix source_prefix",
    "quantize": "load_in_4bit load_in_8bit",
    "resume": "resume_from_checkpoint",
    "save_best": "load_best_model_at_end",
    "save_interval": "save_steps save_strategy",
    "source_id": "text_column text_column_name",
    "target_id": "summary_column",
    "target_seq_len": "max_target_length",
    "test_data_path": "test_file",
    "test_samples": "max_predict_samples",
    "text_key": "text_column text_column_name",
    "tokenizer": "tokenizer_name vocab",
    "valid_at_start": "eval_on_start",
    "valid_data_path": "eval_dataset eval_file validation_file",
    "valid_fraction": "val_set_size val_split_fraction validation_split_percentage",
    "valid_interval": "eval_steps eval_strategy evaluation_strategy",
    "valid_samples": "max_eval_samples",
    "vocab": "tokenizer_name tokenizer_path",
}
# Flags without a namesake, where they are not flags still.
GONE = {
    "adam_beta1 adam_beta2 adam_epsilon": "write --optimizer_options betas=0.9,0.98 eps=1e-6",
    "data_n_workers dataloader_num_workers preprocessing_num_workers": "leave it out, batches need no processes of "
    "their own",
    "dataset_config_name": "write --data_path NAME:CONFIG:SPLIT for a Hugging Face dataset",
    "ddp_backend deepspeed fsdp fsdp_config": "start by accelerate launch --config_file accelerate_configs/NAME.yaml",
    "auto_find_batch_size": "lmtools plan --fit auto finds a micro-batch that fits",
    "do_eval do_predict do_train": "leave it out, the data that is named decides what is done",
    "dtype torch_dtype": "choose by --bf16 or --fp16",
    "enable_jit_checkpoint eval_accumulation_steps length_column_name local_rank optim_target_modules": "leave it out",
    "label_smoothing_factor": "set label_smoothing in the model's configuration",
    "model_name model_name_or_path model_type": "name the architecture by --model_cfg",
    "device no_cuda use_cpu": "set CUDA_VISIBLE_DEVICES in the environment (empty: the CPU)",
    "overwrite_output_dir": "write --resume never",
    "predict_with_generate": "leave it out, text is generated where a metric needs it",
    "source_lang target_lang": "write the languages into --prefix",
    "task_name": "--data_path names the data and --task its kind",
    "use_lora": "write --peft lora",
    "val_set_size val_split_fraction validation_split_percentage": "name a file of its own by --valid_data_path",
}
# Names of transformers' Trainer that mean the same: the command line and YAML files take them.
ALIASES = {"learning_rate": "lr", "max_steps": "iters", "num_train_epochs": "epochs", "output_dir": "model_path"}


def own_name(written: str, names: Mapping[str, Any]) -> str:
    """Name of a flag, with one of `ALIASES` replaced unless it is a flag itself."""
    name = written.replace("-", "_")
    return ALIASES[name] if name not in names and ALIASES.get(name) in names else name


def suggestion(written: str, names: Mapping[str, Any], prefix: str = "", listed_by: str = "--help") -> str:
    """Return the end of the error message for an unknown flag or name: which existing one may be meant.

    `prefix` is put before names, such as "--"; `listed_by` lists them.
    """
    wanted = written.strip("-").replace("-", "_").lower()
    foreign = {word: name for name, words in reversed(SYNONYMS.items()) if name in names for word in words.split()}
    if wanted in foreign:
        return f": here it is called {prefix}{foreign[wanted]}."
    for words, instead in GONE.items():
        if wanted in words.split():
            return f": {instead}."
    known = {name: name for name in names} | foreign
    nearest = [known[word] for word in difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)]
    nearest = nearest or [name for name in names if _abbreviates(wanted, name)]
    nearest = nearest or difflib.get_close_matches(wanted, names, n=1, cutoff=0.7 if len(wanted) > 5 else 0.5)
    return f": did you mean {prefix}{nearest[0]}?" if nearest else f": {listed_by} lists what exists."


def _abbreviates(short: str, name: str) -> bool:
    """True if each word of `short` begins a word of `name`, in order: grad_acc, gradient_accumulation_steps."""
    words = iter(name.split("_"))
    return all(part and any(word.startswith(part) for word in words) for part in short.split("_"))
