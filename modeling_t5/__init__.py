"""T5 as one readable model with variants by configuration.

After importing it, the Auto classes of transformers can load its saved models too.
"""

import transformers

from lm_experiments_tools.modules.variants import register_variants
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.layers import T5Attention, T5CDQAttention
from modeling_t5.modeling_t5 import (
    T5EncoderForSequenceClassification,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
    T5Model,
    T5PreTrainedModel,
)

__all__ = [
    "T5Attention",
    "T5CDQAttention",
    "T5Config",
    "T5EncoderForSequenceClassification",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "T5ForSequenceClassification",
    "T5Model",
    "T5PreTrainedModel",
]

register_variants(
    T5Config,
    {
        transformers.AutoModel: T5Model,
        transformers.AutoModelForPreTraining: T5ForConditionalGeneration,
        transformers.AutoModelForSeq2SeqLM: T5ForConditionalGeneration,
        transformers.AutoModelForSequenceClassification: T5ForSequenceClassification,
        transformers.AutoModelForTextEncoding: T5EncoderModel,
    },
    architectures=__all__,
)
