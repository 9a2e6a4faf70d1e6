"""What README shows runs, word for word, with no more than its own two commands install."""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT
from tests.helpers.pretrained_toys import save_toy

README = (ROOT / "README.md").read_text(encoding="utf-8")


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def installed_by(file: str) -> set[str]:
    """Names of all that `pip install -r file` brings, as far as it is installed here."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    left, found = [Requirement(line) for line in lines if line], set()
    while left:
        requirement = left.pop()
        name = canonical(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            left += map(Requirement, importlib.metadata.requires(name) or ())
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed (make env)")
    return found


def block(language: str, words: str) -> str:
    """The one code block of README that holds these words."""
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", README, flags=re.S) if words in text)
    return found


@pytest.fixture
def folder(tmp_path):
    """Rows, and models under the names that README gives them."""
    rows = [{"source": f"w{n} w{n + 1} w{n + 2}", "target": f"w{n}"} for n in range(1, 9)]
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("runs/mine", "t5-small"):
        save_toy("encoder-decoder", tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with what requirements-pretrain.txt installs and nothing else, as links."""
    site = tmp_path_factory.mktemp("site")
    for name in installed_by("requirements-pretrain.txt"):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return site


@pytest.fixture
def run(folder, packages):
    """Starts a Python file in a process that finds only these packages (-S: not those of the environment)."""

    def start(file: Path, *flags: str) -> None:
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
        command = [sys.executable, "-S", str(file), *flags]
        done = subprocess.run(command, cwd=folder, env={**os.environ, **path}, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr[-3000:]

    return start


@pytest.mark.slow  # test_commands.py runs it with all that is installed
def test_fine_tuning_command_runs_with_what_make_pretrain_installs(run, folder):
    _python, script, *flags = shlex.split(block("bash", "run_finetuning.py").replace("\\\n", " "))
    run(ROOT / script, *flags, "--epochs", "1")
    assert json.loads((folder / "runs/summaries/metrics.json").read_text())


@pytest.mark.slow
def test_python_of_fine_tuning_runs_with_what_make_pretrain_installs(run, folder):
    code = block("python", "tuner.train").replace("epochs=3", "epochs=1, optimize_metric='rougeL'")
    (folder / "fine_tuning.py").write_text(code)
    run(folder / "fine_tuning.py")
    assert (folder / "summaries" / "config.json").exists()
