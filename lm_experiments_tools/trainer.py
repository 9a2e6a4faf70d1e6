"""The module of t5-experiments' trainer: old programs write `from lm_experiments_tools.trainer import Trainer`."""

from lm_experiments_tools.ancestor.arguments import TrainerArgs
from lm_experiments_tools.ancestor.trainer import Trainer, TrainerAccelerate
from lm_experiments_tools.training.trainer import TrainingDiverged, TrainingLoop

__all__ = ["Trainer", "TrainerAccelerate", "TrainerArgs", "TrainingDiverged", "TrainingLoop"]
