"""Tables, names and Python of docs/finetuning*.md and examples/ are true, and the notebooks run."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from lm_experiments_tools import FineTuner, PreTrainer
from lm_experiments_tools.config import cli
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.finetuning import LEARNING_RATES, FinetuningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.metrics import METRICS, values_of
from tests.helpers import ROOT

PAGES = sorted((ROOT / "docs").glob("finetuning*.md"))
PAGE = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
YAML_FILES = sorted((ROOT / "examples").glob("*.yaml"))
FLAGS = {field.name for field in fields(FinetuningArgs)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README + PAGE, flags=re.M | re.S)


def calls(source: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def settings_of(source: str) -> list[set[str]]:
    """Keywords of each call of FineTuner and of its `train`."""
    found = []
    for call in calls(source):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in ("FineTuner", "train") and getattr(getattr(call.func, "value", None), "id", "") != "run":
            found.append({keyword.arg for keyword in call.keywords if keyword.arg})
    return found


def notebook_code(path: Path) -> str:
    nbformat = pytest.importorskip("nbformat")
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.stem)
def test_example_parses_and_says_nothing_twice(path):
    kinds = {"finetune": FinetuningArgs, "pretrain": T5PretrainingArgs, "pretrain_bert": BertPretrainingArgs}
    args_class = [kinds[name] for name in kinds if path.stem.startswith(name)][-1]
    args, origins = cli.parse(args_class, ["--config", str(path)])
    assert set(yaml.safe_load(path.read_text())) == {name for name, origin in origins.items() if origin != "default"}
    assert args.iters > 0 if path.stem.startswith("pretrain") else args.resolved().lr is not None


@pytest.mark.parametrize("source", [*blocks("python"), *NOTEBOOKS], ids=lambda s: getattr(s, "stem", "block"))
def test_python_of_pages_and_notebooks_names_settings_and_methods_that_exist(source):
    source = notebook_code(source) if isinstance(source, Path) else source
    for names in settings_of(source):
        assert names <= FLAGS
    for call in calls(source):
        if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "tuner":
            assert hasattr(FineTuner, call.func.attr)
        if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "run":
            assert hasattr(PreTrainer, call.func.attr)


def test_every_flag_that_the_pages_name_exists():
    """In the text too; the flags of launchers and tools stand in code blocks alone."""
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
    named = set(re.findall(r"--([a-z][a-z_0-9]+)", prose))
    assert len(named) > 50
    assert named <= FLAGS


def test_tables_of_the_pages_are_those_of_the_code():
    rows = re.findall(r"^\| ((?:`\w+`(?: \*)?(?:, )?)+) \| (.*?) \| (.*?) \| .* \| (.*?) \|$", PAGE, flags=re.M)
    documented = {
        name: (mark == " *", {name} if values == "the same" else set(re.findall(r"\w+", values)), scale, tasks)
        for names, values, scale, tasks in rows
        for name, mark in re.findall(r"`(\w+)`( \*)?", names)
    }
    for name, metric in METRICS.items():
        is_usual, values, scale, tasks = documented.pop(name)
        assert is_usual == bool(metric.usual_for) and scale == metric.scale and set(values_of(name)) <= values, name
        assert tasks == "the same" or set(tasks.split(", ")) == set(metric.tasks), name
    for kind in ("lora", "prompt_tuning", "prefix_tuning", "new_tokens"):
        (rate,) = re.findall(rf"^\| `{kind}` \|.*\| (\S+) \|$", PAGE, flags=re.M)
        assert float(rate) == LEARNING_RATES[kind]
    whole = re.search(r"^\| none \|.*\| (\S+) for encoder-decoders, (\S+) for encoders and decoders \|$", PAGE, re.M)
    assert float(whole[1]) == LEARNING_RATES["encoder-decoder"]
    assert float(whole[2]) == LEARNING_RATES["encoder"] == LEARNING_RATES["decoder"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    for package in ("nbclient", "ipykernel", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not list(tmp_path.iterdir())  # what it writes goes to a temporary folder of its own
