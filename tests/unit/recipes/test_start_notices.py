"""What a start says of a class that it does not train."""

import json

import run_t5_pretraining
from tests.helpers.runs import TINY, tiny_run, words


def test_a_run_says_which_class_it_does_not_train(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    flags = tiny_run(tmp_path, {**TINY, "architectures": ["MyT5"]}, target_seq_len=16, iters=1, save_interval=None)
    run_t5_pretraining.main(words(**flags))
    assert "names the class MyT5, which transformers does not have" in caplog.text
    caplog.clear()
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "architectures": ["T5ForConditionalGeneration"]}))
    run_t5_pretraining.main(words(**flags))
    assert "names the class" not in caplog.text
