"""`--dry_run`: what a run would do, and nothing of it done."""

import json
import re
import subprocess
import sys

import pytest

import run_bert_pretraining
import run_finetuning
import run_t5_pretraining
from lm_experiments_tools.tools import dry_run
from lm_experiments_tools.tools import main as lmtools
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers import ROOT
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy
from tests.helpers.runs import BERT, TINY, refused, tiny_run, tiny_t5_run, words
from tests.helpers.tokenizer_toys import byte_level_tokenizer


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    monkeypatch.setattr(TrainingLoop, "__init__", lambda *args, **options: pytest.fail("a loop was made"))


def printed(main, capsys, **flags):
    with pytest.raises(SystemExit) as end:
        main(words(**flags, dry_run=True))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_pre_training_shows_settings_data_memory_and_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = tiny_t5_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    output = printed(run_t5_pretraining.main, capsys, **flags, iters="1e3", model_path="run")
    assert sorted(tmp_path.rglob("*")) == before  # neither a run directory nor a cache
    assert "  iters: 1000  # command line" in output and "num_warmup_steps:" not in output
    assert "sample 0" in output and "<extra_id_0>" in output
    assert "at the peak" in output and "parameters, " in output
    assert "an update takes about" in output and "; 1,000 take " in output


def test_fine_tuning_shows_an_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_toy("encoder-decoder", tmp_path / "t5")
    write_json(tmp_path / "train.jsonl", pairs(20))
    before = sorted(tmp_path.rglob("*"))
    flags = {"from_pretrained": "t5", "data_path": "train.jsonl", "batch_size": 4, "epochs": 2, "lr": 1e-3}
    output = printed(run_finetuning.main, capsys, **flags, input_seq_len=32, target_seq_len=16)
    assert sorted(tmp_path.rglob("*")) == before
    assert "20 examples = 5.0 steps of 4; --epochs 2 = 10 steps" in output and "sample 0" in output
    assert "an update takes about" in output


@pytest.fixture
def t5(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {**tiny_run(tmp_path, TINY, target_seq_len=16), "save_interval": None, "model_path": "run"}


@pytest.fixture
def bert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {**tiny_run(tmp_path, BERT), "tokenizer": byte_level_tokenizer(tmp_path / "tokenizer.json")}
    for name in ("vocab", "save_interval"):
        del flags[name]
    return {**flags, "packing": "none", "model_cls": "transformers:BertForMaskedLM"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("RANK", "WORLD_SIZE"), pytest.param(("HOROVOD_RANK", "HOROVOD_SIZE"), marks=pytest.mark.slow)]
)
def test_under_a_launcher_rank_0_shows_the_run_of_all_workers(t5, tmp_path, monkeypatch, capsys, names):
    for name, value in zip(names, "02", strict=True):
        monkeypatch.setenv(name, value)
    assert "steps of 8 (micro-batch 4 x accumulation 1 x 2 worker(s))" in printed(
        run_t5_pretraining.main, capsys, **t5
    )
    save_toy("encoder-decoder", tmp_path / "t5")
    write_json(tmp_path / "train.jsonl", pairs(20))
    flags = {"from_pretrained": "t5", "data_path": "train.jsonl", "batch_size": 4, "epochs": 2, "lr": 1e-3}
    assert "20 examples = 2.5 steps of 8" in printed(run_finetuning.main, capsys, **flags)
    monkeypatch.setenv(names[0], "1")
    assert printed(run_t5_pretraining.main, capsys, **t5) == ""


def test_each_phase_and_all_of_them_have_a_length(t5, capsys):
    phases = ("{iters: 30, input_seq_len: 16}", "{iters: 10}")
    output = printed(run_t5_pretraining.main, capsys, **t5, phases=phases)
    assert "phase 1 of 2" in output and "16 inputs, " in output
    assert re.search(r"phase 1: an update .*; 30 take .*\n  phase 2: an update .*; 10 take .*\n  all phases", output)


def test_an_encoder_reads_the_first_documents_and_leaves_nothing(bert, tmp_path, monkeypatch, capsys):
    before = sorted(tmp_path.rglob("*"))
    output = printed(run_bert_pretraining.main, capsys, **bert, valid_fraction=0.2)
    assert "documents  40" in output and re.search(r"validation [1-9]\d? of 40 documents", output)
    monkeypatch.setattr(dry_run, "_DOCUMENTS", 10)
    output = printed(run_bert_pretraining.main, capsys, **bert, valid_fraction=1e-3)
    assert "the first 10 documents" in output and "validation the run holds out 0.001 of all documents" in output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"task": "mlm", "target_seq_len": None}, "--task mlm is for encoders"),
        ({"optimizer_options": "nonsense=1"}, "nonsense"),
        ({"phases": ("{iters: 5}", "{iters: 5, optimizer: Nope}")}, "phase 2.*Nope"),
        ({"trained": "*.nothing.*"}, "nothing"),
    ],
)
def test_settings_that_the_run_refuses_are_refused(t5, changed, sentence):
    refused(lambda: run_t5_pretraining.main(words(**{**t5, **changed}, dry_run=True)), sentence)


def test_a_command_that_trains_nothing_has_no_dry_run(capsys):
    assert lmtools.main(["plan", "pretrain-t5", "--model_cfg", "t5-tiny", "--dry_run"]) == 2
    assert lmtools.main(["vocab", "--input", "t", "--size", "99", "--output", "v.model", "--dry_run"]) == 2
    assert capsys.readouterr().err.count("error: --dry_run is for the training scripts") == 2


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_validation_data_is_opened_and_its_metric_checked(kind, tmp_path, request, capsys):
    flags, main = (
        request.getfixturevalue(kind),
        {"t5": run_t5_pretraining.main, "bert": run_bert_pretraining.main}[kind],
    )
    (tmp_path / "empty.jsonl").write_text("")
    for wrong in ("absent.jsonl", "empty.jsonl"):
        refused(main, wrong, words(**{**flags, "valid_data_path": wrong}, dry_run=True))
    flags["valid_data_path"] = "text.jsonl"
    assert "validation: text.jsonl" in printed(main, capsys, **flags)
    refused(
        main, "--optimize_metric rouge: validation gives loss", words(**flags, optimize_metric="rouge", dry_run=True)
    )


@pytest.mark.slow
def test_the_size_of_a_checkpoint_is_that_on_the_disk(t5, tmp_path, capsys):
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "d_model": 256, "d_ff": 512}))
    flags = {**t5, "iters": 1}
    shown = float(re.search(r"A checkpoint takes (\S+) MiB", printed(run_t5_pretraining.main, capsys, **flags))[1])
    # In another process: here the console of its log would be capsys', which is closed after the test.
    subprocess.run([sys.executable, ROOT / "run_t5_pretraining.py", *words(**flags)], check=True, capture_output=True)
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "last").rglob("*.safetensors"))
    assert shown == pytest.approx(size / 2**20, rel=0.05) and size > 2**22
