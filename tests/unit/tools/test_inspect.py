"""`lmtools inspect`: what it counts is what is there, what it shows is what the model gets."""

import json
import os
import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.objectives.span_corruption import SpanCorruption, random_spans_lengths
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.data.text import records as text_records
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.recipes.t5_data import build_objective, training_dataset
from lm_experiments_tools.tools.inspect_samples import Rendering, render_ids, render_sample
from lm_experiments_tools.tools.main import main
from lm_experiments_tools.training.micro_batches import split_batch
from megatron.bert_dataset import BertDataset
from megatron.tokenizers import build_tokenizer
from tests.helpers.bert_toys import make_bert_data
from tests.helpers.token_toys import write_tokens
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

LETTERS = "abcdefghij"


def letters(ids: list[int]) -> str:
    return " ".join(LETTERS[i] for i in ids)


def test_a_sample_shows_every_entry_of_the_batch():
    row = {
        "input_ids": np.array([0, 1, 9, 8]), "attention_mask": np.array([1, 1, 1, 0]),
        "labels": np.array([2, 9, -100]), "token_type_ids": np.array([0, 0, 1, 0]), "next_sentence_label": np.int64(1),
    }  # fmt: skip
    assert render_sample(row, Rendering(letters, {8: "<pad>", 9: "</s>"})) == [
        "input    4 tokens, 3 attended",
        "  a b </s> <pad>",
        "target   3 tokens, 2 of them predicted",
        "  c </s> (ignored)",
        "attention_mask: 1 x 3, 0 x 1",
        "next_sentence_label: 1",
        "token_type_ids: 0 x 2, 1 x 1, 0 x 1",
    ]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return numbered_words_vocabulary(tmp_path_factory.mktemp("vocab"))


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(5 + i))}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def inspect(vocab, *flags: str) -> int:
    given = {"--data_path": "text.jsonl", "--vocab": str(vocab)}
    words = [word for name, value in given.items() if name not in flags for word in (name, value)]
    return main(["inspect", *words, *flags])


def test_the_command_shows_the_first_samples_of_the_run(vocab, text, capsys):
    flags = "--input_seq_len 32 --target_seq_len 16 --seed 7 --batch_size 2 --world_size 3 --samples 3 --iters 20"
    assert inspect(vocab, *flags.split()) == 0
    printed = capsys.readouterr().out
    vocabulary = Tokenizer.load(vocab)
    (prefix,) = (text / ".cache" / "tokens").glob("*.idx")
    objective = SpanCorruption.create(vocabulary, 32)
    dataset = Dataset(TokenRows(IndexedDataset(str(prefix).removesuffix(".idx")), objective, seed=7))
    for row in dataset.batch(np.arange(3))["input_ids"]:
        assert f"{vocabulary.decode(row)} </s>" in printed
    assert "documents  40" in printed and f"tokens     {dataset.members[0].num_tokens:,}" in printed
    assert re.search(rf"an epoch   {len(dataset):,} examples = {len(dataset) / 6:,.1f} steps of 6 ", printed)


def test_the_settings_of_a_run_are_read_as_they_are(vocab, text, capsys):
    (text / "run.yaml").write_text(
        f"data_path: text.jsonl\nvocab: {vocab}\nmodel_cfg: nowhere.json\nmodel_path: run\nlr: 1e-3\n"
        "input_seq_len: 16\noptimizer: Adafactor\nvalidate_only: true\n"
        "valid_data_path: text.jsonl\n"
    )
    assert main(["inspect", "--config", "run.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "16 inputs" in printed and "validation: text.jsonl" in printed
    assert not (text / "run").exists()


def number_of(printed: str, name: str) -> int:
    return int(re.search(rf"{name} +([\d,]+)", printed)[1].replace(",", ""))


@pytest.fixture
def counted_reads(monkeypatch):
    """One entry for each document read."""
    read = []
    parse = text_records.parse_object
    monkeypatch.setattr(text_records, "parse_object", lambda *args: read.append(0) or parse(*args))
    return read


@pytest.mark.parametrize("flags", [[], ["--streaming"]])
def test_the_first_documents_only(vocab, text, capsys, counted_reads, flags):
    assert inspect(vocab, "--input_seq_len", "16", "--documents", "4", "--samples", "2", *flags) == 0
    printed = capsys.readouterr().out
    assert "documents  4" in printed and "sample 1" in printed
    assert len(counted_reads) == 5 and not list(text.iterdir())[1:]  # one more tells that there are more; no cache
    assert f"{number_of(printed, 'tokens'):,} training tokens" in printed
    examples = -(-number_of(printed, "tokens") // random_spans_lengths(16, 0.15, 3.0)[0])
    assert f"an epoch   of these documents has {examples:,} examples" in printed


def test_text_is_tokenized_as_the_run_tokenizes_it(vocab, text, capsys):
    """Line ends that only `str.splitlines` knows are no line ends to the run."""
    odd = "word1 token2\x0bnumber3 word4\x85token5 number6\u2028word7\nword8 "
    (text / "text.jsonl").write_text("".join(json.dumps({"text": odd * n}) + "\n" for n in range(1, 30)))
    assert inspect(vocab, "--samples", "0", "--documents", "29") == 0
    first = capsys.readouterr().out
    assert inspect(vocab, "--samples", "0") == 0
    assert first.splitlines()[1:] == capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize("task", ["causal_lm", "mlm"])
def test_mlm_says_that_its_rows_are_not_berts(vocab, text, caplog, task):
    assert inspect(vocab, "--task", task, "--input_seq_len", "16", "--samples", "1") == 0
    assert ("no [CLS] and [SEP]" in caplog.text) == (task == "mlm")


@pytest.mark.parametrize("task", ["prefix_lm", "span_corruption", "mlm"])
def test_samples_and_padding_are_those_of_the_micro_batches_of_the_run(vocab, text, capsys, task):
    """Against loaders of every worker and the loop's own cutting."""
    flags = f"--task {task} --input_seq_len 48 --seed 5 --batch_size 3 --gradient_accumulation_steps 2".split()
    assert inspect(vocab, *flags, "--samples", "5", "--world_size", "4") == 0
    printed = capsys.readouterr().out
    (prefix,) = (str(path).removesuffix(".idx") for path in (text / ".cache" / "tokens").glob("*.idx"))
    args, _ = parse(T5PretrainingArgs, ["--data_path", prefix, "--model_cfg", "x", "--lr", "1", *flags])
    vocabulary = Tokenizer.load(vocab)
    objective = build_objective(args, vocabulary, args.objective().models[0])
    dataset = training_dataset(args, objective, [IndexedDataset(prefix)], world_size=4)
    has_decoder = task != "mlm"
    cells = {"inputs": [0, 0], "targets": [0, 0]}
    first, passes = {}, []
    loaders = [TrainLoader(dataset, 6, rank, 4, prefetch=False) for rank in range(4)]
    for step in range(8):
        own = [next(loader) for loader in loaders]
        steps = [split_batch(b, 3, set(b), torch.device("cpu"), has_decoder, ("labels",), args.trim_to()) for b in own]
        passes += [[worker[m] for worker in steps] for m in range(2)]
        for rank in range(4 if step == 0 else 0):
            first |= {4 * row + rank: (rank, steps[rank][0].batch, row) for row in range(3)}
    wanted = min(64, -(-len(dataset) // 3))
    for micro_batch in [m for workers in passes for m in workers][:wanted]:
        batch = micro_batch.batch
        for name, used in (("inputs", batch["attention_mask"]), ("targets", batch["labels"] != -100)):
            cells[name][0] += int(used.sum())
            cells[name][1] += used.numel()
    inputs = 1 - cells["inputs"][0] / cells["inputs"][1]
    assert f"padding    {inputs:.2%} of the inputs" in printed
    if task == "mlm":
        assert f"{cells['targets'][0] / cells['inputs'][0]:.2%} of the other tokens are to be predicted" in printed
        return
    assert f"{1 - cells['targets'][0] / cells['targets'][1]:.2%} of the targets" in printed
    assert f"on {wanted} micro-batches of 3 rows" in printed
    shown = {0: "<pad>", 1: "</s>", 2: "<unk>", -100: "(ignored)"}
    for number in range(5):
        rank, batch, row = first[number]
        text = printed.split(f"sample {number} (worker {rank})\n")[1]
        lines = text.split("\n\nsample")[0]
        attended = int(batch["attention_mask"][row].sum())
        assert f"input    {batch['input_ids'].shape[1]} tokens, {attended} attended" in lines
        assert f"target   {batch['labels'].shape[1]} tokens" in lines
        for name in ("input_ids", "labels"):
            assert render_ids(batch[name][row].numpy(), vocabulary.decode, shown) in lines
    if task == "prefix_lm":
        assert inputs < 0.35 and first[0][1]["labels"].shape[1] < 48


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return make_bert_data(tmp_path_factory.mktemp("bert"))


def inspect_bert(bert, *flags: str) -> int:
    given = {"--data_path": bert / "train", "--vocab_file": bert / "vocab.txt", "--input_seq_len": 32}
    words = [str(word) for name, value in given.items() if name not in flags for word in (name, value)]
    return main(["inspect", "pretrain-bert", *words, *flags])


def flip_a_bit(path) -> None:
    """The lowest bit of the first id, which stays inside the vocabulary; times as before, as `rsync -t` gives them."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(path, ns=times)


def test_a_flipped_bit_is_one_sentence(vocab, text, capsys):
    tokenize_corpus(["text.jsonl"], vocab, "tokens", workers=1)
    small = ["--data_path", "tokens", "--samples", "0"]
    assert inspect(vocab, *small) == 0
    flip_a_bit(text / "tokens.bin")
    assert inspect(vocab, *small) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: tokens\.bin was changed after it was written: its sha256 is \w+, not \w+ as rec", error)


@pytest.mark.parametrize("nsp", ["swap", "random"])
def test_bert_shows_the_first_samples_of_the_run(bert, tmp_path, monkeypatch, capsys, caplog, nsp):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    flags = ["--batch_size", "4", "--world_size", "2", "--samples", "6", "--seed", "3", "--nsp", nsp]
    assert inspect_bert(bert, *flags) == 0
    printed = capsys.readouterr().out
    tokens = IndexedDataset(bert / "train")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=bert / "vocab.txt")
    dataset = Dataset(BertDataset(tokens, tokenizer, max_seq_length=32, nsp=nsp, seed=3, cache_dir=tmp_path))
    assert (number_of(printed, "documents"), number_of(printed, "sentences")) == (tokens.num_documents, len(tokens))
    lengths = sorted(tokens.sequence_lengths.tolist())
    assert re.search(
        rf"min {lengths[0]} .*median {lengths[(len(lengths) - 1) // 2]} .*\(tokens of a sentence\)", printed
    )
    assert f"{100 * np.mean(tokens.tokens == tokenizer.unk_id):.2f} % of the tokens are unknown" in caplog.text
    assert re.search(rf"an epoch   {len(dataset):,} examples = {len(dataset) / 8:,.1f} steps of 8 ", printed)
    whole = dataset.batch(np.arange(64 * 4))
    assert f"padding    {np.mean(whole['attention_mask'] == 0):.2%} of the inputs" in printed
    for number in range(6):
        lines = printed.split(f"sample {number} (worker {number % 2})\n")[1].split("\n\nsample")[0]
        words = re.findall(r"\[(\S+) -> (\S+)\]", lines.partition("target ")[0])
        labels = whole["labels"][number]
        predicted = np.flatnonzero(labels != -100)
        assert [word for _, word in words] == [tokenizer.decode([i]) for i in labels[predicted]]
        inputs = whole["input_ids"][number][predicted]
        assert [word == "MASK" for word, _ in words] == (inputs == tokenizer.mask_id).tolist()
        label = whole["next_sentence_label"][number]
        assert f"next_sentence_label: {label}" in lines
        assert f"token_type_ids: 0 x {np.argmax(whole['token_type_ids'][number])}, 1 x" in lines
    assert {0, 1} == set(whole["next_sentence_label"][:6].tolist())


def test_bert_shows_what_is_not_read_of_data_that_training_refuses(bert, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokens = IndexedDataset(bert / "train")
    bounds = pairwise(tokens.document_indices.tolist())
    documents = [[np.concatenate([tokens[index] for index in range(*pair)])] for pair in bounds]  # one sequence each
    meta = tokens.meta | {"level": "document", "num_sequences": len(documents)}
    write_tokens("whole", documents, tokens.dtype, meta)
    lengths = IndexedDataset("whole").sequence_lengths
    unread = np.maximum(lengths - 30, 0).sum() / lengths.sum()
    assert inspect_bert(bert, "--data_path", "whole", "--use_nsp", "0") == 0
    printed = capsys.readouterr().out
    assert unread > 0.9 and f"{unread:.2%} of the tokens of whole fit in no sample" in printed
    assert "more than --max_unread 0.75, so that training refuses it" in printed
    assert inspect_bert(bert, "--input_seq_len", "48") == 0
    assert "training refuses" not in capsys.readouterr().out
