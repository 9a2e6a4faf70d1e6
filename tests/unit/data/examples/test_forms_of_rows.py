"""Rows of Parquet, of JSON lists and of programs are those of JSON lines; ids, pairs and several labels of a row."""

import gzip
import json

import numpy as np
import pytest

from lm_experiments_tools.data.examples.examples import (
    LabelFields,
    TextFields,
    found_labels,
    label_examples,
    text_examples,
)
from lm_experiments_tools.data.text.records import RejectedRecords, rows
from lm_experiments_tools.data.text.sources import as_source, as_sources, file_of_split
from lm_experiments_tools.errors import UserError
from tests.helpers.finetuning_toys import pairs, read, word_tokenizer, write_json

ROWS = pairs(5)


def encoded_labels(path, task="multi_label", **flags):
    """Names of the labels of training data for an encoder, and the labels of its examples."""
    flags = {"model_type": "encoder", "task": task, "batch_size": 2, "bucket_rows": 1, **flags}
    data = read(word_tokenizer(), data_path=(path,), **flags)
    return data.label_names, data.train.dataset.members[0].encoded.labels.tolist()


def rows_of(path, split="train"):
    return [row.value for row in rows(file_of_split(str(path), split), RejectedRecords(0))]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=1),
        "".join(json.dumps(row) + "\n" for row in ROWS),
        "\ufeff" + json.dumps(ROWS),
    ],
)
def test_a_json_file_is_a_list_or_has_a_row_a_line(text, tmp_path):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
    assert rows_of(tmp_path / "a.json") == ROWS == rows_of(tmp_path / "b.json.gz")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[{"source": "w1"},\n {"source"', "begins as a list of JSON, which it is not"),
        ('{\n "data": []\n}', "a.json:1: a JSON object over several lines"),
        ('[1, {"source": "w1"}]', "element 0: a JSON int, not an object"),
    ],
)
def test_a_damaged_json_list_is_refused(text, sentence, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        rows_of(tmp_path / "a.json")


def test_parquet_is_read_and_a_folder_of_it_by_splits(tmp_path):
    """A folder given as validation data was its training split before."""
    table = pytest.importorskip("pyarrow").Table
    pytest.importorskip("datasets")
    from pyarrow import parquet

    parquet.write_table(table.from_pylist(ROWS), tmp_path / "one.parquet")
    assert rows_of(tmp_path / "one.parquet") == ROWS
    splits = tmp_path / "splits"
    splits.mkdir()
    for name, some in (("train-00000-of-00002", ROWS[:1]), ("train-00001-of-00002", ROWS[1:3]), ("valid", ROWS[3:])):
        parquet.write_table(table.from_pylist(some), splits / f"{name}.parquet")
    assert rows_of(splits) == ROWS[:3] and rows_of(splits, "valid") == ROWS[3:]
    with pytest.raises(UserError, match="has none of the test files"):
        rows_of(splits, "test")
    (splits / "valid.parquet").unlink()
    with pytest.raises(UserError, match="has none of the validation files"):
        rows_of(splits, "valid")  # its training data is no validation data
    (tmp_path / "half.parquet").write_bytes((tmp_path / "one.parquet").read_bytes()[:200])
    with pytest.raises(UserError, match=r"half\.parquet is damaged or not of its ending .*: copy it again"):
        rows_of(tmp_path / "half.parquet")


def test_a_folder_has_its_validation_data_by_any_name_of_hugging_face(tmp_path):
    splits = pytest.importorskip("datasets.data_files").SPLIT_KEYWORDS
    for name in splits["validation"]:
        folder = tmp_path / name
        folder.mkdir()
        for stem, some in (("train", ROWS[:3]), (name, ROWS[3:])):
            write_json(folder / f"{stem}.jsonl", some)
        assert rows_of(folder) == ROWS[:3] and rows_of(folder, "valid") == ROWS[3:]
    (folder / "original").mkdir()
    write_json(folder / "original" / f"set_1.0_{name}.jsonl", ROWS)  # as in GLUE's folders: not chosen by its name
    assert rows_of(folder, "valid") == ROWS[3:]
    write_json(folder / "validation.json", ROWS)
    with pytest.raises(UserError, match="has several validation files"):
        rows_of(folder, "valid")


@pytest.mark.parametrize("form", ["saved", "parquet", "csv", "json"])
def test_a_saved_data_set_and_a_snapshot_of_the_hub_are_read_by_splits(form, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    splits = {"train": ROWS[:3], "validation": ROWS[3:4], "test": ROWS[4:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    folder = tmp_path / "set"
    if form == "saved":
        saved.save_to_disk(folder)
        splits = {name: rows.to_list() for name, rows in datasets.load_from_disk(folder).items()}
    else:
        (folder / "data").mkdir(parents=True)
        (folder / "README.md").write_text("---\n---\n")
        for name, rows in saved.items():
            file = folder / "data" / f"{name}{'-00000-of-00001' if form == 'parquet' else ''}.{form}"
            getattr(rows, f"to_{form}")(str(file))
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        assert rows_of(folder, split) == splits[name]


def test_a_data_set_of_the_hub_gives_each_flag_its_split(tmp_path):
    assert file_of_split("owner/name", "valid") == "owner/name::validation"
    assert file_of_split("owner/name:en", "test") == "owner/name:en:test"
    assert file_of_split("owner/name::train", "valid") == "owner/name::train"
    assert file_of_split(f"{tmp_path}:en", "valid") == f"{tmp_path}:en:validation"


def test_text_of_a_data_set_is_of_the_split_of_its_flag(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for split, text in (("train", "w1 w2 w3 w4 w5"), ("validation", "w6 w7"), ("test", "w8")):
        datasets.Dataset.from_list([{"text": text}]).to_parquet(str(tmp_path / "set" / f"{split}.parquet"))
    item = f"{tmp_path / 'set'}:default"
    flags = {"model_type": "decoder", "task": "causal_lm", "input_seq_len": 8, "optimize_metric": "loss"}
    data = read(word_tokenizer("token"), data_path=(item,), valid_data_path=item, test_data_path=item, **flags)
    found = [batch["input_ids"][0].tolist() for split in ("valid", "test") for batch in data.splits[split].loader]
    assert [{i - 3 for i in ids if i > 2} for ids in found] == [{6, 7}, {8}]


class Again:
    """Gives its rows as often as it is asked."""

    def __iter__(self):
        return iter(ROWS)


def test_rows_of_a_program_are_read_as_those_of_a_file(tmp_path):
    flags = {"input_seq_len": 32, "target_seq_len": 16, "batch_size": 2}
    path = write_json(tmp_path / "a.jsonl", ROWS)
    of_file = read(word_tokenizer(), data_path=(path,), valid_data_path=path, **flags)
    for given in (ROWS, tuple(ROWS), (row for row in ROWS), Again(), {"train": ROWS, "validation": ROWS}):
        source = as_source(given, "data_path")
        data = read(word_tokenizer(), data_path=(source,), valid_data_path=source, **flags)
        assert data.train.dataset.fingerprint == of_file.train.dataset.fingerprint
        assert data.splits["valid"].examples == of_file.splits["valid"].examples


def test_data_sets_of_hugging_face_are_rows():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    several = datasets.DatasetDict(train=table, test=table.select([0]))
    streamed = table.to_iterable_dataset()
    assert [row.value for row in rows(as_source(table, "x"), RejectedRecords(0))] == ROWS
    assert [row.value for row in rows(as_source(streamed, "x"), RejectedRecords(0))] == ROWS
    assert rows_of_source(several, "train") == ROWS and rows_of_source(several, "test") == ROWS[:1]
    assert as_sources([table, "b.jsonl"], "data_path") == (as_source(table, "data_path[0]"), "b.jsonl")
    assert len(as_sources(ROWS, "data_path")) == 1


def rows_of_source(value, split):
    return [row.value for row in rows(file_of_split(as_source(value, "x"), split), RejectedRecords(0))]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (5, "x is of type int: give a path, or rows as dicts"),
        ([["w1", "w2"]], "rows given as x, row 0 is of type list, not a dict"),
        ({"source": ["w1"]}, "rows given as x has no split train or training, only source"),
    ],
)
def test_what_is_no_row_is_refused(value, sentence):
    with pytest.raises(UserError, match=sentence):
        rows_of_source(value, "train")


def test_an_id_is_taken_from_the_field_that_is_named(tmp_path):
    path = write_json(
        tmp_path / "a.jsonl", [{**row, "id": "x", "key": number // 2} for number, row in enumerate(ROWS)]
    )
    found = text_examples(path, TextFields(id="key"), RejectedRecords(9), merge=False)
    assert [example.name for example in found] == ["0", "0", "1", "1", "2"]
    path = write_json(tmp_path / "b.jsonl", [{"text": "w1", "label": 1, "idx": 7}, {"text": "w1", "label": 1}])
    bad = RejectedRecords(1)
    found = list(label_examples(path, LabelFields(id="idx"), bad, names=("0", "1")))
    assert [example.name for example in found] == ["7"] and "no key 'idx'" in bad.first


def test_labels_of_a_row_are_a_list(tmp_path):
    rows = [["b", "a", "b"], [], [2, "a"], ["a|b, c"], "a, b", "", None, [None]]
    path = write_json(tmp_path / "a.jsonl", [{"text": "w1", "labels": labels} for labels in rows])
    bad, names = RejectedRecords(4), ("2", "a", "a|b, c", "b")
    found = [e.label for e in label_examples(path, LabelFields(several=True), bad, names=names)]
    assert found == [(1, 3), (), (0, 1), (2,)] and bad.count == 4
    assert "the labels 'a, b' are no list of names: see" in bad.first
    labels = [[0, 1, 0, 1], [0] * 4, [1, 1, 0, 0], [0, 0, 1, 0]]
    assert encoded_labels(path, max_bad_lines=4) == (names, labels)


def labels_of(rows, several=True, **options):
    """Labels of rows of a program, as the names that are found."""
    fields, source = LabelFields(several=several), as_source(rows, "rows")
    names = sorted(found_labels(source, fields, RejectedRecords(0)))
    examples = [*label_examples(source, fields, RejectedRecords(0), names=names, **options)]
    return [[names[i] for i in (e.label if several else [e.label])] for e in examples]


def test_lists_of_zeros_and_ones_are_refused(tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"text": "w1", "labels": labels} for labels in ([0, 1, 0], [1, 0, 0])])
    with pytest.raises(UserError, match="the only labels are 0 and 1: write the names"):
        encoded_labels(path)
    with pytest.raises(UserError, match="the label '0' is none of c, a, b"):
        encoded_labels(path, label_names=("c", "a", "b"))
    path = write_json(tmp_path / "b.jsonl", [{"text": "w1", "labels": [True, False]}])
    with pytest.raises(UserError, match=r"the labels \[True, False\] are no list of names"):
        encoded_labels(path)


def test_labels_1_and_1_0_are_one_class_where_labels_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nw1,1.0\nw2,0\nw3,1\nw4,0.0\n")
    path = tmp_path / "a.csv"
    assert encoded_labels(path, "classification", label_names=("0", "1"))[1] == [1, 0, 1, 0]
    assert encoded_labels(path, "classification", label_names=("1.0", "0.0"))[1] == [0, 1, 0, 1]


def test_classes_of_a_dataset_have_their_names(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    label = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = datasets.Dataset.from_dict({"text": ["w1", "w2", "w3"], "label": [1, 0, 1]}, features=features)
    rows.to_parquet(str(tmp_path / "train.parquet"))
    for source in (as_source(rows, "data_path"), str(tmp_path / "train.parquet")):
        assert encoded_labels(source, "classification") == (("neg", "pos"), [1, 0, 1])
        assert encoded_labels(source, "classification", label_names=("pos", "neg"))[1] == [0, 1, 0]


def test_labels_of_numpy_are_those_of_python():
    assert labels_of([{"text": "w1", "labels": np.array([3, 1])}]) == [["1", "3"]]
    assert labels_of([{"text": "w1", "label": np.int64(4)}, {"text": "w1", "label": 5}], several=False) == [
        ["4"],
        ["5"],
    ]


def test_training_data_in_which_no_row_has_a_label_is_refused():
    rows = as_source([{"text": "w1 w2", "labels": []}] * 4, "data_path")
    with pytest.raises(UserError, match="no example in rows given as data_path has a label"):
        encoded_labels(rows)


def test_the_table_of_mnli_has_its_own_names_and_the_hub_those_of_t5(tmp_path):
    columns = ["index", "promptID", "pairID", "genre", "sentence1", "sentence2", "gold_label"]
    (tmp_path / "train.tsv").write_text("\t".join(columns) + "\n0\t1\t1e\tx\tw1 w2\tw3\tneutral\n")
    path = file_of_split(str(tmp_path), "train")
    of_encoder = next(label_examples(path, LabelFields(), RejectedRecords(0), names=("neutral",)))
    assert (of_encoder.source, of_encoder.pair, of_encoder.label) == ("w1 w2", "w3", 0)
    hub = as_source([{"premise": "w1 w2", "hypothesis": "w3", "label": "neutral"}], "rows")
    for fields, expected in (
        (LabelFields(as_text=True), "hypothesis: w3 premise: w1 w2"),
        (LabelFields(names=("premise", "hypothesis"), as_text=True), "premise: w1 w2 hypothesis: w3"),  # saved so
    ):
        (example,) = label_examples(hub, fields, RejectedRecords(0), names=("neutral",), words=("maybe",))
        assert example.source == expected
