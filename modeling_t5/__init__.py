"""T5 as one readable model, with variants by configuration; the names below are imported on first use."""

import importlib

_HOMES = {
    "T5Attention": "modeling_t5.layers",
    "T5CDQAttention": "modeling_t5.cdq",
    "T5Config": "modeling_t5.configuration_t5",
    "T5EncoderForSequenceClassification": "modeling_t5.modeling_t5",
    "T5EncoderModel": "modeling_t5.modeling_t5",
    "T5ForConditionalGeneration": "modeling_t5.modeling_t5",
    "T5ForSequenceClassification": "modeling_t5.modeling_t5",
    "T5Model": "modeling_t5.modeling_t5",
    "T5PreTrainedModel": "modeling_t5.modeling_t5",
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
