"""The fast step of BERT: gradients are transformers', in bfloat16 nearly so, and dropout drops what it should."""

import pytest
import torch
import transformers
from torch import nn

import modeling_bert
from lm_experiments_tools.modules.fast_step import dropped, joined, normed

SIZES = dict(
    vocab_size=99, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=40, initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def models():
    """Transformers' and ours with the fast step, of the same weights, in training."""
    torch.manual_seed(0)
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**SIZES))
    ours = modeling_bert.BertForPreTraining(modeling_bert.BertConfig(**SIZES))
    ours.load_state_dict(theirs.state_dict())
    ours.use_fast_step()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    return ours.train(), theirs.train()


def batch(padding, rows=4, length=32):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 99, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        mask[1, 20:] = mask[2, 1:] = 0
    labels = ids.masked_fill((torch.rand(ids.shape, generator=generator) > 0.3) | (mask == 0), -100)
    pairs = torch.arange(rows) % 2
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels, "next_sentence_label": pairs}


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("padding", [True, False])
def test_gradients_in_float32_are_those_of_transformers(padding):
    ours, theirs = models()
    expected = gradients(theirs, batch(padding))
    for name, gradient in gradients(ours, batch(padding)).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("padding", [True, False])
def test_gradients_in_bfloat16_point_where_those_in_float32_do(padding):
    ours, theirs = models()
    expected = gradients(theirs, batch(padding))
    dtypes = []
    ours.bert.encoder.layer[2].register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(ours, batch(padding))
    assert dtypes == [torch.bfloat16]
    for name, gradient in found.items():
        if not name.endswith("key.bias"):  # softmax is the same for any: rounding alone
            assert torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0) >= 0.999, name


def test_switched_off_it_computes_as_before():
    ours, _ = models()
    ours.use_fast_step(False)
    plain = modeling_bert.BertForPreTraining(ours.config).train()
    plain.load_state_dict(ours.state_dict())
    for name, gradient in gradients(plain, batch(True)).items():
        assert torch.equal(gradients(ours, batch(True))[name], gradient)


def test_a_layer_that_is_not_plain_is_called():
    torch.manual_seed(0)
    linears, x, calls = [nn.Linear(8, 4) for _ in range(3)], torch.randn(2, 8), []
    expected = [linear(x) for linear in linears]
    handle = linears[1].register_forward_hook(lambda *call: calls.append(call))
    for _ in range(2):
        torch.testing.assert_close(joined(x, *linears), tuple(expected))
        handle.remove()
    assert len(calls) == 1
    linears[2] = nn.Sequential(linears[2])
    torch.testing.assert_close(joined(x, *linears), tuple(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_is_independent_of_the_right_size_and_has_its_own_gradient(dtype, probability):
    torch.manual_seed(0)
    x = torch.ones(1000, 1001, dtype=dtype, requires_grad=True)
    out = dropped(x, probability)
    out.backward(torch.full_like(out, 2.0))
    assert torch.equal(x.grad, 2 * out.detach())
    kept = (out != 0).double().flatten()
    deviation = (probability * (1 - probability) / kept.numel()) ** 0.5
    assert abs(kept.mean() - (1 - probability)) < 4 * deviation
    assert torch.equal(out.unique(), torch.tensor([0.0, 1 / (1 - probability)]).to(dtype))
    for distance in (1, 2, 3, 4, 1001):  # four of bfloat16 come from one random number
        together = (kept[distance:] * kept[:-distance]).mean()
        assert abs(together - (1 - probability) ** 2) < 8 * deviation
    assert not torch.equal(dropped(x, probability), out)


def test_a_norm_without_weights_is_called():
    x, norm = torch.randn(3, 8).bfloat16(), nn.LayerNorm(8, elementwise_affine=False)
    assert torch.equal(normed(norm, x), norm(x))
