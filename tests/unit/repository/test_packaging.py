"""The wheel, the requirements, the Makefile, and the script that builds Horovod."""

import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import typing
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.metrics import METRICS, usual_metrics
from tests.helpers import ROOT

PACKAGES = ("lm_experiments_tools", "modeling_t5", "modeling_bert", "megatron")


def tracked_files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs in the wheel is read from git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tracked files, so that nothing else can slip in and no build folder stays behind."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)  # some lead to folders
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", output]
    built = subprocess.run([*command, source], text=True, capture_output=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(output.glob("*.whl"))


def test_wheel_holds_the_packages_the_presets_and_nothing_else(wheel):
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        name
        for name in tracked_files()
        if (name.endswith((".py", ".pyi")) and name.startswith(tuple(f"{package}/" for package in PACKAGES)))
        or (name.endswith((".json", ".yaml")) and name.startswith(("models_configs/", "accelerate_configs/")))
        or re.fullmatch(r"run_\w+\.py", name)
    }
    expected |= {f"lm_experiments_tools/{name}" for name in tracked_files() if re.fullmatch(r"scripts/\w+\.py", name)}
    expected |= {f"{package}/py.typed" for package in ("lm_experiments_tools", "modeling_bert", "modeling_t5")}
    assert files == expected
    assert "lm_experiments_tools/training/trainer.py" in files and "models_configs/t5_configs/t5-small.json" in files


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    metadata = archive.read(f"{info}/METADATA").decode()
    extras = re.findall(r"^Provides-Extra: (.+)$", metadata, flags=re.M)
    expected = "accelerate all bert deepspeed dev docs horovod metrics onnx peft plots quantize ray seqio"
    assert sorted(extras) == f"{expected} suites trackio wandb".split()
    assert "Requires-Python: >=3.10" in metadata and "License-Expression: Apache-2.0" in metadata
    assert "lmtools = lm_experiments_tools.tools.main:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    everything = {line for line in metadata.splitlines() if "Requires-Dist" in line and 'extra == "all"' in line}
    assert len(everything) == len({line.split(";")[0] for line in metadata.splitlines() if "extra ==" in line})


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The wheel, installed in a folder of its own."""
    site = tmp_path_factory.mktemp("installed") / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(command, check=True, capture_output=True)
    return site


@pytest.mark.slow
def test_installed_wheel_trains_away_from_the_sources(site, tmp_path):
    def lmtools(*words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, site / "bin" / "lmtools", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr[-3000:]

    lmtools("settings")
    shipped = sorted(path.name for path in (ROOT / "accelerate_configs").iterdir())
    assert sorted(path.name for path in (tmp_path / "accelerate_configs").iterdir()) == shipped

    text = "".join(f'{{"text": "some words {n} of a text {n + 1} that is short"}}\n' for n in range(200))
    (tmp_path / "text.jsonl").write_text(text)
    lmtools("vocab", "--input", "text.jsonl", "--size", "150", "--output", "v.model")
    run = "--data_path text.jsonl --vocab v.model --model_path run --model_cfg t5-micro --input_seq_len 32".split()
    run += "--batch_size 2 --lr 1e-3 --iters 2 --target_seq_len 16 --data_n_workers 1".split()
    lmtools("pretrain-t5", *run)
    assert (tmp_path / "run" / "last" / "model.safetensors").exists()
    command = json.loads((tmp_path / "run" / "env.json").read_text())["command"]
    assert Path(command[1]).name == "lmtools" and command[2:] == ["pretrain-t5", *run]


def requirements(name: str) -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    included = [line.split()[1] for line in lines if line.startswith("-r ")]
    here = {r.name.lower(): r for r in found if r.marker is None or r.marker.evaluate()}
    return {key: r for file in included for key, r in requirements(file).items()} | here


def setup_requirements() -> dict[str, list[Requirement]]:
    """Extra -> requirements of setup.py, "" for the core ones."""
    calls: list[dict] = []
    fake = type(sys)("setuptools")
    fake.setup = lambda **keywords: calls.append(keywords)
    fake.find_namespace_packages = lambda **_: []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "setuptools", fake)
        runpy.run_path(str(ROOT / "setup.py"))
    (keywords,) = calls
    return {
        extra: [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate()]
        for extra, lines in {"": keywords["install_requires"], **keywords["extras_require"]}.items()
    }


def test_requirements_cover_setup_and_pins_lie_in_its_ranges():
    pretrain, everything = requirements("requirements-pretrain.txt"), requirements("requirements.txt")
    everything |= requirements("requirements-trackers.txt") | requirements("requirements-clusters.txt")
    for extra, lines in setup_requirements().items():
        pinned = pretrain if extra in ("", "horovod", "accelerate", "metrics", "peft", "plots") else everything
        for requirement in lines:
            pin = pinned.get(requirement.name.lower())
            assert pin is not None, f"{requirement.name} of [{extra}] is in no requirements file"
            lowest = [spec.version.rstrip(".*") for spec in pin.specifier if spec.operator in ("==", ">=")]
            assert all(requirement.specifier.contains(version) for version in lowest), (extra, pin, requirement)


def test_an_installation_without_extras_has_what_the_metrics_of_a_default_fine_tuning_import():
    core = {requirement.name for requirement in setup_requirements()[""]}
    for task in typing.get_args(typing.get_type_hints(FinetuningArgs)["task"]):
        assert {METRICS[name].package for name in usual_metrics(task)} - {""} <= core, task


def test_installed_versions_are_those_we_pin():
    installed = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions()}
    for name, requirement in requirements("requirements.txt").items():
        assert name not in installed or requirement.specifier.contains(installed[name], prereleases=True), name


def make(*targets: str, **environment: str) -> subprocess.CompletedProcess:
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    command = ["make", "-C", str(ROOT), "--no-print-directory", *targets]
    return subprocess.run(command, env={**os.environ, **environment}, text=True, capture_output=True)


def test_make_pretrain_builds_data_before_it_trains_and_survives_a_failing_horovod(tmp_path):
    plan = make("-n", "pretrain", f"VENV={tmp_path / 'venv'}", f"DATA={tmp_path / 'data'}", "ARGS=--iters 3").stdout
    order = [plan.index(words) for words in ("-m venv", "install -r", "build_horovod", "corpus --output")]
    order += [
        plan.index(words) for words in ("lmtools vocab", "lmtools tokenize", "make_start.py", "run_t5_pretraining.py")
    ]
    order += [plan.index("--config examples/pretrain_cpu.yaml --iters 3")]
    assert order == sorted(order)
    assert re.search(r"build_horovod.*\|\| echo", plan.replace("\\\n", ""))


def test_ci_runs_the_tests_last():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines and lines[-1].startswith("make test")


# scripts/build_horovod.py


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The build script as a module, with an empty cache and none of the user's settings."""
    spec = importlib.util.spec_from_file_location("build_horovod", ROOT / "scripts" / "build_horovod.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", "HOROVOD_CMAKE", "HOROVOD_NCCL_HOME", "NCCL_HOME", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["build_horovod.py"])
    return module


def test_compiler_wrapper_asks_for_cxx20_whatever_it_is_told(script, tmp_path):
    wrapper = tmp_path / "c++20"
    wrapper.write_text(script.COMPILER_WRAPPER.format(compiler="printf '%s\\n'"))
    wrapper.chmod(0o755)
    given = ["-O2", "-std=c++14", "-std=gnu++17", "-std=c11", "-DX=a b"]
    told = subprocess.run([wrapper, *given], text=True, capture_output=True, check=True).stdout.splitlines()
    assert told == ["-O2", "-std=c++20", "-std=c++20", "-std=c11", "-DX=a b"]


@pytest.mark.slow
@pytest.mark.distributed
def test_check_reduces_between_two_processes_and_notices_a_wrong_sum(script, capsys, monkeypatch):
    pytest.importorskip("horovod", reason="Horovod is not built (make horovod)")
    script.check()
    monkeypatch.setattr(script, "ALL_REDUCE", script.ALL_REDUCE.replace("* 3)", "* 4)"))
    with pytest.raises(script.CannotBuild, match=r"could not all-reduce: .*AssertionError"):
        script.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_horovod_builds_from_source(script):
    wheel = script.find_or_build_wheel(rebuild=True)
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("horovod/torch/mpi_lib") and name.endswith(".so") for name in names)
    assert sorted(path.name for path in wheel.parent.iterdir()) == sorted(["build.log", wheel.name])
