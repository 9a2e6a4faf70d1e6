"""`--fit auto` runs two real steps of its proposal, and proposes less while these do not fit."""

from types import SimpleNamespace

import pytest

from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.planning import show as shown
from lm_experiments_tools.planning.build import resolve
from lm_experiments_tools.planning.fit import try_steps
from tests.unit.planning.test_plan import GIVEN, OWN_T5, T5, estimated, settings


def resolved(tmp_path, **flags):
    args = settings(tmp_path, T5, OWN_T5, target_seq_len=32, **flags)
    return resolve(args, GIVEN, "cpu"), estimated(args)


@pytest.mark.slow
def test_torch_is_refused_memory_that_is_too_little(tmp_path):
    args, estimate = resolved(tmp_path, batch_size=64)
    assert try_steps(args, "cpu", memory=4 * estimate.parts["parameters"]) is None


def test_less_is_proposed_until_it_fits(tmp_path, monkeypatch, capsys):
    args, tries = settings(tmp_path, T5, batch_size=8), []

    def proportional(args, planning, origins):
        return SimpleNamespace(total=args.batch_size * 2**20, args=args, device="cpu", lines=lambda: ["8 MiB"])

    def fits_in_the_third(args, device, memory):
        tries.append(args.batch_size)
        return 2**20 if len(tries) == 3 else None

    monkeypatch.setattr(shown, "estimate_memory", proportional)
    monkeypatch.setattr(shown, "try_steps", fits_in_the_third)
    shown.show(args, PlanningArgs(device="cpu", fit="auto"), GIVEN)
    assert tries == [8, 4, 2]
    printed = capsys.readouterr().out
    assert printed.count("does not fit") == 2 and "two steps took" in printed.splitlines()[-1]
