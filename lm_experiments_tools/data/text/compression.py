"""Files by their endings: what kind a name is of, and opening compressed ones."""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import BinaryIO

from lm_experiments_tools.errors import UserError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def endings(path: str) -> tuple[str, str]:
    """The ending of a name and that of its compression, in small letters: (".jsonl", ".gz") of data.JSONL.gz."""
    stem, last = os.path.splitext(os.path.basename(path).lower())
    return (os.path.splitext(stem)[1], last) if last in COMPRESSIONS else (last, "")


def check_readable(path: str) -> None:
    """Refuse a file for whose compression a package is missing."""
    if endings(path)[1] == ".zst" and find_spec("pyarrow") is None:
        raise UserError(f"{path} is compressed by zstd, which pyarrow reads: pip install pyarrow, or decompress it")


@contextmanager
def open_decompressed(path: str) -> Iterator[BinaryIO]:
    """Bytes of a file, decompressed where its ending says that it is compressed.

    Raises:
        EOFError: one that is damaged or cut short, while it is read.
    """
    compression = endings(path)[1]
    try:
        if compression == ".zst":
            import pyarrow

            with io.BufferedReader(pyarrow.input_stream(path, compression="zstd")) as file:
                yield file
        else:
            with _OPEN.get(compression, open)(path, "rb") as file:
                yield file
    except (zlib.error, lzma.LZMAError) as error:
        raise EOFError(str(error)) from None
    except OSError as error:
        if error.errno is not None:  # of the disk; those of the decompressors have no number
            raise
        raise EOFError(str(error)) from None
