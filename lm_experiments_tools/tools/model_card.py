"""The model card of an exported model, filled from the records of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from lm_experiments_tools.models.saved import Opened, position_of, run_folder
from lm_experiments_tools.tools.compare import read_run
from lm_experiments_tools.tools.hub_folder import Loading

_SETTINGS = {
    "task": "objective",
    "data_path": "training data",
    "valid_data_path": "validation data",
    "input_seq_len": "tokens of an input",
    "target_seq_len": "tokens of a target",
    "batch_size": "micro-batch",
    "gradient_accumulation_steps": "gradient accumulation steps",
    "WORLD_SIZE": "workers",
    "optimizer": "optimizer",
    "lr": "learning rate",
    "lr_scheduler": "schedule",
    "seed": "seed",
    "COMMIT": "commit of the program",
}
_PATHS = ("data_path", "valid_data_path")
_PIPELINES = {"encoder": "fill-mask", "decoder": "text-generation"}
_CARD = """---
{data}
---
# {name}

A `{cls}` ({kind}) of {parameters:,} parameters{merged}.

**Licence: not chosen yet.** Whoever publishes this model puts one here and in `license` above.

## Training

{training}

## How to load it

{note}
```python
folder = "{name}"
{code}
```
{task}"""
_TOKENIZER = "\n\nfrom transformers import AutoTokenizer\n\ntokenizer = AutoTokenizer.from_pretrained(folder)"


def write_card(opened: Opened, folder: Path, name: str, loading: Loading) -> None:
    """Write README.md into a folder that will be renamed to `name`."""
    model = opened.model
    classifies = opened.reader == "AutoModelForSequenceClassification"
    data = ModelCardData(
        library_name="transformers",
        license="other",
        license_name="to-be-chosen",
        pipeline_tag="text-classification" if classifies else _PIPELINES.get(opened.kind),
        tags=[model.config.model_type],
    )
    task = [(key, value) for key, value in opened.source.task.items() if value not in (None, "", [], ())]
    text = _CARD.format(
        data=data.to_yaml(),
        name=name,
        cls=type(model).__name__,
        kind=opened.kind or model.config.model_type,
        parameters=sum(weight.numel() for weight in model.parameters()),
        merged=", into whose weights an adapter is merged" if opened.is_merged else "",
        training=_training(opened),
        note=f"{loading.note}\n" if loading.note else "",
        code=loading.code + (_TOKENIZER if any(folder.glob("tokenizer*")) else ""),
        task=f"\n## What it was fine-tuned for\n\n{_table(task)}\n" if task else "",
    )
    ModelCard(text).save(folder / "README.md")


def _training(opened: Opened) -> str:
    """What the run recorded up to the checkpoint's step."""
    path = run_folder(opened.source)
    if path is None:
        return "The files that this was exported from do not record it."
    run, position = read_run(path), position_of(opened.source.path)
    step = position["step"]
    rows: list[tuple[str, Any]] = [("updates" if key == "step" else key, f"{n:,}") for key, n in position.items()]
    for key in run.metrics("train"):
        values = [record[key] for record in run.of("train") if record["step"] <= step and record.get(key)]
        rows += [(f"training {key}", f"{value:.4g}") for value in values[-1:]]
    valid = next((record for record in reversed(run.of("valid")) if record["step"] == step), {})
    rows += [(f"validation {key}", f"{valid[key]:.4g}") for key in run.metrics("valid") if valid.get(key) is not None]
    for name, label in _SETTINGS.items():
        value = run.config.get(name)
        values = [value] if not isinstance(value, (list, tuple)) else value
        # Folders are those of one machine: of a path, the name alone.
        texts = [Path(entry).name if name in _PATHS else str(entry) for entry in values if entry is not None]
        rows += [(label, ", ".join(texts))] if texts else []
    return _table(rows)


def _table(rows: list[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])
