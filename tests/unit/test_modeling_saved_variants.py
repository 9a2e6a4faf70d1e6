"""A checkpoint that transformers' class would compute otherwise is not taken for its own; a plain one still is."""

import json
from unittest import mock

import pytest
import torch
import transformers

import modeling_bert
import modeling_t5
from lm_experiments_tools.models import load_model_config

BERT = {
    "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 32,
}  # fmt: skip
T5 = {"vocab_size": 50, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
SPARSE = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 4}}
PLAIN = {
    "bert": (modeling_bert.BertModel, BERT),
    "t5": (modeling_t5.T5Model, {**T5, "z_loss": 1e-4, "fp32_residual": True, "cross_entropy_chunk_size": 4}),
}
VARIANTS = {
    "rotary bert": (modeling_bert.BertModel, {**BERT, "position_embedding_type": "rotary"}),
    "pre-norm bert": (modeling_bert.BertModel, {**BERT, "pre_layer_norm": True}),
    "sparse bert": (modeling_bert.BertModel, {**BERT, **SPARSE}),
    "alibi t5": (modeling_t5.T5Model, {**T5, "position_embedding_type": "alibi"}),
    "bias per layer t5": (modeling_t5.T5Model, {**T5, "relative_attention_bias_per_layer": True}),
    "memory t5": (modeling_t5.T5EncoderModel, {**T5, "num_memory_tokens": 2}),
    "cdQ t5": (
        modeling_t5.T5EncoderModel,
        {**T5, "encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 1},
    ),
    "sparse t5": (modeling_t5.T5Model, {**T5, **SPARSE}),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_checkpoint_is_one_of_transformers(kind, tmp_path):
    cls, settings = PLAIN[kind]
    cls(cls.config_class(**settings)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    assert type(transformers.AutoModel.from_pretrained(tmp_path)) is getattr(transformers, cls.__name__)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_refused_by_automodel_and_read_by_its_own_class(name, tmp_path):
    cls, settings = VARIANTS[name]
    model = cls(cls.config_class(**settings))
    model.save_pretrained(tmp_path)
    kind = name.split()[-1]
    with pytest.raises(ValueError, match=f"lm_experiments_{kind}"):
        transformers.AutoModel.from_pretrained(tmp_path)
    with mock.patch("transformers.configuration_utils.logger.warning") as warning:
        loaded = cls.from_pretrained(tmp_path)
    warning.assert_not_called()
    assert loaded.config.model_type == loaded.config.to_dict()["model_type"] == kind
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    again = load_model_config(tmp_path / "config.json", cls.config_class)
    assert {key: getattr(again, key) for key in settings} == settings
