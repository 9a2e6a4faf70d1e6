"""The run directory of a program written for t5-experiments: each start begins anew, and loses nothing of another."""

from lm_experiments_tools.ancestor.trainer import _set_aside


def test_an_earlier_start_is_kept_aside_and_may_be_begun_from(tmp_path):
    run = tmp_path / "run"
    for step in (2, 4):
        (run / "checkpoints" / f"step_00000{step}").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}")
    (run / "last").symlink_to("checkpoints/step_000004")
    assert _set_aside(run, str(run / "last")) == str(run / "checkpoints.1" / "step_000004")
    assert {path.name for path in run.iterdir()} == {".lock", "checkpoints.1", "metrics.1.jsonl"}
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    elsewhere = str(tmp_path / "model_6.pth")
    assert _set_aside(run, elsewhere) == elsewhere and (run / "checkpoints.2" / "step_000002").is_dir()
    assert _set_aside(run, None) is None
