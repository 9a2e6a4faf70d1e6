"""run_bert_pretraining.py under every launcher, from preprocessed text, killed and started again.

Rows differ much in their number of masked tokens (half of the samples are short), the split of the batch differs from
launcher to launcher, and dropout is off: all must log the losses of the plain Python run.
"""

import json

import pytest

from megatron.preprocess_data import main as preprocess
from tests.distributed.launch import ROOT, kill_and_resume, start
from tests.helpers.bert_toys import documents, make_bert_data

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = ROOT / "run_bert_pretraining.py"
STEPS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Text in a folder of shards through megatron/preprocess_data.py."""
    folder = make_bert_data(tmp_path_factory.mktemp("bert"))
    (folder / "text").mkdir()
    for shard in range(3):
        lines = [json.dumps({"text": ". ".join(page)}) for page in documents()[shard::3]]
        (folder / "text" / f"shard_{shard}.jsonl").write_text("\n".join(lines) + "\n")
    preprocess([
        "--input", str(folder / "text"), "--output-prefix", str(folder / "corpus"), "--split-sentences",
        "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt"),
    ])  # fmt: skip
    return folder


def flags(data, run_dir, batch_size=2, accumulation=2):
    """Validation on the last step alone, of which two workers have unequal parts."""
    return [
        "--data_path", data / "corpus_text_sentence", "--valid_data_path", data / "valid", "--valid_interval", STEPS,
        "--valid_samples", 33, "--vocab_file", data / "vocab.txt", "--model_cfg", data / "tiny.json", "--model_path",
        run_dir, "--working_dir", data, "--input_seq_len", 48, "--short_seq_prob", 0.5, "--batch_size", batch_size,
        "--gradient_accumulation_steps", accumulation, "--iters", STEPS, "--log_interval", 5, "--save_interval", 10,
        "--lr", "3e-3", "--weight_decay", "1e-2", "--nsp", "random",
    ]  # fmt: skip


def logged(run_dir):
    """(step, split, metrics) of each line."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["split"], {name: r[name] for name in r["metrics"]}) for r in records if r["metrics"]]


@pytest.fixture(scope="module")
def plain_python(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    start("alone", SCRIPT, *flags(data, folder, 8, 1))
    found = logged(folder)
    assert [step for step, split, _ in found if split == "train"] == list(range(5, STEPS + 1, 5))
    assert {"accuracy_mlm", "accuracy_nsp", "loss", "loss_mlm", "loss_nsp"} <= found[0][2].keys()
    assert found[-2][2]["loss_mlm"] < found[0][2]["loss_mlm"] - 0.5  # it learned
    return found


def assert_same(found, expected):
    assert [position[:2] for position in found] == [position[:2] for position in expected]
    for (step, split, ours), (_, _, theirs) in zip(found, expected, strict=True):
        for name, value in theirs.items():
            tolerance = 2e-4 if name.startswith("loss") else 0.02  # an argmax between equals may tip
            assert ours[name] == pytest.approx(value, abs=tolerance), (step, split, name)


@pytest.mark.parametrize("kind", ["horovod", "ddp", "fsdp", "zero2", "zero3"])
def test_killed_and_started_again_it_logs_what_plain_python_logs(kind, data, plain_python, tmp_path):
    command = [SCRIPT, *flags(data, tmp_path)]
    if kind == "fsdp":  # its shards must be gathered to fill in words
        command += ["--report"]
    kill_and_resume(kind, command, tmp_path)
    if kind == "fsdp":
        assert (tmp_path / "report.txt").read_text().count("  prediction") == 3
    assert_same(logged(tmp_path), plain_python)


def test_without_pairs_ddp_gets_a_gradient_of_the_head_that_judges_them(data, tmp_path):
    options = ["--nsp", "swap", "--use_nsp", 0, "--iters", 4, "--log_interval", 1]
    start("ddp", SCRIPT, *flags(data, tmp_path), *options)
    for _, _, values in logged(tmp_path):
        assert {"accuracy_mlm", "loss", "loss_mlm"} <= values.keys()
        assert not {"accuracy_nsp", "loss_nsp"} & values.keys()
