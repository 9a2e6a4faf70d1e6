"""`lmtools tokenize --on local`: the parts by datatrove, the bytes of one run, and what a failure leaves."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lm_experiments_tools.data.tokens.merge import merge_datasets
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import SAMPLED_BYTES
from lm_experiments_tools.tools import tokenize_parts
from lm_experiments_tools.tools.main import main
from tests.distributed.launch import missing
from tests.helpers.runs import words
from tests.helpers.token_toys import make_texts, write_jsonl


@pytest.fixture
def tokenize(tmp_path, monkeypatch, capfd):
    """Run it, in a folder with text that paths are relative to."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "text.jsonl", make_texts(4000))

    def tokenize(output, **flags):
        code = main(["tokenize", *words(**{"input": "text.jsonl", "vocab": "bytes", "output": output} | flags)])
        return code, capfd.readouterr().err

    return tokenize


def written(prefix: str, *suffixes: str) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in suffixes or (".bin", ".idx")]


@pytest.mark.skipif(missing("datatrove") is not None, reason="datatrove is not installed: pip install datatrove")
def test_parts_are_those_of_shard_and_their_merge_is_one_run(tokenize):
    assert tokenize("one", workers=1)[0] == 0 and tokenize("parts", on="local", shards=3)[0] == 0
    assert written("parts") == written("one")
    for number in range(3):
        assert tokenize("hand", workers=1, shard=f"{number}/3")[0] == 0
        assert written(f"parts-0000{number}-of-00003") == written(f"hand-0000{number}-of-00003")
    assert all(Path(f"parts-0000{number}-of-00003.bin").stat().st_size for number in range(3))
    records = [json.loads(*written(name, ".json")) for name in ("parts", "one")]
    assert records[0] == records[1]
    before = [Path(f"parts-0000{number}-of-00003.bin").stat().st_mtime_ns for number in range(3)]
    Path("parts-00001-of-00003.idx").unlink()
    assert tokenize("parts", on="local", shards=3)[0] == 0 and written("parts") == written("one")
    after = [Path(f"parts-0000{number}-of-00003.bin").stat().st_mtime_ns for number in range(3)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.skipif(missing("datatrove") is not None, reason="datatrove is not installed: pip install datatrove")
def test_a_part_that_fails_is_an_error_message_and_made_again(tokenize):
    with open("text.jsonl", "a", encoding="utf-8") as file:
        file.write("not json\n" * 3)
    code, said = tokenize("parts", on="local", shards=2, max_bad_lines=0)
    assert code == 2 and "Traceback" not in said
    assert said.splitlines()[-1].startswith("error: part 1 of 2: ") and "bad lines" in said.splitlines()[-1]
    assert not Path("parts.idx").exists()
    assert tokenize("parts", on="local", shards=2, max_bad_lines=3)[0] == 0
    assert tokenize("one", workers=1, max_bad_lines=3)[0] == 0 and written("parts") == written("one")
    write_jsonl(Path("text.jsonl"), make_texts(3000))
    assert tokenize("parts", on="local", shards=2)[0] == 0, "no part of the old text passes for done"
    assert tokenize("two", workers=1)[0] == 0 and written("parts") == written("two")


@pytest.fixture
def by_hand(monkeypatch):
    """What of an engine decides is done here without datatrove: parts without a mark are made and marked.

    Parts to fail are put into the list that it gives.
    """
    fail: list[int] = []

    def run(args, folder):
        for number in range(args.shards):
            mark = folder / "completions" / f"{number:05d}"
            if mark.exists():
                continue
            changed = {"vocab": "absent"} if number in fail else {}
            tokenize_parts._part(replace(args, **changed), os.getcwd(), folder, None, number, args.shards)
            mark.parent.mkdir(exist_ok=True)
            mark.touch()

    monkeypatch.setattr(tokenize_parts, "_check_installed", lambda engine: None)
    monkeypatch.setattr(tokenize_parts, "_run_local", run)
    return fail


def edit_in_the_middle():
    """Another text of the same size, which its beginning and end do not tell."""
    content = Path("text.jsonl").read_bytes()
    at = content.index(b"number", len(content) // 2)
    assert SAMPLED_BYTES < at < len(content) - SAMPLED_BYTES
    Path("text.jsonl").write_bytes(content[:at] + b"NUMBER" + content[at + 6 :])


def test_a_part_of_an_earlier_text_does_not_stand_in_for_one_that_failed(tokenize, by_hand):
    flags = {"on": "local", "shards": 2, "workers": 1}
    assert tokenize("parts", **flags)[0] == 0
    first, stat = written("parts"), os.stat("text.jsonl")
    before = Path("text.jsonl").read_bytes()
    edit_in_the_middle()
    by_hand.append(1)
    for _ in range(2):  # datatrove marks what has failed with a sentence as done
        code, said = tokenize("parts", **flags)
        assert code == 2 and "error: part 1 of 2: " in said and not Path("parts-00001-of-00002.idx").exists()
        with pytest.raises(
            UserError, match="parts-00001-of-00002' is no token prefix"
        ):  # of Slurm's job after a failure
            merge_datasets([f"parts-0000{number}-of-00002" for number in range(2)], "merged")
    by_hand.clear()
    assert tokenize("parts", **flags)[0] == 0 and tokenize("one", workers=1)[0] == 0
    assert written("parts") == written("one") != first
    Path("text.jsonl").write_bytes(before)  # the marks of the first text are still there
    os.utime("text.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tokenize("parts", **flags)[0] == 0 and written("parts") == first


def test_parts_of_something_else_are_left_alone(tokenize, by_hand):
    flags = {"on": "local", "shards": 2, "workers": 1}
    assert tokenize("parts", **flags)[0] == 0
    before = written("parts-00000-of-00002")
    write_jsonl(Path("other.jsonl"), make_texts(3))
    code, said = tokenize("parts", input="other.jsonl", **flags)
    assert code == 2 and "give --overwrite" in said and written("parts-00000-of-00002") == before
    assert tokenize("parts", input="other.jsonl", overwrite=True, **flags)[0] == 0
    assert written("parts-00000-of-00002") != before


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"on": "local"}, "takes --shards N"),
        ({"on": "local", "shards": 2, "shard": "0/2"}, "makes them all: no --shard"),
        ({"shards": 2}, "--shards needs --on"),
        ({"on": "slurm", "shards": 2}, "--on slurm needs --partition"),
        ({"on": "local", "shards": 2, "partition": "p"}, "--partition needs --on slurm"),
        ({"on": "local", "shards": 0}, "--shards is 0"),
        ({"on": "spark", "shards": 2}, "local, slurm, ray"),
    ],
)
def test_a_mistake_is_one_line(flags, sentence, tokenize):
    code, said = tokenize("parts", **flags)
    assert code == 2 and sentence in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(("engine", "package"), [("local", "datatrove"), ("ray", "ray"), ("slurm", "datatrove")])
def test_an_engine_that_is_not_installed_is_an_error_message(engine, package, tokenize, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else True)
    flags = {"on": engine, "shards": 2} | ({"partition": "p"} if engine == "slurm" else {})
    code, said = tokenize("parts", **flags)
    assert code == 2 and f"--on {engine} needs {package}" in said and "pip install datatrove" in said


@pytest.mark.skipif(missing("datatrove") is not None, reason="datatrove is not installed: pip install datatrove")
def test_slurm_is_looked_for_before_the_text_is_read(tokenize, monkeypatch):
    monkeypatch.setenv("PATH", "")
    code, said = tokenize("parts", input="absent.jsonl", on="slurm", shards=2, partition="p")
    assert code == 2 and "sbatch is not installed here" in said
