"""The rooms of the package stand on floors: imports run down, never up and never in a circle.

Imports under TYPE_CHECKING and inside functions count like any other, except that files of one room may name each
other's classes in annotations. docs/architecture.md draws the same picture.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGE = "lm_experiments_tools"
TYPE_CHECKING = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", flags=re.MULTILINE)
# From the ground up. A room imports from its own files and from floors below its own.
FLOORS = (
    ("errors", "labels"),
    ("files", "names"),
    ("attention.kernels", "metrics"),
    ("attention", "modules", "config"),
    ("backends", "optimizers", "tracking", "data", "modeling_t5", "modeling_bert"),
    ("checkpoint", "data.text"),
    ("data.tokens", "data.objectives", "data.examples"),
    ("data.seqio", "data.streaming", "evaluation", "megatron", "models", "training"),
    ("recipes", "ancestor"),
    ("planning",),
    ("tools.attention_maps", "tools.diagnosis", "tools.inspection"),
    ("tools", "scripts"),
    ("trainer", "trainer_accelerate", "utils", "megatron.data", "megatron.tokenizer", PACKAGE),  # public names alone
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """Dotted name -> file of all code that is ours."""
    folders = (PACKAGE, "modeling_t5", "modeling_bert", "megatron")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")] + list(ROOT.glob("run_*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in sorted(files)}


def room_of(module: str, file: Path) -> str:
    """The folder a module stands in, by its name below the package; a top-level file is a room of its own."""
    if module.startswith("run_"):
        return "scripts"
    folder = module if file.name == "__init__.py" else module.rpartition(".")[0]
    if folder == PACKAGE:
        return module.removeprefix(f"{PACKAGE}.")
    return folder.removeprefix(f"{PACKAGE}.")


def imported(source: str) -> set[str]:
    """Every module or name that a source imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
        ):
            found |= {word.value for word in node.args[:1] if isinstance(word, ast.Constant)}
    return found


def arrows(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for name in imported(source):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def upward(graph: Mapping[str, set[str]], room: Mapping[str, str]) -> list[str]:
    """Arrows that leave a room and do not go down."""
    pairs = [(above, below) for above, targets in graph.items() for below in targets if room[above] != room[below]]
    return sorted(f"{a} imports {b}" for a, b in pairs if FLOOR_OF[room[a]] <= FLOOR_OF[room[b]])


def without_annotations(files: Mapping[str, Path], graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows less those within a room that are for annotations alone."""
    sources = {module: re.sub(TYPE_CHECKING, "", file.read_text(encoding="utf-8")) for module, file in files.items()}
    running, room = arrows(sources), {module: room_of(module, file) for module, file in files.items()}
    return {a: {b for b in graph[a] if b in running[a] or room[a] != room[b]} for a in graph}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules on a circle of imports, or between two circles; empty where there is none."""
    left = set(graph)
    while True:
        imported_by_others = {target for module in left for target in graph[module] & left}
        ends = {module for module in left if not graph[module] & left or module not in imported_by_others}
        if not ends:
            return sorted(left)
        left -= ends


@pytest.fixture(scope="module")
def house() -> tuple[dict[str, set[str]], dict[str, str]]:
    files = modules()
    graph = arrows({module: file.read_text(encoding="utf-8") for module, file in files.items()})
    return graph, {module: room_of(module, file) for module, file in files.items()}


def test_every_room_has_a_floor(house):
    graph, room = house
    assert set(room.values()) == set(FLOOR_OF)
    assert sum(map(len, graph.values())) > 400


def test_no_import_runs_up(house):
    assert upward(*house) == []


def test_no_imports_run_in_a_circle(house):
    assert circle(without_annotations(modules(), house[0])) == []


@pytest.mark.parametrize(
    "source",
    [
        "from lm_experiments_tools.training.trainer import Trainer",
        "def f():\n    import lm_experiments_tools.training.trainer",
        "import typing\nif typing.TYPE_CHECKING:\n    from lm_experiments_tools.training import trainer",
        'import importlib\nimportlib.import_module("lm_experiments_tools.training.trainer")',
    ],
)
def test_an_import_that_runs_up_is_found(house, source):
    graph, room = house
    name = f"{PACKAGE}.data.order"
    found = arrows({name: source, **dict.fromkeys(graph.keys() - {name}, "")})
    assert upward(found, room) == [f"{name} imports {PACKAGE}.training.trainer"]


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_the_top_level_is_small_and_every_room_says_what_lives_there():
    assert len(list((ROOT / PACKAGE).glob("*.py"))) <= 8  # three hold t5-experiments' names
    for folder in [PACKAGE, *(room.replace(".", "/") for room in FLOOR_OF)]:
        file = ROOT / PACKAGE / folder / "__init__.py"
        if folder != PACKAGE and file.exists():
            sentence = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).partition("\n\n")[0]
            assert "imports" in sentence and sentence.endswith("."), f"{file}: {sentence}"
