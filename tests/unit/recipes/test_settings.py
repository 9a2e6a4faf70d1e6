"""The typed keywords of FineTuner are the flags of run_finetuning.py."""

import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lm_experiments_tools.recipes import settings
from tests.helpers import ROOT


def test_the_generated_module_is_up_to_date() -> None:
    """After a change of flags: python scripts/finetuning_settings.py > lm_experiments_tools/recipes/settings.py."""
    script = runpy.run_path(str(ROOT / "scripts" / "finetuning_settings.py"))
    assert inspect.getsource(settings) == script["settings_module"]()


PYREFLY = Path(sys.executable).with_name("pyrefly")


@pytest.mark.skipif(not PYREFLY.exists(), reason="pyrefly is not installed")
def test_a_type_checker_knows_the_settings(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from lm_experiments_tools import FineTuner\n"
        "FineTuner('t5-small', batch_size=3, data_path=[{}]).train(epochs=2)['valid']['loss']\n"
        "FineTuner('t5-small', batch_sizes=3)\n"
        "FineTuner('t5-small', batch_size='x')\n"
    )
    (tmp_path / "pyrefly.toml").write_text(f'project-includes = ["*.py"]\nsearch-path = ["{ROOT}"]\n')
    command = [PYREFLY, "check", "--output-format", "min-text", "--python-interpreter-path", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert len(found) == 2, done.stdout + done.stderr
    assert "`batch_sizes`" in found[0] and "`batch_size`" in found[1]
