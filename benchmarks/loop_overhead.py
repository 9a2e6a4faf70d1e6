"""CPU time that a training loop spends on a step besides the step itself.

The same small model is trained on the same batches with the same optimizer by each of

- bare PyTorch: forward, backward, clip, step, zero_grad;
- bare Accelerate: the loop of Accelerate's own examples;
- Hugging Face's `Trainer`;
- our `TrainingLoop`, alone in a process and on an Accelerator.

All clip by norm, log the loss every 100 steps and save nothing. They take turns in one process, on one thread, so that
what disturbs the machine disturbs all alike, and must end with the weights of bare PyTorch, so that the same work is
compared. The clock is process CPU time, read by the source of the batches.

    OMP_NUM_THREADS=1 python benchmarks/loop_overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import accelerate
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, IterableDataset

from lm_experiments_tools.backends.accelerate import AccelerateBackend
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.training.trainer import TrainingLoop

LOG_INTERVAL, MAX_NORM, LR = 100, 0.01, 1e-3  # every step's gradient is longer, so that each loop really clips
VOCABULARY_SIZE, ROWS, INPUT_LENGTH, LABELS_LENGTH = 64, 4, 16, 8
logger = logging.getLogger("loop_overhead")


class Bag(nn.Module):
    """About the least a language model can do: the mean embedding of the inputs predicts every label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, 16)
        self.head = nn.Linear(16, VOCABULARY_SIZE)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mean = (self.embedding(input_ids) * attention_mask.unsqueeze(-1)).mean(1)
        logits = self.head(mean).unsqueeze(-1).expand(-1, -1, labels.shape[1])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def tiny_t5() -> nn.Module:
    """T5 v1.1 with 2 + 2 layers of width 16 and no dropout."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY_SIZE, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"bag of words": Bag, "T5, 2 + 2 layers": tiny_t5}


class ClockedBatches(IterableDataset):
    """`warm_up + steps + 1` batches, drawn beforehand; the clock is read as numbers warm_up and warm_up + steps leave.

    A loop that fetches some batches ahead does so at both readings, so `steps` whole steps lie between them.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.readings_at = (warm_up, warm_up + steps)
        self.batches = [
            {
                "input_ids": torch.randint(1, VOCABULARY_SIZE, (ROWS, INPUT_LENGTH), generator=generator),
                "attention_mask": torch.ones(ROWS, INPUT_LENGTH, dtype=torch.long),
                "labels": torch.randint(1, VOCABULARY_SIZE, (ROWS, LABELS_LENGTH), generator=generator),
            }
            for _ in range(warm_up + steps + 1)
        ]
        self.readings: list[float] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.readings = []
        for i, batch in enumerate(self.batches):
            if i in self.readings_at:
                self.readings.append(time.process_time())
            yield batch

    def microseconds_per_step(self) -> float:
        (start, end), (first, last) = self.readings, self.readings_at
        return (end - start) / (last - first) * 1e6


# Each loop below takes a model, its optimizer and the batches, and trains through all of them once.


def bare_torch(model: nn.Module, optimizer: AdamW, batches: ClockedBatches) -> None:
    model.train()
    total = torch.zeros(())
    for step, batch in enumerate(DataLoader(batches, batch_size=None), 1):
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_INTERVAL == 0:
            logger.info("step %d loss %.4f", step, total.item() / LOG_INTERVAL)
            total.zero_()


def bare_accelerate(model: nn.Module, optimizer: AdamW, batches: ClockedBatches) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(batches, batch_size=None))
    model.train()
    total = torch.zeros(())
    for step, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_INTERVAL == 0:
            logger.info("step %d loss %.4f", step, total.item() / LOG_INTERVAL)
            total.zero_()


def hf_trainer(model: nn.Module, optimizer: AdamW, batches: ClockedBatches) -> None:
    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return self.accelerator.prepare(DataLoader(batches, batch_size=None))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = transformers.TrainingArguments(
            folder, max_steps=len(batches.batches), per_device_train_batch_size=ROWS, logging_steps=LOG_INTERVAL,
            max_grad_norm=MAX_NORM, learning_rate=LR, lr_scheduler_type="constant", save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        )  # fmt: skip
        Trainer(model, options, train_dataset=batches, optimizers=(optimizer, None)).train()


def ours(model: nn.Module, optimizer: AdamW, batches: ClockedBatches) -> None:
    args = trainer_args(batches)
    TrainingLoop(args, LocalBackend(), model, optimizer, DataLoader(batches, batch_size=None)).train()


def ours_on_accelerate(model: nn.Module, optimizer: AdamW, batches: ClockedBatches) -> None:
    args = trainer_args(batches)
    backend = AccelerateBackend.from_accelerator(Accelerator(cpu=True), args)
    TrainingLoop(args, backend, model, optimizer, DataLoader(batches, batch_size=None)).train()


def trainer_args(batches: ClockedBatches) -> TrainerArgs:
    return TrainerArgs(iters=len(batches.batches), batch_size=ROWS, log_interval=LOG_INTERVAL, clip_grad_norm=MAX_NORM)


LOOPS: dict[str, Callable[[nn.Module, AdamW, ClockedBatches], None]] = {
    "bare PyTorch": bare_torch,
    "bare Accelerate": bare_accelerate,
    "transformers Trainer": hf_trainer,
    "ours, one process": ours,
    "ours, AccelerateBackend": ours_on_accelerate,
}


def measure(make_model: Callable[[], nn.Module], rounds: int, warm_up: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of CPU time a step for each loop, one number a round.

    Raises:
        AssertionError: a loop ended with other weights than bare PyTorch.
    """
    batches = ClockedBatches(warm_up, steps)
    times: dict[str, list[float]] = {name: [] for name in LOOPS}
    names, order, expected = list(LOOPS), random.Random(0), None
    for _ in range(rounds):
        for name in names:
            torch.manual_seed(0)
            model = make_model()
            gc.collect()
            LOOPS[name](model, AdamW(model.parameters(), lr=LR, fused=True), batches)
            times[name].append(batches.microseconds_per_step())
            expected = expected or model.state_dict()
            for key, value in model.state_dict().items():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6, msg=f"{name}: {key} differs")
        order.shuffle(names)  # so that no loop always follows the same other one
    return times


def table(model: str, times: dict[str, list[float]]) -> str:
    """A markdown table; overheads are differences to the bare loop of the same round."""
    bare = times["bare PyTorch"]
    lines = [
        f"| {model}: us/step | median | min | overhead, median | overhead, min |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, values in times.items():
        over = statistics.median(v - b for v, b in zip(values, bare, strict=True))
        least = min(values) - min(bare)
        lines.append(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} | {over:+.0f} | {least:+.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=200, help=f"measured steps of a turn, in whole {LOG_INTERVAL}s")
    parser.add_argument("--warm_up", type=int, default=50, help="steps of a turn before the clock starts")
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    options = parser.parse_args()
    if options.steps % LOG_INTERVAL:
        parser.error(f"--steps {options.steps} is not a multiple of {LOG_INTERVAL}")
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=open(os.devnull, "w"))  # lines are formatted, nobody reads them
    print(
        f"{options.rounds} rounds x {options.steps} steps; Python {platform.python_version()}, torch "
        f"{torch.__version__}, accelerate {accelerate.__version__}, transformers {transformers.__version__}; "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    for name in options.model:
        print("\n" + table(name, measure(MODELS[name], options.rounds, options.warm_up, options.steps)), flush=True)


if __name__ == "__main__":
    main()
