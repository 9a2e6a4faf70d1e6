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


FIRST_BATCHES = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from lm_experiments_tools import TrainerAccelerate, TrainerArgs
from tests.helpers.toys import RaggedPairs, TinyLabeller

args = TrainerArgs(batch_size=2, gradient_accumulation_steps=2, iters=12, log_interval=4)
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index

def train(name, data, sampler=None, rows=4):
    model = TinyLabeller()
    loader = DataLoader(data, batch_size=rows, sampler=sampler)
    keep = {"batch_transform_fn": lambda batch: {key: batch[key] for key in ("input_ids", "labels")}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = TrainerAccelerate(args, accelerator, model, optimizer, loader, train_sampler=sampler, **keep)
    trainer.train()
    print(f"{name} {rank}: trained\\n", end="", flush=True)

data = RaggedPairs(64)
train("unsampled", data)
train("one by one", data, rows=2)
train("sampled", data, DistributedSampler(data, seed=3))
train("two", RaggedPairs(2), DistributedSampler(RaggedPairs(2)), rows=1)
"""


@pytest.mark.distributed
def test_workers_that_read_the_same_rows_are_warned_of_and_a_short_batch_is_named(tmp_path):
    (tmp_path / "script.py").write_text(FIRST_BATCHES)
    output = start("ddp", tmp_path / "script.py")
    for name in ("unsampled", "one by one", "sampled", "two"):
        for rank in range(2):
            assert f"{name} {rank}: trained" in output, output[-3000:]
    assert output.count("each of the 2 workers reads its whole training DataLoader") == 2  # unsampled, one by one
    short = "the training data gives 2 rows a batch, but a step takes one batch of batch_size 2 x"
    assert output.count(short) == 1
    assert "= 4 rows: make the loader with batch_size=args.rows_per_worker()" in output
    assert "step 4" in output, "a program that sets up no logging sees its run"
