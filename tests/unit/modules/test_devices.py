"""Which number formats the hardware computes in."""

import pytest
import torch

from lm_experiments_tools.modules.devices import has_bf16


@pytest.mark.parametrize(
    ("kernels", "units", "expected"),
    [
        ("AVX512", {"avx512_bf16"}, True), ("AVX512", {"amx_bf16"}, True), ("AVX512", {"avx512_f"}, False),
        ("AVX2", {"avx512_bf16", "amx_bf16"}, False), ("DEFAULT", set(), False),
    ],
)  # fmt: skip
def test_a_cpu_has_bf16_if_its_units_and_the_kernels_in_use_do(kernels, units, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(units, True))
    monkeypatch.setattr("lm_experiments_tools.modules.devices.supports_bf16_on_cpu", lambda: True)
    assert has_bf16.__wrapped__("cpu") is expected
