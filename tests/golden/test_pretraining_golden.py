"""The script's real main(), in this process, on a tiny model: typed losses, the same for every split of the batch."""

import json
import os

import numpy as np
import pytest

from run_t5_pretraining import main
from tests.distributed.launch import ROOT
from tests.helpers.token_toys import write_tokens
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

GOLDEN = [6.6435, 6.2792, 5.8054, 5.8117]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """20,000 tokens of a Zipf-like source, and a vocabulary file for the special ids."""
    folder = tmp_path_factory.mktemp("golden")
    numbered_words_vocabulary(folder, 100)
    ranks = np.random.default_rng(0).zipf(1.3, 20_000)
    write_tokens(folder / "tokens", [[3 + ranks[ranks < 90] % 90]])
    config = {
        "base": str(ROOT / "models_configs" / "t5_configs" / "t5-small.json"), "vocab_size": 512, "d_model": 32,
        "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    }  # fmt: skip
    (folder / "tiny.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("batch_size, accumulation", [(8, 1), (2, 4)])
def test_first_losses(data, tmp_path, monkeypatch, batch_size, accumulation):
    monkeypatch.chdir(os.getcwd())
    main([
        "--data_path", str(data / "tokens"), "--vocab", str(data / "vocab.model"), "--model_path", str(tmp_path),
        "--model_cfg", str(data / "tiny.json"), "--dropout_rate", "0", "--input_seq_len", "64",
        "--target_seq_len", "32", "--batch_size", str(batch_size), "--gradient_accumulation_steps",
        str(accumulation), "--lr", "1e-3",
        "--iters", "4", "--log_interval", "1", "--backend", "local", "--speed", "off",
    ])  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in records if r["split"] == "train"] == pytest.approx(GOLDEN, abs=5e-4)
