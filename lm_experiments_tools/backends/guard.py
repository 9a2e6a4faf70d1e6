"""A guard process that kills its worker when the worker is suspended (SIGSTOP) for too long.

Other workers give up after `--stall_timeout`, but a suspended process ignores SIGTERM, so its launcher would wait
forever. The guard runs this file without other packages. It is in the worker's process group: suspending the whole job
(Ctrl-Z, `scontrol suspend`) suspends the guard too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

    from lm_experiments_tools.config.training import TrainerArgs

_INTERVAL = 0.25  # seconds between two checks
_GRACE = 1.0  # seconds in which the others can still report that it is stopped
_guards: list[subprocess.Popen] = []  # of this process: one


def watch(args: TrainerArgs) -> None:
    """Start the guard process that kills this worker if it is suspended for too long.

    A guard is started only on Linux, and only if the job has several workers.
    """
    import subprocess

    from lm_experiments_tools.backends.collective import STALL_SECONDS
    from lm_experiments_tools.backends.launch import wanted_processes
    from lm_experiments_tools.config.launchers import launcher_rank

    if _guards or wanted_processes()[0] == 1 or not os.path.exists("/proc/self/stat"):
        return
    folder = os.path.abspath(os.path.join(args.working_dir, args.model_path)) if args.model_path else ""
    log = os.path.join(folder, "logs", f"rank{launcher_rank()}.log") if folder else ""
    seconds = args.stall_timeout or STALL_SECONDS
    words = [os.getpid(), seconds, launcher_rank(), log]
    command = [sys.executable, "-I", "-S", __file__, *map(str, words)]
    _guards.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))


def guard(process: int, seconds: float, rank: int, log: str) -> None:
    """Kill the parent `process` if it is suspended for `seconds`; return when it ends.

    Args:
        log: log file of the worker; "" for none.
    """
    stopped = 0.0
    while os.getppid() == process and stopped <= seconds + _GRACE:
        time.sleep(_INTERVAL)
        stopped = stopped + _INTERVAL if _is_stopped(process) else 0.0
    if os.getppid() != process:
        return
    sentence = (
        f"error: rank {rank}: this worker (process {process} on {os.uname().nodename}) has been stopped by a signal "
        f"for longer than --stall_timeout ({seconds:g} s), so it is ended"
    )
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(sentence, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a full disk
        if os.path.exists(log):
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 rank{rank} ERROR run: {sentence}\n")
    os.kill(process, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    """True for a process in the state T, which a debugger's (t) is not."""
    try:
        with open(f"/proc/{process}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # to the group: what the worker makes of it decides
        signal.signal(number, signal.SIG_IGN)
    guard(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
