"""Library users too have a run directory to themselves, and are told where its settings differ."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.run_directory import RunDirectory
from tests.helpers.loops import make_loop


def loop(folder, iters=2):
    return make_loop(model_path=folder, iters=iters)


def test_a_trainer_is_refused_while_another_process_has_the_directory(tmp_path):
    hold = "import sys, time; from lm_experiments_tools.tracking.run_directory import RunDirectory; "
    hold += "RunDirectory(sys.argv[1]).claim(); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"in use by a run that has not ended \(process {p.pid} on "):
            loop(tmp_path)
        p.kill()
    loop(tmp_path).train()
    loop(tmp_path, iters=3).train()  # this process goes on in its own directory


def test_settings_that_a_script_has_recorded_are_checked_by_the_library_too(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_start(asdict(TrainerArgs(batch_size=8, model_path=str(tmp_path))), {}, world_size=1)
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds a run with other settings: .*global_batch_size \(8 then, 4 now\)"):
        loop(tmp_path)


def test_a_forked_worker_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    fork = "import os, sys, time; from lm_experiments_tools.tracking.run_directory import RunDirectory; "
    fork += "RunDirectory(sys.argv[1]).claim(); child = os.fork(); child or time.sleep(30); "
    fork += "print(child, flush=True); time.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", fork, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.kill()
        os.waitpid(parent.pid, 0)
        try:
            RunDirectory(tmp_path).claim()
        finally:
            os.kill(child, 9)
