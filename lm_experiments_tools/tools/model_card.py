"""The model card of an exported model, filled from the records of its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.models.saved import position_of, run_folder
from lm_experiments_tools.tools.runs.records import read_run

if TYPE_CHECKING:
    from lm_experiments_tools.models.saved import Opened
    from lm_experiments_tools.tools.hub_folder import Loading

_SETTINGS = {
    "task": "objective",
    "data_path": "training data",
    "valid_data_path": "validation data",
    "input_seq_len": "tokens of an input",
    "target_seq_len": "tokens of a target",
    "batch_size": "micro-batch",
    "gradient_accumulation_steps": "micro-batches of an update",
    "WORLD_SIZE": "workers",
    "optimizer": "optimizer",
    "lr": "learning rate",
    "lr_scheduler": "schedule",
    "seed": "seed",
    "COMMIT": "commit of the program",
}
_PATHS = ("data_path", "valid_data_path")
_PIPELINES = {"encoder": "fill-mask", "decoder": "text-generation"}


def write_card(opened: Opened, folder: Path, name: str, loading: Loading) -> None:
    """Write README.md into a folder whose name is going to be `name`."""
    (folder / "README.md").write_text("\n".join(_lines(opened, folder, name, loading)) + "\n", encoding="utf-8")


def _lines(opened: Opened, folder: Path, name: str, loading: Loading) -> list[str]:
    model, source = opened.model, opened.source
    classifies = opened.reader == "AutoModelForSequenceClassification"
    pipeline = "text-classification" if classifies else _PIPELINES.get(opened.kind)
    head = ["---", "library_name: transformers", "license: other", "license_name: to-be-chosen"]
    head += [f"pipeline_tag: {pipeline}"] if pipeline else []
    head += ["tags:", f"- {model.config.model_type}", "---", ""]
    parameters = sum(weight.numel() for weight in model.parameters())
    merged = ", into whose weights an adapter is merged" if opened.is_merged else ""
    body = [
        f"# {name}",
        "",
        f"A `{type(model).__name__}` ({opened.kind or model.config.model_type}) of {parameters:,} parameters{merged}.",
        "",
        "**Licence: not chosen yet.** Whoever publishes this model puts one here and in `license` above.",
        "",
        *_training(opened),
        "## How to load it",
        "",
        *([loading.note, ""] if loading.note else []),
        "```python",
        f'folder = "{name}"',
        *loading.code.splitlines(),
    ]
    if any(folder.glob("tokenizer*")):
        body += ["", "from transformers import AutoTokenizer", "", "tokenizer = AutoTokenizer.from_pretrained(folder)"]
    task = {key: value for key, value in source.task.items() if value not in (None, "", [], ())}
    if task:
        body += ["```", "", "## What it was fine-tuned for", "", "| | |", "|---|---|", *_rows(task.items())]
        return head + body
    return [*head, *body, "```"]


def _training(opened: Opened) -> list[str]:
    path = run_folder(opened.source)
    if path is None:
        return ["## Training", "", "The files that this was exported from do not record it.", ""]
    run, position = read_run(path), position_of(opened.source.path)
    step = position.pop("step")
    rows: list[tuple[str, Any]] = [("updates", f"{step:,}")]
    rows += [(key, f"{value:,}") for key, value in position.items()]
    train = [record for record in run.of("train") if record["step"] <= step]
    for key in run.metrics("train"):  # a record may be of norms alone
        rows += [(f"training {key}", f"{record[key]:.4g}") for record in reversed(train) if record.get(key)][:1]
    valid = next((record for record in reversed(run.of("valid")) if record["step"] == step), {})
    rows += [(f"validation {key}", f"{valid[key]:.4g}") for key in run.metrics("valid") if valid.get(key) is not None]
    settings = {label: _setting(name, run.config.get(name)) for name, label in _SETTINGS.items()}
    rows += [(label, value) for label, value in settings.items() if value]
    return ["## Training", "", "| | |", "|---|---|", *_rows(rows), ""]


def _setting(name: str, value: Any) -> str:
    """As text; of a file the name alone, since folders are those of one machine."""
    values = value if isinstance(value, (list, tuple)) else [value]
    values = [Path(entry).name if name in _PATHS and entry is not None else entry for entry in values]
    return ", ".join(str(entry) for entry in values if entry is not None)


def _rows(pairs: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> list[str]:
    return [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in pairs]
