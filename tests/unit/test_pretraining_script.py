"""run_t5_pretraining.py and bad input: a sentence each, nothing lost; and a model class from the user's own file."""

import json
import os
import subprocess
import sys

import pytest
import sentencepiece

from lm_experiments_tools.errors import UserError
from run_t5_pretraining import main
from tests.distributed.launch import ROOT, environment

TINY = {
    "base": str(ROOT / "models_configs" / "t5_configs" / "t5-small.json"), "vocab_size": 512, "d_model": 16, "d_kv": 8,
    "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab")
    (folder / "text.txt").write_text("\n".join(f"word{i} number{i * 7 % 101} token{i % 13}" for i in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "vocab"), vocab_size=120, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return folder / "vocab.model"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with text and a small model's configuration, as the current one."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    return tmp_path


def start(vocab, **changed):
    flags = {
        "data_path": "text.jsonl", "vocab": vocab, "model_path": "run", "model_cfg": "tiny.json", "input_seq_len": 32,
        "target_seq_len": 16, "batch_size": 4, "lr": 1e-3, "iters": 2, "log_interval": 1, "data_n_workers": 1,
        "backend": "local", "data_pipeline": "native", **changed,
    }  # fmt: skip
    main([f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items() if value is not None])


def refused(vocab, sentence, **changed):
    with pytest.raises(UserError, match=sentence) as error:
        start(vocab, **changed)
    assert "\n" not in str(error.value)


def test_text_is_tokenized_once_and_trained_on(work, vocab):
    start(vocab)
    assert (work / "run" / "last").resolve().name == "step_000002"
    config = json.loads((work / "run" / "config.json").read_text())
    assert config["lr"] == 1e-3 and {"COMMIT", "ENV", "MACHINE"} <= set(config)
    assert json.loads((work / "run" / "metrics.json").read_text())["train"]["loss"] > 0


def test_a_vocabulary_larger_than_the_embedding(work, vocab):
    (work / "small.json").write_text(json.dumps({**TINY, "vocab_size": 64}))
    refused(vocab, "vocabulary has .* but the model's embedding only 64 rows", model_cfg="small.json")


def test_an_empty_dataset(work, vocab):
    (work / "empty.jsonl").write_text("")
    refused(vocab, "empty.jsonl", data_path="empty.jsonl")


def test_no_such_data(work, vocab):
    refused(vocab, "nowhere", data_path="nowhere/at_all.jsonl")


def test_no_vocabulary(work, vocab):
    refused(None, "--vocab is missing")


def test_targets_that_do_not_fit(work, vocab):
    refused(vocab, "targets", target_seq_len=4)


def test_other_settings_in_the_same_run_directory(work, vocab):
    start(vocab)
    refused(vocab, "holds a run with other settings: .*lr", lr=5e-3)


def test_a_checkpoint_that_is_not_one(work, vocab):
    refused(vocab, "nothing.pth", init_checkpoint="nothing.pth")
    (work / "junk.pth").write_bytes(b"not a checkpoint")
    refused(vocab, "junk.pth", init_checkpoint="junk.pth")


def test_a_checkpoint_of_another_size(work, vocab):
    start(vocab)
    (work / "wide.json").write_text(json.dumps({**TINY, "d_model": 24}))
    refused(vocab, "--allow_partial_checkpoint", model_cfg="wide.json", model_path="run2", init_checkpoint="run/last")


def test_an_unknown_schedule_and_optimizer(work, vocab):
    refused(vocab, "linear", lr_scheduler="liner", num_warmup_steps=1)
    refused(vocab, "AdamW", optimizer="AdmW")


def test_broken_lines_are_put_aside_by_file_and_line(work, vocab, caplog):
    caplog.set_level("INFO")
    good = (work / "text.jsonl").read_text()
    (work / "mixed.jsonl").write_bytes(
        good.encode() + b'{"text": "cut off\n{"text": 7}\n{"text": ""}\n{"text": "\xff\xfe"}\n[1]\n'
    )
    start(vocab, data_path="mixed.jsonl")
    assert "5" in caplog.text and "mixed.jsonl" in caplog.text
    refused(vocab, "mixed.jsonl", data_path="mixed.jsonl", max_bad_lines=3, model_path="run2")


def test_a_model_class_from_the_users_own_file(work, vocab, capsys):
    (work / "my_model.py").write_text(
        "from transformers import T5ForConditionalGeneration\n"
        "class MyT5(T5ForConditionalGeneration):\n"
        "    def forward(self, *args, **kwargs):\n"
        "        print('my own forward')\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    start(vocab, model_cls="my_model:MyT5")
    assert capsys.readouterr().out.count("my own forward") == 2


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(work, vocab, caplog):
    caplog.set_level("INFO")
    start(vocab, iters=3, save_interval=1)
    newest = work / "run" / "checkpoints" / "step_000003" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    caplog.clear()
    start(vocab, iters=4, save_interval=1)
    assert "step_000003" in caplog.text and "model.safetensors" in caplog.text
    assert "resumed from" in caplog.text and "step 2," in caplog.text
    assert (work / "run" / "last").resolve().name == "step_000004"


def test_validate_only_gives_the_checkpoints_loss_and_changes_nothing(work, vocab):
    start(vocab, valid_data_path="text.jsonl", valid_interval=2)
    trained = json.loads((work / "run" / "metrics.json").read_text())["valid"]["loss"]
    before = sorted(p.name for p in (work / "run" / "checkpoints").iterdir())
    os.remove(work / "run" / "metrics.json")
    start(vocab, valid_data_path="text.jsonl", valid_interval=2, validate_only=True)
    assert json.loads((work / "run" / "metrics.json").read_text())["valid"]["loss"] == pytest.approx(trained, rel=1e-6)
    assert sorted(p.name for p in (work / "run" / "checkpoints").iterdir()) == before


def test_the_record_of_a_continued_run_is_whole(work, vocab):
    """--model_path is relative here, as users write it."""
    start(vocab, iters=2)
    start(vocab, iters=4)
    lines = map(json.loads, (work / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert not (work / "run" / "metrics.superseded.jsonl").exists()


def test_a_base_may_be_a_preset_from_any_folder(work, vocab):
    (work / "mine.json").write_text(json.dumps({**TINY, "base": "t5-small.json"}))
    start(vocab, model_cfg="mine.json")


def test_a_refused_start_leaves_no_trace_in_the_run_directory(work, vocab):
    start(vocab)
    refused(vocab, "no such checkpoint", resume="nowhere", lr=5e-3)
    start(vocab)  # the first command still goes on
    assert not (work / "run" / "config.2.json").exists()


def test_the_way_out_that_a_refusal_names_works(work, vocab):
    start(vocab)
    with pytest.raises(UserError) as error:
        start(vocab, lr=5e-3, iters=4)
    way_out = str(error.value).split("--resume ")[1].split()[0]
    start(vocab, lr=5e-3, iters=4, resume=way_out)
    assert (work / "run" / "last").resolve().name == "step_000004"


def test_nothing_left_to_train_is_said(work, vocab):
    start(vocab)
    refused(vocab, "nothing is left to train", init_checkpoint="run/last", model_path="run2")


def test_optimizer_state_of_other_shapes_is_refused(work, vocab):
    start(vocab)
    (work / "wide.json").write_text(json.dumps({**TINY, "d_model": 24}))
    changed = {"model_cfg": "wide.json", "model_path": "run2", "init_checkpoint": "run/last", "iters": 4}
    refused(vocab, "--reset_optimizer", allow_partial_checkpoint=True, **changed)
    start(vocab, allow_partial_checkpoint=True, reset_optimizer=True, **changed)


def test_a_model_without_loss_is_refused(work, vocab):
    refused(vocab, "takes no labels", model_cls="transformers:T5Model")


def test_validating_random_weights_is_refused(work, vocab):
    refused(vocab, "weights would be random", valid_data_path="text.jsonl", validate_only=True)


def test_a_working_directory_that_is_none(work, vocab):
    refused(vocab, "--working_dir", working_dir="nowhere")


def test_generation_on_validation_is_measured(work, vocab):
    start(vocab, valid_data_path="text.jsonl", use_generate_on_valid=True, iters=1)
    value = json.loads((work / "run" / "metrics.json").read_text())["valid"]["generation_accuracy"]
    assert 0.0 <= value <= 1.0


def test_exit_codes_of_the_real_process(work, vocab):
    """One sentence on stderr, code 2, no traceback."""
    command = [sys.executable, str(ROOT / "run_t5_pretraining.py"), "--data_path", "text.jsonl", "--itres", "5"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "--iters" in ended.stderr and "Traceback" not in ended.stderr and ended.stderr.count("\n") == 1
