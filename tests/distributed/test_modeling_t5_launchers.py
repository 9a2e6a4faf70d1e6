"""Variants of modeling_t5 learn on real text, two workers, under either backend."""

import json

import pytest

from tests.distributed.launch import ROOT, forked, horovodrun, missing, torchrun
from tests.helpers.real_data import DATA, lacking

SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
VARIANTS = {
    "cdQ, memory, losses": {
        "encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 2, "num_memory_tokens": 4,
        "z_loss": 1e-4, "label_smoothing": 0.05, "cross_entropy_chunk_size": 64,
    },
    "only cdQ, no positions": {
        "encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 4,
        "position_embedding_type": "none",
    },
    "memory, shared bias": {"num_memory_tokens": 4},
    "rotary, untied": {
        "position_embedding_type": "rotary", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
    "half rotary": {"position_embedding_type": "rotary", "rotary_dim": 4, "rotary_base": 500},
    "alibi": {"position_embedding_type": "alibi"},
    "sparse, bias per layer": {
        "sparse_config_cls": "BigBird", "sparse_attention": {"block": 16}, "relative_attention_bias_per_layer": True,
    },
}  # fmt: skip
BACKENDS = {"accelerate": torchrun, "horovod": horovodrun}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_falls_in_200_steps(tmp_path, backend, variant):
    text, vocab = DATA / "corpus" / "validation.jsonl", DATA / "vocabs" / "t5_32k" / "sentencepiece.model"
    if reason := missing(backend) or lacking(text, vocab):
        pytest.skip(reason)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"base": "t5-small", **SIZES, **VARIANTS[variant]}))
    length = 320 if "sparse_config_cls" in VARIANTS[variant] else 128  # a layout of up to 256 tokens is a mask
    flags = {
        "data_path": text, "vocab": vocab, "model_path": tmp_path / "run", "model_cfg": config, "backend": backend,
        "model_cls": "modeling_t5:T5ForConditionalGeneration", "input_seq_len": length, "target_seq_len": 80,
        "batch_size": 4, "lr": 3e-3, "optimizer": "AdamW", "log_interval": 20, "iters": 200, "data_n_workers": 1,
    }  # fmt: skip
    command = [ROOT / "run_t5_pretraining.py", *(f"--{name}={value}" for name, value in flags.items())]
    job = forked(BACKENDS[backend](), *command, timeout=3000)
    assert job.returncode == 0, job.output[-3000:]
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["split"] == "train"]
    assert losses[-1] < losses[0] - 1, losses
