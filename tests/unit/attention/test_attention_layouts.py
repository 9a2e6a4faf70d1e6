"""Layouts against DeepSpeed's stored ones, our random blocks, names and settings."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lm_experiments_tools.attention import (
    Layout,
    SparsityConfig,
    block_sparse_attention,
    get_sparsity_config,
)
from lm_experiments_tools.attention.layouts import (
    SPARSITY_CONFIGS,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    VariableSparsityConfig,
)
from lm_experiments_tools.errors import UserError
from tests.helpers import ROOT

# Made by tests/parity/test_attention_deepspeed.py from DeepSpeed 0.19.6 itself.
GOLDEN = json.loads((ROOT / "tests/golden/attention_layouts.json").read_text())


def as_rows(head: Tensor) -> list[str]:
    return ["".join("#" if block else "." for block in row) for row in head.tolist()]


def digest(layout: Tensor) -> str:
    return hashlib.sha256(layout.to(torch.uint8).numpy().tobytes()).hexdigest()[:32]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['name']}-{case['sha256'][:6]}")
def test_layouts_are_deepspeeds_bit_for_bit_or_with_its_future_cut_off(case):
    """With compat="deepspeed", and without it if no block is random."""
    settings = {**case["settings"], "seed": case["seed"], "layer_idx": case["layer"], "compat": "deepspeed"}
    layout = SPARSITY_CONFIGS[case["name"]](case["num_heads"], **settings).make_layout(case["length"])
    assert layout.dtype == torch.int64 and layout.shape[0] == case["num_heads"]
    assert layout.sum() == case["blocks"] and digest(layout) == case["sha256"]
    if "head_0" in case:
        assert as_rows(layout[0]) == case["head_0"]
    config = SPARSITY_CONFIGS[case["name"]](case["num_heads"], **case["settings"])
    ours = config.make_layout(case["length"])
    is_causal = config.attention == "unidirectional"
    assert torch.equal(ours, ours.tril()) or not is_causal
    assert config.uses_random_blocks or torch.equal(ours, layout.tril() if is_causal else layout)


class TestRandomBlocks:
    def test_a_configuration_is_a_layout_on_every_machine(self):
        """Its hash is stored here, and Python's and torch's generators neither matter nor move."""
        random.seed(1)
        torch.manual_seed(1)
        before = random.getstate(), torch.get_rng_state()
        layout = BigBirdSparsityConfig(4, different_layout_per_head=True, num_random_blocks=2, seed=7).make_layout(
            1024
        )
        assert digest(layout) == "688ebd8d8e4b244186932ccffa76edbe"
        assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])

    def test_heads_layers_and_seeds_have_blocks_of_their_own(self):
        def layout(**settings):
            return BigBirdSparsityConfig(2, different_layout_per_head=True, **settings).make_layout(1024)

        assert not torch.equal(layout()[0], layout()[1])
        assert not torch.equal(layout(), layout(layer_idx=1)) and not torch.equal(layout(), layout(seed=1))
        same = BigBirdSparsityConfig(2).make_layout(1024)
        assert torch.equal(same[0], same[1])

    @pytest.mark.parametrize("past_only", [False, True])
    def test_each_row_draws_uniformly_without_replacement(self, past_only):
        """Chi-square of 3 of 8 (or of row + 1) columns over 4000 heads; the bound is exceeded once in 10^6."""
        config = BigBirdSparsityConfig(4000, different_layout_per_head=True)
        drawn = config._random(8, 3, past_only)  # the pattern alone, without window and global blocks
        for row in range(8):
            population = row + 1 if past_only else 8
            counts = drawn[:, row].sum(0).double()
            assert (drawn[:, row].sum(1) == min(3, population)).all() and counts[population:].sum() == 0
            expected = 4000 * min(3, population) / population
            assert ((counts[:population] - expected) ** 2 / expected).sum() < 40

    def test_unidirectional_layouts_of_two_lengths_agree(self):
        """So that a longer input sees what a shorter one saw."""
        config = BigBirdSparsityConfig(
            3, different_layout_per_head=True, num_random_blocks=3, attention="unidirectional"
        )
        assert torch.equal(config.make_layout(512), config.make_layout(2048)[:, :32, :32])

    def test_max_seq_length_cuts_the_longest_layout_as_deepspeed_does(self):
        whole = BigBirdSparsityConfig(2, block=16, num_random_blocks=2).make_layout(1024)
        cut = BigBirdSparsityConfig(2, block=16, num_random_blocks=2, max_seq_length=1024)
        assert torch.equal(cut.make_layout(256), whole[:, :16, :16])
        with pytest.raises(UserError, match="2048 is beyond max_seq_length=1024"):
            cut.make_layout(2048)


def test_density_of_bigbird_at_4096():
    """Window 64 + 2 * 63, global 2 * 64 - 1 less 3 counted twice."""
    layout = BigBirdSparsityConfig(1, block=64, num_random_blocks=0).make_layout(4096)
    assert layout.sum() == 64 + 2 * 63 + 127 - 3


@pytest.mark.parametrize("short", ["BigBird", "Variable", "BSLongformer", "LocalSlidingWindow", "Fixed"])
def test_a_short_input_attends_to_all_it_may(short):
    layout = get_sparsity_config(short, 2, attention="bidirectional").make_layout(16)
    assert layout.tolist() == [[[1]], [[1]]]


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "BigBird",
            "bigbird",
            "deepspeed.ops.sparse_attention:BigBirdSparsityConfig",
            "lm_experiments_tools.attention.layouts:BigBirdSparsityConfig",
        ],
    )
    def test_old_homes_and_bare_names_mean_ours(self, name):
        # the settings of the ancestor's bert_configs/L12-H768-A12-V32k-L4096-preln-lastln-sparse-rope.json
        config = get_sparsity_config(
            name, 12, block=64, different_layout_per_head=True, num_sliding_window_blocks=3, num_global_blocks=2,
            num_random_blocks=3,
        )  # fmt: skip
        assert type(config) is BigBirdSparsityConfig and config.num_global_blocks == 2

    def test_dictionaries_give_the_configuration_back(self):
        for case in GOLDEN:
            config = SPARSITY_CONFIGS[case["name"]](case["num_heads"], **case["settings"], seed=case["seed"])
            stored = json.loads(json.dumps(config.to_dict()))
            again = get_sparsity_config(stored.pop("sparse_config_cls"), **stored)
            assert again == config and torch.equal(again.make_layout(640), config.make_layout(640))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: get_sparsity_config("BigBrid", 2), "did you mean 'bigbird'"),
            (lambda: get_sparsity_config("nothing.here:Config", 2), "module nothing.here is not imported"),
            (lambda: get_sparsity_config("BigBird", 2, num_globl_blocks=1), "did you mean 'num_global_blocks'"),
            (lambda: BigBirdSparsityConfig(0), "num_heads=0 must be at least 1"),
            (
                lambda: BigBirdSparsityConfig(1).make_layout(100),
                "length of 100 is not a positive multiple",
            ),
            (lambda: BSLongformerSparsityConfig(1, global_block_end_indices=[0]), "do not fit"),
        ],
    )
    def test_mistakes_are_sentences(self, make, message):
        with pytest.raises(UserError, match=re.escape(message)):
            make()

    def test_what_deepspeed_takes_is_taken(self):
        """A global block beyond the input is none; 0 and 1 are booleans, numpy's numbers are numbers."""
        config = VariableSparsityConfig(np.int64(2), different_layout_per_head=1, global_block_indices=np.array([99]))
        plain = VariableSparsityConfig(2, different_layout_per_head=True, global_block_indices=[])
        assert torch.equal(config.make_layout(128), plain.make_layout(128))

    def test_a_class_of_ones_own(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "layouts_of_mine", sys.modules[__name__])
        config = get_sparsity_config("layouts_of_mine:Diagonal", 2, stride=2)
        assert as_rows(config.make_layout(64)[1]) == ["#.#.", ".#.#", "#.#.", ".#.#"]
        stored = config.to_dict() | {"sparse_config_cls": "layouts_of_mine:Diagonal"}
        assert get_sparsity_config(stored.pop("sparse_config_cls"), **stored) == config

    @pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist, torch.from_numpy])
    def test_arrays_and_lists_are_layouts_too(self, convert):
        blocks = np.tril(np.ones((2, 4, 4), dtype=np.int64))
        q = torch.randn(1, 2, 64, 4)
        expected = block_sparse_attention(q, q, q, Layout(torch.from_numpy(blocks), 16))
        for config in (Giving(2, convert(blocks)), GivingBlocks(2, convert(blocks[:1]))):
            assert torch.equal(torch.as_tensor(config.make_layout(64)), torch.from_numpy(blocks))
            torch.testing.assert_close(block_sparse_attention(q, q, q, config), expected)


@pytest.mark.parametrize("name", SPARSITY_CONFIGS)
@pytest.mark.parametrize("settings", [{}, {"compat": "deepspeed"}])
def test_layouts_are_on_the_cpu_whatever_the_default_device(name, settings):
    config = get_sparsity_config(name, 2, **settings)
    expected = config.make_layout(160)
    with torch.device("meta"):
        layout = config.make_layout(160)
    assert layout.is_cpu and torch.equal(layout, expected)


@dataclass
class Diagonal(SparsityConfig):
    stride: int = 1

    def blocks(self, num_blocks: int) -> Tensor:
        numbers = torch.arange(num_blocks)
        return ((numbers[:, None] - numbers) % self.stride == 0)[None]


class Giving(SparsityConfig):
    def __init__(self, num_heads, layout):
        super().__init__(num_heads)
        self.layout = layout

    def make_layout(self, seq_len):
        return self.layout


class GivingBlocks(SparsityConfig):
    def __init__(self, num_heads, layout):
        super().__init__(num_heads)
        self.layout = layout

    def blocks(self, num_blocks):
        return self.layout
