"""Precision schemes that need a package of their own."""

import importlib.util

import pytest

from lm_experiments_tools.backends.precision import get_precision
from lm_experiments_tools.errors import UserError


def test_an_absent_apex_is_refused():
    if importlib.util.find_spec("apex") is not None:
        pytest.skip("apex is installed")
    with pytest.raises(UserError, match="--apex_opt_lvl O1"):
        get_precision(fp16=True, bf16=False, apex_opt_lvl="O1")
