"""Apple's machines: metrics on a GPU without float64, and memory where getrusage counts bytes."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules import devices
from lm_experiments_tools.modules.devices import peak_memory_mib
from lm_experiments_tools.training.metrics import MetricSums


class OnApple(torch.Tensor):
    """A tensor that says it is on an Apple GPU, and refuses float64 as torch does there."""

    device = torch.device("mps")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(value is torch.float64 for value in (*args, *(kwargs or {}).values())):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        result = super().__torch_function__(func, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else result


def test_metrics_of_an_apple_gpu_are_summed_in_float64():
    values = [torch.rand((), generator=torch.Generator().manual_seed(seed)) * 10.0**seed for seed in range(8)]
    with pytest.raises(TypeError, match="float64"):
        values[0].as_subclass(OnApple).to(torch.float64)
    sums = MetricSums()
    for value in values:
        sums.add({"loss": value.as_subclass(OnApple), "pair": (value.as_subclass(OnApple), 2)}, 3)
    expected = sum(value.double().item() for value in values)
    means = sums.reduce(LocalBackend())
    assert means == {"loss": pytest.approx(expected / 8, rel=1e-15), "pair": pytest.approx(expected / 16, rel=1e-15)}


def test_exact_sums_on_an_apple_gpu_are_refused():
    backend = LocalBackend()
    backend.device = torch.device("mps")
    with pytest.raises(UserError, match="--reproducible sums in float64"):
        backend.reproduce(TrainerArgs(reproducible="fixed"))


def test_memory_is_that_of_the_process_on_linux_and_macos(monkeypatch):
    resident = psutil.Process().memory_info().rss / 2**20
    assert 0.9 * resident <= peak_memory_mib(LocalBackend().device) < 20 * resident
    usage = SimpleNamespace(ru_maxrss=3 * 2**30)
    monkeypatch.setattr(devices.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory_mib(LocalBackend().device) == 3 * 1024
