"""Objects named by `module:name`; classes are in unit/models/test_models.py."""

import statistics

import pytest

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name


def test_function_and_method_are_found_by_name():
    assert resolve_name("statistics:mean") is statistics.mean
    assert resolve_name("fractions:Fraction.from_float")(0.5) == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "--metric mean does not name a function: write module:function"),
        (".statistics:mean", "write module:function"),
        ("no_such_module:mean", "--metric no_such_module:mean: module no_such_module cannot be imported"),
        ("statistics:meen", "statistics has no meen; did you mean 'mean'"),
        ("math:pi", "--metric math:pi is 3.14.*, which cannot be called"),
    ],
)
def test_function_name_that_leads_nowhere_is_explained(name, message):
    with pytest.raises(UserError, match=message):
        resolve_name(name, said=f"--metric {name}")
