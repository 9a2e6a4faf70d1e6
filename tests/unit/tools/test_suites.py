"""`lmtools evaluate --suite`: the numbers of the libraries called directly, a record a checkpoint, none twice."""

import importlib.util
import json
import shutil

import pytest

from lm_experiments_tools.checkpoint.manifest import MANIFEST, build_manifest, describe_files, list_files
from lm_experiments_tools.metrics import lower_is_better
from lm_experiments_tools.tools import suites
from lm_experiments_tools.tools.main import main
from tests.helpers.runs import records
from tests.helpers.suite_toys import save_decoder_with_t5_tokenizer, save_run, write_colours
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


def needs(package: str):
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed: it is of the extra `suites`")


@pytest.fixture
def run_of(tmp_path):
    """A run directory with checkpoints of steps 2 and 4."""
    return lambda kind: save_run(tmp_path / "run", kind)


def evaluate(run, *flags) -> int:
    return main(["evaluate", str(run), *map(str, flags)])


@pytest.fixture
def colours(tmp_path):
    return write_colours(tmp_path)


@needs("lm_eval")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend"), [("decoder", "causal"), ("encoder-decoder", "seq2seq")])
def test_lm_eval_gives_what_it_gives_by_itself(run_of, colours, tmp_path, monkeypatch, kind, backend):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run = run_of(kind)
    assert evaluate(run, "--suite", "lm_eval", "--tasks", colours) == 0
    found = records(run, "lm_eval")
    assert [(r["step"], r["samples"], r["tokens"]) for r in found] == [(2, 16, 200), (4, 32, 400)]
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for record in found:
        path = run / "checkpoints" / f"step_{record['step']:06}"
        model = HFLM(pretrained=str(path), backend=backend, device="cpu", batch_size=1)
        direct = simple_evaluate(model=model, tasks=["colours"], task_manager=manager, bootstrap_iters=0)["results"]
        expected = {
            "colours/acc": direct["colours"]["acc,none"],
            "colours/acc_norm": direct["colours"]["acc_norm,none"],
        }
        assert {name: record[name] for name in record["metrics"]} == expected


@pytest.mark.slow
@needs("lm_eval")
def test_a_decoder_is_measured_without_the_end_that_its_tokenizer_appends(tmp_path, monkeypatch, capsys):
    """With </s> between question and choice all choices would tie, and the first would win."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    gpt = save_decoder_with_t5_tokenizer(tmp_path / "gpt", numbered_words_vocabulary(tmp_path), "number")
    task = write_colours(tmp_path, choices='["token", "number"]', label=1)
    assert main(["evaluate", str(gpt), "--suite", "lm_eval", "--tasks", str(task)]) == 0
    columns, values = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    model = HFLM(pretrained=str(gpt), backend="causal", device="cpu", batch_size=1, add_bos_token=False)
    direct = simple_evaluate(model=model, tasks=["colours"], task_manager=manager, bootstrap_iters=0)["results"]
    assert float(values[columns.index("colours/acc")]) == direct["colours"]["acc,none"] == 1.0


@needs("lm_eval")
def test_the_direction_of_each_metric_is_lm_evals():
    import lm_eval.api.metrics  # noqa: F401, fills the registry
    from lm_eval.api.registry import higher_is_better_registry

    assert {name: not lower_is_better(f"task/{name}") for name in higher_is_better_registry} == dict(
        higher_is_better_registry.items()
    )


@pytest.mark.slow
def test_a_value_that_is_there_is_not_measured_again(run_of, tmp_path, monkeypatch, capsys):
    asked = []

    def measure(suite, name, tasks):
        for task in tasks:
            asked.append((name[-1], task, suite.settings.get("limit")))
            yield task, {f"{task}/acc": float(name[-1]) / 10}

    monkeypatch.setattr(suites, "_lm_eval", measure)
    monkeypatch.setattr(suites.Suite, "check", lambda self: None)
    run = run_of("decoder")
    flags = ("--suite", "lm_eval", "--tasks")
    with (run / "metrics.jsonl").open("w") as file:  # what the run logged, with a line torn by a kill
        line = {"step": 4, "split": "valid", "samples": 32, "tokens": 400, "loss": 2.5, "metrics": ["loss"], "time": 1}
        file.write(json.dumps(line) + "\n" + '{"step": 4, "split": "lm_eval", "of"\n')
    assert evaluate(run, *flags, "a") == 0
    assert asked == [("2", "a", None), ("4", "a", None)]
    assert evaluate(run, *flags, "a", "b") == 0
    assert asked[2:] == [("2", "b", None), ("4", "b", None)]
    capsys.readouterr()
    assert evaluate(run, *flags, "a", "b") == 0 and len(asked) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", "a/acc", "b/acc"] and lines[-1].split()[1:] == ["0.4", "0.4"]
    assert evaluate(run, *flags, "a", "--limit", 3) == 0 and asked[4:] == [("2", "a", 3), ("4", "a", 3)]
    later = shutil.copytree(run / "checkpoints" / "step_000004", run / "checkpoints" / "step_000006")
    (later / MANIFEST).unlink()
    (later / MANIFEST).write_text(build_manifest(describe_files(later, list_files(later).values()), 6, False, {}))
    assert evaluate(run, *flags, "a") == 0 and asked[6:] == [("6", "a", None)]
    assert main(["compare", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "lm_eval: last (best @ its step)" in printed and "0.6 (0.6 @ 6)" in printed
    assert "a/acc" in printed and "2.5 (2.5 @ 4)" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--suite", "lm_eval"), "measures --tasks: name at least one"),
        (("--tasks", "a", "--valid_data_path", "x"), "--tasks needs --suite"),
        (("--limit", "3", "--valid_data_path", "x"), "--limit needs --suite"),
    ],
)
def test_refusals(run_of, capsys, flags, message):
    assert evaluate(run_of("decoder"), *flags) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_checkpoint_that_its_run_removes_meanwhile_is_left_out(run_of, monkeypatch, caplog):
    run = run_of("decoder")

    def measure(suite, name, tasks):
        if name.endswith("2"):
            shutil.rmtree(f"{name[:-1]}4")
        opened = suites.open_saved(name)
        yield "a", {"a/size": float(opened.model.num_parameters())}

    monkeypatch.setattr(suites, "_lm_eval", measure)
    monkeypatch.setattr(suites.Suite, "check", lambda self: None)
    assert evaluate(run, "--suite", "lm_eval", "--tasks", "a") == 0
    assert [record["step"] for record in records(run, "lm_eval")] == [2]
    assert "step_000004 is left out: its run has removed it meanwhile" in caplog.text
