"""BERT as one readable model with variants by configuration.

After importing it, the Auto classes of transformers can load its saved models too.
"""

import transformers

from lm_experiments_tools.modules.variants import register_variants
from modeling_bert.configuration_bert import BertConfig
from modeling_bert.modeling_bert import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
)

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "BertPreTrainedModel",
]

register_variants(
    BertConfig,
    {
        transformers.AutoModel: BertModel,
        transformers.AutoModelForMaskedLM: BertForMaskedLM,
        transformers.AutoModelForPreTraining: BertForPreTraining,
        transformers.AutoModelForQuestionAnswering: BertForQuestionAnswering,
        transformers.AutoModelForSequenceClassification: BertForSequenceClassification,
        transformers.AutoModelForTextEncoding: BertModel,
        transformers.AutoModelForTokenClassification: BertForTokenClassification,
    },
    architectures=__all__,
)
