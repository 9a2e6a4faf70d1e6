"""Decoders of transformers as bidirectional encoders with a masked language model head.

Modules and weight names are those of Gemma2ForCausalLM, Gemma3ForCausalLM and Qwen3ForCausalLM. There is no causal
mask, and a token's label is at its own position (LLM2Vec, arXiv 2404.05961, section 2.1). In a layer with a sliding
window, a token attends to that many tokens on each side. For Llama and Qwen 2 use transformers' EuroBertForMaskedLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

import transformers
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma2PreTrainedModel,
    Gemma3PreTrainedModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    Qwen3Config,
    Qwen3Model,
    Qwen3PreTrainedModel,
)
from transformers.modeling_outputs import MaskedLMOutput


class BidirectionalGemma2Config(Gemma2Config):
    """Configuration of a Gemma 2 without a causal mask, used as an encoder."""

    model_type = "bidirectional_gemma2"
    is_causal: bool = False


class BidirectionalGemma3Config(Gemma3TextConfig):
    """Configuration of Gemma 3's text model without a causal mask, used as an encoder."""

    model_type = "bidirectional_gemma3"
    is_causal: bool = False


class BidirectionalQwen3Config(Qwen3Config):
    """Configuration of a Qwen 3 without a causal mask, used as an encoder."""

    model_type = "bidirectional_qwen3"
    is_causal: bool = False


class _MaskedLM:
    """The head and the loss, before the PreTrainedModel of an architecture in a class's bases."""

    model_cls: ClassVar[type]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.model_cls(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForMaskedLM"
        for module in self.model.modules():  # transformers' kernels read it where no mask is needed
            if "is_causal" in vars(module):
                module.is_causal = config.is_causal
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits [batch, length, vocabulary], and the mean loss of `labels` [batch, length] (-100: none)."""
        kwargs["use_cache"] = False
        outputs = self.model(
            input_ids, attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        logits = self.lm_head(outputs.last_hidden_state)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = (logits / cap).tanh() * cap
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return MaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class Gemma2ForMaskedLM(_MaskedLM, Gemma2PreTrainedModel):
    """A Gemma 2 without a causal mask, which predicts masked tokens."""

    config_class, model_cls = BidirectionalGemma2Config, Gemma2Model


class Gemma3ForMaskedLM(_MaskedLM, Gemma3PreTrainedModel):
    """The text model of Gemma 3 without a causal mask, which predicts masked tokens."""

    config_class, model_cls = BidirectionalGemma3Config, Gemma3TextModel


class Qwen3ForMaskedLM(_MaskedLM, Qwen3PreTrainedModel):
    """A Qwen 3 without a causal mask, which predicts masked tokens."""

    config_class, model_cls = BidirectionalQwen3Config, Qwen3Model


MASKED_LMS = {cls.config_class.model_type: cls for cls in (Gemma2ForMaskedLM, Gemma3ForMaskedLM, Qwen3ForMaskedLM)}
for _model_type, _cls in MASKED_LMS.items():
    transformers.AutoConfig.register(_model_type, _cls.config_class)
    transformers.AutoModelForMaskedLM.register(_cls.config_class, _cls)
