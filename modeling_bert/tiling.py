"""Initialize a larger BERT from a trained smaller one by tiling: copies of each weight matrix fill the larger one.

ModernBERT-large was made from ModernBERT-base in this way (Warner et al. 2024, arXiv 2412.13663, section 2.2.2). One
worked example, 3 values in a row of 8::

    1 2 3  ->  2 3 1 2 3 1 2 3        the copy at 3..5 counted from 1 is the centre, the others wrap around
"""

import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError
from modeling_bert.configuration_bert import BertConfig
from modeling_bert.modeling_bert import BertForMaskedLM

_LAYERS = "bert.encoder.layer."
_ROWS_KEPT = (
    "embeddings.weight",
    "cls.predictions.decoder.",
    "cls.predictions.bias",
)  # a row each for a token or position
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_MAY_DIFFER = {"num_key_value_heads", "layer_types"}
_MUST_AGREE = "vocab_size", "type_vocab_size", "max_position_embeddings", "tie_word_embeddings", "hidden_act"


def tile_model(small: BertForMaskedLM, config: BertConfig) -> BertForMaskedLM:
    """Initialize a larger BERT with tiled copies of a smaller one's weights (see `tile`).

    Layer i copies layer round(i * small layers / large layers) (Rae et al. 2021, arXiv 2112.11446, appendix G.3.3).

    Args:
        small: the trained model.
        config: configuration of the larger model.

    Raises:
        UserError: a size is smaller than that of `small`, or vocabulary, head size or variant differ.
    """
    before = small.config
    smaller = [key for key in _SIZES if getattr(config, key) < getattr(before, key)]
    keys = {*_MUST_AGREE, "first_attention_norm", "last_layer_norm", *before.variant_keys} - _MAY_DIFFER
    other = sorted(key for key in keys if getattr(config, key) != getattr(before, key))
    head = [found.hidden_size // found.num_attention_heads for found in (before, config)]
    if head[0] != head[1]:
        other.append(f"features of a head ({head[0]} and {head[1]})")
    if smaller or other:
        raise UserError(
            f"Tiling makes a larger model of the same kind; these do not fit: {', '.join(smaller + other)}."
        )
    with torch.device("meta"):
        large = BertForMaskedLM(config)
    weights, gated = small.state_dict(), config.gated_mlp
    tiled = {}
    for name, like in large.state_dict().items():
        source = weights.get(_source(name, before.num_hidden_layers, config.num_hidden_layers))
        if source is None:  # the norm of a layer made of the first one, which has none (`first_attention_norm`)
            source = torch.full((before.hidden_size,), float(name.endswith("weight")), dtype=small.dtype)
        parts = 2 if gated and ".intermediate.dense." in name else 1
        rows = like.shape[0] if not any(kept in name for kept in _ROWS_KEPT) else source.shape[0]
        tiled[name] = tile(source, (rows, *like.shape[1:]), parts, _units(name, before))
    large.load_state_dict(tiled, assign=True)
    large.tie_weights()
    return large.train(small.training)


def tile(weight: Tensor, shape: tuple[int, ...], parts: int = 1, units: tuple[int, int] = (1, 1)) -> Tensor:
    """Fill a larger tensor with copies of `weight`: one in the centre of each dimension, the others wrapped around it.

    Args:
        shape: shape of the result, each size at least that of `weight`.
        parts: number of equal parts of the rows to tile separately, such as the two halves of a gated feed-forward
            network.
        units: number of rows, and of columns, that must stay together, such as the features of a head.
    """
    if parts > 1:
        size = (shape[0] // parts, *shape[1:])
        return torch.cat([tile(part, size) for part in weight.chunk(parts)])
    for dim, size in enumerate(shape):
        old = weight.shape[dim]
        offset = (size - old) // 2 // units[dim] * units[dim]
        index = (torch.arange(size, device=weight.device) - offset) % old
        weight = weight.index_select(dim, index)
    return weight


def _units(name: str, before: BertConfig) -> tuple[int, int]:
    """Rows and columns of a weight that stay together: heads, for queries those that share keys and values."""
    head = before.hidden_size // before.num_attention_heads
    group = head * (before.num_attention_heads // (before.num_key_value_heads or before.num_attention_heads))
    if ".attention.self." in name:
        return (group if ".query." in name else head), 1
    return (1, group) if name.endswith(".attention.output.dense.weight") else (1, 1)


def _source(name: str, small: int, large: int) -> str:
    """The smaller model's name of the weights that a weight of the larger one is made of, of so many layers each."""
    if not name.startswith(_LAYERS):
        return name
    number, rest = name.removeprefix(_LAYERS).split(".", 1)
    return f"{_LAYERS}{min(round(int(number) * small / large), small - 1)}.{rest}"
