"""Flags that a model, a head or an adapter contradicts are refused in a sentence, not ignored."""

import json

import pytest
import torch
from transformers import BartConfig, BertForSequenceClassification, LlamaConfig, T5GemmaConfig, T5GemmaModuleConfig

from lm_experiments_tools.checkpoint.source import find_source
from lm_experiments_tools.checkpoint.weights import save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import check_positions, set_dropout
from lm_experiments_tools.models.saved import merged
from modeling_bert import BertConfig
from tests.helpers.pretrained_toys import made, save_toy, toy_args, toy_batch, toy_tokenizer

T5_CLASSIFIER = "modeling_t5:T5EncoderForSequenceClassification"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    found = {kind: save_toy(kind, folder / kind) for kind in ("encoder", "encoder-decoder", "decoder")}
    model = made(toy_args(found["encoder"], "encoder"), ("good", "not good"))
    return found | {"classifier": save_toy("", folder / "classifier", model)}


@pytest.fixture(scope="module")
def adapters(bases, tmp_path_factory):
    """flags of an adapter -> its folder."""
    kinds = {
        "lora": ("encoder-decoder", dict(peft="lora", lora_r=4)),
        "prompts": ("encoder-decoder", dict(peft="prompt_tuning", num_virtual_tokens=3)),
        "classifier": ("encoder", dict(peft="lora")),
        "classifiers": ("encoder", dict(peft="prompt_tuning", num_virtual_tokens=3)),
    }
    found = {}
    for name, (kind, flags) in kinds.items():
        found[name] = tmp_path_factory.mktemp(name)
        save_model(found[name], made(toy_args(bases[kind], kind, **flags), ("good", "bad")))
        toy_tokenizer().save_pretrained(found[name])
    return found


def test_labels_of_a_trained_head_keep_their_order(bases, adapters, tmp_path, caplog):
    """Otherwise the classes would only change their names, and accuracy would be its complement."""
    args = toy_args(bases["classifier"], "encoder")
    batch = toy_batch("encoder")
    oracle = BertForSequenceClassification.from_pretrained(bases["classifier"]).eval()
    assert torch.equal(made(args, ("good", "not good")).eval()(**batch).logits, oracle(**batch).logits)
    sentence = "give --label_names good 'not good'"
    with pytest.raises(UserError, match=sentence):
        made(args, ("not good", "good"))
    with pytest.raises(UserError, match=sentence):
        made(toy_args(None, "encoder", init_checkpoint=str(bases["classifier"])), ("not good", "good"))
    made(args, ("a", "b"))
    assert "was trained for the labels good, not good" in caplog.text
    for name in ("classifier", "classifiers"):
        assert made(toy_args(adapters[name], "encoder"), ("good", "bad")).config.id2label == {0: "good", 1: "bad"}
        with pytest.raises(UserError, match="give --label_names good bad"):
            made(toy_args(adapters[name], "encoder"), ("bad", "good"))
    assert merged(find_source(str(adapters["classifier"]))).config.id2label == {0: "good", 1: "bad"}
    config = bases["classifier"] / "config.json"
    unnamed = json.loads(config.read_text()) | {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    save_toy("", tmp_path, oracle)
    (tmp_path / "config.json").write_text(json.dumps(unnamed))
    made(toy_args(tmp_path, "encoder"), ("not good", "good"))
    made(toy_args(bases["classifier"], "encoder"), ("not good", "so so", "good"))  # a new head


def test_an_adapter_on_weights_that_lie_nowhere_is_refused(bases):
    config, words = str(bases["encoder-decoder"] / "config.json"), str(bases["encoder-decoder"])
    with pytest.raises(UserError, match="--peft lora needs --from_pretrained"):
        made(toy_args(None, model_cfg=config, tokenizer=words, peft="lora"))
    with pytest.raises(UserError, match="--peft lora needs --from_pretrained"):
        made(toy_args(None, init_checkpoint=words, peft="lora"))


def test_a_random_head_is_not_validated_unless_a_checkpoint_fills_it(bases, tmp_path):
    flags = dict(validate_only=True, model_path=str(tmp_path))
    with pytest.raises(UserError, match=r"--validate_only: .* has no head for --task classification"):
        made(toy_args(bases["encoder"], "encoder", **flags))
    made(toy_args(bases["classifier"], "encoder", **flags), ("good", "not good"))
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    made(toy_args(bases["encoder"], "encoder", **flags))


@pytest.mark.parametrize(
    ("adapter", "flags", "sentence"),
    [
        ("lora", dict(freeze=("encoder",)), "--freeze: everything under the adapter .* is frozen already"),
        ("lora", dict(peft="lora", lora_r=16, lora_dropout=0.3), r"--lora_r \(4 there\), --lora_dropout \(0.0 there"),
        ("prompts", dict(peft="prompt_tuning", num_virtual_tokens=4), r"--num_virtual_tokens \(3 there\)"),
        ("lora", dict(peft="lora", lora_r=4, lora_targets=("v", "q")), None),
        ("prompts", dict(peft="prompt_tuning", num_virtual_tokens=3), None),
    ],
)
def test_settings_that_a_saved_adapter_has_not_are_refused(adapter, flags, sentence, adapters):
    if sentence is None:
        made(toy_args(adapters[adapter], **flags))
        return
    with pytest.raises(UserError, match=sentence):
        made(toy_args(adapters[adapter], **flags))


def test_a_class_that_is_named_decides_what_kind_of_model_it_is(bases):
    model = made(toy_args(bases["encoder-decoder"], "encoder", model_cls=T5_CLASSIFIER))
    assert model(**toy_batch("encoder")).logits.shape == (4, 2)
    with pytest.raises(UserError, match="--model_type encoder does not fit"):
        made(toy_args(bases["encoder-decoder"], "encoder", model_cls="transformers:T5ForConditionalGeneration"))


def test_every_dropout_that_there_is_is_set():
    config = BartConfig(classifier_dropout=0.5, activation_dropout=0.5)
    set_dropout(config, 0.0)
    assert (config.dropout, config.activation_dropout, config.classifier_dropout) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "flags", "sentence"),
    [
        (
            "encoder",
            dict(input_seq_len=60, peft="prompt_tuning", num_virtual_tokens=5),
            r"--input_seq_len \(60\) with the 5 tokens of the prompt is more than the 64 positions",
        ),
        ("decoder", dict(max_new_tokens=49), r"--max_new_tokens after a source \(65\) is"),
        ("encoder", dict(input_seq_len=60, peft="prompt_tuning", num_virtual_tokens=4), None),
        ("decoder", dict(max_new_tokens=48), None),
        ("encoder-decoder", dict(input_seq_len=4096), None),
    ],
)
def test_inputs_are_within_the_positions(kind, flags, sentence, bases):
    if sentence is None:
        made(toy_args(bases[kind], kind, **flags))
        return
    with pytest.raises(UserError, match=sentence):
        made(toy_args(bases[kind], kind, **flags))


ROTARY = LlamaConfig(max_position_embeddings=64)
MODULE = T5GemmaModuleConfig(max_position_embeddings=64)
BERT = BertConfig(position_embedding_type="rotary", max_position_embeddings=64)


@pytest.mark.parametrize(
    "config", [ROTARY, T5GemmaConfig(encoder=MODULE, decoder=MODULE), BERT], ids=lambda config: type(config).__name__
)
def test_inputs_longer_than_rotary_positions_are_a_warning(config, caplog):
    check_positions(config, 64, "a text")
    assert not caplog.records
    check_positions(config, 65, "a text")
    [record] = caplog.records
    assert "a text is more than the 64 positions of the model (max_position_embeddings)" in record.message


def test_a_bias_by_distance_has_no_end(caplog):
    check_positions(BertConfig(position_embedding_type="alibi", max_position_embeddings=64), 65, "a text")
    assert not caplog.records
