"""Files of examples/clusters/, edited as their first lines tell the user to."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import ROOT


def copy_example(name: str, folder: Path, **edits: str) -> Path:
    """Copy a file to a folder with new values for some of its settings (`NAME=value` or `NAME = value`)."""
    lines = (ROOT / "examples" / "clusters" / name).read_text(encoding="utf-8").splitlines()
    for setting, value in edits.items():
        (number,) = (n for n, line in enumerate(lines) if line.replace(" = ", "=").startswith(f"{setting}="))
        separator = " = " if f"{setting} = " in lines[number] else "="
        lines[number] = f"{setting}{separator}{value}"
    copy = folder / name
    copy.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return copy
