"""`--fit auto` makes real steps of what it proposes, and proposes less while these do not fit."""

import pytest

from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.planning import show as shown
from lm_experiments_tools.planning import trial
from lm_experiments_tools.planning.plan import make_plan, model_settings
from lm_experiments_tools.planning.trial import Trial, try_plan
from tests.unit.planning.test_plan import GIVEN, OWN_T5, T5, settings


def planned(tmp_path, **flags):
    args = settings(tmp_path, T5, OWN_T5, target_seq_len=32, **flags)
    return args, make_plan(args, PlanningArgs(device="cpu"), GIVEN, model_settings(args))


@pytest.mark.slow
def test_two_steps_take_what_adam_holds_and_more(tmp_path):
    _, plan = planned(tmp_path)
    assert 16 * plan.trained < try_plan(plan).peak < plan.peak.total + 2**30


def test_torch_is_refused_memory_that_is_too_little(tmp_path):
    _, plan = planned(tmp_path, batch_size=64)
    assert try_plan(plan, memory=16 * plan.trained).peak is None


def test_less_is_proposed_until_it_fits(tmp_path, monkeypatch, capsys):
    args, plan = planned(tmp_path, batch_size=16)
    tries = []

    def fits_in_the_third(plan, memory):
        tries.append(plan.peak.total)
        return Trial(int(0.9 * plan.peak.total) if len(tries) == 3 else None)

    monkeypatch.setattr(trial, "try_plan", fits_in_the_third)
    monkeypatch.setattr(shown, "_traced", lambda plan: [])
    shown.show(args, PlanningArgs(device="cpu", fit="auto"), GIVEN)
    assert len(tries) == 3 and tries[1] <= 0.9 * tries[0] and tries[2] <= 0.9 * tries[1]
    told = capsys.readouterr().out
    assert told.count("it does not fit; less:") == 2 and "two steps took" in told.splitlines()[-1]
