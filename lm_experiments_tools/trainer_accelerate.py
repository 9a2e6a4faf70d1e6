"""Public names under t5-experiments' path: `from lm_experiments_tools.trainer_accelerate import TrainerAccelerate`."""

from lm_experiments_tools.ancestor.arguments import TrainerAccelerateArgs
from lm_experiments_tools.ancestor.trainer import TrainerAccelerate

__all__ = ["TrainerAccelerate", "TrainerAccelerateArgs"]
