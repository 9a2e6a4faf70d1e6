"""What weights bring along beside themselves: the kind of model, and of fine-tuned ones the task."""

import json

import pytest

from lm_experiments_tools import FineTuner, UserError
from lm_experiments_tools.checkpoint.source import TASK_FILE
from lm_experiments_tools.models.inherited import inherited_settings
from run_finetuning import main
from tests.helpers.pretrained_toys import save_toy

TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10", "w30 w3 w4 w30 w30 w31"]
TASKS = {
    "classes as text": ("encoder-decoder", {
        "task": "classification", "label_words": ("w5", "w6"), "prefix": "w9 w8 ", "suffix": " w7", "input_seq_len": 9,
        "target_seq_len": 3,
    }),
    "classes": ("encoder", {"model_type": "encoder", "task": "classification", "prefix": "w9 ", "input_seq_len": 7}),
    "text": ("decoder", {"model_type": "decoder", "prefix": "w9 w8 ", "suffix": " w7", "input_seq_len": 12,
                         "target_seq_len": 3}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inherited")
    for kind in ("encoder", "encoder-decoder", "decoder"):
        save_toy(kind, folder / kind)
    rows = [f"w{i % 40} w{i % 7}\t{'good' if i % 2 else 'bad'}" for i in range(24)]
    (folder / "sentences.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    (folder / "texts.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    rows = [f"w{i} w3\tw{i}" for i in range(9, 19)]
    (folder / "targets.tsv").write_text("\n".join(["source\ttarget", *rows]) + "\n")
    return folder


@pytest.mark.parametrize(("name", "peft"), [*((name, None) for name in TASKS), ("text", "lora")])
def test_a_saved_run_knows_its_task(name, peft, folder, tmp_path):
    """In every checkpoint and in what FineTuner saves: the same texts get the same answers, without a setting."""
    kind, flags = TASKS[name]
    data = folder / ("targets.tsv" if kind == "decoder" else "sentences.tsv")
    run = tmp_path / "run"
    tuner = FineTuner(folder / kind, **flags, peft=peft, data_path=data, metrics="none", lr=1e-2, model_path=run)
    tuner.train(iters=2, batch_size=4, save_interval=1)
    answers = tuner.predict(TEXTS)
    tuner.save(tmp_path / "saved")
    places = [*(run / "checkpoints").iterdir(), run, tmp_path / "saved"]
    assert len(places) == 4
    assert all((place / TASK_FILE).is_file() for place in places if place != run)
    for place in (run, tmp_path / "saved"):
        again = FineTuner(place)
        for flag in flags.keys() - {"label_words"}:
            assert getattr(again.args, flag) == flags[flag], flag
        assert again.predict(TEXTS) == answers
        again.save(tmp_path / "copy")
        assert FineTuner(tmp_path / "copy").predict(TEXTS) == answers


def metrics(*words):
    main([*map(str, words), "--validate_only"])
    return json.loads((words[-1] / "metrics.json").read_text())


def test_the_script_measures_a_saved_run_as_it_was_trained(folder, tmp_path):
    """With its words for the labels too; validation data with other names of fields is refused."""
    data, run = folder / "sentences.tsv", tmp_path / "run"
    kind, settings = TASKS["classes as text"]
    here = inherited_settings({"from_pretrained": kind, "working_dir": str(folder)})
    assert here["model_type"][0] == kind and inherited_settings({"from_pretrained": f"./{kind}"}) == {}
    tuner = FineTuner(folder / kind, **settings, data_path=data, valid_data_path=data, model_path=run, lr=1e-2)
    tuner.train(iters=2, batch_size=4)
    flags = ["--from_pretrained", run, "--valid_data_path", data]
    trained = json.loads((run / "metrics.json").read_text())["valid"]
    assert metrics(*flags, "--model_path", tmp_path / "a")["valid"] == pytest.approx(trained, rel=1e-5)
    other = metrics(*flags, "--prefix", "", "--model_path", tmp_path / "b")["valid"]
    assert other["loss"] != pytest.approx(trained["loss"], rel=1e-5)
    with pytest.raises(
        UserError, match=r"texts\.tsv:2: one sentence \(text\), where .*run has one sentence \(sentence\)"
    ):
        metrics(*flags[:2], "--valid_data_path", folder / "texts.tsv", "--model_path", tmp_path / "c")


def test_what_is_given_beats_what_is_saved(folder, tmp_path):
    path = folder / "encoder-decoder"
    FineTuner(path, task="classification", label_names=("w1", "w2"), prefix="w9 ", input_seq_len=9).save(tmp_path)
    assert inherited_settings({"from_pretrained": path}).keys() == {"model_type"}
    args = FineTuner(tmp_path, prefix="", input_seq_len=11).args
    assert (args.task, args.prefix, args.input_seq_len) == ("classification", "", 11)
    args = FineTuner(tmp_path, task="text_to_text").args  # another task has another prompt
    assert (args.prefix, args.input_seq_len) == ("", 512)
    args = FineTuner(tmp_path).args
    assert (args.task, args.prefix, args.input_seq_len) == ("classification", "w9 ", 9)


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", "decoder"])
def test_the_kind_of_model_is_that_of_the_weights(kind, folder):
    assert inherited_settings({"from_pretrained": folder / kind})["model_type"][0] == kind
    assert inherited_settings({"from_pretrained": folder / kind, "model_type": "decoder"}) == {}
    assert inherited_settings({"from_pretrained": "no/such/folder"}) == inherited_settings({}) == {}
    settings = {"task": "classification"} if kind == "encoder" else {"target_seq_len": 16}
    tuner = FineTuner(folder / kind, **settings, data_path=folder / "texts.tsv", input_seq_len=32)
    assert tuner.args.model_type == kind
