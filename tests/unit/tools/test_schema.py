"""The JSON schema of YAML files, and completion in bash."""

import functools
import json
import subprocess

import pytest
import yaml

from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tools.schema import CLASSES, completion, schema
from tests.helpers import ROOT

KINDS = {"finetune": "finetune", "pretrain_bert": "pretrain-bert", "pretrain": "pretrain-t5"}


@functools.cache
def validator(script):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(found := schema(CLASSES[script]))
    return jsonschema.Draft202012Validator(found)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(path):
    script = next(script for start, script in KINDS.items() if path.stem.startswith(start))
    errors = [error.message for error in validator(script).iter_errors(yaml.safe_load(path.read_text()))]
    assert errors == []


@pytest.mark.parametrize(
    ("settings", "is_valid"),
    [
        ({"lr": "1e-4", "iters": "10Btok", "learning_rate": 0.1}, True),  # YAML 1.1 reads 1e-4 as text
        ({"data_path": ["a", "b"], "base": "other.yaml", "phases": [{"iters": 10}]}, True),
        ({"data_path": "a", "vocab": None}, True),
        ({"learn_rate": 1}, False),
        ({"lr_scheduler": 3}, False),
        ({"resume": True}, False),
        ({"backend": "mpi"}, False),
        ({"iters": "ten"}, False),
        ({"bf16": "maybe"}, False),
    ],
)
def test_wrong_names_and_types_are_marked(settings, is_valid):
    assert validator("pretrain-t5").is_valid(settings) == is_valid


def test_the_command_prints_it(capsys):
    assert main(["schema", "finetune"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(schema(CLASSES["finetune"])))
    assert printed["properties"]["lr"]["description"].startswith("Learning rate")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("pla", ["plan"]),
        ("--v", ["--version"]),
        ("pretrain-t5 --noise", ["--noise_density"]),
        ("inspect pretrain-b", ["pretrain-bert"]),
    ],
)
def test_bash_completes(words, found):
    line = words.split()
    script = (
        f'{completion()}\nCOMP_WORDS=(lmtools {words}); COMP_CWORD={len(line)}; _lmtools; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found and done.stderr == ""
