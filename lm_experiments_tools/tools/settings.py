"""Copy accelerate_configs/, the files for `accelerate launch --config_file`, into the current folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from lm_experiments_tools.errors import UserError

SETTINGS = Path(__file__).resolve().parents[2] / "accelerate_configs"


@dataclass(frozen=True, kw_only=True)
class SettingsArgs:
    """Where to copy the settings of `accelerate launch`."""

    output: str = "."
    """Folder to write accelerate_configs/ to. Training starts there, since paths in these files are relative."""


def run(args: SettingsArgs) -> None:
    """Copy accelerate_configs/ and print its files. UserError if the folder exists."""
    folder = Path(args.output) / SETTINGS.name
    if folder.exists():
        raise UserError(f"{folder} is there already: remove it, or choose another --output.")
    files = sorted(path for path in SETTINGS.iterdir() if path.suffix in (".json", ".yaml"))
    folder.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)
    print(f"{folder}: {' '.join(path.name for path in files)}")
