"""Damaged checkpoints: each kind is named, and passed over or refused; what is read is what was saved, or nothing.

`make damage` runs every kind on the newest, the newest two and all checkpoints of a run, and through the flags that
start from a checkpoint, and prints the table of benchmarks/reliability.md.
"""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from lm_experiments_tools.checkpoint import manifest, saving
from lm_experiments_tools.checkpoint.finding import find_newest_valid, find_resume
from lm_experiments_tools.checkpoint.manifest import CheckpointDamaged, verify
from lm_experiments_tools.checkpoint.source import find_source
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.saved import open_saved
from tests.helpers.checkpoint_toys import random_t5, write
from tests.helpers.damage import DAMAGE, UNREAD, UNREADABLE, refuse_to_open, truncate
from tests.helpers.saved_runs import end_of_run, make_run, train
from tests.helpers.toys import TinyLabeller, weights_of

KINDS = pytest.mark.parametrize("kind", DAMAGE)
FAST = {"bit flip in the middle", "manifest missing", "rank files swapped", "manifest a pipe", "unreadable weights"}
MATRIX = [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in DAMAGE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of 6 steps with checkpoints 2, 4, 6, and the end of the same run of 8 steps that nothing disturbed."""
    folder, save_tree = tmp_path_factory.mktemp("runs"), saving.save_tree

    def with_files_of_ranks(stem, tree, **options):
        save_tree(stem, tree, **options)
        if stem.name == "trainer_state":
            (stem.parent / "rng").mkdir()
            for rank in range(2):
                save_tree(stem.parent / "rng" / f"rank{rank}", {"noise": torch.full((8,), rank)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_tree", with_files_of_ranks)
        train(folder / "run")
        train(folder / "whole", iters=8)
    train(folder / "labeller", model=TinyLabeller())
    whole = {name: value for name, value in end_of_run(folder / "whole").items() if not name.startswith("rng/")}
    return folder / "run", whole, folder / "labeller"


@pytest.fixture
def copy(runs, tmp_path, monkeypatch):
    """A copy of the run, to be damaged."""
    monkeypatch.setattr("builtins.open", refuse_to_open(open))
    monkeypatch.setattr("io.open", refuse_to_open(open))
    yield shutil.copytree(runs[0], tmp_path / "run", symlinks=True)
    UNREADABLE.clear()


@pytest.fixture(scope="module")
def counts():
    """Cases that ended as they have to, by what was asked."""
    found: dict[str, list[str]] = {}
    yield found
    if found:
        print("\n| asked | kinds | named, and as it should end |\n|---|---|---|")
        print(*(f"| {asked} | {len(kinds)} | {len(kinds)} |" for asked, kinds in found.items()), sep="\n")


def newest(run, number):
    return [run / "checkpoints" / f"step_{step:06d}" for step in (6, 4, 2)[:number]]


def listing(folder):
    return sorted(str(path) for path in folder.rglob("*"))


@KINDS
def test_damage_is_named_and_the_previous_checkpoint_is_found(copy, kind, caplog):
    damage, reason = DAMAGE[kind]
    damage(newest(copy, 1)[0])
    assert find_newest_valid(copy / "checkpoints").name == "step_000004"
    warnings = caplog.messages
    assert len(warnings) == 1 and re.search(reason, warnings[0]) and "step_" in warnings[0], warnings


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MATRIX)
def test_a_run_goes_on_from_the_newest_whole_checkpoint_bit_for_bit(copy, runs, caplog, counts, kind, number):
    damage, reason = DAMAGE[kind]
    for checkpoint in newest(copy, number):
        damage(checkpoint)
    loop = make_run(copy, iters=8)
    assert loop.state.step == (4, 2)[number - 1]
    said = [
        r.getMessage() for r in caplog.records if r.name.endswith("checkpoint.finding") and r.levelname == "WARNING"
    ]
    assert len(said) == number and all(re.search(reason, sentence) for sentence in said), said
    loop.train()
    assert end_of_run(copy) == runs[1]
    counts.setdefault(f"the newest {number} damaged: bit for bit the undisturbed run", []).append(kind)


@pytest.mark.parametrize("kind", MATRIX)
def test_a_run_of_damaged_checkpoints_alone_is_refused_and_left_as_it_is(copy, counts, kind):
    damage, reason = DAMAGE[kind]
    if kind in ("another step's directory", "manifest of another step") or "of another step" in kind:
        shutil.rmtree(newest(copy, 3)[2])  # from which these take the files of the others
        shutil.copytree(newest(copy, 1)[0], newest(copy, 3)[2])
        damage = truncate("manifest.json", 0)
        reason = "manifest.json is (not valid JSON|of step)"
    for checkpoint in newest(copy, 3):
        damage(checkpoint)
    before = listing(copy / "checkpoints")
    with pytest.raises(UserError, match=r"none of the 3 checkpoints in .*another --model_path") as refusal:
        make_run(copy, iters=8)
    assert len(re.findall(reason, str(refusal.value))) == 3 and listing(copy / "checkpoints") == before
    counts.setdefault("every one damaged: refused with the reasons", []).append(kind)


@pytest.mark.parametrize("kind", MATRIX)
def test_what_another_run_starts_from_is_what_was_saved_or_nothing(copy, tmp_path, caplog, counts, kind):
    """--init_checkpoint (weights, optimizer, counts) and the weights of --from_pretrained, the damaged one named."""
    damage, reason = DAMAGE[kind]
    checkpoint = newest(copy, 1)[0]
    whole = make_run(tmp_path / "second", init_checkpoint=str(checkpoint), iters=8)
    optimizer, weights = whole.backend.optimizer.state_dict(), weights_of(whole.backend.unwrap())
    damage(checkpoint)
    manifest._verified.clear()
    for asked, start in {
        "--init_checkpoint": lambda: make_run(tmp_path / "third", init_checkpoint=str(checkpoint), iters=8),
        "--from_pretrained": lambda: open_saved(str(checkpoint)),
    }.items():
        caplog.clear()
        try:
            started = start()
        except UserError as error:
            assert "\n" not in str(error) and re.search(reason, str(error)), error
            counts.setdefault(f"{asked}: refused with the reason", []).append(kind)
            continue
        assert kind in UNREAD[asked] or "has lost its manifest.json" in caplog.text
        model = started.model if asked == "--from_pretrained" else started.backend.unwrap()
        for name, value in weights_of(model).items():
            assert torch.equal(value, weights[name]), name
        if asked == "--init_checkpoint":
            assert started.state.step == 6
            torch.testing.assert_close(started.backend.optimizer.state_dict(), optimizer, rtol=0, atol=0)
        counts.setdefault(f"{asked}: harmless there, all that is read as it was saved", []).append(kind)


def test_a_checkpoint_of_another_model_is_refused(copy, runs):
    shutil.rmtree(newest(copy, 1)[0])
    shutil.copytree(newest(runs[2], 1)[0], newest(copy, 1)[0])
    with pytest.raises(UserError, match=r"no weight in .* fits the model"):
        make_run(copy, iters=8)
    with pytest.raises(UserError, match=r"does not fit the model: .* 1 of another shape .shared.weight: 64x16 in the"):
        make_run(copy, model=random_t5(vocab_size=80, d_kv=8), resume=str(newest(copy, 2)[1]))


def test_what_an_interrupted_save_left_and_a_copied_step_are_passed_over(copy, runs, caplog):
    six = newest(copy, 1)[0]
    shutil.copytree(six, six.with_name(".tmp-step_000008"))
    shutil.copytree(six, six.with_name("step_000007"))
    (copy / "checkpoints" / "model_9.pth").write_bytes(b"of t5-experiments")
    loop = make_run(copy, iters=8)
    assert loop.state.step == 6 and "step_000007 is damaged: manifest.json is of step 6" in caplog.text
    loop.train()
    assert end_of_run(copy) == runs[1]


def test_every_single_bit_of_the_manifest_is_guarded(tmp_path):
    path = write(tmp_path, 3)
    file = path / "manifest.json"
    content = file.read_bytes()
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        file.write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
            verify(path)
    file.write_bytes(re.sub(rb'(?<="manifest_sha256": ")\w{64}', rb"\\ud800" * 64, content))  # no text has these
    with pytest.raises(CheckpointDamaged, match="does not match its own"):
        verify(path)
    file.write_bytes(content)
    verify(path)


@pytest.mark.parametrize("target", ["checkpoints", "not_mounted"])
def test_a_link_that_leads_nowhere_is_no_run_that_begins(target, tmp_path):
    (tmp_path / "checkpoints").symlink_to(target)
    with pytest.raises(UserError, match=r"is no folder but a link to none: .*another --model_path"):
        find_resume("auto", tmp_path)
    with pytest.raises(UserError, match="no such checkpoint"):
        find_resume(str(tmp_path / "checkpoints"), None)
    (tmp_path / "last").symlink_to("last")
    with pytest.raises(UserError, match=r"config\.json"):
        find_source(str(tmp_path), "--from_pretrained")
