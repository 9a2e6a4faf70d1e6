"""Runs read back by `lmtools compare`: real, damaged and unfinished ones."""

import fcntl
import json
import math
import re
import shutil

import pytest

from lm_experiments_tools.files import dump_json
from lm_experiments_tools.metrics import lower_is_better
from lm_experiments_tools.tools.compare import differences, read_run
from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tracking.tracker import _POSITION
from run_t5_pretraining import main as pretrain
from tests.helpers.runs import records, tiny_t5_run, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two real runs, of other learning rates and lengths."""
    folder = tmp_path_factory.mktemp("compared")
    flags = tiny_t5_run(folder)
    for name, lr, iters in (("a", 1e-3, 4), ("b", 1e-2, 6)):
        pretrain(words(**flags | {"model_path": folder / "runs" / name, "lr": lr, "iters": iters}))
    (folder / "runs" / "no_run").mkdir()
    for name in "ab":  # this process made them, and holds their locks until it ends
        (folder / "runs" / name / ".lock").unlink()
    return folder / "runs"


@pytest.fixture
def copied(folder, tmp_path):
    """Copies to damage."""
    for name in "ab":
        shutil.copytree(folder / name, tmp_path / name, symlinks=True)
    return tmp_path


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of a printed table."""
    block = text.partition(f"{title}\n")[2].partition("\n\n")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in block.splitlines()]


def test_tables_show_what_the_runs_logged_and_only_settings_that_differ(folder, capsys):
    assert main(["compare", str(folder)]) == 0
    printed = capsys.readouterr()
    head, *found = rows(printed.out, "runs")
    for name, iters, cells in zip("ab", (4, 6), found, strict=True):
        row, last = dict(zip(head, cells, strict=True)), records(folder / name)[-1]
        assert (row["run"], row["state"], row["step"]) == (name, "ended", f"{iters}/{iters}")
        assert row["samples"] == str(4 * iters) and row["tokens"] == f"{last['tokens']:,}"
        assert row["train loss"] == f"{last['loss']:.4g}" and row["tokens/s"] == f"{last['tokens_per_second']:,.0f}"
        valid = records(folder / name, "valid")
        best = min(valid, key=lambda record: record["loss"])
        shown = {cells[0]: cells[1] for cells in rows(printed.out, "validation: last (best @ its step)")[1:]}[name]
        assert shown == f"{valid[-1]['loss']:.4g} ({best['loss']:.4g} @ {best['step']})"
    settings = {cells[0]: cells[1:] for cells in rows(printed.out, "settings that differ")[1:]}
    assert settings == {"lr": ["0.001", "0.01"], "iters": ["4", "6"]} and not printed.err


def test_seconds_are_those_of_steps_without_validation_and_pauses(copied):
    lines = [json.loads(line) for line in (copied / "a" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["time"] += 10_000 * line["step"]  # as if each step were another start
    (copied / "a" / "metrics.jsonl").write_text("".join(dump_json(line, indent=None) + "\n" for line in lines))
    expected = sum(record["seconds_per_step"] for record in records(copied / "a"))
    assert math.isclose(read_run(copied / "a").records[-1]["seconds"], expected)


def test_damage_is_an_error_message_and_the_rest_is_shown(copied, capsys):
    with (copied / "a" / "metrics.jsonl").open("a") as file:
        whole = '{"step": 9, "split": "train", "samples": 9, "tokens": 9, "time": 9, "loss": 1.5, "metrics": ["loss"]}'
        file.write(f'{{"step": 5, "split"\nnull\n{whole}\n{{"torn')
    (copied / "a" / "model_config.json").write_text("{")
    (copied / "b" / "config.json").write_text("{")
    (copied / "empty").mkdir()
    assert main(["compare", str(copied / "a"), str(copied / "b"), str(copied / "empty"), str(copied / "none")]) == 0
    printed = capsys.readouterr()
    assert "9/4" in printed.out and "settings that differ" not in printed.out
    for sentence in (
        "a: 2 of ", "model_config.json is not valid JSON", "config.json is not valid JSON",
        "empty holds no metrics.jsonl", "none holds no metrics.jsonl",
    ):  # fmt: skip
        assert sentence in printed.err
    (copied / "a" / "config.json").unlink()
    assert "records no settings" in " ".join(read_run(copied / "a").problems)
    assert read_run(copied / "a").records[-1]["seconds"] > 0
    for text in ("", '{"torn'):
        (copied / "a" / "metrics.jsonl").write_text(text)
        assert "has logged nothing yet" in " ".join(read_run(copied / "a").problems)


def test_the_newest_settings_that_trained_are_compared(copied):
    config = json.loads((copied / "b" / "config.json").read_text())
    (copied / "b" / "config.1.json").write_text(json.dumps({**config, "lr": 0.5, "COMMIT": "abc", "MACHINE": "b"}))
    (copied / "b" / "config.2.json").write_text(json.dumps({**config, "lr": 0.7, "validate_only": True}))
    found = differences([read_run(copied / "a"), read_run(copied / "b")])
    assert found["lr"] == [0.001, 0.5] and not {"COMMIT", "MACHINE", "ENV", "model_path"} & found.keys()
    (copied / "b" / "config.3.json").write_text(json.dumps({**config, "peft": "lora"}))
    assert differences([read_run(copied / "a"), read_run(copied / "b")])["peft"] == [None, "lora"]


def test_the_best_value_is_that_of_the_metrics_direction(copied):
    position = {**dict.fromkeys(_POSITION, 0), "split": "valid", "metrics": ["bleu", "loss"]}
    lines = [{**position, "step": s, "bleu": b, "loss": s} for s, b in ((1, 3.0), (2, 5.0), (3, None), (4, 4.0))]
    (copied / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(copied / "a")
    assert (run.best("bleu")["step"], run.best("loss")["step"], run.last("bleu", "valid")) == (2, 1, 4.0)


def test_the_direction_of_a_value_is_told_by_the_registry_or_its_name():
    low = ("colours/bits_per_byte", "rmse", "brier", "edit_distance", "wiki/word_perplexity/none")
    high = ("accuracy", "rougeL/task_error_detection", "f1_tokens", "errors/acc/none", "gen_len")
    assert all(map(lower_is_better, low)) and not any(map(lower_is_better, high))


def test_states(copied):
    a = copied / "a"
    assert read_run(a).state == "ended"
    with (a / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(a).state == "running"
    (a / "metrics.json").unlink()
    config = json.loads((a / "config.json").read_text())
    (a / "config.json").write_text(json.dumps({**config, "iters": 100}))
    assert read_run(a).state == "stopped"


def test_losses_of_runs_are_drawn_in_one_picture(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: (drawn.append(figure), save(figure, *args))
    )
    assert main(["compare", str(folder), "--plot", str(tmp_path / "new" / "curves.png")]) == 0
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = {line.get_label(): line.get_ydata().tolist() for line in drawn[0].axes[0].lines}
    assert set(lines) == {"a train", "a valid", "b train", "b valid"}
    assert lines["b train"] == [record["loss"] for record in records(folder / "b")]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{}")
    assert main(["compare", str(tmp_path / "none"), "--plot", str(tmp_path / "c.png")]) == 2
    assert "there are no losses to draw" in capsys.readouterr().err
