"""BERT as one readable model, with variants by configuration; the names below are imported on first use."""

import importlib

_HOMES = {
    "BertConfig": "modeling_bert.configuration_bert",
    "BertForMaskedLM": "modeling_bert.modeling_bert",
    "BertForPreTraining": "modeling_bert.modeling_bert",
    "BertForQuestionAnswering": "modeling_bert.modeling_bert",
    "BertForSequenceClassification": "modeling_bert.modeling_bert",
    "BertForTokenClassification": "modeling_bert.modeling_bert",
    "BertModel": "modeling_bert.modeling_bert",
    "BertPreTrainedModel": "modeling_bert.modeling_bert",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
