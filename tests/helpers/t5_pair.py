"""Our T5 and transformers' with the same random weights, in float64, and the comparison of all that they compute."""

import torch
import transformers

import modeling_t5
from lm_experiments_tools.models.build import build_model

SIZES = {
    "vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip


T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def pair(name: str, implementation: str = "eager", **settings):
    """transformers' model in eager attention and ours in any, with the same weights."""
    config = transformers.T5Config(**SIZES, **settings, attn_implementation="eager")
    config.tie_word_embeddings = settings.get("tie_word_embeddings", True)
    theirs = build_model(getattr(transformers, name), config, seed=0).double().eval()
    ours_cls = getattr(modeling_t5, name)
    ours = ours_cls(modeling_t5.T5Config(**SIZES, **settings, attn_implementation=implementation)).double().eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def batch(num_labels: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(2, 100, (3, 30), generator=generator)
    mask = torch.ones_like(input_ids)
    mask[0, 17:], mask[2, :5] = 0, 0
    labels = torch.randint(2, 100, (3, 24), generator=generator)
    labels[1, 9:] = -100
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def assert_same(theirs, ours, inputs, atol=1e-10):
    """Every output, and every gradient relative to the largest element of its tensor."""
    wanted, got = theirs(**inputs), ours(**inputs)
    names = [name for name in wanted if isinstance(wanted[name], torch.Tensor)]
    assert names == [name for name in got if isinstance(got[name], torch.Tensor)]
    for name in names:
        torch.testing.assert_close(got[name], wanted[name], rtol=atol, atol=atol)
    for outputs in (wanted, got):
        outputs[0].square().sum().backward()
    parameters = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:
            assert parameters[name].grad is None
            continue
        scale = parameter.grad.abs().max()
        assert (parameters[name].grad - parameter.grad).abs().max() <= atol * scale, name
