"""run_t5_pretraining.py and bad input: a sentence each, nothing lost; and a model class from the user's own file."""

import json
import os
import sys
from pathlib import Path

import pytest

from lm_experiments_tools.data.streaming import stream
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from run_t5_pretraining import main
from tests.helpers import runs
from tests.helpers.runs import BERT, T5_RUN, losses, scored_tokens, words, write_toys
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

OBJECTIVES = {
    "prefix_lm": {"task": "prefix_lm", "target_seq_len": 32},
    "ul2": {"task": "ul2", "target_seq_len": 32, "denoisers": "R:3:0.15 X:3:0.5 S:0.25"},
    "causal_lm": {"task": "causal_lm", "target_seq_len": None},
    "causal_lm of a decoder": {
        "task": "causal_lm", "target_seq_len": None, "model_cls": "transformers:GPT2LMHeadModel",
        "model_cfg": "gpt2.json",
    },
    "mlm": {
        "task": "mlm", "target_seq_len": None, "model_cls": "transformers:BertForMaskedLM", "model_cfg": "bert.json",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return numbered_words_vocabulary(tmp_path_factory.mktemp("vocab"))


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with text and configurations of small models, as the current one."""
    monkeypatch.chdir(tmp_path)
    write_toys(tmp_path)
    return tmp_path


def start(vocab, **changed):
    main(words(**{**T5_RUN, "vocab": vocab, "model_path": "run", **changed}))


def refused(vocab, sentence, **changed):
    runs.refused(start, sentence, vocab, **changed)


@pytest.mark.parametrize("changed", [{}, {"streaming": True}])
def test_the_same_text_and_configuration_under_other_paths_go_on(work, vocab, caplog, changed):
    """A chain of jobs stages its files in a scratch folder of each job."""
    caplog.set_level("INFO")
    for job, name in (("job1", "text.jsonl"), ("job2", "renamed.jsonl"), ("job3", "other.jsonl")):
        (work / job).mkdir()
        (work / job / name).write_bytes((work / "text.jsonl").read_bytes() + b'{"text": "w1 w2"}\n' * (job == "job3"))
        (work / job / "t5.json").write_bytes((work / "tiny.json").read_bytes())
    for steps, path in ((2, "job1/text.jsonl"), (4, work / "job2" / "renamed.jsonl")):
        start(vocab, data_path=path, model_cfg=f"{work / Path(path).parent}/t5.json", iters=steps, **changed)
    assert "resumed from" in caplog.text and (work / "run" / "last").resolve().name == "step_000004"
    refused(
        vocab, "the training data, .* not those of the checkpoint", data_path="job3/other.jsonl", iters=6, **changed
    )


def test_a_model_class_from_the_users_own_file(work, vocab, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    (work / "my_model.py").write_text(
        "from transformers import T5ForConditionalGeneration\n"
        "class MyT5(T5ForConditionalGeneration):\n"
        "    def forward(self, *args, **kwargs):\n"
        "        print('my own forward')\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    start(vocab, model_cls="my_model:MyT5")
    assert capsys.readouterr().out.count("my own forward") == 2


def test_validate_only_gives_the_checkpoints_loss_and_changes_nothing(work, vocab):
    start(vocab, valid_data_path="text.jsonl", valid_interval=2)
    trained = json.loads((work / "run" / "metrics.json").read_text())["valid"]["loss"]
    before = sorted(p.name for p in (work / "run" / "checkpoints").iterdir())
    os.remove(work / "run" / "metrics.json")
    start(vocab, data_path=None, valid_data_path="text.jsonl", valid_interval=2, validate_only=True)
    assert json.loads((work / "run" / "metrics.json").read_text())["valid"]["loss"] == pytest.approx(trained, rel=1e-6)
    assert sorted(p.name for p in (work / "run" / "checkpoints").iterdir()) == before


def test_a_refused_start_leaves_no_trace_in_the_run_directory(work, vocab):
    start(vocab)
    refused(vocab, "no such checkpoint", resume="nowhere", lr=5e-3)
    start(vocab)  # the first command still goes on
    assert not (work / "run" / "config.2.json").exists()


def test_generation_on_validation_is_measured(work, vocab):
    start(vocab, valid_data_path="text.jsonl", use_generate_on_valid=True, iters=1)
    value = json.loads((work / "run" / "metrics.json").read_text())["valid"]["generation_accuracy"]
    assert 0.0 <= value <= 1.0


@pytest.mark.parametrize(
    "objective",
    [
        "ul2",
        "causal_lm of a decoder",
        "mlm",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("prefix_lm", "causal_lm")),
    ],
)
def test_each_objective_learns_and_resumes_exactly(work, vocab, objective):
    flags = {**OBJECTIVES[objective], "lr": 3e-2, "save_interval": 20}
    start(vocab, iters=9, model_path="half", **flags)
    start(vocab, iters=20, model_path="half", **flags)
    start(vocab, iters=20, model_path="whole", **flags)
    found = [loss for _, loss in losses("whole")]
    assert losses("half") == losses("whole") and len(found) == 20
    assert sum(found[-5:]) < 0.85 * sum(found[:5])
    assert not (work / "half" / "metrics.superseded.jsonl").exists()
    weights = [(work / run / "last" / "model.safetensors").read_bytes() for run in ("whole", "half")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("objective", ["ul2", "causal_lm of a decoder"])
def test_the_report_shows_what_the_model_makes_of_held_out_text(work, vocab, objective):
    start(vocab, **OBJECTIVES[objective], iters=1, valid_data_path="text.jsonl", report=True)
    lines = (work / "run" / "report.txt").read_text().splitlines()
    examples = [lines[i + 1 : i + 4] for i, line in enumerate(lines) if line.startswith("held-out example")]
    assert len(examples) == 3
    texts = [json.loads(line)["text"] for line in (work / "text.jsonl").read_text().splitlines()]
    documents = "".join(texts).replace(" ", "")
    for example in examples:
        assert [line[:13].strip() for line in example] == ["input", "target", "prediction"]
        source, target, prediction = (line[13:] for line in example)
        if objective not in ("ul2", "mlm"):  # what follows, not the text over again
            assert (source + target).replace(" ", "") in documents and source not in prediction


def test_several_sources_are_mixed(work, vocab, caplog):
    caplog.set_level("INFO")
    (work / "other.jsonl").write_text((work / "text.jsonl").read_text().replace("token", "number"))
    with pytest.raises(UserError, match=r"--data_weights has \d numbers for \d of --data_path"):
        main(["--data_path", "text.jsonl", "other.jsonl", "--data_weights", "2", "--model_cfg", "tiny.json", "--lr=1"])
    flags = ["--data_path", "text.jsonl", "other.jsonl", "--data_weights", "2", "1", "--task", "ul2", "--iters", "2"]
    flags += ["--input_seq_len", "32", "--target_seq_len", "32", "--batch_size", "4", "--lr", "1e-3", "--model_cfg"]
    main([*flags, "tiny.json", "--vocab", str(vocab), "--backend", "local", "--data_n_workers", "1"])
    assert "proportional mixture of 2" in caplog.text and "weight 2) of ul2" in caplog.text
    assert "all lengths in each 4 rows" in caplog.text


@pytest.mark.parametrize(
    ("task", "ends", "streaming"),
    [("prefix_lm", True, False), ("ul2", True, True), ("", False, True)],
)
def test_documents_end_with_eos_where_borders_are_read_over(work, vocab, task, ends, streaming, monkeypatch):
    chunks, in_memory = [], stream.TokensInMemory
    monkeypatch.setattr(stream, "TokensInMemory", lambda tokens: chunks.append(tokens) or in_memory(tokens))

    def ends_of_documents():
        rows = chunks or [row for path in work.rglob("*.idx") for row in IndexedDataset(str(path)[:-4])]
        return {int(row[-1]) == 1 for row in rows}

    start(vocab, **OBJECTIVES.get(task, {}), iters=1, streaming=streaming, model_path=None)
    assert ends_of_documents() == {ends}
    if ends:
        start(vocab, **OBJECTIVES[task], iters=1, streaming=streaming, append_eos=False, model_path=None)
        assert ends_of_documents() == {True, False}
    else:
        refused(vocab, "--append_eos is not read by --task span_corruption", append_eos=False)


def test_masked_lm_scores_masked_positions_only(work, vocab, monkeypatch):
    scored = scored_tokens(monkeypatch, BERT["vocab_size"])
    masked = {**OBJECTIVES["mlm"], "model_cls": "modeling_bert:BertForMaskedLM"}
    start(vocab, **masked, iters=4)
    assert scored == 4 * [44]  # of 128 tokens 44 is 6 deviations above the mean
    start(vocab, **masked, iters=4, model_path="all", mlm_positions="all")
    assert dict(losses("run")) == pytest.approx(dict(losses("all")), rel=1e-5)


CAUSAL, MASKED = OBJECTIVES["causal_lm of a decoder"], OBJECTIVES["mlm"]
VALID = {"valid_data_path": "text.jsonl"}
REFUSED = [
    ({"data_path": "empty.jsonl"}, "empty.jsonl"),
    ({"data_path": "nowhere/at_all.jsonl"}, "nowhere"),
    ({"vocab": None}, "--vocab is missing"),
    ({"model_cls": "transformers:T5Model"}, "takes no labels"),
    ({**VALID, "validate_only": True}, "weights would be random"),
    ({**CAUSAL, "model_cls": "transformers:BertLMHeadModel", "model_cfg": "bert.json"}, "sees the tokens it is to"),
    ({**CAUSAL, "task": "prefix_lm"}, "prefix_lm is for encoder-decoders, .*GPT2LMHeadModel is of kind decoder"),
    ({**CAUSAL, "input_seq_len": 65}, "--input_seq_len 65 is more than the 64 positions"),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_bad_input_is_one_sentence(work, vocab, flags, sentence):
    (work / "empty.jsonl").write_text("")
    refused(flags.get("vocab", vocab), sentence, **{name: flags[name] for name in flags.keys() - {"vocab"}})


def test_options_reach_optimizer_and_schedule_and_are_part_of_the_run(work, vocab):
    wsd = {"lr_scheduler": "warmup_stable_decay", "num_warmup_steps": 1, "iters": 6}
    chosen = {"lr_scheduler_options": ("num_decay_steps=4", "decay_type=linear"), "save_interval": 3}
    chosen["optimizer_options"] = ("betas=0.5,0.75", "eps=1e-7")
    start(vocab, **wsd, **chosen)
    rates = [line["lr"] for line in map(json.loads, (work / "run/metrics.jsonl").read_text().splitlines())]
    assert rates[:6] == pytest.approx([0, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    optimizer = json.loads((work / "run/checkpoints/step_000003/optimizer.json").read_text())
    assert all(words in json.dumps(optimizer) for words in ("0.75", "1e-07"))
    recorded = json.loads((work / "run/config.json").read_text())
    assert recorded["optimizer_options"] == ["betas=0.5,0.75", "eps=1e-7"]
    refused(vocab, "other settings: optimizer_options", **wsd, **{**chosen, "optimizer_options": "eps=1e-7"})
    refused(vocab, "other settings: lr_scheduler_options", **wsd, **{**chosen, "lr_scheduler_options": None})
    named = {**chosen, "optimizer_options": "betas=0.5,0.9", "resume": "run/checkpoints/step_000003"}
    start(vocab, **wsd, **named)
    optimizer = json.loads((work / "run/checkpoints/step_000006/optimizer.json").read_text())
    assert "0.9" in json.dumps(optimizer) and "0.75" not in json.dumps(optimizer)
    assert "1e-08" in json.dumps(optimizer) and "1e-07" not in json.dumps(optimizer)  # as without the flag
