"""Training data as datasets of numbered samples: their order, mixtures and loaders.

This package depends on `config` and the top-level files of lm_experiments_tools. Its public names are listed in
`__init__.pyi` and are imported on first use.
"""

from lm_experiments_tools.names import lazy_names

__getattr__, __dir__, _NAMES = lazy_names(__name__)

__all__ = _NAMES
