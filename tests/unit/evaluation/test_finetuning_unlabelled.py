"""Test data without labels or targets: it is predicted as if it had them, and only what needs none is measured."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import T5ForConditionalGeneration

from lm_experiments_tools import FineTuner, UserError
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.recipes.finetuning import finetuning_loop
from lm_experiments_tools.recipes.finetuning_data import finetuning_data
from lm_experiments_tools.training.losses import LANGUAGE_MODEL_LOSS, bert_loss
from lm_experiments_tools.training.metrics import MetricSums
from run_finetuning import main
from tests.helpers.finetuning_toys import lone_backend, pairs, write_json
from tests.helpers.pretrained_toys import save_toy, t5_config, toy_tokenizer

LENGTHS = {"encoder": {"input_seq_len": 32}}
LENGTHS |= {key: {"input_seq_len": 32, "target_seq_len": 8} for key in ("encoder-decoder", "decoder")}
PREDICTED = "it is predicted, and only what needs none is measured"
SENTENCES = [f"w{number} w{number * 3 % 40} w{number % 7}" for number in range(11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and labelled sets to train on and validate by."""
    folder = tmp_path_factory.mktemp("unlabelled")
    save_toy("encoder", folder / "encoder")
    save_toy("decoder", folder / "decoder")
    torch.manual_seed(0)
    talkative = T5ForConditionalGeneration(t5_config(initializer_factor=4.0))
    save_toy("encoder-decoder", folder / "encoder-decoder", talkative)
    write_json(folder / "text.jsonl", pairs(8))
    rows = [(s, "bad good".split()[n % 2], n / 2) for n, s in enumerate(SENTENCES)]
    for name, column in (("classes", 1), ("numbers", 2)):
        lines = ["sentence\tlabel", *(f"{row[0]}\t{row[column]}" for row in rows)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def settings(folder, kind, data, **changed):
    sets = dict.fromkeys(("data_path", "valid_data_path"), folder / data)
    return {"model_type": kind, "from_pretrained": folder / kind, **sets, "batch_size": 4, **LENGTHS[kind], **changed}


def evaluated(tuner, run, test_data_path):
    """Metrics of the test data of a FineTuner; predictions go to `run`."""
    args = replace(tuner.args, test_data_path=str(test_data_path), model_path=str(run), validate_only=True).resolved()
    data = finetuning_data(args, LocalBackend(), tuner.tokenizer)
    loop = finetuning_loop(args, LocalBackend(), tuner.model, None, data, tuner.tokenizer)
    return loop.validate(data.splits["test"].loader, "test")


def start(folder, run, kind, data, **changed):
    """A run of the script, and its metrics."""
    flags = settings(folder, kind, data, model_path=run, log_interval=1, lr=1e-2, backend="local", **changed)
    words = [[f"--{name}", *(value if isinstance(value, tuple) else (value,))] for name, value in flags.items()]
    main([str(word) for some in words for word in some if word is not True])
    return json.loads((run / "metrics.json").read_text())


def predictions(run, split="test"):
    return [json.loads(line) for line in (run / "predictions" / f"{split}.jsonl").read_text().splitlines()]


def jsonl(**fields):
    return "".join(
        json.dumps({"source": s, **{name: value[n] if isinstance(value, list) else value
                                    for name, value in fields.items()}}) + "\n"
        for n, s in enumerate(SENTENCES)
    )  # fmt: skip


def table(header, cells=None):
    """A .tsv of the sentences, with other cells after them where there are some."""
    rows = [[s, *([cells[n]] if cells else [])] for n, s in enumerate(SENTENCES)]
    return "\n".join(["\t".join(header.split()), *("\t".join(row) for row in rows)]) + "\n"


TARGETS = [f"w{number} w{number + 1}" for number in range(11)]
CLASSES, NUMBERS = [("bad", "good")[n % 2] for n in range(11)], [str(n / 4) for n in range(11)]
REGRESSION = {"task": "regression", "metrics": ("mse",)}
CLASSIFICATION = {"task": "classification", "metrics": ("accuracy",)}
WORDED = {**CLASSIFICATION, "label_words": ("w1", "w2")}
RUNS = {  # kind of model, training data, flags, and the name and content of test data with and without labels
    "null": ("encoder-decoder", "text.jsonl", {"num_beams": 2}, "jsonl", jsonl(target=TARGETS), jsonl(target=None)),
    "decoder": ("decoder", "text.jsonl", {"bf16": True, "speed": "off"}, "jsonl",
                jsonl(targets=[[t] for t in TARGETS]), jsonl(targets=[[]] * 11)),
    "encoder, -1": ("encoder", "classes.tsv", CLASSIFICATION, "tsv", table("sentence label", CLASSES),
                    table("sentence label", ["-1"] * 11)),
    "encoder, numbers": ("encoder", "numbers.tsv", REGRESSION, "tsv", table("sentence label", NUMBERS),
                         table("sentence label", ["-1.0"] * 11)),
    "text, classes": ("encoder-decoder", "classes.tsv", WORDED, "tsv", table("sentence label", CLASSES),
                      table("sentence label", ["-1"] * 11)),
    "text, numbers": ("encoder-decoder", "numbers.tsv", REGRESSION, "tsv", table("sentence label", NUMBERS),
                      table("sentence")),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_predictions_are_those_of_the_same_data_with_labels(folder, tmp_path, name, caplog):
    kind, data, flags, suffix, labelled, unlabelled = RUNS[name]
    (tmp_path / f"labelled.{suffix}").write_text(labelled)
    (tmp_path / f"test.{suffix}").write_text(unlabelled)
    flags = {"metrics": ("exact_match", "gen_len"), "show_valid_examples": 1, **flags}
    tuner = FineTuner(**settings(folder, kind, data, **flags))
    expected = evaluated(tuner, tmp_path / "a", tmp_path / f"labelled.{suffix}")
    assert PREDICTED not in caplog.text and math.isfinite(expected["loss"])
    metrics = evaluated(tuner, tmp_path / "b", tmp_path / f"test.{suffix}")
    assert caplog.text.count(PREDICTED) == 1
    assert metrics == {name: expected[name] for name in ("gen_len", "unknown_answers") if name in expected}
    lines = predictions(tmp_path / "a")
    assert len(lines) == 11 and all(line["references"] for line in lines)
    assert len({str(line.get("text", line["prediction"])) for line in lines}) > 1
    assert predictions(tmp_path / "b") == [line | {"references": []} for line in lines]


def test_a_run_with_unlabelled_test_data_trains_ends_and_is_read_again(folder, tmp_path, caplog):
    (tmp_path / "test.tsv").write_text(table("sentence"))
    run = tmp_path / "run"
    flags = {**CLASSIFICATION, "iters": 3, "valid_interval": 1, "save_best": True, "optimize_metric": "accuracy"}
    flags |= {"early_stopping_patience": 2, "test_data_path": tmp_path / "test.tsv"}
    metrics = start(folder, run, "encoder", "classes.tsv", **flags)
    assert metrics["test"] == {} and set(metrics) == {"train", "valid", "test"}
    assert [line["references"] for line in predictions(run)] == [[]] * 11
    assert start(folder, run, "encoder", "classes.tsv", **flags) == metrics
    flags = {**CLASSIFICATION, "from_pretrained": run, "test_data_path": tmp_path / "test.tsv"}
    again = start(folder, tmp_path / "again", "encoder", "classes.tsv", **flags, validate_only=True)
    assert again["test"] == {} and predictions(tmp_path / "again") == predictions(run)


GLUE = {  # the columns of train.tsv, those of test.tsv as GLUE hands it out, and where the sentences stand
    "SST-2": ("sentence label", "index sentence", ["sentence"]),
    "CoLA": (None, "index sentence", ["sentence"]),
    "MRPC": ("Quality,#1 ID,#2 ID,#1 String,#2 String", "index,#1 ID,#2 ID,#1 String,#2 String",
             ["#1 String", "#2 String"]),
    "QQP": ("id qid1 qid2 question1 question2 is_duplicate", "id question1 question2", ["question1", "question2"]),
    "QNLI": ("index question sentence label", "index question sentence", ["question", "sentence"]),
    "RTE": ("index sentence1 sentence2 label", "index sentence1 sentence2", ["sentence1", "sentence2"]),
    "MNLI": ("index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
             "sentence2_parse sentence1 sentence2 label1 gold_label",
             "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
             "sentence2_parse sentence1 sentence2", ["sentence1", "sentence2"]),
    "STS-B": ("index genre filename year old_index source1 source2 sentence1 sentence2 score",
              "index genre filename year old_index source1 source2 sentence1 sentence2", ["sentence1", "sentence2"]),
}  # fmt: skip
LABEL_COLUMNS = ("label", "gold_label", "Quality", "is_duplicate", "score")


@pytest.mark.parametrize(
    ("kind", "name"), [*(("encoder", n) for n in GLUE), *(("encoder-decoder", n) for n in ("MRPC", "MNLI", "STS-B"))]
)
def test_a_folder_of_glue_is_read_as_it_is_handed_out(name, kind, tmp_path, caplog):
    train, test, places = GLUE[name]

    def lines(header, rows):
        names = header.split("," if "," in header else " ")
        texts = [[str(row) if n in ("index", "id") else str(row % 2) if n in LABEL_COLUMNS else f"w{row} w{i}"
                  for i, n in enumerate(names)] for row in range(rows)]  # fmt: skip
        return "\n".join(map("\t".join, [names, *texts])) + "\n"

    for split in ("train", "dev"):
        cola = "".join(f"gj04\t{n % 2}\t\tw{n} w1\n" for n in range(4))
        (tmp_path / f"{split}.tsv").write_text(lines(train, 4) if train else cola)
    file = tmp_path / ("test_matched.tsv" if name == "MNLI" else "test.tsv")
    file.write_text(lines(test, 3))
    task = {"task": "regression" if name == "STS-B" else "classification", "optimize_metric": "loss"}
    if kind == "encoder-decoder" and name != "STS-B":
        task["label_words"] = ("w1", "w2")
    if train is None:
        task["table_columns"] = ("source", "label", "mark", "sentence")
    where = dict.fromkeys(("valid_data_path", "test_data_path"), str(tmp_path)) | {"data_path": (str(tmp_path),)}
    args = FinetuningArgs(model_cfg="no.json", model_type=kind, **where, **task, **LENGTHS[kind])
    tokenizer = toy_tokenizer()
    split = finetuning_data(args, lone_backend(), tokenizer).splits["test"]
    assert f"no row of the test data {file} has a label" in caplog.text and caplog.text.count(PREDICTED) == 1
    (batch,) = split.loader
    names = test.split("," if "," in test else " ")
    for place, row in enumerate(batch["example"].tolist()):
        texts = [f"w{row} w{names.index(n)}" for n in places]
        keys = {"MRPC": ["sentence1", "sentence2"]}.get(name, places)
        joined = [" ".join(f"{k}: {t}" for k, t in sorted(zip(keys, texts, strict=True)))]  # by name, as T5
        expected = tokenizer(*(texts if kind == "encoder" else joined))["input_ids"]
        found = batch["input_ids"][place][batch["attention_mask"][place] > 0].tolist()
        assert found[: len(expected)] == expected
    assert (batch["labels"] == -100).all()
    assert [(e.label, e.targets) for e in split.examples] == [(None, ())] * 3


TEXT = {"data_path": '{"source": "w1", "target": "w2"}'}
LABEL = {"data_path": '{"text": "w1", "label": 1}\n{"text": "w1", "label": 0}', "model_type": "encoder"}
CLASS, NUMBER = {**LABEL, "task": "classification"}, {**LABEL, "task": "regression"}


def split_of(tmp_path, split, text, data_path, **flags):
    """Data whose `split` holds this text."""
    (tmp_path / "train.jsonl").write_text(data_path + "\n")
    (tmp_path / "other.jsonl").write_text(text + "\n")
    paths = {"data_path": (str(tmp_path / "train.jsonl"),), f"{split}_data_path": str(tmp_path / "other.jsonl")}
    if split == "train":
        paths = {"data_path": (str(tmp_path / "other.jsonl"),)}
    args = FinetuningArgs(model_cfg="no.json", optimize_metric="loss", **paths, **flags)
    return finetuning_data(args, lone_backend(), toy_tokenizer())


@pytest.mark.parametrize(
    ("flags", "text", "reason"),
    [
        (TEXT, '{"source": "w3"}', "no field t, target, targets, output, summary (there is 'source')"),
        (TEXT, '{"source": "w3", "target": null}', "'target' is null, no target"),
        (TEXT, '{"source": "w3", "targets": []}', "'targets' is an empty list of references"),
        (CLASS, '{"text": "w3"}', "no field label, gold_label, score, is_duplicate, Quality"),
        (CLASS, '{"text": "w3", "label": null}', "no label (None): leave out the row"),
        (CLASS, '{"text": "w3", "label": -1}', "no label (-1): leave out the row"),
        (CLASS, '{"text": "w3", "label": NaN}', "no label (nan): leave out the row"),
        (CLASS, '{"text": "w3", "label": "NaN"}', "no label ('NaN'): leave out the row"),
        (NUMBER, '{"text": "w3", "label": null}', "no label (None): leave out the row"),
    ],
)
def test_labels_are_missing_in_test_data_as_a_whole_or_not_at_all(flags, text, reason, tmp_path):
    labelled = flags["data_path"].splitlines()[0]
    refused = [("train", [text]), ("valid", [text]), ("test", [text, labelled]), ("test", [labelled, text])]
    for split, lines in refused:
        with pytest.raises(UserError) as error:
            split_of(tmp_path, split, "\n".join(lines), **flags)
        assert f"other.jsonl:{lines.index(text) + 1}: {reason}" in str(error.value)
    examples = split_of(tmp_path, "test", f"{text}\n{text}", **flags).splits["test"].examples
    assert [(e.label, e.targets) for e in examples] == [(None, ())] * 2


def test_a_mean_over_no_label_is_absent_from_the_metrics():
    sums = MetricSums()
    sums.add({"loss": torch.tensor(math.nan)}, 0)
    sums.add({"other": (torch.tensor(3.0), 2)}, 0)
    values = sums.reduce(LocalBackend())
    assert values == {"other": 1.5}
    assert LANGUAGE_MODEL_LOSS.with_total(values) == values
    assert bert_loss(True).with_total({"loss_mlm": 2.0}) == {"loss_mlm": 2.0}
    sums.add({"loss": torch.tensor(2.0)}, 3)
    assert LANGUAGE_MODEL_LOSS.with_total(sums.reduce(LocalBackend()))["perplexity"] == pytest.approx(math.exp(2.0))
