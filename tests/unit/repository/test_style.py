"""The rules of CONTRIBUTING.md that the linter does not know, read from the source of every Python file."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import ROOT

MOST_LINES_OF_A_FUNCTION = 60
WRONG_OPENINGS = {"What", "Whether", "Those", "That"}
MOST_WRONG_OPENINGS = 0.02  # of all docstrings


def python_files() -> list[Path]:
    """The repository's files, without what lies in hidden folders or was built."""
    folders = (path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "build")
    return sorted(ROOT.glob("*.py")) + sorted(path for folder in folders for path in folder.rglob("*.py"))


def violations(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, rule broken there); an unpacked `*(a, b)` of a call is written `a, b`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION:
                found.append((node.lineno, f"a long function, {node.name}"))
        elif isinstance(node, ast.Call):
            unpacked = [word for word in node.args if isinstance(word, ast.Starred)]
            literals = [word for word in unpacked if isinstance(word.value, (ast.Tuple, ast.List))]
            found += [(word.lineno, "an unpacked literal") for word in literals]
    return found


def docstrings(tree: ast.AST) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text]


def opens_wrongly(docstring: str) -> bool:
    return docstring.split()[0].strip(",.:;`") in WRONG_OPENINGS


@cache
def of_the_repository() -> tuple[list[str], list[str]]:
    """Rules broken somewhere, and all docstrings."""
    broken, texts = [], []
    for path in python_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        broken += [f"{path.relative_to(ROOT)}:{line}: {rule}" for line, rule in violations(tree)]
        texts += docstrings(tree)
    return broken, texts


def test_functions_are_short_and_calls_written_out():
    assert of_the_repository()[0] == []


def test_docstrings_open_with_a_verb_or_a_noun():
    texts = of_the_repository()[1]
    wrong = [text.partition("\n")[0] for text in texts if opens_wrongly(text)]
    assert len(wrong) <= MOST_WRONG_OPENINGS * len(texts), wrong


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def f():\n" + "    pass\n" * 60, "a long function, f"),
        ("async def f(\n    a,\n):\n" + "    pass\n" * 58, "a long function, f"),
        ("f(*(1, 2), x=3)", "an unpacked literal"),
        ("f(0, *[1, 2])", "an unpacked literal"),
    ],
)
def test_each_rule_can_be_broken(source, rule):
    assert [found for _, found in violations(ast.parse(source))] == [rule]
