"""One job of test_resume.py: an uninterrupted run that saves every step, then continuations from checkpoints.

    resume_worker.py RESULTS RUNS STEP...

Writes for every run the losses of its steps and a hash of its last weights, by rank 0, to the JSON file RESULTS.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, tiny_t5

STEPS = 9  # of 8 rows over 24: three epochs


def digest(state):
    return hashlib.sha256(b"".join(state[n].cpu().contiguous().numpy().tobytes() for n in sorted(state))).hexdigest()


def train(folder, backend=None, resume="auto"):
    args = TrainerArgs(
        batch_size=2, gradient_accumulation_steps=2, iters=STEPS, log_interval=2,
        save_interval=1 if resume == "auto" else None, keep_checkpoints=None, clip_grad_norm=1.0,
        model_path=str(folder), resume=resume,
    )  # fmt: skip
    backend = backend or get_backend(args)  # one Accelerator serves a whole process
    model = tiny_t5(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = SeekableBatches(RaggedPairs(24), 4, backend.rank, backend.world_size)
    norms = []

    class Note:
        every = 1

        def on_step_end(self, loop, info):
            norms.append(info.grad_norm)

    torch.manual_seed(100 + backend.rank)
    loop = TrainingLoop(args, backend, model, optimizer, loader, callbacks=[Note()])
    loop.train()
    state = backend.state.model_state()
    return {
        "norms": norms,
        "weights": digest(state) if backend.is_main else None,
        "loss": loop.state.metrics["train"]["loss"],
        "consumed": loop.state.consumed_samples,
        "description": str(backend),
    }, backend


def main():
    out, runs = Path(sys.argv[1]), Path(sys.argv[2])
    steps = map(int, sys.argv[3:])
    results = {}
    results["whole"], backend = train(runs / "whole")
    for step in steps:
        checkpoint = runs / "whole" / "checkpoints" / f"step_{step:06d}"
        results[str(step)], backend = train(runs / f"from_{step}", backend, resume=str(checkpoint))
    if backend.is_main:
        out.write_text(json.dumps(results))
    backend.close()


if __name__ == "__main__":
    main()
