"""What a start says of data that it does not read, and of a class that it does not train."""

import json
import shutil

import pytest

import run_finetuning
import run_t5_pretraining
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.common import validation_beside
from tests.helpers.pretrained_toys import save_toy
from tests.helpers.runs import TINY, tiny_run, words


@pytest.mark.parametrize(
    ("files", "path", "found"),
    [
        ("train.jsonl val.jsonl", "train.jsonl", "val.jsonl"),
        ("train.bin train.idx valid.bin valid.idx", "train", "valid.bin"),
        ("train.jsonl validation.jsonl.gz", "", "validation.jsonl.gz"),
        ("train.jsonl valuable.jsonl", "train.jsonl", None),
        ("text.jsonl val.jsonl", "text.jsonl", None),
        ("train.jsonl", "absent/train.jsonl", None),
    ],
)
def test_validation_data_beside_the_training_data_is_found(tmp_path, files, path, found):
    for name in files.split():
        (tmp_path / name).write_text("")
    beside = validation_beside(str(tmp_path / path))
    assert (beside and beside.name) == found


def test_a_run_says_what_it_does_not_read_and_which_class_it_does_not_train(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    flags = tiny_run(tmp_path, {**TINY, "architectures": ["MyT5"]}, target_seq_len=16, iters=1, save_interval=None)
    for name in ("train", "val"):
        shutil.copy(tmp_path / "text.jsonl", tmp_path / f"{name}.jsonl")
    run_t5_pretraining.main(words(**{**flags, "data_path": "train.jsonl"}))
    assert "val.jsonl is not read: there is no --valid_data_path" in caplog.text
    assert "names the class MyT5, which transformers does not have" in caplog.text
    caplog.clear()
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "architectures": ["T5ForConditionalGeneration"]}))
    run_t5_pretraining.main(words(**{**flags, "data_path": "train.jsonl", "valid_data_path": "val.jsonl"}))
    assert "is not read" not in caplog.text and "names the class" not in caplog.text


def test_a_table_without_a_header_is_told_of_its_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.tsv").write_text("".join(f"a text {n}\tanswer\n" for n in range(20)))
    save_toy("encoder-decoder", tmp_path / "t5")
    flags = {"from_pretrained": "t5", "data_path": "train.tsv", "lr": 1, "model_path": "none"}
    with pytest.raises(UserError, match=r"there is 'a text 0', 'answer'.*header by --table_columns"):
        run_finetuning.main(words(**flags, max_bad_lines=0))
