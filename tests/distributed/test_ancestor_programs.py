"""Programs written for t5-experiments train to their end under its two launchers, and leave what they expect."""

import json
import re

import pytest
import torch

from tests.distributed.launch import ROOT, accelerate_launch, forked, horovodrun, skip_without, slow

PROGRAM = ROOT / "tests" / "distributed" / "ancestor_program.py"
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = {"model_type": "bert", **SIZES, "intermediate_size": 32, "max_position_embeddings": 64}
SETTINGS = {
    "iters": 6, "batch_size": 2, "gradient_accumulation_steps": 2, "lr": 1e-2, "lr_scheduler": "constant_with_warmup",
    "num_warmup_steps": 2, "log_interval": 2, "valid_interval": 2, "save_interval": 3, "optimize_metric": "accuracy",
    "optimize_mode": "max", "early_stopping_patience": 10, "clip_grad_norm": 1.0, "head_lr_multiplier": 2.0,
}  # fmt: skip
CPU_DDP = accelerate_launch("--multi_gpu", "--num_machines", "1", "--num_processes", "2", "--main_process_port", "0")


def flags(**settings) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def results(output: str) -> list[tuple[int, dict]]:
    """(step, metrics) at the end of the first and of the second training, which are all workers'."""
    found = re.findall(r"(\d) of 2 at (\d+): (\{.*\})", output)
    of_ranks = [[(int(step), json.loads(text)) for rank, step, text in found if rank == wanted] for wanted in "01"]
    assert of_ranks[0] == of_ranks[1] and len(of_ranks[0]) == 2, output[-3000:]
    return of_ranks[0]


@pytest.mark.distributed
@pytest.mark.parametrize("trainer", slow(["horovod", "accelerate"], "accelerate"))
def test_a_program_of_its_style_trains_to_its_end(trainer, tmp_path):
    skip_without(trainer, "accelerate", "transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    launcher = horovodrun() if trainer == "horovod" else CPU_DDP
    left, suffix = tmp_path / "run", ".pth" if trainer == "horovod" else ""
    paths = {"model_path": left, "model_cfg": tmp_path / "config.json", "then_from": left / f"model_6{suffix}"}
    command = [PROGRAM, "--trainer", trainer, "--save_best", "--reset_lr", *flags(**paths, **SETTINGS)]
    job = forked(launcher, *command, ACCELERATE_USE_CPU="1")
    assert job.returncode == 0, job.output[-4000:]
    (_, first), (step, second) = results(job.output)
    for split, rows in (("valid", 13), ("test", 11)):  # of two workers, one of which reads a row of the other too
        assert first[split]["rows"] == first[split]["distinct"] == rows
    assert job.output.count("docs/porting.md") == 1 and job.output.count("without effect") == 1
    assert "starting at step 6" in job.output
    assert job.output.count("in a group after main: True") == (2 if trainer == "accelerate" else 0)
    assert job.output.count("in a group at the end: False") == 2  # a group that is left to the end may abort Python

    assert {"checkpoints", "checkpoints.1", "metrics.1.jsonl"} < {path.name for path in left.iterdir()}
    assert {f"model_{name}{suffix}" for name in (3, 6, "best")} < {path.name for path in left.iterdir()}
    assert json.loads((left / "metrics.json").read_text())["test"] == second["test"]
    lines = [json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [8]  # the first training's are set aside
    assert [line["accuracy"] for line in lines if line["split"] == "test"] == [second["test"]["accuracy"]]
    if trainer == "horovod":
        best = torch.load(left / "model_best.pth", weights_only=False)
        assert best["iteration"] == step - 1 and "classifier.weight" in best["model_state_dict"]
        assert [len(group["params"]) for group in best["optimizer_state_dict"]["param_groups"]] == [23, 2]
