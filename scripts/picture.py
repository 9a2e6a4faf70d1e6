"""Draw README's picture of a run, its losses and the blanks that its model fills.

python scripts/picture.py runs/pretrain_cpu docs/images/pretrain.png
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lm_experiments_tools.tracking.curve import new_figure

SENTENCES = (
    "If the file does not exist, an <extra_id_0> is raised.",
    "Return True if the <extra_id_0> is empty.",
    "The name of the <extra_id_0> is a string.",
    "Return the <extra_id_0> of the list.",
)


def answers(folder: Path) -> list[str]:
    """Text that the model writes for the blank of each sentence."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = [model.generate(**tokenizer(s, return_tensors="pt"), max_new_tokens=8)[0] for s in SENTENCES]
    return [tokenizer.decode(ids).split("<extra_id_0>")[1].split("<extra_id_1>")[0].strip() for ids in found]


def main(run: str, picture: str) -> None:
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figure = new_figure(9, 2.8)
    curve, text = figure.subplots(1, 2, width_ratios=(5, 6))
    for split, style in (("train", "-"), ("valid", "o")):
        points = [(r["step"], r["loss"]) for r in records if r["split"] == split and "loss" in r]
        name = f"held-out text: {points[0][1]:.2f} to {points[-1][1]:.2f}" if split == "valid" else "training"
        curve.plot(*zip(*points, strict=True), style, label=name)
    curve.set(xlabel="steps", ylabel="loss (nats a token)", ylim=(0, None))
    curve.legend()
    text.axis("off")
    text.text(0, 0.9, "Blanks that it fills", color="gray", fontsize=11)
    for number, (sentence, answer) in enumerate(zip(SENTENCES, answers(Path(run) / "last"), strict=True)):
        text.text(0, 0.68 - 0.2 * number, sentence.replace("<extra_id_0>", f"[{answer}]"), fontsize=11)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
