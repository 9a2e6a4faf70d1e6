"""Phases in one run: exact over borders and restarts, with the rates, masks and weights that were asked for."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from lm_experiments_tools.checkpoint.tree import load_tree
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.trainer import TrainingLoop
from run_bert_pretraining import main as pretrain_bert
from run_t5_pretraining import main
from tests.helpers.bert_toys import make_bert_data
from tests.helpers.runs import T5_RUN, TINY, records, words, write_text, write_toys
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

DECAY = {"lr_scheduler": "warmup_stable_decay", "num_warmup_steps": 0}
DECAY |= {"lr_scheduler_options": ["num_decay_steps=2", "decay_type=1-sqrt"]}
OTHER = {
    "noise_density": 0.3,
    "target_seq_len": 24,
    "trained": ["decoder.block.*", "decoder.final*"],
    "gradient_accumulation_steps": 2,
}
SHORT = {"input_seq_len": 24, "batch_size": 2, "optimizer_options": ["betas=0.8,0.9"], **DECAY}
PHASES = [{"iters": 4, "lr_scheduler": "linear", "num_warmup_steps": 2}, {"iters": 4, **OTHER}, {"iters": 3, **SHORT}]
MLM = {
    "task": "mlm", "model_cls": "transformers:BertForMaskedLM", "model_cfg": "bert.json", "target_seq_len": None,
}  # fmt: skip


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    numbered_words_vocabulary(folder)
    write_toys(folder)
    write_text(folder, "other.jsonl", pairs=17)
    (folder / "tiny.json").write_text(json.dumps(TINY | {"dropout_rate": 0.1}))
    return folder


@pytest.fixture
def work(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    for folder in inputs.glob("run*"):
        shutil.rmtree(folder)
    return inputs


def start(run="run", phases=None, **changed):
    texts = None if phases is None else tuple(map(json.dumps, phases))
    flags = {
        **T5_RUN, "valid_data_path": "text.jsonl", "vocab": "vocab.model", "model_path": run, "lr": 1e-2,
        "valid_interval": 3, "save_interval": 2, "keep_checkpoints": 20, "save_best": True, "peak_tflops": 1,
        "phases": texts,
    }  # fmt: skip
    main(words(**{**flags, "iters": None, **changed}))


def kill_after(monkeypatch, name, number):
    """Raise from the `number`-th call of a method of the trainer, before or after it (`name`, `name.`)."""
    method, calls = getattr(TrainingLoop, name.rstrip(".")), []

    def counted(self, *args, **options):
        calls.append(self)
        if len(calls) == number and not name.endswith("."):
            raise Killed
        result = method(self, *args, **options)
        if len(calls) == number:
            self.saver.wait()
            raise Killed
        return result

    monkeypatch.setattr(TrainingLoop, name.rstrip("."), counted)


def ended(run):
    """Weights, optimizer and state of the newest checkpoint, and the losses that were logged."""
    last = load_tree(f"{run}/last/trainer_state")
    state = {name: value for name, value in last["state"].items() if name != "metrics"}
    optimizer = {**load_file(f"{run}/last/optimizer.safetensors")}
    lines = [(line["step"], split, line["loss"]) for split in ("train", "valid") for line in records(run, split)]
    return load_file(f"{run}/last/model.safetensors"), optimizer, state, lines, last["workers"][0]["random_state"]


def check_equal(one, other):
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one[2:4] == other[2:4]
    assert torch.equal(one[4]["torch"], other[4]["torch"])


KILLS = [("train_step", 4), ("save.", 2), ("__init__", 1), ("__init__.", 2), ("train_step", 1), ("_finish", 1)]


@pytest.mark.parametrize("kills", [KILLS[1::4], pytest.param(KILLS, marks=pytest.mark.slow)], ids=["two", "all"])
def test_kills_at_and_around_borders_change_no_bit(work, monkeypatch, kills):
    start("run_whole", PHASES)
    whole = ended("run_whole")
    assert whole[2]["step"] == 11 and whole[2]["schedule_start"] == 8 and whole[2]["phase"] == 2
    for name, number in kills:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_after(patch, name, number)
            start(phases=PHASES)
    start(phases=PHASES)
    check_equal(ended("run"), whole)


def test_rates_follow_each_phase_and_frozen_weights_stay_with_new_optimizer_state(work):
    start(phases=PHASES)
    rates = [line["lr"] for line in records("run")]
    factors = [0, 0.5, 1, 0.5, 1, 1, 1, 1, 1, 1, 1 - 0.5**0.5]  # linear; constant; one stable step, then 1 - sqrt(x)
    assert rates == pytest.approx([1e-2 * factor for factor in factors], abs=1e-12)
    before, after = (load_file(f"run/checkpoints/step_{step:06d}/model.safetensors") for step in (4, 8))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("decoder.") and "embed" not in name for name in changed)
    state = load_tree("run/last/optimizer")
    states = state["optimizer"]["state"]
    steps = {name: float(states[number]["step"]) for number, name in enumerate(state["names"])}
    assert steps["encoder.final_layer_norm.weight"] == 3 and steps["decoder.final_layer_norm.weight"] == 11


def seen_tokens(monkeypatch, read):
    """Filled with the unmasked tokens of each step that is made."""
    seen, step = [], TrainingLoop.train_step

    def noted(self, batch, seconds=0.0):
        labels = batch["labels"]
        seen.append(torch.where(labels == -100, batch["input_ids"], labels).flatten().tolist())
        read.append((labels != -100).float().mean().item())
        return step(self, batch, seconds)

    monkeypatch.setattr(TrainingLoop, "train_step", noted)
    return seen


def test_another_mask_rate_keeps_the_place_in_the_data(work, monkeypatch):
    masked = []
    seen = seen_tokens(monkeypatch, masked)
    start(phases=[{"iters": 3, "mlm_probability": 0.5}, {"iters": 3, "mlm_probability": 0.1}], **MLM)
    start("run_plain", iters=6, **MLM)
    assert seen[:6] == seen[6:] and min(masked[:3]) > 0.35 and max(masked[3:6]) < 0.2


def test_other_lengths_go_on_after_as_many_tokens_and_other_data_at_its_beginning(work):
    other = {"iters": 2, "data_path": "other.jsonl"}
    start(phases=[{"iters": 3}, {"iters": 2, "input_seq_len": 16}, other, {"iters": 1, "lr": 1e-3}], **MLM)
    at = [load_tree(f"run/checkpoints/step_{step:06d}/trainer_state")["state"] for step in (3, 4, 5, 7, 8)]
    positions = [state["consumed_samples"] + state["data_offset"] for state in at]
    assert positions[0] == 12 and abs(16 * (positions[1] - 4) - 12 * 32) <= 16
    assert positions[2:] == [positions[1] + 4, 8, 4]


def test_a_branch_with_the_same_settings_is_its_trunk_and_one_with_another_schedule_decays(work):
    start("run_trunk", iters=8, lr_scheduler="constant_with_warmup", num_warmup_steps=2)
    before = {path: path.read_bytes() for path in (work / "run_trunk").rglob("*") if path.is_file()}
    branch = {"branch_from": "run_trunk/checkpoints/step_000004", "iters": 4}
    start("run_same", **branch, lr_scheduler="constant_with_warmup", num_warmup_steps=2)
    ours, trunk = ended("run_same"), ended("run_trunk")
    for one, other in zip(ours[:2], trunk[:2], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert ours[3] == [line for line in trunk[3] if line[0] > 4]
    for _ in range(2):  # a second start finds nothing left to do
        start("run_decay", **branch, lr_scheduler="linear", num_warmup_steps=0)
    rates = [(line["step"], line["lr"]) for line in records("run_decay")]
    assert rates == [(5, 1e-2), (6, 0.75e-2), (7, 0.5e-2), (8, 0.25e-2)]
    assert load_tree("run_decay/last/trainer_state")["state"]["first_step"] == 4
    assert {path: path.read_bytes() for path in (work / "run_trunk").rglob("*") if path.is_file()} == before


def test_lengths_in_tokens_are_updates_of_the_global_batch(work):
    start(iters="1000tok", save_interval="0.3ktok", lr_scheduler="linear", num_warmup_steps="256tok")
    config = json.loads((work / "run/config.json").read_text())  # 4 rows of 32 tokens, rounded up
    assert [config[name] for name in ("iters", "save_interval", "num_warmup_steps")] == [8, 3, 2]
    assert len(records("run")) == 8


@pytest.mark.parametrize(
    ("phases", "changed", "sentence"),
    [
        ([{"lr": 1e-3}], {}, "phase 1 has no length"),
        ([{"iters": 1}, {"iters": 1, "seed": 3}], {}, "phase 2: seed cannot change between phases"),
        ([{"iters": 1, "mask_rate": 0.3}], {}, "phase 1: unknown setting 'mask_rate'"),
        ([{"iters": 1, "tokens": "5k"}], {}, "phase 1: iters is set a second time"),
        ([{"iters": 1}, {"iters": 1, "trained": ["decodr.*"]}], {}, "--trained decodr.* matches nothing"),
        ([{"iters": 1}], {"iters": 5}, "--iters and --phases exclude each other"),
        ([{"iters": 1}], {"run": None, "save_interval": None, "save_best": None}, "--phases needs --model_path"),
        (None, {"branch_from": "x", "resume": "y"}, "--branch_from starts a new run"),
        (None, {"branch_from": "run", "iters": 5}, "--branch_from run is in --model_path"),
        ([{"iters": 1}], {"init_checkpoint": "x"}, "--phases needs --reset_iteration and --reset_lr"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_runs(work, phases, changed, sentence):
    with pytest.raises(UserError, match=sentence):
        start(**{"phases": phases, **changed})
    assert not list(work.glob("run/checkpoints/*"))


def test_a_phase_begins_where_the_one_before_ends_and_keeps_its_place(work):
    phases = [{"iters": 2}, {"iters": 2, "lr": 1e-3}, {"iters": 2, "lr": 1e-4}]
    start(phases=phases)
    with pytest.raises(UserError, match=r"phase 2 begins at step 2, but .*step_000006 is of phase 3 and step 6"):
        start(phases=phases, resume="run/checkpoints/step_000002")
    with pytest.raises(UserError, match="phase 3 began at step 4, and the phases before it now end at step 5"):
        start(phases=[{"iters": 3}, *phases[1:]])
    with pytest.raises(UserError, match="holds a run with other settings: lr "):
        start(iters=8)
    start(phases=[*phases[:2], {"iters": 3, "lr": 1e-4}, {"iters": 1}])  # longer, and one more
    assert ended("run")[2]["step"] == 8


def test_bert_keeps_its_place_under_another_mask_rate_and_over_a_kill_at_the_border(work, tmp_path, monkeypatch):
    data, masked = make_bert_data(tmp_path), []
    flags = {
        "data_path": data / "train", "vocab_file": data / "vocab.txt", "input_seq_len": 48, "batch_size": 8,
        "model_cfg": data / "tiny.json", "lr": 1e-3, "log_interval": 1, "use_nsp": 0, "backend": "local",
        "phases": tuple(map(json.dumps, [{"iters": 2}, {"iters": 2, "mlm_prob": 0.4, "trained": ["encoder"]}])),
    }  # fmt: skip
    seen = seen_tokens(monkeypatch, masked)
    pretrain_bert(words(**flags, model_path="run_whole"))
    pretrain_bert(words(**{**flags, "phases": None}, iters=4, model_path="run_plain"))
    assert seen[:4] == seen[4:] and max(masked[:2]) < 0.2 < min(masked[2:4])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, "__init__", 2)
        pretrain_bert(words(**flags, model_path="run"))
    pretrain_bert(words(**flags, model_path="run"))
    ours, theirs = (load_file(f"{run}/last/model.safetensors") for run in ("run", "run_whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
