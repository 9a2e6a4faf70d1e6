"""Block-sparse attention for models of transformers: `attn_implementation="block_sparse"`, registered on import.

    import lm_experiments_tools.attention.huggingface
    model = AutoModel.from_pretrained("google-t5/t5-small", attn_implementation="block_sparse")  # exact attention
    model = enable(model, "BigBird", block=64)                                                   # block-sparse

The layout is stored in the model's configuration under the names of t5-experiments, `sparse_config_cls` and
`sparse_attention`, and holds for self-attention of encoders and of decoder-only models. Decoders of encoder-decoder
models and cross-attention stay exact; so does everything where no layout is configured. Padding is respected, and a
learned T5 bias is handed from layer to layer as its table [num_buckets, heads], not as [1, heads, length, length], but
for inputs on a CPU that are short enough for dense attention.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from lm_experiments_tools.attention.kernels.bias import Bias, T5Bias
from lm_experiments_tools.attention.kernels.compiled import number_of_layout
from lm_experiments_tools.attention.kernels.dispatch import attend, block_sparse_attention, shared_bias
from lm_experiments_tools.attention.kernels.reference import attention_probabilities
from lm_experiments_tools.attention.kernels.spec import AttentionSpec
from lm_experiments_tools.attention.layouts import (
    TYPE_KEY,
    DenseSparsityConfig,
    SparsityConfig,
    get_sparsity_config,
)
from lm_experiments_tools.errors import UserError

NAME = "block_sparse"
WITH_WEIGHTS = "block_sparse_with_weights"
SETTINGS_KEY = "sparse_attention"


def register() -> None:
    """Make `attn_implementation="block_sparse"` known to transformers; importing this module has done it.

    Both interfaces are needed: an attention without a mask function gets no mask at all, and padding is ignored.
    """
    for name, forward in ((NAME, attention_forward), (WITH_WEIGHTS, forward_with_weights)):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, attention_mask)
    if not hasattr(PreTrainedConfig.to_dict, "__wrapped__"):
        PreTrainedConfig.to_dict = _with_name(PreTrainedConfig.to_dict)


def _with_name(to_dict: Any) -> Any:
    """transformers saves no attention implementation; beside a layout ours belongs to what the model computes."""

    @functools.wraps(to_dict)
    def to_dict_with_name(self: PreTrainedConfig) -> dict[str, Any]:
        values = to_dict(self)
        if self._attn_implementation == NAME and values.get(TYPE_KEY) is not None:
            values["attn_implementation"] = NAME
        return values

    return to_dict_with_name


def enable(model: PreTrainedModel, layout: SparsityConfig | str | None = None, **settings: Any) -> PreTrainedModel:
    """Convert a model of transformers, in place, and note the layout in its configuration, which is saved with it.

    Args:
        model: any whose attention goes through transformers' AttentionInterface (T5, BERT, ...).
        layout: a configuration, or the name of one with its `settings` as in `get_sparsity_config`; None for what the
            model's own configuration says, which is exact attention if it says nothing.

    Returns:
        The model.

    Raises:
        UserError: a layout for another number of heads, an unknown one, or a model that cannot be converted.
    """
    num_heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if not isinstance(num_heads, int):
        raise UserError(
            f"{type(model).__name__} is no model of transformers with attention of its own (its configuration has no "
            "num_attention_heads): enable its parts one by one, as in enable(model.encoder, ...)."
        )
    if isinstance(layout, str):
        layout = get_sparsity_config(layout, **{"num_heads": num_heads, **settings})
    elif settings:
        raise UserError(f"enable: {', '.join(settings)} go with the name of a layout, not {type(layout).__name__}.")
    elif layout is None:
        layout = configured_layout(model.config)
    elif isinstance(layout, type) or not callable(getattr(layout, "to_dict", None)):
        raise UserError(
            f"enable: layout is {layout!r}; it must be a configuration, as BigBirdSparsityConfig({num_heads}), or the "
            "name of one."
        )
    if layout is not None and layout.num_heads != num_heads:
        raise UserError(
            f"{type(layout).__name__} is for {layout.num_heads} heads, but {type(model).__name__} has {num_heads}."
        )
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UserError(f"{type(model).__name__} has attention of its own, which cannot be converted.")
    configs = {id(module.config): module.config for module in model.modules() if _has_config(module)}
    for config in configs.values() if layout is not None else ():
        values = layout.to_dict()
        config.sparse_config_cls = values.pop(TYPE_KEY)
        config.sparse_attention = values
    for name in {type(module).__module__ for module in model.modules()}:
        _pass_tables(sys.modules[name])
    return model


def configured_layout(config: PreTrainedConfig) -> SparsityConfig | None:
    """The layout that a model's configuration names by `sparse_config_cls` and `sparse_attention`; None without one.

    Raises:
        UserError: an unknown layout, settings that it does not have or refuses, or settings of no layout.
    """
    name, settings = getattr(config, TYPE_KEY, None), getattr(config, SETTINGS_KEY, None)
    if name is None:
        if settings is not None:
            raise UserError(f"{SETTINGS_KEY} is given without {TYPE_KEY}, the name of a layout (e.g. BigBird).")
        return None
    if not (isinstance(name, str) and isinstance(settings, dict | None)):
        raise UserError(
            f"{TYPE_KEY}={name!r} must be the name of a layout and {SETTINGS_KEY}={settings!r} an object with its "
            "settings."
        )
    return get_sparsity_config(name, **{"num_heads": config.num_attention_heads, **(settings or {})})


def _has_config(module: nn.Module) -> bool:
    return isinstance(getattr(module, "config", None), PreTrainedConfig)


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
    """transformers' mask function: the padding mask as it is, bool [batch, keys] or None, wherever that says it all.

    Anything else (a cache of earlier keys, packed documents, sliding windows) becomes bool [batch, 1, queries, keys].
    """
    modeling = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    if modeling is not None:
        _pass_tables(modeling)
    from_the_start = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0 and q_length == kv_length
    if mask_function is bidirectional_mask_function or (mask_function is causal_mask_function and from_the_start):
        if attention_mask is None or attention_mask.shape[1] == kv_length:
            return None if _hides_nothing(attention_mask) else attention_mask
    _check_cache(config, q_length, kv_length, q_offset, kv_offset)
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask=attention_mask, **kwargs
    )


def _check_cache(
    config: PreTrainedConfig | None, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int
) -> None:
    """Refuse a layout for keys that are not all of those up to the last query."""
    if config is None or isinstance(configured_layout(config), DenseSparsityConfig | None):
        return
    if config.is_encoder_decoder or _stays_exact(config, config):  # only their encoders are sparse, without a cache
        return
    if isinstance(q_offset, Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise UserError(
            f"{type(config).__name__}: a cache of fixed size has slots for future keys, or has dropped early ones, "
            "so that rows of a block-sparse layout are not found in it: use the default (dynamic) cache."
        )


def _hides_nothing(mask: Tensor | None) -> bool:
    """Looked up once for all layers, where looking makes no GPU wait and breaks no graph."""
    return mask is not None and mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())


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
    """transformers' attention function.

    Args:
        module: the attention layer; its `config` has the layout.
        query: [batch, heads, queries, head_dim].
        key, value: [batch, heads or fewer, keys, head_dim].
        attention_mask: as from `attention_mask`, or what the user gave, [batch, 1 or heads, queries, keys].
        position_bias: a T5 bias as its table [num_buckets, heads] or dense [1, heads, queries, keys]; empty for none.

    Returns:
        [batch, queries, heads, head_dim], and None instead of attention weights, which are never formed.

    Raises:
        UserError: attention weights, soft capping or sinks are asked for, or the layout does not fit.
    """
    _refuse_unsupported(kwargs)
    num_heads = query.shape[1]
    key, value = (_for_all_heads(x, num_heads) for x in (key, value))
    bias = _bias(module, position_bias)
    layout = _layout(module, num_heads, as_number=torch.compiler.is_compiling())
    if attention_mask is not None and attention_mask.dim() == 4:
        lengths = query.shape[2], key.shape[2]
        spec = _with_matrix(attention_mask.expand(-1, -1, *lengths), bias, layout)
        output, _ = attend(query, key, value, spec._replace(scale=scaling, dropout_p=dropout))
    else:
        options = {"causal": _is_causal(module, is_causal, query, key), "scale": scaling, "dropout_p": dropout}
        output = block_sparse_attention(
            query, key, value, layout, bias=bias, key_padding_mask=attention_mask, **options
        )
    return output.transpose(1, 2).contiguous(), None


def forward_with_weights(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The same attention with its weights, [batch, heads, queries, keys], to look at: dense, without dropout."""
    key, value = (_for_all_heads(x, query.shape[1]) for x in (key, value))
    layout, bias = _layout(module, query.shape[1]), _bias(module, position_bias)
    causal = _is_causal(module, is_causal, query, key)
    weights = attention_probabilities(query, key, layout, bias, attention_mask, causal=causal, scale=scaling)
    weights = weights.to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _for_all_heads(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values of grouped-query attention, one for each head."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _is_causal(module: nn.Module, is_causal: bool | None, query: Tensor, key: Tensor) -> bool:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return causal and query.shape[2] > 1 and query.shape[2] == key.shape[2]


def _refuse_unsupported(options: dict[str, Any]) -> None:
    if options.get("output_attentions"):
        raise UserError(
            "output_attentions=True needs attention weights, which block-sparse attention never forms: load the model "
            'with attn_implementation="eager" to look at them.'
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UserError(f"Block-sparse attention has no {name!r}, which this model needs: use another attention.")


def _bias(module: nn.Module, position_bias: Tensor | None) -> Bias | None:
    if position_bias is None or position_bias.numel() == 0:
        return None
    if position_bias.dim() == 4:
        return position_bias
    return T5Bias(
        position_bias,
        bidirectional=not module.is_decoder,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )


def _layout(module: nn.Module, num_heads: int, as_number: bool = False) -> SparsityConfig | int | None:
    """The layout of a layer: that of its configuration, None for exact attention; for torch.compile its number."""
    config = module.config
    name = getattr(config, TYPE_KEY, None)
    if name is None or _stays_exact(module, config):
        return None
    settings, layer_idx = getattr(config, SETTINGS_KEY, None) or {}, getattr(module, "layer_idx", None) or 0
    return (_layout_number if as_number else _layout_of)(name, settings, num_heads, layer_idx)


def _layout_of(name: str, settings: dict[str, Any], num_heads: int, layer_idx: int) -> SparsityConfig | None:
    return _sparsity_config(name, json.dumps(settings, sort_keys=True), num_heads, layer_idx)


@torch.compiler.assume_constant_result  # asked once a graph, which is guarded by what the configuration says
def _layout_number(name: str, settings: dict[str, Any], num_heads: int, layer_idx: int) -> int | None:
    layout = _layout_of(name, settings, num_heads, layer_idx)
    return None if layout is None else number_of_layout(layout)


def _stays_exact(module: object, config: PreTrainedConfig) -> bool:
    """True if a layer (or configuration) is of a decoder that reads an encoder; decoders alone may be sparse."""
    if not getattr(module, "is_decoder", getattr(config, "is_decoder", False)):
        return False
    reads = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    return reads or any(hasattr(config, name) for name in ("num_decoder_layers", "decoder_layers"))


@functools.lru_cache(maxsize=512)  # one object a layout, because what kernels need is cached by object
def _sparsity_config(name: str, settings: str, num_heads: int, layer_idx: int) -> SparsityConfig | None:
    config = get_sparsity_config(name, **{"num_heads": num_heads, **json.loads(settings)})
    if isinstance(config, DenseSparsityConfig):
        return None
    if layer_idx and not config.uses_random_blocks:
        return _sparsity_config(name, settings, num_heads, 0)
    config.layer_idx += layer_idx
    return config


def _with_matrix(mask: Tensor, bias: Bias | None, layout: SparsityConfig | int | None) -> AttentionSpec:
    """The spec of a mask of queries by keys: True where allowed, or floats that are added to scores."""
    if mask.dtype == torch.bool:
        return AttentionSpec(mask=mask, bias=bias, layout=layout)
    if bias is not None:
        mask = mask + shared_bias(bias, mask.shape[2], mask.shape[3], "sdpa")
    allowed = mask.new_ones(1, 1, 1, 1, dtype=torch.bool)  # dense, as under any other matrix
    return AttentionSpec(mask=allowed, bias=mask, layout=layout)


def _pass_tables(modeling: ModuleType) -> None:
    """Patch T5-like attention classes of a module, once, to pass biases as tables where matrices cost more."""
    if getattr(modeling, "_biases_are_tables", False):
        return
    for attention_cls in vars(modeling).values():
        if isinstance(attention_cls, type) and attention_cls.__module__ == modeling.__name__:
            if _takes(attention_cls, "compute_bias", "query_length", "key_length"):
                attention_cls.compute_bias = _table_bias(attention_cls.compute_bias)
                if _takes(attention_cls, "forward", "key_value_states", "position_bias"):
                    attention_cls.forward = _without_zeros(attention_cls.forward)
    modeling._biases_are_tables = True


def _takes(cls: type, method: str, *names: str) -> bool:
    function = vars(cls).get(method)
    return function is not None and set(names) <= set(inspect.signature(function).parameters)


def _table_bias(compute_bias: Any) -> Any:
    @functools.wraps(compute_bias)
    def table_bias(
        self: nn.Module, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int | Tensor = 0
    ) -> Tensor:
        cached = isinstance(past_seen_tokens, Tensor) or past_seen_tokens > 0 or query_length != key_length
        if self.config._attn_implementation != NAME or cached:
            return compute_bias(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        # Through the embedding, so that it works where weights are sharded, and as a tensor of its own, so that
        # gradients of all layers meet here whatever checkpoints activations.
        table = self.relative_attention_bias(torch.arange(self.relative_attention_num_buckets, device=device))
        is_dense = _layout(self, table.shape[1], as_number=torch.compiler.is_compiling()) is None
        bias = shared_bias(_bias(self, table), query_length, key_length, "auto", table.device, is_dense, self.training)
        return bias if isinstance(bias, Tensor) else table

    return table_bias


def _without_zeros(forward: Any) -> Any:
    """T5's cross-attention has no bias, for which transformers forms zeros [1, heads, queries, keys]."""

    @functools.wraps(forward)
    def forward_without_zeros(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_cross = kwargs.get("key_value_states") is not None and not self.has_relative_attention_bias
        if is_cross and kwargs.get("position_bias") is None and self.config._attn_implementation == NAME:
            kwargs["position_bias"] = hidden_states.new_empty(0)
        return forward(self, hidden_states, *args, **kwargs)

    return forward_without_zeros


register()
