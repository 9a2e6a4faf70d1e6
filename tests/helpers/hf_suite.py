"""Runs the tests that transformers makes of every model (ModelTesterMixin, in its source distribution) on our classes.

Opt-in, because they are not installed with the package:

    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xzf transformers-5.23.0.tar.gz
    pip install parameterized
    TRANSFORMERS_SOURCE=$PWD/transformers-5.23.0 pytest -m slow tests/parity -k hf_suite

A checkout of transformers' repository at that version serves as well, and has the tests of generation
(GenerationTesterMixin) too, which the distribution lacks.

With CLASSES_OF=transformers they run on transformers' own classes of the same names, to compare what fails and what is
skipped.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers import ROOT

GENERATION = "generation/test_utils.py"
EXPORT = "exporters/test_export.py"
# What the mixin derives from for export and generation: empty where the source has none.
STUBS = {
    EXPORT: "class ExportTesterMixin:\n    pass\n\n\nclass ExportGenerateTesterMixin:\n    pass\n",
    GENERATION: "class GenerationTesterMixin:\n    pass\n",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    passed: int
    failed: set[str]  # "Class::test", errors included
    output: str


def run_hf_suite(folder: Path, module: str) -> Outcome:
    """Run `module`, the text of a test module beside transformers' own: `..test_modeling_common` is the mixin's.

    Skips the calling test where what the tests need is absent.
    """
    source = Path(os.environ.get("TRANSFORMERS_SOURCE", "/nowhere")) / "tests"
    if not (source.is_dir() and importlib.util.find_spec("parameterized")):
        pytest.skip("needs parameterized, and TRANSFORMERS_SOURCE, the unpacked source distribution of transformers")
    tests = folder / "tests"
    tests.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, tests)
    modules = {**STUBS, "ours/test_ours.py": module}
    modules |= {name: (source / name).read_text() for name in STUBS if (source / name).exists()}
    for name, text in modules.items():
        (tests / name).parent.mkdir()
        (tests / name).write_text(text)
        (tests / name).with_name("__init__.py").touch()
    (tests / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    result = subprocess.run(
        [*command, "tests/ours/test_ours.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    print(result.stdout[-12000:])
    cases = list(ElementTree.parse(folder / "report.xml").iter("testcase"))  # pytest writes it at its end
    outcomes = [{part.tag for part in case} & {"failure", "error", "skipped"} for case in cases]
    failed = [case for case, found in zip(cases, outcomes, strict=True) if found - {"skipped"}]
    return Outcome(
        passed=outcomes.count(set()),
        failed={f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}" for case in failed},
        output=result.stdout[-4000:] + result.stderr[-1000:],
    )
