"""A run refuses, in one sentence, when the launcher's wish was not fulfilled or settings disagree.

The commands are the silent traps of Accelerate on CPUs: each of them, bare, exits 0 after training as something else.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm_experiments_tools.backends import deepspeed_config, detect_backend, get_backend
from lm_experiments_tools.backends.backend import check_whole
from lm_experiments_tools.backends.launch import check_accelerator, check_device, wanted_processes, wanted_sharding
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from tests.distributed.launch import ROOT, accelerate_launch, forked, horovodrun, skip_without, torchrun

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("worker.py")


def no_gpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without GPU")


def failed(folder: Path, launcher: list[str], source: str, **environ: str) -> str:
    """The output of a job that runs `source` and must fail."""
    script = folder / "own.py"
    script.write_text(source)
    job = forked(launcher, script, **environ)
    assert job.returncode not in (0, None)
    return job.output


def test_multi_gpu_without_gpus_is_real_ddp(tmp_path):
    """Bare Accelerate runs two processes that each believe to be the only one."""
    no_gpu()
    file = str(ROOT / "accelerate_configs" / "ddp.yaml")
    options = ("--config_file", file, "--num_processes", "2", "--main_process_port", "0")
    job = forked(accelerate_launch(*options), WORKER, tmp_path, "-", "talked")
    assert job.returncode == 0, job.output[-2000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"talked_{rank}.json").read_text())["world_size"] == 2


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
@pytest.mark.parametrize("use_cpu", [True, False])
def test_sharding_on_cpus_is_refused_however_it_was_asked_for(monkeypatch, kind, use_cpu):
    no_gpu()
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(use_cpu))
    with pytest.raises(UserError, match=f"asked for {kind}.*no GPU.*torchrun --nproc_per_node 2"):
        check_device(initialized=False)


@pytest.mark.parametrize(
    "asked, words", [("fsdp", "asked for FSDP but Accelerate runs MULTI_CPU"), ("", "group of 1")]
)
def test_an_accelerator_of_the_users_own_is_checked_too(tmp_path, asked, words):
    """FSDP that became DDP, and a group of two that became two lonely processes."""
    no_gpu()
    source = (
        "from accelerate import Accelerator\n"
        "from lm_experiments_tools.config.training import TrainerArgs\n"
        "from lm_experiments_tools.backends.accelerate import AccelerateBackend\n"
        f"AccelerateBackend.from_accelerator(Accelerator(cpu={bool(asked)}), TrainerArgs())\n"
    )
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if asked else {}
    assert words in failed(tmp_path, torchrun(), source, **environ)


def test_horovod_trainer_under_torchrun_is_refused(tmp_path):
    skip_without("horovod")
    source = "from lm_experiments_tools.backends.horovod import HorovodBackend as H\nH()\n"
    output = failed(tmp_path, torchrun(), source)
    assert "started 2 workers (WORLD_SIZE) but Horovod sees 1" in output and "TrainerAccelerate" in output


def test_the_wrong_backend_for_the_launcher_is_refused(tmp_path):
    skip_without("horovod")
    source = (
        "from lm_experiments_tools import TrainerArgs\nfrom lm_experiments_tools.backends import get_backend\n"
        "get_backend(TrainerArgs(backend='accelerate'))\n"
    )
    assert "--backend accelerate was asked for" in failed(tmp_path, horovodrun(), source)


# ---- without starting anything
def test_one_process_of_accelerate_launch_on_a_cpu_is_warned_of(monkeypatch, caplog):
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value="NO"), num_processes=1, parallelism_config=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    check_accelerator(accelerator)
    assert not caplog.text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    check_accelerator(accelerator)
    assert "starts one process on CPUs, whatever --num_processes says; for several, `torchrun" in caplog.text


def test_what_launchers_tell():
    assert wanted_processes({"WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}) == (4, "OMPI_COMM_WORLD_SIZE")
    assert wanted_processes({}) == (1, "nothing")
    assert wanted_sharding({"ACCELERATE_USE_FSDP": "true"}) == "FSDP"
    assert wanted_sharding({"ACCELERATE_USE_FSDP": "false"}) is None
    assert detect_backend({"HOROVOD_RANK": "0"}) == "horovod"
    assert detect_backend({"WORLD_SIZE": "2"}) == "accelerate"
    assert detect_backend({}) == "local"


def test_mixed_precision_of_the_launcher_must_agree(monkeypatch):
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(UserError, match="says mixed_precision bf16 but the arguments say no"):
        get_backend(TrainerArgs(backend="accelerate"))


def deepspeed(**changes: object) -> dict:
    return {"zero_optimization": {"stage": 2}, **changes}


def test_deepspeed_settings_are_filled_from_the_arguments():
    config = deepspeed(train_batch_size="auto", gradient_clipping="auto", bf16={"enabled": "auto"})
    args = TrainerArgs(batch_size=4, gradient_accumulation_steps=3, clip_grad_norm=0.5, bf16=True)
    deepspeed_config.fill_config(config, args, world_size=2, source="zero2.json")
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 3
    assert config["train_batch_size"] == 24
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert config["fp16"] == {"enabled": False}


@pytest.mark.parametrize(
    "config, words",
    [
        (deepspeed(train_micro_batch_size_per_gpu=8), r"_gpu = 8, but --batch_size says 4"),
        (deepspeed(train_batch_size=23), r"= 23, but --batch_size x .* x 2 workers says 24"),
        (deepspeed(fp16={"enabled": True}), r"fp16.enabled = True, but --fp16 says False"),
        (deepspeed(optimizer={"type": "Adam"}), r"section 'optimizer'"),
        ({"zero_optimization": {"stage": 0}}, r"ZeRO stage 0"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
            r"zero2.json says offload_optimizer .*'nvme'",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}},
            r"'ratio': 0.4.*use device: cpu with ratio: 1",
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            r"zero_optimization.zenflow = .*take it out",
        ),
    ],
)
def test_deepspeed_settings_that_disagree_are_refused(config, words):
    args = TrainerArgs(batch_size=4, gradient_accumulation_steps=3, clip_grad_norm=0.5)
    with pytest.raises(UserError, match=words):
        deepspeed_config.fill_config(config, args, world_size=2, source="zero2.json")


def test_parameters_without_dimensions_are_not_cut_into_slices():
    model = torch.nn.Module()
    model.temperature = torch.nn.Parameter(torch.tensor(1.0))
    check_whole(model, "Accelerate")
    with pytest.raises(UserError, match=r"DeepSpeed cannot shard .* temperature: give it the shape \(1,\)"):
        check_whole(model, "DeepSpeed", shards=True)


def test_only_elementwise_optimizers_reach_deepspeed():
    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    deepspeed_config.check_optimizer(torch.optim.AdamW(weights))
    factored = torch.optim.Adafactor(weights)
    with pytest.raises(UserError, match="Adafactor cannot be trusted"):
        deepspeed_config.check_optimizer(factored)
    with pytest.raises(UserError, match="Adagrad cannot be trained under DeepSpeed in 2 parameter groups"):
        deepspeed_config.check_optimizer(
            torch.optim.Adagrad([{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)])
        )
    factored.elementwise = True
    deepspeed_config.check_optimizer(factored)
    assert deepspeed_config.has_cpu_version(torch.optim.AdamW(weights))
    assert not deepspeed_config.has_cpu_version(torch.optim.AdamW(weights, amsgrad=True))
    assert not deepspeed_config.has_cpu_version(torch.optim.SGD(weights, lr=0.1))
