"""benchmarks/step.py: its options, which are checked before the loops run for minutes."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nanot5", "nowhere"], "--nanot5 nowhere is no checkout of nanoT5"),
        (["--loops", "nanoT5"], "--loops nanoT5 needs --nanot5"),
        (["--rounds", "0"], "--rounds is at least 1"),
        (["--output", "nowhere/step.md"], "--output nowhere/step.md is no file in a folder that exists"),
    ],
)
def test_options_that_cannot_be_had_are_refused_at_once(tmp_path, flags, said):
    command = [sys.executable, str(ROOT / "benchmarks/step.py"), "--shape", "no shape", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "runs").exists()
