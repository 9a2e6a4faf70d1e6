"""Tensors to safetensors files: at once, or copied now and written later, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from lm_experiments_tools.files import apply_umask

WriteTensors = Callable[..., None]  # (tensors, file, metadata=None)


def write_now(tensors: dict[str, Tensor], file: Path | str, metadata: dict[str, str] | None = None) -> None:
    """`safetensors.torch.save_file`, readable by whom the umask says. Raises OSError, SafetensorError."""
    save_file(tensors, file, metadata=metadata)
    apply_umask(Path(file))


class PostponedFiles:
    """Files whose tensors are held in ordinary memory until `write`: as many bytes as the files will have."""

    def __init__(self) -> None:
        self._waiting: list[tuple[dict[str, Tensor], Path, dict[str, str] | None]] = []

    def copy(self, tensors: Mapping[str, Tensor], file: Path | str, metadata: dict[str, str] | None = None) -> None:
        """Copy tensors of any device, as they are now."""
        copies = {
            name: tensor.detach().to("cpu", copy=True, memory_format=contiguous_format)
            for name, tensor in tensors.items()
        }
        self.keep(copies, file, metadata)

    def keep(self, tensors: dict[str, Tensor], file: Path | str, metadata: dict[str, str] | None = None) -> None:
        """Take over tensors on the CPU that nobody else changes."""
        self._waiting.append((tensors, Path(file), metadata))

    def write(self) -> None:
        """Write the files, and let go of the tensors of each. Raises OSError, SafetensorError.

        safetensors and the hashing of a manifest work outside Python's lock, which training holds most of the time.
        """
        while self._waiting:
            tensors, file, metadata = self._waiting.pop(0)
            write_now(tensors, file, metadata)
