"""run_finetuning.py under every launcher: the losses and metrics of one process, each example counted once.

No dropout, and sets whose sizes two workers cannot share evenly.
"""

import json
import re

import pytest
from transformers import T5ForConditionalGeneration

from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.models.build import build_model, load_model_config
from tests.distributed.launch import KINDS, ROOT, missing, skip_without, slow, start
from tests.helpers.pretrained_toys import save_toy
from tests.helpers.runs import TWO_LAYERS
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        missing("sacrebleu", "rouge_score") is not None, reason=f"{missing('sacrebleu', 'rouge_score')}"
    ),
]

SCRIPT = ROOT / "run_finetuning.py"
BACKENDS = ("horovod", "ddp", "fsdp", "zero3")
SIZES = {"train": 37, "valid": 11, "test": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs to learn (the words of a line in reverse), a vocabulary and the configuration of a tiny T5."""
    folder = tmp_path_factory.mktemp("finetuning")
    numbered_words_vocabulary(folder)
    for split, size in SIZES.items():
        rows = []
        for i in range(size):
            words = [f"word{(i * 3 + j) % 9}" for j in range(2 + i % 3)]
            rows.append({"translation": {"s": " ".join(words), "t": " ".join(reversed(words))}})
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "tiny.json").write_text(json.dumps(TWO_LAYERS | {"vocab_size": 256}))
    return folder


@pytest.fixture(scope="module")
def weights(folder):
    """Folders with weights: a T5, and a BERT without head and two labels for it."""
    config = load_model_config(folder / "tiny.json")
    build_model(T5ForConditionalGeneration, config, seed=1).save_pretrained(folder / "t5")
    Tokenizer.load(folder / "vocab.model").save(folder / "t5")
    save_toy("encoder", folder / "bert")
    for split, size in SIZES.items():
        lines = [f"w{i % 40} w{i % 7}\t{'good' if i % 2 else 'bad'}" for i in range(size)]
        (folder / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return {name: ("--from_pretrained", folder / name) for name in ("t5", "bert")}


TEXT = ("--num_beams", 2, "--target_seq_len", 16, "--metrics", "rouge", "bleu", "exact_match", "gen_len",
        "--optimize_metric", "rougeL", "--iters", 10, "--lr", 1e-2)  # fmt: skip
CLASSES = ("--model_type", "encoder", "--task", "classification", "--input_seq_len", 32, "--dropout_rate", 0.0,
           "--metrics", "accuracy", "--optimize_metric", "accuracy", "--iters", 4, "--lr", 1e-3,
           "--speed", "off")  # fmt: skip


def finetune(folder, name, kind, *flags, model=None, data="jsonl", settings=TEXT, **options):
    """A run of ten updates (four of a classifier) on eight rows each, and its metrics."""
    model = model or ("--model_cfg", folder / "tiny.json", "--tokenizer", folder / "vocab.model")
    splits = {"--data_path": "train", "--valid_data_path": "valid", "--test_data_path": "test"}
    sets = [word for flag, split in splits.items() for word in (flag, folder / f"{split}.{data}")]
    output = start(
        kind, SCRIPT, *model, *sets, "--batch_size", 4 if kind == "alone" else 2, "--gradient_accumulation_steps", 2,
        "--log_interval", 5, "--save_best", *settings, "--model_path", folder / name, *flags,
        **options,
    )  # fmt: skip
    assert KINDS[kind].described in output
    return output, json.loads((folder / name / "metrics.json").read_text())


def assert_same_metrics(ours, theirs):
    assert set(ours) == set(theirs)
    for split in ours:
        assert ours[split] == pytest.approx(theirs[split], rel=1e-4), split


@pytest.fixture(scope="module")
def alone(folder):
    return finetune(folder, "alone", "alone")[1]


@pytest.mark.parametrize("kind", slow(BACKENDS, *BACKENDS[1:]))
def test_two_workers_give_the_metrics_of_one(folder, alone, kind):
    _, metrics = finetune(folder, kind, kind)
    assert set(metrics) == {"train", "valid", "test"}
    assert_same_metrics(metrics, alone)
    for split in ("valid", "test"):
        mine, one = ((folder / run / "predictions" / f"{split}.jsonl").read_text() for run in (kind, "alone"))
        assert len(mine.splitlines()) == SIZES[split]
        assert mine == one


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("peft", ["lora", "prompt_tuning", "prefix_tuning"])
def test_adapters_are_trained_alike(folder, weights, peft, kind):
    """And only they are saved, by whatever launcher; prompts start from rows of the table before it is cut."""
    skip_without("peft")
    flags = ("--peft", peft, "--lr", 1e-2)
    one = finetune(folder, f"{peft}-{kind}-alone", "alone", *flags, model=weights["t5"])[1]
    _, metrics = finetune(folder, f"{peft}-{kind}", kind, *flags, model=weights["t5"])
    assert_same_metrics(metrics, one)
    files = {file.name for file in (folder / f"{peft}-{kind}" / "best").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_a_classifier_is_trained_alike(folder, weights, kind):
    """Its token table lies inside the unit of BERT's embeddings, and its weights are counted whole by ZeRO-3."""
    settings = dict(model=weights["bert"], data="tsv", settings=CLASSES)
    one = finetune(folder, f"classes-alone-{kind}", "alone", **settings)
    two = finetune(folder, f"classes-{kind}", kind, **settings)
    assert_same_metrics(two[1], one[1])
    for count in (r"([\d,]+) parameters", r"\ball +([\d,]+) +[\d,]+ "):  # the panel's, and the table's
        counts = {re.search(count, output).group(1) for output, _ in (one, two)}
        assert len(counts) == 1 and counts != {"0"}, counts
