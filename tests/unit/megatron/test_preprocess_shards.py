"""preprocess_data.py stopped, killed, in several processes: the same bytes, and nothing left."""

import json
import os
import signal
import sys

import psutil
import pytest

from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.tokens import tokenize
from lm_experiments_tools.files import locked
from megatron import preprocess_data as module
from tests.helpers import ROOT
from tests.helpers.preprocessing import command, outputs, run, start, write_lines
from tests.helpers.token_toys import read_documents


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_finished_shards_and_nothing_else(folder):
    record = json.dumps({"text": "A sentence.\n" * 2000}) + "\n"
    (folder / "in" / "data.jsonl").write_text(record * 600)
    flags = ("--workers", 2, "--log-interval", 1, "--sentence-splitter", "newline")
    process = start(command(folder, *flags), ROOT, start_new_session=True)
    for line in process.stderr:
        if "Processed" in line:
            break
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2 and {path.name[:8] for path in (folder / "out").iterdir()} == {"x.shards", "x.lock"}
    os.killpg(process.pid, signal.SIGTERM)  # to the workers too, as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in err, err
    assert "resumes from the finished shards in" in err
    assert [path.name[:9] for path in (folder / "out").iterdir()] == ["x.shards-"]
    assert psutil.wait_procs(workers, timeout=10)[1] == []


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "plan_shards", lambda inputs, **options: plan_shards(inputs, 2000, **options))


def write_many(folder):
    """Two files of JSON lines; every fifth line is bad, and every seventh title empty."""
    for name in "ab":
        records = [
            {"text": f"One {name * (n % 9)}. Two\nthere." if n % 5 else 0, "title": "x y" * (n % 7)} for n in range(90)
        ]
        write_lines(folder / "in" / f"{name}.jsonl", records)
    return ("--split-sentences", "--sentence-splitter", "newline", "--json-keys", "text", "title")


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
    encode, done = tokenize.encode_shard, []

    def stop(job, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job)
        return encode(job, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "encode_shard", stop)
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


@pytest.mark.slow
def test_runs_to_one_prefix_wait_for_each_other(folder, tokenizer):
    write_lines(folder / "in" / "data.jsonl", [{"text": "fine"}])
    with locked(folder / "out" / "x.lock"):
        process = start(command(folder), ROOT)
        assert any("waiting for another process, which holds" in line for line in process.stderr)
        assert [path.name for path in (folder / "out").iterdir()] == ["x.lock"]  # nothing written yet
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert read_documents(f"{folder}/out/x_text_sentence") == [[tokenizer.encode("fine")]]
