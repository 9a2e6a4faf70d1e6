"""The estimate in a run: printed before it by --plan, next to what was measured, and in the error at out-of-memory."""

from types import SimpleNamespace

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.config.training import ExperimentArgs
from lm_experiments_tools.errors import RunError
from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.planning import show
from lm_experiments_tools.planning.estimate import estimate_memory
from lm_experiments_tools.planning.show import watched
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


def test_a_gpus_run_logs_the_estimate_over_what_was_measured(run, monkeypatch):
    args, origins, backend = run
    monkeypatch.setattr(backend, "peak_memory_mib", lambda: 100.0)
    with watched(args, origins, backend):
        assert "memory_predicted_over_measured" not in backend.memory()  # a CPU's process holds more than tensors
    monkeypatch.setattr(backend, "device", torch.device("cuda"))
    drawn = torch.random.get_rng_state()
    with watched(args, origins, backend):
        ratio = backend.memory()["memory_predicted_over_measured"]
    assert ratio == estimate_memory(args, PlanningArgs(device="cuda"), origins).total / 2**20 / 100
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_running_out_of_memory_names_the_estimate_and_the_next_setting(run):
    with pytest.raises(RunError) as caught, watched(*run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more to say")
    message = str(caught.value)
    assert message.startswith("out of memory (CUDA out of memory). The estimate was ")
    assert "for micro-batches of 8: parameters 5.5 MiB, optimizer state 10.9 MiB" in message
    assert " Try --batch_size 4 --gradient_accumulation_steps 2, estimated at " in message


def test_main_memory_that_is_refused_is_named_likewise(run, monkeypatch):
    rows = SimpleNamespace  # memory in proportion to the rows, which needs no trace
    monkeypatch.setattr(show, "estimate_memory", lambda args, *_: rows(total=args.batch_size * 2**20, parts={}))
    with pytest.raises(RunError, match=r"^out of memory \(can't allocate memory: you tried .* Try --batch_size 4"):
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
    assert "at the peak" in shown and "optimizer state" in shown
    assert not folder.exists()
