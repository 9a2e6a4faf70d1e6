"""run_finetuning.py from its flags: continued, evaluated by the best checkpoint; what it refuses, in a sentence."""

import json

import pytest
from safetensors.torch import load_file

from lm_experiments_tools.config.cli import COMMAND_LINE
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.errors import UserError
from run_finetuning import main
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy
from tests.helpers.runs import losses, words

pytest.importorskip("rouge_score")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    for kind in ("encoder-decoder", "encoder", "decoder"):
        save_toy(kind, folder / kind)
    for name, rows in (("train", pairs(40)), ("valid", pairs(9)), ("test", pairs(5))):
        write_json(folder / f"{name}.jsonl", rows)
    lines = [f"w{i % 40} w{i % 7}\t{'good' if i % 2 else 'bad'}" for i in range(40)]
    (folder / "labels.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    (folder / "other.tsv").write_text("sentence\tlabel\nw1 w2\tugly\n")
    write_json(folder / "empty.jsonl", [{"source": "w1", "target": ""}])
    write_json(folder / "nothing.jsonl", [{"question": "w1"}])
    return folder


def start(folder, run, **changed):
    flags = {
        "from_pretrained": folder / "encoder-decoder", "data_path": folder / "train.jsonl",
        "valid_data_path": folder / "valid.jsonl", "model_path": run, "iters": 6, "log_interval": 3, "batch_size": 4,
        "lr": 1e-2, "input_seq_len": 32, "backend": "local", **changed,
    }  # fmt: skip
    flags |= {} if "model_type" in changed else {"target_seq_len": 16}
    main(words(**flags))
    return json.loads((run / "metrics.json").read_text())


def weights(run, which="last"):
    return (run / which / "model.safetensors").read_bytes()


def test_a_continued_run_is_an_uninterrupted_one(folder, tmp_path):
    whole = start(folder, tmp_path / "whole", dropout_rate=0.1)
    start(folder, tmp_path / "parts", dropout_rate=0.1, iters=3)
    parts = start(folder, tmp_path / "parts", dropout_rate=0.1)
    assert parts == whole
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_an_adapter_is_continued_too(folder, tmp_path):
    pytest.importorskip("peft")
    flags = {"peft": "lora", "lora_dropout": 0.1}
    whole = start(folder, tmp_path / "whole", **flags)
    start(folder, tmp_path / "parts", **flags, iters=3)
    assert start(folder, tmp_path / "parts", **flags) == whole
    ours, theirs = (load_file(tmp_path / run / "last" / "adapter_model.safetensors") for run in ("parts", "whole"))
    assert all((ours[name] == value).all() for name, value in theirs.items())
    assert not (tmp_path / "whole" / "last" / "model.safetensors").exists()


def test_the_best_checkpoint_is_evaluated_last(folder, tmp_path):
    """With a learning rate that ruins the model after its best step."""
    run = tmp_path / "run"
    flags = {"iters": 8, "valid_interval": 1, "test_data_path": folder / "test.jsonl"}
    metrics = start(folder, run, **flags, lr=0.3, save_best=True, optimize_metric="loss", metrics=("rouge", "bleu"))
    best = json.loads((run / "best" / "manifest.json").read_text())["step"]
    assert best < 8 and weights(run, "best") != weights(run)
    again = start(
        folder, tmp_path / "again", from_pretrained=run / "best", validate_only=True,
        valid_data_path=folder / "test.jsonl", metrics=("rouge", "bleu"),
    )  # fmt: skip
    assert metrics["test"] == pytest.approx(again["valid"], rel=1e-6)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["split"] for line in lines} == {"train", "valid", "test"}
    assert len((run / "predictions" / "test.jsonl").read_text().splitlines()) == 5


def test_validation_alone_leaves_a_run_as_it_is_and_free_to_go_on(folder, tmp_path):
    """With other settings than the run's, of a step before its last, on validation and test data."""
    run = tmp_path / "run"
    start(folder, run, save_interval=3, valid_interval=3)
    recorded = {path: path.read_bytes() for path in [run / "metrics.jsonl", *(run / "tokenizer").iterdir()]}
    validated = start(
        folder, run, validate_only=True, resume=run / "checkpoints" / "step_000003", batch_size=8, lr=None,
        prefix="other ", test_data_path=folder / "test.jsonl",
    )  # fmt: skip
    assert validated.keys() >= {"valid", "test"}
    assert {path: path.read_bytes() for path in recorded} == recorded
    assert not (run / "metrics.superseded.jsonl").exists()
    start(folder, run, save_interval=3, valid_interval=3, iters=7)
    assert (run / "last").resolve().name == "step_000007"


def test_epochs_are_passes_over_the_data(folder, tmp_path):
    start(folder, tmp_path / "run", iters=None, epochs=1.5, metrics="none")
    assert losses(tmp_path / "run")[-1][0] == 15  # 40 examples, 4 a step


def test_the_command_line_beats_a_file_also_where_names_differ():
    args = FinetuningArgs(data_path=("x",), from_pretrained="x", iters=7, epochs=2.0)
    from_file, default = "run.yaml line 3", "default"
    kept = {
        (COMMAND_LINE, from_file): None, (COMMAND_LINE, default): None, (from_file, default): None,
        (from_file, COMMAND_LINE): 2.0, (default, from_file): 2.0, (default, default): 2.0,
    }  # fmt: skip
    for (iters, epochs), left in kept.items():
        assert args.resolved({"iters": iters, "epochs": epochs}).epochs == left


def test_a_trained_classifier_brings_its_labels(folder, tmp_path):
    flags = {
        "model_type": "encoder", "task": "classification", "from_pretrained": folder / "encoder", "iters": 30,
        "data_path": folder / "labels.tsv", "valid_data_path": folder / "labels.tsv", "log_interval": 30,
        "label_names": ("good", "bad"),
    }  # fmt: skip
    trained = start(folder, tmp_path / "run", **flags)["valid"]
    flags |= {"from_pretrained": tmp_path / "run", "validate_only": True, "label_names": None}
    for name, data in (("without data", None), ("with data", folder / "labels.tsv")):
        again = start(folder, tmp_path / name, **{**flags, "data_path": data})
        assert again["valid"] == pytest.approx(trained, rel=1e-6)


REFUSED = {
    "a file that is not there": ({"data_path": "no.jsonl"}, "no.jsonl"),
    "a LoRA target that matches nothing": ({"peft": "lora", "lora_targets": "nonsense"}, "--lora_targets"),
    "an encoder for text": ({"from_pretrained": "encoder"}, "encoder"),
    "an unknown label": (
        {
            "model_type": "encoder", "task": "classification", "from_pretrained": "encoder", "data_path": "labels.tsv",
            "valid_data_path": "other.tsv",
        },
        "ugly",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_a_sentence(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(folder)
    changed, sentence = REFUSED[name]
    with pytest.raises(UserError) as error:
        start(folder, tmp_path / "run", **changed)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
