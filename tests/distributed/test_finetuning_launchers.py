"""run_finetuning.py under every launcher: the losses and metrics of one process, each example counted once.

No dropout, and sets whose sizes two workers cannot share evenly.
"""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5ForConditionalGeneration

from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.models.build import build_model, load_model_config
from tests.distributed.launch import ROOT, forked, horovodrun, missing, run, shipped, slow, torchrun
from tests.helpers.pretrained_toys import save_toy
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        missing("sacrebleu", "rouge_score") is not None, reason=f"{missing('sacrebleu', 'rouge_score')}"
    ),
]

SCRIPT = ROOT / "run_finetuning.py"
CPU = {"ACCELERATE_USE_CPU": "true"}
LAUNCHERS = {
    "horovodrun": (horovodrun, ("horovod",), {}, "backend horovod, 2 worker(s)"),
    "torchrun": (torchrun, (), CPU, "DistributedDataParallel"),
    "fsdp": (lambda: shipped("fsdp"), (), {}, "FSDP"),
    "zero3": (lambda: shipped("zero3"), ("deepspeed",), {}, "DeepSpeedEngine"),
}
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
    config = {
        "base": str(ROOT / "models_configs" / "t5_configs" / "t5-small.json"), "vocab_size": 256, "d_model": 32,
        "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    }  # fmt: skip
    (folder / "tiny.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def weights(folder):
    """Folders with weights: a T5, and a BERT without head and two labels for it."""
    config = load_model_config(folder / "tiny.json")
    build_model(T5ForConditionalGeneration, config, seed=1).save_pretrained(folder / "t5")
    Vocabulary.load(folder / "vocab.model").save_tokenizer(folder / "t5")
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


def finetune(
    folder, name, launcher, batch_size, *flags, model=None, data="jsonl", settings=TEXT, start=forked, **environment
):
    """A run of ten updates (four of a classifier) on eight rows each, and its metrics."""
    model = model or ("--model_cfg", folder / "tiny.json", "--tokenizer", folder / "vocab.model")
    splits = {"--data_path": "train", "--valid_data_path": "valid", "--test_data_path": "test"}
    sets = [word for flag, split in splits.items() for word in (flag, folder / f"{split}.{data}")]
    job = start(
        launcher, SCRIPT, *model, *sets, "--batch_size", batch_size, "--gradient_accumulation_steps", 2,
        "--log_interval", 5, "--save_best", *settings, "--model_path", folder / name, *flags, **environment,
    )  # fmt: skip
    assert job.returncode == 0, job.output[-4000:]
    return job.output, json.loads((folder / name / "metrics.json").read_text())


@pytest.fixture(scope="module")
def alone(folder):
    return finetune(folder, "alone", [sys.executable], 4)[1]


@pytest.mark.parametrize("name", slow(LAUNCHERS, "torchrun", "fsdp", "zero3"))
def test_two_workers_give_the_metrics_of_one(folder, alone, name):
    launcher, modules, environment, wrapped = LAUNCHERS[name]
    if reason := missing(*modules):
        pytest.skip(reason)
    output, metrics = finetune(folder, name, launcher(), 2, **environment)
    assert wrapped in output
    assert set(metrics) == set(alone) == {"train", "valid", "test"}
    for split in metrics:
        assert metrics[split] == pytest.approx(alone[split], rel=1e-4), split
    for split in ("valid", "test"):
        mine, one = ((folder / run / "predictions" / f"{split}.jsonl").read_text() for run in (name, "alone"))
        assert len(mine.splitlines()) == SIZES[split]
        assert mine == one


@pytest.mark.slow
@pytest.mark.parametrize("peft", ["lora", "prompt_tuning", "prefix_tuning"])
def test_adapters_are_trained_alike(folder, weights, peft):
    """And only they are saved, by whatever launcher; prompts start from rows of the table before it is cut."""
    if reason := missing("peft", "deepspeed", "horovod"):
        pytest.skip(reason)
    flags = ("--peft", peft, "--lr", 1e-2)
    one = finetune(folder, f"{peft}-alone", [sys.executable], 4, *flags, model=weights["t5"])[1]
    for name, (launcher, _, environment, wrapped) in LAUNCHERS.items():
        output, metrics = finetune(folder, f"{peft}-{name}", launcher(), 2, *flags, model=weights["t5"], **environment)
        assert wrapped in output
        for split in metrics:
            assert metrics[split] == pytest.approx(one[split], rel=1e-4), (name, split)
        files = {file.name for file in (folder / f"{peft}-{name}" / "best").iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_a_classifier_is_trained_alike(folder, weights, name):
    """Its token table lies inside the unit of BERT's embeddings, and its weights are counted whole by ZeRO-3."""
    if reason := missing(*LAUNCHERS[name][1]):
        pytest.skip(reason)
    settings = dict(model=weights["bert"], data="tsv", settings=CLASSES)
    one = finetune(folder, f"classes-alone-{name}", [sys.executable], 4, **settings)
    two = finetune(folder, f"classes-{name}", LAUNCHERS[name][0](), 2, **settings)
    assert LAUNCHERS[name][3] in two[0]
    for split in one[1]:
        assert two[1][split] == pytest.approx(one[1][split], rel=1e-4), split
    for count in (r"([\d,]+) parameters", r"\ball +([\d,]+) +[\d,]+ "):  # the panel's, and the table's
        counts = {re.search(count, output).group(1) for output, _ in (one, two)}
        assert len(counts) == 1 and counts != {"0"}, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_a_folder_is_trained_further_and_the_run_continued(folder, weights, name):
    """Weights from a checkpoint go into a model that has not been cut into slices yet."""
    if reason := missing(*LAUNCHERS[name][1]):
        pytest.skip(reason)
    flags = ("--optimize_metric", "loss", "--iters")
    one = finetune(folder, f"whole-{name}", [sys.executable], 4, *flags, 4, model=weights["t5"])[1]
    launcher = LAUNCHERS[name][0]()
    finetune(folder, f"parts-{name}", launcher, 2, *flags, 2, model=weights["t5"])
    output, two = finetune(folder, f"parts-{name}", launcher, 2, *flags, 4, model=weights["t5"])
    assert "resumed from" in output
    for split in ("valid", "test"):
        assert two[split] == pytest.approx(one[split], rel=1e-4), split


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "adapter_model"])
def test_elastic_runs_on_saved_weights_agree_with_one_row_a_micro_batch(folder, weights, name):
    """MKL's code for other CPUs rounds a product with one row by the addresses of its operands."""
    flags = ("--gradient_accumulation_steps", 1, "--reproducible", "elastic", "--virtual_ranks", 6)
    flags += ("--peft", "lora") if name == "adapter_model" else ()
    settings = dict(model=weights["bert"], data="tsv", settings=CLASSES, start=run, MKL_ENABLE_INSTRUCTIONS="SSE4_2")
    finetune(folder, f"rows-alone-{name}", [sys.executable], 1, *flags, **settings)
    finetune(folder, f"rows-two-{name}", torchrun(), 1, *flags, **settings, **CPU)
    one, two = (load_file(folder / f"rows-{run}-{name}" / "last" / f"{name}.safetensors") for run in ("alone", "two"))
    assert one.keys() == two.keys()
    assert [key for key in one if not torch.equal(one[key], two[key])] == []
