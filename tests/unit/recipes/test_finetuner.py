"""FineTuner: what run_finetuning.py does, from Python."""

import copy
import json
import signal
import sys

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lm_experiments_tools import FineTuner, UserError
from lm_experiments_tools.errors import RunError
from lm_experiments_tools.models.speed import flushes_denormals
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.distributed.launch import ROOT, forked
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy, t5_config, toy_tokenizer
from tests.helpers.runs import words

LENGTHS = {"input_seq_len": 32, "target_seq_len": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuner")
    save_toy("encoder-decoder", folder / "t5")
    save_toy("encoder", folder / "bert")
    save_toy("decoder", folder / "gpt")
    with_end = toy_tokenizer()
    with_end._tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    with_end.save_pretrained(folder / "gpt")
    (folder / "t5.json").write_text(json.dumps({**t5_config().to_diff_dict(), "model_type": "t5"}))
    write_json(folder / "train.jsonl", pairs(24))
    write_json(folder / "valid.jsonl", pairs(7))
    labelled = [f"w{i % 40} w{i % 7}\t{'good' if i % 2 else 'bad'}" for i in range(40)]
    (folder / "labels.tsv").write_text("\n".join(["sentence\tlabel", *labelled]) + "\n")
    paired = [f"w{i % 40} w{i % 7}\tw{i % 11} w3 w4\t{i % 2}" for i in range(40)]
    (folder / "pairs.tsv").write_text("\n".join(["question1\tquestion2\tis_duplicate", *paired]) + "\n")
    return folder


@pytest.fixture
def sets(folder):
    return {"data_path": folder / "train.jsonl", "valid_data_path": str(folder / "valid.jsonl")}


def by_script(path, **flags):
    job = forked([sys.executable], ROOT / "run_finetuning.py", *words(**flags, model_path=path))
    assert job.returncode == 0, job.output[-3000:]
    return json.loads((path / "metrics.json").read_text())


def test_training_is_that_of_the_script(folder, sets, tmp_path):
    """With test data, and with valid values of the best checkpoint where the rate makes the last one worse."""
    flags = {
        "batch_size": 4, "iters": 4, "lr": 0.3, "valid_interval": 1, "metrics": "exact_match", "save_best": True,
        "test_data_path": folder / "train.jsonl", **LENGTHS,
    }  # fmt: skip
    of_script = by_script(tmp_path / "script", from_pretrained=folder / "t5", **sets, **flags)
    tuner = FineTuner(folder / "t5", **sets, **{**flags, "iters": 1, "save_best": False})
    metrics = tuner.train(iters=4, model_path=str(tmp_path / "run"), save_best=True)
    assert set(metrics) == {"train", "valid", "test"}
    assert metrics == {split: pytest.approx(values, rel=1e-5) for split, values in of_script.items()}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    during = {line["step"]: line["loss"] for line in lines if line["split"] == "valid" and "loss" in line}
    assert metrics["valid"]["loss"] == pytest.approx(min(during.values()), rel=1e-5) and len(during) == 4
    assert tuner.evaluate() == pytest.approx(metrics["valid"], rel=1e-5)
    assert tuner.evaluate("test") == pytest.approx(metrics["test"], rel=1e-5)


def test_generation_is_that_of_transformers(folder, tmp_path):
    tuner = FineTuner(folder / "t5", prefix="w1 ", num_beams=2, **LENGTHS, speed="off")
    tuner.save(tmp_path / "saved")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    texts = ["w5 w6 w7", "w8", "w20 w21"]
    for text, ours in zip(texts, tuner.predict(texts, batch_size=2), strict=True):
        ids = model.generate(**tokenizer(f"w1 {text}", return_tensors="pt"), num_beams=2, max_new_tokens=16)
        assert ours == tokenizer.decode(ids[0], skip_special_tokens=True) == tuner.generate_single(text)
    torch.manual_seed(0)
    drawn = tuner.generate_diverse("w5 w6 w7", num_texts=3)
    assert len(set(drawn)) == 3


def test_an_encoder_predicts_labels_by_name(folder):
    tuner = FineTuner(
        folder / "bert", model_type="encoder", task="classification", data_path=folder / "labels.tsv",
        valid_data_path=str(folder / "labels.tsv"), batch_size=8, iters=120, log_interval=60, lr=3e-3,
        input_seq_len=32,
    )  # fmt: skip
    assert tuner.label_names == ("bad", "good")
    tuner.train()
    assert tuner.evaluate()["accuracy"] > 0.9
    assert tuner.predict(["w1 w1", "w2 w2"]) == ["good", "bad"]
    assert tuner.model.config.id2label == {0: "bad", 1: "good"}


def test_a_refused_train_leaves_the_settings_of_before(folder):
    data = {"data_path": folder / "labels.tsv", "input_seq_len": 32}
    tuner = FineTuner(folder / "bert", model_type="encoder", task="classification", **data)
    answers = tuner.predict(["w3 w4"])
    for wrong in ({"data_path": folder / "labls.tsv"}, {"iters": 1, "epochs": 1.0}, {"valid_data_path": "nowhere"}):
        with pytest.raises(UserError):
            tuner.train(**wrong)
        assert tuner.predict(["w3 w4"]) == answers
    with pytest.raises(UserError, match="no split 'tset'"):
        tuner.evaluate("tset")


def test_the_stop_button_of_a_notebook_ends_training_alone(folder, sets, monkeypatch, caplog):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # as at Python's prompt and in IPython
    tuner = FineTuner(folder / "t5", **sets, test_data_path=folder / "valid.jsonl", lr=1e-3, log_interval=2, **LENGTHS)
    before, log_train = tuner.evaluate()["loss"], TrainingLoop.log_train
    monkeypatch.setattr(TrainingLoop, "log_train", lambda loop: signal.raise_signal(signal.SIGINT))
    assert tuner.train(iters=9) == {} and "stopped after update 2" in caplog.text
    assert tuner.evaluate()["loss"] < before
    monkeypatch.setattr(TrainingLoop, "log_train", log_train)
    assert {*tuner.train(iters=2)} == {"train", "valid", "test"}
    train_step = TrainingLoop.train_step
    stopped = lambda loop, *args: (signal.raise_signal(signal.SIGINT), train_step(loop, *args))[1]  # noqa: E731
    monkeypatch.setattr(TrainingLoop, "train_step", stopped)
    with pytest.raises(RunError, match="stopped before its first update"):
        tuner.train(iters=9)


def test_a_refused_start_leaves_no_folder_and_few_rows_are_warned_of(folder, sets, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMTOOLS_RUNS", raising=False)
    tuner = FineTuner(folder / "t5", **{**sets, "model_path": "auto"}, batch_size=32, iters=1, lr=1e-3, **LENGTHS)
    for wrong in ({"data_path": "nowhere.jsonl"}, {"optimizer": "Nope"}):
        with pytest.raises(UserError, match=r"nowhere|Nope"):
            tuner.train(**wrong)
        assert not (tmp_path / "runs").exists()
    assert "valid" in tuner.train() and "--data_path has 24 rows, fewer than --batch_size 32" in caplog.text
    assert len(list((tmp_path / "runs").iterdir())) == 1


def weights_of(tuner):
    return {name: tensor.clone() for name, tensor in tuner.model.state_dict().items()}


def unchanged(tuner, weights):
    return all(torch.equal(tensor, weights[name]) for name, tensor in tuner.model.state_dict().items())


def test_evaluation_leaves_the_weights_as_they_are(folder, sets, tmp_path):
    """Also where settings name a checkpoint, or files to be written."""
    flags = {**sets, **LENGTHS, "metrics": "exact_match", "batch_size": 8, "lr": 1e-2, "iters": 4}
    saving = {"save_interval": 2, "profile_after": 1, "log_interval": 2, "early_stopping_patience": 9}
    tuner = FineTuner(folder / "t5", **flags, **saving, model_path=str(tmp_path / "run"))
    tuner.evaluate()  # before the folder is there
    metrics = tuner.train()
    resuming = FineTuner(folder / "t5", **flags, resume=str(tmp_path / "run"))
    from_nothing = FineTuner(model_cfg=str(folder / "t5.json"), tokenizer=str(folder / "t5"), **flags)
    for one in (tuner, resuming, from_nothing):
        last = one.train(iters=6)["valid"] if one is not tuner else metrics["valid"]
        weights = weights_of(one)
        assert one.evaluate() == pytest.approx(last, rel=1e-5) and unchanged(one, weights)
        one.model.train()
        one.evaluate()
        assert one.model.training


def test_a_folder_is_trained_in_once(folder, sets, tmp_path, monkeypatch):
    """A second training there would load its checkpoint over the model; a new tuner continues the run."""
    flags = {**sets, **LENGTHS, "metrics": "none", "lr": 1e-2, "iters": 2}
    tuner = FineTuner(folder / "t5", **flags, model_path=str(tmp_path / "a"))
    tuner.train()
    with torch.no_grad():
        tuner.model.shared.weight.zero_()
    weights = weights_of(tuner)
    with pytest.raises(UserError, match=r"has trained in .*/a: choose another model_path"):
        tuner.train(iters=4)
    assert unchanged(tuner, weights)
    tuner.train(iters=1, lr=1e-6, model_path="none")
    assert tuner.args.model_path is None
    monkeypatch.setenv("LMTOOLS_RUNS", str(tmp_path / "b"))
    for number in (1, 2):
        tuner.train(iters=1, lr=1e-6, model_path="auto")
        assert len(list((tmp_path / "b").glob("finetuning-*/last"))) == number
    assert tuner.model.shared.weight.abs().max() < 1e-4
    again = FineTuner(folder / "t5", **{**flags, "iters": 5}, model_path=str(tmp_path / "a"))
    again.train()
    assert "step_000005" in str((tmp_path / "a" / "last").resolve())
    with pytest.raises(UserError, match="--resume never would mix two runs"):
        FineTuner(folder / "t5", **flags, model_path=str(tmp_path / "a"), resume="never").train()


def columns(path):
    """Rows of a table or of JSON lines: what stands before the last field."""
    if path.suffix == ".jsonl":
        return [json.loads(line)["source"] for line in path.read_text().splitlines()]
    rows = [tuple(line.split("\t")[:-1]) for line in path.read_text().splitlines()[1:]]
    return [row[0] if len(row) == 1 else row for row in rows]


SAME_AS_SCRIPT = {
    "encoder": ("bert", "labels.tsv", {"model_type": "encoder", "task": "classification"}),
    "encoder, pairs": ("bert", "pairs.tsv", {"model_type": "encoder", "task": "classification"}),
    "text": ("t5", "train.jsonl", {"prefix": "w9 ", "num_beams": 2}),
    "decoder": ("gpt", "train.jsonl", {"model_type": "decoder", "prefix": "w9 "}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AS_SCRIPT)
def test_predictions_are_those_of_evaluation(folder, tmp_path, name):
    """`predict` on the texts of a file is what validation wrote to predictions/valid.jsonl."""
    model, file, flags = SAME_AS_SCRIPT[name]
    path = folder / file
    settings = {"iters": 1, "lr": 1e-4, "metrics": "accuracy" if "task" in flags else "exact_match", **flags}
    tuner = FineTuner(
        folder / model, **settings, data_path=path, valid_data_path=path, batch_size=8, valid_interval=60,
        input_seq_len=24, model_path=tmp_path / "run", speed="off",
        **({} if model == "bert" else {"target_seq_len": 8}),
    )  # fmt: skip
    tuner.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "predictions" / "valid.jsonl").read_text().splitlines()]
    wanted = [line.get("text", line["prediction"]) for line in lines]
    assert len(set(wanted)) > 1
    assert tuner.predict(columns(path)) == wanted


def test_texts_that_the_task_has_not_are_refused(folder):
    plain = FineTuner(folder / "t5", **LENGTHS)
    classes = FineTuner(folder / "t5", task="classification", label_names=(0, 1), positive_label=0, **LENGTHS)
    assert (classes.args.label_names, classes.args.positive_label) == (("0", "1"), "0")
    named = FineTuner(folder / "t5", task="classification", label_names=("0", "1"), text_fields=("a", "b"), **LENGTHS)
    for tuner, texts, sentence in (
        (plain, ["w1", ("w1", "w2")], "text 1 .* has 2 parts, not 1"),
        (plain, ["w1", " "], "text 1 .* is empty"),
        (classes, ["w1"], "give text_fields"),
        (named, ["w1"], "text 0 .* has 1 parts, not 2"),
    ):
        with pytest.raises(UserError, match=sentence):
            tuner.predict(texts)
    assert plain.predict([]) == []


@pytest.mark.parametrize("speed", ["off", "auto"])
def test_the_settings_of_the_process_are_the_users_again(folder, sets, speed):
    """And while it trains, those of --speed."""
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("medium")
    try:
        tuner = FineTuner(folder / "t5", **sets, **LENGTHS, batch_size=4, iters=1, lr=1e-3, speed=speed)
        assert flushes_denormals() and torch.get_float32_matmul_precision() == "medium"
        torch.set_flush_denormal(False)
        seen = []
        tuner.model.register_forward_pre_hook(lambda *_: seen.append(flushes_denormals()))
        for work in (tuner.train, tuner.evaluate, lambda: tuner.predict("w1 w2")):
            seen.clear()
            work()
            assert set(seen) == {speed == "auto"}
            assert not flushes_denormals() and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_flush_denormal(False)
        torch.set_float32_matmul_precision("highest")


def test_a_tuned_model_can_be_copied_and_pickled(folder, sets, tmp_path):
    tuner = FineTuner(folder / "t5", **sets, **LENGTHS, batch_size=4, iters=1, lr=1e-3)
    tuner.train()
    tuner.evaluate()
    torch.save(tuner.model, tmp_path / "model.pt")
    for other in (copy.deepcopy(tuner.model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert all(torch.equal(a, b) for a, b in zip(tuner.model.parameters(), other.parameters(), strict=True))
