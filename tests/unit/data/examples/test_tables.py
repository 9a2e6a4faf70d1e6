"""Tables of spreadsheet programs and pandas are read as pandas and the csv module read them; cells that hold lists."""

import csv
import io
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
from lm_experiments_tools.data.text.records import Record, RejectedRecords, rows
from lm_experiments_tools.data.text.sources import as_source
from lm_experiments_tools.errors import UserError

ROWS = [["a; b, c", "x"], ['He said "fine"', "y"], ["two\nlines", "x"], ["grün\tZürich", "y"]]
HEADER = ["text", "label"]


def table(delimiter=",", rows=(HEADER, *ROWS), **options):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, **options).writerows(rows)
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("semicolon.csv", table(";").encode()),
        ("tabs.csv", table("\t").encode()),
        ("bars.csv", table("|").encode("utf-8-sig")),
        ("excel.csv", b"\xef\xbb\xbf" + table(";").encode()),
        ("blank.csv", table(rows=[[*row, "", ""] for row in (HEADER, *ROWS, ["", ""])]).encode()),
        ("long.csv", table(rows=[HEADER, *([*row, "", ""] for row in ROWS)]).encode()),
        ("quoted.csv", table(";", quoting=csv.QUOTE_ALL).encode()),
    ],
)
def test_a_table_of_a_spreadsheet_program_has_the_rows_that_were_written(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    expected = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    assert [row.value for row in rows(str(tmp_path / name), RejectedRecords(0))] == expected


@pytest.mark.parametrize(
    ("targets", "expected"), [(["x", "y"], True), (["x"], True), ([{"a": 1}], True), ([""], False), ([], False)]
)
def test_targets_of_a_table_may_be_arrays(targets, expected):
    """As pandas has lists of a Parquet file."""
    row = Record({"source": "a", "targets": np.array(targets, dtype=object)}, "row", 0)
    assert TextFields().has_target(row) is expected


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_a_table_of_pandas_is_read_as_pandas_reads_it(delimiter, quoting, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"text": [row[0] for row in ROWS], "n": [1.0, None, 2.0, 0.0], "label": ["NA", "-", "", "1"]}
    )
    for index in (True, False):
        path = tmp_path / f"{index}.csv"
        frame.to_csv(path, index=index, sep=delimiter, quoting=quoting)
        again = pandas.read_csv(path, sep=delimiter, dtype=str, keep_default_na=False, index_col=0 if index else None)
        assert [row.value for row in rows(str(path), RejectedRecords(0))] == again.to_dict("records")


def test_rows_keep_their_numbers_when_others_are_left_out(tmp_path):
    """The ids of predictions are the rows of the file, as pandas numbers them."""
    pandas = pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text('text,label\nw0,0\n"",1\nw2,1\n\n,\nw4,0\nw5,7\nw6,0\n')
    frame = pandas.read_csv(tmp_path / "a.csv", dtype=str, keep_default_na=False)
    frame = frame.assign(target="w1").to_dict("records")
    lines = [json.dumps(row) for row in frame]
    lines[1] = "{"
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines) + "\n")
    (tmp_path / "c.tsv").write_bytes(b"text\tlabel\nw0\t0\n\xff\t1\nw2\t1\n\n\t\nw4\t0\nw5\t0\t0\nw6\t0\n")
    for path in (*(str(tmp_path / name) for name in ("a.csv", "b.jsonl", "c.tsv")), as_source(frame, "rows")):
        examples = [*label_examples(path, LabelFields(), RejectedRecords(9), names=("0", "1"))]
        assert [frame[int(example.name)]["text"] for example in examples] == [e.source for e in examples] != []
        assert [example.name for example in examples] == ["0", "2", "4", "6"]
    examples = text_examples(as_source(frame, "rows"), TextFields(), RejectedRecords(9), merge=True)
    assert [example.name for example in examples] == ["0", "2", "4", "5", "6"]


def test_references_that_pandas_wrote_as_text_are_refused(tmp_path):
    frame = pytest.importorskip("pandas").DataFrame({"source": ["w1"], "targets": [["w2", "w3"]]})
    frame.to_csv(tmp_path / "a.csv")
    with pytest.raises(UserError, match="'targets' is a list written as text: write lists in JSON lines, or"):
        [*text_examples(str(tmp_path / "a.csv"), TextFields(), RejectedRecords(0), merge=True)]
    frame.rename(columns={"targets": "target"}).to_csv(tmp_path / "a.csv")
    (example,) = text_examples(str(tmp_path / "a.csv"), TextFields(), RejectedRecords(0), merge=True)
    assert example.targets == ("['w2', 'w3']",)


NULLS = [None, float("nan"), -1, -1.0, "-1", "-", "", " "]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("null", [*map(repr, NULLS), "pandas.NA", "numpy.int64(-1)", "numpy.float32('nan')"])
def test_a_label_that_is_not_given_is_no_class(null, several):
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    value = eval(null, {"nan": float("nan"), "numpy": numpy, "pandas": pandas})
    rows = [{"text": "w1", "label": [label] if several else label} for label in (value, "b")]
    with pytest.raises(UserError, match=r"row 0: no label \(.*\): leave out the row"):
        found_labels(as_source(rows, "rows"), LabelFields(several=several), RejectedRecords(0))
    bad = RejectedRecords(1)
    assert found_labels(as_source(rows, "rows"), LabelFields(several=several), bad) == {"b"} and bad.count == 1
    bad = RejectedRecords(1)
    fields = LabelFields(several=several)
    assert len([*label_examples(as_source(rows, "rows"), fields, bad, names=("b",))]) == 1 == bad.count


@pytest.mark.parametrize("source", ["rows", "disk", "parquet"])
def test_a_class_label_of_minus_one_is_no_class(source, tmp_path, monkeypatch):
    """As in SNLI of the hub. The numbers are those of `ClassLabel`."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    label = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = datasets.Dataset.from_dict({"text": ["w1"] * 6, "label": [2, -1, 0, 1, -1, None]}, features=features)
    path = as_source(rows, "rows") if source == "rows" else str(tmp_path / "set")
    if source == "disk":
        rows.save_to_disk(path)
    elif source == "parquet":
        rows.to_parquet(path := f"{path}.parquet")
    bad = RejectedRecords(3)
    examples = [*label_examples(path, LabelFields(), bad, names=label.names)]
    assert [example.label for example in examples] == [2, 0, 1] and bad.count == 3
    assert [example.name for example in examples] == ["0", "2", "3"]


def test_the_first_line_is_a_header_only_if_it_has_one_of_the_columns_that_are_named(tmp_path):
    """As CoLA is handed out: test.tsv alone has a header."""
    names = ("source", "label", "mark", "sentence")
    (tmp_path / "train.tsv").write_text("gj04\t1\t\tHe left.\ngj04\t0\t*\tHe leaving.\n")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tHe stays.\n")
    found = [
        [row.value for row in rows(str(tmp_path / f"{split}.tsv"), RejectedRecords(0), names)]
        for split in ("train", "test")
    ]
    assert found[0] == [
        dict(zip(names, line, strict=True))
        for line in (("gj04", "1", "", "He left."), ("gj04", "0", "*", "He leaving."))
    ]
    assert found[1] == [{"index": "0", "sentence": "He stays."}]
