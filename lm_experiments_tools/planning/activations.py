"""What each part of a model keeps from its forward pass for its backward pass, as formulas with their reasons.

The terms are those that autograd saves in the code of transformers and of our models (`saved_tensors_hooks` of
torch.autograd.graph lists them). n tokens of D features, k tokens that are attended to, B rows, H heads of I features
together, F features inside the feed-forward layer. s bytes has a value of the residual stream, c one that layers
compute with, a one of attention, m one of a dropout mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lm_experiments_tools.planning.shapes import Model

LOSS_CHUNK = 2048  # target tokens of our T5's fast step, whose logits exist at once


class Term(NamedTuple):
    """Bytes that are kept, for what, and where in the model."""

    size: float
    why: str


@dataclass(frozen=True)
class Step:
    """One micro-batch, and how it is computed."""

    rows: int
    source: int
    target: int = 0
    mixed: bool = False  # float32 weights, 16-bit layers
    code: Literal["fast", "own", "transformers"] = "transformers"  # our models' fast step, plain ones, or theirs
    attention: Literal["eager", "sdpa", "block_sparse"] = "sdpa"
    checkpointing: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    scored: int | None = None  # tokens whose words BERT scores; None: all
    adapted: frozenset[str] | None = None  # of q, k, v, o, wi, wo: layers with an adapter; None: all weights trained
    adapter_dropout: bool = False
    frozen: frozenset[str] = frozenset()  # of embeddings, encoder, decoder, head

    @property
    def computed(self) -> int:
        """c: bytes of a value that layers compute with."""
        return 2 if self.mixed else 4

    @property
    def stream(self) -> int:
        """s: bytes of a value of the residual stream."""
        return 2 if self.mixed and self.code == "fast" else 4

    @property
    def fast(self) -> bool:
        return self.code == "fast"

    @property
    def trains_weights(self) -> bool:
        return self.adapted is None

    def of(self, part: str) -> Step:
        """The step in the encoder or decoder, whose weights may be frozen."""
        return replace(self, adapted=frozenset()) if part in self.frozen else self

    def keeps(self, numbers: int, *layers: str) -> float:
        """Bytes kept of the input that these linear layers share, for the gradients of their matrices: one copy, none
        if all are frozen; behind an adapter's dropout one and a mask for each."""
        if self.adapted is None:
            return self.computed * numbers
        count = sum(layer in self.adapted for layer in layers)
        if self.adapter_dropout:
            return count * (self.computed + self.mask(4)) * numbers
        return self.computed * numbers * bool(count)

    def mask(self, size: int) -> int:
        """m: torch keeps dropout's mask on a CPU in the format of what was dropped, on a GPU as bool."""
        return 1 if self.device == "cuda" else size


class Part(NamedTuple):
    """A part of the model in the order of the forward pass."""

    name: str
    terms: list[Term]
    parameters: int  # whose gradient its backward pass makes
    count: int = 1  # layers like it
    entry: float = 0  # bytes of its input, all that checkpointing keeps
    scratch: float = 0  # most bytes that its backward pass holds beside
    passing: float = 0  # most bytes that its forward pass holds, where nothing is kept

    @property
    def saved(self) -> float:
        return _sum(self.terms)


def _sum(terms: list[Term]) -> float:
    return sum(term.size for term in terms)


def norm(model: Model, step: Step, n: int) -> list[Term]:
    """T5's: x, x over its root mean square, and one number a token. LayerNorm: x and two numbers a token."""
    if model.kind == "bert":
        return [Term(step.stream * n * model.width + 8 * n, "input of a norm: s n D")]
    again = 4 * n * model.width if step.trains_weights else 0
    return [
        Term(4 * n * model.width + 4 * n, "input of a norm, in float32: 4 n D"),
        Term(again, "normed values, for the gradient of the norm's weight: 4 n D"),
    ]


def attention(model: Model, step: Step, n: int, k: int, *, cross: bool = False) -> list[Term]:
    """Of n queries to k keys per batch row: projections, score matrices, output."""
    c, width, inner, rows = step.computed, model.width, model.inner, step.rows
    copies = 3 if step.mixed and not step.fast else 1  # autocast casts an input once for each matrix
    if cross:
        from_encoder = (copies - 1) * c * rows * k * width  # else the encoder's output, which is counted once
        terms = [Term(c * rows * n * width + from_encoder, "inputs of queries, keys and values: c n D each cast")]
    elif model.kind == "bert" and not step.mixed:
        terms = [Term(4 * rows * n * width, "input of queries, keys and values: c n D")]
    else:
        terms = [Term(copies * c * rows * n * width, "input of queries, keys and values: c n D each cast")]
    if not step.trains_weights:
        size = step.keeps(rows * n * width, *("q" if cross else "qkv"))
        from_encoder = step.keeps(rows * k * width, *"kv") if cross and step.adapter_dropout else 0
        terms = [Term(size + from_encoder, "input of the adapted projections: c n D, with dropout (c + m) n D each")]
    terms += [*_cast_weights(model, step, cross), *_scores(model, step, n, k, cross=cross)]
    terms.append(Term(step.keeps(rows * n * inner, "o"), "input of the output projection: c n I"))
    if model.dropout:
        terms.append(Term(step.mask(c) * rows * n * width, "dropout's mask of the output: m n D"))
    return terms


def _cast_weights(model: Model, step: Step, cross: bool) -> list[Term]:
    if step.mixed:
        return [Term(2 * 4 * model.width * model.inner, "16-bit copies of the projections' weights: 2 x 4 D I")]
    if step.fast and step.trains_weights:
        return [Term(4 * (2 if cross else 3) * model.width * model.inner, "weights side by side for one product")]
    return []


def _scores(model: Model, step: Step, n: int, k: int, *, cross: bool) -> list[Term]:
    """Matrices of n x k scores for each head and row, where they are kept."""
    rows, heads, inner, c = step.rows, model.heads, model.inner, step.computed
    dropped, learned = model.attention_dropout > 0, step.trains_weights and model.has_bias and not cross
    fused = _has_sdpa(step)
    if fused and (step.device == "cuda" or not (dropped or learned)):
        size = c * rows * (2 * n + 2 * k) * inner
        return [Term(size - c * rows * n * inner + 4 * rows * heads * n, "queries, keys, values of a fused kernel")]
    a = 4 if step.mixed and fused else c  # torch's unfused attention of 16-bit values on a CPU computes in float32
    matrix = rows * heads * n * k
    terms = [Term(a * rows * (n + 2 * k) * inner, "queries, keys and values: a (n + 2 k) I")]
    terms.append(Term((4 if step.attention == "eager" else a) * matrix, "weights after softmax: a B H n k"))
    if dropped:
        terms.append(Term((step.mask(a) + a) * matrix, "dropout's mask and what it leaves: (m + a) B H n k"))
    elif step.attention == "eager" and step.mixed:
        terms.append(Term(c * matrix, "weights in 16 bits: c B H n k"))
    return terms


def _has_sdpa(step: Step) -> bool:
    return step.attention == "sdpa" and not (step.fast and step.device == "cpu")


def _passing(model: Model, step: Step, length: int) -> float:
    """Most bytes at once in the forward pass of frozen blocks, none of which outlives its block but the stream and the
    position bias: in torch's unfused attention scores, weights, dropout's mask and what it leaves, with queries, keys
    and values of which SDPA scales two beside; or in the feed-forward layer."""
    rows, n, c = step.rows, step.rows * length, step.computed
    dropped, sdpa = model.attention_dropout > 0, _has_sdpa(step)
    stream = 2 * step.stream * n * model.width  # x, and x normed
    if sdpa and (step.device == "cuda" or not dropped):
        attended = 4 * c * n * model.inner + 4 * n * model.heads
    else:
        a = 4 if sdpa else c
        matrix = rows * model.heads * length**2
        attended = (5 if sdpa else 3) * a * n * model.inner + (4 if dropped else 2) * a * matrix
    fed = (4 if model.gated or model.gelu else 3) * c * n * model.wide
    return stream + max(attended, fed) + _sum(_bias(model, step, length))


def feed_forward(model: Model, step: Step, n: int) -> list[Term]:
    """wo(act(wi(x))), gated or not, for n tokens of all rows."""
    c, wide = step.computed, n * model.wide
    casts = 2 if model.gated and step.mixed and not step.fast and step.trains_weights else 1
    layers = ("wi", "wi") if model.gated else ("wi",)
    terms = [Term(casts * step.keeps(n * model.width, *layers), "input of the wide layer: c n D each cast")]
    if step.mixed:
        terms.append(Term(2 * (3 if model.gated else 2) * model.width * model.wide, "16-bit copies of its weights"))
    if model.gated:
        inside = 4 if model.gelu and not step.fast else 1  # transformers' gelu_new keeps three tensors more
        terms.append(Term((inside + 2) * c * wide, "input of the activation, both factors of the gate: c n F each"))
    elif model.gelu:
        terms.append(Term(c * wide, "input of the activation: c n F"))
    drops = model.dropout > 0 and model.kind == "t5"
    if drops:
        kept = step.mask(c) + (0 if model.gated or model.gelu else c)
        terms.append(Term(kept * wide, "dropout's mask, and of relu its output: m n F + c n F"))
    terms.append(Term(step.keeps(wide, "wo"), "input of the narrow layer: c n F"))
    if model.dropout:
        terms.append(Term(step.mask(c) * n * model.width, "dropout's mask of the output: m n D"))
    return terms


def parts_of(model: Model, step: Step) -> list[Part]:
    """The whole model's, from the embeddings to the last norm; the head is `peak.Head`."""
    return _t5_parts(model, step) if model.kind == "t5" else _bert_parts(model, step)


def _bert_parts(model: Model, step: Step) -> list[Part]:
    n, length, layer = step.rows * step.source, step.source, step.of("encoder")
    embedded = norm(model, step, n)
    embedded = [Term(4 * n * model.width + 8 * n, embedded[0].why), *_dropout(model, step, n)]
    block = attention(model, layer, length, length) + norm(model, layer, n)
    block += feed_forward(model, layer, n) + norm(model, layer, n)
    table = model.table + (model.positions + model.types) * model.width + model.norm
    scratch = _scratch(model, layer, length, length, _sum(feed_forward(model, layer, n)))
    parts = [
        Part("embeddings", embedded, table),
        Part("layers", block, model.encoder_block, model.encoder_layers, step.stream * n * model.width, scratch),
    ]
    return _thawed(parts, step, ("embeddings", "encoder"), _passing(model, layer, length))


def _t5_parts(model: Model, step: Step) -> list[Part]:
    width, source, target = model.width, step.source + model.memory_tokens, step.target
    n, t, layer = step.rows * source, step.rows * target, step.of("encoder")
    block = norm(model, layer, n) + attention(model, layer, source, source)
    block += norm(model, layer, n) + feed_forward(model, layer, n)
    scratch = _scratch(model, layer, source, source, _sum(feed_forward(model, layer, n)))
    bias = model.has_bias * model.positions * model.heads
    last = [*norm(model, layer, n), *_dropout(model, step, n)]
    encoder = [
        Part("encoder's embeddings", [*_dropout(model, step, n), *_bias(model, step, source)], 0),
        Part("encoder", block, model.encoder_block, model.encoder_layers, step.stream * n * width, scratch),
        Part("encoder's last norm", last, width),
    ]
    encoder = _thawed(encoder, step, ("embeddings", "encoder", "encoder"), _passing(model, layer, source))
    encoder[-1].terms.append(_output(step, n, width))
    if not model.decoder_layers:
        return encoder
    layer = step.of("decoder")
    block = norm(model, layer, t) + attention(model, layer, target, target)
    block += norm(model, layer, t) + attention(model, layer, target, source, cross=True)
    block += norm(model, layer, t) + feed_forward(model, layer, t)
    scratch = _scratch(model, layer, target, source, _sum(feed_forward(model, layer, t)))
    decoder = [
        Part("decoder's embeddings", [*_dropout(model, step, t), *_bias(model, step, target)], bias),
        Part("decoder", block, model.decoder_block, model.decoder_layers, step.stream * t * width, scratch),
        Part("decoder's last norm", [*norm(model, layer, t), *_dropout(model, step, t)], width),
    ]
    decoder = [part._replace(parameters=0) for part in decoder] if "decoder" in step.frozen else decoder
    return [*encoder, *decoder]


def _thawed(parts: list[Part], step: Step, names: tuple[str, ...], passing: float) -> list[Part]:
    """The first parts of the model: frozen ones make no gradients, and before the first trained one they keep nothing,
    so that the highest moment of the layers is `passing`."""
    found, trained = [], False
    for part, name in zip(parts, names, strict=True):
        trained = trained or name not in step.frozen
        part = part._replace(parameters=0) if name in step.frozen else part
        found.append(part if trained else part._replace(terms=[], entry=0, passing=passing * (part.count > 1)))
    return found


def _output(step: Step, n: int, width: int) -> Term:
    return Term(step.computed * n * width, "the encoder's output, which all layers of the decoder read: c n D")


def _dropout(model: Model, step: Step, n: int) -> list[Term]:
    return [Term(step.mask(step.stream) * n * model.width, "dropout's mask: m n D")] if model.dropout else []


def _bias(model: Model, step: Step, length: int) -> list[Term]:
    if not model.has_bias:
        return []
    numbers = 8 if step.code == "transformers" else 0  # of the bucket of each pair
    return [Term((4 * model.heads + numbers) * length**2, "the position bias of all layers: 4 H n^2")]


def _scratch(model: Model, step: Step, n: int, k: int, freed: float) -> float:
    """Gradients that exist at once in the backward pass of a block beyond what it frees on the way: those of the
    feed-forward layer, or of the scores once that layer's tensors are gone."""
    c, rows = step.computed, step.rows
    scores = [term.size for term in _scores(model, step, n, k, cross=False) if "after softmax" in term.why]
    fed = c * rows * n * model.wide
    return max(fed, max(scores, default=0) - freed) + 2 * step.stream * rows * n * model.width
