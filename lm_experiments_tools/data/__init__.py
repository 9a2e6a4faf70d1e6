"""Training data as numbered samples: their order, mixtures and loaders; depends on config and the top-level files.

The public names are those of `__init__.pyi`, imported on first use.
"""

from lm_experiments_tools.names import lazy_names

__getattr__, __dir__, _NAMES = lazy_names(__name__)

__all__ = _NAMES
