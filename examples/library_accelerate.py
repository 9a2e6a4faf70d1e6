"""Train a T5 of transformers with TrainerAccelerate: DDP, FSDP2, or ZeRO-2, which shards gradients and optimizer.

    accelerate launch --config_file accelerate_configs/zero2.yaml examples/library_accelerate.py runs/reversed
    accelerate launch --config_file accelerate_configs/ddp.yaml examples/library_accelerate.py runs/reversed

The T5 writes rows of 8 numbers in reverse. Nothing is prepared by `accelerator.prepare`: the trainer does it. The
program is the same for each configuration.
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler
from transformers import T5Config, T5ForConditionalGeneration

from lm_experiments_tools import TrainerAccelerate, TrainerArgs

END = 1  # T5's end of a sequence; 0 is padding


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of numbers 2 to 31 with their reverse: `input_ids` and `labels` int64[9]."""
    drawn = torch.randint(2, 32, (count, 8), generator=torch.Generator().manual_seed(seed))
    end = torch.tensor([END])
    return [{"input_ids": torch.cat([row, end]), "labels": torch.cat([row.flip(0), end])} for row in drawn]


def right_tokens(batch: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Of a micro-batch: a mean, or a pair (sum, count), which is exact over micro-batches of any size."""
    right = outputs["logits"].argmax(-1) == batch["labels"]
    return {"accuracy": (right.sum(), right.numel())}


def main(folder: str) -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    args = TrainerArgs(
        model_path=folder, iters=40, batch_size=8, gradient_accumulation_steps=2, clip_grad_norm=1.0,
        lr_scheduler="linear", num_warmup_steps=4, log_interval=10, valid_interval=20, save_interval=20,
        save_best=True,
    )  # fmt: skip
    loaders = {}
    for seed, (split, count) in enumerate({"train": 2000, "valid": 100, "test": 101}.items()):
        data = rows(count, seed)
        # rank and number of workers, before there is a trainer
        sampler = DistributedSampler(
            data, accelerator.num_processes, accelerator.process_index, shuffle=split == "train"
        )
        loaders[split] = DataLoader(data, batch_size=args.rows_per_worker(), sampler=sampler)
    config = T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = TrainerAccelerate(
        args, accelerator, model, optimizer, loaders["train"], loaders["valid"], batch_metrics_fn=right_tokens
    )
    trainer.train()
    trainer.load(f"{folder}/best")
    found = trainer.validate(loaders["test"], "test")
    if accelerator.is_main_process:
        print(f"{trainer.backend}: test loss {found['loss']:.3f}, accuracy {found['accuracy']:.3f}")
    # The checkpoint is a folder of transformers, whatever the workers have sharded.
    reloaded = T5ForConditionalGeneration.from_pretrained(f"{folder}/best")
    assert reloaded.config.d_model == 32


if __name__ == "__main__":
    main(sys.argv[1])
