"""Precision schemes that need a package of their own."""

import importlib.util
import sys

import pytest

from lm_experiments_tools.backends.precision import get_precision
from lm_experiments_tools.errors import UserError


def test_an_apex_without_amp_is_not_called_missing(monkeypatch, tmp_path):
    """As NVIDIA's since 2025; PyPI's package of that name has none either."""
    if importlib.util.find_spec("apex") is not None:
        pytest.skip("apex is installed")
    with pytest.raises(UserError, match="--apex_opt_lvl O1: NVIDIA apex is not installed"):
        get_precision(fp16=True, bf16=False, apex_opt_lvl="O1")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="the installed apex has no apex.amp"):
        get_precision(fp16=True, bf16=False, apex_opt_lvl="O1")
    monkeypatch.delitem(sys.modules, "apex")
