"""Public names under the ancestor's path: `from lm_experiments_tools.trainer import Trainer`."""

from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.training.loop import TrainingDiverged, TrainingLoop
from lm_experiments_tools.training.trainer import Trainer, TrainerAccelerate

__all__ = ["Trainer", "TrainerAccelerate", "TrainerArgs", "TrainingDiverged", "TrainingLoop"]
