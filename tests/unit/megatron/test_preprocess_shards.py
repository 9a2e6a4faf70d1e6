"""preprocess_data.py stopped, killed, in several processes and in shards: the same bytes, and nothing left."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.tokens import pipeline
from lm_experiments_tools.data.workers import Worker
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked
from lm_experiments_tools.tools import main as lmtools
from megatron import preprocess_data as module
from tests.helpers import ROOT
from tests.helpers.preprocessing import command, outputs, run, start, write_lines
from tests.helpers.token_toys import read_documents


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_its_finished_shards_and_nothing_else(folder, number, code):
    record = json.dumps({"text": "A sentence.\n" * 2000}) + "\n"
    (folder / "in" / "data.jsonl").write_text(record * 600)
    flags = ("--workers", 2, "--log-interval", 1, "--sentence-splitter", "newline")
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  a shell's background jobs ignore it
    process = start(command(folder, *flags), ROOT, start_new_session=True, preexec_fn=heard)
    for line in process.stderr:
        if "Processed" in line:
            break
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2 and {path.name for path in (folder / "out").iterdir()} == {"x.shards", "x.lock"}
    os.killpg(process.pid, number)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err, err
    assert "resumes from the finished shards in" in err
    assert [path.name for path in (folder / "out").iterdir()] == ["x.shards"]
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_a_killed_run_goes_on_to_the_same_bytes_and_leaves_nothing(folder, caplog):
    record = json.dumps({"text": "A sentence.\n" * 2000}) + "\n"
    (folder / "in" / "data.jsonl").write_text((record * 99 + '{"text": 0}\n') * 3)
    flags = ("--log-interval", 1, "--sentence-splitter", "newline")
    process = start(command(folder, *flags), ROOT)
    for line in process.stderr:
        if "Processed" in line:
            break
    process.kill()
    process.communicate(timeout=60)
    assert {path.name for path in (folder / "out").iterdir()} == {"x.lock", "x.shards"}
    left = folder / "out" / f"x_text_sentence.bin.tmp{'0f' * 6}"  # of one that was killed while it joined
    left.touch()
    stranger = folder / "out" / "x_text_sentence.bin.tmpl"  # not a name that a writer gives
    stranger.touch()
    caplog.set_level("INFO")
    run(folder, "--split-sentences", *flags)
    (finished,) = re.findall(r"(\d) of 4 shards are there from an earlier run", caplog.text)
    assert 1 <= int(finished) <= 3
    stranger.unlink()
    gone_on = outputs(folder)
    assert set(gone_on) == {f"x_text_sentence.{kind}" for kind in ("bin", "idx", "json")} | {"x.bad_lines.jsonl"}
    run(folder, "--split-sentences", *flags, "--workers", 2)
    assert outputs(folder) == gone_on


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "plan_shards", lambda inputs: plan_shards(inputs, 2000))
    monkeypatch.setattr(pipeline, "_MIN_SHARD_BYTES", 500)


def write_many(folder):
    """Two files of JSON lines; every fifth line is bad, and every seventh title empty."""
    for name in "ab":
        records = [
            {"text": f"One {name * (n % 9)}. Two\nthere." if n % 5 else 0, "title": "x y" * (n % 7)} for n in range(90)
        ]
        write_lines(folder / "in" / f"{name}.jsonl", records)
    return ("--split-sentences", "--sentence-splitter", "newline", "--json-keys", "text", "title")


def test_merged_shards_are_byte_for_byte_one_run(folder, small_shards, capsys):
    flags = write_many(folder)
    run(folder, *flags)
    whole = outputs(folder)
    for number in (2, 0, 1):
        run(folder, *flags, "--shard", f"{number}/3", "--output-prefix", folder / "parts" / "x")
    for key in ("text", "title"):
        common, merged = folder / "parts" / f"x_{key}_sentence", folder / "merged" / f"x_{key}_sentence"
        lmtools.main(["merge", "--input", str(common), "--output", str(merged)])
        for ending in (".bin", ".idx", ".json"):
            assert Path(f"{merged}{ending}").read_bytes() == whole[f"x_{key}_sentence{ending}"], ending
    bad_lines = folder / "merged" / "x_text_sentence.bad_lines.jsonl"
    assert bad_lines.read_bytes() == whole["x.bad_lines.jsonl"]
    assert not list((folder / "parts").glob("*.shards")) + list((folder / "parts").glob("*.lock"))


@pytest.mark.parametrize("change", ["nothing", "--append-eod", "text", "splitter"])
def test_finished_shards_are_used_for_the_same_text_and_settings_alone(
    folder, small_shards, monkeypatch, caplog, change
):
    flags = write_many(folder)[:1]
    splitter = folder / "own_splitter.py"
    splitter.write_text("def split(text):\n    return [text]\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_splitter", raising=False)
    flags += ("--sentence-splitter", "own_splitter:split")
    encode, done = pipeline.encode_shard, []

    def stop(job, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job)
        return encode(job, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "encode_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            run(folder, *flags)
    if change == "text":
        write_lines(folder / "in" / "c.jsonl", [{"text": "More."}])
    elif change == "splitter":
        splitter.write_text("def split(text):\n    return text.split()\n")
    elif change != "nothing":
        flags += (change,)
    caplog.set_level("INFO")
    run(folder, *flags)
    assert ("2 of" in caplog.text) == (change == "nothing")
    gone_on = outputs(folder)
    run(folder, *flags)
    assert outputs(folder) == gone_on


def test_a_shard_that_cannot_be_is_one_sentence(folder):
    write_lines(folder / "in" / "data.jsonl", [{"text": "a"}])
    for shard, message in [
        ("3/3", "shard 3/3 is not i/n"),
        ("1", "--shard 1 is not i/n"),
        ("0/0", "shard 0/0 is not i/n"),
    ]:
        with pytest.raises(UserError, match=message):
            run(folder, "--shard", shard)
    assert not (folder / "out").exists()


def test_runs_to_one_prefix_wait_for_each_other(folder, tokenizer):
    write_lines(folder / "in" / "data.jsonl", [{"text": "fine"}])
    with locked(folder / "out" / "x.lock"):
        process = start(command(folder), ROOT)
        assert any("waiting for another process, which holds" in line for line in process.stderr)
        assert [path.name for path in (folder / "out").iterdir()] == ["x.lock"]  # nothing written yet
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert read_documents(f"{folder}/out/x_text_sentence") == [[tokenizer.tokenize("fine")]]


def test_a_worker_that_dies_is_one_sentence(folder, monkeypatch):
    for name in "ab":
        write_lines(folder / "in" / f"{name}.jsonl", [{"text": "a"}])
    ask = Worker.ask
    monkeypatch.setattr(Worker, "ask", lambda worker, batch: worker.kill() or ask(worker, batch))
    with pytest.raises(
        UserError,
        match=r"process ended with exit code -9 .* at .*[ab].jsonl: .* workers or a smaller --max-document-mb",
    ):
        run(folder, "--workers", 2)
    assert list((folder / "out").iterdir()) == []


def test_what_an_earlier_run_wrote_into_the_folder_is_not_read_as_text(folder):
    write_lines(folder / "in" / "data.jsonl", [{"text": "fine"}, {"content": "bad"}])
    flags = ("--output-prefix", folder / "in" / "x")
    first, second = (run(folder, *flags) for _ in range(2))
    assert first == second and first[f"{folder}/in/x_text_document"]["bad_lines"] == 1
