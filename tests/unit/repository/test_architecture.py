"""The names in docs/architecture.md exist; recipes of docs/extending.md and CONTRIBUTING.md work on a copy."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EXTENDING = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("docs/extending.md", "CONTRIBUTING.md"))
JOURNEYS = PAGE.partition("## Six journeys")[2]
RECIPES = {
    name.lower(): text
    for name, text in re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", EXTENDING, flags=re.MULTILINE | re.DOTALL)
}
# file=PATH behind a fence's language: a file to write, or, of a diff, lines to add to one
BLOCK = re.compile(r"^```(python|diff|bash)(?: file=(\S+))?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
TINY = {"base": "t5-small", "vocab_size": 512, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
RUN = """
data_path: [text.jsonl]
vocab: vocab.model
data_n_workers: 1
model_cfg: tiny.json
input_seq_len: 32
target_seq_len: 16
batch_size: 4
lr: 1e-3
iters: 2
log_interval: 1
model_path: run
backend: auto
"""


def definitions(path: str) -> set[str]:
    """Names that a source defines, at its top or inside its classes."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def named_in(line: str) -> list[tuple[str, str | None]]:
    """(file, name or None) for each `file.py` and `name` of a line; a name belongs to the file before it."""
    found, file, folder = [], "", ""
    for word in re.findall(r"`([^`]+)`", line):
        if word.endswith(".py"):
            file = word if "/" in word else f"{folder}/{word}"
            folder = str(Path(file).parent)
            found.append((file, None))
        elif re.fullmatch(r"_?\w+", word) and file:
            found.append((file, word))
    return found


@pytest.mark.parametrize("line", [line for line in JOURNEYS.splitlines() if ".py`" in line])
def test_the_places_of_a_journey_exist(line):
    places = named_in(line)
    assert places
    for file, name in places:
        path = file if file.startswith(("modeling_", "megatron/")) else f"lm_experiments_tools/{file}"
        assert (ROOT / path).is_file(), f"there is no {path}"
        assert name is None or name in definitions(path), f"{path} defines no {name}"


def test_the_tree_lists_every_folder():
    tree = PAGE.partition("## The tree")[2].partition("\n## ")[0]
    for folder in (ROOT / "lm_experiments_tools").rglob("__init__.py"):
        name = folder.parent.name
        assert f"{name}/" in tree or folder.parent.parent.name == "tools", f"{name}/ is not in the tree"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project, with a text, a vocabulary and a model of a few thousand weights."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("lm_experiments_tools", "modeling_t5", "models_configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run_t5_pretraining.py", folder)
    numbered_words_vocabulary(folder)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    (folder / "run.yaml").write_text(RUN)
    return folder


def carry_out(folder: Path, recipe: str) -> str:
    """Write and change the files of a recipe and run its commands; gives what they print."""
    printed = ""
    for kind, file, text in BLOCK.findall(recipe):
        if kind == "python":
            (folder / file).write_text(text)
        elif kind == "diff":
            old, new = ("\n".join(line[1:] for line in text.splitlines() if line[0] in kept) for kept in (" -", " +"))
            source = (folder / file).read_text()
            assert source.count(old) == 1, f"{file} holds {old!r} {source.count(old)} times"
            (folder / file).write_text(source.replace(old, new))
        else:
            environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
            for command in text.replace("python", sys.executable).splitlines():
                done = subprocess.run(
                    command, shell=True, cwd=folder, env=environment, text=True, capture_output=True, timeout=300
                )
                assert done.returncode == 0, done.stderr
                printed += done.stdout + done.stderr
    return printed


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("a subcommand", "40 lines"),
        # Each starts a run, and is written down like the first one.
        pytest.param("an optimizer", "step 2/2", marks=pytest.mark.slow),
        pytest.param("a schedule", "step 2/2", marks=pytest.mark.slow),
        pytest.param("an attention kernel", "plain: ", marks=pytest.mark.slow),
        pytest.param("a backend", "sums over workers", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_works(project, tmp_path, name, shows):
    folder = tmp_path / "project"
    shutil.copytree(project, folder)
    assert shows in carry_out(folder, RECIPES[name])
