"""BERT (Devlin et al. 2018, arXiv 1810.04805) with its heads; `layers` has the transformer layer.

Parameters have the names of transformers' BERT: `BertForMaskedLM.from_pretrained` reads any BERT of the Hub.
transformers reads what `save_pretrained` writes, unless a variant is enabled (a key of `BertConfig`).

Shapes: B sequences, L tokens, D features, V words; in packed rows at most S documents a row.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from lm_experiments_tools.attention.kernels.call import AttentionSpec
from lm_experiments_tools.attention.positions import PositionScheme, RelativeBiasPosition
from lm_experiments_tools.attention.segments import positions_of, starts_of
from lm_experiments_tools.modules.fast_step import Dropout
from lm_experiments_tools.modules.losses import classification_loss, mean_loss
from lm_experiments_tools.modules.user_classes import set_own_values
from lm_experiments_tools.modules.variants import InitializesAllModules, TakesBothConfigs
from lm_experiments_tools.names import is_of_user
from modeling_bert.configuration_bert import BertConfig
from modeling_bert.layers import (
    BertEmbeddings,
    BertEncoder,
    BertLayer,
    BertSelfAttention,
    CanBeFast,
    make_norm,
    of_documents,
    spec_of_packed_rows,
)
from modeling_bert.losses import place_loss, words_loss
from modeling_bert.positions import RelativeKeyPosition

TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


class BertPreTrainedModel(InitializesAllModules, PreTrainedModel, metaclass=TakesBothConfigs):
    """Base class of all BERT models: loading, saving and initial values."""

    config_class = BertConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BertEmbeddings", "BertLayer"]
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]  # 0..511, which transformers 4 saved
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": BertLayer, "attentions": BertSelfAttention}
    _supports_attention_backend = True  # "block_sparse", which lm_experiments_tools.attention registers
    is_fast = False
    accepts_loss_kwargs = False  # of the Trainer: losses are means over the batch, of which it takes the mean

    def __init__(self, config: BertConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.position_embedding_type != "absolute":  # and this table, whether it was used or not
            unused = r"embeddings\.position_embeddings\.weight$"
            self._keys_to_ignore_on_load_unexpected = [*self._keys_to_ignore_on_load_unexpected, unused]

    def use_fast_step(self, enabled: bool = True) -> None:
        """Enable the fused (faster) path for training; saved weights and configuration do not change.

        See modules/fast_step.py.
        """
        for part in self.modules():
            if isinstance(part, CanBeFast | BertPreTrainedModel | Dropout):
                part.is_fast = enabled

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values.

        | parameter | distribution |
        |---|---|
        | matrices, embeddings, tables of position schemes | normal, mean 0, `initializer_range`; the padding word: 0 |
        | biases | 0 |
        | norms | weight 1, bias 0 |
        | a position scheme or another module of your own | as its `reset_parameters()` says |
        """
        super()._init_weights(module)
        if isinstance(module, (RelativeBiasPosition, RelativeKeyPosition)):
            initialization.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, BertPredictions) and has_named_bias(self.config):
            initialization.zeros_(module.bias)
        if isinstance(module, PositionScheme):
            tables = ("weight",) if isinstance(module, RelativeBiasPosition) else ()
            set_own_values(module, known=(*tables, *(name for name, _ in module.named_children())))
        elif is_of_user(type(module)) and hasattr(module, "reset_parameters"):
            module.reset_parameters()


class BertPooler(nn.Module):
    """BERT's pooled output: tanh of a linear layer on the first token, in packed rows on that of each document."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Pool the first token of each row, [batch, features].

        Args:
            starts: for packed rows, the index of each document's first token, [batch, documents]; None for one text a
                row.
        """
        first = x[:, 0] if starts is None else x[torch.arange(len(x), device=x.device)[:, None], starts]
        return self.dense(first).tanh()


class BertModel(BertPreTrainedModel):
    """BERT without a head: hidden states and the pooled first token."""

    _input_embed_layer = "word_embeddings"

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        segment_ids: Tensor | None = None,
        num_segments: int | None = None,
        **unset: object,
    ) -> BaseModelOutputWithPooling:
        """Compute hidden states and pooled tokens of a batch of B sequences with L tokens and D features.

        Args:
            input_ids: [B, L]; or inputs_embeds [B, L, D], one of the two.
            attention_mask: [B, L], 1 for tokens and 0 for padding; or what each token may attend to, bool or integer
                [B, L, L] or [B, 1 or heads, L, L].
            token_type_ids: [B, L]; all 0 if None.
            position_ids: [B or 1, L], for position_embedding_type "absolute" only; 0..L-1 if None.
            segment_ids: int [B, L], document IDs of packed rows (attention/segments.py), from 1 on, 0 for padding.
            num_segments: number of documents to pool in each row; None takes the largest ID, which synchronizes with a
                GPU.
            unset: arguments of transformers' models that this one lacks (head_mask, use_cache, ...), None or False.

        Raises:
            TypeError: one of `unset` has a value.
            ValueError: more tokens than positions; missing, duplicate or misshapen inputs; packed rows with a
                block-sparse layout or with a mask other than [B, L].
        """
        if given := [name for name, value in unset.items() if value is not None and value is not False]:
            raise TypeError(f"BertModel does not take {', '.join(given)}.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embeddings.word_embeddings(input_ids)
        self._check_positions(inputs_embeds.shape[1], position_ids)
        spec, offset, starts = _spec_of(attention_mask, *inputs_embeds.shape[:2]), 0, None
        if segment_ids is not None:
            spec, offset = spec_of_packed_rows(segment_ids, spec, self.config, self.encoder.position)
            if position_ids is None and self.embeddings.position_embeddings is not None:
                position_ids = positions_of(segment_ids)
            if self.pooler is not None:
                starts = starts_of(segment_ids, num_segments or int(segment_ids.max()))
        if self.is_fast and spec.key_padding_mask is not None and _is_full(spec.key_padding_mask):
            spec = AttentionSpec()
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        x = self.embeddings(inputs_embeds, token_type_ids, position_ids)
        x = self.encoder(x, spec, offset, output_attentions)
        return BaseModelOutputWithPooling(
            last_hidden_state=x, pooler_output=None if self.pooler is None else self.pooler(x, starts)
        )

    def _check_positions(self, length: int, position_ids: Tensor | None) -> None:
        kind, limit = self.config.position_embedding_type, self.config.max_position_embeddings
        if kind in ("absolute", "relative_key", "relative_key_query") and length > limit:
            raise ValueError(
                f"{length} tokens are more than max_position_embeddings={limit}, and {kind} positions know no others: "
                "cut the input, or choose rotary, alibi or relative_attention_bias."
            )
        if kind != "absolute" and position_ids is not None:
            raise ValueError(f"position_ids are for absolute positions, but position_embedding_type is {kind}.")


class BertPredictionTransform(nn.Module):
    """Linear layer, activation and norm before the output layer of the MLM head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(x)))


def has_named_bias(config: BertConfig) -> bool:
    """True if the output layer's bias is also the parameter `cls.predictions.bias`, as in BERT's checkpoints."""
    return config.decoder_bias and config.head_transform


class BertPredictions(nn.Module):
    """Output layer over the vocabulary, whose weight is tied to (shared with) the word embeddings."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionTransform(config) if config.head_transform else nn.Identity()
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=config.decoder_bias)
        if has_named_bias(config):
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the decoder's, under its name of 2018

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [batch, length, vocabulary] from hidden states x [batch, length, features]."""
        return self.decoder(self.transform(x))


def at_positions(x: Tensor, positions: Tensor | None) -> Tensor:
    """Hidden states [1, n, D] of n tokens among x [B, L, D], whose logits alone are needed; None returns x.

    Args:
        positions: int64 [n], b * L + l for token l of sequence b; labels are then [1, n].
    """
    return x if positions is None else x.flatten(0, 1)[positions][None]


class BertHeads(nn.Module):
    """Pre-training heads of BERT: one predicts masked tokens and, if configured, one the next sentence."""

    def __init__(self, config: BertConfig, judges_pairs: bool) -> None:
        super().__init__()
        self.predictions = BertPredictions(config)
        if judges_pairs:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


class _WithWords(BertPreTrainedModel):
    """Models that have the words' matrix twice, as input and as output, and tie the two."""

    has_causal_loss = True  # with `is_decoder`

    @property
    def shifts_labels(self) -> bool:
        """True if each token predicts the next one's label."""
        return self.config.is_decoder

    _tied_weights_keys = TIED
    _judges_pairs: ClassVar[bool]

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=self._judges_pairs)
        self.cls = BertHeads(config, self._judges_pairs)
        if not has_named_bias(config):
            self._tied_weights_keys = {name: source for name, source in TIED.items() if name.endswith("weight")}
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        bias = new_embeddings.bias
        if not has_named_bias(self.config):
            return
        if not self.config.tie_word_embeddings:  # two of their own: shared, one would be saved and not found again
            bias = nn.Parameter(bias.detach().clone())
        self.cls.predictions.bias = bias


@dataclasses.dataclass
class BertForPreTrainingOutput(ModelOutput):
    """Output of `BertForPreTraining`: the fields of transformers' output, and the loss's two terms."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    loss_mlm: Tensor | None = None
    loss_nsp: Tensor | None = None


class BertForPreTraining(_WithWords):
    """BERT with masked language modeling and next-sentence prediction."""

    _judges_pairs = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        segment_ids: Tensor | None = None,
        label_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BertForPreTrainingOutput:
        """Predict masked tokens and sentence order for B sequences of L tokens.

        Other arguments are those of `BertModel.forward`.

        Args:
            labels: [B, L], the masked words, -100 elsewhere.
            next_sentence_label: [B], 0 for a pair in its order and 1 for another; for packed rows with S documents [B,
                S].
            label_positions: see `at_positions`.

        Returns:
            `loss` is the sum of `loss_mlm`, a mean over labels that are not -100, and `loss_nsp`, a mean over
            sequences, as far as labels are given. A term without valid labels is 0.
        """
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        packed = of_documents(segment_ids, next_sentence_label)
        outputs = self.bert(*inputs, **packed, return_dict=True, **kwargs)
        words = self.cls.predictions(at_positions(outputs.last_hidden_state, label_positions))
        pairs = self.cls.seq_relationship(outputs.pooler_output)
        loss_mlm = None if labels is None else words_loss(words, labels, segment_ids, self.config.is_decoder)
        loss_nsp = None if next_sentence_label is None else mean_loss(pairs, next_sentence_label)
        parts = [part for part in (loss_mlm, loss_nsp) if part is not None]
        return BertForPreTrainingOutput(
            loss=sum(parts) if parts else None,
            prediction_logits=words,
            seq_relationship_logits=pairs,
            loss_mlm=loss_mlm,
            loss_nsp=loss_nsp,
            **_recorded(outputs),
        )


class BertForMaskedLM(_WithWords):
    """BERT with masked language modeling."""

    _judges_pairs = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        label_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Predict masked tokens. Other arguments are those of `BertModel.forward`.

        Args:
            labels: [batch, length], the masked words, -100 elsewhere. With `is_decoder` they are the tokens
                themselves, each predicted from those before it.
            label_positions: see `at_positions`.
        """
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        outputs = self.bert(*inputs, segment_ids=segment_ids, return_dict=True, **kwargs)
        words = self.cls.predictions(at_positions(outputs.last_hidden_state, label_positions))
        loss = None if labels is None else words_loss(words, labels, segment_ids, self.config.is_decoder)
        return MaskedLMOutput(loss=loss, logits=words, **_recorded(outputs))


class _WithClassifier(BertPreTrainedModel):
    """Models with a linear layer on hidden states, or on the pooled one."""

    _is_pooled: ClassVar[bool]

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=self._is_pooled)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class BertForSequenceClassification(_WithClassifier):
    """BERT with a classification or regression head: one label, several labels or numbers per sequence."""

    _is_pooled = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify B sequences, or predict numbers for them. Other arguments are those of `BertModel.forward`.

        `config.problem_type` determines the labels; if it is None, the first labels determine the type.

        - "single_label_classification": classes [B].
        - "multi_label_classification": 0. and 1., [B, num_labels].
        - "regression": numbers [B] (num_labels 1) or [B, num_labels].

        Packed rows with S documents have labels [B, S] or [B, S, num_labels], -100 for missing documents, and logits
        [B, S, num_labels].
        """
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        outputs = self.bert(*inputs, **of_documents(segment_ids, labels), return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None if labels is None else classification_loss(self.config, logits, labels, segment_ids is not None)
        return SequenceClassifierOutput(loss=loss, logits=logits, **_recorded(outputs))


class BertForTokenClassification(_WithClassifier):
    """BERT with a head that predicts a label for each token."""

    _is_pooled = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Classify each token. Other arguments are those of `BertModel.forward`.

        Args:
            labels: classes [batch, length], -100 where there is none.
        """
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        outputs = self.bert(*inputs, segment_ids=segment_ids, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else mean_loss(logits, labels)
        return TokenClassifierOutput(loss=loss, logits=logits, **_recorded(outputs))


class BertForQuestionAnswering(BertPreTrainedModel):
    """BERT that predicts the first and last token of an answer in the text."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Predict where an answer begins and ends in the text. Other arguments are those of `BertModel.forward`.

        Args:
            start_positions, end_positions: indices of the answer's first and last token, [batch]; ignored if beyond
                the text.
        """
        if "segment_ids" in kwargs:
            raise ValueError("an answer is looked for in the whole row, so segment_ids cannot part it.")
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(-1)  # [B, L] each
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (place_loss(start, start_positions) + place_loss(end, end_positions)) / 2
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end, **_recorded(outputs))


def _spec_of(attention_mask: Tensor | None, batch: int, length: int) -> AttentionSpec:
    if attention_mask is None:
        return AttentionSpec()
    if attention_mask.shape == (batch, length):
        return AttentionSpec(key_padding_mask=attention_mask != 0)
    shape = list(attention_mask.shape)
    fits = attention_mask.dim() in (3, 4) and shape[-2:] == [length, length] and shape[0] in (1, batch)
    if not fits or attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {shape}; it must be [{batch}, {length}], or bool or integer "
            f"[{batch}, {length}, {length}] or [{batch}, heads, {length}, {length}], not 0 where attention is allowed."
        )
    mask = attention_mask if attention_mask.dim() == 4 else attention_mask[:, None]
    return AttentionSpec(mask=mask != 0)


def _is_full(mask: Tensor) -> bool:
    """True if a mask is known to hide nothing; on a GPU it is not looked at, as that would wait for it."""
    return mask.is_cpu and not torch.compiler.is_compiling() and bool(mask.all())


def _recorded(outputs: BaseModelOutputWithPooling) -> dict[str, Any]:
    """Fields that every head hands on as it gets them."""
    return {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
