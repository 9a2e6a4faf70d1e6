"""Models that FineTuner has saved are used again without training data."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lm_experiments_tools import FineTuner, UserError
from lm_experiments_tools.config.finetuning import FinetuningArgs
from run_finetuning import main
from tests.helpers.pretrained_toys import save_toy

CLASSES = {"model_type": "encoder", "task": "classification", "input_seq_len": 32}
TEXTS = ["w1 w2", "w30 w3 w4", "w7", "w50 w51"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuner_saved")
    for kind in ("encoder", "encoder-decoder"):
        save_toy(kind, folder / kind)
    rows = [f"w{i % 40} w{i % 7}\t{'good' if i % 2 else 'bad'}" for i in range(24)]
    (folder / "labels.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    (folder / "texts.tsv").write_text("\n".join(["sentence", *TEXTS]) + "\n")
    return folder


@pytest.fixture(scope="module", params=[None, "lora"], ids=["whole", "adapter"])
def saved(request, folder, tmp_path_factory):
    """A classifier whose labels are not in the order of the alphabet, and what it says of the texts."""
    path = tmp_path_factory.mktemp("saved")
    data, names = {"data_path": folder / "labels.tsv"}, ("good", "bad")
    tuner = FineTuner(folder / "encoder", **CLASSES, **data, label_names=names, peft=request.param, lr=1e-3)
    tuner.train(iters=2, batch_size=8)
    tuner.save(path)
    return path, tuner.predict(TEXTS)


def test_a_saved_classifier_predicts_and_evaluates_by_itself(folder, saved):
    path, answers = saved
    again = FineTuner(path, **CLASSES)
    assert (again.predict(TEXTS), again.label_names) == (answers, ("good", "bad"))
    values = FineTuner(path, **CLASSES, valid_data_path=folder / "labels.tsv").evaluate()
    if (path / "config.json").is_file():
        model = AutoModelForSequenceClassification.from_pretrained(path).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        rows = [line.split("\t") for line in (folder / "labels.tsv").read_text().splitlines()[1:]]
        with torch.no_grad():
            said = model(**tokenizer([text for text, _ in rows], return_tensors="pt")).logits.argmax(-1).tolist()
        right = sum(model.config.id2label[number] == label for number, (_, label) in zip(said, rows, strict=True))
        assert values["accuracy"] == pytest.approx(right / len(rows))
    again.train(data_path=str(folder / "labels.tsv"), iters=1, batch_size=4)


def test_labels_that_are_nowhere_are_asked_for(folder):
    with pytest.raises(UserError, match="give data_path or label_names"):
        FineTuner(folder / "encoder", **CLASSES)
    writer = FineTuner(folder / "encoder-decoder", task="classification", text_fields=("sentence",), target_seq_len=8)
    assert len(writer.predict(TEXTS)) == 4  # it writes, whatever labels there are
    writer.train(data_path=folder / "labels.tsv", iters=1, batch_size=4, label_words=("w1", "w2"))
    assert writer.label_names == ("bad", "good")


def test_test_data_alone_is_evaluated_or_predicted(folder, saved, tmp_path):
    path, answers = saved
    flags = [f"--{name}={value}" for name, value in CLASSES.items()] + ["--from_pretrained", str(path)]
    for name in ("labels", "texts"):
        data, run = folder / f"{name}.tsv", tmp_path / name
        main([*flags, "--validate_only", "--test_data_path", str(data), "--model_path", str(run)])
        metrics = json.loads((run / "metrics.json").read_text())
        assert metrics.keys() == {"test"}
        assert metrics["test"] == FineTuner(path, **CLASSES, test_data_path=data).evaluate("test")
        tuner = FineTuner(path, **CLASSES, valid_data_path=folder / "labels.tsv")
        if name == "labels":
            assert metrics["test"] == tuner.evaluate()
    lines = [json.loads(line) for line in (run / "predictions" / "test.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == answers
    flags[-1] = str(folder / "encoder")
    with pytest.raises(UserError, match="give --data_path or --label_names"):
        main([*flags, "--validate_only", "--test_data_path", str(folder / "texts.tsv")])


@pytest.mark.parametrize("kind", ["lora", "prompt_tuning", "new_tokens"])
def test_an_adapter_on_added_tokens_loads_again(folder, kind, tmp_path):
    """More of them than the embedding has spare rows for; they are added, and saved, before the adapter."""
    pytest.importorskip("peft")
    lengths = {"input_seq_len": 32, "target_seq_len": 8}
    plain = FineTuner(folder / "encoder-decoder", **lengths)
    assert plain.add_tokens([f"<x{number}>" for number in range(20)]) == 20
    plain.save(tmp_path / "base")
    adapted = FineTuner(tmp_path / "base", peft=kind, **lengths)
    with torch.no_grad():
        for parameter in adapted.model.parameters():
            parameter.add_(0.3 * parameter.requires_grad)
    adapted.save(tmp_path / "adapter")
    again = FineTuner(tmp_path / "adapter", **lengths)
    ids = again.tokenizer("<x3> w1 <x19> <prompt_0>", return_tensors="pt")["input_ids"]
    losses = []
    for tuner in (plain, adapted, again):
        assert torch.equal(tuner.tokenizer("<x3> w1 <x19>", return_tensors="pt")["input_ids"], ids[:, :3])
        losses.append(tuner.model.eval()(input_ids=ids, labels=ids[:, :2]).loss.item())
    assert losses[2] == losses[1] != losses[0]


@pytest.mark.parametrize("few", [{"quantize": "int8"}, {"quantize": "nf4"}])
def test_weights_of_few_bits_answer_and_are_neither_trained_nor_saved(few, tmp_path):
    pytest.importorskip("bitsandbytes")
    save_toy("encoder", tmp_path / "bert")
    rows = [{"text": f"w{n} w{n % 7}", "label": n % 2} for n in range(20)]
    settings = {"model_type": "encoder", "task": "classification", "label_names": ["0", "1"], "input_seq_len": 16}
    FineTuner(tmp_path / "bert", **settings).save(tmp_path / "saved")
    settings |= {"valid_data_path": rows, "data_path": rows, "batch_size": 4, "iters": 1}
    whole, coarse = FineTuner(tmp_path / "saved", **settings), FineTuner(tmp_path / "saved", **settings, **few)
    assert whole.evaluate()["loss"] == pytest.approx(coarse.evaluate()["loss"], abs=0.05)
    assert coarse.summary().all.bytes < 0.75 * whole.summary().all.bytes
    for call in (coarse.train, lambda: coarse.save(tmp_path / "again")):
        with pytest.raises(UserError, match="holds weights of few bits, for evaluate and predict alone"):
            call()
    with pytest.raises(UserError, match="add --peft lora"):
        FinetuningArgs(**{"from_pretrained": "x", "data_path": ("y",), **few}).check_used()
