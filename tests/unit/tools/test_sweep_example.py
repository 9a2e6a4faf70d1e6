"""examples/sweep_optuna.py runs real trials and resumes an interrupted one."""

import json
import subprocess
import sys

import pytest
import yaml

from tests.helpers import ROOT
from tests.helpers.runs import TINY, records
from tests.helpers.token_toys import make_texts, write_jsonl


@pytest.mark.slow
def test_the_sweep_reports_the_best_run_and_resumes_an_interrupted_trial(tmp_path):
    optuna = pytest.importorskip("optuna")
    text = write_jsonl(tmp_path / "text.jsonl", make_texts(40))
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    settings = {
        "data_path": str(text), "valid_data_path": str(text), "vocab": "bytes", "input_seq_len": 32,
        "target_seq_len": 24,
        "model_cfg": str(tmp_path / "tiny.json"), "batch_size": 2, "iters": 2, "log_interval": 1, "valid_interval": 1,
        "valid_samples": 8, "data_n_workers": 1, "speed": "off",
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    out = tmp_path / "out"
    out.mkdir()
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(out / "study.log")))
    interrupted = optuna.create_study(storage=storage, study_name="sweep").ask()
    begun = {"lr": interrupted.suggest_float("lr", 1e-3, 5e-2, log=True)}
    begun["optimizer"] = interrupted.suggest_categorical("optimizer", ["AdamW", "AdamWScale"])
    command = [
        sys.executable,
        "examples/sweep_optuna.py",
        "--config",
        str(tmp_path / "run.yaml"),
        "--output",
        str(out),
    ]
    done = subprocess.run([*command, "--trials", "2"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = sorted(path for path in out.iterdir() if path.is_dir())
    assert len(runs) == 2 and out / f"lr={begun['lr']},optimizer={begun['optimizer']}" in runs
    best = min(record["loss"] for run in runs for record in records(run, "valid"))
    assert f"best loss: {best:.4g} with " in done.stdout
