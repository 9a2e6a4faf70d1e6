"""Rows of documents: every token once an epoch, rows nearly full, the same whatever asks for them."""

import numpy as np
import pytest

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.objectives.document_rows import DocumentRows
from lm_experiments_tools.data.objectives.mlm import MaskedLM
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.packing import pack_counts
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import token_data

CLS, SEP, PAD = 1, 2, 0


def made_up(count: int, longest: int = 90, seed: int = 0) -> list[np.ndarray]:
    """Documents of unique tokens, so that each can be found again."""
    lengths = np.random.default_rng(seed).integers(1, longest, count)
    return np.split(np.arange(10, 10 + lengths.sum()), np.cumsum(lengths)[:-1])


def objective_of(width=32, vocab_size=100_000, mlm_probability=0.0):
    ids = TokenIds(vocab_size, PAD, mask_id=3)
    return MaskedLM.create(ids, width, model_kind="encoder", mlm_probability=mlm_probability)


def rows_of(tmp_path, documents, width=32, **options):
    """Rows in which no token is masked."""
    tokens = token_data(tmp_path / "tokens", [[document] for document in documents], dtype=np.int32)
    return DocumentRows(tokens, objective_of(width), cls_id=CLS, sep_id=SEP, **options)


def chunks_of(batch):
    """The segments of all rows of a batch, as lists."""
    numbers = batch.get("segment_ids", batch["attention_mask"])
    return [
        row[segments == number].tolist()
        for row, segments in zip(batch["input_ids"], numbers, strict=True)
        for number in range(1, segments.max() + 1)
    ]


def expected_chunks(documents, room, shortest=1):
    """[CLS] chunk [SEP] of each document, cut from its beginning on."""
    return sorted(
        [CLS, *document[start : start + room].tolist(), SEP]
        for document in documents
        if len(document) >= shortest
        for start in range(0, len(document), room)
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shortest", [1, 20])
def test_every_token_of_a_document_is_in_one_row_of_each_epoch(tmp_path, packed, shortest):
    documents = made_up(400)
    rows = rows_of(tmp_path, documents, packed=packed, min_length=shortest)
    wanted, epochs = expected_chunks(documents, 30, shortest), []
    for epoch in range(3):
        batch = Dataset(rows).batch(epoch * len(rows) + np.arange(len(rows)))
        assert sorted(chunks_of(batch)) == wanted
        assert (batch["input_ids"][batch["attention_mask"] == 0] == PAD).all()
        assert rows.fill == pytest.approx(batch["attention_mask"].mean())
        epochs.append([tuple(row) for row in batch["input_ids"].tolist()])
    assert sum(a == b for a, b in zip(*epochs[:2], strict=True)) < len(rows) / 10, "rows come in another order"
    assert (set(epochs[0]) != set(epochs[1])) == packed, "other documents share a row"


def test_the_end_of_a_document_that_the_file_has_is_no_text(tmp_path):
    documents = [np.append(document, SEP) for document in made_up(50)]
    rows = rows_of(tmp_path, documents, has_end=True)
    found = chunks_of(Dataset(rows).batch(np.arange(len(rows))))
    assert sorted(found) == expected_chunks([document[:-1] for document in documents], 30)


@pytest.mark.parametrize("width", [64, 512, 1024])
def test_rows_of_documents_like_those_of_the_web_are_full(width):
    """Lengths of web pages are about log-normal."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.3, 20_000).astype(int) + 1
    rest = lengths % (width - 2)
    counts = np.bincount(rest[rest > 0] + 2, minlength=width + 1)
    counts[width] += (lengths // (width - 2)).sum()
    patterns = pack_counts(counts, width)
    of_each = np.repeat(patterns.counts, patterns.sizes)
    assert (np.bincount(patterns.lengths, of_each, minlength=width + 1) == counts).all()
    ends = np.cumsum(patterns.sizes)
    used = np.add.reduceat(patterns.lengths, ends - patterns.sizes)
    assert used.max() <= width
    assert (used * patterns.counts).sum() / (patterns.counts.sum() * width) > 0.995


def test_a_row_is_a_function_of_its_number_whatever_the_batch(tmp_path):
    rows = rows_of(tmp_path, made_up(200), width=48)
    count = 2 * len(rows) + 5
    whole = Dataset(rows).batch(np.arange(count))
    backwards = Dataset(rows).batch(np.arange(count)[::-1])
    for name, values in whole.items():
        assert (values == backwards[name][::-1]).all()
    assert rows_of(tmp_path, made_up(200), width=48).fingerprint == rows.fingerprint


def test_settings_that_change_rows_change_the_fingerprint(tmp_path):
    documents = made_up(20)
    prints = [
        rows_of(tmp_path, documents, **options).fingerprint
        for options in ({}, {"width": 33}, {"packed": False}, {"min_length": 5}, {"has_end": True}, {"seed": 1})
    ]
    assert len(set(prints)) == len(prints)


def test_documents_that_are_too_short_and_ids_of_another_vocabulary_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"no document of 100 tokens or more \(5 shorter than 100\).*--min_document_length"
    ):
        rows_of(tmp_path, made_up(5), min_length=100)
    rows = rows_of(tmp_path, made_up(5))
    with pytest.raises(UserError, match="tokenized with another vocabulary"):
        DocumentRows(rows.tokens, objective_of(vocab_size=20), cls_id=CLS, sep_id=SEP)
