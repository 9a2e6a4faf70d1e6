"""Peak rates: of the data sheet."""

import pytest
import torch

from lm_experiments_tools.training import flops as peaks

BF16, FP32, TF32 = torch.bfloat16, torch.float32, "tf32"


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", BF16, None),
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA A100 80GB PCIe", TF32, 156),
        ("NVIDIA H100 80GB HBM3", BF16, 989),
        ("NVIDIA H200", TF32, 494),
        # other devices with a part of such a name
        ("NVIDIA GeForce RTX 4090 Laptop GPU", BF16, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", BF16, None),
    ],
)
def test_the_peak_of_a_known_gpu_is_that_of_its_data_sheet(name, dtype, tflops):
    assert peaks._listed_peak(name, dtype) == (tflops and tflops * 1e12)


def test_fp32_products_on_a_gpu_are_tf32_where_torch_may_take_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert peaks.data_sheet_peak(device, FP32) == 67e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peaks.data_sheet_peak(device, FP32) == 494e12
    assert peaks.data_sheet_peak(torch.device("cpu"), FP32) is None
