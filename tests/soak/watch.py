"""Samples of a job taken from outside: what its processes and its folder hold, by the step of its metrics.jsonl."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

Sample = dict[str, float]  # memory and logs in KiB, counts, CPU seconds, the step


@dataclass
class Watch:
    """Takes samples of a process with all its descendants, and of a run's folder.

    Of the pages that several processes map, each counts its part (PSS). `memory` has those of programs and of shared
    memory; `mapped`, those of files, also changes with what else maps these files, on the whole machine.
    """

    pid: int
    run: Path
    step: int = 0
    lines: int = 0
    _read: int = 0

    def sample(self) -> Sample | None:
        """What there is now, summed over processes; None as long as nothing has been logged, or at the end."""
        self._follow_metrics()
        processes = self._processes()
        if not processes or not self.lines:
            return None
        found: Sample = {"step": self.step, "lines": self.lines, "processes": len(processes)}
        for process in processes:
            try:
                one = _of_process(process)
            except (psutil.Error, OSError):  # it has just ended
                found["processes"] -= 1
                continue
            for name, value in one.items():
                found[name] = found.get(name, 0.0) + value
        return found | self._of_folder() if "memory" in found else None

    def _processes(self) -> list[psutil.Process]:
        try:
            job = psutil.Process(self.pid)
            return [job, *job.children(recursive=True)] if job.status() != psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            return []

    def _follow_metrics(self) -> None:
        file = self.run / "metrics.jsonl"
        if not file.exists():
            return
        with file.open("rb") as metrics:
            metrics.seek(self._read)
            *whole, _rest = metrics.read().split(b"\n")
        if whole:
            self._read += sum(len(line) + 1 for line in whole)
            self.lines += len(whole)
            self.step = json.loads(whole[-1])["step"]

    def _of_folder(self) -> Sample:
        sizes: Sample = {"metrics.jsonl": 0, "TensorBoard": 0, "other": 0, "files": 0, "checkpoints": 0}
        for folder, folders, names in os.walk(self.run):
            inside = "checkpoints" in Path(folder).relative_to(self.run).parts
            sizes["checkpoints"] += inside and len(folders)
            sizes["files"] += not inside and len(names)
            for name in names:
                kind = name if name in sizes else "TensorBoard" if "tfevents" in name else "other"
                try:
                    sizes[kind] += os.lstat(os.path.join(folder, name)).st_size / 1024
                except FileNotFoundError:  # of a checkpoint that is pruned
                    continue
        sizes["shm"] = sum(_size(entry) for entry in os.scandir("/dev/shm")) / 1024
        return sizes


def _size(entry: os.DirEntry) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _of_process(process: psutil.Process) -> Sample:
    folder = Path("/proc", str(process.pid))
    rollup = {line.split(":")[0]: line for line in (folder / "smaps_rollup").read_text().splitlines()}
    kib = {name: int(rollup[name].split()[1]) for name in ("Pss_Anon", "Pss_Shmem", "Pss_File")}
    times = process.cpu_times()
    return {
        "memory": kib["Pss_Anon"] + kib["Pss_Shmem"],
        "mapped": kib["Pss_File"],
        "mappings": (folder / "maps").read_bytes().count(b"\n"),
        "open files": process.num_fds(),
        "threads": process.num_threads(),
        "cpu": times.user + times.system,
    }


def watch(pid: int, run: Path, *, interval: float) -> Iterator[Sample]:
    """Samples of a job every `interval` seconds until it has ended."""
    watching = Watch(pid, run)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if (sample := watching.sample()) is not None:
            yield sample
        time.sleep(interval)
