"""Training data as datasets of numbered samples: their order, mixtures and loaders."""

from lm_experiments_tools.names import lazy_names

__getattr__, __dir__, _NAMES = lazy_names(__name__)

__all__ = _NAMES
