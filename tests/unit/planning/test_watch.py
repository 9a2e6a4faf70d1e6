"""The plan in a run: printed before it by --plan, beside what was measured, and said when memory ran out."""

import logging

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import ExperimentArgs
from lm_experiments_tools.errors import RunError
from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.planning.watch import watched
from tests.unit.planning.test_plan import OWN_T5, settings
from tests.unit.planning.test_plan import T5 as CONFIG


@pytest.fixture
def run(tmp_path):
    args = settings(tmp_path, CONFIG, OWN_T5, batch_size=8, input_seq_len=256)
    assert isinstance(args, ExperimentArgs)
    cls = get_cls_by_name(OWN_T5)
    backend = LocalBackend(device=torch.device("cpu"))
    backend.setup(build_model(cls, load_model_config(args.model_cfg, cls.config_class), seed=0), None)
    return args, {}, backend


def test_a_run_logs_predicted_over_measured_once(run, caplog):
    with caplog.at_level(logging.INFO), watched(*run):
        pass
    lines = [
        record.getMessage() for record in caplog.records if "memory/predicted_over_measured" in record.getMessage()
    ]
    assert len(lines) == 1
    assert "of the whole process, resident" in lines[0]
    assert 0.05 < float(lines[0].split()[-1]) < 20
    measured = run[2].memory()
    assert measured["memory_predicted_over_measured"] == pytest.approx(float(lines[0].split()[-1]), abs=0.02)


def test_running_out_of_memory_quotes_the_plan_and_proposes_the_next_setting(run):
    with pytest.raises(RunError) as caught, watched(*run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more to say")
    sentence = str(caught.value)
    assert sentence.startswith("out of memory (CUDA out of memory); planned were ")
    assert "for micro-batches of 8: weights 5.5 MiB, optimizer state 1" in sentence
    assert "; try --batch_size 4 --gradient_accumulation_steps 2, planned at " in sentence


def test_main_memory_that_is_refused_is_told_likewise(run):
    with pytest.raises(RunError, match=r"^out of memory \(can't allocate memory: you tried .*; try --batch_size 4"):
        with watched(*run):
            torch.empty(2**50)
    with pytest.raises(RuntimeError, match="not of memory") as caught, watched(*run):
        raise RuntimeError("not of memory")
    assert not isinstance(caught.value, RunError)


def test_plan_prints_before_anything_is_allocated(run, capsys, tmp_path):
    import run_t5_pretraining

    args, folder = run[0], tmp_path / "run"
    words = ["--model_cfg", args.model_cfg, "--data_path", str(tmp_path / "none"), "--lr", "1e-3", "--plan"]
    run_t5_pretraining.main([*words, "--model_path", str(folder)])
    shown = capsys.readouterr().out
    assert "at the highest moment" in shown and "closed form / traced: " in shown
    assert not folder.exists()
