"""run_t5_pretraining.py as users start it: every launcher, the ancestor's flags, --streaming, killed and resumed.

The runs are without dropout, so that all of them must end with the losses of the plain Python run.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5ForConditionalGeneration

from lm_experiments_tools.tools.main import main as lmtools
from tests.distributed.launch import (
    CPU,
    ROOT,
    accelerate_launch,
    environment,
    forked,
    kill_and_resume,
    run,
    skip_without,
    slow,
    start,
    torchrun,
)
from tests.helpers.runs import TWO_LAYERS, losses
from tests.helpers.vocabulary_toys import train_vocabulary

pytestmark = pytest.mark.distributed

SCRIPT = ROOT / "run_t5_pretraining.py"
BACKENDS = ("horovod", "ddp", "fsdp", "zero2", "zero3")
STEPS = 40


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Raw text in three shards and a vocabulary trained on it."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("text")
    documents = [" ".join(text.split()) for _, text in sorted(topics.items()) if len(text) > 1000]
    for shard in range(3):
        lines = [json.dumps({"text": document}) for document in documents[shard::3]]
        (folder / f"shard_{shard}.jsonl").write_text("\n".join(lines) + "\n")
    train_vocabulary(folder.parent / "vocab.model", documents, 800)
    (folder.parent / "tiny.json").write_text(json.dumps(TWO_LAYERS | {"vocab_size": 1024}))
    return folder


def flags(text, run_dir, batch_size=2, accumulation=2):
    """The ancestor's README command, small."""
    return [
        "--batch_size", batch_size, "--gradient_accumulation_steps", accumulation, "--save_interval", 10,
        "--log_interval", 5, "--iters", STEPS, "--data_path", text, "--model_path", run_dir, "--input_seq_len", 64,
        "--target_seq_len", 24, "--lr", "5e-03", "--weight_decay", "1e-05", "--model_cfg", text.parent / "tiny.json",
        "--model_cls", "transformers:T5ForConditionalGeneration", "--vocab", text.parent / "vocab.model",
        "--working_dir", text.parent,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain_python(text, tmp_path_factory):
    """Losses and last checkpoint of the run on one process, rows 8 x 1."""
    folder = tmp_path_factory.mktemp("plain")
    start("alone", SCRIPT, *flags(text, folder, 8, 1))
    assert [step for step, _ in losses(folder)] == list(range(5, STEPS + 1, 5))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS)
def test_killed_and_started_again_it_ends_with_the_losses_of_plain_python(kind, text, plain_python, tmp_path):
    command = [SCRIPT, *flags(text, tmp_path)]
    if kind == "fsdp":  # its shards must be gathered to generate
        command += ["--valid_data_path", text, "--valid_samples", 16, "--valid_interval", 20, "--report"]
    kill_and_resume(kind, command, tmp_path)
    if kind == "fsdp":
        assert (tmp_path / "report.txt").read_text().count("  prediction") == 3 and (tmp_path / "loss.png").exists()
    expected, found = losses(plain_python), losses(tmp_path)
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (step, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4), step
    assert found[-1][1] < found[0][1] - 0.5  # it learned
    if kind in ("fsdp", "zero2"):
        assert lmtools(["export", str(tmp_path / "last"), "--to", str(tmp_path / "exported")]) == 0
        exported, saved = (load_file(tmp_path / folder / "model.safetensors") for folder in ("exported", "last"))
        assert exported.keys() == saved.keys() and all(torch.equal(exported[key], saved[key]) for key in saved)
        torch.testing.assert_close(logits(tmp_path / "exported"), logits(plain_python / "last"), atol=5e-3, rtol=1e-2)


def logits(folder: Path) -> torch.Tensor:
    """What transformers computes with a folder's model."""
    ids = torch.arange(3, 23).reshape(2, 10)
    with torch.no_grad():
        model = T5ForConditionalGeneration.from_pretrained(folder).eval()
        return model(input_ids=ids, decoder_input_ids=ids[:, :4]).logits


WITHOUT_PYTHON = {
    "torchrun": [*torchrun(), "--no-python"],
    "accelerate": accelerate_launch(
        "--multi_gpu", "--num_machines", "1", "--num_processes", "2", "--main_process_port", "0", "--no_python"
    ),
}


@pytest.mark.parametrize("launcher", slow([None, *WITHOUT_PYTHON], *WITHOUT_PYTHON))
def test_lmtools_trains_under_launchers_that_start_no_python(launcher, text, plain_python, tmp_path):
    """An installation without a clone has no script to name."""
    skip_without("accelerate")
    if (lmtools := shutil.which("lmtools", path=environment()["PATH"])) is None:
        pytest.skip("lmtools is not installed")
    command = [lmtools, "pretrain-t5", *flags(text, tmp_path), "--iters", 10]
    job = run(WITHOUT_PYTHON[launcher], *command, **CPU) if launcher else forked(torchrun(), *command, **CPU)
    assert job.returncode == 0 and "2 worker(s)" in job.output, job.output[-3000:]
    for (step, ours), (_, theirs) in zip(losses(tmp_path), losses(plain_python)[:2], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4), step
    assert "pretrain-t5" in json.loads((tmp_path / "env.json").read_text())["command"]
