"""run_bert_pretraining.py on plain text: continued by one flag, resumed to the bit, masked as its flags say."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertTokenizerFast,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.models import inherited
from lm_experiments_tools.recipes.bert import bert_tokenizer, document_datasets
from lm_experiments_tools.tools.main import main as lmtools
from megatron.preprocess_data import main as preprocess
from run_bert_pretraining import main
from tests.helpers import runs
from tests.helpers.bert_toys import TINY, documents
from tests.helpers.runs import words
from tests.helpers.token_toys import write_jsonl

MODERN = {
    "vocab_size": 640, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
    "local_attention": 16, "global_attn_every_n_layers": 3, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3,
    "bos_token_id": 2, "eos_token_id": 3, "mlp_dropout": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """train.jsonl, valid.jsonl, vocab.txt, tiny.json and the folder of a small ModernBERT with its tokenizer."""
    folder, pages = tmp_path_factory.mktemp("text"), [". ".join(page) for page in documents()]
    write_jsonl(folder / "train.jsonl", pages[:30])
    write_jsonl(folder / "valid.jsonl", pages[30:36])
    wordpiece = tokenizers.BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(pages, vocab_size=600, show_progress=False)
    wordpiece.save_model(str(folder))
    (folder / "tiny.json").write_text(json.dumps(TINY))
    torch.manual_seed(0)
    ModernBertForMaskedLM(ModernBertConfig(**MODERN)).save_pretrained(folder / "modern")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "modern")
    return folder


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags_of(data, **changed):
    named = {"from_pretrained": data / "modern"} if "model_cfg" not in changed else {"vocab_file": data / "vocab.txt"}
    return {
        "data_path": data / "train.jsonl", **named, "packing": "documents", "model_path": "run", "input_seq_len": 48,
        "batch_size": 4, "lr": 1e-3, "iters": 4, "log_interval": 1, "backend": "local", **changed,
    }  # fmt: skip


def start(data, **changed):
    main(words(**flags_of(data, **changed)))


def refused(data, sentence, **changed):
    runs.refused(start, sentence, data, **changed)


def weights(run="run"):
    return load_file(Path(run, "last", "model.safetensors"))


def parsed(data, **changed):
    return parse(BertPretrainingArgs, words(**flags_of(data, **changed)), inherit=inherited.of_bert)[0]


def datasets(data, **changed):
    """(training rows, validation rows)"""
    args = parsed(data, **changed)
    return document_datasets(args, bert_tokenizer(args))


def test_a_folder_is_continued_by_one_flag_and_validated_as_by_transformers(data, work):
    flags = {"valid_data_path": data / "valid.jsonl", "valid_mlm_prob": 0.3}
    start(data, valid_at_start=True, valid_interval=4, **flags)
    original = ModernBertForMaskedLM.from_pretrained(data / "modern")
    trained = AutoModelForMaskedLM.from_pretrained("run/last")
    assert isinstance(trained, ModernBertForMaskedLM) and not torch.equal(trained.decoder.bias, original.decoder.bias)
    text = "the value of a name"
    assert AutoTokenizer.from_pretrained("run/last")(text) == AutoTokenizer.from_pretrained(data / "modern")(text)
    rows = datasets(data, **flags)[1]
    batch = {name: torch.from_numpy(values) for name, values in rows.batch(np.arange(len(rows))).items()}
    for model, line in ((original, 0), (trained, -1)):
        total, count = 0.0, 0
        for ids, labels, segments in zip(*(batch[n] for n in ("input_ids", "labels", "segment_ids")), strict=True):
            for number in range(1, int(segments.max()) + 1):  # each document alone
                where = segments == number
                with torch.no_grad():
                    logits = model.eval()(input_ids=ids[where][None]).logits[0]
                total += cross_entropy(logits, labels[where], reduction="sum").item()
                count += int((labels[where] >= 0).sum())
        assert runs.records("run", "valid")[line]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert count == pytest.approx(0.3 * int((batch["input_ids"] >= 4).sum()), rel=0.1)  # 4 is [MASK]


@pytest.mark.parametrize(
    "flags",
    [
        {"packing": "stream", "mlm_prob": 0.4, "mask_replace": (1, 0, 0)},
        {"packing": "none", "whole_word": True, "min_document_length": 600},
        {"reproducible": "elastic", "virtual_ranks": 2},
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(data, work, flags):
    start(data, model_path="whole", **flags)
    start(data, model_path="parts", save_interval=1, **{**flags, "iters": 2})
    start(data, model_path="parts", save_interval=1, **flags)
    whole, parts = weights("whole"), weights("parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert runs.losses("whole") == runs.losses("parts")


def test_berts_read_packed_text_with_masked_positions_only(data, work, monkeypatch):
    model_cls = "modeling_bert:BertForMaskedLM"
    scored = runs.scored_tokens(monkeypatch, TINY["vocab_size"])
    start(data, model_cfg=data / "tiny.json", model_cls=model_cls, iters=2)
    assert max(scored[-2:]) < 4 * 48 / 2, "all masked tokens and six standard deviations"
    losses = [loss for _, loss in runs.losses("run")]
    start(data, model_cfg=data / "tiny.json", model_cls=model_cls, iters=2, mlm_positions="all", model_path="all")
    assert [loss for _, loss in runs.losses("all")] == pytest.approx(losses, rel=1e-5)


def test_texts_and_token_files_of_both_tools_give_the_same_rows(data, work):
    vocabulary = {"vocab": data / "modern", "append_eos": True, "workers": 1}
    lmtools(["tokenize", *words(input=data / "train.jsonl", output="own", **vocabulary)])
    preprocess(["--input", str(data / "train.jsonl"), "--output-prefix", "megatron", "--tokenizer-type",
                "HFTokenizer", "--tokenizer-name-or-path", str(data / "modern"), "--split-sentences"])  # fmt: skip
    found = [datasets(data, data_path=path)[0] for path in (data / "train.jsonl", "own", "megatron_text_sentence")]
    found.append(datasets(data, model_cfg=data / "tiny.json")[0])  # and by vocab.txt
    expected = found[0].batch(np.arange(50))
    for rows in found[1:]:
        assert all((values == expected[name]).all() for name, values in rows.batch(np.arange(50)).items())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"use_nsp": 1}, "--packing documents has no pairs of sentences: leave --use_nsp out"),
        ({"max_ngram": 2}, "--max_ngram is about Megatron's samples, not --packing documents"),
        ({"mask_replace": (0.8, 0.1)}, "--mask_replace 0.8 0.1 must be three parts that sum to 1"),
        ({"from_pretrained": "./nowhere"}, "--from_pretrained ./nowhere: there is no such file or folder"),
        ({"packing": None, "use_nsp": 0}, "train.jsonl is text; give --packing documents"),
        ({"min_document_length": 10**6}, r"no document of 1000000 tokens or more \(30 shorter than 1000000\)"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(data, work, flags, sentence):
    refused(data, sentence, **flags)


def test_a_class_that_cannot_isolate_documents_trains_on_one_document_a_row(data, work):
    config = {
        "model_type": "fnet", "vocab_size": 640, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
        "tpu_short_seq_length": 48, "pad_token_id": 0,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    Path("run.yaml").write_text("packing: none\n")  # a word that is null for other flags
    flags = {"model_cfg": "config.json", "model_cls": "transformers:FNetForMaskedLM", "iters": 1}
    refused(data, "--packing documents: FNetForMaskedLM cannot keep .*--packing none", **flags)
    shutil.rmtree("run")
    start(data, packing=None, config="run.yaml", **flags)
    assert json.loads(Path("run/config.json").read_text())["packing"] == "none"
