"""What a start says of a class that it does not train, and of a table without a header."""

import json

import pytest

import run_finetuning
import run_t5_pretraining
from lm_experiments_tools.errors import UserError
from tests.helpers.pretrained_toys import save_toy
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


def test_a_table_without_a_header_is_told_of_its_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.tsv").write_text("".join(f"a text {n}\tanswer\n" for n in range(20)))
    save_toy("encoder-decoder", tmp_path / "t5")
    flags = {"from_pretrained": "t5", "data_path": "train.tsv", "lr": 1, "model_path": "none"}
    with pytest.raises(UserError, match=r"there is 'a text 0', 'answer'.*header by --table_columns"):
        run_finetuning.main(words(**flags, max_bad_lines=0))
