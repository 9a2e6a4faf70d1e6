"""Memory addresses do not decide the bits of a run: weights and inputs of training are aligned."""

import torch

from lm_experiments_tools.training.micro_batches import split_batch
from tests.helpers.loops import make_loop
from tests.helpers.toys import tiny_t5


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy 40 bytes after an aligned address."""
    room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    start = -room.data_ptr() % 64 // 4 + 10
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def misplaced_parameters(model: torch.nn.Module) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.data_ptr() % 64]


def test_set_up_gives_parameters_and_buffers_aligned_memory():
    model, reference = tiny_t5(), tiny_t5()
    model.register_buffer("scale", torch.ones(3))
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = misaligned(tensor.data)
    assert len(misplaced_parameters(model)) > 20
    make_loop(model)
    assert not misplaced_parameters(model)
    assert model.lm_head.weight is model.shared.weight  # tied as before
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_each_micro_batch_has_aligned_features():
    """A row of 5 floats of a larger batch begins at a multiple of 20 bytes."""
    features = torch.arange(30.0).view(6, 5)
    parts = split_batch({"features": features}, 1, {"features"}, torch.device("cpu"), label_names=())
    assert [part.inputs["features"].tolist() for part in parts] == features[:, None].tolist()
    assert not any(part.inputs["features"].data_ptr() % 64 for part in parts)
