"""An attention mask of one row holds for every row of the batch."""

import pytest
import torch
from transformers import T5Config

from modeling_t5 import T5EncoderModel

SIZES = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 32, "dropout_rate": 0.0}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_mask_of_one_row_is_that_mask_in_each_row(implementation):
    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(**SIZES))
    model.set_attn_implementation(implementation)
    ids, mask = torch.randint(2, 32, (3, 3)), torch.tensor([[1, 1, 0]])
    found, expected = (model(ids, attention_mask=m).last_hidden_state for m in (mask, mask.expand(3, 3)))
    assert torch.equal(found, expected)
