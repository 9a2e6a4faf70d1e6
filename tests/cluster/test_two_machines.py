"""Jobs on two machines: every launcher, with and without a folder in common, and a machine that is lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from lm_experiments_tools.checkpoint.manifest import verify
from tests.cluster.machines import INTERFACE, SSH_PORT, ended, torchrun_on
from tests.distributed.launch import missing, skip_without
from tests.helpers.runs import losses, words

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SCRIPT, SECONDS, STALL = "run_t5_pretraining.py", 180, 20
LAUNCHER = 5  # seconds that a launcher may take to end after its workers, where other tests run
FOUND: dict[str, list] = {}  # by the first launcher
CPU = {"ACCELERATE_USE_CPU": "true"}


def torchrun(machines, *command):
    return torchrun_on(machines, 29500, *command)


def rendezvous(machines, *command):
    where = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "lmta:29501", "--rdzv_id", "job")
    start = ("torchrun", "--nnodes", 2, "--nproc_per_node", 1, *where)
    return [machine.start(*start, *command, **CPU) for machine in machines]


def accelerate(machines, *command):
    where = ("--main_process_ip", "lmta", "--main_process_port", 29502)
    start = ("accelerate", "launch", "--multi_gpu", "--num_machines", 2, "--num_processes", 2, *where)
    return [m.start(*start, "--machine_rank", rank, *command, **CPU) for rank, m in enumerate(machines)]


def horovodrun(machines, *command):
    where = ("-H", "lmta:1,lmtb:1", "-p", SSH_PORT, "--network-interfaces", INTERFACE)
    return [machines[0].start("horovodrun", "--gloo", "-np", 2, *where, "python", *command)]


LAUNCHERS = {"torchrun": torchrun, "rendezvous": rendezvous, "accelerate": accelerate, "horovodrun": horovodrun}


def finished(processes, seconds=SECONDS):
    """Exit codes and outputs of all, which end within some seconds."""
    deadline = time.monotonic() + seconds
    codes, outputs = zip(*(ended(process, deadline - time.monotonic()) for process in processes), strict=True)
    assert None not in codes, "\n".join(outputs)[-6000:]
    return codes, "\n".join(outputs)


def ends(processes, started):
    """Seconds from `started` on after which each has ended; at most 90."""
    found = {}
    while len(found) < len(processes) and time.monotonic() < started + 90:
        time.sleep(0.1)
        for i, process in enumerate(processes):
            if process.poll() is not None:
                found.setdefault(i, round(time.monotonic() - started, 1))
    return [found.get(i) for i in range(len(processes))]


def training(processes, run_dir):
    """Wait until the job has saved a checkpoint."""
    deadline = time.monotonic() + SECONDS
    while not (run_dir / "last").exists():
        outputs = "\n".join(process.log.read_text() for process in processes)
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), outputs[-6000:]
        time.sleep(0.2)


def weights(run_dir):
    """The bytes of a run's last weights."""
    return (run_dir / "last" / "model.safetensors").read_bytes()


def worker_on(machine):
    """The process that trains there."""
    name = Path(f"/proc/{machine.holder.pid}/ns/uts").readlink()
    own = [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and p.info["cmdline"][0].endswith("python")
    ]
    launchers = ("torchrun", "torch.distributed.run", "accelerate")
    lines = {p: " ".join(p.info["cmdline"]) for p in own if SCRIPT in p.info["cmdline"]}
    own = [p for p, line in lines.items() if not any(word in line for word in launchers)]
    return next(p for p in own if Path(f"/proc/{p.pid}/ns/uts").readlink() == name)


LOSSES = {
    "cut": lambda first, second: second.cut(),
    "dropped": lambda first, second: (first.drop(second), second.drop(first)),
    "slow": lambda first, second: (first.slow_down(), second.slow_down()),
    "crashed": lambda first, second: second.crash(),
    "killed": lambda first, second: worker_on(second).send_signal(signal.SIGKILL),
    "stopped": lambda first, second: worker_on(second).send_signal(signal.SIGSTOP),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_trains_on_two_machines(launcher, machines, flags, run_dir):
    skip_without("horovod" if launcher == "horovodrun" else "accelerate")
    flags |= {"iters": 20, "save_interval": None}
    codes, output = finished(LAUNCHERS[launcher](machines, SCRIPT, *words(**flags)))
    assert set(codes) == {0} and "2 worker(s)" in output
    assert [step for step, _ in losses(run_dir)] == [10, 20]
    assert losses(run_dir) == FOUND.setdefault("losses", losses(run_dir)), "all launchers train alike, bit for bit"
    verify((run_dir / "last").resolve())


@pytest.mark.parametrize("sharding", [(), ("tests/distributed/cpu_shim.py", "zero2")], ids=["ddp", "zero2"])
def test_a_run_goes_on_without_a_folder_in_common(sharding, machines, flags, run_dir):
    """Its checkpoints are on the first machine alone."""
    if sharding and (reason := missing("deepspeed")):
        pytest.skip(reason)

    def start():
        command = (*sharding, SCRIPT, *words(**flags))
        return finished(torchrun_on(machines, 29500, *command, ACCELERATE_USE_CPU="false" if sharding else "true"))

    machines[1].takes_alone(run_dir)
    flags |= {"iters": 20, "save_interval": None}
    codes, output = start()
    assert set(codes) == {0}, output[-4000:]
    flags["iters"] = 30
    codes, output = start()
    assert set(codes) == {0} and "step 20, 160 samples consumed" in output, output[-4000:]
    assert [step for step, _ in losses(run_dir)] == [10, 20, 30]
    assert machines[1].run("ls", run_dir).split() == ["logs"]


def test_a_first_machine_without_the_run_is_refused(machines, flags, run_dir):
    """It would begin afresh, in silence."""
    machines[1].takes_alone(run_dir)
    flags |= {"iters": 20, "save_interval": None}
    assert set(finished(torchrun(machines, SCRIPT, *words(**flags)))[0]) == {0}
    start = ("torchrun", "--nnodes", 2, "--nproc_per_node", 1, "--master_addr", "lmtb", "--master_port", 29503)
    command = (SCRIPT, *words(**flags | {"iters": 40}))
    turned = [m.start(*start, "--node_rank", n, *command, **CPU) for n, m in enumerate(reversed(machines))]
    codes, output = finished(turned)
    assert 0 not in codes
    assert f"{run_dir} on lmta has the checkpoint of step 20, and that on lmtb, where rank 0 is now" in output


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "accelerate"])
@pytest.mark.parametrize("what", LOSSES)
def test_a_lost_machine_ends_the_job_within_the_limit_and_the_same_command_goes_on(
    what, launcher, machines, flags, run_dir, tmp_path
):
    skip_without("horovod" if launcher == "horovodrun" else "accelerate")
    flags |= {"stall_timeout": STALL, "keep_checkpoints": None}
    jobs = LAUNCHERS[launcher](machines, SCRIPT, *words(**flags))
    training(jobs, run_dir)
    started = time.monotonic()
    LOSSES[what](*machines)
    seconds = ends(jobs, started)
    if what == "stopped" and len(jobs) == 2:
        # Nothing on the second machine ends a worker that is suspended there: its torchrun hears of no failure.
        worker_on(machines[1]).kill()
        seconds = seconds[:1]
    codes, output = finished(jobs, 30)
    assert 0 not in codes
    logs = "\n".join(file.read_text() for file in sorted((run_dir / "logs").glob("rank*.log")))
    said = [line for line in logs.splitlines() if "error: rank " in line]
    print(f"\n{launcher:10} {what:8} {seconds} s, codes {codes}: {said}")
    if (launcher, what) == ("horovodrun", "killed"):  # it ends rank 0 at once, which may have no time to say so
        assert "Process 1 exit with status code" in output
    else:
        deadline = time.monotonic() + 15  # nor does it wait for the workers that it ends
        while not (last := (run_dir / "logs" / "rank0.log").read_text().splitlines()[-1]).count("error: "):
            assert time.monotonic() < deadline, last
            time.sleep(0.2)
        assert "error: rank 0 step" in last and "another worker is lost" in last, last
    assert max(seconds) < STALL + 5 + LAUNCHER, "on each machine"
    for machine in machines:
        machine.mend()
    verify(newest := (run_dir / "last").resolve())
    flags["iters"] = int(newest.name.removeprefix("step_")) + 50
    codes, output = finished(LAUNCHERS[launcher](machines, SCRIPT, *words(**flags)))
    assert set(codes) == {0}, output[-4000:]
    whole = tmp_path / "whole"
    alone = (
        "torchrun",
        "--nproc_per_node",
        2,
        "--master_port",
        29505,
        SCRIPT,
        *words(**flags | {"model_path": whole, "save_interval": None}),
    )
    codes, output = finished([machines[0].start(*alone, **CPU)])
    assert set(codes) == {0}, output[-4000:]
    assert weights(run_dir) == weights(whole), "of a run in which nothing was lost"


def test_a_machine_that_never_comes_is_waited_for_within_the_limit(machines, flags):
    own = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "lmta", "MASTER_PORT": "29504"}
    job = machines[0].start("python", SCRIPT, *words(**flags, stall_timeout=5), **own, **CPU)
    (code,), output = finished([job], 60)
    assert code == 1 and "error: rank 0: the workers of the job did not all meet at lmta:29504 within 5 s" in output
