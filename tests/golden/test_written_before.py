"""What an earlier state of the code wrote is read by this one: token files, run directories, adapters.

tests/fixtures/make_before.py wrote it. On a machine like the one it ran on, continued and repeated runs give the
recorded losses and weights to the bit; on others the losses agree as closely as those of test_pretraining_golden.py.
"""

import functools
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.numpy import load_file

import run_bert_pretraining
import run_finetuning
import run_t5_pretraining
from lm_experiments_tools import FineTuner, IndexedDataset, Vocabulary
from lm_experiments_tools.tools.main import main as lmtools
from megatron.preprocess_data import main as preprocess_data

BEFORE = Path(__file__).resolve().parents[1] / "fixtures" / "before"
SAVED, MORE, SCRATCH = 3, 6, 6  # updates: up to the checkpoint, after it, of a run from its beginning
ENDS = ("--iters", str(SAVED + MORE))
RUNS = {
    "t5": run_t5_pretraining.main,
    "bert": run_bert_pretraining.main,
    "finetuned": run_finetuning.main,
    "lora": run_finetuning.main,
}
FINETUNED = ("finetuned", "lora")
ONE_BUCKET = "--bucket_rows=4"  # what no --bucket_rows meant before --mix_rows: all rows of a step
PLAIN = "--speed=off"  # as before the flag; a run that is continued needs no telling
ALL_POSITIONS = "--mlm_positions=all"  # as before the flag; a run that is continued needs no telling
OBJECTIVES = {
    "span_corruption": ("--model_cfg=t5.json", "--target_seq_len=16"),
    "prefix_lm": ("--model_cfg=t5.json", "--target_seq_len=32", ONE_BUCKET),
    "ul2": ("--model_cfg=t5.json", "--target_seq_len=32", ONE_BUCKET, "--denoisers", "R:3:0.15", "X:3:0.5", "S:0.25"),
    "causal_lm": ("--model_cfg=t5.json",),
    "mlm": ("--model_cfg=bert.json", "--model_cls=transformers:BertForMaskedLM", ALL_POSITIONS),
}
PREFIXES = ("tokens", "data_text_sentence")
TOKENIZE = ("tokenize", "--input=text.jsonl", "--vocab=vocab.model", "--workers=1")
PREPROCESS = (
    "--input=text.jsonl", "--split-sentences", "--sentence-splitter=newline", "--vocab-file=vocab.txt",
    "--tokenizer-type=BertWordPieceLowerCase",
)  # fmt: skip
FINETUNER = {"valid_data_path": "pairs.jsonl", "input_seq_len": 16, "target_seq_len": 8, "metrics": "exact_match"}
TEXTS = ["word1 number7 token1", "word30 number8 token4", "word9"]


def machine() -> dict[str, str | int | bool]:
    """What decides the bits of a sum, besides this project."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "threads": torch.get_num_threads(),
        "processor": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
    }


def digest(*parts: bytes) -> str:
    """SHA-256 of the parts, one after the other."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def tokens_of(prefix: str) -> str:
    """SHA-256 of a token file's sequences, with their lengths."""
    tokens = IndexedDataset(prefix)
    return digest(*(part for row in tokens for part in (str(len(row)).encode(), row.astype("<i8").tobytes())))


def record(run: str, after: int = 0) -> dict[str, str]:
    """Losses and metrics logged by a run in later updates than `after`, as hexadecimal floats; hash of its weights."""
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    found = {
        f"{line['split']} {line['step']} {name}": float(line[name]).hex()
        for line in lines
        if line["step"] > after
        for name in line["metrics"]
        if name != "bits_per_byte"  # newer than the records
    }
    (file,) = Path(run, "last").glob("*model.safetensors")
    weights = [part for name, value in sorted(load_file(file).items()) for part in (name.encode(), value.tobytes())]
    return {**found, "weights": digest(*weights)}


def repeat(run: str, *flags: str) -> None:
    """Run a script again with the settings that the run directory recorded, some of them changed."""
    RUNS[run](["--config", f"{run}/config.yaml", *flags])


def hashed_batches(task: str) -> list[str]:
    """SHA-256 of what each forward pass in training mode gets in three updates of a run of this objective."""
    model_cls = transformers.BertForMaskedLM if task == "mlm" else transformers.T5ForConditionalGeneration
    forward, found = model_cls.forward, []

    @functools.wraps(forward)
    def hashing(self, *args, **kwargs):
        tensors = {name: value for name, value in sorted(kwargs.items()) if isinstance(value, torch.Tensor)}
        head = json.dumps([(name, [*value.shape]) for name, value in tensors.items()]).encode()
        if self.training and torch.is_grad_enabled():  # not passes that count operations or valid labels
            found.append(digest(head, *(value.to(torch.int64).numpy().tobytes() for value in tensors.values())))
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_cls, "forward", hashing)
        run_t5_pretraining.main([
            "--data_path=tokens", f"--task={task}", *OBJECTIVES[task], "--input_seq_len=32", "--batch_size=4",
            "--lr=1e-3", "--iters=3", "--backend=local", "--speed=off",
        ])  # fmt: skip
    return found


def predictions(run: str) -> dict[str, str]:
    """Texts that the saved model writes, and its loss on the validation pairs."""
    tuner = FineTuner(run, **FINETUNER, speed="off")
    found = dict(zip(TEXTS, tuner.predict(TEXTS), strict=True))
    return {**found, "valid loss": tuner.evaluate()["loss"].hex()}


@pytest.fixture
def expected(tmp_path, monkeypatch):
    """The recorded values; a copy of the files is the current folder, where paths in them start from."""
    shutil.copytree(BEFORE, tmp_path, dirs_exist_ok=True, symlinks=True)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "bert_samples").rename(tmp_path / ".cache" / "bert_samples")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield json.loads((tmp_path / "expected.json").read_text())
    torch.set_num_threads(threads)


def assert_same(found, recorded, where):
    """Bit for bit on the recorded machine. Elsewhere, and on one that only shares its processor's name, losses are
    close, if dropout draws the same there, and a skip says that bits were not compared."""
    assert found.keys() == recorded.keys()
    here = machine()
    if here == where and found == recorded:
        return
    if here["mkl"] == where["mkl"]:
        losses = [name for name in recorded if "loss" in name]
        ours, theirs = ([float.fromhex(values[name]) for name in losses] for values in (found, recorded))
        assert ours == pytest.approx(theirs, abs=5e-4)
    other = ["same name, other bits"] if here == where else []
    other += [f"{name} {here[name]!r}, recorded on {where[name]!r}" for name in where if here[name] != where[name]]
    pytest.skip(f"bits not compared: {'; '.join(other)}")


def test_token_files(expected):
    assert {prefix: tokens_of(prefix) for prefix in PREFIXES} == expected["tokens"]
    texts = [json.loads(line)["text"].replace("\n", " ") for line in Path("text.jsonl").open()]
    vocabulary, tokens = Vocabulary.load("vocab.model"), IndexedDataset("tokens")
    assert [vocabulary.decode(row) for row in tokens] == texts


def test_the_same_text_gives_the_same_token_files(expected):
    assert lmtools([*TOKENIZE, "--output=again"]) == 0
    preprocess_data([*PREPROCESS, "--output-prefix=again"])
    for ours, theirs in zip(("again", "again_text_sentence"), PREFIXES, strict=True):
        for suffix in (".bin", ".idx"):
            assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
        written = json.loads(Path(f"{ours}.json").read_text().replace(f"{Path.cwd()}/", ""))
        assert written.pop("fingerprint") == IndexedDataset(theirs).fingerprint
        assert written == json.loads(Path(f"{theirs}.json").read_text())


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_continued_as_if_uninterrupted(run, expected, caplog):
    caplog.set_level("INFO")
    samples = {path: path.read_bytes() for path in Path(".cache").rglob("*.*")}
    repeat(run, *ENDS)
    assert f"resumed from {run}/checkpoints/step_{SAVED:06d}" in caplog.text
    assert samples == {path: path.read_bytes() for path in Path(".cache").rglob("*.*")}
    assert_same(record(run, after=SAVED), expected["resumed"][run], expected["machine"])


@pytest.mark.parametrize("run", RUNS)
def test_a_run_from_its_beginning(run, expected):
    repeat(run, "--model_path=scratch", "--iters", str(SCRATCH), PLAIN, *([ALL_POSITIONS] if run == "bert" else []))
    assert_same(record("scratch"), expected["scratch"][run], expected["machine"])


@pytest.mark.parametrize("run", FINETUNED)
def test_a_saved_model_answers_and_is_measured(run, expected):
    assert_same(predictions(run), expected["predictions"][run], expected["machine"])


@pytest.mark.parametrize("task", OBJECTIVES)
def test_the_batches_of_an_objective(task, expected):
    assert hashed_batches(task) == expected["batches"][task]
