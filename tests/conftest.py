"""Settings of every test process. Nothing here knows the project."""

import importlib.util
import os
from pathlib import Path

# One thread a rank: on a small machine two ranks with a thread pool each are slower than two without, and tests that
# compare bits need one order of summation.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A run without --model_path saves nothing, as most tests mean it, and leaves no folder in the repository.
os.environ.setdefault("LMTOOLS_RUNS", "none")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest

# Loaded after TensorFlow, which some oracles are, triton aborts the process; torch, DeepSpeed and Megatron load it.
if importlib.util.find_spec("triton"):
    importlib.import_module("triton")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of pytest's several processes
        _spread_jobs(items)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _spread_jobs(items: list[pytest.Item]) -> None:
    """Put the files that start jobs of several processes among the others: beside a job, single processes run."""
    files: dict[bool, dict[Path, None]] = {True: {}, False: {}}
    for item in items:
        files[item.get_closest_marker("distributed") is not None].setdefault(item.path)
    place = {path: number / len(kind) for kind in files.values() for number, path in enumerate(kind)}
    items.sort(key=lambda item: place[item.path])
