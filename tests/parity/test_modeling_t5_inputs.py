"""Inputs of modeling_t5 in less common forms: masks that are added, encoder outputs, several `</s>`."""

import pytest
import torch

from modeling_t5 import T5Config, T5EncoderModel
from tests.helpers.t5_pair import SIZES, T5_1_1, assert_same, batch, pair

L, T = 30, 24  # tokens of encoder and decoder in `batch`


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def hidden(low: float, *shape: int) -> torch.Tensor:
    """0 and `low`, each query's first key never hidden."""
    mask = (random(*shape) > 0).double() * low
    mask[..., 0] = 0.0
    return mask


ADDED = {
    "-1e4": lambda *shape: hidden(-1e4, *shape),
    "-1e9": lambda *shape: hidden(-1e9, *shape),
    "soft": random,
    "0 and 1": lambda *shape: hidden(1.0, *shape),
    "soft, some never": lambda *shape: random(*shape) + hidden(torch.finfo(torch.float64).min, *shape),
}


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "sdpa") for name in ADDED), ("soft", "eager"), ("soft", "block_sparse")]
)
def test_masks_of_floats_are_added_to_scores(name, implementation):
    make = ADDED[name]
    theirs, ours = pair("T5ForConditionalGeneration", implementation, **T5_1_1)
    masks = {"attention_mask": make(3, 4, L, L), "decoder_attention_mask": make(3, 1, T, T)}
    encoded = {"encoder_outputs": (random(3, L, 32),), "attention_mask": make(3, 1, T, L)}
    inputs = batch()
    plain = ours(**inputs).loss
    states, cross = [], []
    for model in (theirs, ours):
        states.append(model.encoder(inputs["input_ids"], masks["attention_mask"])[0])
        cross.append(model(**encoded, labels=inputs["labels"]).logits)
    for wanted, got in (states, cross):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    decoder = {**inputs, "decoder_attention_mask": masks["decoder_attention_mask"]}
    assert_same(theirs, ours, decoder)
    assert (ours(**decoder).loss - plain).abs() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_floats_that_may_be_anything_are_refused(dtype):
    _, ours = pair("T5ForConditionalGeneration")
    mask = torch.ones(3, L, L, dtype=dtype).tril()
    with pytest.raises(
        ValueError, match=rf"attention_mask is {dtype} \[3, 30, 30\]: one that is added .* 4 dimensions"
    ):
        ours(**{**batch(), "attention_mask": mask})


@pytest.mark.parametrize("num_memory_tokens", [0, 3])
@pytest.mark.parametrize("heads", [2, 4])
def test_context_dependent_queries_pool_what_an_added_mask_shows(heads, num_memory_tokens):
    layer = {"encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": heads}
    torch.manual_seed(0)
    encoder = T5EncoderModel(T5Config(**SIZES, **layer, num_memory_tokens=num_memory_tokens)).double().eval()
    tokens, padding = batch()["input_ids"], batch()["attention_mask"]
    added = (1 - padding)[:, None, None].double() * -1e4
    real = torch.nn.functional.pad(padding, (num_memory_tokens, 0), value=1) == 1
    got, wanted = (encoder(tokens, mask).last_hidden_state[real] for mask in (added, padding))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_outputs_of_the_encoder_come_back_under_their_names():
    _, ours = pair("T5Model")
    inputs = batch()
    del inputs["labels"]
    whole = ours(**inputs, decoder_input_ids=inputs["input_ids"], output_attentions=True)
    encoded = ours.encoder(inputs["input_ids"], inputs["attention_mask"], output_attentions=True)
    again = ours(**inputs, decoder_input_ids=inputs["input_ids"], encoder_outputs=encoded, output_attentions=True)
    assert list(again) == list(whole) and again.encoder_hidden_states is None
    assert torch.equal(again.last_hidden_state, whole.last_hidden_state)
    for one, other in zip(again.encoder_attentions, whole.encoder_attentions, strict=True):
        assert torch.equal(one, other)
    plain = ours(**inputs, decoder_input_ids=inputs["input_ids"], encoder_outputs=(encoded[0],))
    assert torch.equal(plain.last_hidden_state, whole.last_hidden_state)


def test_each_of_several_end_tokens_ends_a_text():
    theirs, ours = pair("T5ForSequenceClassification", num_labels=3)
    inputs = {**batch(), "labels": torch.tensor([0, 2, 1])}
    inputs["input_ids"][:, 16] = 1
    inputs["input_ids"][1, 16] = 7
    inputs["input_ids"][:, 17:].clamp_(min=8)
    ours.config.eos_token_id = [1, 7]
    got = ours(**inputs).logits
    for row, end in enumerate([1, 7, 1]):
        theirs.config.eos_token_id = end
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        torch.testing.assert_close(got[row : row + 1], theirs(**alone).logits, rtol=1e-10, atol=1e-10)
