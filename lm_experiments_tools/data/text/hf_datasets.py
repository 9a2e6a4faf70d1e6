"""Hugging Face datasets as streamed text: reading their rows shard by shard, and identifying their version.

`name[:config][:split]` is a dataset of the hub, or a local folder that the `datasets` package can read (Parquet,
Arrow, ...). The default split is `train`. A single .parquet or .arrow file is a dataset too. Colons in the path of an
existing file or folder belong to the path.
"""

import glob
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import hash_of_ends

DATA_SUFFIXES = (".parquet", ".arrow")
_PARQUET_ROWS = 1000  # read together; the default, the rows of the first row group, may be 0


def split_name(item: str) -> tuple[str, str | None, str]:
    """Split the name of a Hugging Face dataset, `name[:config][:split]`, into its three parts."""
    parts = item.split(":")
    paths = [":".join(parts[:number]) for number in range(len(parts), 0, -1)]
    name = next(filter(os.path.exists, paths), parts[0])
    config, _, split = item[len(name) + 1 :].partition(":")
    return name, config or None, split or "train"


def with_split(item: str, split: str) -> str:
    """Return the name `name[:config][:split]` of a dataset with this split if it names none."""
    name, config, _ = split_name(item)
    return item if item[len(name) :].count(":") > 1 else f"{name}:{config or ''}:{split}"


def class_names(features: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return the class names of each `ClassLabel` column of a dataset, and of each list of such labels."""
    columns = {name: getattr(feature, "feature", feature) for name, feature in (features or {}).items()}
    return {name: feature.names for name, feature in columns.items() if getattr(feature, "names", None)}


def with_class_names(fields: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Replace the class numbers of a row by the names of their classes, `class_names`; -1 and null are none."""
    for column, names in classes.items():
        value = fields.get(column)
        found = value if isinstance(value, list) else [value]
        found = [names[n] if isinstance(n, int) and 0 <= n < len(names) else n for n in found]
        fields[column] = found if isinstance(value, list) else found[0]
    return fields


@lru_cache(maxsize=16)  # to find the files of a dataset on the hub takes seconds, and each shard would pay for it
def load_streaming(item: str, column: str = "") -> Any:
    """Load a Hugging Face dataset as a `datasets.IterableDataset`, without downloading it first.

    Args:
        column: of Parquet files, read only this column; "" for all.

    Raises:
        UserError: the package is not installed, the dataset, configuration or split does not exist, or there is no
            network.
    """
    if find_spec("datasets") is None:
        raise UserError(
            f"there is no file or folder {item}; to read it as a Hugging Face dataset: pip install datasets"
        )
    name, _, split = split_name(item)
    try:
        builder = _builder(item)
        if hasattr(builder.config, "columns"):  # Parquet
            builder.config.columns = [column] if column else None
            builder.config.batch_size = builder.config.batch_size or _PARQUET_ROWS
        return builder.as_streaming_dataset(split=split)
    except (OSError, ValueError, RuntimeError) as error:  # offline, not found, no such config or split, or a script
        if os.path.isfile(name):
            raise UserError(f"{item} is damaged or not of its ending ({first_line(error)}): copy it again") from None
        reason = f"the Hugging Face dataset {item} cannot be loaded: {first_line(error)}"
        if not os.path.exists(name):
            reason = f"there is no file or folder {name}, and {reason} (HF_HUB_OFFLINE=1 reads the cache at once)"
        raise UserError(reason) from None


def _builder(item: str) -> Any:
    """The `datasets.DatasetBuilder`; of a file, the reader of its kind."""
    import datasets

    name, config, _ = split_name(item)
    if os.path.isfile(name):
        reader, files = os.path.splitext(name)[1][1:].lower(), {"train": glob.escape(os.path.abspath(name))}
        return datasets.load_dataset_builder(reader, data_files=files)
    return datasets.load_dataset_builder(name, config)


def num_shards(item: str) -> int:
    """Return the number of shards of a Hugging Face dataset, which are files that can be read independently."""
    return 1 if os.path.isfile(item) else load_streaming(item).num_shards


def read_shard(item: str, shard: int, column: str, skip: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows of one shard (file) of a Hugging Face dataset in order, with the names of their classes.

    Args:
        column: read only this column, or that of `field_of`'s outer object, if the dataset has it.

    Raises:
        UserError: the shard is damaged.
        OSError: the network failed, after the retries of the `datasets` package.
    """
    dataset = load_streaming(item)
    column = column if column in (dataset.column_names or ()) else column.partition(".")[0]
    if column in (dataset.column_names or ()):
        dataset = load_streaming(item, column).select_columns([column])
    number, classes = skip, class_names(dataset.features)
    try:
        for row in (dataset if os.path.isfile(item) else dataset.shard(dataset.num_shards, shard)).skip(skip):
            number += 1
            yield with_class_names(row, classes)
    except (ValueError, EOFError, zlib.error) as error:  # Arrow's own errors are ValueErrors
        raise UserError(
            f"shard {shard} of the dataset {item} is damaged after row {number}: {first_line(error)}"
        ) from None


def identity(item: str, *, with_times: bool = False) -> list[str]:
    """Identify the version of a Hugging Face dataset, to notice that it has changed.

    The result lists the files of the split: files on the hub with their revision, local files with their size, first
    and last bytes.
    """
    if os.path.isfile(item):
        return [_file_identity(item, with_times)]
    builder = _builder(item)
    files = (builder.config.data_files or {}).get(split_name(item)[2])
    if files is None:
        return [str(builder.config.version), str(builder.hash)]
    return [_file_identity(file, with_times) if os.path.exists(file) else file for file in files]


def _file_identity(path: str, with_times: bool) -> str:
    status = os.stat(path)
    time = f", {status.st_mtime_ns}" if with_times else ""
    return f"{status.st_size}, {hash_of_ends(path)}{time}"
