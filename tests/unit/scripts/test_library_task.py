"""scripts/make_library_task.py: the data of `make finetune`."""

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

LIBRARIES = ("numpy", "sympy", "json")  # json is of the standard library


def write_corpus(folder: Path) -> Path:
    """Each file a library's, of ten paragraphs: nine of a fitting length that differ, one that names a library."""
    folder.mkdir()
    documents = []
    for library in LIBRARIES:
        for file in range(40):
            lines = [f"Number {n} of file {file} in library {library[::-1]} says: {'word ' * 25}." for n in range(9)]
            lines.append(
                f"The {library.upper()} library of file {file} has its name here, with many words: {'word ' * 20}"
            )
            documents.append({"text": "\n".join([*lines, "short"]), "source": f"{library}/file{file}.py"})
    for name, some in (("train", documents[5:]), ("valid", documents[:5])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in some))
    return folder


def run(corpus: Path, output: Path, *flags: str) -> subprocess.CompletedProcess:
    script = [sys.executable, ROOT / "scripts" / "make_library_task.py"]
    command = [*script, "--corpus", corpus, "--output", output, *flags]
    return subprocess.run(command, text=True, capture_output=True)


def read(folder: Path) -> dict[str, list[dict]]:
    return {name: list(map(json.loads, open(folder / f"{name}.jsonl"))) for name in ("train", "valid", "test")}


def test_sets_share_no_file_and_no_source_names_an_answer(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    result = run(corpus, tmp_path / "task", "--paragraphs", "160")
    assert result.returncode == 0, result.stderr
    sets = read(tmp_path / "task")
    files = {
        name: {(row["target"], row["source"].split(" in library")[0].split("file ")[1]) for row in rows}
        for name, rows in sets.items()
    }
    assert all(files.values())
    assert not files["train"] & files["valid"] and not files["train"] & files["test"]
    assert not files["valid"] & files["test"]
    targets = [row["target"] for rows in sets.values() for row in rows]
    assert set(targets) == {"numpy", "sympy", "python"}
    assert not any(name in row["source"].lower() for rows in sets.values() for row in rows for name in set(targets))
    for target in set(targets):
        counts = {name: sum(row["target"] == target for row in rows) for name, rows in sets.items()}
        assert counts["train"] <= 160 and counts["test"] <= 20 and counts["valid"] <= 10
    most = max(sum(row["target"] == target for row in sets["test"]) for target in set(targets))
    assert f"right in {100 * most / len(sets['test']):.1f} % of test" in result.stdout
