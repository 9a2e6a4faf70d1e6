"""Mutation testing: change one operator, constant or statement of the package and see whether a test fails.

python -m tests.mutants.program --count 200 --seed 1 --jobs 2 --coverage build/coverage

Each mutant is tested in a copy of the repository, by a process forked after torch and transformers are imported.
A mutant is killed if a test fails. One whose tests take more than `--timeout` seconds is counted apart: it hangs, or
its tests are slow. With the data file of `make coverage`, only tests that run the changed line are tried, those that
run few other lines first.
"""

import argparse
import ast
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("lm_experiments_tools", "modeling_t5", "modeling_bert", "megatron", "models_configs", "tests", "examples")
# Folder or file of the package -> tests that are run for its mutants, in this order.
TARGETS = {
    "training": ["tests/unit/training", "tests/unit/recipes"],
    "backends": ["tests/unit/backends", "tests/unit/training", "tests/distributed"],
    "checkpoint": ["tests/unit/checkpoint", "tests/unit/models"],
    "data/order.py": ["tests/unit/data"],
    "data/objectives": ["tests/unit/data", "tests/parity"],
    "attention": ["tests/unit/attention", "tests/unit/modeling_t5"],
}
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}


def replacement(node: ast.AST) -> str | None:
    """Source of a mutant of `node`, None if there is none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return f"{ast.unparse(node.left)} {COMPARISONS[type(node.ops[0])]} {ast.unparse(node.comparators[0])}"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return f"({ast.unparse(node.left)}) {OPERATORS[type(node.op)]} ({ast.unparse(node.right)})"
    if isinstance(node, ast.BoolOp):
        return f" {'or' if isinstance(node.op, ast.And) else 'and'} ".join(f"({ast.unparse(v)})" for v in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        return str(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    return None


def mutants_of(source: str) -> list[tuple[int, int, int, str]]:
    """(line, start, end, new text) in bytes of the source, without annotations and error messages."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, (ast.expr, ast.stmt)) and (text := replacement(node)) is not None:
            begin = starts[node.lineno - 1] + node.col_offset
            found.append((node.lineno, begin, starts[node.end_lineno - 1] + node.end_col_offset, text))
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "type_params"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(ast.parse(source))
    return found


def candidates() -> dict[str, list[tuple[Path, tuple[int, int, int, str]]]]:
    """Target -> (file below the repository, mutant)."""
    found = {}
    for target in TARGETS:
        path = ROOT / "lm_experiments_tools" / target
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        found[target] = [
            (file.relative_to(ROOT), mutant)
            for file in files
            for mutant in mutants_of(file.read_text(encoding="utf-8"))
        ]
    return found


def near(file: Path) -> list[str]:
    """Test files named after a file of the package."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit").rglob(f"test_*{file.stem}*.py"))


def tests_of(data: CoverageData, file: Path, line: int, limit: int) -> list[str]:
    """Ids of at most `limit` tests that run a line, those that run the fewest lines of the file first."""
    lines: dict[str, set[int]] = {}
    for number, contexts in data.contexts_by_lineno(str(file)).items():
        for context in contexts:
            test, _, phase = context.partition("|")
            if phase == "run":
                lines.setdefault(test, set()).add(number)
    running = [test for test in lines if line in lines[test]]
    return sorted(running, key=lambda test: len(lines[test]))[:limit]


def run_tests(folder: Path, tests: list[str]) -> None:
    """Run the tests in a forked child and exit with pytest's code."""
    os.setsid()
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    with (folder / "log.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=0", "-m", "not slow and not gpu and not cluster"]
    os._exit(importlib.import_module("pytest").main([*options, *tests]))


def copies(count: int) -> list[Path]:
    """Copies of the repository in which mutants are tested."""
    work = Path(tempfile.mkdtemp(prefix="mutants_"))
    for number in range(count):
        for name in COPIED:
            shutil.copytree(ROOT / name, work / str(number) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
            shutil.copy(path, work / str(number))
    return [work / str(number) for number in range(count)]


class Mutant:
    """A mutant under test in a forked process."""

    def __init__(self, folder: Path, target: str, file: Path, mutation: tuple[int, int, int, str], tests: list[str]):
        line, begin, end, text = mutation
        source = (ROOT / file).read_bytes()
        (folder / file).write_bytes(source[:begin] + text.encode() + source[end:])
        self.change = f"{file}:{line}: {source[begin:end].decode()!r} -> {text!r}"
        self.folder, self.target, self.file, self.started = folder, target, file, time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            run_tests(folder, tests)

    def outcome(self, timeout: float) -> str | None:
        """Give "killed", "SURVIVED", "timed out" or "NO TESTS" (see log.txt); None while tests are running."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            outcome = {0: "SURVIVED", 4: "NO TESTS", 5: "NO TESTS"}.get(code, "killed")  # pytest's exit codes
        elif time.monotonic() - self.started > timeout:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            outcome = "timed out"
        else:
            return None
        shutil.copy(ROOT / self.file, self.folder / self.file)
        print(f"{outcome} {time.monotonic() - self.started:.0f} s {self.change}", flush=True)
        return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default=",".join(TARGETS), help="parts of the package to change, in turn")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--coverage", type=Path, help="data file of `make coverage`")
    parser.add_argument("--tests", type=int, default=100, help="with --coverage: at most so many tests of a line")
    args = parser.parse_args()
    for name in ("pytest", "torch", "transformers.models.bert.modeling_bert", "transformers.models.t5.modeling_t5"):
        importlib.import_module(name)
    rng, found = random.Random(args.seed), candidates()
    targets = (args.targets.split(",") * args.count)[: args.count]
    queue = [(target, *rng.choice(found[target])) for target in targets]
    data = CoverageData(args.coverage) if args.coverage else None
    if data:
        data.read()
    free, running, outcomes = copies(args.jobs), [], Counter()
    while queue or running:
        while queue and free:
            target, file, mutation = queue.pop()
            tests = tests_of(data, file, mutation[0], args.tests) if data else []
            running.append(Mutant(free.pop(), target, file, mutation, tests or [*near(file), *TARGETS[target]]))
        time.sleep(0.5)
        for mutant in list(running):
            if (outcome := mutant.outcome(args.timeout)) is not None:
                outcomes[mutant.target, outcome] += 1
                free.append(mutant.folder)
                running.remove(mutant)
    for target in TARGETS:
        counts = {outcome: outcomes[target, outcome] for outcome in ("killed", "timed out", "SURVIVED", "NO TESTS")}
        print(f"{target}: {counts['killed']} of {sum(counts.values())} killed, {counts['timed out']} timed out")
    shutil.rmtree(free[0].parent)


if __name__ == "__main__":
    main()
