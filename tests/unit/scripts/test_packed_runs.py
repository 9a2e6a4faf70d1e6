"""run_finetuning.py --packing learns and measures what it does with padded rows; what it refuses."""

import json

import pytest

from lm_experiments_tools.errors import UserError
from run_finetuning import main
from tests.helpers.finetuning_toys import pairs, read, write_json
from tests.helpers.pretrained_toys import save_toy, toy_tokenizer
from tests.helpers.runs import losses, words

CLASSES = {
    "encoder": "modeling_bert:BertForSequenceClassification",
    "encoder-decoder": "modeling_t5:T5ForConditionalGeneration",
}
LABEL = {"classification": "label", "regression": "score", "multi_label": "labels"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    for kind in ("encoder", "encoder-decoder"):
        save_toy(kind, folder / kind)
    rows = [
        {**row, "label": "w1" if number % 3 else "w2", "score": number % 5 / 4, "labels": "ab"[: number % 3]}
        for number, row in enumerate(pairs(40))
    ]
    write_json(folder / "rows.jsonl", [{**row, "labels": [*row["labels"]]} for row in rows])
    return folder


def settings(folder, kind, task):
    """Flags of the data, and those of the run beside them."""
    data = {"model_type": kind, "task": task, "data_path": (str(folder / "rows.jsonl"),), "input_seq_len": 64}
    data |= {"target_seq_len": 32} if kind == "encoder-decoder" else {}
    run = {
        "from_pretrained": folder / kind, "valid_data_path": folder / "rows.jsonl", "log_interval": 1, "lr": 3e-3,
        "dropout_rate": 0.0, "backend": "local", "iters": 3, "speed": "off", "model_cls": CLASSES[kind],
    }  # fmt: skip
    return data | {"text_fields": ("source",), "label_field": LABEL[task]}, run


@pytest.mark.parametrize(
    "kind, task, changes",
    [
        ("encoder", "classification", {}),
        pytest.param("encoder", "regression", {}, marks=pytest.mark.slow),
        ("encoder", "multi_label", {}),
        pytest.param("encoder", "classification", {"peft": "lora"}, marks=pytest.mark.slow),
        ("encoder-decoder", "classification", {}),
    ],
)
def test_a_packed_run_is_a_padded_one(kind, task, changes, folder, tmp_path):
    """Where a step has all 40 examples: losses, and every metric of the model that comes out."""
    if changes:
        pytest.importorskip("peft")
    data, run = settings(folder, kind, task)
    num_rows = len(read(toy_tokenizer(), **data, packing=True).train.dataset)
    assert num_rows < 20
    ways = {"padded": {"batch_size": 40}, "packed": {"batch_size": num_rows, "packing": True}}
    if task == "multi_label":
        ways["in parts"] = {"batch_size": 1, "packing": True, "gradient_accumulation_steps": num_rows}
    found = {}
    for name, flags in ways.items():
        main(words(**data, **run, **changes, **flags, model_path=tmp_path / name))
        found[name] = json.loads((tmp_path / name / "metrics.json").read_text())["valid"]
        assert len(losses(tmp_path / name)) == 3
        assert dict(losses(tmp_path / name)) == pytest.approx(dict(losses(tmp_path / "padded")), rel=2e-4)
        assert found[name] == pytest.approx(found["padded"], rel=2e-3, abs=2e-5)


@pytest.mark.parametrize(
    "flags, words_of_it",
    [
        ({"model_cls": "transformers:BertForSequenceClassification"}, "--model_cls modeling_bert:BertForSequenceCla"),
        ({"bucket_rows": 4}, "--bucket_rows"),
        ({"peft": "prompt_tuning"}, "--packing and --peft prompt_tuning"),
    ],
)
def test_what_cannot_be_packed_is_refused(flags, words_of_it, folder, tmp_path):
    data, run = settings(folder, "encoder", "classification")
    with pytest.raises(UserError, match=words_of_it):
        main(words(**{**data, **run, **flags}, batch_size=4, packing=True, model_path=tmp_path / "run"))
    assert not list(tmp_path.glob("run/checkpoints/*"))
