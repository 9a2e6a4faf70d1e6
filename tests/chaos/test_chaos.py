"""Runs killed at random moments, by random signals, and started again end as the one that nothing disturbed."""

import re
import sys

import pytest

from tests.distributed.launch import run, skip_without

pytestmark = pytest.mark.distributed


def endured(kills, *options, timeout):
    """The program's report after so many kills, of which none made a difference."""
    skip_without("horovod", "accelerate")
    words = ("-m", "tests.chaos.program", "--kills", str(kills), *options)
    ended = run([sys.executable], *words, timeout=timeout, TF_CPP_MIN_LOG_LEVEL="3")
    assert ended.returncode == 0, ended.output[-6000:]
    assert re.search(rf"^all +{kills} +\d+ +0$", ended.output, re.MULTILINE), ended.output[-3000:]
    return ended.output


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        pytest.param(200, ("--workers", "1,2,3,4", "--reproducible", "elastic", "--phases"), id="elastic, phases"),
        pytest.param(50, ("--workers", "2"), id="two workers, two backends"),
        pytest.param(50, ("--workers", "1,2,3,4", "--backends", "ddp"), id="each run with its number"),
    ],
)
def test_many_kills_make_no_difference(kills, options):
    endured(kills, *options, timeout=7000)
