"""Our BERT with unusual input: the right result, or one sentence."""

import pytest
import torch
import transformers

from lm_experiments_tools.attention.kernels.call import force_backend
from lm_experiments_tools.attention.positions import PositionScheme
from modeling_bert import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37,
    "max_position_embeddings": 24,
}  # fmt: skip
SPARSE = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 8}}
KINDS = ["absolute", "relative_key", "relative_key_query", "relative_attention_bias", "rotary", "alibi", "none"]
WAYS = [{"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}, SPARSE]
each_kind_in_two_ways = pytest.mark.parametrize(
    ("kind", "way"), [(kind, WAYS[(i + shift) % 3]) for shift in (0, 1) for i, kind in enumerate(KINDS)]
)


@pytest.fixture(autouse=True)
def sparse_is_sparse():
    """Inputs as short as here take SDPA by themselves, which is not what serves long ones."""
    with force_backend("blocks"):
        yield


def model(cls=BertModel, **settings):
    torch.manual_seed(0)
    return cls(BertConfig(**SIZES, **settings)).eval()


def ids(length, rows=2):
    return torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_positions(kind):
    knows_more = kind not in ("absolute", "relative_key", "relative_key_query")
    bert = model(position_embedding_type=kind)
    assert bert(ids(24)).last_hidden_state.isfinite().all()
    if knows_more:
        assert bert(ids(200)).last_hidden_state.isfinite().all()
    else:
        with pytest.raises(ValueError, match=f"^25 tokens are more than max_position_embeddings=24, and {kind} "):
            bert(ids(25))


@each_kind_in_two_ways
def test_a_row_of_padding_is_finite_and_changes_no_other(kind, way):
    bert = model(BertForMaskedLM, position_embedding_type=kind, **way)
    tokens = ids(20, rows=3)
    mask = torch.ones_like(tokens)
    mask[1] = 0
    mask[2, 1:] = 0
    outputs = bert(tokens, mask, labels=tokens)
    outputs.loss.backward()
    assert outputs.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in bert.parameters())
    torch.testing.assert_close(bert(tokens[:1]).logits, outputs.logits[:1])
    torch.testing.assert_close(bert(tokens[2:, :1]).logits, outputs.logits[2:, :1])


@each_kind_in_two_ways
def test_what_is_padding_does_not_matter_and_one_token_is_a_sequence(kind, way):
    bert = model(position_embedding_type=kind, **way)
    tokens = ids(19)
    mask = torch.ones_like(tokens)
    mask[:, 12:] = 0
    other = torch.where(mask == 1, tokens, ids(19, rows=4)[2:])
    found, expected = (bert(x, mask).last_hidden_state[:, :12] for x in (other, tokens))
    torch.testing.assert_close(found, expected)
    alone = bert(tokens[:, :1])
    assert alone.last_hidden_state.shape == (2, 1, 32) and alone.last_hidden_state.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_masks_of_queries_by_keys_are_understood(way):
    bert = model(position_embedding_type="relative_attention_bias", **way)
    tokens = ids(16)
    padding = (torch.arange(16) < torch.tensor([[16], [9]])).long()
    expected = bert(tokens, padding).last_hidden_state
    for mask in (padding[:, None].expand(-1, 16, -1), padding[:, None, None].expand(-1, 4, 16, -1).bool()):
        found = bert(tokens, mask).last_hidden_state
        torch.testing.assert_close(found, expected)
    causal = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    changed = torch.cat([tokens[:, :10], ids(6)], dim=1)
    first, second = (bert(x, causal).last_hidden_state[:, :10] for x in (tokens, changed))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        ({"position_embedding_type": "rope"}, "'rope' is none of absolute, .*rotary"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"attention_probs_dropout_prob": -1.0}, "must be at least 0 and below 1"),
        ({"hidden_act": "foo"}, "hidden_act='foo' names no activation"),
        ({"last_layer_norm": False}, "goes with pre_layer_norm=True"),
        ({"rotary_dim": 4}, 'rotary_dim=4 is of position_embedding_type "rotary"'),
        ({"position_embedding_type": "nowhere:Mine"}, "'nowhere:Mine': module nowhere is not imported"),
        ({"position_embedding_type": "torch.nn:Linear"}, "not a subclass of .*PositionScheme"),
        ({"add_cross_attention": True}, "for decoders, but this BERT is an encoder"),
        ({"position_embedding_type": "rotary", "rotary_dim": 3}, "rotary_dim=3 must be an even number"),
        ({**SPARSE, "sparse_attention": {"num_heads": 3}}, "num_heads=3, but the model 4"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        BertModel(BertConfig(**{**SIZES, **settings}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": ids(8), "inputs_embeds": torch.zeros(2, 8, 32)}, "either input_ids or inputs_embeds"),
        ({"input_ids": ids(8), "attention_mask": torch.ones(2, 7)}, r"\[2, 7\]; it must be \[2, 8\]"),
        ({"input_ids": ids(8), "attention_mask": torch.zeros(2, 1, 8, 8)}, r"torch.float32 .* bool or integer"),
        ({"input_ids": ids(8), "position_ids": torch.arange(8)[None]}, "position_embedding_type is rotary"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_are_one_sentence(inputs, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        model(position_embedding_type="rotary")(**inputs)
    assert "\n" not in str(error.value)


def test_a_configuration_of_transformers_is_taken_and_of_another_kind_refused():
    """Programs make it by AutoConfig."""
    config = transformers.BertConfig(**SIZES, num_labels=3)
    taken = BertForSequenceClassification(config=config)
    assert type(taken.config) is BertConfig and taken.bert.config is taken.config
    assert taken.classifier.out_features == 3 and taken.config.hidden_size == SIZES["hidden_size"]
    with pytest.raises(ValueError, match=r"needs a BertConfig, of modeling_bert or transformers, not .*T5Config"):
        BertModel(transformers.T5Config())


class Window(PositionScheme):
    def __init__(self, config, bidirectional):
        super().__init__()
        self.width = torch.nn.Parameter(torch.empty(config.num_attention_heads))

    def reset_parameters(self):
        torch.nn.init.constant_(self.width, 0.5)

    def bias(self, query_length, key_length, offset=0, device=None):
        places = torch.arange(key_length, device=device)
        return -self.width[None, :, None, None] * (places - places[:, None]).abs()


@pytest.mark.parametrize("way", WAYS)
def test_a_position_scheme_of_the_users_own(way, tmp_path):
    mine = model(position_embedding_type=f"{__name__}:Window", **way)
    alibi = model(position_embedding_type="alibi", **way)
    mine.load_state_dict(alibi.state_dict(), strict=False)
    mine.encoder.position.width.data.copy_(torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    found, expected = (bert(ids(20)).last_hidden_state for bert in (mine, alibi))
    torch.testing.assert_close(found, expected)
    found.pow(3).sum().backward()
    assert mine.encoder.position.width.grad.all()
    mine.save_pretrained(tmp_path / "saved")
    loaded = BertModel.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(loaded(ids(20)).last_hidden_state, expected)
