"""`Trainer` and `TrainerAccelerate` by the ancestor's constructors: the same loop, so the same weights."""

import pytest

from tests.distributed.launch import skip_without, start

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from lm_experiments_tools import Trainer, TrainerAccelerate, TrainerArgs
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, TinyLabeller, weights_of

def train(make):
    model = TinyLabeller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = TrainerArgs(batch_size=2, gradient_accumulation_steps=2, iters=7, log_interval=2, clip_grad_norm=0.1)
    torch.manual_seed(3)
    train_loader = DataLoader(RaggedPairs(13), batch_size=4, shuffle=True)
    valid_loader = DataLoader(RaggedPairs(6, seed=2), batch_size=4)
    transform = lambda batch: {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    trainer = make(args, model, optimizer, train_loader, valid_loader, None, transform,
                   keep_for_metrics_fn=lambda batch, outputs: {"labels": batch["labels"]},
                   metrics_fn=lambda kept: {"rows": len(kept["labels"])}, forward_kwargs={}, generate_kwargs={})
    trainer.train()
    assert trainer.state.metrics["valid"]["rows"] == 6
    return weights_of(trainer.backend.unwrap()), str(trainer.backend)

expected, _ = train(lambda args, *rest, **options: TrainingLoop(args, LocalBackend(), *rest, **options))
for name, make in {
    "horovod": Trainer,
    "accelerate": lambda args, *rest, **options: TrainerAccelerate(args, Accelerator(cpu=True), *rest, **options),
}.items():
    weights, description = train(make)
    assert f"backend {name}, 1 worker(s)" in description, description
    for key in expected:
        assert torch.equal(weights[key], expected[key]), (name, key)
print("equal")
"""


@pytest.mark.distributed
def test_both_trainers_give_the_weights_of_the_plain_loop(tmp_path):
    skip_without("horovod", "accelerate")
    (tmp_path / "script.py").write_text(SCRIPT)
    assert "equal" in start("alone", tmp_path / "script.py")
