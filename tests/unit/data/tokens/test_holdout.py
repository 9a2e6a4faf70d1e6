"""Documents held out for validation: by their content, the same ones at each start."""

import hashlib
import random

import numpy as np
import pytest

from lm_experiments_tools.data.tokens.holdout import hold_out
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import write_tokens

DRAW = random.Random(1)
DOCUMENTS = [[[DRAW.randrange(900) for _ in range(DRAW.randrange(1, 9))] for _ in range(3)] for _ in range(1000)]
META = {"vocab_sha256": "v", "append_eos": True, "num_bytes": 5}


def documents_of(prefix):
    data = IndexedDataset(prefix)
    bounds = data.document_indices
    return [[data[i].tolist() for i in range(bounds[n], bounds[n + 1])] for n in range(data.num_documents)]


def split(folder, *groups, fraction=0.2, dtype=np.uint16):
    found = [IndexedDataset(write_tokens(folder / f"t{n}", group, dtype, META)) for n, group in enumerate(groups)]
    prefixes, held_out = hold_out(found, fraction, folder / "cache")
    return [documents_of(prefix) for prefix in prefixes], documents_of(held_out)


def test_each_document_is_on_one_side_by_the_hash_of_its_tokens(tmp_path):
    (train,), held_out = split(tmp_path, DOCUMENTS)

    def is_held_out(document):
        content = np.array(sum(document, []), np.int64).tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") < 0.2 * 2**64

    assert held_out == [document for document in DOCUMENTS if is_held_out(document)]
    assert train == [document for document in DOCUMENTS if not is_held_out(document)]
    assert 160 < len(held_out) < 240


def test_neither_order_nor_other_documents_nor_the_width_of_ids_change_the_side(tmp_path):
    _, held_out = split(tmp_path, DOCUMENTS)
    shuffled = DRAW.sample(DOCUMENTS, 1000)
    trains, again = split(tmp_path / "more", shuffled[:300], [*shuffled[300:], [[1, 2, 3]]], dtype=np.int32)
    assert sorted(again) == sorted(held_out + ([[[1, 2, 3]]] if [[1, 2, 3]] in again else []))
    assert len(trains) == 2 and not [document for train in trains for document in train if document in held_out]


def test_the_copy_is_made_once_and_records_what_holds_for_it(tmp_path):
    data = [IndexedDataset(write_tokens(tmp_path / "t", DOCUMENTS, np.uint16, META))]
    (prefix,), held_out = hold_out(data, 0.2, tmp_path / "cache")
    copy = IndexedDataset(prefix)
    assert copy.meta["vocab_sha256"] == "v" and copy.meta["append_eos"] and "num_bytes" not in copy.meta
    assert copy.check_content()
    stamp = copy.bin_path.stat().st_mtime_ns
    assert hold_out(data, 0.2, tmp_path / "cache") == ([prefix], held_out)
    assert copy.bin_path.stat().st_mtime_ns == stamp
    assert hold_out(data, 0.3, tmp_path / "cache")[1] != held_out


@pytest.mark.parametrize(
    ("fraction", "sentence"), [(1e-9, "holds out none of the 1000"), (1 - 1e-9, "leaves none of")]
)
def test_a_side_without_documents_is_refused(tmp_path, fraction, sentence):
    with pytest.raises(UserError, match=sentence):
        split(tmp_path, DOCUMENTS, fraction=fraction)
    assert not any((tmp_path / "cache").iterdir())
