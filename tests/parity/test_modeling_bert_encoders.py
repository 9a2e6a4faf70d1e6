"""ModernBERT and EuroBERT by configuration: logits and gradients of the originals in float64, and back."""

import contextlib

import pytest
import torch
import transformers
from torch import nn

from lm_experiments_tools.attention.kernels import blocks, call
from lm_experiments_tools.attention.kernels.call import choose, force_backend
from lm_experiments_tools.errors import UserError
from modeling_bert import BertConfig, BertForMaskedLM
from modeling_bert.conversion import from_original, to_original
from tests.helpers.packed_rows import packed_rows

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
MODERNBERT = {
    "published": {"local_attention": 6},
    "with every bias": {**BIASES, "local_attention": 4, "norm_bias": True, "classifier_bias": True},
    "no bias, untied": {"local_attention": 10, "decoder_bias": False, "tie_word_embeddings": False},
    "all global, SiLU": {
        "layer_types": ["full_attention"] * 4, "hidden_activation": "silu", "classifier_activation": "silu",
    },
    "local first": {"layer_types": ["sliding_attention", "full_attention"] * 2, "local_attention": 5},
}  # fmt: skip
EUROBERT = {
    "heads of their own": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one group, biases, tied": {"num_key_value_heads": 1, **BIASES, "tie_word_embeddings": True},
}
ORIGINALS = [("ModernBert", name) for name in MODERNBERT] + [("EuroBert", name) for name in EUROBERT]


@contextlib.contextmanager
def in_double():
    """transformers computes rotations, RMSNorm and softmax in float32; here float32 is float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def original(family, name):
    settings = {**SIZES, **(MODERNBERT if family == "ModernBert" else EUROBERT)[name]}
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "sdpa"
    with in_double():
        model = getattr(transformers, f"{family}ForMaskedLM")(config).double().eval()
    for parameter in model.parameters():  # norms and biases too
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch():
    ids = torch.randint(3, 61, (3, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    mask[2, 5:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def labels_of(ids):
    return ids.masked_fill(ids % 3 > 0, -100)


def named_gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare_gradients(ours, theirs_model):
    """Gradients as a state dict of the original: converted back by the code that converts weights."""
    expected = named_gradients(theirs_model)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    found = dict(to_original(ours, theirs_model.config.model_type).named_parameters())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-8, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("attention", "fast"), [("eager", False), ("sdpa", False), ("sdpa", True), ("block_sparse", False)]
)
@pytest.mark.parametrize(("family", "name"), ORIGINALS)
def test_logits_and_gradients_are_the_originals(family, name, attention, fast):
    theirs = original(family, name)
    ours = from_original(theirs.config.to_dict(), theirs.state_dict())
    assert ours.config.is_variant
    ours.set_attn_implementation(attention)
    ours.use_fast_step(fast)
    ours.train()
    inputs, labels = batch(), labels_of(batch()["input_ids"])
    real = inputs["attention_mask"].bool()
    labels = labels.masked_fill(~real, -100)
    with in_double():
        expected = theirs(**inputs, labels=labels)
        expected.loss.backward()
    found = ours(**inputs, labels=labels)
    torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-10, atol=1e-10)
    found.loss.backward()
    compare_gradients(ours, theirs)


@pytest.mark.parametrize("attention", ["sdpa", "blocks"])
@pytest.mark.parametrize(("family", "name"), [("ModernBert", "published"), ("EuroBert", "grouped queries")])
def test_documents_of_packed_rows_are_as_the_original_has_them_alone(family, name, attention):
    theirs = original(family, name)
    ours = from_original(theirs.config.to_dict(), theirs.state_dict()).train()
    ours.set_attn_implementation("sdpa" if attention == "sdpa" else "block_sparse")
    rows, documents = packed_rows(lowest=3)
    segments = rows["segment_ids"]
    labels = labels_of(rows["input_ids"]).masked_fill(segments == 0, -100)
    with force_backend("blocks") if attention == "blocks" else contextlib.nullcontext():
        found = ours(input_ids=rows["input_ids"], segment_ids=segments, labels=labels)
        (found.loss * (labels != -100).sum()).backward()
    for row, number, document in documents:
        place = row, segments[row] == number
        with in_double():
            alone = theirs(input_ids=document)
            nn.functional.cross_entropy(alone.logits[0], labels[place], reduction="sum").backward()
        torch.testing.assert_close(found.logits[place], alone.logits[0], rtol=1e-10, atol=1e-10)
    compare_gradients(ours, theirs)


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("window", [31, 128])
def test_a_layout_of_blocks_holds_the_window(window, is_decoder, monkeypatch):
    """Long rows, where "block_sparse" skips blocks on a CPU: PyTorch's attention under a mask written here."""
    settings = {**SIZES, "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "local_attention": window}
    settings |= {"pre_layer_norm": True, "position_embedding_type": "none", "is_decoder": is_decoder}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**settings)).double().eval()
    layer, seen = model.bert.encoder.layer[0].attention.self, []
    layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    distance = torch.arange(500)[:, None] - torch.arange(500)
    allowed = (distance.abs() <= window // 2) & ((distance >= 0) | (not is_decoder))
    chosen = []
    monkeypatch.setattr(call, "choose", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    for attention in ("eager", "sdpa", "block_sparse"):
        model.set_attn_implementation(attention)
        model(input_ids=torch.arange(500)[None] % 61)
        x, found = seen.pop()
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
        expected = nn.functional.scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2).flatten(2)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert chosen == [blocks]


@pytest.mark.parametrize(("family", "name"), ORIGINALS)
def test_weights_and_configuration_survive_both_ways(family, name, tmp_path):
    theirs = original(family, name)
    ours = from_original(theirs.config.to_dict(), theirs.state_dict())
    ours.save_pretrained(tmp_path)
    read = BertForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64)
    with in_double():
        again = to_original(read, theirs.config.model_type)
    assert again.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, theirs.state_dict()[key]) for key, weight in again.state_dict().items())
    with in_double():
        assert torch.equal(again(**batch()).logits, theirs(**batch()).logits)


def test_what_a_model_cannot_express_is_one_sentence():
    theirs = original("ModernBert", "published")
    ours = from_original(theirs.config.to_dict(), theirs.state_dict())
    with pytest.raises(UserError, match=r"eurobert cannot express .*embedding_norm=True.*layer_types="):
        to_original(ours, "eurobert")
    ours.config.is_decoder = True
    with pytest.raises(UserError, match="modernbert cannot express is_decoder=True"):
        to_original(ours, "modernbert")
    for change, message in (
        ({"mlp_dropout": 0.1}, "set them to 0"),
        ({"classifier_activation": "relu"}, "one hidden_act"),
        ({"hidden_size": 64}, "The weights do not fit config.json of this modernbert"),
        ({"model_type": "bert"}, "'bert' is none of modernbert, eurobert"),
    ):
        with pytest.raises(UserError, match=message):
            from_original({**theirs.config.to_dict(), **change}, theirs.state_dict())
