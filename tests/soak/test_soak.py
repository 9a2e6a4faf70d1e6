"""The soak names what grows of a process that is made to leak, and passes the training script."""

import subprocess
import sys

import pytest

from tests.distributed.launch import missing, run
from tests.soak.growth import Bounds, judge
from tests.soak.watch import watch

LOGGING = """
import json, os, pathlib, sys, threading, time
folder, leaks, kept = pathlib.Path(sys.argv[1]), sys.argv[2] == "leaks", []
with open(folder / "metrics.jsonl", "w") as log, open(folder / "events.out.tfevents", "w") as events:
    for step in range(1, 3001):
        if leaks and step % 100 == 0:
            kept += [bytearray(b"x") * 2**20, open(os.devnull)]
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            (folder / f"left_{step}").touch()
        if step % 10 == 0:
            print(json.dumps({"step": step, "kept": " " * len(kept)}), file=log, flush=True)
            print("." * 99, file=events, flush=True)
        time.sleep(0.001)
"""


@pytest.mark.parametrize("what", ["leaks", "leaks nothing"])
def test_what_grows_is_named_and_nothing_else(tmp_path, what):
    with subprocess.Popen([sys.executable, "-c", LOGGING, str(tmp_path), what]) as process:
        samples = list(watch(process.pid, tmp_path, interval=0.005))
    assert process.returncode == 0
    _, faults = judge(samples, Bounds())
    grows = ["memory", "mappings", "open files", "threads", "files", "metrics.jsonl"] if what == "leaks" else []
    assert {fault.split(": ")[1] for fault in faults} == set(grows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", ["python", "torchrun", "horovodrun"])
def test_nothing_grows_in_three_thousand_steps(launcher):
    if launcher == "horovodrun" and (reason := missing("horovod")):
        pytest.skip(reason)
    program = ("-m", "tests.soak.program", "--steps", 3000, "--bound", 4096, "--interval", 0.1)
    ended = run([sys.executable], *program, "--launcher", launcher, timeout=1700)
    assert ended.returncode == 0, ended.output[-5000:]
