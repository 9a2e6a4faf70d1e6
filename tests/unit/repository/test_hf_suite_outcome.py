"""The helper that runs transformers' own tests overlooks no way in which pytest says that one did not pass."""

import os
import subprocess
import sys

import pytest

from tests.helpers.hf_suite import read_outcome

MODULE = """
import unittest

class T(unittest.TestCase):
    def test_good(self):
        pass

    def test_bad(self):
        assert 0

    def test_parts(self):
        with self.subTest("a part", i=1):
            assert 0

class Broken(T):
    @classmethod
    def setUpClass(cls):
        assert 0
"""


def run(tmp_path, text):
    (tmp_path / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfEs", "test_it.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


def test_what_did_not_pass_is_named(tmp_path):
    outcome = read_outcome(run(tmp_path, MODULE))
    broken = {f"Broken::test_{name}" for name in ("good", "bad", "parts")}
    assert outcome.failed == {"T::test_bad", "T::test_parts", *broken} and outcome.passed >= 1


def test_a_run_that_broke_off_is_no_outcome(tmp_path):
    with pytest.raises(AssertionError):
        read_outcome(run(tmp_path, "import os\n\ndef test_good(): pass\n\ndef test_end(): os._exit(3)\n"))
