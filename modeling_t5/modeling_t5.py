"""T5 (Raffel et al. 2020, arXiv 1910.10683) and its heads; the maths of a layer is in `layers`.

Parameters have the names of transformers' T5, so weights go either way: `T5ForConditionalGeneration.from_pretrained`
reads any T5, FLAN-T5 or UL2 of the Hub, and transformers reads what `save_pretrained` writes, as long as no variant is
switched on (`T5Config` lists them; each is a key of config.json).

Shapes: B sequences, L tokens of the encoder, T of the decoder, M memory tokens, D features, V words.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, pad
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from lm_experiments_tools.attention.positions import PositionScheme, RelativeBiasPosition
from lm_experiments_tools.modules.user_classes import set_own_values
from modeling_t5.cdq import T5CDQAttention
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.layers import (
    Allowed,
    FeedForward,
    T5Attention,
    T5Block,
    T5LayerCrossAttention,
    T5LayerNorm,
    T5LayerSelfAttention,
)
from modeling_t5.losses import IGNORED, chunked_token_loss, token_loss
from modeling_t5.packing import segment_masks, shift_right_in_segments

__all__ = [
    "T5Attention",
    "T5CDQAttention",
    "T5Config",
    "T5EncoderForSequenceClassification",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "T5ForSequenceClassification",
    "T5Model",
]


class T5PreTrainedModel(PreTrainedModel):
    """Loading, saving, initial values and everything else that transformers gives a model."""

    config_class = T5Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["T5Block"]
    _supports_sdpa = True
    _supports_attention_backend = True  # "block_sparse", which lm_experiments_tools.attention registers
    _can_compile_fullgraph = True
    accepts_loss_kwargs = False  # of the Trainer: losses are means over the batch, of which it takes the mean
    _can_record_outputs = {
        "hidden_states": OutputRecorder(T5Block, index=0),
        "attentions": OutputRecorder(T5LayerSelfAttention, index=-1),
        "cross_attentions": OutputRecorder(T5LayerCrossAttention, index=-1),
    }

    def __init__(self, config: T5Config, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, T5Config):
            raise ValueError(
                f"{type(self).__name__} needs a modeling_t5.T5Config, not {type(config).__module__}."
                f"{type(config).__name__}: T5Config(**config.to_dict()) makes one."
            )
        super().__init__(config, *args, **kwargs)
        self._keep_in_fp32_modules = list(config.keep_in_fp32)

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Of the stacks too, whose configurations are copies, which transformers 5.17 would leave as they are."""
        super().set_attn_implementation(*args, **kwargs)
        for part in self.modules():
            if isinstance(part, T5PreTrainedModel):
                part.config._attn_implementation_internal = self.config._attn_implementation

    def _initialize_weights(self, module: nn.Module, *args: Any) -> None:
        """Without the flag that tells transformers of code that is not its own, where it would leave out every module
        that has no parameters but those of its children, which are most of the table below."""
        super()._initialize_weights(module)

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
        what classes of your own add                as `set_own_values` says
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
        elif isinstance(module, T5ClassificationHead):
            for layer in (module.dense, module.out_proj):
                initialization.normal_(layer.weight, std=factor * d_model**-0.5)
                initialization.zeros_(layer.bias)
        elif isinstance(module, T5EncoderForSequenceClassification):
            initialization.normal_(module.classifier.weight, std=factor * d_model**-0.5)
            initialization.zeros_(module.classifier.bias)
        elif isinstance(module, T5ForConditionalGeneration) and not self.config.tie_word_embeddings:
            initialization.normal_(module.lm_head.weight, std=factor * d_model**-0.5)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        """transformers ties all or nothing; a T5 with an output layer of its own still has one input table."""
        if all_submodels or self.config.tie_word_embeddings:
            return super().get_expanded_tied_weights_keys(all_submodels)
        return {to: source for to, source in (self._tied_weights_keys or {}).items() if to != "lm_head.weight"}

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
    """The encoder or, if `config.is_decoder`, the decoder."""

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
        self.dropout = nn.Dropout(config.dropout_rate)
        self.gradient_checkpointing = False
        self.post_init()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

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
        """Hidden states [B, M + L, D]; masks are [B, L] or, as they are, [B, 1 or heads, L, keys].

        `capture_outputs` collects hidden states and attention weights of all layers where they are asked for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "Give exactly one of input_ids and inputs_embeds (with decoder_ before it: the decoder's)."
            )
        if use_cache and not self.is_decoder:
            raise ValueError("use_cache=True is for decoders; this is an encoder.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.memory_tokens is not None:
            x = torch.cat([self.memory_tokens.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
            attention_mask = self.with_memory(attention_mask)
        if self.config.fp32_residual:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        past_key_values = self._cache(past_key_values, use_cache)
        allowed = _allowed(attention_mask, causal=self.is_decoder)
        encoder_allowed = _allowed(encoder_attention_mask)
        bias = None
        x = self.dropout(x)
        for block in self.block:
            x, made = block(
                *(x, allowed, bias, encoder_hidden_states, encoder_allowed),
                past_key_values=past_key_values,
                output_attentions=self.config.output_attentions if output_attentions is None else output_attentions,
            )
            bias = made if self.config.shares_position_bias else None
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.dropout(self.final_layer_norm(x)), past_key_values=past_key_values
        )

    def with_memory(self, attention_mask: Tensor | None) -> Tensor | None:
        """The encoder's mask [B, L] or [B, heads, Q, L] with its memory tokens, which all may look at, before it."""
        if attention_mask is None or self.memory_tokens is None:
            return attention_mask
        num_memory_tokens = len(self.memory_tokens)
        if attention_mask.dim() == 4 and attention_mask.shape[2] == attention_mask.shape[3]:
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


def _allowed(attention_mask: Tensor | None, causal: bool = False) -> Allowed:
    """A mask as transformers takes it: 1 and 0 [B, K] or, of bool or integers, [B, Q, K] or [B, 1 or heads, Q, K]; of
    floats and the latter shape, it is added to scores, and the lowest number of its type says "never"."""
    if attention_mask is None or attention_mask.dim() == 2:
        return Allowed(None if attention_mask is None else attention_mask != 0, causal=causal)
    if not attention_mask.is_floating_point():
        return Allowed(mask=(attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask) != 0)
    if attention_mask.dim() != 4:
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}: one that is added to scores has "
            "4 dimensions, [batch, heads or 1, queries, keys], and one of 0 and 1 must be bool or integer."
        )
    allowed = attention_mask > torch.finfo(attention_mask.dtype).min / 2
    return Allowed(mask=allowed, added=attention_mask.masked_fill(~allowed, 0.0))


def _of_encoder(config: T5Config) -> T5Config:
    """A copy, for an encoder alone: from what the caller gave, a decoder may yet be made."""
    config = copy.deepcopy(config)
    config.is_encoder_decoder, config.use_cache = False, False
    return config


class T5EncoderModel(T5PreTrainedModel):
    """The encoder alone; `last_hidden_state` is [B, M + L, D]."""

    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^decoder", r"^lm_head"]

    def __init__(self, config: T5Config) -> None:
        super().__init__(_of_encoder(config))
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(self.config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.shared = value
        self.encoder.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        return self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)


class T5Model(T5PreTrainedModel):
    """Encoder and decoder; `last_hidden_state` is the decoder's [B, T, D]."""

    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }
    _keys_to_ignore_on_load_unexpected = [r"^lm_head", r"EncDecAttention\.relative_attention_bias"]

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self._add_stacks(config)
        self.post_init()

    def _add_stacks(self, config: T5Config) -> None:
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        encoder_config = copy.deepcopy(config)
        encoder_config.use_cache = False
        self.encoder = T5Stack(encoder_config)
        decoder_config = copy.deepcopy(config)
        decoder_config.is_decoder, decoder_config.num_layers = True, config.num_decoder_layers
        self.decoder = T5Stack(decoder_config)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.shared = value
        self.encoder.set_input_embeddings(value)
        self.decoder.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Args are those of transformers' T5Model, and segments of packed rows (packing.py) instead of masks."""
        cross_mask = None
        if segment_ids is not None:
            if self.config.num_cdq_heads:
                raise ValueError("num_cdq_heads: these queries know the whole row, so segment_ids cannot part it.")
            attention_mask, decoder_attention_mask, cross_mask = segment_masks(segment_ids, decoder_segment_ids)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        decoded = self.decoder(
            *(decoder_input_ids, decoder_attention_mask),
            encoder_hidden_states=encoder_outputs[0],
            encoder_attention_mask=self.encoder.with_memory(attention_mask) if cross_mask is None else cross_mask,
            inputs_embeds=decoder_inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def _all_but_last_hidden_state(outputs: Seq2SeqModelOutput) -> dict[str, Any]:
    return {name: value for name, value in outputs.items() if name != "last_hidden_state"}


class T5ForConditionalGeneration(T5Model, GenerationMixin):
    """T5 with its output layer: what is pre-trained and what generates."""

    _tied_weights_keys = {**T5Model._tied_weights_keys, "lm_head.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [r"EncDecAttention\.relative_attention_bias"]
    accepts_loss_kwargs = True  # num_items_in_batch

    def __init__(self, config: T5Config) -> None:
        T5PreTrainedModel.__init__(self, config)
        self._add_stacks(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        segment_ids: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Loss and logits [B, T, V]; args are those of transformers' T5ForConditionalGeneration, and these.

        Args:
            labels: [B, T], -100 where there is none; also the decoder's input, shifted, unless that is given.
            return_logits: with labels and `cross_entropy_chunk_size`, False leaves logits out; None does in training.
            num_items_in_batch: valid labels of the whole step, which the loss is then divided by.
            segment_ids, decoder_segment_ids: int64[B, L] and [B, T], examples of packed rows from 1 on, 0 for padding.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self._shift_right(labels, decoder_segment_ids)
        outputs = super().forward(
            *(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs),
            *(past_key_values, inputs_embeds, decoder_inputs_embeds, use_cache, segment_ids, decoder_segment_ids),
            **{**kwargs, "return_dict": True},
        )
        x = outputs.last_hidden_state
        if self.config.scale_decoder_outputs:
            x = x * self.config.d_model**-0.5
        if return_logits is None:
            return_logits = not self.training
        is_chunked = labels is not None and self.config.cross_entropy_chunk_size > 0
        logits = None if is_chunked and not return_logits else self.lm_head(x)
        loss = None if labels is None else self.loss(x, logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **_all_but_last_hidden_state(outputs))

    def loss(
        self, x: Tensor, logits: Tensor | None, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Mean over valid labels [B, T] of the loss of logits, or, chunk by chunk, of those made from x [B, T, D]."""
        labels = labels.to(x.device).flatten()
        extras = {"z_loss": self.config.z_loss, "label_smoothing": self.config.label_smoothing}
        if logits is not None:
            total = token_loss(logits.flatten(0, -2), labels, **extras)
        else:
            chunk_size = self.config.cross_entropy_chunk_size
            total = chunked_token_loss(x.flatten(0, -2), self.lm_head, labels, chunk_size, **extras)
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED).sum().clamp(min=1)
        return total / num_items_in_batch

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        return self._shift_right(labels)


class T5ClassificationHead(nn.Module):
    """out_proj(tanh(dense(x))): [B, D] -> [B, num_labels]."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(config.d_model, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.dropout(torch.tanh(self.dense(self.dropout(x)))))


class T5ForSequenceClassification(T5PreTrainedModel):
    """Classifies what the decoder makes of the last `</s>` of its input, which is that of the encoder (as BART)."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head", r"EncDecAttention\.relative_attention_bias"]

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.transformer = T5Model(config)
        self.classification_head = T5ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqSequenceClassifierOutput:
        """Loss and logits [B, num_labels]; labels are classes [B], or values [B, num_labels] (`problem_type`).

        With inputs_embeds, in which `</s>` cannot be found, the last place that is not padding is classified.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if input_ids is None:
                raise ValueError("inputs_embeds say nothing of the decoder's input: give decoder_inputs_embeds too.")
            decoder_input_ids = self._shift_right(input_ids)
        outputs = self.transformer(
            *(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs),
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            **{**kwargs, "return_dict": True},
        )
        x = outputs.last_hidden_state
        if input_ids is not None:
            ends = torch.tensor(self.config.eos_token_id, device=input_ids.device)  # one, or several
            is_end = torch.isin(input_ids, ends)
            if not torch.compiler.is_compiling() and not is_end.any(1).all():  # a traced graph cannot look
                raise ValueError(f"Every row needs the eos token {self.config.eos_token_id}: its state is classified.")
        else:
            is_end = torch.ones(x.shape[:2], device=x.device) if attention_mask is None else attention_mask != 0
        last = is_end.shape[1] - 1 - is_end.flip(1).int().argmax(1)
        logits = self.classification_head(x[torch.arange(x.shape[0], device=x.device), last])
        loss = None if labels is None else classification_loss(self.config, logits, labels.to(logits.device))
        return Seq2SeqSequenceClassifierOutput(loss=loss, logits=logits, **_all_but_last_hidden_state(outputs))


class T5EncoderForSequenceClassification(T5PreTrainedModel):
    """A linear layer on the mean of the encoder's output, which for T5 without a decoder is better than the first
    token's (Sentence-T5: Ni et al. 2021, arXiv 2108.08877, "ST5-Enc mean"). Its parameters have the names of
    transformers' T5ForTokenClassification."""

    _keys_to_ignore_on_load_unexpected = [r"^decoder", r"^lm_head"]

    def __init__(self, config: T5Config) -> None:
        super().__init__(_of_encoder(config))
        self.transformer = T5EncoderModel(self.config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Loss and logits [B, num_labels]; labels are as in `T5ForSequenceClassification`, attention_mask is [B, L].

        Memory tokens and padding are not part of the mean; that of a row of padding is 0.
        """
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask is {list(attention_mask.shape)}; it must be [batch, length], to say what counts."
            )
        outputs = self.transformer(input_ids, attention_mask, inputs_embeds, **{**kwargs, "return_dict": True})
        x = outputs.last_hidden_state[:, self.config.num_memory_tokens :]
        is_token = torch.ones(x.shape[:2], device=x.device) if attention_mask is None else attention_mask != 0
        is_token = is_token.to(torch.promote_types(x.dtype, torch.float32))[..., None]
        mean = (x * is_token).sum(1) / is_token.sum(1).clamp(min=1)
        logits = self.classifier(self.dropout(mean.to(x.dtype)))
        loss = None if labels is None else classification_loss(self.config, logits, labels.to(logits.device))
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def classification_loss(config: T5Config, logits: Tensor, labels: Tensor) -> Tensor:
    """By `config.problem_type`, which is set from the first labels seen, as transformers does; in float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config.problem_type is None:
        if config.num_labels == 1:
            config.problem_type = "regression"
        else:
            is_class = labels.dtype in (torch.long, torch.int)
            config.problem_type = "single_label_classification" if is_class else "multi_label_classification"
    if config.problem_type == "regression":
        return mse_loss(logits.squeeze(), labels.squeeze().to(logits.dtype))
    if config.problem_type == "single_label_classification":
        labels = labels.flatten()
        return token_loss(logits.view(-1, config.num_labels), labels) / (labels != IGNORED).sum().clamp(min=1)
    return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
