"""`--dry_run`: what a run would do, and nothing of it done."""

import pytest

import run_bert_pretraining
import run_finetuning
import run_t5_pretraining
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy
from tests.helpers.runs import refused, tiny_t5_run, words


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


def test_what_a_run_would_refuse_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = tiny_t5_run(tmp_path)
    refused(
        lambda **changed: run_t5_pretraining.main(words(**{**flags, **changed}, dry_run=True)),
        "there is neither a token prefix|does not exist|holds no text", data_path="absent.jsonl", vocab=None,
        save_interval=None,
    )  # fmt: skip
    flags = {"data_path": "absent", "vocab_file": "absent.txt", "model_cfg": "bert-micro", "lr": 1}
    refused(lambda: run_bert_pretraining.main(words(**flags, dry_run=True)), "absent")
