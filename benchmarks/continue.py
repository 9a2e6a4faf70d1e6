"""Held-out masked-token loss of an encoder continued on a new domain, here and by transformers' run_mlm.py.

A small ModernBERT is pre-trained on half the sources of a corpus. It is continued on the other half in two ways that
get the same process CPU time for their steps (imports and tokenization come on top) and the same learning rates to
choose from:

- ours: the command of docs/continue.md, `run_bert_pretraining.py --packing documents`;
- run_mlm: transformers' examples/pytorch/language-modeling/run_mlm.py at its defaults, except length and steps.

Both results are loaded and scored by transformers: documents of `validation.jsonl` one by one, cut to the length,
between [CLS] and [SEP], 15 % of the tokens chosen by `DataCollatorForLanguageModeling`.

    nice -n 10 python benchmarks/continue.py --corpus CORPUS --run_mlm run_mlm.py --work FOLDER --seconds 120

CORPUS holds train-*.jsonl and validation.jsonl with the keys text and source. Finished runs in FOLDER are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

ROOT = Path(__file__).resolve().parents[1]
FIRST_HALF = ("gutenberg_prose", "speeches", "wikipedia")
SECOND_HALF = ("linux_doc", "movie_reviews", "debian_handbook")
LENGTH, ROWS = 256, 8  # 8 rows are run_mlm.py's default
TUNING_SEED, SEEDS = 7, (1, 2, 3)
SIDES = ("ours", "run_mlm")
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
BASE_RATE = 2e-3
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def documents(path: Path, sources: tuple[str, ...]) -> list[str]:
    """Texts of a .jsonl file's documents from some sources."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row["text"] for row in rows if row["source"] in sources]


def prepare(corpus: Path, work: Path) -> None:
    """Write first.json and second.json (one object a line), held_out.json, and the base model before training."""
    work.mkdir(parents=True, exist_ok=True)
    if (work / "untrained").exists():
        return
    shards = sorted(corpus.glob("train-*.jsonl"))
    for name, sources, paths in (
        ("first", FIRST_HALF, shards),
        ("second", SECOND_HALF, shards),
        ("held_out", SECOND_HALF, [corpus / "validation.jsonl"]),
    ):
        texts = [text for path in paths for text in documents(path, sources)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (work / f"{name}.json").write_text(lines, encoding="utf-8")
        if name == "first":
            trainer = BertWordPieceTokenizer(lowercase=True)
            trainer.train_from_iterator(texts, vocab_size=4096, show_progress=False)
            trainer.save_model(str(work))
    tokenizer = BertTokenizerFast(str(work / "vocab.txt"), model_max_length=LENGTH)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    config = ModernBertConfig(
        vocab_size=4096, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=LENGTH, local_attention=64, bos_token_id=special["cls_token_id"],
        eos_token_id=special["sep_token_id"], **special,
    )  # fmt: skip
    torch.manual_seed(0)
    ModernBertForMaskedLM(config).save_pretrained(work / "untrained")
    tokenizer.save_pretrained(work / "untrained")


def command(side: str, args: argparse.Namespace, start: Path, data: str, rate: float, steps: int, seed: int) -> list:
    """The command that continues `start` on a file of the work folder; it writes into the folder it runs in."""
    data_path = args.work / f"{data}.json"
    if side == "ours":
        flags = {
            "from_pretrained": start, "data_path": data_path, "packing": "documents", "mlm_prob": 0.3,
            "model_path": "run", "input_seq_len": LENGTH, "batch_size": ROWS, "lr": rate, "weight_decay": 0.01,
            "lr_scheduler": "linear", "num_warmup_steps": steps // 10, "iters": steps, "seed": seed,
            "data_n_workers": 1,
        }  # fmt: skip
        program = ROOT / "run_bert_pretraining.py"
    else:
        flags = {
            "model_name_or_path": start, "train_file": data_path, "max_seq_length": LENGTH, "output_dir": "run",
            "learning_rate": rate, "max_steps": steps, "seed": seed, "save_strategy": "no", "report_to": "none",
            "do_train": True, "use_cpu": True, "validation_file": args.work / "held_out.json",
        }  # fmt: skip
        program = args.run_mlm
    return [sys.executable, program, *(word for name, value in flags.items() for word in (f"--{name}", value))]


def train(side: str, args: argparse.Namespace, start: Path, data: str, rate: float, steps: int, seed: int) -> dict:
    """Train in a process of its own; returns the model's folder and its CPU seconds, those of a finished run again."""
    folder = args.work / f"{side}_{data}_{rate:g}_{steps}_{seed}"
    record = folder / "record.json"
    if record.exists():
        return json.loads(record.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    words = [str(word) for word in command(side, args, start, data, rate, steps, seed)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "log.txt").open("w") as log:
        environment = {**os.environ, **ENVIRONMENT, "HF_HOME": str(folder / "cache")}  # each run tokenizes by itself
        ended = subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if ended.returncode:
        sys.exit(f"{side} failed: see {folder / 'log.txt'}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {"model": str(folder / ("run/last" if side == "ours" else "run")), "seconds": seconds, "steps": steps}
    record.write_text(json.dumps(found))
    return found


def score(folder: str | Path, held_out: Path, mask_seeds: tuple[int, ...] = (0, 1)) -> dict[str, float]:
    """Mean loss in nats and accuracy over the chosen tokens of single documents."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    loss, correct, count = 0.0, 0, 0
    for seed in mask_seeds:
        torch.manual_seed(seed)
        for line in held_out.read_text(encoding="utf-8").splitlines():
            encoded = tokenizer(
                json.loads(line)["text"], truncation=True, max_length=LENGTH, return_special_tokens_mask=True
            )
            batch = collator([encoded])
            labels = batch.pop("labels")
            with torch.no_grad():
                logits = model(**batch).logits
            chosen = labels >= 0
            loss += cross_entropy(logits[chosen], labels[chosen], reduction="sum").item()
            correct += int((logits[chosen].argmax(-1) == labels[chosen]).sum())
            count += int(chosen.sum())
    return {"loss": loss / count, "accuracy": correct / count}


def steps_within(side: str, args: argparse.Namespace, start: Path) -> int:
    """Steps that take `--seconds` of CPU time, from the difference of two short runs."""
    few, more = (train(side, args, start, "second", RATES[0], steps, TUNING_SEED) for steps in args.calibration_steps)
    step = (more["seconds"] - few["seconds"]) / (more["steps"] - few["steps"])
    steps = round(args.seconds / step)
    print(
        f"{side}: {few['seconds'] - few['steps'] * step:.1f} s to start, {step:.3f} s a step, {steps} steps",
        flush=True,
    )
    return steps


def table(found: dict[str, list[dict]], base: dict[str, float]) -> str:
    """The results as a Markdown table: mean and range over seeds."""
    lines = [
        "| | learning rate | steps | CPU s | held-out loss | range | accuracy |",
        "|---|---|---|---|---|---|---|",
        f"| base model | | | | {base['loss']:.3f} | | {base['accuracy']:.3f} |",
    ]
    for side, runs in found.items():
        losses = [run["loss"] for run in runs]
        means = {name: statistics.mean(run[name] for run in runs) for name in ("seconds", "loss", "accuracy")}
        lines.append(
            f"| {side} | {runs[0]['rate']:g} | {runs[0]['steps']} | {means['seconds']:.0f} | {means['loss']:.3f} "
            f"| {min(losses):.3f} to {max(losses):.3f} | {means['accuracy']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("corpus", "run_mlm", "work"):
        parser.add_argument(f"--{name}", type=lambda word: Path(word).resolve(), required=True)
    parser.add_argument("--seconds", type=float, default=120, help="CPU time of the steps of a continued run")
    parser.add_argument("--base_steps", type=int, default=1000, help="steps of the base model")
    parser.add_argument("--calibration_steps", type=int, nargs=2, default=(10, 60))
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare(args.corpus, args.work)
    held_out = args.work / "held_out.json"
    base = train("ours", args, args.work / "untrained", "first", BASE_RATE, args.base_steps, 0)
    base_score = score(base["model"], held_out)
    print(f"base model: {base}, {base_score}", flush=True)
    start, found = Path(base["model"]), {}
    steps = {side: steps_within(side, args, start) for side in SIDES}
    best = {}
    for side in SIDES:
        runs = {rate: train(side, args, start, "second", rate, steps[side], TUNING_SEED) for rate in RATES}
        losses = {rate: score(run["model"], held_out)["loss"] for rate, run in runs.items()}
        print(f"{side}: loss by learning rate {losses}", flush=True)
        best[side] = min(losses, key=losses.__getitem__)
    for seed in SEEDS:  # in turns, so that what slows the machine slows both
        for side in SIDES:
            run = train(side, args, start, "second", best[side], steps[side], seed)
            found.setdefault(side, []).append({**run, **score(run["model"], held_out), "rate": best[side]})
    (args.work / "results.json").write_text(json.dumps({"base": base_score, **found}, indent=1))
    print(table(found, base_score))


if __name__ == "__main__":
    main()
