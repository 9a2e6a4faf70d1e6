"""The module of t5-experiments' trainer on Accelerate.

Old programs write `from lm_experiments_tools.trainer_accelerate import TrainerAccelerate`.
"""

from lm_experiments_tools.ancestor.arguments import TrainerAccelerateArgs
from lm_experiments_tools.ancestor.trainer import TrainerAccelerate

__all__ = ["TrainerAccelerate", "TrainerAccelerateArgs"]
