"""Pre-train and fine-tune T5 and BERT on Horovod and Accelerate, with your own variant of the model.

The public names below are imported on first use, so that importing the package costs nothing and needs no backend.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Adafactor": "lm_experiments_tools.optimizers.adafactor",
    "AdamWScale": "lm_experiments_tools.optimizers.adamw_scale",
    "FineTuner": "lm_experiments_tools.finetuner",
    "IndexedDataset": "lm_experiments_tools.data.indexed",
    "IndexedDatasetWriter": "lm_experiments_tools.data.indexed",
    "Trainer": "lm_experiments_tools.trainer",
    "TrainerAccelerate": "lm_experiments_tools.trainer",
    "TrainerArgs": "lm_experiments_tools.args",
    "UserError": "lm_experiments_tools.errors",
    "Vocabulary": "lm_experiments_tools.data.vocabulary",
    "get_cls_by_name": "lm_experiments_tools.models",
    "get_optimizer": "lm_experiments_tools.optimizers",
    "get_schedule": "lm_experiments_tools.schedules",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
