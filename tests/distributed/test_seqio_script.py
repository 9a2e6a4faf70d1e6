"""run_t5_pretraining.py on seqio's examples: the real worker process with TensorFlow, killed and started again."""

import json
import sys

import pytest

from tests.distributed.launch import ROOT, kill_and_resume, missing, run, start
from tests.helpers.runs import TWO_LAYERS, losses, records
from tests.helpers.vocabulary_toys import train_vocabulary

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        missing("t5", "seqio", "tensorflow") is not None, reason="needs the packages t5, seqio and tensorflow"
    ),
]

SCRIPT, STEPS = ROOT / "run_t5_pretraining.py", 24
REAL = {"real": True, "timeout": 240}  # TensorFlow is imported by a process of its own, started from a plain one
# the script, and then a look at what its process has loaded
CHECKED = """
import sys
from run_t5_pretraining import main
main()
assert not {"tensorflow", "seqio", "t5"} & set(sys.modules)
print("no TensorFlow here")
"""
TASKS = """
import functools, pathlib
import seqio
from t5.data import preprocessors

folder = pathlib.Path(__file__).parent
feature = seqio.Feature(seqio.SentencePieceVocabulary(str(folder / "vocab.model"), extra_ids=100))
files = sorted(map(str, (folder / "lines").glob("*.txt")))
seqio.TaskRegistry.add(
    "denoise",
    source=seqio.TextLineDataSource({"train": files[1:], "validation": files[:1]}),
    preprocessors=[
        lambda dataset: dataset.map(lambda line: {"inputs": "", "targets": line}), seqio.preprocessors.tokenize,
        functools.partial(preprocessors.span_corruption, noise_density=0.2), seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={"inputs": feature, "targets": feature},
)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Raw text (as JSON lines, and as lines), a vocabulary, a small model with dropout, the user's tasks.py."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("work")
    documents = [" ".join(text.split()) for _, text in sorted(topics.items()) if len(text) > 1000]
    (folder / "json").mkdir()
    (folder / "lines").mkdir()
    for shard in range(3):
        lines = [json.dumps({"text": document}) for document in documents[shard::3]]
        (folder / "json" / f"shard_{shard}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "lines" / f"shard_{shard}.txt").write_text("\n".join(documents[shard::3]) + "\n")
    train_vocabulary(folder / "vocab.model", documents, 800)
    (folder / "tiny.json").write_text(json.dumps(TWO_LAYERS | {"vocab_size": 1024}))
    (folder / "tasks.py").write_text(TASKS)
    return folder


def flags(work, run_dir, batch_size=8, dropout=0.1, **data):
    data = data or {"task": "tasks:denoise"}
    return [
        "--batch_size", batch_size, "--save_interval", 8, "--log_interval", 4, "--iters", STEPS, "--model_path",
        run_dir, "--input_seq_len", 64, "--target_seq_len", 32, "--lr", "5e-03", "--model_cfg", work / "tiny.json",
        "--vocab", work / "vocab.model", "--working_dir", work, "--dropout_rate", dropout,
        *(part for name, value in data.items() for part in (f"--{name}", value)),
    ]  # fmt: skip


def test_killed_and_started_again_it_is_the_uninterrupted_run(work, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job = run([sys.executable, "-c", CHECKED], *flags(work, whole), timeout=240)
    assert job.returncode == 0, job.output[-3000:]
    assert "no TensorFlow here" in job.output
    assert "cuda" not in job.output.lower()  # what TensorFlow says at its start is kept out
    assert "examples again; " in kill_and_resume("alone", [SCRIPT, *flags(work, killed)], killed, 8, **REAL)
    assert losses(killed) == losses(whole) and len(losses(whole)) == STEPS // 4
    assert losses(whole)[-1][1] < losses(whole)[0][1] - 0.5


@pytest.fixture(scope="module")
def plain(work, tmp_path_factory):
    """The run of one process, rows 8 x 1, without dropout."""
    folder = tmp_path_factory.mktemp("plain")
    start("alone", SCRIPT, *flags(work, folder, dropout=0.0), **REAL)
    return folder


@pytest.mark.parametrize("kind", ["horovod", "ddp"])
def test_two_workers_have_the_losses_of_one(kind, work, plain, tmp_path):
    output = kill_and_resume(kind, [SCRIPT, *flags(work, tmp_path, batch_size=4, dropout=0.0)], tmp_path, 8, **REAL)
    assert "examples again; " in output and "2 worker(s)" in output
    assert {path.name for path in (tmp_path / "logs").glob("seqio*.log")} == {"seqio.rank0.log", "seqio.rank1.log"}
    for (step, ours), (_, theirs) in zip(losses(tmp_path), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4), step


def test_the_users_own_task_trains_and_validates_on_its_split(work, tmp_path):
    output = start("alone", SCRIPT, *flags(work, tmp_path, task="tasks:denoise", valid_interval=12), **REAL)
    assert "seqio Task denoise, 64 inputs + 32 targets" in output
    first, second = (record["loss"] for record in records(tmp_path, "valid"))
    assert second < first
