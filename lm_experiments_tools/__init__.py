"""Pre-train and fine-tune T5 and BERT on Horovod and Accelerate, with your own variant of the model.

The public names below are imported on first use, so that importing the package costs nothing and needs no backend.
"""

from lm_experiments_tools.names import lazy_names

__version__ = "0.1.0"

_HOMES = {
    "ACCELERATE_INSTALLED": "lm_experiments_tools.ancestor.notice",
    "Adafactor": "lm_experiments_tools.optimizers.adafactor",
    "AdamWScale": "lm_experiments_tools.optimizers.adamw_scale",
    "FineTuner": "lm_experiments_tools.recipes.finetuner",
    "IndexedDataset": "lm_experiments_tools.data.tokens.indexed",
    "IndexedDatasetWriter": "lm_experiments_tools.data.tokens.indexed",
    "HVD_INSTALLED": "lm_experiments_tools.ancestor.notice",
    "Trainer": "lm_experiments_tools.ancestor.trainer",
    "TrainerAccelerate": "lm_experiments_tools.ancestor.trainer",
    "TrainerAccelerateArgs": "lm_experiments_tools.ancestor.arguments",
    "TrainerArgs": "lm_experiments_tools.ancestor.arguments",
    "UserError": "lm_experiments_tools.errors",
    "Vocabulary": "lm_experiments_tools.data.text.vocabulary",
    "get_cls_by_name": "lm_experiments_tools.ancestor.utilities",
    "get_optimizer": "lm_experiments_tools.optimizers",
    "get_schedule": "lm_experiments_tools.training.schedules",
    "prepare_run": "lm_experiments_tools.ancestor.utilities",
}

__all__ = ["__version__", *_HOMES]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
