#!/usr/bin/env python3
"""Build Horovod 0.28.1 against the installed torch, install it, and prove that it reduces.

    python scripts/build_horovod.py            build (or take from the cache), install, check; 2 to 5 minutes
    python scripts/build_horovod.py --check    only check the installed one
    python scripts/build_horovod.py --rebuild  as the first, without the cache

The published source asks its compiler for C++14 or C++17 while torch's headers need C++20, so the build runs behind a
compiler wrapper that replaces that one option; nothing else is changed. Gloo is always built, MPI where `mpicxx` is on
PATH, NCCL where torch has CUDA and the CUDA compiler and NCCL's headers are installed. The wheel is kept in
$XDG_CACHE_HOME/lm_experiments_tools/horovod, one for each torch, Python, platform and set of features. The check is an
all-reduce between two processes started by horovodrun.

Exit code 0: Horovod works. 1: it does not, and one sentence on stderr says why; Accelerate and single-process runs
then work all the same. Standard library only.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

HOROVOD = "0.28.1"
MIN_CMAKE, BELOW_CMAKE = (3, 21), (4, 0)
BUILD_TIMEOUT_S = 3600
CHECK_TIMEOUT_S = 180

COMPILER_WRAPPER = """#!/bin/bash
exec {compiler} "${{@/#-std=*++1[0-9]/-std=c++20}}"
"""

# Integers up to 2**24 are exact in float32, so the sum has one right answer in any order of reduction.
ALL_REDUCE = """
import horovod.torch as hvd
import torch

hvd.init()
mine = torch.arange(1000, dtype=torch.float32) * (hvd.rank() + 1)
total = hvd.allreduce(mine, op=hvd.Sum)
assert hvd.size() == 2, hvd.size()
assert torch.equal(total, torch.arange(1000, dtype=torch.float32) * 3), total
print(f"all-reduce right on rank {hvd.rank()}", flush=True)
"""


class CannotBuild(Exception):
    """The build fails; the message is one sentence on what is missing or went wrong."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build, install and check Horovod.", allow_abbrev=False)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only check the installed Horovod")
    action.add_argument("--rebuild", action="store_true", help="build even if a cached wheel fits")
    options = parser.parse_args()
    try:
        if not options.check:
            install(find_or_build_wheel(options.rebuild))
        check()
    except CannotBuild as error:
        print(f"Horovod is not available: {error}", file=sys.stderr)
        return 1
    print(f"Horovod {HOROVOD} works: two processes all-reduced over gloo.")
    return 0


def find_or_build_wheel(rebuild: bool) -> Path:
    """The wheel for this environment, from the cache unless `rebuild`, else newly built and cached."""
    torch_version = installed_torch()
    check_packages()
    features = find_features()
    folder = cache_folder(torch_version, features)
    cached = sorted(folder.glob("*.whl"))
    if cached and not rebuild:
        print(f"Horovod {HOROVOD}: using the wheel in {folder}", flush=True)
        return cached[0]
    environment = build_environment(features)
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"Horovod {HOROVOD}: building with {', '.join(features)} for torch {torch_version}, 2 to 5 minutes; "
        f"log: {folder / 'build.log'}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="build-") as scratch:
        built = build(Path(scratch), environment, folder / "build.log")
        partial = folder / f"{built.name}.partial"
        shutil.copyfile(built, partial)
        return partial.rename(folder / built.name)  # a wheel in the cache is always whole


def check_packages() -> None:
    """Refuse to build without the packages that the build, or Horovod itself, imports (the extra `horovod`)."""
    for module in ("setuptools", "wheel", "packaging", "pip", "cffi", "cloudpickle", "psutil", "yaml"):
        if importlib.util.find_spec(module) is None:
            raise CannotBuild(
                f"the Python package {module} is missing: pip install 'lm_experiments_tools[horovod]' (in a clone: "
                "'.[horovod]')."
            )


def installed_torch() -> str:
    """Version of the installed torch, with its build label, such as 2.13.0+cpu."""
    if importlib.util.find_spec("torch") is None:
        raise CannotBuild(
            "torch is not installed, and Horovod is compiled against it: make env, or pip install torch."
        )
    return importlib.metadata.version("torch")


def find_features() -> list[str]:
    """Features that this machine can build: gloo, mpi, nccl."""
    features = ["gloo"]
    if shutil.which("mpicxx"):
        features.append("mpi")
    if shutil.which("nvcc") and torch_has_cuda() and nccl_header():
        features.append("nccl")
    return features


def torch_has_cuda() -> bool:
    question = "import torch; raise SystemExit(torch.version.cuda is None)"
    return subprocess.run([sys.executable, "-c", question], capture_output=True).returncode == 0


def nccl_header() -> Path | None:
    homes = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "CUDA_HOME")]
    folders = [Path(home) / "include" for home in homes if home]
    for folder in (*folders, Path("/usr/include"), Path("/usr/local/include"), Path("/usr/local/cuda/include")):
        if (folder / "nccl.h").is_file():
            return folder / "nccl.h"
    return None


def cache_folder(torch_version: str, features: list[str]) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = re.sub(r"\W", "_", sysconfig.get_platform())
    key = "-".join([HOROVOD, f"torch{torch_version}", python, platform, *features])
    return root / "lm_experiments_tools" / "horovod" / key


def build_environment(features: list[str]) -> dict[str, str]:
    """Environment of the build, without the compiler wrapper's path (CXX here is the real compiler)."""
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise CannotBuild(
            f"Python.h is not in {sysconfig.get_path('include')}: install Python's headers (Debian: apt install "
            f"python{sys.version_info.major}.{sys.version_info.minor}-dev)."
        )
    environment = {
        **os.environ,
        "CXX": find_compiler(),
        "HOROVOD_CMAKE": find_cmake(),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        ("HOROVOD_WITH_MPI" if "mpi" in features else "HOROVOD_WITHOUT_MPI"): "1",
    }
    if "nccl" in features:
        environment["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    environment.setdefault("MAKEFLAGS", f"-j{len(os.sched_getaffinity(0))}")
    if not shutil.which("make"):
        raise CannotBuild("make is not on PATH: install it (Debian: apt install build-essential).")
    return environment


def find_compiler() -> str:
    """Command of a C++ compiler that knows C++20."""
    command = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if not command or not shutil.which(shlex.split(command)[0]):
        named = f"CXX names {command}, which is not there" if command else "there is no C++ compiler on PATH"
        raise CannotBuild(f"{named}: install g++ 10 or newer (Debian: apt install g++).")
    probe = [*shlex.split(command), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(probe, input="#include <concepts>\n", text=True, capture_output=True)
    if result.returncode:
        raise CannotBuild(f"the C++ compiler {command} does not know C++20: install g++ 10 or newer.")
    return command


def find_cmake() -> str:
    """Path of a CMake that Horovod's files are written for: this environment's before the one on PATH."""
    candidates = [os.environ.get("HOROVOD_CMAKE"), str(Path(sys.executable).parent / "cmake"), shutil.which("cmake")]
    seen = []
    for candidate in filter(None, candidates):
        if not shutil.which(candidate):
            continue
        result = subprocess.run([candidate, "--version"], text=True, capture_output=True)
        found = re.search(r"cmake version (\d+)\.(\d+)", result.stdout)
        if found and MIN_CMAKE <= (int(found[1]), int(found[2])) < BELOW_CMAKE:
            return candidate
        seen.append(f"{found[1]}.{found[2]} at {candidate}" if found else f"a broken one at {candidate}")
    what = f"the only CMake is {' and '.join(seen)}" if seen else "there is no CMake"
    raise CannotBuild(f"{what}, and Horovod's build needs one from 3.21 to 3.x: pip install 'cmake<4'.")


def build(scratch: Path, environment: dict[str, str], log_path: Path) -> Path:
    """Download and compile in `scratch`; the wheel's path. The whole output goes to `log_path`."""
    if re.search(r"[^\w/.-]", str(scratch)):
        # cmake/Utilities.cmake uses the source folder as a regular expression, and so loses the library it has built
        raise CannotBuild(f"it cannot be built in {scratch}: set TMPDIR to a folder of letters, digits, - and _ only.")
    wrapper = scratch / "c++20"
    wrapper.write_text(COMPILER_WRAPPER.format(compiler=environment["CXX"]))
    wrapper.chmod(0o755)
    environment = {**environment, "CXX": str(wrapper)}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    requirement = f"horovod=={HOROVOD}"
    no_isolation = ["--no-deps", "--no-build-isolation"]
    with log_path.open("w") as log:
        download = [*pip, "download", *no_isolation, "--no-binary", "horovod", "-d", str(scratch), requirement]
        if run_logged(download, environment, log):
            raise CannotBuild(
                f"its source could not be downloaded, is there a network or a package index? (log: {log_path})"
            )
        compile_wheel = [*pip, "wheel", *no_isolation, "--no-index", "-w", str(scratch), *scratch.glob("*.tar.gz")]
        if run_logged(compile_wheel, environment, log):
            raise CannotBuild(f"it did not compile{first_error(log_path)} (log: {log_path}).")
    wheel = next(scratch.glob("*.whl"))
    if not any(name.startswith("horovod/torch/mpi_lib") for name in zipfile.ZipFile(wheel).namelist()):
        raise CannotBuild(f"the build left out the library for torch{first_error(log_path)} (log: {log_path}).")
    return wheel


def run_logged(command: list, environment: dict[str, str], log) -> int:
    print("$", *command, file=log, flush=True)
    try:
        return subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=BUILD_TIMEOUT_S
        ).returncode
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"the build took more than {BUILD_TIMEOUT_S // 60} minutes (log: {log.name}).") from None


def first_error(log_path: Path) -> str:
    for line in log_path.read_text(errors="replace").splitlines():
        if "error:" in line.lower() or "CMake Error" in line:
            return ", first error: " + line.strip()[:200]
    return ""


def install(wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall"]
    result = subprocess.run([*command, "--no-deps", str(wheel)], text=True, capture_output=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise CannotBuild(f"pip did not install {wheel}: {lines[-1]} (add --rebuild to build it anew).")


def check() -> None:
    """All-reduce between two processes under horovodrun."""
    if importlib.util.find_spec("horovod") is None:
        raise CannotBuild("the Python package horovod is not installed: python scripts/build_horovod.py builds it.")
    launcher = "import sys; from horovod.runner.launch import run_commandline; sys.exit(run_commandline())"
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch, "all_reduce.py")
        program.write_text(ALL_REDUCE)
        command = [sys.executable, "-c", launcher, "--gloo", "-np", "2", sys.executable, str(program)]
        try:
            result = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                text=True,
                capture_output=True,
                timeout=CHECK_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise CannotBuild(
                f"two processes did not meet within {CHECK_TIMEOUT_S} s under horovodrun --gloo."
            ) from None
    output = result.stdout + result.stderr
    if result.returncode or any(f"all-reduce right on rank {rank}" not in output for rank in (0, 1)):
        errors = [line.strip() for line in output.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
        from_workers = [line for line in errors if re.match(r"\[[01]\]<stderr>:", line)]
        reason = (from_workers or errors or [f"exit code {result.returncode}"])[-1][:300]
        raise CannotBuild(f"it is installed but two processes could not all-reduce: {reason}.")


if __name__ == "__main__":
    sys.exit(main())
