"""Memory of the machine, and folders that a model is named by."""

import json
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from lm_experiments_tools.data.tokens import cold
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.planning.estimate import device_of
from lm_experiments_tools.planning.fit import USABLE, memory_for_tensors, memory_of
from lm_experiments_tools.tools.main import main
from tests.unit.planning.test_plan import T5


def test_memory_of_a_cpu_is_no_more_than_its_container_may_take(tmp_path, monkeypatch):
    monkeypatch.setattr(cold, "_CGROUPS", tmp_path)
    assert memory_of("cpu") == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_of("cpu") == 1000


def test_memory_of_a_gpu_is_what_is_free_on_the_visible_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 7))
    assert memory_of("cuda") == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        memory_of("cuda")


def test_a_hidden_gpu_is_not_estimated_for(monkeypatch):
    """PyTorch decides: the driver's files are there whatever CUDA_VISIBLE_DEVICES hides."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    for usable, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert device_of("auto") == device


def test_the_process_itself_is_part_of_a_cpus_memory():
    process = max(psutil.Process().memory_info().rss, 700 * 2**20)
    assert USABLE * 4 * 2**30 - memory_for_tensors("4GiB", "cpu") >= process
    assert memory_for_tensors("4GiB", "cuda") == USABLE * 4 * 2**30
    with pytest.raises(UserError, match=r"--fit 100MiB: 100\.0 MiB is too little\. The process takes"):
        memory_for_tensors("100MiB", "cpu")


def test_a_run_directory_stands_for_its_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("run/checkpoints/step_000004")
    values = {key: value for key, value in T5.items() if key != "model_type"} | {"num_layers": 1}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**values))
    model.save_pretrained(checkpoint)
    (checkpoint / "trainer_state.safetensors").touch()  # by which a checkpoint of ours is known
    Path("run/config.json").write_text(json.dumps({"lr": 1}))  # of the run's arguments
    Path("run/last").symlink_to("checkpoints/step_000004")
    flags = ["--lr", "1e-3", "--batch_size", "2", "--device", "cpu", "--speed", "off"]
    assert main(["plan", "finetune", "--from_pretrained", "run", *flags]) == 0
    printed = capsys.readouterr().out
    assert f"T5ForConditionalGeneration: {model.num_parameters():,} parameters" in printed and "at the peak" in printed


@pytest.mark.timeout(60)
def test_modernbert_whose_weights_are_drawn_until_they_fit_is_traced(tmp_path, capsys):
    config = {
        "model_type": "modernbert", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
        "cls_token_id": 1, "sep_token_id": 1,
    }  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps(config))
    flags = ["--model_cls", "transformers:ModernBertForMaskedLM", "--model_cfg", str(tmp_path / "model.json")]
    flags += ["--batch_size", "2", "--input_seq_len", "32", "--vocab_file", "-", "--lr", "1e-3", "--device", "cpu"]
    assert main(["plan", "pretrain-bert", *flags]) == 0
    assert "at the peak" in capsys.readouterr().out
