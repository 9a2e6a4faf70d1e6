"""Variants of modeling_t5 and modeling_bert learn on real text, two workers, under either backend."""

import json

import pytest

from tests.distributed.launch import ROOT, start
from tests.helpers.bert_toys import TINY as BERT
from tests.helpers.bert_toys import make_bert_data
from tests.helpers.real_data import DATA, lacking
from tests.helpers.runs import TWO_LAYERS, records

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(3600)]

T5 = {key: value for key, value in TWO_LAYERS.items() if key not in ("vocab_size", "dropout_rate")}
RELATIVE = {"position_embedding_type": "relative_attention_bias"}
SPARSE = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 16}}
CDQ = {"encoder_self_attention_layer": "modeling_t5:T5CDQAttention"}
VARIANTS = {
    "t5": {
        "cdQ, memory, losses": {
            **CDQ, "num_cdq_heads": 2, "num_memory_tokens": 4, "z_loss": 1e-4, "label_smoothing": 0.05,
            "cross_entropy_chunk_size": 64,
        },
        "only cdQ, no positions": {**CDQ, "num_cdq_heads": 4, "position_embedding_type": "none"},
        "memory, shared bias": {"num_memory_tokens": 4},
        "rotary, untied": {
            "position_embedding_type": "rotary", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        },
        "half rotary": {"position_embedding_type": "rotary", "rotary_dim": 4, "rotary_base": 500},
        "alibi": {"position_embedding_type": "alibi"},
        "sparse, bias per layer": {**SPARSE, "relative_attention_bias_per_layer": True},
    },
    "bert": {
        "base": {},
        "pre-norm, relative bias": {"pre_layer_norm": True, **RELATIVE},
        "relative_key": {"position_embedding_type": "relative_key"},
        "relative_key_query": {"position_embedding_type": "relative_key_query"},
        "relative bias": RELATIVE,
        "pre-norm, rotary": {"pre_layer_norm": True, "position_embedding_type": "rotary", "rotary_dim": 4},
        "alibi": {"position_embedding_type": "alibi"},
        "sparse, relative bias": {**RELATIVE, **SPARSE},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def bert_data(tmp_path_factory):
    return make_bert_data(tmp_path_factory.mktemp("bert"))


def bert_flags(request, is_sparse):
    data = request.getfixturevalue("bert_data")
    return {
        "data_path": data / "train", "vocab_file": data / "vocab.txt", "working_dir": data, "batch_size": 8,
        "model_cls": "modeling_bert:BertForPreTraining", "input_seq_len": 320 if is_sparse else 48,
    }  # fmt: skip


def t5_flags(request, is_sparse):
    text, vocab = DATA / "corpus" / "validation.jsonl", DATA / "vocabs" / "t5_32k" / "sentencepiece.model"
    if reason := lacking(text, vocab):
        pytest.skip(reason)
    return {
        "data_path": text, "vocab": vocab, "target_seq_len": 80, "batch_size": 4, "data_n_workers": 1,
        "model_cls": "modeling_t5:T5ForConditionalGeneration", "input_seq_len": 320 if is_sparse else 128,
    }  # fmt: skip


# flags (320 tokens: a layout of up to 256 is a mask), base of the configuration, name of the loss, its fall
MODELS = {"t5": (t5_flags, {**T5, "base": "t5-small"}, "loss", 1.0), "bert": (bert_flags, BERT, "loss_mlm", 0.5)}


@pytest.mark.parametrize("kind", ["ddp", "horovod"])
@pytest.mark.parametrize("model, variant", [(model, name) for model in VARIANTS for name in VARIANTS[model]])
def test_loss_falls_in_200_steps(model, variant, kind, request, tmp_path):
    flags_of, base, loss, fall = MODELS[model]
    settings = VARIANTS[model][variant]
    (tmp_path / "config.json").write_text(json.dumps({**base, **settings}))
    flags = flags_of(request, "sparse_attention" in settings) | {
        "model_path": tmp_path / "run", "model_cfg": tmp_path / "config.json", "lr": 3e-3, "optimizer": "AdamW",
        "log_interval": 20, "iters": 200,
    }  # fmt: skip
    script = ROOT / f"run_{model}_pretraining.py"
    output = start(kind, script, *(f"--{name}={value}" for name, value in flags.items()), timeout=3000)
    assert "2 worker(s)" in output
    losses = [record[loss] for record in records(tmp_path / "run")]
    assert len(losses) == 10 and losses[-1] < losses[0] - fall, losses
