"""Base class of all T5 models with initial values, and the layers of an encoder or decoder as one module (`T5Stack`).

Shapes: B sequences, L tokens, M memory tokens (learned vectors before the input), D features, H heads.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, initialization
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from lm_experiments_tools.attention.kernels.bias import Bias, T5Bias, T5Table, shared_bias
from lm_experiments_tools.attention.kernels.call import AttentionSpec, causal_mask
from lm_experiments_tools.attention.positions import PositionScheme, RelativeBiasPosition
from lm_experiments_tools.attention.segments import Segments
from lm_experiments_tools.modules.fast_step import Dropout, is_whole, stream_dtype
from lm_experiments_tools.modules.user_classes import set_own_values
from lm_experiments_tools.modules.variants import InitializesAllModules, TakesBothConfigs
from lm_experiments_tools.names import is_of_user
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.layers import (
    FeedForward,
    T5Attention,
    T5Block,
    T5ClassificationHead,
    T5LayerCrossAttention,
    T5LayerNorm,
    T5LayerSelfAttention,
)
from modeling_t5.losses import IGNORED
from modeling_t5.masks import shift_right_in_segments, spec_of


class T5PreTrainedModel(InitializesAllModules, PreTrainedModel, metaclass=TakesBothConfigs):
    """Base class of all T5 models: loading, saving and initial values."""

    config_class = T5Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["T5Block"]
    _supports_sdpa = True
    _supports_attention_backend = True  # "block_sparse", which lm_experiments_tools.attention registers
    _can_compile_fullgraph = True
    linear_layers: tuple[str, ...] = ()  # of a head, for `_init_weights`
    is_fast = False
    accepts_loss_kwargs = False  # of the Trainer: losses are means over the batch, of which it takes the mean
    _can_record_outputs = {
        "hidden_states": OutputRecorder(T5Block, index=0),
        "attentions": OutputRecorder(T5LayerSelfAttention, index=-1),
        "cross_attentions": OutputRecorder(T5LayerCrossAttention, index=-1),
    }

    def __init__(self, config: T5Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._keep_in_fp32_modules = list(config.keep_in_fp32)

    def use_fast_step(self, enabled: bool = True) -> None:
        """Enable the fused (faster) path for training (`fast_step`); saved weights and configuration do not change."""
        for part in self.modules():
            if isinstance(part, T5LayerNorm | FeedForward | T5PreTrainedModel | Dropout) or type(part) is T5Attention:
                part.is_fast = enabled

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Set the attention implementation of the model and of its encoder and decoder.

        transformers 5.17 would not change the configurations of encoder and decoder, which are copies.
        """
        super().set_attn_implementation(*args, **kwargs)
        for part in self.modules():
            if isinstance(part, T5PreTrainedModel):
                part.config._attn_implementation_internal = self.config._attn_implementation

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values, all times `initializer_factor`; those of Mesh TensorFlow T5.

        shared, memory_tokens                       N(0, 1)
        q, cd_q                                     N(0, 1 / (D d))
        k, v, wi, wi_0, wi_1, relative bias         N(0, 1 / D)
        o                                           N(0, 1 / (H d))
        wo                                          N(0, 1 / d_ff)
        lm_head of its own, classification heads    N(0, 1 / D), biases 0; transformers draws the former from N(0, 1),
                                                    with which the first losses are near 100, not near log V
        T, W_t, cd_w                                N(0, 1 / elements), as in t5-experiments
        norms                                       1
        what attention and positions of yours add   as `set_own_values` says
        other modules of yours                      as their `reset_parameters()` says
        """
        factor, d_model, d_kv = self.config.initializer_factor, self.config.d_model, self.config.d_kv
        if isinstance(module, T5LayerNorm):
            initialization.constant_(module.weight, factor)
        elif isinstance(module, PositionScheme):
            is_table = isinstance(module, RelativeBiasPosition)
            if is_table:
                initialization.normal_(module.weight, std=factor * d_model**-0.5)
            set_own_values(module, known=("weight",) if is_table else ())
        elif isinstance(module, T5Stack) and module.memory_tokens is not None:
            initialization.normal_(module.memory_tokens, std=factor)
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=factor)
        elif isinstance(module, FeedForward):
            for layer in (module.get_submodule(name) for name in module.inner_layers):
                initialization.normal_(layer.weight, std=factor * d_model**-0.5)
            initialization.normal_(module.wo.weight, std=factor * self.config.d_ff**-0.5)
        elif isinstance(module, T5Attention):
            spreads = {"q": d_model * d_kv, "cd_q": d_model * d_kv, "k": d_model, "v": d_model}
            layers = {name: getattr(module, name, None) for name in ("q", "k", "v", "o", "cd_q", "cd_w", "T", "W_t")}
            layers = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
            for name, layer in layers.items():
                inverse = layer.in_features if name == "o" else spreads.get(name, layer.weight.numel())
                initialization.normal_(layer.weight, std=factor * inverse**-0.5)
            set_own_values(module, known=(*layers, module.position_name))
        elif isinstance(module, T5ClassificationHead | T5PreTrainedModel):
            for layer in (module.get_submodule(name) for name in module.linear_layers):
                initialization.normal_(layer.weight, std=factor * d_model**-0.5)
                if layer.bias is not None:
                    initialization.zeros_(layer.bias)
        elif is_of_user(type(module)) and hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """Names of tied (shared) weights.

        Unlike in transformers, embeddings stay tied to each other if the output layer is untied.
        """
        separate = self.config.separate_encoder_embeddings
        if all_submodels or (self.config.tie_word_embeddings and not separate):
            return super().get_expanded_tied_weights_keys(all_submodels)
        own = {"encoder.embed_tokens.weight"} if separate else set()
        own |= set() if self.config.tie_word_embeddings else {"lm_head.weight"}
        return {to: source for to, source in (self._tied_weights_keys or {}).items() if to not in own}

    def _shift_right(self, labels: Tensor, segments: Tensor | None = None) -> Tensor:
        """The decoder's input for labels [B, T]: the start token, then all but the last; padding for -100."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise ValueError(
                f"decoder_start_token_id={start} and pad_token_id={padding} must be set in the configuration to make "
                "the decoder's input from labels; T5 takes 0 for both."
            )
        if segments is not None:
            return shift_right_in_segments(labels, segments, start, padding)
        shifted = pad(labels[..., :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORED, padding)


class T5Stack(T5PreTrainedModel):
    """The encoder of T5 or, if `config.is_decoder`, the decoder: embeddings, all layers, and the last norm."""

    # Besides the layers, by `lm_experiments_tools.models.speed.compile_blocks`.
    compiled_parts = ("final_layer_norm",)

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)  # tied to `shared` of the model around it
        self.is_decoder = config.is_decoder
        num_memory_tokens = 0 if config.is_decoder else config.num_memory_tokens
        self.memory_tokens = (
            nn.Parameter(torch.empty(num_memory_tokens, config.d_model)) if num_memory_tokens else None
        )
        self.block = nn.ModuleList([T5Block(config, layer_idx) for layer_idx in range(config.num_layers)])
        self.final_layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.dropout = Dropout(config.dropout_rate)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Compute hidden states [batch, memory tokens + length, d_model], with arguments as in transformers' T5Stack.

        Masks are [batch, length] or [batch, 1 or heads, length, keys].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "Give exactly one of input_ids and inputs_embeds (with decoder_ before it: the decoder's)."
            )
        if use_cache and not self.is_decoder:
            raise ValueError("use_cache=True is for decoders; this is an encoder.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.scale_embeddings:
            x = x * self.config.d_model**0.5
        if self.memory_tokens is not None:
            x = torch.cat([self.memory_tokens.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
            attention_mask = self.with_memory(attention_mask)
        if self.config.fp32_residual:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        elif self.is_fast:
            x = x.to(stream_dtype(x))
        past_key_values = self._cache(past_key_values, use_cache)
        spec = spec_of(attention_mask, causal=self.is_decoder)
        encoder_spec = spec_of(encoder_attention_mask)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        bias = None
        if self.is_fast and past_key_values is None:
            bias, spec = self.folded_bias(x, spec)
        x = self.dropout(x)
        for block in self.block:
            x, made = block(x, spec, bias, encoder_hidden_states, encoder_spec, past_key_values, output_attentions)
            bias = made if self.config.shares_position_bias else None
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.dropout(self.final_layer_norm(x)), past_key_values=past_key_values
        )

    def folded_bias(self, x: Tensor, spec: AttentionSpec) -> tuple[Bias | None, AttentionSpec]:
        """Compute the position bias once for all layers; returns it and the remaining attention settings.

        With backend "auto" on a GPU the bias is a `T5Table`. With other backends it is a matrix [1 or batch, heads,
        length, length] with -inf for packed rows, or for causality without other masks, so that compiled layers share
        a graph. If it is None (as with "auto" on a CPU), each layer computes its own.

        Args:
            x: embeddings, for their length and device.
            spec: the attention settings; what the bias includes is removed from them.
        """
        layers = [block.layer[0].SelfAttention for block in self.block]
        first = layers[0]
        if not self.config.shares_position_bias or (first.backend == "auto" and not x.is_cuda):
            return None, spec
        if not all(layer.is_fast for layer in layers) or not all(map(is_whole, first.position.parameters())):
            return None, spec
        length = x.shape[1]
        if first.backend == "auto":
            # reentrant checkpoints would go back through the lookup again and again; `device_map` moves tensors alone
            if self.gradient_checkpointing or any(layer.o.weight.device != x.device for layer in layers):
                return None, spec
            bias = first.position.bias(length, length, 0, x.device)
            return (T5Table(bias.table().contiguous()) if isinstance(bias, T5Bias) else None), spec
        bias = shared_bias(first.position.bias(length, length, 0, x.device), length, length, "eager")
        if bias is not None and spec.segment_ids is not None:
            return spec.segment_ids.added_to(bias, spec.causal), AttentionSpec(scale=spec.scale)
        others = spec.mask, spec.key_padding_mask, spec.bias
        if bias is not None and spec.causal and all(x is None for x in others):
            return bias.masked_fill(~causal_mask(length, length, x.device), -torch.inf), AttentionSpec(
                scale=spec.scale
            )
        return bias, spec

    def mask_of(self, segments: Segments, is_cross: bool = False) -> Tensor | Segments:
        """Attention mask of packed rows: `Segments` if every layer supports them, otherwise a dense mask.

        Args:
            is_cross: True for cross-attention.
        """
        layers = [block.layer[1].EncDecAttention if is_cross else block.layer[0].SelfAttention for block in self.block]
        if self.memory_tokens is None and all(layer.takes_segments for layer in layers):
            return segments
        return segments.mask(causal=self.is_decoder and not is_cross)

    def with_memory(self, attention_mask: Tensor | None) -> Tensor | None:
        """Extend the encoder's attention mask by memory tokens: learned vectors before the input, never masked.

        Args:
            attention_mask: [batch, length] or [batch, heads, queries, length]; None masks nothing. One that has a
                query for each token says nothing of memory tokens, and is refused.
        """
        if attention_mask is None or self.memory_tokens is None:
            return attention_mask
        num_memory_tokens = len(self.memory_tokens)
        if attention_mask.dim() > 2 and attention_mask.shape[-2] == attention_mask.shape[-1]:
            raise ValueError(
                f"num_memory_tokens={num_memory_tokens} takes an attention_mask [batch, length], not "
                f"{list(attention_mask.shape)}: it does not say what memory tokens may look at."
            )
        is_added = attention_mask.dim() == 4 and attention_mask.is_floating_point()
        return pad(attention_mask, (num_memory_tokens, 0), value=0 if is_added else 1)

    def _cache(self, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        if use_cache is None:
            use_cache = self.config.use_cache
        if not self.is_decoder or (self.gradient_checkpointing and self.training):
            return None
        if past_key_values is None and use_cache:
            caches = [DynamicCache(config=self.config) for _ in range(2)]
            return EncoderDecoderCache(*caches) if self.config.is_encoder_decoder else caches[0]
        return past_key_values
