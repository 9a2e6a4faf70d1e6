"""BERT's variants against models of transformers that are built otherwise and compute the same, in float64.

| variant | oracle |
|---|---|
| relative_attention_bias, alibi, none, sparse | BERT without positions, under a mask [heads, L, L] with the bias |
| rotary | RoFormer, which pairs neighbouring features: queries' and keys' are reordered |
| pre_layer_norm, last_layer_norm | RoBERTa-PreLayerNorm |
| relative_key, relative_key_query | values and gradients of transformers 4, which had them, and the papers' formulas |
"""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from lm_experiments_tools.attention import AttentionSpec, get_sparsity_config
from tests.helpers import ROOT

GOLDEN = ROOT / "tests" / "golden" / "bert_relative_key.json"
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37,
    "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
LENGTH = 21
SHARED_TABLE = "bert.encoder.position.weight"


def batch():
    ids = torch.randint(1, 99, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def labels():
    ids = batch()["input_ids"]
    return ids.masked_fill(ids % 3 > 0, -100)


def ours_like(theirs, rename, **variant):
    """Our masked-word model with the weights of `theirs`, whose names `rename` turns into ours (or into None)."""
    from modeling_bert import BertConfig, BertForMaskedLM

    torch.manual_seed(5)
    variant = {"attn_implementation": "eager", **variant}
    ours = BertForMaskedLM(BertConfig(**SIZES, **variant)).double().eval()
    weights = {rename(name): value for name, value in theirs.state_dict().items()}
    weights.pop(None, None)
    report = ours.load_state_dict(weights, strict=False)
    assert report.unexpected_keys == [] and set(report.missing_keys) <= {SHARED_TABLE}
    return ours


def compare(ours, theirs, rename, their_inputs, reorder=None):
    """Logits, loss and the gradients of all parameters that both have."""
    found = ours(**batch(), labels=labels())
    expected = theirs(**their_inputs, labels=labels())
    real = batch()["attention_mask"].bool()
    torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-10, atol=1e-10)
    found.loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        if rename(name) is not None:
            gradient = parameter.grad if reorder is None else reorder(name, parameter.grad)
            torch.testing.assert_close(gradients[rename(name)], gradient, rtol=1e-10, atol=1e-10, msg=name)
    return found.loss, gradients


def without_positions(name):
    return None if "position_embeddings" in name else name


def bert_under_mask(mask):
    """(transformers' BERT without positions, inputs with padding and what `mask` [heads, L, L] adds to scores)."""
    torch.manual_seed(3)
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, attn_implementation="eager")).double()
    theirs.bert.embeddings.position_embeddings.weight.data.zero_()
    inputs = batch()
    padding = (1.0 - inputs["attention_mask"].double()) * -1e30
    return theirs.eval(), {**inputs, "attention_mask": mask[None] + padding[:, None, None]}


def distances():
    places = torch.arange(LENGTH)
    return places[None] - places[:, None]


def alibi_mask():
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)  # the paper's, for 4 heads
    return -slopes[:, None, None] * distances().abs()


def t5_table_and_mask(weight):
    """The matrix that transformers' T5 makes of a table [8 buckets, 4 heads]; gradients reach the table."""
    settings = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    config = transformers.T5Config(d_model=32, num_heads=4, d_kv=8, num_layers=1, vocab_size=9, **settings)
    attention = transformers.T5EncoderModel(config).double().encoder.block[0].layer[0].SelfAttention
    attention.relative_attention_bias.weight.data.copy_(weight)
    bias = attention.compute_bias(LENGTH, LENGTH, device=torch.device("cpu"))
    return attention.relative_attention_bias.weight, bias[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "block_sparse"])
@pytest.mark.parametrize("kind", ["none", "alibi"])
def test_fixed_schemes_are_a_bias_of_scores(kind, attention):
    mask = alibi_mask() if kind == "alibi" else torch.zeros(4, LENGTH, LENGTH, dtype=torch.float64)
    theirs, inputs = bert_under_mask(mask)
    ours = ours_like(theirs, without_positions, position_embedding_type=kind, attn_implementation=attention)
    compare(ours, theirs, without_positions, inputs)


T5 = {
    "position_embedding_type": "relative_attention_bias", "relative_attention_num_buckets": 8,
    "relative_last_bucket_distance": 16,
}  # fmt: skip
DENSE = {"sparse_config_cls": "deepspeed.ops.sparse_attention:DenseSparsityConfig", "sparse_attention": {"block": 4}}
BIGBIRD = {
    "sparse_config_cls": "BigBirdSparsityConfig",
    "sparse_attention": {"num_heads": 4, "block": 4, "different_layout_per_head": True},
}


@pytest.mark.parametrize(
    "attention", [*({"attn_implementation": n} for n in ("eager", "sdpa", "block_sparse")), DENSE]
)
def test_one_t5_table_is_trained_by_all_layers_however_attention_is_computed(attention):
    """In t5-experiments the dense table was never read and the sparse one never trained."""
    table = torch.linspace(-2, 2, 32, dtype=torch.float64).view(8, 4)
    their_table, mask = t5_table_and_mask(table)
    theirs, inputs = bert_under_mask(mask)
    ours = ours_like(theirs, without_positions, **T5, **attention)
    ours.bert.encoder.position.weight.data.copy_(table)
    _, gradients = compare(ours, theirs, without_positions, inputs)
    assert gradients[SHARED_TABLE].abs().max() > 1e-3
    torch.testing.assert_close(gradients[SHARED_TABLE], their_table.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_table", [False, True])
def test_a_layout_is_attention_under_its_blocks_and_its_table_is_trained(with_table):
    """Each layer draws random blocks of its own, so the layers have masks of their own."""
    from modeling_bert.layers import BertSelfAttention

    table = torch.linspace(-2, 2, 32, dtype=torch.float64).view(8, 4)
    their_table, bias = t5_table_and_mask(table)
    bias = bias if with_table else torch.zeros_like(bias)
    theirs, inputs = bert_under_mask(torch.zeros(4, LENGTH, LENGTH, dtype=torch.float64))
    for number, layer in enumerate(theirs.bert.encoder.layer):
        layout = get_sparsity_config("BigBird", 4, block=4, different_layout_per_head=True, layer_idx=number)
        blocks = layout.make_layout(24).bool().repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :LENGTH, :LENGTH]
        extra = (bias + torch.zeros_like(bias).masked_fill(~blocks, -1e30))[None]
        layer.attention.self.register_forward_pre_hook(
            lambda module, args, kwargs, extra=extra: (
                args, {**kwargs, "attention_mask": kwargs["attention_mask"] + extra}
            ),
            with_kwargs=True,
        )  # fmt: skip
    ours = ours_like(
        theirs, without_positions, **BIGBIRD, **(T5 if with_table else {"position_embedding_type": "none"})
    )
    layouts = [module.layout for module in ours.modules() if isinstance(module, BertSelfAttention)]
    assert not torch.equal(layouts[0].make_layout(24), layouts[1].make_layout(24))
    if with_table:
        ours.bert.encoder.position.weight.data.copy_(table)
    _, gradients = compare(ours, theirs, without_positions, inputs)
    if with_table:
        torch.testing.assert_close(gradients[SHARED_TABLE], their_table.grad, rtol=1e-10, atol=1e-12)
        assert gradients[SHARED_TABLE].abs().max() > 1e-3


def test_rotary_positions_are_roformers():
    torch.manual_seed(3)
    config = transformers.RoFormerConfig(**SIZES, embedding_size=32, rotary_value=False, attn_implementation="eager")
    theirs = transformers.RoFormerForMaskedLM(config).double().eval()
    table = theirs.roformer.encoder.embed_positions.weight
    angles = np.arange(table.shape[0])[:, None] / 10000 ** (np.arange(0, 8, 2) / 8)  # of heads of 8 features
    table.data.copy_(torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1)))  # it is in float32
    pairs_apart = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)])
    order = (torch.arange(4)[:, None] * 8 + pairs_apart).flatten()

    def rename(name):
        return None if "embed_positions" in name else name.replace("roformer.", "bert.")

    def reorder(name, value):
        return value[order] if "self.query" in name or "self.key" in name else value

    ours = ours_like(theirs, rename, position_embedding_type="rotary")
    for name, value in theirs.state_dict().items():
        if rename(name) is not None:
            ours.state_dict()[rename(name)].copy_(reorder(name, value))
    compare(ours, theirs, rename, batch(), reorder)


def test_part_of_a_head_turns_by_the_base_that_is_set():
    """Pairs of features as complex numbers, turned by multiplication (Su et al. 2021, equation 12)."""
    from modeling_bert import BertConfig, BertModel

    settings = {**SIZES, "position_embedding_type": "rotary", "rotary_dim": 4, "rotary_base": 500}
    model = BertModel(BertConfig(**settings, attn_implementation="eager")).double().eval()
    layer = model.encoder.layer[0].attention.self
    x = torch.randn(1, LENGTH, 32, dtype=torch.float64)
    q, k = (part(x).view(1, LENGTH, 4, 8).transpose(1, 2) for part in (layer.query, layer.key))
    angles = torch.arange(LENGTH)[:, None] * 500 ** -torch.tensor([0.0, 0.5], dtype=torch.float64)
    turned = []
    for part in (q, k):
        as_complex = torch.complex(part[..., :2].contiguous(), part[..., 2:4].contiguous())
        moved = as_complex * torch.polar(torch.ones_like(angles), angles)
        turned.append(torch.cat([moved.real, moved.imag, part[..., 4:]], dim=-1))
    expected = (turned[0] @ turned[1].transpose(-1, -2) / math.sqrt(8)).softmax(-1)
    _, weights = layer(x, None, AttentionSpec(), model.encoder.position, 0, True)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("last", [True, False])
def test_pre_layer_norm_is_robertas(last):
    torch.manual_seed(3)
    config = transformers.RobertaPreLayerNormConfig(
        **SIZES, type_vocab_size=2, pad_token_id=0, layer_norm_eps=1e-12, attn_implementation="eager"
    )
    theirs = transformers.RobertaPreLayerNormForMaskedLM(config).double().eval()
    theirs.roberta_prelayernorm.embeddings.position_embeddings.padding_idx = None  # row 0 is a position to BERT
    for name, parameter in theirs.named_parameters():
        if "LayerNorm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    if not last:
        theirs.roberta_prelayernorm.LayerNorm = nn.Identity()
    names = {
        "roberta_prelayernorm.LayerNorm": "bert.encoder.last_layer_ln", "roberta_prelayernorm.": "bert.",
        "attention.LayerNorm": "pre_attention_ln", "intermediate.LayerNorm": "post_attention_ln",
        "lm_head.dense": "cls.predictions.transform.dense", "lm_head.decoder": "cls.predictions.decoder",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm", "lm_head.bias": "cls.predictions.bias",
    }  # fmt: skip

    def rename(name):
        for theirs_is, ours_is in names.items():
            name = name.replace(theirs_is, ours_is)
        return name

    ours = ours_like(theirs, rename, pre_layer_norm=True, last_layer_norm=last)
    compare(ours, theirs, rename, {**batch(), "position_ids": torch.arange(LENGTH)[None]})
    outputs = ours.bert(**batch(), output_hidden_states=True)
    assert len(outputs.hidden_states) == 3 and torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)


def fill(model):
    """Weights that depend on names and places alone, so that another process has the same."""
    for name, parameter in model.named_parameters():
        places = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
        wave = torch.sin(places * 0.7 + sum(map(ord, name)) % 97) * 0.3
        parameter.data.copy_(wave + 1 if "LayerNorm.weight" in name else wave)


def summary(model):
    """Loss, some logits, and gradients by sums over their rows: what is stored and compared."""
    fill(model)
    inputs = batch()
    outputs = model(**inputs, labels=labels())
    outputs.loss.backward()
    gradients = {
        name: parameter.grad.sum(0).flatten()[:8].tolist()
        for name, parameter in model.named_parameters()
        if "position_embeddings" not in name
    }
    distances = [layer.attention.self.distance_embedding.weight.grad for layer in model.bert.encoder.layer]
    return {
        "loss": outputs.loss.item(),
        "logits": outputs.logits[inputs["attention_mask"].bool()][::5, ::9].tolist(),
        "gradients": gradients,
        "distances": [gradient.sum(1).tolist() for gradient in distances],
    }


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_relative_keys_are_those_of_transformers_4(kind):
    """Stored values; `PYTHONPATH=FOLDER_WITH_TRANSFORMERS_4 python -m tests.parity.test_modeling_bert_variants`
    makes them (here with 4.57.1)."""
    from modeling_bert import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, position_embedding_type=kind, attn_implementation="sdpa")
    found = summary(BertForMaskedLM(config).double().eval())
    expected = json.loads(GOLDEN.read_text())[kind]
    assert found["gradients"].keys() == expected["gradients"].keys()
    for part in ("loss", "logits", "distances"):
        np.testing.assert_allclose(found[part], expected[part], rtol=1e-9, atol=1e-9)
    for name, values in expected["gradients"].items():
        np.testing.assert_allclose(found["gradients"][name], values, rtol=1e-9, atol=1e-9, err_msg=name)


if __name__ == "__main__":
    made = {}
    for kind in ("relative_key", "relative_key_query"):
        config = transformers.BertConfig(**SIZES, position_embedding_type=kind, attn_implementation="eager")
        made[kind] = summary(transformers.BertForMaskedLM(config).double().eval())
    GOLDEN.write_text(json.dumps(made))
    print(f"{GOLDEN.name}, by transformers {transformers.__version__}")
