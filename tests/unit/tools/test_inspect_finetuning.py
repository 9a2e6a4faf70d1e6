"""lmtools inspect finetune: what a fine-tuning run reads, from its own flags."""

import pytest

from lm_experiments_tools.tools.main import main as lmtools
from tests.helpers.finetuning_toys import pairs, word_tokenizer, write_json


@pytest.fixture
def look(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word_tokenizer().save_pretrained("tokenizer")

    def printed(*flags):
        caplog.set_level("INFO")
        code = lmtools(["inspect", "finetune", "--tokenizer", "tokenizer", *flags])
        out = capsys.readouterr()
        return code, out.out + caplog.text + out.err

    return printed


def test_labels_lengths_and_examples_of_a_classification_are_shown(look, tmp_path):
    rows = [{"text": "w1 zzz w2" if n % 4 else "w3", "label": ["pos", "Pos", "neg"][n % 3]} for n in range(12)]
    write_json(tmp_path / "a.jsonl", rows)
    (tmp_path / "run.yaml").write_text(
        "model_type: encoder\ntask: classification\ndata_path: a.jsonl\nbatch_size: 4\n"
    )
    code, text = look("--config", "run.yaml", "--valid_data_path", "a.jsonl", "--input_seq_len", "3", "--samples", "1")
    assert code == 0
    assert "3 labels: Pos 4 (33.3%), neg 4 (33.3%), pos 4 (33.3%)" in text
    assert "9 of 12 sources (75.0%) are longer than --input_seq_len 3" in text and "are unknown tokens" in text
    assert "an epoch   12 examples = 3.0 steps of 4; --epochs 3 = 9 steps" in text
    assert "tokens at 50 / 90 / 99 / 100 %: sources 3 / 3 / 3 / 3" in text
    assert "    w1 <unk> </s>\n  label    2 = pos\n" in text  # of validation, the longest first
    assert not (tmp_path / "runs").exists() and text.count("sample 0") == 2


def test_a_packed_row_is_shown_with_its_examples(look, tmp_path):
    write_json(tmp_path / "a.jsonl", pairs(6))
    code, text = look(
        "--data_path", "a.jsonl", "--packing", "--input_seq_len", "64", "--target_seq_len", "32", "--samples", "2"
    )
    assert code == 0 and "segment_ids: 1 x " in text and "decoder_segment_ids: 1 x " in text
    sides = [" ".join(line.split()) for line in text.splitlines() if line.startswith("    w")]
    shown = [part.strip() for line in sides for part in line.partition(" <pad>")[0].partition(" (ig")[0].split("</s>")]
    assert {row[side] for row in pairs(6) for side in row} >= {*shown} - {""} and len(shown) > 6
    code, text = look("--input_seq_len", "64")
    assert code == 2 and "there is nothing to inspect: give --data_path" in text
