"""Every flag of run_finetuning.py does what it says or is refused: kind of model by kind of task."""

import json
from dataclasses import fields

import pytest

from lm_experiments_tools.config.finetuning import TASKS_OF, FinetuningArgs
from lm_experiments_tools.config.training import ExperimentArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.pretrained import loading_options

# Of the flags that only some tasks read, a value that is not the default.
VALUES = {
    "source_id": "q", "target_id": "a", "prefix": "p: ", "suffix": " A:", "text_fields": ("q",), "label_field": "l",
    "label_names": ("a", "b"), "label_words": ("a", "b"), "target_seq_len": 77, "bucket_rows": 4, "packing": True,
    "sni_split": "xlingual", "add_task_name": True, "add_task_definition": False, "num_pos_examples": 1,
    "num_neg_examples": 1, "add_explanation": True, "tk_instruct": True, "max_instances_per_task": 5,
    "max_instances_per_eval_task": 5, "show_valid_examples": 3, "num_beams": 2, "do_sample": True,
    "no_repeat_ngram_size": 2, "repetition_penalty": 1.5, "min_new_tokens": 2, "max_new_tokens": 9,
    "use_generate_on_valid": True, "id_field": "k", "table_columns": ("a", "b"),
    "thresholds": (0.3,), "positive_label": "b",
}  # fmt: skip
INSTRUCTIONS = {name for name in VALUES if "add_" in name or "num_" in name or "instances" in name} - {"num_beams"} | {
    "sni_split", "tk_instruct",
}  # fmt: skip
GENERATION = {
    "num_beams", "do_sample", "no_repeat_ngram_size", "repetition_penalty", "min_new_tokens", "max_new_tokens",
    "use_generate_on_valid",
}  # fmt: skip
ROWS = {"target_seq_len", "bucket_rows", "packing", "show_valid_examples"}
LABELS = {"prefix", "text_fields", "label_field", "id_field", "table_columns"} | ROWS - {"target_seq_len"}
WORDS = GENERATION | LABELS | {"suffix", "target_seq_len"}
TEXT = GENERATION | ROWS | {"source_id", "target_id", "id_field", "table_columns", "prefix", "suffix"}
READ = {
    ("encoder", "classification"): LABELS | {"label_names", "positive_label"},
    ("encoder", "multi_label"): LABELS | {"label_names", "thresholds"},
    ("encoder", "regression"): LABELS,
    ("encoder-decoder", "text_to_text"): TEXT,
    ("encoder-decoder", "classification"): WORDS | {"label_names", "label_words", "positive_label"},
    ("encoder-decoder", "regression"): WORDS,
    ("encoder-decoder", "instructions"): GENERATION | INSTRUCTIONS | ROWS,
    ("decoder", "causal_lm"): set(),
    ("decoder", "text_to_text"): TEXT,
    ("decoder", "instructions"): GENERATION | INSTRUCTIONS | ROWS,
}
# what training of any kind reads, or what other tests are about
EVERYWHERE = """model_type task data_path valid_data_path test_data_path max_bad_lines max_train_samples valid_samples
    test_samples input_seq_len from_pretrained tokenizer freeze quantize device_map embeddings_on_cpu
    metrics epochs""".split()
BESIDE_ANOTHER = """peft lora_r lora_alpha lora_dropout lora_targets num_virtual_tokens prompt_init_text
    temperature top_k top_p length_penalty bleu_tokenize""".split()
DATA = {"data_path": ("x",), "valid_data_path": "y"}


def make(**settings):
    args = FinetuningArgs(**{"from_pretrained": "m", **DATA, **settings})
    args.check_used()
    return args


def test_every_flag_of_fine_tuning_is_looked_at_here():
    of_every_script = {field.name for field in fields(ExperimentArgs)}
    looked_at = {*VALUES, *EVERYWHERE, *BESIDE_ANOTHER}
    assert {field.name for field in fields(FinetuningArgs)} - of_every_script - looked_at == set()


@pytest.mark.parametrize(("model_type", "task"), [(kind, task) for kind in TASKS_OF for task in TASKS_OF[kind]])
def test_a_flag_that_a_task_does_not_read_is_refused(model_type, task):
    read = set()
    for name, value in VALUES.items():
        try:
            make(model_type=model_type, task=task, **{name: value})
            read.add(name)
        except UserError as error:
            assert f"--{name}" in str(error)
    assert read == READ[model_type, task]


@pytest.mark.parametrize("flag", ["lora_r", "num_virtual_tokens", "prompt_init_text"])
def test_a_flag_of_another_adapter_is_refused(flag):
    kinds = {"lora_r": {"lora"}, "num_virtual_tokens": {"prompt_tuning", "prefix_tuning", "new_tokens"}}.get(
        flag, {"prompt_tuning"}
    )
    value = "words" if flag == "prompt_init_text" else 5
    for kind in (None, "lora", "prompt_tuning", "prefix_tuning", "new_tokens"):
        if kind in kinds:
            make(peft=kind, **{flag: value})
        else:
            with pytest.raises(UserError, match=f"^--{flag} needs --peft "):
                make(peft=kind, **{flag: value})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"min_new_tokens": 12, "max_new_tokens": 3}, "--min_new_tokens 12 .*--max_new_tokens"),
        ({"task": "instructions", "num_pos_examples": 0, "add_explanation": True}, "--add_explanation .*--num_neg"),
        ({"metrics": ("chrf",), "bleu_tokenize": "zh"}, "--bleu_tokenize .*--metrics bleu"),
        ({"metrics": ("none",), "show_valid_examples": 2}, "--show_valid_examples"),
        ({"valid_data_path": None, "metrics": ("bleu",)}, "--metrics .*--valid_data_path"),
        ({"valid_data_path": None, "test_data_path": "z", "optimize_metric": "rougeL"}, "--optimize_metric .*--valid"),
        (
            {"task": "instructions", "valid_data_path": None, "tk_instruct": True, "num_pos_examples": 1},
            "--num_pos_examples .*--tk_instruct",
        ),
    ],
)
def test_what_other_flags_leave_without_effect_is_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 1e-4),
        ({"optimizer": "torch.optim:AdamW", "model_type": "decoder"}, 2e-5),
        ({"optimizer": "Adam", "peft": "lora"}, 1e-3),
        ({"optimizer": "AdamWScale"}, 1e-2),
        ({"optimizer": "Adafactor"}, 1e-3),
        ({"optimizer": "SGD", "lr": 0.1}, 0.1),
        ({"optimizer": "Adafactor", "relative_step": True}, None),
    ],
)
def test_the_default_rate_is_of_the_optimizer(settings, rate):
    assert make(**settings).resolved().lr == rate


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "SGD"}, {"optimizer": "my:AdamW"}, {"optimizer": "Adafactor", "peft": "lora"},
     {"optimizer": "AdamWScale", "model_type": "decoder"}],
)  # fmt: skip
def test_a_rate_that_nobody_knows_is_asked_for(settings):
    kind = settings.get("peft") or settings.get("model_type") or "encoder-decoder"
    with pytest.raises(UserError, match=f"--lr is missing: --optimizer {settings['optimizer']} .*{kind}"):
        make(**settings)
    make(**settings, validate_only=True)


def test_a_map_of_devices_places_every_weight(tmp_path):
    path = tmp_path / "map.json"
    placed = {"shared": "cpu", "encoder": "cpu", "decoder": "cpu", "lm_head": "cpu"}
    path.write_text(json.dumps(placed))
    options = loading_options(make(device_map=str(path)))
    assert options == {"device_map": placed}
