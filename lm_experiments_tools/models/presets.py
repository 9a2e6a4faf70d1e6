"""Model configurations in JSON files, and shipped ones by name (presets).

A file holds only its differences from another one, which its key `base` names. This module does not import torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.names import nearest_names

PRESET_FOLDER = Path(__file__).resolve().parents[2] / "models_configs"
# Where t5-experiments keeps its configurations, and those whose name is that of another model here.
OLD_FOLDERS = ("t5configs", "bert_configs")
_SPARSE_ROPE = "bert_base_uncased-4L_preln_sparse_rope"
OLD_NAMES = {"t5-micro": "t5-small-4L", _SPARSE_ROPE: f"{_SPARSE_ROPE}16"}


def list_presets() -> dict[str, Path]:
    """Map the name of every shipped model configuration, e.g. `t5-small`, to its file."""
    return {path.stem: path for path in sorted(PRESET_FOLDER.glob("*/*.json"))}


def read_model_settings(path_or_preset: str | Path) -> dict:
    """Read a model configuration from a JSON file or preset, with the values of its `base` file. Raises UserError."""
    return _read_with_base(find_config(path_or_preset), seen=())


def find_config(path_or_preset: str | Path) -> Path:
    """Find the file of a model configuration or preset. Raises UserError if there is none."""
    path = Path(path_or_preset)
    if path.is_file():
        return path
    presets = list_presets()
    name = str(path_or_preset)
    if path.parent.name in OLD_FOLDERS:  # as its command lines say, where the folder was not taken along
        name = OLD_NAMES.get(path.stem, path.stem)
    if name in presets:
        return presets[name]
    # Of another kind of model none is meant: t5-tiny is not bert-tiny.
    kin = [preset for preset in presets if re.split("[-_]", preset)[0] == re.split("[-_]", path.stem)[0]] or presets
    hint = nearest_names(path.stem, kin) or f"; presets are {', '.join(kin)}"
    raise UserError(f"'{name}' is neither a model configuration file nor a preset{hint}.")


def _read_with_base(path: Path, seen: tuple[Path, ...]) -> dict:
    """The file's values over those of its base; `seen` holds the files that led here."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"'base' goes round in a circle: {' -> '.join(p.name for p in (*seen, path))}.")
    values = read_json(path, "an object with the model's settings")
    base = values.pop("base", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    base_path = beside if beside.is_file() else list_presets().get(str(base).removesuffix(".json"))
    if base_path is None:
        raise UserError(f"{path}: its base '{base}' is neither a file beside it nor a preset.")
    return {**_read_with_base(base_path, (*seen, path)), **values}
