"""The numbers that a model's memory follows from, read from its config.json without loading torch.

T5 and BERT, those of transformers and ours. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lm_experiments_tools.errors import UserError

# What configurations leave out, as transformers has it.
_T5 = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "relative_attention_num_buckets": 32, "dropout_rate": 0.1, "feed_forward_proj": "relu", "num_memory_tokens": 0,
    "position_embedding_type": "relative_attention_bias", "cross_entropy_chunk_size": 0,
}  # fmt: skip
_BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "position_embedding_type": "absolute",
}  # fmt: skip
KINDS = {"t5": "t5", "lm_experiments_t5": "t5", "mt5": "t5", "bert": "bert", "lm_experiments_bert": "bert"}


@dataclass(frozen=True)
class Model:
    """A T5 (encoder and decoder) or a BERT (encoder alone)."""

    kind: Literal["t5", "bert"]
    width: int  # features of a token
    inner: int  # heads x features of a head
    heads: int
    wide: int  # of the feed-forward layer
    encoder_layers: int
    decoder_layers: int
    vocabulary: int
    gated: bool = False
    gelu: bool = False
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    positions: int = 0  # rows of a table of positions; of T5 buckets of distances
    has_bias: bool = True  # a learned bias of distances on the scores
    types: int = 0
    memory_tokens: int = 0
    chunk: int = 0  # target tokens whose logits exist at once; 0: all
    labels: int = 0  # of BERT's classifier; 0: the heads of pre-training

    @property
    def attention(self) -> int:
        """Parameters of one attention."""
        biases = 0 if self.kind == "t5" else 3 * self.inner + self.width
        return 4 * self.width * self.inner + biases

    @property
    def feed_forward(self) -> int:
        """Parameters of one feed-forward layer."""
        biases = 0 if self.kind == "t5" else self.wide + self.width
        return (3 if self.gated else 2) * self.width * self.wide + biases

    @property
    def norm(self) -> int:
        """Parameters of one norm."""
        return self.width if self.kind == "t5" else 2 * self.width

    @property
    def encoder_block(self) -> int:
        return self.attention + self.feed_forward + 2 * self.norm

    @property
    def decoder_block(self) -> int:
        return 2 * self.attention + self.feed_forward + 3 * self.norm

    @property
    def table(self) -> int:
        """Parameters of the token table."""
        return self.vocabulary * self.width

    def matrices(self) -> list[tuple[int, int, int]]:
        """(number, rows, columns) of the trained matrices, of which Adafactor keeps sums of rows and columns."""
        layers = self.encoder_layers + self.decoder_layers
        attentions = self.encoder_layers + 2 * self.decoder_layers
        found = [
            (3 * attentions, self.inner, self.width),
            (attentions, self.width, self.inner),
            (layers * (2 if self.gated else 1), self.wide, self.width),
            (layers, self.width, self.wide),
            (1 if self.tied else 2, self.vocabulary, self.width),
        ]
        if self.kind == "t5":
            stacks = 1 + bool(self.decoder_layers)
            return [*found, (stacks * self.has_bias, self.positions, self.heads), (1, self.memory_tokens, self.width)]
        if self.labels:
            found[-1] = (1, self.vocabulary, self.width)
        squares = [(1 if self.labels else 2, self.width, self.width), (1, self.labels or 2, self.width)]
        return [*found, (1, self.positions, self.width), (1, self.types, self.width), *squares]

    def parameters(self) -> int:
        """All, shared ones once."""
        in_matrices = sum(number * rows * columns for number, rows, columns in self.matrices())
        if self.kind == "t5":
            norms = 2 * self.encoder_layers + 3 * self.decoder_layers + 1 + bool(self.decoder_layers)
            return in_matrices + norms * self.width
        layer = self.attention + self.feed_forward + 2 * self.norm - 4 * self.width**2 - 2 * self.width * self.wide
        biases = 2 * self.width + self.vocabulary * (1 if self.tied else 2) + 2  # pooler, transform, words, pairs
        if self.labels:
            return in_matrices + self.encoder_layers * layer + self.width + self.labels + self.norm
        return in_matrices + self.encoder_layers * layer + biases + 2 * self.norm  # of embeddings and head

    def frozen(self, parts: Iterable[str]) -> int:
        """Parameters of the embeddings, encoder, decoder or head, as `--freeze` takes them."""
        bias, t5 = self.has_bias * self.positions * self.heads, self.kind == "t5"
        own = bias + self.width if t5 else 0  # of each stack, with its last norm
        embeddings = self.table + (0 if t5 else (self.positions + self.types) * self.width + self.norm)
        sizes = {
            "embeddings": embeddings,
            "encoder": self.encoder_layers * self.encoder_block + own,
            "decoder": self.decoder_layers * self.decoder_block + own * bool(self.decoder_layers),
        }
        sizes["head"] = self.parameters() - sum(sizes.values())
        return sum(sizes[part] for part in set(parts) & set(sizes))


def describe(config: Mapping[str, Any]) -> Model:
    """The model that a configuration describes.

    Raises:
        UserError: it is neither a T5 nor a BERT, or lacks a number.
    """
    kind = KINDS.get(str(config.get("model_type")))
    if kind is None:
        raise UserError(
            f"the closed form knows T5 and BERT, not model_type {config.get('model_type')!r}: see the traced figure"
        )
    values = {**(_T5 if kind == "t5" else _BERT), **{key: value for key, value in config.items() if value is not None}}
    try:
        model = _t5(values) if kind == "t5" else _bert(values)
        if min(model.width, model.heads, model.inner, model.wide, model.vocabulary, model.encoder_layers) < 1:
            raise ValueError("a size below 1")
        return model
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the configuration has a value of the wrong kind: {error}") from error


def _t5(values: Mapping[str, Any]) -> Model:
    activation = str(values["feed_forward_proj"])
    return Model(
        "t5",
        width=int(values["d_model"]),
        inner=int(values["num_heads"]) * int(values["d_kv"]),
        heads=int(values["num_heads"]),
        wide=int(values["d_ff"]),
        encoder_layers=int(values["num_layers"]),
        decoder_layers=int(values.get("num_decoder_layers") or values["num_layers"]),
        vocabulary=int(values["vocab_size"]),
        gated=activation.startswith("gated"),
        gelu="gelu" in activation,
        tied=values.get("tie_word_embeddings", True),
        dropout=float(values["dropout_rate"]),
        attention_dropout=float(values["dropout_rate"]),
        positions=int(values["relative_attention_num_buckets"]),
        has_bias=values["position_embedding_type"] == "relative_attention_bias",
        memory_tokens=int(values["num_memory_tokens"]),
        chunk=int(values["cross_entropy_chunk_size"]),
    )


def _bert(values: Mapping[str, Any]) -> Model:
    absolute = values["position_embedding_type"] == "absolute"
    return Model(
        "bert",
        width=int(values["hidden_size"]),
        inner=int(values["hidden_size"]),
        heads=int(values["num_attention_heads"]),
        wide=int(values["intermediate_size"]),
        encoder_layers=int(values["num_hidden_layers"]),
        decoder_layers=0,
        vocabulary=int(values["vocab_size"]),
        gelu=True,
        tied=values.get("tie_word_embeddings", True),
        dropout=float(values["hidden_dropout_prob"]),
        attention_dropout=float(values["attention_probs_dropout_prob"]),
        positions=int(values["max_position_embeddings"]) if absolute else 0,
        has_bias=False,
        types=int(values["type_vocab_size"]),
    )
