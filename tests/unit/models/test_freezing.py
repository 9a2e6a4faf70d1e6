"""Frozen parameters stay, bit for bit; parts and summaries add up."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import num_parameters
from lm_experiments_tools.models.freezing import ModelSummary, freeze, part_of_parameters, summary
from tests.helpers.pretrained_toys import toy_batch, toy_model


def classifier():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=96)
    return BertForSequenceClassification(BertConfig(**sizes))


MODELS = {
    "encoder": classifier,
    "encoder-decoder": lambda: toy_model("encoder-decoder"),
    "decoder": lambda: toy_model("decoder"),
}


FINAL = ("encoder.final", "decoder.final")


def trained_after(model, kind):
    """Names of the parameters that a step of SGD changes."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(**toy_batch(kind)).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize(
    ("kind", "what", "start"),
    [
        ("encoder", ["encoder", "embeddings"], ("bert.pooler.", "classifier.")),
        ("encoder", ["embeddings", "head"], ("bert.encoder.",)),
        ("encoder-decoder", ["encoder"], ("shared.", "decoder.")),
        ("encoder-decoder", ["embeddings", "decoder"], ("encoder.",)),
        ("encoder-decoder", ["*.block.0.*", "lm_head.weight"], ("encoder.block.1", "decoder.block.1", *FINAL)),
        ("decoder", ["embeddings"], ("transformer.h.", "transformer.ln_f")),
    ],
)  # fmt: skip
def test_frozen_parameters_do_not_change_and_all_others_do(kind, what, start):
    model = MODELS[kind]()
    names = {name for name, _ in model.named_parameters()}
    freeze(model, what)
    changed = trained_after(model, kind)
    assert all(name.startswith(start) for name in changed)
    still = {name for name in names - changed if name.startswith(start)}
    assert all("relative_attention_bias" in name or "key.bias" in name for name in still)  # of no effect on this loss


@pytest.mark.parametrize(
    ("kind", "what", "sentence"),
    [
        ("encoder", ["decoder"], "--freeze decoder matches nothing"),
        ("encoder", ["encoder.layer.0"], "--freeze encoder.layer.0 matches nothing .*did you mean 'encoder'"),
        ("decoder", ["embeddings", "decoder"], "leaves nothing to train"),
        ("decoder", ["head"], "--freeze head matches nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_frozen_is_a_sentence(kind, what, sentence):
    with pytest.raises(UserError, match=sentence):
        freeze(MODELS[kind](), what)


@pytest.mark.parametrize("kind", list(MODELS))
def test_summary_counts_each_parameter_once(kind):
    model = MODELS[kind]()
    freeze(model, ["embeddings"])
    found = summary(model)
    assert found.all.total == sum(p.numel() for p in model.parameters())
    assert found.all.bytes == 4 * found.all.total
    assert found.all.trainable == found.all.total - found.parts["embeddings"].total
    assert found.parts["embeddings"].total >= model.get_input_embeddings().weight.numel()
    assert set(part_of_parameters(model).values()) == set(found.parts)
    assert f"{found.all.total:,}" in str(found) and "trained" in str(found)


def test_slices_of_zero_3_are_counted_whole():
    """There a parameter is empty and notes its number of values as `ds_numel`."""
    model = MODELS["encoder-decoder"]()
    whole, count = summary(model).all, num_parameters(model)
    for parameter in model.parameters():
        parameter.ds_numel, parameter.data = parameter.numel(), parameter.data.new_empty(0)
    assert summary(model).all == whole and num_parameters(model) == count
    assert str(ModelSummary({})).splitlines()[-1].split() == ["all", "0", "0", "0.0"]
