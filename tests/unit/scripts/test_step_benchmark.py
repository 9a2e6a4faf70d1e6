"""benchmarks/step.py: its options, and its share of peak, which is of what a loop computes."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nanot5", "nowhere"], "--nanot5 nowhere is no checkout of nanoT5"),
        (["--output", "nowhere/step.md"], "--output nowhere/step.md is no file in a folder that exists"),
    ],
)
def test_options_that_cannot_be_had_are_refused_at_once(tmp_path, flags, said):
    command = [sys.executable, str(ROOT / "benchmarks/step.py"), "--shape", "no shape", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_share_of_peak_counts_the_words_that_a_loop_scores(monkeypatch):
    # ours has the head of BERT on the masked tokens alone: 19 of 128
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step

    shape = step.SHAPES["bert-base, 8 x 128"]
    ours, all_scored = step.flops_of(shape, "ours"), step.flops_of(shape, "transformers Trainer")
    head = 6 * 8 * (128 - 19) * 768 * (768 + 30522)
    assert all_scored - ours == pytest.approx(head)
