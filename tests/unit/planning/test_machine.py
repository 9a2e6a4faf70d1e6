"""Memory of the machine, and folders that a model is named by."""

import json
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.planning.fit import USABLE, memory_for_tensors, memory_of
from lm_experiments_tools.tools.main import main
from tests.unit.planning.test_plan import T5


def test_memory_of_a_gpu_is_what_is_free_on_the_visible_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 7))
    assert memory_of("cuda") == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        memory_of("cuda")


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
