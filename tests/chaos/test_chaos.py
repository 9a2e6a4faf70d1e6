"""Runs killed at random moments, by random signals, and started again end as the one that nothing disturbed."""

import re
import sys

import pytest

from tests.distributed.launch import run, skip_without

pytestmark = pytest.mark.distributed
SLOW = (pytest.mark.slow, pytest.mark.timeout(7200))


def endured(kills, *options, timeout):
    """The program's report after so many kills, of which none made a difference."""
    skip_without("horovod", "accelerate")
    words = ("-m", "tests.chaos.program", "--kills", str(kills), *options)
    ended = run([sys.executable], *words, timeout=timeout, TF_CPP_MIN_LOG_LEVEL="3")
    assert ended.returncode == 0, ended.output[-6000:]
    assert re.search(rf"^all +{kills} +\d+ +0$", ended.output, re.MULTILINE), ended.output[-3000:]
    return ended.output


def test_three_kills_make_no_difference():
    assert "0 faults" in endured(3, "--seed", "15", timeout=500)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--workers", "2"), id="two workers, two backends", marks=SLOW),
        pytest.param(("--workers", "1,2,3,4", "--reproducible", "elastic", "--phases"), id="phases", marks=SLOW),
        pytest.param(("--workers", "1,2,3,4", "--backends", "ddp"), id="each run with its number", marks=SLOW),
    ],
)
def test_two_hundred_kills_make_no_difference(options):
    endured(200, *options, timeout=7000)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thirty_kills_under_real_launchers_make_no_difference():
    endured(30, "--launchers", "horovodrun,accelerate", timeout=7000)
