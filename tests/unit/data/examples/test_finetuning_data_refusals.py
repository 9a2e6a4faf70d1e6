"""Fine-tuning data that cannot be used: one sentence with file and line; and what is left out is counted."""

import json
import logging

import pytest

from lm_experiments_tools.data.text.records import RejectedRecords, rows
from lm_experiments_tools.errors import UserError
from tests.helpers.finetuning_toys import read, word_tokenizer, write_json

GOOD = '{"source": "w1", "target": "w2"}'
ENCODER = {"model_type": "encoder", "optimize_metric": "loss"}
CLASSES = {**ENCODER, "task": "classification"}
NUMBERS = {**ENCODER, "task": "regression"}
LABEL = '{"text": "w1", "label": "a"}'


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "bad", "flags", "reason"),
    [
        ("a.jsonl", '{"source": "w1"', {}, ":2: not valid JSON"),
        ("a.jsonl", '{"sauce": "w1", "target": "w2"}', {}, ":2: no field s, source, input, text, article (there is "
         "'sauce', 'target'): name it by --source_id"),
        ("a.jsonl", '{"source": "w1", "x": "w2"}', {"target_id": "target"}, ":2: no key 'target' (there is"),
        ("a.jsonl", '{"source": "", "target": "w1"}', {}, ":2: 'source' is empty"),
        ("a.jsonl", '{"source": "w1", "target": {"text": ["w2"], "start": 1}}', {}, ":2: 'target' is of type dict "
         "with 'text', 'start', not text: see \"Other forms of rows\" in docs/finetuning_data.md"),
        ("a.jsonl", '{"source": "w1", "targets": ["w1", null]}', {}, ":2: 'targets' is null"),
        ("a.jsonl", '{"translation": "w1"}', {}, ":2: 'translation' is of type str, not an object of two texts"),
        ("a.jsonl", '{"source": "w1", "target": "\\ud800"}', {}, ":2: 'target' contains half of a surrogate pair"),
        ("b.jsonl", '{"text": "w1", "label": 0.5}', CLASSES, ":2: the label 0.5 is neither a string nor an integer"),
        ("b.jsonl", '{"text": "w1", "label": "b"}', {**CLASSES, "label_names": ("a",)}, ":2: the label 'b' is none "
         "of a"),
        ("b.jsonl", '{"question": "w1", "sentence": "w2", "label": "a"}', CLASSES, ":2: a pair (question, "
         "sentence), where "),
        ("c.jsonl", '{"text": "w1", "label": "b"}', NUMBERS, ":2: the label 'b' is not a number"),
        ("c.jsonl", '{"text": "w1", "label": NaN}', NUMBERS, ":2: no label (nan)"),
        ("c.jsonl", '{"text": "w1", "label": -4e38}', NUMBERS, ":2: the label -4e+38"),
        ("c.jsonl", '{"text": "w1", "label": 1%s}' % ("0" * 400), NUMBERS, ":2: the label 1"),
    ],
)  # fmt: skip
def test_bad_row_is_a_sentence_with_its_place_and_may_be_left_out(name, bad, flags, reason, tmp_path, caplog):
    good = {"a": GOOD, "b": LABEL, "c": '{"text": "w1", "label": 2}'}[name[0]].encode()
    bad = bad if isinstance(bad, bytes) else bad.encode()
    path = write(tmp_path / name, good + b"\n" + bad + b"\n" + good + b"\n")
    with pytest.raises(UserError) as raised:
        read(word_tokenizer(), data_path=(path,), **flags)
    assert f"{path}{reason}" in str(raised.value) and "--max_bad_lines" in str(raised.value)
    data = read(word_tokenizer(), data_path=(path,), max_bad_lines=1, **flags)
    assert len(data.train.dataset) == 2
    assert caplog.text.count(f"left out {path}{reason}") == 1


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.tsv", "source\ttarget\nw1\tw2\nw1\n", ":3: 1 columns, where the first line has 2"),
        ("a.csv", 'source,target\nw1,"w2\nw3"\nw1,w2,w3\n', ":4: 3 columns, where the first line has 2"),
        ("a.csv", 'source,target\nw1,"w2"w3\n', ":2: not valid csv: ',' expected after '\"'"),
        ("a.csv", 'source,target\nw1,w2\nw1,"w2\nw3,w4\nw5,w6\n', ":3: a quotation mark of this record"),
        ("a.csv", "source,source\nw1,w2\n", " names a column twice in its first line (source, source)"),
        ("a.tsv", b"source\ttarget\nw1\t\xe9\n", ":2: not UTF-8: save the file as UTF-8"),
        ("a.csv", "größe,b\n1,2\n".encode("cp1252"), ": its first line is not UTF-8"),
    ],
)  # fmt: skip
def test_bad_tables_are_sentences_with_their_place(name, text, reason, tmp_path):
    path = write(tmp_path / name, text)
    with pytest.raises(UserError) as raised:
        list(rows(path, RejectedRecords(0)))
    assert path + reason in str(raised.value)


def test_more_bad_rows_than_allowed_are_refused_with_the_first(tmp_path):
    path = write(tmp_path / "a.jsonl", "{\n" * 3 + GOOD + "\n")
    with pytest.raises(
        UserError,
        match=r"more than 2 bad lines: 3 so far, the first is .*a\.jsonl:1: a JSON object over several lines",
    ):
        read(word_tokenizer(), data_path=(path,), max_bad_lines=2)


@pytest.mark.parametrize(
    ("content", "flags", "reason"),
    [
        (GOOD, {"model_type": "decoder", "input_seq_len": 8, "target_seq_len": 8}, "--target_seq_len 8 leaves "
         "nothing for the source"),
        ("", {}, "there is no example in"),
        (LABEL, {**CLASSES, "label_names": ("a", "a")}, "--label_names a, a names a label twice"),
        (LABEL, {**CLASSES, "input_seq_len": 2}, "a source needs more than 2 tokens: raise --input_seq_len"),
        (LABEL, {"task": "classification", "label_words": ("yes", "no"), "optimize_metric": "loss"}, "--label_words "
         "has 2 words for the 1 labels a"),
        (LABEL, {"task": "classification", "label_names": ("a", "b"), "label_words": ("no", "No"),
                 "optimize_metric": "loss"}, "the label words no, No do not differ"),
        (LABEL, {"task": "classification", "label_names": ("a", "b", "c"), "label_words": ("w1", "正面", "负面"),
                 "optimize_metric": "loss"}, "the label words 正面 and 负面 are the same tokens to the model (<unk> "
         "</s>, within --target_seq_len"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_data_are_a_sentence(content, flags, reason, tmp_path):
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(UserError) as raised:
        read(word_tokenizer(), data_path=(path,), **flags)
    assert reason in str(raised.value)


@pytest.mark.parametrize("flags", [{}, CLASSES])
def test_a_table_of_a_header_alone_is_named_as_such(flags, tmp_path):
    path = write(tmp_path / "a.tsv", "text\tlabel\n" if flags else "source\ttarget\n")
    with pytest.raises(UserError, match=r"no example in .*a\.tsv( has a label|: no row).* header"):
        read(word_tokenizer(), data_path=(path,), **flags)


def test_unknown_label_of_the_validation_data_is_named(tmp_path):
    train = write(tmp_path / "a.jsonl", LABEL)
    valid = write(tmp_path / "b.jsonl", LABEL + '\n{"text": "w1", "label": "c"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl:2: the label 'c' is none of a"):
        read(word_tokenizer(), data_path=(train,), valid_data_path=valid, **CLASSES)


PAIR, OTHER = '{"question": "w1", "sentence": "w2", "label": "a"}', '{"sentence": "w1", "label": "a"}'
WRITTEN = {
    "task": "classification",
    "label_names": ("a", "b"),
    "label_words": ("w1", "w2"),
}  # by an encoder-decoder, which reads names of fields


@pytest.mark.parametrize(
    ("second", "flags", "reason"),
    [
        (PAIR, CLASSES, r"b\.jsonl:1: a pair \(question, sentence\), where .*a\.jsonl:1 has one sentence \(text\)"),
        (PAIR, WRITTEN, r"b\.jsonl:1: a pair \(question, sentence\), where .*a\.jsonl:1 has one sentence \(text\)"),
        (OTHER, WRITTEN, r"b\.jsonl:1: one sentence \(sentence\), where .*a\.jsonl:1 has one sentence \(text\)"),
    ],
)
@pytest.mark.parametrize("split", ["data_path", "valid_data_path", "test_data_path"])
def test_what_the_model_reads_is_alike_in_all_data_of_a_run(split, second, flags, reason, tmp_path):
    first, second = write(tmp_path / "a.jsonl", LABEL), write(tmp_path / "b.jsonl", second)
    paths = {"data_path": (first, second)} if split == "data_path" else {"data_path": (first,), split: second}
    with pytest.raises(UserError, match=f"{reason}.*--text_fields"):
        read(word_tokenizer(), **paths, **flags)


def test_names_of_fields_that_no_model_reads_may_differ(tmp_path):
    first, second = write(tmp_path / "a.jsonl", LABEL), write(tmp_path / "b.jsonl", OTHER)
    data = read(word_tokenizer(), data_path=(first, second), valid_data_path=second, **CLASSES)
    assert len(data.train.dataset) == 2


def test_labels_of_one_number_are_one_label(tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"text": "w1", "label": label} for label in ("2.0", 2, "2.10")])
    assert read(word_tokenizer(), data_path=(path,), **CLASSES).label_names == ("2", "2.10")
    names = read(word_tokenizer(), data_path=(path,), label_names=("2.10", "2.0"), **CLASSES).label_names
    assert names == ("2.10", "2")
    with pytest.raises(UserError, match="names a label twice"):
        read(word_tokenizer(), data_path=(path,), label_names=("2.0", "2"), **CLASSES)


def test_a_tokenizer_without_an_end_of_text_is_a_sentence(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(UserError, match="neither an eos nor a sep token"):
        read(word_tokenizer("none"), data_path=(path,))


def task(**changes):
    return {
        "Definition": ["w1 w2", "never read"],
        "Positive Examples": [{"input": "w3", "output": "w4", "explanation": "w5"}],
        "Negative Examples": [],
        "Instances": [{"id": f"i{n}", "input": f"w{n}", "output": ["w1", "w2"]} for n in range(4)],
    } | changes


def sni(folder, tasks, listed=None):
    """A folder of tasks, all of which stand in both lists."""
    for name in ("tasks", "splits/default"):
        (folder / name).mkdir(parents=True)
    for name, content in tasks.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "tasks" / f"{name}.json").write_text(text)
    for name in ("train", "test"):
        (folder / "splits" / "default" / f"{name}_tasks.txt").write_text("\n".join(listed or tasks) + "\n")
    return str(folder)


INSTRUCTIONS = {"task": "instructions", "optimize_metric": "loss"}


def test_instructions_are_read_by_their_split_and_limits(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = sni(tmp_path, {"t1": task(), "t2": task()}, ["t1", "gone", "t2"])
    flags = {"max_instances_per_task": 3, "max_instances_per_eval_task": 2, **INSTRUCTIONS}
    data = read(word_tokenizer(), data_path=(folder,), test_data_path=folder, **flags)
    assert len(data.train.dataset) == 6 and set(data.splits) == {"test"}
    assert len(data.train.dataset.members[0].encoded.targets) == 12  # training draws one of the two outputs
    found = [(example.group, example.name, example.targets) for example in data.splits["test"].examples]
    assert found == [(group, name, ("w1", "w2")) for group in ("t1", "t2") for name in ("i0", "i1")]
    assert "1 of the 3 tasks" in caplog.text and "(the first: gone)" in caplog.text


@pytest.mark.parametrize(
    ("tasks", "listed", "flags", "reason"),
    [
        ({"t": task()}, ["gone", "away"], {}, "none of the 2 tasks that"),
        ({"t": task()}, None, {"sni_split": "official"}, "--sni_split"),
        ({"t": "{"}, None, {}, "t.json is no task of Super-Natural-Instructions"),
        ({"t": {"Definition": "x"}}, None, {}, "'Instances'"),
        ({"t": task(Instances={"a": 1})}, None, {}, "copy it again"),
        ({"t": task(**{"Positive Examples": [{"input": ["x"], "output": "x"}]})}, None, {}, "of type list, not text"),
        ({"t": task(Instances=[{"input": "w1"}])}, None, {}, "t.json, instance 1: no key 'output'"),
        ({"t": task(Instances=["x"])}, None, {}, "instance 1: of type str, not an object"),
        ({"t": task()}, None, {"input_seq_len": 11}, "the prompt of t has 13 tokens"),
    ],
)
def test_instructions_that_cannot_be_used_are_a_sentence(tasks, listed, flags, reason, tmp_path):
    folder = sni(tmp_path, tasks, listed)
    with pytest.raises(UserError) as raised:
        read(word_tokenizer(), data_path=(folder,), **INSTRUCTIONS, **flags)
    assert reason in str(raised.value)
