"""Heads with weighted labels for programs of GENA_LM (docs/porting.md): --model_cls gena_heads:TokenLabels."""

from torch.nn.functional import binary_cross_entropy_with_logits
from transformers.modeling_outputs import TokenClassifierOutput

import modeling_bert


class TokenLabels(modeling_bert.BertForTokenClassification):
    """Several labels a token, of tokens in `labels_mask`: the sum over labels, a mean over tokens."""

    def forward(self, labels=None, labels_mask=None, pos_weight=None, **inputs):
        logits = super().forward(**inputs).logits
        if labels is None:
            return TokenClassifierOutput(logits=logits)
        losses = binary_cross_entropy_with_logits(logits, labels.float(), reduction="none", pos_weight=pos_weight)
        return TokenClassifierOutput(loss=losses[labels_mask.bool()].sum(-1).mean(), logits=logits)


class WeightedLabels(modeling_bert.BertForSequenceClassification):
    """Several labels a row, their positives weighted: DeepSea's."""

    def forward(self, labels=None, pos_weight=None, **inputs):
        outputs = super().forward(**inputs)
        if labels is not None:
            outputs.loss = binary_cross_entropy_with_logits(outputs.logits, labels.float(), pos_weight=pos_weight)
        return outputs
