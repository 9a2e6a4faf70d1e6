"""A checkpoint that transformers' class would compute otherwise is not taken for its own; a plain one still is."""

import json
from unittest import mock

import pytest
import torch
import transformers

import modeling_bert
import modeling_t5
from lm_experiments_tools.models.build import load_model_config

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
    "sparse bert": (modeling_bert.BertModel, {**BERT, **SPARSE}),
    "alibi t5": (modeling_t5.T5Model, {**T5, "position_embedding_type": "alibi"}),
    "memory t5": (modeling_t5.T5EncoderModel, {**T5, "num_memory_tokens": 2}),
    "cdQ t5": (
        modeling_t5.T5EncoderModel,
        {**T5, "encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 1},
    ),
}
AUTO = {modeling_t5.T5EncoderModel: transformers.AutoModelForTextEncoding}
BERT_HEADS = {
    "AutoModel": "BertModel",
    "AutoModelForPreTraining": "BertForPreTraining",
    "AutoModelForMaskedLM": "BertForMaskedLM",
    "AutoModelForSequenceClassification": "BertForSequenceClassification",
    "AutoModelForTokenClassification": "BertForTokenClassification",
    "AutoModelForQuestionAnswering": "BertForQuestionAnswering",
}
T5_HEADS = {
    "AutoModel": "T5Model",
    "AutoModelForPreTraining": "T5ForConditionalGeneration",
    "AutoModelForSeq2SeqLM": "T5ForConditionalGeneration",
    "AutoModelForSequenceClassification": "T5ForSequenceClassification",
    "AutoModelForTextEncoding": "T5EncoderModel",
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_checkpoint_is_one_of_transformers(kind, tmp_path):
    cls, settings = PLAIN[kind]
    cls(cls.config_class(**settings)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    assert type(transformers.AutoModel.from_pretrained(tmp_path)) is getattr(transformers, cls.__name__)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_read_by_its_own_class_and_by_automodel(name, tmp_path):
    cls, settings = VARIANTS[name]
    model = cls(cls.config_class(**settings)).eval()
    model.save_pretrained(tmp_path)
    kind = name.split()[-1]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"lm_experiments_{kind}"
    with mock.patch("transformers.configuration_utils.logger.warning") as warning:
        own = cls.from_pretrained(tmp_path)
        found = AUTO.get(cls, transformers.AutoModel).from_pretrained(tmp_path)
    warning.assert_not_called()
    for loaded in (own, found):
        assert type(loaded) is cls and type(loaded.config) is cls.config_class
        assert loaded.config.model_type == loaded.config.to_dict()["model_type"] == kind
        torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    for again in (
        load_model_config(tmp_path / "config.json", cls.config_class),
        transformers.AutoConfig.from_pretrained(tmp_path),
    ):
        assert type(again) is cls.config_class and {key: getattr(again, key) for key in settings} == settings


def test_every_auto_class_has_its_model_and_transformers_keep_theirs(tmp_path):
    for config, home, heads in (
        (modeling_bert.BertConfig(**VARIANTS["rotary bert"][1]), "modeling_bert", BERT_HEADS),
        (modeling_t5.T5Config(**VARIANTS["alibi t5"][1]), "modeling_t5", T5_HEADS),
        (transformers.BertConfig(**BERT), "transformers.models.bert", BERT_HEADS),
        (transformers.T5Config(**T5), "transformers.models.t5", T5_HEADS),
    ):
        config.save_pretrained(tmp_path)
        read = transformers.AutoConfig.from_pretrained(tmp_path)
        assert {**read.to_dict(), "_name_or_path": ""} == config.to_dict()
        for auto, head in heads.items():
            with torch.device("meta"):
                made = getattr(transformers, auto).from_config(read)
            assert type(made).__name__ == head and type(made).__module__.startswith(home)


class WindowConfig(modeling_t5.T5Config):
    window: int = 3
    decoder_self_attention_layer: str = f"{__name__}:WindowAttention"


class WindowAttention(modeling_t5.T5Attention):
    pass


class WindowT5(modeling_t5.T5ForConditionalGeneration):
    config_class = WindowConfig


class RotaryBertConfig(modeling_bert.BertConfig):
    position_embedding_type: str = "rotary"


class RotaryBert(modeling_bert.BertForMaskedLM):
    config_class = RotaryBertConfig


@pytest.mark.parametrize(("cls", "sizes"), [(WindowT5, T5), (RotaryBert, BERT)])
def test_a_class_derived_from_ours_is_read_by_itself_alone(cls, sizes, tmp_path):
    """Though all of its keys are at its own defaults."""
    torch.manual_seed(0)
    model = cls(cls.config_class(**sizes)).eval()
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForSeq2SeqLM if cls is WindowT5 else transformers.AutoModelForMaskedLM
    with pytest.raises(ValueError, match=f"is of {cls.__name__}: read it"):
        auto.from_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path).eval()
    inputs = {"input_ids": torch.arange(2, 12)[None]}
    if cls is WindowT5:
        inputs["decoder_input_ids"] = inputs["input_ids"]
        assert again.config.window == 3
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
