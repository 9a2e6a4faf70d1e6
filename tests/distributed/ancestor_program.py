"""A program in the style of those written for t5-experiments, for either of its trainers: `... --trainer horovod`.

It trains, and then once more from `--then_from`, in the same run directory: programs do so fold by fold.
"""

import atexit
import json
import logging
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoConfig, HfArgumentParser

on_horovod = "horovod" in sys.argv


def report(line: str) -> None:
    """One write, which no other worker's line interrupts."""
    print(f"{line}\n", end="", flush=True)


atexit.register(lambda: report(f"in a group at the end: {torch.distributed.is_initialized()}"))
if on_horovod:
    import horovod.torch as hvd

    from lm_experiments_tools import Trainer, TrainerArgs, get_optimizer

    hvd.init()
else:
    import accelerate

    from lm_experiments_tools import TrainerAccelerate as Trainer
    from lm_experiments_tools import TrainerAccelerateArgs as TrainerArgs
    from lm_experiments_tools import get_optimizer
import lm_experiments_tools.optimizers as optimizers  # noqa: E402
from lm_experiments_tools.utils import collect_run_configuration, get_cls_by_name, get_git_diff  # noqa: E402

logging.basicConfig(level=logging.INFO)
parser = HfArgumentParser(TrainerArgs)
parser.add_argument("--trainer", choices=["horovod", "accelerate"])
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--validate_only", action="store_true", default=False)
parser.add_argument("--working_dir", type=str, default=".")
parser.add_argument("--model_cfg", type=str)
parser.add_argument("--model_cls", type=str, default="transformers:BertForSequenceClassification")
parser.add_argument("--optimizer", type=str, default="AdamW")
parser.add_argument("--weight_decay", type=float, default=0.0)
parser.add_argument("--then_from", type=str)
parser.add_argument("--head_lr_multiplier", type=float, default=1.0)


def make_loader(args, count, rank, size, shuffle):
    ids = torch.randint(5, 64, (count, 12), generator=torch.Generator().manual_seed(count))
    data = TensorDataset(ids, (ids[:, 0] % 2).long(), torch.arange(count))
    sampler = DistributedSampler(data, rank=rank, num_replicas=size, shuffle=shuffle, seed=args.seed)
    rows = args.batch_size * args.gradient_accumulation_steps

    def collate(batch):
        ids, labels, numbers = (torch.stack(column) for column in zip(*batch, strict=True))
        return {"tokens": ids, "labels": labels, "names": [f"row {int(n)}" for n in numbers]}

    return DataLoader(data, batch_size=rows, sampler=sampler, collate_fn=collate, pin_memory=True), sampler


def main():
    args = parser.parse_args()
    if on_horovod:
        torch.cuda.set_device(hvd.local_rank())
        rank, size, first, wait = hvd.rank(), hvd.size(), (), hvd.barrier
    else:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
        rank, size, first = accelerator.process_index, accelerator.num_processes, (accelerator,)
        wait = accelerator.wait_for_everyone
    train(args, rank, size, first, wait)
    args.init_checkpoint, args.iters, args.reset_lr = args.then_from, args.iters + 2, False
    train(args, rank, size, first, wait)


def train(args, rank, size, first, wait):
    if rank == 0:
        Path(args.model_path).mkdir(parents=True, exist_ok=True)
        (Path(args.model_path) / "config.json").write_text(json.dumps(collect_run_configuration(args)))
        (Path(args.model_path) / "git.diff").write_text(get_git_diff())
    train_loader, train_sampler = make_loader(args, 40, rank, size, shuffle=True)
    valid_loader, _ = make_loader(args, 13, rank, size, shuffle=False)
    test_loader, _ = make_loader(args, 11, rank, size, shuffle=False)

    config = AutoConfig.from_pretrained(args.model_cfg)
    config.num_labels = 2
    torch.manual_seed(args.seed)
    model = get_cls_by_name(args.model_cls)(config=config)
    optimizer_cls = get_optimizer(args.optimizer)
    assert optimizer_cls is not optimizers.Adafactor
    body, head = model.bert.parameters(), model.classifier.parameters()
    groups = [{"params": body}, {"params": head, "lr": args.lr * args.head_lr_multiplier}]
    optimizer = optimizer_cls(groups, lr=args.lr, weight_decay=args.weight_decay)
    if not on_horovod:
        model, optimizer = first[0].prepare(model, optimizer)

    def batch_transform_fn(batch):
        return {"input_ids": batch["tokens"], "labels": batch["labels"], "names": batch["names"]}

    def keep_for_metrics_fn(batch, output):
        return {"labels": batch["labels"], "predictions": output["logits"].argmax(-1), "names": batch["names"]}

    def metrics_fn(data):
        right = data["labels"] == data["predictions"]
        return {"accuracy": right.sum() / len(right), "rows": len(data["names"]), "distinct": len(set(data["names"]))}

    trainer = Trainer(
        args, *first, model, optimizer, train_loader, valid_loader, train_sampler,
        batch_transform_fn=batch_transform_fn, batch_metrics_fn=lambda _, y: {"loss": y["loss"]},
        keep_for_metrics_fn=keep_for_metrics_fn, metrics_fn=metrics_fn, forward_kwargs={"output_attentions": False},
    )  # fmt: skip
    if not args.validate_only:
        trainer.train()
        wait()
        if args.save_best:
            trainer.load(str(Path(args.model_path) / ("model_best.pth" if on_horovod else "model_best")))
    valid = trainer.validate(valid_loader, write_tb=False)
    test = trainer.validate(test_loader, split="test", write_tb=True)
    trainer.save_metrics(save_path=args.model_path)
    report(f"{rank} of {size} at {trainer.n_iter}: {json.dumps({'valid': valid, 'test': test})}")


if __name__ == "__main__":
    main()
    if not on_horovod:
        report(f"in a group after main: {torch.distributed.is_initialized()}")
