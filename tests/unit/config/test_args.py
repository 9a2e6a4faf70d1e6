"""Arguments: what is refused and in which words, and the numbers that follow from others."""

import math

import pytest

from lm_experiments_tools.config.lengths import Tokens
from lm_experiments_tools.config.objectives import parse_denoisers
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError


def t5_args(**changes) -> T5PretrainingArgs:
    return T5PretrainingArgs(**({"data_path": ("tokens",), "model_cfg": "t5-small", "lr": 1e-3} | changes))


VALID = {"valid_data_path": "valid"}
RUN = {"model_path": "runs/a"}
CONFLICTS = [
    # (arguments that a user might give, words that the sentence must hold)
    ({"fp16": True, "bf16": True}, ["--fp16", "--bf16"]),
    ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, ["--clip_grad_norm", "--clip_grad_value"]),
    ({"use_lr_drop": True, "lr_scheduler": "linear"} | VALID, ["--use_lr_drop", "--lr_scheduler"]),
    ({"save_best": True} | RUN, ["--save_best", "--valid_data_path"]),
    ({"validate_only": True}, ["--validate_only", "--valid_data_path"]),
    ({"apex_opt_lvl": "O1"}, ["--apex_opt_lvl", "--fp16"]),
    ({"fp16": True, "min_loss_scale": 8.0, "max_loss_scale": 4.0}, ["--min_loss_scale 8", "--max_loss_scale 4"]),
    ({"optimizer": "Adafactor", "warmup_init": True}, ["--warmup_init", "--relative_step"]),
    ({"optimizer": "Adafactor", "relative_step": True, "lr": None, "lr_scheduler": "linear"}, ["--lr_scheduler"]),
    ({"scale_parameter": True}, ["--scale_parameter", "Adafactor"]),
    ({"resume": "runs/b", "init_checkpoint": "runs/c"}, ["--resume runs/b", "--init_checkpoint runs/c"]),
    ({"reset_lr": True}, ["--reset_lr", "--init_checkpoint"]),
    ({"skip_used_data": True}, ["--skip_used_data", "--init_checkpoint"]),
    ({"num_warmup_steps": 5}, ["--num_warmup_steps", "--lr_scheduler"]),
    (
        {"lr_scheduler": "linear", "num_warmup_steps": 9, "num_training_steps": 8},
        ["--num_warmup_steps 9", "--num_training_steps 8"],
    ),
    ({"lr_drop_factor": 0.5}, ["--lr_drop_factor", "--use_lr_drop"]),
    ({"fp16_allreduce": True, "backend": "local"}, ["--fp16_allreduce", "--backend"]),
    ({"save_interval": 10}, ["--save_interval", "--model_path"]),
    ({"model_cfg": None}, ["--model_cfg", "--base_model"]),
    ({"base_model": "t5-base"}, ["--model_cfg", "--base_model"]),
    ({"model_cls": "T5ForConditionalGeneration"}, ["--model_cls", "module:Class"]),
    ({"lr": None}, ["--lr", "AdamW"]),
    ({"task": "ul3"}, ["--task ul3", "span_corruption"]),
    # what the objective does not read
    ({"task": "mlm", "target_seq_len": 64}, ["--target_seq_len", "--task mlm"]),
    ({"denoisers": ("R:3:0.15",)}, ["--denoisers", "--task span_corruption", "ul2"]),
    ({"data_weights": (2.0,)}, ["--data_weights", "--data_path"]),
    ({"task": "prefix_lm", "streaming": True, "mix_rows": 8}, ["--mix_rows", "is not for --streaming"]),
    ({"data_path": ("a", "b"), "streaming": True, "data_weights": (1.0, 2.0)}, ["--data_weights", "by --streaming"]),
    ({"task": "causal_lm", "use_generate_on_valid": True} | VALID, ["--use_generate_on_valid", "causal_lm"]),
    # denoisers
    *[
        ({"task": "ul2", "denoisers": (text,)}, ["--denoisers", repr(text)])
        for text in ("Q:3:0.15", "R:3", "S:3:0.25", "R:3:-1", "R:3:0.15@", "R,3,0.15", "R:nan:0.1")
    ],
    ({"task": "ul2", "denoisers": ("R:3:1.0",)}, ["fraction of R:3:1.0", "below 1"]),
    ({"task": "ul2", "denoisers": ("S:0.6",)}, ["fraction of S:0.6", "at most 0.5"]),
]
OUT_OF_RANGE = [
    *[
        (name, value)
        for name in ("iters", "batch_size", "gradient_accumulation_steps", "log_interval", "max_skipped_updates")
        for value in (0, -1)
    ],
    *[(name, 0) for name in ("input_seq_len", "target_seq_len", "data_n_workers", "valid_samples")],
    *[(name, 0) for name in ("save_interval", "keep_checkpoints", "valid_interval")],
    *[(name, math.nan) for name in ("lr", "weight_decay", "noise_density", "mean_noise_span_length")],
    *[(name, math.nan) for name in ("clip_grad_norm", "clip_grad_value", "lr_min_ratio", "dropout_rate")],
    *[("lr", value) for value in (0.0, -1e-3, math.inf)],
    *[(name, value) for name in ("noise_density", "mlm_probability") for value in (0.0, 1.0)],
    *[(name, 0) for name in ("mix_rows", "pad_to_multiple_of")],
    *[("dropout_rate", value) for value in (-0.1, 1.0)],
    *[("stall_timeout", value) for value in (1, 10**6 + 1)],  # Horovod and torch count milliseconds in 32 bits
    ("weight_decay", -1e-5),
    ("early_stopping_patience", 0),
    ("early_stopping_patience", -2),
    ("max_bad_lines", -1),
    ("seed", -1),
]


@pytest.mark.parametrize(("changes", "words"), CONFLICTS, ids=lambda case: "-".join(case))
def test_conflict_is_one_sentence_naming_the_flags(changes, words):
    with pytest.raises(UserError) as error:
        t5_args(**changes)
    sentence = str(error.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence and sentence.endswith(".")


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_senseless_number_is_refused_with_its_flag_and_value(name, value):
    with pytest.raises(UserError, match=f"--{name} is {value}"):
        t5_args(**{name: value}, **VALID, **RUN)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_grad_norm": 1.0, "clip_grad_value": 0.0},
        {"use_lr_drop": True, "lr_drop_factor": 0.5} | VALID,
        {"fp16": True, "apex_opt_lvl": "O2", "min_loss_scale": 1.0},
        {"optimizer": "Adafactor", "relative_step": True, "warmup_init": True, "lr": None},
        {"optimizer": "transformers.optimization:Adafactor", "scale_parameter": True},
        {"init_checkpoint": "runs/c", "reset_lr": True, "skip_used_data": True, "model_cfg": None},
        # a short run of a schedule with a long warm-up
        {"lr_scheduler": "constant_with_warmup", "num_warmup_steps": 10_000, "iters": 5},
        {"validate_only": True, "lr": None} | VALID,
        {"early_stopping_patience": -1, "max_bad_lines": 0},
        {"save_interval": 10, "save_best": True} | VALID | RUN,
        {"task": "ul2", "denoisers": ("R:3:0.15@2 X:64:.5", "S:0.25"), "mode_tokens": False, "mix_rows": 64},
        {"task": "mlm", "mlm_probability": 0.3},
        {"task": "package.tasks:mine", "data_path": (), "vocab": "v.model", "target_seq_len": 64},
    ],
)
def test_sensible_combinations_pass(changes):
    t5_args(**changes)


def test_trainer_args_stand_alone_with_the_ancestors_defaults():
    args = TrainerArgs()
    assert (args.iters, args.batch_size, args.log_interval, args.seed, args.working_dir) == (100, 10, 10, 42, ".")
    assert (args.lr_drop_factor, args.lr_drop_patience, args.lr_drop_threshold) == (0.1, 10, 1e-4)
    assert (args.lr_drop_threshold_mode, args.lr_drop_cooldown, args.lr_drop_min_lr) == ("rel", 0, 0.0)
    assert (args.optimize_metric, args.optimize_mode, args.early_stopping_patience) == ("loss", "min", -1)
    assert (args.lr_drop_eps, args.gradient_accumulation_steps) == (1e-8, 1)


def test_denoisers_are_read_from_compact_text():
    specs = parse_denoisers(("R:3:0.15@2 X:64:.5", "S:0.25"))
    assert [(s.mode, s.mean_noise_span_length, s.noise_density, float(s.weight)) for s in specs] == [
        ("R", 3.0, 0.15, 2.0), ("X", 64.0, 0.5, 1.0), ("S", None, 0.25, 1.0),
    ]  # fmt: skip
    assert [str(spec) for spec in specs] == ["R:3:0.15", "X:64:0.5", "S:0.25"]


def test_only_objectives_whose_examples_differ_in_length_are_trimmed():
    assert t5_args(task="ul2").trim_to() == 8 and t5_args().trim_to() is None
    assert t5_args(task="prefix_lm", pad_to_multiple_of=None).trim_to() is None
    assert TrainerArgs().trim_to() is None and TrainerArgs(pad_to_multiple_of=64).trim_to() == 64


def test_derived_numbers():
    args = t5_args(batch_size=3, gradient_accumulation_steps=4, iters=50, log_interval=7)
    assert args.rows_per_worker() == 12
    assert args.global_batch_size(5) == 60
    assert args.schedule_steps() == 50
    assert args.effective_valid_interval() == 7
    assert t5_args(lr_scheduler="linear", num_training_steps=80).schedule_steps() == 80
    assert t5_args(valid_interval=9, **VALID).effective_valid_interval() == 9
    assert [t5_args(resume=value).resume_path() for value in ("auto", "never", "runs/a")] == [None, None, "runs/a"]


def test_lengths_in_tokens_need_rows_of_a_fixed_length():
    with pytest.raises(UserError, match="--save_interval 500tok: rows have no fixed number of tokens here"):
        TrainerArgs(model_path="run", save_interval=Tokens(500))
