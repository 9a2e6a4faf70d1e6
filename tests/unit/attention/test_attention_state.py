"""State that attention keeps: a first call without training leaves constants that training can use."""

import pytest
import torch
from torch import nn

from lm_experiments_tools.attention import positions
from lm_experiments_tools.attention.kernels import bias as bias_module
from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.positions import AlibiPosition, RelativeBiasPosition


def schemes(buckets: int) -> list[positions.PositionScheme]:
    """Of settings that no other test has, so that nothing of theirs is kept already."""
    return [
        RelativeBiasPosition(buckets, 91, num_heads=3, bidirectional=True),
        RelativeBiasPosition(buckets, 91, num_heads=3, bidirectional=False),
        AlibiPosition(buckets),
    ]


@pytest.mark.parametrize("around", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta"])
def test_a_first_call_that_does_not_train_leaves_training_as_it_was(around):
    expected = [dense_bias(scheme.bias(7, 7, device="cpu"), 7, 7) for scheme in schemes(20)]
    bias_module._table_buckets.cache_clear()
    positions._cached_slopes.cache_clear()
    found = schemes(20)
    with around():
        for scheme in found:
            scheme.bias(7, 7, device="cpu").table(7)
    for scheme, values in zip(found, expected, strict=True):
        factor = nn.Parameter(torch.ones(()))
        if isinstance(scheme, AlibiPosition):
            trained = dense_bias(scheme.bias(7, 7, device="cpu"), 7, 7) * factor
            torch.testing.assert_close(trained, values)
        else:
            trained = dense_bias(scheme.bias(7, 7), 7, 7) * factor
        trained.square().sum().backward()
        assert factor.grad > 0 and all(parameter.grad.any() for parameter in scheme.parameters())


def test_a_shared_bias_is_a_tensor_of_its_own():
    """Where parameters are gathered layer by layer, the parameter's memory is freed before the next layer reads it."""
    scheme = RelativeBiasPosition(8, 20, num_heads=2, bidirectional=True).double()
    bias = scheme.bias(6, 6)
    assert bias.weight.data_ptr() != scheme.weight.data_ptr()
    factors = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    (dense_bias(bias, 6, 6) * factors).sum().backward()
    (scheme.bias(5, 6, 0) * factors[:, :, :5]).sum().backward()  # by bucket, without the last row
    rest = scheme.bias(1, 6, 5)
    (rest * factors[:, :, 5:]).sum().backward()
    twice = scheme.weight.grad.clone()
    scheme.weight.grad = None
    (dense_bias(scheme.bias(6, 6), 6, 6) * factors).sum().backward()
    torch.testing.assert_close(scheme.weight.grad * 2, twice)
