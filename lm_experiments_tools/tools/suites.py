"""Run lm-evaluation-harness on the checkpoints of a run, and record the values in its metrics.jsonl.

suite = Suite("lm_eval", ("tasks/colours.yaml",), settings={})
for name in checkpoints_of("runs/mine"):
    print(name, measured(name, suite))

"""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_experiments_tools.checkpoint.manifest import parse_step
from lm_experiments_tools.checkpoint.source import find_source
from lm_experiments_tools.data.examples.example_encoder import added_end
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import dump_json
from lm_experiments_tools.models.saved import open_saved, position_of, run_folder
from lm_experiments_tools.names import nearest_names
from lm_experiments_tools.tracking.tracker import parse_record

_SETTINGS = ("num_fewshot", "limit")


@dataclass(frozen=True)
class Suite:
    """A benchmark suite of another project, and the tasks of it that are evaluated.

    Attributes:
        name: "lm_eval"; also the split name of its values in metrics.jsonl.
        tasks: names or YAML files.
        settings: flags that affect the values. A task is measured again if its recorded values have other settings.
        model_cls: class of the model; None for the class it was saved from.
    """

    name: str
    tasks: tuple[str, ...]
    settings: Mapping[str, Any]
    batch_size: int = 8
    model_cls: str | None = None

    def check(self) -> None:
        """Check that the package and tasks of the suite exist. Raises UserError."""
        _lm_eval_tasks(self.tasks)


def checkpoints_of(name: str) -> list[str]:
    """List all checkpoints of a run directory, oldest first; any other model gives [name]. Raises UserError."""
    folder = Path(name) / "checkpoints"
    if not folder.is_dir():
        find_source(name, "--checkpoints")
        return [name]
    steps = sorted((step, str(path)) for path in folder.iterdir() if (step := parse_step(path.name)) is not None)
    if not steps:
        raise UserError(f"--checkpoints {name}: the run has no checkpoint yet: wait for its first (--save_interval).")
    return [path for _, path in steps]


def measured(name: str, suite: Suite) -> dict[str, float]:
    """Return the values of a model on all tasks of a suite, and record them in the metrics.jsonl of its run.

    Only tasks that are not recorded there yet are measured.
    """
    source = find_source(name, "--checkpoints")
    folder = run_folder(source)
    place = {} if folder is None else position_of(source.path)
    known = {} if folder is None else _known(folder / "metrics.jsonl", place["step"], suite)
    values = {key: value for task in suite.tasks for key, value in known.get(task, {}).items()}
    missing = [task for task in suite.tasks if task not in known]
    for task, found in _lm_eval(suite, name, missing) if missing else ():
        values |= found
        if folder is not None:
            of = {"task": task, **suite.settings}
            record = {**place, "split": suite.name, **found, "metrics": list(found), "of": of, "time": time.time()}
            # one write: the run may log at the same time
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(dump_json(record, indent=None) + "\n")
    gc.collect()
    return values


def _known(file: Path, step: int, suite: Suite) -> dict[str, dict[str, float]]:
    """Task -> recorded values of this suite, its settings and the step."""
    found = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        record = parse_record(line) if '"of"' in line else None
        if record is None or record["step"] != step or record["split"] != suite.name:
            continue
        of = dict(record["of"])
        task = of.pop("task", None)
        if of == json.loads(json.dumps(suite.settings)):
            found[task] = {name: record[name] for name in record["metrics"]}
    return found


# ---- lm-evaluation-harness


def _lm_eval_tasks(tasks: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """lm_eval's manager, and {task: its name there}. Raises UserError for an unknown task."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"--suite needs a package ({error}): pip install 'lm_eval>=0.4.13'") from error

    names, folders = {}, []
    for task in tasks:
        file = Path(task)
        names[task] = task
        if file.suffix not in (".yaml", ".yml"):
            continue
        if not file.is_file():
            raise UserError(f"--tasks {task}: there is no such file.")
        named = re.search(r"(?m)^(?:task|group):\s*['\"]?([^\s'\"#]+)", file.read_text(encoding="utf-8"))
        if named is None:
            raise UserError(f"--tasks {task}: the file names no task (a line `task: NAME`).")
        names[task] = named[1]
        folders.append(str(file.resolve().parent))
    in_library = any(task == name for task, name in names.items())
    manager = TaskManager(include_path=folders or None, include_defaults=in_library)
    for task, name in names.items():
        if name not in manager.all_tasks:
            raise UserError(f"--tasks {task}: lm_eval has no such task{nearest_names(name, manager.all_tasks)}.")
    return manager, names


def _lm_eval(suite: Suite, name: str, tasks: Sequence[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Evaluate a model on some tasks; yields (task, values) after each."""
    manager, names = _lm_eval_tasks(tasks)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    opened = open_saved(name, suite.model_cls, "--checkpoints")
    backend = {"encoder-decoder": "seq2seq", "decoder": "causal"}.get(opened.kind)
    if backend is None:
        raise UserError(f"{name}: lm_eval measures models that generate, not a {type(opened.model).__name__}.")
    import torch

    opened.model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = opened.tokenizer
    plain = {"add_bos_token": False} if opened.writes_on and added_end(tokenizer) else {}  # no EOS before a choice
    model = HFLM(pretrained=opened.model, tokenizer=tokenizer, backend=backend, batch_size=suite.batch_size, **plain)
    for task in tasks:
        results = simple_evaluate(
            model=model,
            tasks=[names[task]],
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
            **{key: suite.settings[key] for key in _SETTINGS if suite.settings.get(key) is not None},
        )
        yield task, _numbers_of(results["results"])


def _numbers_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """task/metric, or task/metric/filter -> value; without standard errors."""
    found = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                found[f"{task}/{metric}" + (f"/{chosen}" if chosen != "none" else "")] = float(value)
    return found
