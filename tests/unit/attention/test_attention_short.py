"""Short and dense calls on a CPU, which go to PyTorch's own attention with as little around it as there can be."""

from __future__ import annotations

import pytest
import torch

from lm_experiments_tools.attention import T5Bias, block_sparse_attention, explain
from lm_experiments_tools.attention.kernels import choice, sdpa
from lm_experiments_tools.attention.kernels import dispatch as functional
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec, validate
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig
from lm_experiments_tools.errors import UserError
from tests.helpers.attention_cases import Case, errors, tensors

PLAIN = [
    {},
    {"causal": True},
    {"bias": "t5"},
    {"bias": "matrix", "causal": True},
    {"padding": True},
    {"padding": True, "causal": True},
    {"padding": True, "bias": "t5"},
    {"padding": True, "bias": "matrix", "causal": True},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", PLAIN, ids=str)
def test_repeated_short_calls_skip_the_checks_and_stay_exact(chosen, dtype, monkeypatch):
    """Queries without any key among them."""
    case = Case("dense", 16, 24, 24, batch=3, **{"bias": "none", **chosen})
    monkeypatch.setattr(functional, "_sdpa_signatures", set())
    band = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    checked: list[int] = []
    monkeypatch.setattr(choice, "validate", lambda inputs: checked.append(1) or validate(inputs))
    for _ in range(3):
        assert max(errors(case, "auto", dtype).values()) < band
    assert len(checked) == 1


def test_a_call_that_was_right_excuses_no_wrong_one():
    q, k, v = tensors(2, 2, 20, 8)
    mask, weight = torch.ones(2, 20, dtype=torch.bool), torch.zeros(32, 2)
    for _ in range(2):
        block_sparse_attention(q, k, v, None, T5Bias(weight), mask)
    for changed, problem in [
        ({"k": k[:, :, :10]}, "do not fit"),
        ({"k": k.float()}, "must share dtype"),
        ({"bias": T5Bias(weight[:, :1])}, "for 1 heads"),
        ({"bias": weight}, "it must be float"),
        ({"key_padding_mask": mask[:1]}, "it must be bool"),
        ({"key_padding_mask": mask.int()}, "it must be bool"),
        ({"key_padding_mask": [True]}, "it must be bool"),
        ({"dropout_p": 1.0}, "below 1"),
        ({"q": None}, "it must be float"),
        ({"v": v.to("meta")}, "must share dtype and device"),
    ]:
        arguments = {"q": q, "k": k, "v": v, "bias": T5Bias(weight), "key_padding_mask": mask} | changed
        with pytest.raises(UserError, match=problem):
            block_sparse_attention(**arguments)


def test_a_mask_that_hid_nothing_decides_for_none_that_does(monkeypatch):
    """A row of its own for each input of the batch is what takes the memory."""
    q, k, v = tensors(4, 2, 40, 8)
    bias = tensors(1, 2, 40, 40, count=1)[0].detach()
    mask = torch.ones(4, 40, dtype=torch.bool)
    monkeypatch.setattr(functional, "_sdpa_signatures", set())
    monkeypatch.setattr(choice, "_MATRIX_BYTES", 2 * 2 * 40 * 40 * 8)
    block_sparse_attention(q, k, v, None, bias, mask)
    assert explain(q, k, v, None, bias, mask).backend == "sdpa" and not functional._sdpa_signatures
    mask[0, 3] = False
    assert explain(q, k, v, None, bias, mask).backend == "gather"


def test_rows_opened_for_gpus_are_what_the_cpu_gives():
    q, k, v = tensors(2, 2, 20, 8)
    (bias,) = tensors(1, 2, 20, 20, count=1)
    with torch.no_grad():
        bias[:, :, 2] = bias[:, :, :, 4] = -torch.inf
    mask = torch.arange(20)[None] < torch.tensor([[12], [0]])
    leaves = [q, k, v, bias]
    results = []
    for call in (
        lambda: sdpa.masked(q, k, v, bias, mask[:, None, None], 0.3, 0.0),
        lambda: sdpa.attend(AttentionInputs(q, k, v, AttentionSpec(bias=bias, key_padding_mask=mask, scale=0.3))),
    ):
        output = call()
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_what_inference_keeps_serves_training():
    q, k, v = tensors(1, 2, 24, 8)
    (weight,) = tensors(32, 2, count=1)
    layout = BigBirdSparsityConfig(2, block=4)
    with torch.inference_mode():
        block_sparse_attention(q, k, v, layout, T5Bias(weight), causal=True)
    output = block_sparse_attention(q, k, v, layout, T5Bias(weight), causal=True)
    assert all(x.abs().max() > 0 for x in torch.autograd.grad(output.square().sum(), [q, k, v, weight]))
