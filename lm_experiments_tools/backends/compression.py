"""Gradients sent as fp16: DDP's bucket, multiplied by a power of two that makes the best of fp16's range."""

import math

import torch
import torch.distributed as dist
from torch import Tensor


def send_as_fp16(world_size: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over workers; a hook for DDP's `register_comm_hook`, with the world size as state.

    torch's own hook divides by the number of workers in fp16, where all below 6e-8 becomes zero. Here the largest
    element of all workers (a collective of one number) is brought just so far below fp16's largest number that their
    sum fits, and the division is done in fp32: elements down to 2^-29 / world_size of the largest keep 11 bits, and
    only those below 2^-39 / world_size of it are lost.
    """
    buffer = bucket.buffer()
    largest = torch.linalg.vector_norm(buffer, torch.inf).float()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    room = 15 - math.ceil(math.log2(world_size))
    # largest < 2^exponent; of inf and nan, which stay what they are, it is some number
    exponent = torch.frexp(largest).exponent.clamp(-100, 100)
    scale = torch.ldexp(torch.ones_like(largest), room - exponent)
    sent = (buffer * scale).half()

    def average(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0].float().div_(scale * world_size))

    return dist.all_reduce(sent, async_op=True).get_future().then(average)
