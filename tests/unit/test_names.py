"""Objects named by `module:name`; classes are in unit/models/test_models.py."""

import statistics
import sys

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


def test_files_of_the_current_folder_are_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_this_folder.py").write_text("def one():\n    return 1\n")
    (tmp_path / "half_written.py").write_text("def one(:\n")
    assert resolve_name("of_this_folder:one")() == 1
    with pytest.raises(UserError, match=r"half_written cannot be imported \(invalid syntax .*half_written.py, line 1"):
        resolve_name("half_written:one")
