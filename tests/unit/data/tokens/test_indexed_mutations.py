"""Thousands of seeded mutations of token files and of JSON lines: the right content, or a sentence; nothing else.

The oracles here read the formats anew, from their definitions, in plain Python. They are exact: what they call good
has to open with just this content, and what they call bad has to be refused.
"""

import itertools
import json
import random
import struct
import sys
from collections import Counter

import pytest

from lm_experiments_tools.data.text.records import BadRecord, Record, read_shard
from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import encode_shard
from lm_experiments_tools.errors import UserError
from megatron.encoding import EncodingArgs, SentenceEncoder
from tests.helpers.token_toys import read_documents, write_tokens

MUTATIONS_PER_FILE = 250
# code of the format -> (bytes, struct character); the others of the format are floating point
DTYPES = {1: (1, "B"), 2: (1, "b"), 3: (2, "h"), 4: (4, "i"), 5: (8, "q"), 8: (2, "H")}
NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def oracle(idx: bytes, tokens: bytes, meta: dict):
    """(dtype, documents as lists of sequences of ids) of a pair of files, or None where the numbers do not add up."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\x00\x00":
        return None
    version, code, n, d = struct.unpack("<QBQQ", idx[9:34])
    if version != 1 or code not in DTYPES or len(idx) not in (34 + 12 * n + 8 * d, 34 + 13 * n + 8 * d) or d == 0:
        return None
    size, character = DTYPES[code]
    lengths = struct.unpack(f"<{n}i", idx[34 : 34 + 4 * n])
    pointers = struct.unpack(f"<{n}q", idx[34 + 4 * n : 34 + 12 * n])
    bounds = struct.unpack(f"<{d}q", idx[34 + 12 * n : 34 + 12 * n + 8 * d])
    position = 0
    for length, pointer in zip(lengths, pointers, strict=True):
        if length < 0 or pointer != position:
            return None
        position += length * size
    ordered = all(a <= b for a, b in itertools.pairwise(bounds))
    if position != len(tokens) or bounds[0] != 0 or bounds[-1] != n or not ordered:
        return None
    sequences = [
        list(struct.unpack(f"<{length}{character}", tokens[pointer : pointer + length * size]))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    documents = [sequences[a:b] for a, b in itertools.pairwise(bounds)]
    facts = {"dtype": NAMES[code], "num_documents": len(documents), "num_tokens": len(tokens) // size}
    return None if any(meta.get(key, value) != value for key, value in facts.items()) else (NAMES[code], documents)


def mutate(rng: random.Random, content: bytes, edges: list[int]) -> bytes:
    """One to three edits: bits, bytes, 8-byte numbers, cuts, insertions, copies of a part elsewhere."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.choice(edges) if edges and rng.random() < 0.5 else rng.randrange(len(content) + 1)
        at = min(at, max(len(content) - 1, 0))
        kind = rng.randrange(7)
        if not content or kind == 0:
            content[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 33)))
        elif kind == 1:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            content[at] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 127, 128, 255, rng.randrange(256)))
        elif kind == 3:
            number = rng.choice((0, 1, 2, 7, -1, -2, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63), rng.getrandbits(62)))
            content[at : at + 8] = struct.pack("<q", number)
        elif kind == 4:
            del content[at : at + rng.choice((1, 1, 2, 4, 8, 12, 1000))]
        elif kind == 5:
            source = rng.randrange(len(content))
            content[at : at + 8] = content[source : source + 8]
        else:
            del content[rng.randrange(len(content)) :]
    return bytes(content)


FILES = {
    "sentences": ([[[5, 6, 7], [8]], [[65535, 9], [], [10, 11]]], "uint16", {}),
    "empty documents": ([[], [[1, 2]], [], [[3]], []], "int32", {}),
    "modes": ([[[1], [2, 3]], [[4]]], "uint16", {}),
    "sidecar": ([[[500, 6]], [[7, 8], [9]]], "uint16", {"dtype": "uint16", "num_documents": 2, "num_tokens": 5}),
    "no tokens": ([], "int32", {}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mutated_token_file_is_refused_in_a_sentence_or_opens_to_what_it_says(tmp_path, name):
    documents, dtype, meta = FILES[name]
    rng = random.Random(name)
    prefix = tmp_path / "x"
    write_tokens(prefix, documents, dtype, meta or None)
    idx, tokens = (tmp_path / "x.idx").read_bytes(), (tmp_path / "x.bin").read_bytes()
    idx += bytes(sum(map(len, documents))) if name == "modes" else b""
    # 9 magic, 8 version, 1 dtype, 8 sequences, 8 documents, then numbers of 4 and 8 bytes
    edges = [0, 8, 9, 17, 17, 17, 18, 26, 33, 34, *range(34, len(idx), 4)]
    outcomes = Counter()
    for number in range(MUTATIONS_PER_FILE + 1):
        index, content = idx, tokens
        if number:  # the first is the file itself
            which = rng.random()
            index = mutate(rng, idx, edges) if which < 0.85 else idx
            content = mutate(rng, tokens, []) if which > 0.75 else tokens
        (tmp_path / "x.idx").write_bytes(index)
        (tmp_path / "x.bin").write_bytes(content)
        expected = oracle(index, content, meta)
        try:
            dataset = IndexedDataset(prefix)
        except UserError as error:
            assert expected is None, (number, index, content, error)
            assert "\n" not in str(error) and str(tmp_path) in str(error)
            outcomes["refused"] += 1
            continue
        assert expected is not None, (number, index, content)
        sequences = [dataset[i].tolist() for i in range(len(dataset))]
        bounds = dataset.document_indices.tolist()
        found = [sequences[a:b] for a, b in itertools.pairwise(bounds)]
        assert (dataset.dtype.name, found) == expected
        assert dataset.num_documents == len(found) and dataset.num_tokens == sum(map(len, sequences))
        outcomes["opened"] += 1
    assert outcomes["refused"] > 100 and outcomes["opened"] > 3, outcomes


def test_a_mutated_sidecar_is_refused_or_contradicts_nothing(tmp_path):
    documents, dtype, meta = FILES["sidecar"]
    write_tokens(tmp_path / "x", documents, dtype, meta)
    good = (tmp_path / "x.json").read_bytes()
    rng = random.Random(5)
    outcomes = Counter()
    for _ in range(200):
        bad = mutate(rng, good, [])
        (tmp_path / "x.json").write_bytes(bad)
        try:
            found = IndexedDataset(tmp_path / "x").meta
        except UserError as error:
            assert "x.json" in str(error) and "\n" not in str(error)
            outcomes["refused"] += 1
        else:
            assert found == json.loads(bad) and all(found.get(key, value) == value for key, value in meta.items())
            outcomes["opened"] += 1
    assert outcomes["refused"] > 100 and outcomes["opened"] > 3, outcomes


# JSON lines

RECORDS = [
    {"text": "one two. three"},
    {"id": 7, "text": "four \u00e9\U0001f600 five", "meta": {"text": 1}},
    {"text": ["six.", "", "seven"]},
    {"text": "eight\nnine\u2028ten"},
    {"text": "eleven", "other": [1, 2.5, None, True]},
]
SPLICES = [b"\n", b"\r", b'"', b"\\", b"\\u0000", b"\\ud83d", b"\x00", b"\xff", b"{", b"}", b"[", b"]", b",", b":"]
SPLICES += [b"null", b"1e999", b"\xef\xbb\xbf", b"\n\n", b'\n{"text": "new"}\n', b"NaN", b"\xe2\x80", b'"text"', b" "]


def mutate_lines(rng: random.Random, content: bytes) -> bytes:
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(content))
        kind = rng.randrange(6)
        if kind == 0:
            content[at] = rng.randrange(256)
        elif kind == 1:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del content[at : at + rng.choice((1, 1, 3, 20))]
        elif kind == 3:
            content[at:at] = rng.choice(SPLICES)
        elif kind == 4:
            content[at : at + 1] = rng.choice(SPLICES)
        else:
            start = rng.randrange(len(content))
            content[at:at] = content[start : start + 30]
        content = content or bytearray(b"\n")
    return bytes(content)


def line_oracle(line: bytes, lists: bool):
    """The sentences of a line (a string is one), or None for a bad line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    value = record.get("text") if isinstance(record, dict) else None
    parts = value if isinstance(value, list) and lists else [value]
    for part in parts:
        if not isinstance(part, str) or "\0" in part or any(0xD800 <= ord(character) < 0xE000 for character in part):
            return None
    return parts


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    letters = "abcdefghijklmnopqrstuvwxyz"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]))
    args = EncodingArgs(
        tokenizer_type="BertWordPieceLowerCase",
        vocab_file=str(path),
        split_sentences=True,
        sentence_splitter="newline",
    )
    return SentenceEncoder(args)


def encoded(encoder, path):
    """(documents as lists of sequences, numbers of the bad lines) as preprocess_data.py would write them."""
    (shard,) = plan_shards([str(path)])
    prefix, listed = str(path.with_suffix("")), path.with_suffix(".bad.jsonl")
    encode_shard(shard, prefix, encoder, sys.maxsize)
    bad = [json.loads(line)["line"] for line in listed.read_text().splitlines()] if listed.exists() else []
    return read_documents(f"{prefix}-0"), bad


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_of_mutated_json_lines_every_bad_one_is_named_and_every_good_one_kept(tmp_path, encoder, ensure_ascii):
    rng = random.Random(f"lines {ensure_ascii}")
    good = "".join(json.dumps(record, ensure_ascii=ensure_ascii) + "\n" for record in RECORDS * 2).encode()
    path = tmp_path / "data.jsonl"
    outcomes = Counter()
    for number in range(150):
        content = mutate_lines(rng, good) if number else good
        path.write_bytes(content)
        lines = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
        lines = [(n, line) for n, line in lines if line.strip()]

        # as preprocess_data.py reads them
        oracle_sentences = [(n, line_oracle(line, lists=True)) for n, line in lines]
        texts = [parts for _, parts in oracle_sentences if parts is not None]
        expected = []
        for line, (_, parts) in zip(lines, oracle_sentences, strict=True):
            if parts is not None:
                whole = isinstance(json.loads(line[1])["text"], str)
                sentences = parts[0].split("\n") if whole else parts
                expected.append([ids for ids in map(encoder.vocabulary.encode, sentences) if ids])
        found, bad = encoded(encoder, path)
        assert found == [document for document in expected if document], content
        assert bad == [n for n, parts in oracle_sentences if parts is None], content

        # as records.py reads them: strings alone, and not blank
        (shard,) = plan_shards([str(path)])
        items = list(read_shard(shard))
        strings = [(n, line_oracle(line, lists=False)) for n, line in lines]
        kept = [(f"{path}:{n}", parts[0]) for n, parts in strings if parts is not None and parts[0].strip()]
        assert [(f"{item.path}:{item.line}", item.value) for item in items if isinstance(item, Record)] == kept, (
            content
        )
        named = [item.line for item in items if isinstance(item, BadRecord)]
        assert named == [n for n, parts in strings if parts is None or not parts[0].strip()], content
        outcomes.update(bad=len(bad), good=len(texts), clean=not bad)
    assert outcomes["bad"] > 100 and outcomes["good"] > 1000 and outcomes["clean"] > 10, outcomes
