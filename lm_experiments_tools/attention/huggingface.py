"""Block-sparse attention for models of transformers: `attn_implementation="block_sparse"`, registered on import.

    import lm_experiments_tools.attention.huggingface
    model = AutoModel.from_pretrained("google-t5/t5-small", attn_implementation="block_sparse")  # exact attention
    model = enable(model, "BigBird", block=64)                                                   # block-sparse

A block-sparse layout says which blocks of keys each block of queries attends to. It is stored in the model's
configuration under the names of t5-experiments, `sparse_config_cls` and `sparse_attention`. It holds for
self-attention of encoders. Causal attention and cross-attention stay exact; so does everything where no layout is
configured. Padding is respected.

transformers' T5 passes its learned bias as a matrix of queries by keys, which Triton's kernels do not read. On a GPU
use `modeling_t5`, which loads the same checkpoints.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from lm_experiments_tools.attention.kernels.call import AttentionSpec, attend, block_sparse_attention, number_of_layout
from lm_experiments_tools.attention.layouts import (
    TYPE_KEY,
    DenseSparsityConfig,
    SparsityConfig,
    get_sparsity_config,
)
from lm_experiments_tools.errors import UserError

NAME = "block_sparse"
_OF_ENCODERS = "a block-sparse layout is for encoders, causal attention is exact. Leave it out."
SETTINGS_KEY = "sparse_attention"


def register() -> None:
    """Register `attn_implementation="block_sparse"` with transformers; importing this module does it."""
    # Both interfaces are needed: an attention without a mask function gets no mask, and padding would be ignored.
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def enable(model: PreTrainedModel, layout: SparsityConfig | str | None = None, **settings: Any) -> PreTrainedModel:
    """Convert a transformers model to block-sparse attention in place, and write the layout into its configuration.

    A layout says which blocks of keys each block of queries attends to.

    Args:
        model: any model whose attention goes through transformers' AttentionInterface (T5, BERT, ...).
        layout: a layout object, or a layout's name with `settings` as in `get_sparsity_config`. None takes the layout
            that the model's configuration names; if it names none, attention is exact.

    Returns:
        The same model. Raises UserError.
    """
    num_heads = model.config.num_attention_heads
    if isinstance(layout, str):
        layout = get_sparsity_config(layout, **{"num_heads": num_heads, **settings})
    elif settings:
        raise UserError(f"enable: {', '.join(settings)} belong to the name of a layout, and it is an object or None.")
    elif layout is None:
        layout = configured_layout(model.config)
    name = type(model).__name__
    if layout is not None and layout.num_heads != num_heads:
        raise UserError(f"{type(layout).__name__} is for {layout.num_heads} heads, but {name} has {num_heads}.")
    if not isinstance(layout, DenseSparsityConfig | None) and not any(map(_can_be_sparse, model.modules())):
        raise UserError(f"{name} has no self-attention of an encoder: {_OF_ENCODERS}")
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UserError(f"{type(model).__name__} does not use transformers' AttentionInterface.")
    configs = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
    for config in configs.values() if layout is not None else ():
        values = layout.to_dict()
        config.sparse_config_cls = values.pop(TYPE_KEY)
        config.sparse_attention = values
        # Saved as an attribute: transformers loads it as the attention implementation, but does not save that itself.
        config.attn_implementation = NAME
    return model


def _can_be_sparse(module: nn.Module) -> bool:
    """True for the self-attention of an encoder: transformers' layers say that they are not causal."""
    return getattr(module, "is_causal", True) is False and not getattr(module, "is_decoder", False)


def configured_layout(config: PreTrainedConfig) -> SparsityConfig | None:
    """Read the block-sparse attention layout that a model's configuration names; None if it names none.

    The keys are `sparse_config_cls` (the layout's name) and `sparse_attention` (its settings). Raises UserError.
    """
    name, settings = getattr(config, TYPE_KEY, None), getattr(config, SETTINGS_KEY, None)
    if name is None:
        if settings is not None:
            raise UserError(f"{SETTINGS_KEY} is given without {TYPE_KEY}, the name of a layout (e.g. BigBird).")
        return None
    return get_sparsity_config(name, **{"num_heads": config.num_attention_heads, **(settings or {})})


def layer_layout(config: PreTrainedConfig, layer_idx: int) -> SparsityConfig | None:
    """Build the block-sparse attention layout of one layer; None if the configuration names no layout.

    Layouts with random blocks differ from layer to layer. If two layers have equal layouts, both get the same object,
    so that everything cached with it is shared. Raises UserError.
    """
    layout, num_heads = configured_layout(config), config.num_attention_heads
    if layout is None:
        return None
    if layout.num_heads != num_heads:
        raise UserError(f"sparse_attention has num_heads={layout.num_heads}, but the model {num_heads}: leave it out.")
    return _layout_of(config.sparse_config_cls, config.sparse_attention, num_heads, layer_idx)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Build the mask of a "block_sparse" model; transformers' AttentionMaskInterface calls this function.

    Returns:
        The padding mask, bool [batch, keys], or None if nothing is masked. Cached keys, packed documents and sliding
        windows give bool [batch, 1, queries, keys].
    """
    from_the_start = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0 and q_length == kv_length
    if mask_function is bidirectional_mask_function or (mask_function is causal_mask_function and from_the_start):
        if attention_mask is None or attention_mask.shape[1] == kv_length:
            # Looked up once for all layers, where this neither synchronizes with a GPU nor breaks a graph.
            can_look = attention_mask is not None and attention_mask.is_cpu and not torch.compiler.is_compiling()
            return None if can_look and bool(attention_mask.all()) else attention_mask
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask=attention_mask, **kwargs
    )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a "block_sparse" model; transformers' AttentionInterface calls this function.

    Args:
        query, key, value: [batch, heads, length, head_dim]; keys and values may have fewer heads.
        attention_mask: the result of `attention_mask`, or a user's mask [batch, 1 or heads, queries, keys].
        position_bias: a T5 bias as a matrix [1, heads, queries, keys]; None for none.

    Returns:
        The output [batch, queries, heads, head_dim], and None for the attention weights.

    Raises:
        UserError: attention weights, soft capping or sinks are requested, or the layout does not fit.
    """
    for option in ("output_attentions", "softcap", "s_aux"):
        requested = kwargs.get(option)
        if requested is not None and requested is not False:
            raise UserError(
                f'Block-sparse attention has no {option}. Load the model with attn_implementation="eager".'
            )
    key, value = (_for_all_heads(x, query.shape[1]) for x in (key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A decoder's cross-attention is not causal to transformers, and stays exact too.
    is_exact = causal or getattr(module, "is_decoder", getattr(module.config, "is_decoder", False))
    layout = None if is_exact else _layout(module, query.shape[1])
    if causal and not hasattr(module, "is_decoder") and getattr(module.config, TYPE_KEY, None) is not None:
        raise UserError(f"{type(module).__name__} is causal, and its configuration names a layout: {_OF_ENCODERS}")
    if attention_mask is not None and attention_mask.dim() == 4:
        lengths = query.shape[2], key.shape[2]
        spec = _with_matrix(attention_mask.expand(-1, -1, *lengths), position_bias, layout)
        output, _ = attend(query, key, value, spec._replace(scale=scaling, dropout_p=dropout))
    else:
        causal = causal and query.shape[2] > 1 and query.shape[2] == key.shape[2]
        options = {"causal": causal, "scale": scaling, "dropout_p": dropout}
        output = block_sparse_attention(
            query, key, value, layout, bias=position_bias, key_padding_mask=attention_mask, **options
        )
    return output.transpose(1, 2).contiguous(), None


def _for_all_heads(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values of grouped-query attention, repeated for each head."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _layout(module: nn.Module, num_heads: int) -> SparsityConfig | int | None:
    """The layout of a layer's configuration, None for exact attention; while torch.compile traces its number."""
    config = module.config
    name = getattr(config, TYPE_KEY, None)
    if name is None:
        return None
    settings, layer_idx = getattr(config, SETTINGS_KEY, None), getattr(module, "layer_idx", None) or 0
    if torch.compiler.is_compiling():
        return _layout_number(name, settings, num_heads, layer_idx)
    layout = _layout_of(name, settings, num_heads, layer_idx)
    return None if isinstance(layout, DenseSparsityConfig) else layout


def _layout_of(name: str, settings: dict[str, Any] | None, num_heads: int, layer_idx: int) -> SparsityConfig:
    return _sparsity_config(name, json.dumps(settings or {}, sort_keys=True), num_heads, layer_idx)


@torch.compiler.assume_constant_result  # evaluated once a graph, which is guarded by the configuration's values
def _layout_number(name: str, settings: dict[str, Any] | None, num_heads: int, layer_idx: int) -> int | None:
    layout = _layout_of(name, settings, num_heads, layer_idx)
    return None if isinstance(layout, DenseSparsityConfig) else number_of_layout(layout)


@functools.lru_cache(maxsize=512)  # one object a layout, because kernels' lists are cached by object
def _sparsity_config(name: str, settings: str, num_heads: int, layer_idx: int) -> SparsityConfig:
    config = get_sparsity_config(name, **{"num_heads": num_heads, **json.loads(settings)})
    if layer_idx and not config.uses_random_blocks:
        return _sparsity_config(name, settings, num_heads, 0)
    config.layer_idx += layer_idx
    return config


def _with_matrix(mask: Tensor, bias: Tensor | None, layout: SparsityConfig | int | None) -> AttentionSpec:
    """The spec of a mask of queries by keys: True where allowed, or floats that are added to scores."""
    if mask.dtype == torch.bool:
        return AttentionSpec(mask=mask, bias=bias, layout=layout)
    mask = mask if bias is None else mask + bias
    allowed = mask.new_ones(1, 1, 1, 1, dtype=torch.bool)  # selects a dense backend
    return AttentionSpec(mask=allowed, bias=mask, layout=layout)


register()
