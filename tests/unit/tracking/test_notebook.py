"""Bars, curves and tables in a notebook, and no bar where nobody sees it move."""

import io
import json
import sys
from xml.etree import ElementTree

import pytest

from lm_experiments_tools.tracking.notebook import Results
from lm_experiments_tools.tracking.progress import make_bar

CELL = """
import io, sys
from lm_experiments_tools.tracking.tracker import Tracker
with Tracker(None, rank=0, total_steps=3) as tracker:
    for step in (1, 2, 3):
        tracker.bar.update()
        tracker.log("train", step, step, step, {"loss": 3.0 / step})
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "show", "seen"), [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)]
)
def test_a_bar_is_for_a_terminal_and_one_worker(monkeypatch, stream, show, seen):
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(make_bar([1, 2, 3], desc="rows", show=show, delay=0)) == [1, 2, 3]
    assert ("3/3" in stream.getvalue()) == seen


def test_results_are_dictionaries_and_tables():
    results = Results(train={"loss": 1.23456}, valid={"loss": 2.0, "f1": None})
    assert results == {"train": {"loss": 1.23456}, "valid": {"loss": 2.0, "f1": None}}
    assert json.loads(json.dumps(results)) == results
    table = ElementTree.fromstring(results._repr_html_())
    rows = [[cell.text for cell in row] for row in table]
    assert rows == [[None, "train", "valid"], ["loss", "1.235", "2"], ["f1", None, None]]
    assert "<th>a&lt;b</th><td>1</td>" in Results({"a<b": 1.0})._repr_html_()


def test_a_kernel_shows_bar_and_curve(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = book.cells[0].outputs
    (picture,) = [output["data"]["text/html"] for output in outputs if output.output_type == "display_data"]
    assert picture.count(" ", picture.index("points="), picture.index('" fill')) == 2 and "train 1.000" in picture
    bar = "".join(output["text"] for output in outputs if output.output_type == "stream")
    assert "3/3" in bar and "loss 1.000" in bar


@pytest.mark.slow
def test_an_error_of_the_user_is_one_line_in_a_kernel(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = ["import sys; from lm_experiments_tools import FineTuner; sys.ps1", "FineTuner(batch=8)"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(book, timeout=120, allow_errors=True, resources={"metadata": {"path": tmp_path}})
    client.execute()
    assert book.cells[0].outputs[-1].output_type == "execute_result"  # what the stop button tells a notebook by
    (error,) = book.cells[1].outputs
    assert error.traceback == ["UserError: FineTuner has no setting 'batch': did you mean batch_size?"]
