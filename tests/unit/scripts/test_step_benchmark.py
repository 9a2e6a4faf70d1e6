"""benchmarks/step.py: the share of peak is of what a loop computes."""

import pytest

from tests.helpers import ROOT


def test_a_share_of_peak_counts_the_words_that_a_loop_scores(monkeypatch):
    # ours has the head of BERT on the masked tokens alone: 19 of 128
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step

    shape = step.SHAPES["bert-base, 8 x 128"]
    ours, all_scored = step.flops_of(shape, "ours"), step.flops_of(shape, "transformers Trainer")
    head = 6 * 8 * (128 - 19) * 768 * (768 + 30522)
    assert all_scored - ours == pytest.approx(head)
