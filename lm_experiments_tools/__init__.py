"""Pre-train and fine-tune T5 and BERT on Horovod and Accelerate, with your own variant of the model.

The public names are those of `__init__.pyi`, imported on first use: importing the package needs no backend.
"""

from lm_experiments_tools.names import lazy_names

__version__ = "1.0.0"

__getattr__, __dir__, _NAMES = lazy_names(__name__)

__all__ = ["__version__", *_NAMES]
