"""examples/attention_maps.py beside the attention weights of transformers and densities counted here."""

import importlib.util

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from tests.helpers import ROOT


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("attention_maps", ROOT / "examples" / "attention_maps.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_maps_are_the_models_weights_and_are_drawn(example, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    inputs = {"input_ids": torch.arange(3, 10)[None]}
    maps = example.weights_of(model, lambda text, return_tensors: dict(inputs), "a text")
    assert len(maps) == 3 * 2 * 2
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model.encoder(**inputs, output_attentions=True).attentions
    assert torch.equal(maps["encoder_attentions 1.0"], expected[1][0, 0])
    example.draw(maps, tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 1000


def test_a_sliding_window_of_three_blocks(example, tmp_path):
    maps = example.layouts("LocalSlidingWindow", {"attention": "bidirectional", "num_sliding_window_blocks": 3})
    blocks = example.LENGTH // 64
    near = (torch.arange(blocks)[:, None] - torch.arange(blocks)).abs() <= 1
    ((title, layout),) = maps.items()
    assert torch.equal(layout.bool(), near) and title == f"LocalSlidingWindow: {near.float().mean():.1%}"
