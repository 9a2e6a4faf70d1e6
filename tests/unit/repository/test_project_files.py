"""Workflows, Dockerfile and dev container run make targets that exist; project files parse."""

import json
import re

import pytest
import yaml

from tests.helpers import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def make_targets(command: str) -> set[str]:
    program, *targets = command.split()
    assert program == "make"
    return set(targets)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_make_targets_and_nothing_else(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands and set().union(*map(make_targets, commands)) <= TARGETS
    assert workflow["permissions"] == {"contents": "read"}


def test_containers_are_built_by_make():
    commands = re.findall(r"^RUN (.*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    for command in [*commands, container["postCreateCommand"]]:
        assert make_targets(command) <= TARGETS


def test_links_of_pages_lead_somewhere():
    pages = [page for folder in ("", "docs", "benchmarks", ".github") for page in (ROOT / folder).glob("*.md")]
    assert len(pages) > 40
    for page in pages:
        for link in re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page}: {link}"
