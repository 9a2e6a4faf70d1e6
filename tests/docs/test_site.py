"""The site of docs/: every page has its place, links lead to pages, and it builds without a warning."""

import ast
import builtins
import html
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import ConfigArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.flags import flags_of
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.names import resolve_name
from lm_experiments_tools.tools.main import COMMANDS
from scripts.build_site import MOVED, collect_pages, page_of
from tests.helpers import ROOT

SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    collect_pages(ROOT, folder)
    return folder


def test_every_page_has_one_place_in_the_navigation(pages):
    there = sorted(path.relative_to(pages).as_posix() for path in pages.rglob("*.md"))
    assert sorted(pages_of(SETTINGS["nav"])) == there


def test_every_link_leads_to_a_page_or_a_picture(pages):
    for path in pages.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


def test_names_of_the_reference_exist():
    for path in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), flags=re.M):
            module, _, last = name.rpartition(".")
            assert hasattr(importlib.import_module(module), last), name


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_of_the_reference_opens_with_calls_that_its_names_take(path):
    heading, code, rest = re.split(r"```(?:python\n)?", path.read_text(encoding="utf-8"), maxsplit=2)
    assert len(heading.splitlines()) <= 2
    documented = {name.rpartition(".")[2]: name for name in re.findall(r"^::: (\S+)$", rest, flags=re.M)}
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id not in dir(builtins):
            function = resolve_name(":".join(documented[call.func.id].rsplit(".", 1)))
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(function).bind(*call.args, **keywords)


@pytest.mark.parametrize(
    ("page", "args_class"),
    [
        ("flags_t5.md", T5PretrainingArgs),
        ("flags_bert.md", BertPretrainingArgs),
        ("flags_finetuning.md", FinetuningArgs),
    ],
)
def test_reference_has_every_flag_of_a_script_once(pages, page, args_class):
    row = r"^\| `--(\w+)` \| [^|]+; (?:default [^|]+|required) \| [^|]+ \|$"
    rows = re.findall(row, (pages / page).read_text(), flags=re.M)
    assert sorted(rows) == sorted(flags_of(args_class, ConfigArgs))


def test_reference_has_every_command_of_lmtools(pages):
    sections = re.findall(r"^## lmtools (\w+)$", (pages / "flags_lmtools.md").read_text(), flags=re.M)
    assert sections == list(COMMANDS)


@pytest.mark.slow  # takes 20 s, and a workflow of its own builds the site
def test_builds_without_a_warning_and_with_each_block_of_code():
    if not importlib.util.find_spec("zensical"):
        pytest.skip("zensical is not installed (pip install -e .[docs])")
    done = subprocess.run([sys.executable, "scripts/build_site.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "No issues found" in done.stdout + done.stderr and "griffe" not in done.stdout + done.stderr
    for page in sorted((ROOT / "build" / "pages").rglob("*.md")):
        name = page.relative_to(ROOT / "build" / "pages").with_suffix("").as_posix()
        built = ROOT / "build" / "site" / ("" if name == "index" else name) / "index.html"
        blocks = re.findall(r'<div class="highlight">.*?<code>(.*?)</code>', built.read_text(encoding="utf-8"), re.S)
        shown = {textwrap.dedent(html.unescape(re.sub(r"<[^>]+>", "", block))).strip() for block in blocks}
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^ *```[^\n]*\n(.*?)^ *```$", text, flags=re.M | re.S)
        assert 2 * len(fences) == len(re.findall(r"^ *```", text, flags=re.M)), name
        for code in fences:
            assert textwrap.dedent(code).strip() in shown, f"{name}: {code}"
    found = (ROOT / "build" / "site" / "search.json").read_text(encoding="utf-8")
    assert all(term in found for term in ("--virtual_ranks", "Out of memory", "ModernBERT"))
    assert {page_of(name) for name in MOVED} <= {f"{path.stem}.md" for path in (ROOT / "build" / "pages").iterdir()}
    shutil.rmtree(ROOT / "build" / "pages")
