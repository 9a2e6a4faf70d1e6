"""Slices of tensors: cut, read back in any other ranges, saved in a file of each worker."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from lm_experiments_tools.backends.slices import SlicedTensor, assign, elements, full
from lm_experiments_tools.backends.trees import check_keys
from lm_experiments_tools.checkpoint.tree import load_tree, save_tree, slice_ranges, tree_files
from lm_experiments_tools.errors import UserError

CUTS = [0, 3, 3, 10, 12]  # of four workers, one of which holds nothing
TENSOR = torch.arange(12.0).view(3, 4)


def part(rank: int) -> SlicedTensor:
    start, stop = CUTS[rank], CUTS[rank + 1]
    return SlicedTensor(TENSOR.shape, ((start, TENSOR.flatten()[start:stop]),))


def test_every_range_is_read_across_parts():
    whole = SlicedTensor(TENSOR.shape, tuple((CUTS[r], TENSOR.flatten()[CUTS[r] : CUTS[r + 1]]) for r in range(4)))
    for start, stop in itertools.combinations_with_replacement(range(13), 2):
        assert torch.equal(elements(whole, start, stop), TENSOR.flatten()[start:stop]), (start, stop)
        assert torch.equal(elements(TENSOR, start, stop), TENSOR.flatten()[start:stop])
    assert torch.equal(full(whole), TENSOR) and full(TENSOR) is TENSOR


def save(folder, trees):
    ranges = [slice_ranges(tree) for tree in trees]
    for rank, tree in reversed(list(enumerate(trees))):
        save_tree(folder / "optimizer", tree, rank=rank, ranges=ranges)


@pytest.mark.parametrize("mapped", [False, True])
def test_trees_of_all_workers_are_loaded_as_one(tmp_path, mapped):
    def tree(rank):
        plain = {"step": torch.tensor(7.0 + rank), "name": "adam", "rates": (0.1, float("inf"))}
        return {"state": {0: {"avg": part(rank), **plain}, 1: {"avg": part(rank)}}}

    save(tmp_path, [tree(rank) for rank in range(4)])
    assert len(tree_files(tmp_path / "optimizer")) == 5
    loaded = load_tree(tmp_path / "optimizer", mapped=mapped)
    for number in (0, 1):
        held = loaded["state"][number]["avg"]
        assert held.shape == TENSOR.shape and held.dtype == TENSOR.dtype and torch.equal(full(held), TENSOR)
    first = loaded["state"][0]
    assert (first["step"].item(), first["name"], first["rates"]) == (7.0, "adam", (0.1, float("inf"))), "rank 0's"


def test_replicas_write_nothing(tmp_path):
    """HSDP: the first replica's workers have everything."""
    save(tmp_path, [{"avg": part(0)}, {"avg": SlicedTensor(TENSOR.shape)}, {"avg": part(2)}, {"avg": part(3)}])
    assert torch.equal(full(load_tree(tmp_path / "optimizer")["avg"]), TENSOR)


def test_a_missing_file_is_named(tmp_path):
    save(tmp_path, [{"avg": part(rank)} for rank in range(4)])
    (tmp_path / "optimizer-00003-of-00004.safetensors").unlink()
    with pytest.raises(UserError, match=r"optimizer-00003-of-00004\.safetensors cannot be read"):
        load_tree(tmp_path / "optimizer")
    assert json.loads((tmp_path / "optimizer.json").read_text())["$files"] == 4


def test_sizes_are_assigned_evenly():
    sizes = {f"layer {i}": 100 + i for i in range(50)} | {"embedding": 2000, "bias": 1}
    ranks = assign(sizes, 4)
    totals = [sum(sizes[name] for name in sizes if ranks[name] == rank) for rank in range(4)]
    assert sum(totals) == sum(sizes.values()) and max(totals) - min(totals) <= 150
    assert assign({"one": 3}, 8) == {"one": 0}


def test_a_state_of_other_names_or_shapes_is_refused_with_them():
    model = {"a": torch.ones(2), "b": torch.ones(3)}
    check_keys({"a": torch.zeros(2), "b": torch.zeros(3)}, model)
    with pytest.raises(UserError, match=r"1 missing \['b'\], 1 unexpected \['c'\], 1 of another shape \['a'\]"):
        check_keys({"a": torch.ones(3), "c": torch.ones(3)}, model)
