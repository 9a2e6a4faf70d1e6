"""Progress bars, on a terminal and in a notebook only."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import IO, Any, TypeVar

T = TypeVar("T")
_DELAY = 5.0  # seconds of a command before its bar appears


def in_notebook() -> bool:
    """True in the kernel of a notebook, whose cells show HTML."""
    ipython = sys.modules.get("IPython")
    shell = type(None) if ipython is None else type(ipython.get_ipython())
    # Colab's shell is a subclass of Jupyter's.
    return any(cls.__name__ == "ZMQInteractiveShell" for cls in shell.__mro__)


def shows_progress(stream: IO[str]) -> bool:
    """True if whoever reads `stream` sees a progress bar move."""
    return in_notebook() or (stream.isatty() and os.environ.get("TERM") != "dumb")


def make_bar(items: Iterable[T] | None = None, *, show: bool = True, delay: float = _DELAY, **options: Any) -> Any:
    """Create a tqdm bar on stderr, which shows nothing if nobody would see it move.

    Without `items` it is moved by `update`. `delay` are the seconds before it appears; `show` is False on other
    workers than the first. `options` are tqdm's, such as desc, total and unit.
    """
    if in_notebook() and importlib.util.find_spec("ipywidgets"):
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    is_hidden = not (show and shows_progress(sys.stderr))
    return tqdm(items, delay=delay, **{"file": sys.stderr, "dynamic_ncols": True, "disable": is_hidden, **options})
