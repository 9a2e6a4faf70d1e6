"""benchmarks/finetuning.py: its rows are commands that work, its full rows are full, its ratios are ratios."""

import importlib.util
import os
import subprocess
import sys

import pytest

from benchmarks.finetuning_task import full_rows
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.config.finetuning import FinetuningArgs
from tests.helpers import ROOT

SCRIPT = ROOT / "benchmarks" / "finetuning.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("finetuning_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setting(benchmark):
    return benchmark.Setting("folder", "rows.jsonl", "cpu", 8, 128, 32, warm_up=1, steps=3)


def test_every_row_is_a_command_that_run_finetuning_takes(benchmark, setting):
    rows = [row for row in (*benchmark.OPTIONS, *benchmark.PADDING) if row.trainer is None]
    for row in rows:
        args, _ = parse(FinetuningArgs, setting.flags(row.flags))
        assert args.rows_per_worker() == 8 and args.iters == 4, row.name  # the same update, however it is split
    assert len({row.name for row in benchmark.OPTIONS}) == len(benchmark.OPTIONS)


def test_full_rows_have_more_tokens_than_the_limits():
    pairs = [{"source": "a b c", "target": "d"}, {"source": "e f", "target": "g h"}]

    def words(text):
        return {"input_ids": text.split()}

    rows = list(full_rows(pairs, words, {"source": 7, "target": 2}, 3))
    assert [len(row["source"].split()) > 7 and len(row["target"].split()) > 2 for row in rows] == [True] * 3


def test_the_ratio_is_a_median_of_ratios_within_a_round(benchmark):
    found = {
        "base": [{"cpu_rate": 100.0}, {"cpu_rate": 10.0}, {"cpu_rate": 50.0}],
        "other": [{"cpu_rate": 150.0}, {"cpu_rate": 20.0}, {"cpu_rate": 100.0}],
        "refused": [{"error": "no"}],
    }
    lines = benchmark.table(found, {}, "base").splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["base", "other"]
    assert lines[-1].rstrip(" |").endswith("2.00")


@pytest.mark.slow
def test_both_programs_are_measured_on_the_same_work(tmp_path):
    """From a folder without real data: Python's documentation, and a vocabulary trained on it."""
    command = [sys.executable, str(SCRIPT), "--model_cfg", "t5-micro", "--batch_size", "2", "--input_seq_len", "16"]
    command += ["--target_seq_len", "8", "--steps", "1", "--rounds", "1", "--real_steps", "2"]
    command += ["--only", "quantize nf4", "--real_input_len", "64", "--real_target_len", "16"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PRETRAINING_DATA": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Losses of ours and of Seq2SeqTrainer" in done.stdout
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in done.stdout.splitlines() if line[:1] == "|"}
    for name in ("ours, AdamW", "Seq2SeqTrainer", "--peft lora --quantize nf4", "--bucket_rows 1"):
        assert float(rows[name][-1]) > 0.0, name
    padding = {name: int(cells[0].strip(" %")) for name, cells in rows.items() if "%" in cells[0]}
    assert padding["ours: buckets of similar length (the default)"] < padding["--bucket_rows 1"]
