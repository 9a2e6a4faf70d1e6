"""T5 (Raffel et al. 2020, arXiv 1910.10683) with its heads; `layers` has the transformer layers.

Parameters have the names of transformers' T5: `T5ForConditionalGeneration.from_pretrained` reads any T5, FLAN-T5 or
UL2 of the Hub. transformers reads what `save_pretrained` writes, unless a variant is enabled (a key of `T5Config`).

Shapes: B sequences, L tokens of the encoder, T of the decoder, M memory tokens (learned vectors before the input), D
features, V words.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from lm_experiments_tools.attention.segments import Segments, without_padding
from lm_experiments_tools.modules.fast_step import is_plain, stream_dtype
from lm_experiments_tools.modules.losses import classification_loss
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.layers import T5Attention as T5Attention  # found here too, by configurations
from modeling_t5.layers import T5CDQAttention as T5CDQAttention
from modeling_t5.layers import T5ClassificationHead
from modeling_t5.losses import IGNORED, chunked_token_loss, compute_dtype, default_chunk, token_loss
from modeling_t5.stack import T5PreTrainedModel, T5Stack


def embed_both(first: nn.Embedding, second: nn.Embedding, ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor] | None:
    """Look up the token ids of encoder and decoder in one call, if they share the embedding; otherwise return None.

    Args:
        first, second: embeddings of encoder and decoder.
        ids, others: token ids of encoder and decoder.
    """
    if first.weight is not second.weight or not all(is_plain(table, nn.Embedding) for table in (first, second)):
        return None
    if any(getattr(first, name) for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")):
        return None
    rows = nn.functional.embedding(torch.cat([ids.flatten(), others.flatten()]), first.weight)
    made, more = rows.split([ids.numel(), others.numel()])
    made, more = made.unflatten(0, ids.shape), more.unflatten(0, others.shape)
    # Copies, as the first layer would be compiled anew for views.
    return made.to(stream_dtype(rows), copy=True), more.to(stream_dtype(rows), copy=True)


def _copy(config: T5Config, **values: Any) -> T5Config:
    """A copy with other values, for one stack: from what the caller gave, another may yet be made."""
    config = copy.deepcopy(config)
    for name, value in values.items():
        setattr(config, name, value)
    return config


class T5EncoderModel(T5PreTrainedModel):
    """The encoder of T5 without a decoder; `last_hidden_state` is [batch, memory tokens + length, d_model].

    Memory tokens are learned vectors before the input; by default there are none.
    """

    _input_embed_layer = "shared"
    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^decoder", r"^lm_head"]

    def __init__(self, config: T5Config) -> None:
        super().__init__(_copy(config, is_encoder_decoder=False, use_cache=False))
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(self.config)
        self.post_init()

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
    """Encoder and decoder of T5 without an output layer.

    `last_hidden_state` is the decoder's, [batch, target length, d_model].
    """

    _input_embed_layer = "shared"
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
        self.encoder = T5Stack(_copy(config, use_cache=False))
        self.decoder = T5Stack(_copy(config, is_decoder=True, num_layers=config.num_decoder_layers))

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        if self.config.separate_encoder_embeddings and value.num_embeddings != self.shared.num_embeddings:
            raise ValueError("separate_encoder_embeddings: the token embeddings of this T5 cannot be resized.")
        self.shared = value
        if not self.config.separate_encoder_embeddings:
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
        """Compute hidden states. Arguments are those of transformers' T5Model, and segment IDs."""
        cross_mask = None
        if (segment_ids is None) != (decoder_segment_ids is None):
            raise ValueError("segment_ids and decoder_segment_ids belong together: give both, or neither.")
        if segment_ids is not None:
            if self.config.num_cdq_heads:
                raise ValueError("num_cdq_heads: these queries know the whole row, so segment_ids cannot part it.")
            if self.encoder.block[0].layer[0].SelfAttention.layout is not None:
                raise ValueError("the blocks of a sparse layout are laid over the row, so segment_ids cannot part it.")
            segment_ids = without_padding(segment_ids, attention_mask)
            decoder_segment_ids = without_padding(decoder_segment_ids, decoder_attention_mask)
            attention_mask = self.encoder.mask_of(Segments(segment_ids, segment_ids))
            decoder_attention_mask = self.decoder.mask_of(Segments(decoder_segment_ids, decoder_segment_ids))
            cross_mask = self.decoder.mask_of(Segments(decoder_segment_ids, segment_ids), is_cross=True)
        has_ids = input_ids is not None and decoder_input_ids is not None
        if self.is_fast and self.training and has_ids and encoder_outputs is None:
            both = embed_both(self.encoder.embed_tokens, self.decoder.embed_tokens, input_ids, decoder_input_ids)
            if both is not None:
                input_ids, decoder_input_ids, (inputs_embeds, decoder_inputs_embeds) = None, None, both
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs[0],
            self.encoder.with_memory(attention_mask) if cross_mask is None else cross_mask,
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
    """T5 with its output layer, for pre-training and generation."""

    _tied_weights_keys = {**T5Model._tied_weights_keys, "lm_head.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [r"EncDecAttention\.relative_attention_bias"]
    accepts_loss_kwargs = True  # num_items_in_batch
    compiles_loss = True  # on a GPU, if logits are computed in chunks

    def __init__(self, config: T5Config) -> None:
        T5PreTrainedModel.__init__(self, config)
        self._add_stacks(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.linear_layers = () if config.tie_word_embeddings else ("lm_head",)
        self.post_init()

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
        """Compute loss and logits; other arguments are those of transformers' T5ForConditionalGeneration.

        Args:
            labels: [batch, T] for T target tokens, -100 where there is none; shifted, they are the default decoder
                input.
            return_logits: False leaves logits out if the loss is computed in chunks. None: False in training.
            num_items_in_batch: divide the loss by this number of labels (of the whole step), not by the batch's own.
            segment_ids, decoder_segment_ids: int64, numbers of packed rows' examples from 1 on, 0 for padding; one for
                each token of the encoder and of the decoder.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self._shift_right(labels, decoder_segment_ids)
        outputs = super().forward(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache,
            segment_ids,
            decoder_segment_ids,
            **{**kwargs, "return_dict": True},
        )
        x = outputs.last_hidden_state
        if self.config.scale_decoder_outputs:
            x = x * self.config.d_model**-0.5
        chunk_size = self.config.cross_entropy_chunk_size
        if not chunk_size and self.is_fast and return_logits is False and self.config.final_softcap is None:
            chunk_size = default_chunk(x.device, self.config.vocab_size * compute_dtype(x).itemsize)
        if return_logits is None:
            return_logits = not self.training
        is_chunked = labels is not None and chunk_size > 0
        logits = None if is_chunked and not return_logits else self.lm_head(x)
        if logits is not None and (cap := self.config.final_softcap) is not None:
            logits = cap * (logits / cap).tanh()
        loss = None if labels is None else self.loss(x, logits, labels, num_items_in_batch, chunk_size)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **_all_but_last_hidden_state(outputs))

    def loss(
        self,
        x: Tensor,
        logits: Tensor | None,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        chunk_size: int = 0,
    ) -> Tensor:
        """Mean loss over tokens with a label, from logits or, to save memory, from hidden states.

        Args:
            x: the decoder's hidden states, before the output layer.
            logits: None computes them from x, `chunk_size` tokens at a time.
            labels: [batch, target length], -100 where there is none.
            num_items_in_batch: divide the loss by this number of labels; None for the batch's own.
        """
        labels = labels.to(x.device).flatten()
        extras = {"z_loss": self.config.z_loss, "label_smoothing": self.config.label_smoothing}
        if logits is not None:
            total = token_loss(logits.flatten(0, -2), labels, **extras)
        else:
            extras["compiled"] = self.compiles_loss
            total = chunked_token_loss(x.flatten(0, -2), self.lm_head, labels, chunk_size, **extras)
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED).sum().clamp(min=1)
        return total / num_items_in_batch

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        return self._shift_right(labels)


class T5ForSequenceClassification(T5PreTrainedModel):
    """T5 with a classification head, as in BART: encoder and decoder both read the input.

    The decoder's hidden state at the last `</s>` is classified.
    """

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
        """Compute loss and logits [B, num_labels] for B sequences.

        Args:
            labels: classes [B], or values [B, num_labels]; `problem_type` of the configuration says which.
            inputs_embeds: replace input_ids; then the last token that is not padding is classified instead of `</s>`.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if input_ids is None:
                raise ValueError("inputs_embeds say nothing of the decoder's input: give decoder_inputs_embeds too.")
            decoder_input_ids = self._shift_right(input_ids)
        outputs = self.transformer(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
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
    """T5's encoder with a linear classification layer on the mean of its output.

    It is "ST5-Enc mean" of Sentence-T5 (Ni et al. 2021, arXiv 2108.08877). Parameters have the names of transformers'
    T5ForTokenClassification.
    """

    _keys_to_ignore_on_load_unexpected = [r"^decoder", r"^lm_head"]
    linear_layers = ("classifier",)

    def __init__(self, config: T5Config) -> None:
        super().__init__(_copy(config, is_encoder_decoder=False, use_cache=False))
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
        """Compute loss and logits [B, num_labels] for B sequences of L tokens.

        The mean of the encoder's output leaves out memory tokens and padding; it is 0 for a row of padding.

        Args:
            attention_mask: [B, L], 0 for padding.
            labels: as in `T5ForSequenceClassification.forward`.
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
