"""Sweeps of real runs: a grid, a failing run, a kill in the middle, Optuna."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tools.runs.candidates import Grid, run_name
from tests.helpers import ROOT
from tests.helpers.runs import TINY, losses, records
from tests.helpers.token_toys import make_texts, write_jsonl


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write run.yaml, and a sweep of it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = write_jsonl(tmp_path / "text.jsonl", make_texts(40))
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    settings = {
        "data_path": text, "valid_data_path": text, "vocab": "bytes", "data_pipeline": "native", "input_seq_len": 32,
        "model_cfg": str(tmp_path / "tiny.json"), "target_seq_len": 24, "batch_size": 2, "iters": 4, "log_interval": 1,
        "valid_samples": 8, "data_n_workers": 1, "speed": "off", "lr": 1e-3, "save_interval": 2, "valid_interval": 2,
        "working_dir": str(tmp_path),
    }  # fmt: skip

    def write(parameters, run=None, **more):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings | (run or {})))
        said = {"script": "pretrain-t5", "config": "run.yaml", "parameters": parameters} | more
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in said.items() if value is not None}))
        return [str(path), "--output", str(tmp_path / "out")]

    return write


def results(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]


def test_grid_goes_on_after_a_failure_and_repeats_nothing(write, tmp_path, capsys):
    words = write({"lr": [1e-3, "5e-3", -1]}, launcher=sys.executable)
    assert main(["sweep", *words, "--jobs", "2"]) == 0
    shown = capsys.readouterr()
    found = {result["run"]: result for result in results(tmp_path)}
    assert sorted(found) == ["lr=-1", "lr=0.001", "lr=5e-3"]
    failed = found.pop("lr=-1")
    assert failed["error"].startswith("--lr is -1") and f"failed: lr=-1: {failed['error']}" in shown.err
    for name, result in found.items():
        valid = [record["loss"] for record in records(tmp_path / "out" / name, "valid")]
        assert result["value"] == min(valid) and len(valid) >= 2
    best = min(found.values(), key=lambda r: r["value"])["run"]
    table = shown.out[shown.out.index("best loss") :]
    assert table.split()[2] == best and "settings that differ" in table
    logs = {path.name: path.stat().st_size for path in (tmp_path / "out" / "logs").iterdir()}
    assert main(["sweep", *words]) == 0 and len(results(tmp_path)) == 3
    assert logs == {path.name: path.stat().st_size for path in (tmp_path / "out" / "logs").iterdir()}, "nothing ran"
    assert "best loss" in capsys.readouterr().out
    assert main(["sweep", *words, "--retry"]) == 0
    assert [result["run"] for result in results(tmp_path)][3:] == ["lr=-1"], "only what failed is tried again"


@pytest.mark.slow
def test_killed_sweep_continues_its_run_and_equals_an_uninterrupted_one(write, tmp_path):
    words = write({"seed": [1, 2]}, run={"iters": 60})
    command = [sys.executable, "-m", "lm_experiments_tools.tools.main", "sweep", *words]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    second = tmp_path / "out" / "seed=2"
    deadline = time.monotonic() + 120
    while not (second / "checkpoints").is_dir() or not list((second / "checkpoints").glob("step_*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert [result["run"] for result in results(tmp_path)] == ["seed=1"]
    with (tmp_path / "out" / "results.jsonl").open("a") as file:
        file.write('{"run": "see')  # as a kill may leave it
    assert main(["sweep", *words]) == 0
    assert [result["run"] for result in results(tmp_path)] == ["seed=1", "seed=2"]
    alone = tmp_path / "alone"
    script = [sys.executable, str(ROOT / "run_t5_pretraining.py"), "--config", str(tmp_path / "run.yaml")]
    subprocess.run([*script, "--seed", "2", "--model_path", str(alone)], check=True, stdout=subprocess.DEVNULL)
    assert losses(second) == losses(alone)
    log = (tmp_path / "out" / "logs" / "seed=2.log").read_text()
    assert log.count("settings are read") == 2
    assert (tmp_path / "out" / "logs" / "seed=1.log").read_text().count("settings are read") == 1


@pytest.mark.slow
def test_optuna_proposes_and_remembers(write, tmp_path, capsys):
    optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'optuna>=5'")
    parameters = {"lr": {"low": 1e-4, "high": 1e-1, "log": True}, "batch_size": {"low": 1, "high": 3}}
    assert main(["sweep", *write(parameters, trials=2)]) == 0
    assert main(["sweep", *write(parameters, trials=3)]) == 0
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "out" / "optuna.journal"))
    )
    study = optuna.load_study(storage=storage, study_name="sweep")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    by_name = {result["run"]: result for result in results(tmp_path)}
    for trial in study.trials:
        assert by_name[run_name(trial.params)]["value"] == trial.value
        assert 1e-4 <= trial.params["lr"] <= 1e-1 and trial.params["batch_size"] in (1, 2, 3)
    assert study.best_value == min(result["value"] for result in by_name.values())


def test_names_are_those_of_values():
    grid = Grid({"lr": [1e-3, 2e-3], "task": ["a/b", "a b"]})
    names = []
    while (candidate := grid.next()) is not None:
        names.append(run_name(candidate.values))
    assert len(set(names)) == 4 and names[0].startswith("lr=0.001,task=a_b-") and "/" not in "".join(names)
    assert len(run_name({"prefix": "long " * 100})) <= 120


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": "pretrain"}, ["script is 'pretrain': choose one of pretrain-t5"]),
        ({"script": ["a"]}, ["script is ['a']"]),
        ({"metric": 3}, ["metric is 3: name one of validation"]),
        ({"parameters": {"lrr": [1]}}, ["unknown flag 'lrr': did you mean lr?"]),
        ({"parameters": {"lr": 1e-3}}, ["lr must be a list of values, or a range"]),
        ({"parameters": {"lr": {"low": 1, "high": 0}}, "trials": 2}, ["low must be below high"]),
        ({"parameters": {"lr": {"low": 0, "high": 1}}}, ["lr is a range, which a grid cannot try: add trials"]),
        ({"parameters": {"model_path": ["a"]}}, ["model_path is a folder in --output"]),
        ({"parameters": {}}, ["must name at least one flag"]),
        ({"config": "missing.yaml"}, ["missing.yaml is not there"]),
        ({"launcher": ["no_such_launcher"]}, ["is no program to be found"]),
        ({"direction": "up"}, ["direction is 'up': choose min or max"]),
        ({"trials": 0}, ["trials is 0"]),
        ({"jobs": 2}, ["unknown setting 'jobs': there are script"]),
    ],
)
def test_mistakes_in_a_sentence(write, capsys, changes, words):
    assert main(["sweep", *write(**{"parameters": {"lr": [1e-3]}} | changes)]) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1 and all(word in sentence for word in words), sentence


def test_folder_of_another_question_is_refused(write, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    asked = {"script": "finetune", "metric": "f1", "direction": "max", "search": "grid"}
    (tmp_path / "out" / "sweep.json").write_text(json.dumps(asked))
    assert main(["sweep", *write({"lr": [1e-3]})]) == 2
    assert "holds a sweep of" in capsys.readouterr().err
    (tmp_path / "out" / "sweep.json").unlink()
    assert main(["sweep", *write({"lr": [-1.0]})]) == 1
    assert main(["sweep", *write({"lr": [-1.0]}, {"iters": 8})]) == 2
    assert "run.yaml with iters 4, now 8: choose another folder" in capsys.readouterr().err
    words = write({"lr": [-1.0]})
    (tmp_path / "run.yaml").write_text("- iters")
    assert main(["sweep", *words]) == 2
    assert "run.yaml must hold lines of `name: value`" in capsys.readouterr().err
    (tmp_path / "out" / "sweep.json").unlink()
    (tmp_path / "out" / "results.jsonl").write_text('{"run"\n')
    assert main(["sweep", *write({"lr": [1e-3]})]) == 2
    assert "results.jsonl is damaged: remove it" in capsys.readouterr().err
