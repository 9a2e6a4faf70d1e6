"""modeling_bert and its variants learn on real text, two workers, under either backend."""

import json

import pytest

from tests.distributed.launch import ROOT, forked, horovodrun, missing, torchrun
from tests.helpers.bert_toys import TINY, make_bert_data

VARIANTS = {
    "base": {},
    "pre-norm, relative bias": {"pre_layer_norm": True, "position_embedding_type": "relative_attention_bias"},
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "relative bias": {"position_embedding_type": "relative_attention_bias"},
    "pre-norm, rotary": {"pre_layer_norm": True, "position_embedding_type": "rotary", "rotary_dim": 4},
    "alibi": {"position_embedding_type": "alibi"},
    "sparse, relative bias": {
        "position_embedding_type": "relative_attention_bias", "sparse_config_cls": "BigBird",
        "sparse_attention": {"block": 16},
    },
}  # fmt: skip
BACKENDS = {"accelerate": torchrun, "horovod": horovodrun}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_bert_data(tmp_path_factory.mktemp("bert"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_falls_in_200_steps(data, tmp_path, backend, variant):
    if reason := missing(backend):
        pytest.skip(reason)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, **VARIANTS[variant]}))
    length = 320 if "sparse_config_cls" in VARIANTS[variant] else 48  # a layout of up to 256 tokens is a mask
    flags = {
        "data_path": data / "train", "vocab_file": data / "vocab.txt", "working_dir": data, "model_cfg": config,
        "model_path": tmp_path / "run", "model_cls": "modeling_bert:BertForPreTraining", "backend": backend,
        "input_seq_len": length, "batch_size": 8, "lr": 3e-3, "optimizer": "AdamW", "log_interval": 20, "iters": 200,
    }  # fmt: skip
    command = [ROOT / "run_bert_pretraining.py", *(f"--{name}={value}" for name, value in flags.items())]
    job = forked(BACKENDS[backend](), *command, timeout=3000)
    assert job.returncode == 0, job.output[-3000:]
    assert f"backend {backend}, 2 worker(s)" in job.output
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss_mlm"] for record in records if record["split"] == "train"]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5, losses
