"""preprocess_data.py against the ancestor's rules written out, its command line, and everything that can go wrong."""

import json
import re

import pytest

from lm_experiments_tools.data.text import records
from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.tokens import tokenize
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from megatron import preprocess_data as module
from megatron.sentences import SentenceSplitter
from megatron.tokenizers import check_tokenizer
from tests.helpers import ROOT
from tests.helpers.preprocessing import PIECES, SEP, command, run, start, write_lines
from tests.helpers.token_toys import read_documents


def ancestor(records, key, tokenizer, split, *, split_sentences, split_tokens, append_eod):
    """Megatron's rules for one key, one document at a time."""
    kept = []
    for record in records:
        value = record[key]
        if isinstance(value, list):
            sentences = value if split_sentences else ["".join(value)]
        else:
            sentences = split(value) if split_sentences else [value]
        document = []
        for sentence in sentences:
            ids = tokenizer.encode(sentence)
            if ids:
                document += [[index] for index in ids] if split_tokens else [ids]
        if document:
            if append_eod:
                document[-1] = [*document[-1], SEP]
            kept.append(document)
    return kept


RECORDS = [
    {"text": "One is here. Two\nis there!\n\nAnd three.", "title": "a"},
    {"text": ["split already.", "", "twice. or more"], "title": ""},
    {"text": "", "title": "b c. d"},
    {"text": "No end", "title": ["e", "f g"]},
    {"text": [], "title": "h"},
    {"text": " \u3000 \n", "title": "i\x1c"},
]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("split_tokens", [False, True])
@pytest.mark.parametrize("split_sentences", [False, True])
def test_each_document_is_what_the_ancestor_makes_of_it(folder, tokenizer, split_sentences, split_tokens, append_eod):
    write_lines(folder / "in" / "data.jsonl", RECORDS)
    options = {"split_sentences": split_sentences, "split_tokens": split_tokens, "append_eod": append_eod}
    flags = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    metas = run(folder, "--json-keys", "text", "title", *flags)
    level = "sentence" if split_sentences else "document"
    for key in ("text", "title"):
        prefix = f"{folder}/out/x_{key}_{level}"
        expected = ancestor(RECORDS, key, tokenizer, SentenceSplitter(), **options)
        assert read_documents(prefix) == expected
        meta = IndexedDataset(prefix).meta
        assert meta == metas[prefix] and meta["vocab_sha256"] == tokenizer.fingerprint
        assert meta["num_documents"] == len(expected) and meta["empty_documents"] == len(RECORDS) - len(expected)
        assert meta["num_sequences"] == sum(map(len, expected)) and meta["dtype"] == "uint16"
    assert len(expected) == 5 and not (folder / "out" / "x.bad_lines.jsonl").exists()


def test_files_do_not_depend_on_the_number_of_workers(folder, monkeypatch):
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 400)
    monkeypatch.setattr(module, "plan_shards", lambda inputs, **options: plan_shards(inputs, 2000, **options))
    text = 'Mr. Smith went. He said, "no!"\nThen (at 5 p.m.) she left.\n\nIt is over... Is it?'
    for name in "ab":
        records = [{"text": f"{text} {name * (n % 7)}" if n % 5 else 0} for n in range(60)]
        write_lines(folder / "in" / f"{name}.jsonl", records)
    outputs = []
    for workers in (1, 3):
        run(folder, "--split-sentences", "--workers", workers)
        outputs.append({path.name: path.read_bytes() for path in (folder / "out").iterdir()})
    assert outputs[0] == outputs[1] and len(outputs[0]) == 4
    bad = [json.loads(line) for line in outputs[0]["x.bad_lines.jsonl"].splitlines()]
    assert [(entry["file"][-7:], entry["line"]) for entry in bad] == [
        (f"{name}.jsonl", n + 1) for name in "ab" for n in range(0, 60, 5)
    ]


# (line, the reason it is bad; None: it is good)
LINES = [
    (b'{"text": "fine"}', None),
    (b'{"text": ["fine", "fine"], "other": 1}', None),
    (b'{"text": "fine"', "not valid JSON"),
    (b'[{"text": "fine"}]', "a JSON list, not an object"),
    (b'{"content": "fine"}', r"no key 'text' .there is 'content'."),
    (b'{"text": null}', None),
    (b'{"text": ["fine", 3]}', "a list with a int in it"),
    (b'{"text": [["fine"]]}', "a list with a list in it"),
    (b'{"text": {"a": "b"}}', "of type dict"),
    (b'{"text": ["fine", "a\\u0000b"]}', "contains a NUL character"),
    (b'{"text": "a\\ud800b"}', "half of a surrogate pair"),
    (b'{"text": "caf\xe9"}', "not UTF-8 at byte 13"),
    (b'{"text": "%s"}' % (b"x" * (1 << 20)), "a document of more than 1.0 MiB"),
    (b'{"text": "fine"}', None),
]


def test_every_bad_line_is_quarantined_and_every_good_one_kept(folder, tokenizer, monkeypatch):
    (folder / "in" / "data.jsonl").write_bytes(b"\n".join(line for line, _ in LINES))
    monkeypatch.setattr(records, "MAX_DOCUMENT_BYTES", 1 << 20)
    flags = ("--split-sentences",)
    run(folder, *flags)
    fine = tokenizer.encode("fine")
    assert read_documents(f"{folder}/out/x_text_sentence") == [[fine], [fine, fine], [fine]]
    bad = [json.loads(line) for line in (folder / "out" / "x.bad_lines.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in bad] == [n for n, (_, reason) in enumerate(LINES, 1) if reason]
    for entry in bad:
        assert re.search(LINES[entry["line"] - 1][1], entry["reason"]), entry
    with pytest.raises(UserError, match=r"more than 9 bad lines: 10 so far, the first is .*data.jsonl:3: not valid"):
        run(folder, *flags, "--max-bad-lines", 9)


def test_a_refused_run_leaves_the_earlier_files_as_they_were_and_nothing_else(folder):
    write_lines(folder / "in" / "data.jsonl", [{"text": "one"}])
    run(folder)
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    write_lines(folder / "in" / "data.jsonl", [{"text": "two"}] * 200 + [{"text": 1}] * 3)
    with pytest.raises(UserError, match="more than 2 bad lines"):
        run(folder, "--max-bad-lines", 2)
    after = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    assert after.pop("x.bad_lines.jsonl") and after == before


def test_input_without_any_text_is_one_sentence(folder):
    data = folder / "in" / "data.jsonl"
    for rows, flags, message in [
        ([{"text": 1}], (), "there is no document in .*: 1 bad lines"),
        ([{"text": ""}, {"text": []}], (), "x_text_document: there is no document in .*: 0 bad lines, 2 empty texts"),
        (
            [{"text": "a", "title": ""}],
            ("--json-keys", "text", "title"),
            "x_title_document: there is no document in .*: 0 bad lines, 1 empty texts",
        ),
        ([{"a": "b"}], ("--json-keys", "a", "text"), r"no key 'text' \(there is 'a'\)"),
        ([], (), "there is no text in .*: 1 files, all of them empty"),
    ]:
        write_lines(data, rows)
        with pytest.raises(UserError, match=message):
            run(folder, *flags)


def test_flags_that_contradict_each_other_are_one_sentence(folder):
    write_lines(folder / "in" / "data.jsonl", [{"text": "a"}])
    hugging_face = ("--tokenizer-type", "HFTokenizer")
    for flags, message in [
        (("--dataset-impl", "lazy"), "--dataset_impl|--dataset-impl"),
        (("--tokenizer-type", "GPT2BPETokenizer"), "GPT2BPETokenizer"),
        (hugging_face, "--vocab-file belongs to BertWordPiece"),
        (("--tokenizer-name-or-path", "x"), "--tokenizer-name-or-path belongs to HFTokenizer"),
        (("--json-keys", "a", "a"), "--json-keys 'a' cannot name a file"),
        (("--json-keys", "../a"), "--json-keys '../a' cannot name a file"),
        (("--output-prefix", "x.bin"), "--output-prefix x.bin must be a prefix"),
        (("--workers", 0), "--workers is 0: it must be at least 1"),
        (("--log-interval", 0), "--log.interval is 0"),
        (("--max-bad-lines", -1), "--max.bad.lines is -1"),
        (("--vocab-file", folder / "none.txt"), "none.txt does not exist"),
        (("--sentence-splitter", "punkt"), "--sentence-splitter punkt is neither nupunkt, sentencex"),
        (("--tokenizer-typ", "x"), "did you mean --tokenizer_type"),
    ]:
        with pytest.raises(UserError, match=message):
            run(folder, *flags)
    assert not (folder / "out").exists()


def test_a_text_on_which_the_splitter_fails_is_a_bad_line(folder, tokenizer):
    write_lines(folder / "in" / "data.jsonl", [{"text": "FINE"}, {"text": "changed"}])
    run(folder, "--split-sentences", "--sentence-splitter", "tests.unit.megatron.test_sentences:upper")
    assert read_documents(f"{folder}/out/x_text_sentence") == [[tokenizer.encode("fine")]]
    (bad,) = [json.loads(line) for line in (folder / "out" / "x.bad_lines.jsonl").read_text().splitlines()]
    assert bad["line"] == 2 and "changed the text" in bad["reason"]


# As programs


def test_the_script_runs_from_anywhere_and_counts_what_it_did(folder):
    write_lines(folder / "in" / "data.jsonl", [{"text": "One here. Two."}, {"text": ""}, {"text": 3}] * 2)
    process = start(command(folder, "--log-interval", 2, "--workers", 2), ROOT / "megatron")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "x_text_sentence: 2 documents, 4 sequences, " in out and "2 empty, 2 bad lines" in out
    assert "Processed 6 documents (" in err and "MB/s)" in err
    assert "2 bad lines left out (the first: " in err


@pytest.mark.parametrize("workers", [1, 2])
def test_text_files_give_what_the_same_documents_give_as_json(folder, workers):
    texts = ["One here. Two\nthere.", 'caf\u00e9 \\ "three".']
    (folder / "in" / "data.txt").write_bytes(
        b"\n\n".join([texts[0].encode(), b"bad \xff", texts[1].encode(), b"nul \0"])
    )
    flags = ("--split-sentences", "--json-keys", "body")
    run(folder, *flags)
    write_lines(folder / "data.jsonl", [{"body": text} for text in texts])
    run(folder, *flags, "--output-prefix", folder / "j", source=folder / "data.jsonl")
    assert read_documents(f"{folder}/out/x_body_sentence") == read_documents(f"{folder}/j_body_sentence")
    bad = [json.loads(line) for line in (folder / "out" / "x.bad_lines.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["reason"]) for entry in bad] == [
        (4, "not UTF-8 at byte 4"),
        (8, "contains a NUL character"),
    ]
    with pytest.raises(UserError, match=r"data.txt is plain text, but --json-keys"):
        run(folder, "--json-keys", "a", "b")


def test_unknown_tokens_and_documents_of_one_sentence_are_warned_of(folder, tokenizer, caplog):
    """DNA is one word longer than WordPiece takes, Chinese has no sentence that an English splitter finds."""
    good, caplog = [{"text": "one is here. two is there."}] * 99, caplog
    write_lines(folder / "in" / "data.jsonl", good)
    with caplog.at_level("INFO"):
        run(folder, "--split-sentences")
    assert "x_text_sentence: 0.00 % of the tokens are unknown tokens" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    write_lines(
        folder / "in" / "data.jsonl",
        [*good, *[{"text": "acgt" * 60}] * 50, *[{"text": "\u4eca\u3002\u5929\u3002"}] * 99],
    )
    run(folder, "--split-sentences")
    ids = IndexedDataset(folder / "out" / "x_text_sentence").tokens
    share = 100 * (ids == PIECES.index("[UNK]")).mean()
    assert f"{share:.1f} % of the tokens of {folder}/out/x_text_sentence are unknown tokens" in caplog.text
    assert "most documents of" in caplog.text and "sentencex:zh" in caplog.text
    caplog.clear()
    run(folder, "--split-sentences", "--sentence-splitter", "sentencex:zh")
    assert "most documents of" not in caplog.text
    caplog.clear()
    check_tokenizer(IndexedDataset(folder / "out" / "x_text_sentence"), tokenizer)
    assert "are unknown tokens: is the vocabulary" in caplog.text
