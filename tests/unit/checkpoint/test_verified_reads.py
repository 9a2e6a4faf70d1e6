"""Of a damaged checkpoint nothing is read, whichever flag or tool names it."""

import pytest

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint import manifest
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.from_args import model_source
from lm_experiments_tools.planning.estimate import estimate_memory
from lm_experiments_tools.recipes.t5_sources import T5Sources
from lm_experiments_tools.tools import convert
from megatron.tokenizers import build_tokenizer
from tests.helpers.checkpoint_toys import flip
from tests.helpers.pretrained_toys import toy_model

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "##s"]


def started(folder, **flags):
    sizes = dict(lr=1e-3, input_seq_len=8, target_seq_len=8)
    return T5PretrainingArgs(data_path=(text(folder),), base_model=str(folder), **sizes, **flags)


def text(folder):
    file = folder.parent / "text.txt"
    file.write_text("a cat sat\n")
    return str(file)


def tokenized(folder):
    tokenize_corpus([text(folder)], folder, folder.parent / "tokens", workers=1, overwrite=True)


def converted(folder, **flags):
    to = folder.parent / "converted"
    to.mkdir(exist_ok=True)
    assert convert._save_tokenizer(convert.ConvertArgs(source=str(folder), to=str(to), **flags), to)


READERS = {
    "--tokenizer of BERT": lambda folder: build_tokenizer("HFTokenizer", name_or_path=folder),
    "--vocab_file of BERT": lambda folder: build_tokenizer("BertWordPieceCase", vocab_file=folder),
    "--vocab": lambda folder: T5Sources(started(folder, vocab=str(folder))),
    "tokenize --vocab": tokenized,
    "convert --tokenizer": lambda folder: converted(folder, tokenizer=str(folder)),
    "convert": converted,
    "--base_model": lambda folder: model_source(started(folder), LocalBackend()),
    "plan --base_model": lambda folder: estimate_memory(started(folder), PlanningArgs(device="cpu"), {}),
}


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    writer = CheckpointWriter(tmp_path / "checkpoints", None)
    folder = writer.begin(1)
    build_tokenizer("BertWordPieceCase", vocab_file=tmp_path / "vocab.txt").save(folder)
    toy_model("encoder-decoder").save_pretrained(folder)
    return writer.commit(1, is_best=False)


@pytest.mark.parametrize(
    ("reader", "file"),
    [
        ("--tokenizer of BERT", "tokenizer.json"),
        ("--vocab_file of BERT", "vocab.txt"),
        ("--vocab", "tokenizer.json"),
        ("tokenize --vocab", "tokenizer.json"),
        ("convert --tokenizer", "tokenizer.json"),
        ("convert", "tokenizer.json"),
        ("--base_model", "config.json"),
        ("plan --base_model", "config.json"),
    ],
)
def test_a_damaged_file_is_named_before_it_is_read(checkpoint, reader, file):
    READERS[reader](checkpoint)
    flip(file, 0.9)(checkpoint)
    manifest._verified.clear()
    with pytest.raises(UserError, match=f"step_000001 is damaged: the content of {file} does not match its sha256"):
        READERS[reader](checkpoint)
