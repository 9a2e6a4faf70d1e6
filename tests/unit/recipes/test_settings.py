"""The typed keywords of FineTuner are the flags of run_finetuning.py."""

import inspect
import runpy

from lm_experiments_tools.recipes import settings
from tests.helpers import ROOT


def test_the_generated_module_is_up_to_date() -> None:
    """After a change of flags: python scripts/finetuning_settings.py > lm_experiments_tools/recipes/settings.py."""
    script = runpy.run_path(str(ROOT / "scripts" / "finetuning_settings.py"))
    assert inspect.getsource(settings) == script["settings_module"]()
