"""Packed rows: each example has the logits and gradients that transformers' T5 gives it alone."""

import pytest
import torch
from transformers import T5Config as HFConfig
from transformers import T5ForConditionalGeneration as HFT5

from lm_experiments_tools.attention.kernels import call
from lm_experiments_tools.attention.kernels.call import AttentionInputs
from modeling_t5 import T5Config, T5ForConditionalGeneration

SIZES = dict(
    vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=3, dropout_rate=0.0, decoder_start_token_id=0,
    relative_attention_num_buckets=8, relative_attention_max_distance=10,
)  # fmt: skip
LENGTHS = [[(5, 3), (4, 2), (2, 4)], [(9, 1), (1, 1)]]  # of the examples of two rows: source, target


@pytest.fixture(scope="module")
def packed():
    """Batch of packed rows [2, 12] and [2, 10], and their examples."""
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.zeros(2, width, dtype=torch.long) for name, width in
            (("input_ids", 12), ("segment_ids", 12), ("decoder_segment_ids", 10))}  # fmt: skip
    rows["labels"] = torch.full((2, 10), -100)
    examples = []
    for row, lengths in enumerate(LENGTHS):
        source_end = target_end = 0
        for number, (source_length, target_length) in enumerate(lengths, 1):
            source = torch.randint(2, 50, (1, source_length), generator=generator)
            target = torch.randint(2, 50, (1, target_length), generator=generator)
            here, there = slice(source_end, source_end + source_length), slice(target_end, target_end + target_length)
            rows["input_ids"][row, here], rows["segment_ids"][row, here] = source[0], number
            rows["labels"][row, there], rows["decoder_segment_ids"][row, there] = target[0], number
            examples.append((row, there, source, target))
            source_end, target_end = here.stop, there.stop
    return rows, examples


def models(**changes):
    torch.manual_seed(1)
    theirs = HFT5(HFConfig(**SIZES)).double().eval()
    ours = T5ForConditionalGeneration(T5Config(**SIZES, **changes)).double().eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "block_sparse"])
def test_each_example_is_as_alone(packed, implementation, is_fast, monkeypatch):
    rows, examples = packed
    theirs, ours = models()
    ours.set_attn_implementation(implementation)
    ours.use_fast_step(is_fast)
    ours.train()
    segments = []

    def select(inputs: AttentionInputs, backend: str) -> tuple:
        segments.append(inputs.spec.segment_ids)
        return original(inputs, backend)

    original = call.select
    monkeypatch.setattr(call, "select", select)
    outputs = ours(**rows)
    assert len(segments) == (6 if implementation == "block_sparse" else 0) and None not in segments
    outputs.loss.backward()
    num_tokens = sum(target.numel() for *_, target in examples)
    for row, there, source, target in examples:
        alone = theirs(input_ids=source, labels=target)
        torch.testing.assert_close(outputs.logits[row, there], alone.logits[0], rtol=1e-10, atol=1e-10)
        (alone.loss * target.numel() / num_tokens).backward()
    own = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "block_sparse"])
@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": "rotary"},
        {"position_embedding_type": "alibi"},
        {"position_embedding_type": "none"},
    ],
    ids=str,
)
@torch.no_grad()
def test_with_other_positions_each_example_is_as_alone(packed, changes, implementation, is_fast):
    rows, examples = packed
    torch.manual_seed(1)
    model = T5ForConditionalGeneration(T5Config(**SIZES, **changes)).eval()
    model.set_attn_implementation(implementation)
    model.use_fast_step(is_fast)
    logits = model(**rows).logits
    for row, there, source, target in examples:
        alone = model(input_ids=source, labels=target).logits[0]
        torch.testing.assert_close(logits[row, there], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sparse_config_cls": "BigBird", "sparse_attention": {"block": 16}}, "blocks of a sparse layout"),
        ({"num_memory_tokens": 2}, "num_memory_tokens=2"),
        ({"num_cdq_heads": 3, "encoder_self_attention_layer": "modeling_t5:T5CDQAttention"}, "num_cdq_heads"),
    ],
)
def test_variants_that_look_at_the_whole_row_refuse(packed, changes, words):
    model = T5ForConditionalGeneration(T5Config(**SIZES, **changes))
    with pytest.raises(ValueError, match=words):
        model(**packed[0])


def test_a_mask_beside_segments_counts(packed):
    rows, _ = packed
    _, ours = models()
    hidden = rows["segment_ids"].clone()
    hidden[0, 3] = 0  # a token of the first example
    mask = torch.ones_like(hidden)
    mask[0, 3] = 0
    expected = ours(**{**rows, "segment_ids": hidden}).logits
    assert torch.equal(ours(**rows, attention_mask=mask).logits, expected)
    assert not torch.equal(ours(**rows).logits, expected)
    with pytest.raises(ValueError, match="give one of the two"):
        ours(**rows, attention_mask=mask[:, None].expand(2, 12, 12))
