"""block_sparse_attention within torch.compile: one operator of the graph, the same numbers, at any length."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import modeling_bert
import modeling_t5
from lm_experiments_tools.attention import Layout, T5Bias, block_sparse_attention, huggingface
from lm_experiments_tools.attention.kernels import call, operator
from lm_experiments_tools.attention.layouts import LocalSlidingWindowSparsityConfig
from lm_experiments_tools.errors import UserError
from tests.helpers.attention_cases import Case, errors, tensors


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    counters.clear()


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        (Case("bigbird", padding=True, segments=True, compiled=True), "blocks"),
        (Case("random", key_length=45, bias="alibi", causal=True, value_dim=5, compiled=True), "auto"),
        (Case("dense", bias="alibi", compiled=True), "blocks"),
        (Case("dense", bias="matrix", dropout_p=0.25, compiled=True), "blocks"),
        (Case("dense", bias="matrix", padding=True, segments=True, compiled=True), "sdpa"),
    ],
    ids=lambda x: getattr(x, "bias", x),
)
def test_a_compiled_call_is_exact(case, backend):
    """Dropout included, whose weights are the same in both passes."""
    assert max(errors(case, backend).values()) < 1e-10


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_operator_is_what_it_tells_pytorch(is_packed):
    q, k, v = tensors(2, 2, 20, 8, dtype=torch.float32)
    (packed,) = tensors(2, 20, 48, count=1, dtype=torch.float32) if is_packed else [None]
    if is_packed:
        q, k, v = packed.detach().unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    (weight,) = tensors(32, 2, count=1, dtype=torch.float32)
    layout = call.number_of_layout(None)
    settings = layout, "blocks", 1, [1, 32, 128], False, None, 0.0
    torch.library.opcheck(operator.operator, (q, k, v, weight, *[None] * 5, packed, *settings))


class Backward:
    """A backend of torch.compile that keeps the operations of backward passes."""

    def __init__(self) -> None:
        self.operations: list[object] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        return aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=self.keep)(graph, inputs)

    def keep(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.operations += [node.target for node in graph.graph.nodes if node.op == "call_function"]
        return graph


@pytest.mark.parametrize(
    ("name", "num_operators", "num_joined", "difference"),
    [("bert block_sparse alibi", 1, 0, 0.0), ("t5 block_sparse", 2, 1, 1e-6)],
)
def test_the_gradient_of_a_product_for_queries_keys_and_values_is_one_tensor(
    name, num_operators, num_joined, difference
):
    """But for T5's cross-attention, which a graph gives to PyTorch's attention: it joins keys and values."""
    model, inputs = MODELS[name]().train(), {name: torch.randint(2, 64, (2, 24)) for name in ("input_ids", "labels")}
    model.use_fast_step()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with call.force_backend("blocks"):  # which compiled graphs take too
            model(**inputs).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected, backward = gradients(), Backward()
    model.compile(backend=backward)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=difference)
    operators = torch.ops.lm_experiments_tools.block_sparse_attention_backward.default
    assert backward.operations.count(operators) == num_operators
    assert backward.operations.count(torch.ops.aten.cat.default) == num_joined


class Graphs:
    """A backend of torch.compile that counts."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.number += 1
        return graph.forward


@pytest.mark.parametrize("layout", [None, LocalSlidingWindowSparsityConfig(2, block=16)], ids=["dense", "local"])
def test_all_lengths_have_two_graphs(layout):
    (weight,) = tensors(32, 2, count=1, dtype=torch.float32)

    def call(q: Tensor) -> Tensor:
        return block_sparse_attention(2 * q, q, q, layout, T5Bias(weight), causal=True, backend="blocks") + 1

    graphs = Graphs()
    traced = torch.compile(call, backend=graphs)
    for length in (64, 80, 33, 300, 900, 257, 48, 70, 95, 110, 130, 64):
        (q,) = tensors(1, 2, length, 8, count=1, dtype=torch.float32)
        assert torch.equal(traced(q), call(q))
        found, wanted = (torch.autograd.grad(f(q).square().sum(), [q, weight]) for f in (traced, call))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert graphs.number == 2
    assert not counters["graph_break"] and counters["frames"]["total"] == counters["frames"]["ok"]


SIZES = {"vocab_size": 64, "num_heads": 4, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "dropout_rate": 0.0}
BERT_SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 1024,
}  # fmt: skip
BIGBIRD = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 16}}


def t5(implementation: str, **settings: object) -> torch.nn.Module:
    config = modeling_t5.T5Config(**SIZES, num_decoder_layers=1, decoder_start_token_id=0, **settings)
    config._attn_implementation = implementation
    return modeling_t5.T5ForConditionalGeneration(config)


def bert(implementation: str, **settings: object) -> torch.nn.Module:
    config = modeling_bert.BertConfig(**BERT_SIZES, **settings)
    config._attn_implementation = implementation
    return modeling_bert.BertForMaskedLM(config)


MODELS = {
    "t5 eager": lambda: t5("eager"),
    "t5 sdpa": lambda: t5("sdpa"),
    "t5 block_sparse": lambda: t5("block_sparse"),
    "bert alibi, sparse": lambda: bert("sdpa", position_embedding_type="alibi", **BIGBIRD),
    "transformers' bert, sparse": lambda: huggingface.enable(
        transformers.BertForMaskedLM(transformers.BertConfig(**BERT_SIZES)), "BigBird", block=16
    ),
}

IMPLEMENTATIONS, OFTEN = ("eager", "sdpa", "block_sparse"), ["bert alibi, sparse"]
for kind, make, positions in (
    ("t5", t5, modeling_t5.configuration_t5.POSITIONS),
    ("bert", bert, modeling_bert.configuration_bert.POSITIONS),
):
    for position in positions:
        for implementation in IMPLEMENTATIONS:
            name = f"{kind} {implementation} {position}"
            MODELS[name] = partial(make, implementation, position_embedding_type=position)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_compiled_model_has_one_graph_for_a_shape_and_two_for_all_lengths(name):
    model, graphs, numbers = MODELS[name](), Graphs(), []
    model.compile(backend=graphs)
    is_t5 = isinstance(model, modeling_t5.T5ForConditionalGeneration)
    for length, target in [(64, 24), (64, 24), (80, 32), (300, 56), (33, 17), (900, 20)]:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, -5:] = 0
        labels = torch.randint(2, 64, (2, target if is_t5 else length))
        model(input_ids=torch.randint(2, 64, (2, length)), attention_mask=mask, labels=labels).loss.backward()
        numbers.append(graphs.number)
    assert numbers == [1, 1, 2, 2, 2, 2]
    assert not counters["graph_break"] and counters["frames"]["total"] == counters["frames"]["ok"]


def test_another_layout_is_another_graph():
    graphs = Graphs()
    traced = torch.compile(block_sparse_attention, backend=graphs)
    (q,) = tensors(1, 2, 64, 8, count=1, dtype=torch.float32)
    for layout in (Layout(torch.eye(4)[None], 16), Layout(torch.ones(1, 4, 4), 16), Layout(torch.eye(8)[None], 8)):
        expected = block_sparse_attention(q, q, q, layout, backend="blocks")
        assert torch.equal(traced(q, q, q, layout, backend="blocks"), expected)
    assert graphs.number == 3 and not counters["graph_break"]


def test_a_mistake_in_a_compiled_call_is_a_sentence():
    traced = torch.compile(block_sparse_attention, backend="aot_eager")
    (q,) = tensors(1, 2, 64, 8, count=1, dtype=torch.float32)
    with pytest.raises(UserError, match="layout"):
        traced(q, q, q, Layout(torch.ones(3, 4, 4), 16))
    with pytest.raises(UserError, match="triton"):
        traced(q, q, q, backend="triton")


def test_layouts_in_graphs_are_numbered_in_the_order_of_their_use(monkeypatch):
    """In every process alike: with addresses no compiled graph on disk would be found again."""
    monkeypatch.setattr(call, "layouts", [])
    monkeypatch.setattr(call, "_numbers", {})
    layouts = [None, LocalSlidingWindowSparsityConfig(2), None, LocalSlidingWindowSparsityConfig(2)]
    assert [call.number_of_layout(layout) for layout in layouts] == [0, 1, 0, 2]
