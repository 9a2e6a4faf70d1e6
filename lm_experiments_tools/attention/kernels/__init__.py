"""The attention call (`call.attend`) and its backends; "triton" is imported by its first call."""

from lm_experiments_tools.attention.kernels import blocks, call, eager, operator, sdpa

call.BACKENDS.update(eager=eager, sdpa=sdpa, blocks=blocks)
__all__ = ["operator"]  # registers attention with torch.compile
