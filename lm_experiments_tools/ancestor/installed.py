"""What t5-experiments' programs ask the package before they choose a trainer."""

import importlib.util

HVD_INSTALLED = importlib.util.find_spec("horovod") is not None
ACCELERATE_INSTALLED = importlib.util.find_spec("accelerate") is not None
