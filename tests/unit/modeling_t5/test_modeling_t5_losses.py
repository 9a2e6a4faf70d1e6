"""Numbers of modeling_t5 that could go wrong: float16 that overflows, and a loss whose logits are never whole."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.models.speed import speed_up
from modeling_t5 import (
    T5Config,
    T5EncoderForSequenceClassification,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
    losses,
)
from modeling_t5.losses import chunked_token_loss, token_loss

SIZES = {
    "vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip


def make(**settings):
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**{**SIZES, **settings})).eval()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 50, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1)}


SCALED = {"wi": 3e3, "wo": 3e5, "q": 1e6, "o": 1e5}


@torch.no_grad()
def scale(model, part):
    for name, parameter in model.named_parameters():
        if name.rsplit(".", 2)[-2].startswith(part):
            parameter.mul_(SCALED[part]).clamp_(-6e4, 6e4)  # what a float16 checkpoint can hold


@pytest.mark.parametrize("part", SCALED)
@pytest.mark.parametrize(
    ("implementation", "how"),
    [("eager", "weights"), ("sdpa", "weights"), ("block_sparse", "weights"), ("sdpa", "autocast")],
)
def test_weights_scaled_to_overflow_float16_give_finite_losses_and_gradients(part, implementation, how):
    model = make(attn_implementation=implementation)
    scale(model, part)
    if how == "weights":
        model.half()
    with torch.autocast("cpu", dtype=torch.float16, enabled=how == "autocast"):
        outputs = model(**batch())
    assert outputs.loss.isfinite() and outputs.logits.isfinite().all()
    outputs.loss.backward()
    assert all(p.grad is None or not p.grad.isnan().any() for p in model.parameters())


def test_ordinary_weights_in_float16_are_the_float32_model():
    model = make()
    wanted = model(**batch()).logits
    torch.testing.assert_close(model.half()(**batch()).logits.float(), wanted, rtol=0.02, atol=0.02)


def test_parts_stay_in_float32_where_the_configuration_says_so(tmp_path):
    make(keep_in_fp32=["wo", "relative_attention_bias"]).save_pretrained(tmp_path)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {n for n in model.state_dict() if n.endswith(("wo.weight", "relative_attention_bias.weight"))}
    assert model(**batch()).loss.isfinite()
    everywhere = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16, keep_in_fp32=[])
    assert {parameter.dtype for parameter in everywhere.parameters()} == {torch.float16}


def test_residual_in_float32_is_nearer_to_the_float32_model():
    wanted = make(num_layers=6)(**batch())
    distance = {}
    for is_kept in (False, True):
        model = make(num_layers=6, fp32_residual=is_kept).bfloat16()
        outputs = model(**batch(), output_hidden_states=True)
        assert outputs.encoder_hidden_states[1].dtype == (torch.float32 if is_kept else torch.bfloat16)
        assert outputs.logits.dtype == torch.bfloat16
        distance[is_kept] = (outputs.encoder_last_hidden_state.float() - wanted.encoder_last_hidden_state).norm()
    assert distance[True] < 0.9 * distance[False]


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_chunked_loss_and_its_gradients_are_those_of_the_whole(chunk_size):
    extras = {"z_loss": 1e-2, "label_smoothing": 0.1}
    whole, chunked = make(**extras).double(), make(**extras, cross_entropy_chunk_size=chunk_size).double()
    chunked.train()
    inputs = batch()
    inputs["labels"][0, 3:] = -100
    wanted, got = whole(**inputs), chunked(**inputs)
    assert got.logits is None
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-12, atol=1e-12)
    wanted.loss.backward()
    got.loss.backward()
    parameters = dict(chunked.named_parameters())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-10, atol=1e-12)
    asked = chunked(**inputs, return_logits=True)
    assert torch.equal(asked.logits, wanted.logits) and torch.equal(asked.loss, wanted.loss)
    chunked.eval()  # metrics are made of logits
    assert torch.equal(chunked(**inputs).logits, wanted.logits)
    assert chunked(**inputs, return_logits=False).logits is None
    del inputs["labels"]
    assert chunked(**inputs, decoder_input_ids=inputs["input_ids"]).logits.shape == (2, 9, 50)


@pytest.mark.parametrize("extras", [{}, {"z_loss": 1e-2}, {"z_loss": 1e-3, "label_smoothing": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_made_in_the_forward_pass_is_autograds(dtype, extras, monkeypatch):
    monkeypatch.setattr(losses, "BLOCK", 3000)  # three rows at a time
    head = torch.nn.Linear(16, 1000, bias=False).to(torch.promote_types(dtype, torch.float32))
    torch.nn.init.normal_(head.weight)
    states = torch.randn(50, 16, dtype=head.weight.dtype, requires_grad=True)
    labels = torch.randint(0, 1000, (50,)).masked_fill(torch.arange(50) % 7 == 0, -100)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert losses.replaces_head(head, states)
        loss = chunked_token_loss(states, head, labels, 16, **extras)
        wanted = token_loss(head(states), labels, **extras)
    got = torch.autograd.grad(loss / 3, (states, head.weight))
    gradients = torch.autograd.grad(wanted / 3, (states, head.weight))
    if dtype == torch.bfloat16:
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        for one, other in zip(got, gradients, strict=True):
            assert F.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.9999
    else:
        tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close((loss, *got), (wanted, *gradients), **tolerance)


@pytest.mark.parametrize(("gib", "least", "most"), [(80, 128 * 114, 25_000), (24, 5000, 7000), (4, 2048, 2048)])
def test_chunks_of_the_loss_grow_with_the_memory_of_a_gpu(monkeypatch, gib, least, most):
    """All 14,592 target tokens of t5-v1_1-base's step at once on 80 GB; CPUs and small GPUs keep their number."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * 10**9))
    assert least <= losses.default_chunk(torch.device("cuda", 0), 2 * 32128) <= most
    assert losses.default_chunk(torch.device("cpu"), 2 * 32128) == 2048


def test_speed_off_does_not_compile_the_loss(monkeypatch):
    compiled = []
    monkeypatch.setattr(losses, "has_kernels", lambda device: True)
    monkeypatch.setattr(losses, "_compiled", lambda: compiled.append(True) or losses.loss_and_gradient)
    found = []
    for speed in ("auto", "off"):
        model = make(cross_entropy_chunk_size=64).train()
        speed_up(model, FinetuningArgs(model_type="encoder-decoder", model_cfg="t5-small", speed=speed))
        found.append(model(**batch()).loss)
    assert compiled == [True]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("extras", [(0.0, 0.0), (1e-2, 0.0), (1e-3, 0.1)])
def test_gradient_that_a_gpu_makes_in_the_forward_pass_is_autograds(extras):
    logits = torch.randn(50, 1000, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 1000, (50,)).masked_fill(torch.arange(50) % 7 == 0, -100)
    wanted = token_loss(logits, labels, *extras)
    torch.testing.assert_close(
        losses.loss_and_gradient(logits.detach(), labels, *extras),
        (wanted, torch.autograd.grad(wanted, logits)[0]), rtol=1e-10, atol=1e-10,
    )  # fmt: skip


def test_without_tokens_the_loss_and_its_gradients_are_zero():
    states, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(7, 4, requires_grad=True)
    loss = losses.linear_token_loss(states, weight, torch.zeros(0, dtype=torch.long), 8)
    loss.backward()
    assert loss == 0 and states.grad.shape == (0, 4) and not weight.grad.any()


@pytest.mark.parametrize("label", [-1, 7])
def test_labels_that_are_no_words_are_refused_as_by_torch(label):
    states, weight = torch.zeros(2, 4), torch.ones(7, 4)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        losses.linear_token_loss(states, weight, torch.tensor([1, label]), 8)


def test_frozen_and_wrapped_heads_keep_their_way():
    head = torch.nn.Linear(8, 20, bias=False).requires_grad_(False)
    states, labels = torch.randn(5, 8, requires_grad=True), torch.arange(5)
    chunked_token_loss(states, head, labels, 2).backward()
    assert states.grad.abs().sum() > 0 and head.weight.grad is None
    wrapped = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.Tanh())
    torch.testing.assert_close(chunked_token_loss(states, wrapped, labels, 2), token_loss(wrapped(states), labels))


def test_chunked_loss_of_any_head_never_holds_more_than_a_chunk_of_logits():
    head = torch.nn.Linear(8, 1000, bias=False)
    seen = []
    head.register_forward_hook(lambda _, __, logits: seen.append(logits.shape[0]))
    states = torch.randn(50, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        loss = chunked_token_loss(states, head, torch.randint(0, 1000, (50,)), 16)
    loss.backward()
    assert seen == [16, 16, 16, 2] + [2, 16, 16, 16] and max(saved) <= head.weight.numel()


def test_loss_is_its_definition():
    logits = torch.randn(6, 11, dtype=torch.float64)
    labels = torch.tensor([1, 2, -100, 3, 10, 0])
    log_z = logits.exp().sum(1).log()
    total = 0.0
    for row, label in enumerate(labels.tolist()):
        if label >= 0:
            target = torch.full((11,), 0.1 / 11, dtype=torch.float64)
            target[label] += 0.9
            total += (target * (log_z[row] - logits[row])).sum() + 1e-3 * log_z[row] ** 2
    torch.testing.assert_close(token_loss(logits, labels, 1e-3, 0.1), total)
    torch.testing.assert_close(token_loss(logits, labels), F.cross_entropy(logits, labels) * 5)


CLASS_LABELS = {"single": torch.tensor([2, 0]), "multi": torch.tensor([[0.0, 1, 1], [1, 0, 0]])}


@pytest.mark.parametrize("kind", CLASS_LABELS)
@pytest.mark.parametrize("cls", [T5ForSequenceClassification, T5EncoderForSequenceClassification])
def test_losses_of_classes_are_exact_with_weights_of_16_bits(cls, kind):
    torch.manual_seed(0)
    model = cls(T5Config(**SIZES, num_labels=3)).bfloat16()
    ids = batch()["input_ids"]
    ids[:, -1] = 1
    got = model(ids, labels=CLASS_LABELS[kind])
    definition = F.cross_entropy if kind == "single" else F.binary_cross_entropy_with_logits
    assert got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss, definition(got.logits.float(), CLASS_LABELS[kind]))
    if kind == "single":
        assert model(ids, labels=torch.tensor([-100, -100])).loss == 0
