"""Workers: answers and errors of another process, its death, and who is killed when."""

import os
import signal
import time
from contextlib import closing

import pytest

from lm_experiments_tools.data.workers import Worker, WorkerEnded, WorkerPool
from lm_experiments_tools.errors import UserError


class OfALibrary(OSError):
    """An error that cannot be made again out of its arguments."""

    def __init__(self, host, port):
        super().__init__(f"no answer from {host}:{port}")


def calculate(settings):
    """`settings` plus the request, or what the request says."""
    if settings == "refused":
        raise UserError("no such settings")

    def answer(request):
        if request == "user":
            raise UserError("mend it")
        if request == "missing":
            return open("/nowhere").read()
        if request == "library":
            raise OfALibrary("hub", 80)
        if request == "die":
            os._exit(3)
        if request == "crash":
            raise KeyError("a bug")
        time.sleep(0.02 * (request % 3))
        return settings + request

    return answer


def test_a_worker_answers_by_its_settings_and_ends_with_the_block():
    with closing(Worker(calculate, 10)) as worker:
        assert [worker.ask(number) for number in range(3)] == [10, 11, 12]
        assert worker.process.poll() is None
    assert worker.process.returncode == -signal.SIGKILL


def test_a_signal_to_the_process_group_is_left_to_the_caller():
    with closing(Worker(calculate, 10)) as worker:
        assert worker.ask(0) == 10
        for name in ("USR1", "USR2", "HUP", "XCPU", "TERM", "INT"):
            worker.process.send_signal(getattr(signal, f"SIG{name}"))
        assert worker.ask(1) == 11


@pytest.mark.parametrize(
    ("settings", "request_", "error", "sentence"),
    [
        (0, "user", UserError, "^mend it$"),
        (0, "missing", FileNotFoundError, "No such file or directory: '/nowhere'"),
        (0, "library", OSError, "^no answer from hub:80$"),
        ("refused", 1, UserError, "^no such settings$"),
        (0, "die", WorkerEnded, "^ended with exit code 3 "),
        (0, "crash", WorkerEnded, "^ended with exit code 1 "),
    ],
)
def test_errors_and_death_reach_the_caller(settings, request_, error, sentence):
    worker = Worker(calculate, settings)
    with pytest.raises(error, match=sentence) as caught:
        worker.ask(request_)
    assert getattr(caught.value, "request", request_) == request_
    worker.close()
    assert worker.process.returncode is not None


def test_a_stopped_worker_does_not_hang_the_end_of_a_run(monkeypatch):
    monkeypatch.setattr("lm_experiments_tools.data.workers._SECONDS_TO_END", 0.2)
    with closing(Worker(calculate, 0)) as worker:
        assert worker.ask(1) == 1
        os.kill(worker.process.pid, signal.SIGSTOP)
        started = time.monotonic()
    assert time.monotonic() - started < 5 and worker.process.returncode == -signal.SIGKILL


def test_a_pool_answers_all_requests():
    with closing(WorkerPool(calculate, 0, 2)) as pool:
        answers = [pool.submit(number) for number in range(40)]
        assert [answer.result() for answer in answers] == list(range(40))


def test_a_death_in_a_pool_is_said_once_and_kills_the_others():
    with pytest.raises(WorkerEnded) as caught, closing(WorkerPool(calculate, 0, 2)) as pool:
        answers = [pool.submit(request) for request in (0, 1, "die", *range(50))]
        [answer.result() for answer in answers]
    assert caught.value.request == "die" and caught.value.returncode == 3
    assert sorted(worker.process.returncode for worker in pool._workers) == [-9, 3]


def test_an_error_in_a_pool_is_repeated_and_not_taken_for_a_death():
    with pytest.raises(UserError, match="mend it"), closing(WorkerPool(calculate, 1, 2)) as pool:
        answers = [pool.submit("user") for _ in range(6)]
        assert {str(answer.exception()) for answer in answers} == {"mend it"}
        answers[0].result()
