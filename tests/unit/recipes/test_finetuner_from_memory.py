"""FineTuner on rows and functions that a program has, several labels for a text, and a table of checkpoints."""

import json

import pytest

from lm_experiments_tools import FineTuner, UserError
from lm_experiments_tools.tools.evaluate import table
from lm_experiments_tools.tools.main import main as lmtools
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy

LENGTHS = {"input_seq_len": 32, "target_seq_len": 16}
KINDS = ("low", "odd", "third")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("from_memory")
    for kind in ("encoder", "encoder-decoder"):
        save_toy(kind, folder / kind)
    return folder


def labelled(number):
    holds = {"low": number < 20, "odd": number % 2 == 1, "third": number % 3 == 0}
    return {"text": f"w{number}", "labels": [name for name in KINDS if holds[name]], "key": f"row {number}"}


def longest_half(predictions, references):
    return sum(len(p) <= len(r[0]) for p, r in zip(predictions, references, strict=True)) / len(predictions)


def test_rows_and_a_function_of_a_program_train_and_are_recorded(folder, tmp_path):
    rows = pairs(8)
    tuner = FineTuner(
        folder / "encoder-decoder", data_path=rows, valid_data_path=(row for row in rows), batch_size=4, iters=1,
        metrics=[longest_half, "exact_match"], **LENGTHS,
    )  # fmt: skip
    metrics = tuner.train(model_path=tmp_path / "run")
    assert {"longest_half", "exact_match", "loss"} == set(metrics["valid"])
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["data_path"] == ["rows given as data_path"]
    assert recorded["metrics"] == [f"{__name__}:longest_half", "exact_match"]
    before = tuner.data
    tuner.train(model_path=None, data_path=[*rows[:7], {"source": "w1", "target": "w2"}])
    assert tuner.data is not before


def test_several_labels_are_trained_measured_and_predicted_by_their_names(folder, tmp_path):
    rows = [labelled(number) for number in range(40)]
    tuner = FineTuner(
        folder / "encoder", model_type="encoder", task="multi_label", data_path=rows, valid_data_path=rows,
        id_field="key", batch_size=8, iters=160, log_interval=80, valid_interval=160, lr=5e-3, input_seq_len=16,
        dropout_rate=0.0,
    )  # fmt: skip
    metrics = tuner.train(model_path=tmp_path / "run")
    assert tuner.label_names == KINDS and metrics["valid"]["subset_accuracy"] > 0.9 < metrics["valid"]["f1_micro"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "predictions" / "valid.jsonl").read_text().splitlines()]
    assert lines[9]["id"] == "row 9" and lines[9]["references"] == [["low", "odd", "third"]]
    right = [line["references"] == [line["prediction"]] for line in lines]
    assert sum(right) / len(right) == pytest.approx(metrics["valid"]["subset_accuracy"])
    again = FineTuner(tmp_path / "run")
    assert again.args.task == "multi_label" and again.model.config.problem_type == "multi_label_classification"
    assert again.predict(["w9", "w20"]) == [lines[9]["prediction"], lines[20]["prediction"]]
    everything = FineTuner(tmp_path / "run", thresholds=[1e-6, 1e-6, 1 - 1e-6])
    assert everything.predict("w22") == [["low", "odd"]]
    with pytest.raises(UserError, match="--thresholds has 2 values, and there are 3 labels"):
        FineTuner(tmp_path / "run", thresholds=[0.1, 0.2]).predict("w1")
    with pytest.raises(UserError, match="each is a probability between 0 and 1"):
        FineTuner(tmp_path / "run", thresholds=2.0)


def test_checkpoints_are_evaluated_into_one_table(folder, tmp_path, capsys):
    path, out = write_json(tmp_path / "v.jsonl", pairs(5)), tmp_path / "table.jsonl"
    names = [str(folder / "encoder-decoder"), str(tmp_path / "other")]
    FineTuner(folder / "encoder-decoder", prefix="w1 ", **LENGTHS).save(names[1])
    flags = ["--valid_data_path", path, "--metrics", "exact_match", "--target_seq_len", "16", "--output", str(out)]
    assert lmtools(["evaluate", "--checkpoints", *names, *flags]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["checkpoint"] for row in rows] == names and rows[0]["loss"] != rows[1]["loss"]
    assert capsys.readouterr().out.splitlines()[-3:] == table(rows)
    assert lmtools(["evaluate", "--checkpoints", *names, *flags[:-2], "--prefix", "w1 "]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].split()[1:] == last[1].split()[1:] == table(rows)[2].split()[1:]  # the prefix that is given
    assert lmtools(["evaluate", "--checkpoints", "no/such/run", *flags]) == 2
    assert "error: --checkpoints no/such/run: there is no such file" in capsys.readouterr().err
    (tmp_path / "other" / "model.safetensors").write_bytes(b"cut")
    assert lmtools(["evaluate", "--checkpoints", *names, *flags[:-2]]) == 2
    shown = capsys.readouterr()  # with the table of what was measured before
    assert "other: its weights cannot be read" in shown.err and shown.out.splitlines()[-1].startswith(names[0])
