"""Every backend trains the same T5 to the same weights as one process alone, and says what it really is.

Each backend runs worker.py in two jobs (train, then resume in new processes); tests read the files of its ranks. The
second job of FSDP and DeepSpeed is started by `accelerate launch` with a file in accelerate_configs/.
Tolerances: Horovod and DDP are bitwise equal for two workers; sums in another order move fp32 weights by about 1e-7.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import Job, forked, horovodrun, missing, shim, shipped, slow, torchrun
from tests.distributed.worker import BROKEN, SAVED_AT, STEPS
from tests.helpers.toys import tiny_t5

pytestmark = pytest.mark.distributed

PLAIN = ["ahead", "trained", "talked", "clipped", "factored", "evaluated", "fp16", "bf16"]
PLAIN += ["sparse", "sparse_own", "bert_bias"]
ZERO = ["trained", "talked", "evaluated", "zero_refusals"]


@dataclass
class Kind:
    """How a backend is started, what it runs, and what it must turn out to be."""

    launcher: list[str]
    scenarios: list[str]
    wrapped: str
    described: list[str]
    needs: list[str] = field(default_factory=list)
    workers: int = 2


KINDS = {
    "local": Kind(
        [sys.executable], [*PLAIN, "partial"], "T5ForConditionalGeneration", ["backend local, 1 worker"], workers=1,
    ),
    "horovod": Kind(
        horovodrun(), [*PLAIN, "partial", "compressed", "wide_range", "bf16_parameters"], "T5ForConditionalGeneration",
        ["backend horovod, 2 worker", "reduced by Horovod"], ["horovod"],
    ),
    "ddp": Kind(
        torchrun(), [*PLAIN, "compiled", "unused", "compressed", "wide_range"], "DistributedDataParallel",
        ["backend accelerate, 2 worker", "MULTI_CPU (DDP)"],
    ),
    "fsdp": Kind(
        shipped("fsdp"), [*PLAIN, "compiled"], "FSDPT5ForConditionalGeneration", ["2 worker", "FSDP (FSDP2)"],
    ),
    "zero1": Kind(shipped("zero1"), ZERO, "DeepSpeedEngine", ["2 worker", "ZeRO stage 1"], ["deepspeed"]),
    "zero2": Kind(shipped("zero2"), [*ZERO, "zero_16bit"], "DeepSpeedEngine", ["2 worker", "stage 2"], ["deepspeed"]),
    "zero3": Kind(
        shipped("zero3"), [*ZERO, "sparse_own", "zero_16bit"], "DeepSpeedEngine", ["2 worker", "stage 3"],
        ["deepspeed"],
    ),
}  # fmt: skip


def configured(mode: str, workers: int) -> list[str]:
    """With a DeepSpeed file that lays slices out in other orders than the shipped ones do."""
    file = Path(__file__).with_name(f"{mode}_slices.json")
    return ["env", f"ACCELERATE_DEEPSPEED_CONFIG_FILE={file}", *shim(mode, workers)]


RESHARDED = {  # goes on with the checkpoint of another kind, which had two workers or is `local`
    name: (Kind(launcher, [], "", [], ["deepspeed"], workers), earlier)
    for name, launcher, workers, earlier in (
        ("zero2_on_3", shim("zero2", 3), 3, "zero3"),
        ("alone_after_zero", [sys.executable], 1, "zero3"),
        ("zero1_on_3", shim("zero1", 3), 3, "zero2"),
        ("zero3_on_3", shim("zero3", 3), 3, "zero1"),
        ("zero1_on_1", shim("zero1", 1), 1, "zero3"),
        ("zero2_on_1", shim("zero2", 1), 1, "zero2"),
        ("zero3_on_1", shim("zero3", 1), 1, "fsdp"),
        ("zero1_after_alone", shim("zero1"), 2, "local"),
        ("zero2_after_ddp", shim("zero2"), 2, "ddp"),
        ("zero3_after_horovod", shim("zero3"), 2, "horovod"),
        ("fsdp_after_zero", shim("fsdp"), 2, "zero2"),
        ("horovod_after_zero", horovodrun(), 2, "zero1"),
        ("round_robin_on_3", configured("zero2", 3), 3, "ddp"),
        ("sub_groups_on_3", configured("zero3", 3), 3, "ddp"),
    )
}
OTHERS = [name for name in KINDS if name != "local"]
SHARDED = [name for name in KINDS if name.startswith("zero")]
UNSHARDED = [name for name in KINDS if name not in SHARDED]
LAUNCHED = ["fsdp", *SHARDED]  # by `accelerate launch`, whose start-up costs more than a fork


def read(folder: Path, scenario: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{scenario}_{rank}.json").read_text())


class Results:
    """The jobs of each backend, run once and read by all tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, {}

    def job(self, kind: str, *scenarios: str, earlier: Path | str = "-") -> Path:
        """The folder of a job that ran these scenarios; skips if a package is absent, fails if the job did."""
        spec = KINDS.get(kind) or RESHARDED[kind][0]
        if reason := missing("accelerate", *spec.needs):
            pytest.skip(reason)
        folder = self.folder / f"{kind}_{scenarios[0]}"
        if folder not in self.jobs:
            folder.mkdir()
            launcher = shim(kind) if kind in LAUNCHED and scenarios != ("resumed",) else spec.launcher
            self.jobs[folder] = forked(launcher, Path(__file__).with_name("worker.py"), folder, earlier, *scenarios)
        job: Job = self.jobs[folder]
        assert job.returncode == 0, job.output[-3000:]
        return folder

    def _folder(self, kind: str, name: str) -> Path:
        """Of a backend's first job, or for `resumed` of its second, which goes on from the first one's files."""
        first = self.job(kind, *KINDS[kind].scenarios)
        return self.job(kind, "resumed", earlier=first) if name == "resumed" else first

    def of(self, kind: str, scenario: str) -> list[dict[str, Any]]:
        """The results of each rank in a scenario."""
        folder = self._folder(kind, scenario)
        return [read(folder, scenario, rank) for rank in range(KINDS[kind].workers)]

    def weights(self, kind: str, *names: str) -> dict[str, torch.Tensor]:
        """The weights that rank 0 saved in a scenario, or in a part of it."""
        return load_file(self._folder(kind, names[0]) / f"{'_'.join(names)}.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("jobs"))


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.parametrize("kind", slow(KINDS, "zero1", "zero2"))
def test_the_backend_is_what_was_asked_for(results, kind):
    trained, talked = results.of(kind, "trained"), results.of(kind, "talked")
    for rank in range(KINDS[kind].workers):
        assert trained[rank]["wrapped"] == KINDS[kind].wrapped
        assert all(words in trained[rank]["describe"] for words in KINDS[kind].described), trained[rank]["describe"]
        assert trained[rank]["unwraps"]
        assert (talked[rank]["rank"], talked[rank]["local_rank"]) == (rank, rank)
        assert talked[rank]["world_size"] == KINDS[kind].workers


@pytest.mark.parametrize("kind", slow(OTHERS, "zero1", "zero2"))
def test_20_adamw_steps_equal_one_process(results, kind, record_property):
    """Accumulation, clipping, ragged steps and a skipped one; the norm is of the reduced gradient before clipping."""
    alone, together = results.of("local", "trained")[0]["steps"], results.of(kind, "trained")
    difference = largest_difference(results.weights("local", "trained"), results.weights(kind, "trained"))
    record_property("largest_difference_of_weights", difference)
    print(f"{kind}: weights after {STEPS} steps differ from one process by at most {difference:.2g}")
    assert difference < 2e-6
    for rank in together:
        assert len(rank["steps"]) == STEPS
        for mine, theirs in zip(rank["steps"], alone, strict=True):
            assert mine["applied"] == theirs["applied"]
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
            if theirs["applied"]:
                assert mine["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    assert results.of(kind, "trained")[0]["weights_norm"] == pytest.approx(
        results.of("local", "trained")[0]["weights_norm"], rel=1e-5
    )


def test_horovod_equals_ddp_bit_for_bit(results):
    for scenario in ("trained", "clipped", "factored", "fp16"):
        assert largest_difference(results.weights("horovod", scenario), results.weights("ddp", scenario)) == 0.0


@pytest.mark.parametrize("kind", slow(KINDS, "zero1", "zero2"))
def test_a_broken_gradient_on_one_worker_skips_on_all(results, kind):
    for rank in results.of(kind, "trained"):
        assert [step["applied"] for step in rank["steps"]] == [step != BROKEN for step in range(STEPS)]
        assert not math.isfinite(rank["steps"][BROKEN]["norm"])
        assert rank["untouched"], "weights or optimizer state changed in a skipped step"


@pytest.mark.parametrize("kind", slow(KINDS, "zero1", "zero2"))
def test_resumed_in_new_processes_equals_uninterrupted(results, kind):
    resumed, trained = results.of(kind, "resumed"), results.of(kind, "trained")
    for rank in range(KINDS[kind].workers):
        assert resumed[rank]["steps"] == trained[rank]["steps"][SAVED_AT:]
    assert largest_difference(results.weights(kind, "resumed"), results.weights(kind, "trained")) == 0.0


@pytest.mark.parametrize("name", slow(RESHARDED, *list(RESHARDED)[2:]))
def test_optimizer_state_goes_on_in_other_slices_or_in_none(results, name):
    """The worker compares the whole state, once loaded, with the file, bit for bit."""
    _, earlier = RESHARDED[name]
    folder = results.job(name, "resumed", earlier=results.job(earlier, *KINDS[earlier].scenarios))
    trained = results.weights(earlier, "trained")
    assert largest_difference(trained, load_file(folder / "resumed.safetensors")) < 1e-5
    steps, resumed = results.of(earlier, "trained")[0]["steps"][SAVED_AT:], read(folder, "resumed")["steps"]
    assert [one["loss"] for one in resumed] == pytest.approx([one["loss"] for one in steps], abs=1e-5)


def test_fsdp_saves_the_same_optimizer_tree_as_ddp(results):
    """So that either can go on from the other's checkpoint."""
    trees = []
    for kind in ("ddp", "fsdp"):
        folder = results.job(kind, *KINDS[kind].scenarios)
        structure = json.loads((folder / "state.json").read_text())
        trees.append((structure, {k: v.shape for k, v in load_file(folder / "state.safetensors").items()}))
    assert trees[0] == trees[1]


@pytest.mark.parametrize("kind", slow(KINDS, "zero1", "zero2"))
def test_collectives(results, kind):
    workers = KINDS[kind].workers
    for rank in results.of(kind, "talked"):
        assert rank["int64"] == [sum(range(1, workers + 1)), workers * (2**53 + 1)]
        assert rank["float64"] == [workers * (1.0 + 2.0**-40)]
        assert rank["scalar"] == sum(r + 0.5 for r in range(workers))
        assert rank["argument_kept"]
        assert rank["gather"] == [{"rank": r, "text": "x" * (100 * r)} for r in range(workers)]
        assert rank["broadcast"] == {"from": 0}


@pytest.mark.parametrize("kind", [kind for kind in UNSHARDED if kind != "local"])
def test_clipping_by_value_equals_one_process(results, kind):
    assert largest_difference(results.weights("local", "clipped"), results.weights(kind, "clipped")) < 2e-6


@pytest.mark.parametrize("kind", UNSHARDED)
def test_adafactor_equals_one_process_and_goes_on_from_its_state(results, kind):
    alone = results.of("local", "factored")[0]["steps"]
    for rank in results.of(kind, "factored"):
        assert [s["loss"] for s in rank["steps"]] == pytest.approx([s["loss"] for s in alone], abs=1e-4)
        assert rank["again"] == rank["steps"][3:]
        assert rank["same"]


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [*((kind, scenario) for kind in UNSHARDED for scenario in ("sparse", "sparse_own")), ("zero3", "sparse_own")],
)
def test_block_sparse_attention_equals_one_process(results, kind, scenario):
    alone, together = results.weights("local", scenario), results.weights(kind, scenario)
    assert largest_difference(alone, together) < 1e-5  # float32 in another order: up to 2.7e-6, depending on the CPU
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert (alone[bias] - tiny_t5(seed=0).state_dict()[bias]).abs().max() > 1e-3, "the bias did not train"


@pytest.mark.parametrize("kind", UNSHARDED)
def test_a_device_that_skips_by_itself_ends_where_one_that_is_told_does(results, kind):
    """Also where gradients are sharded, or not finite on one worker alone. DDP's first update is not queued."""
    for rank in results.of(kind, "ahead"):
        assert rank["late"]["queued"] == [kind != "ddp", True, True, True, True]
        assert not any(rank["at_once"]["queued"])
        assert rank["sent"] == ([True] * 5 if kind == "horovod" else [])  # while the backward pass goes on
        assert rank["host_group"] == (kind in ("ddp", "fsdp"))
        assert [step["applied"] for step in rank["late"]["steps"]] == [True, True, False, True, True]
        assert str(rank["late"]["steps"]) == str(rank["at_once"]["steps"])  # the norm of one is NaN
        assert rank["late"]["state"] == rank["at_once"]["state"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_compiled_model_trains_as_it_is(results, kind):
    for rank in results.of(kind, "compiled"):
        assert rank["frames"] > 0 and (kind == "fsdp" or rank["fell_back"] == 0)  # FSDP's hooks are in no graph
        for compiled, eager in zip(rank["compiled"], rank["eager"], strict=True):
            assert compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("kind", UNSHARDED)
@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_bert_with_one_bias_for_all_layers_equals_one_process(results, kind, attention):
    [alone] = results.of("local", "bert_bias")
    for rank in results.of(kind, "bert_bias"):
        losses = [step["loss"] for step in rank["steps"][attention]]
        assert losses == pytest.approx([step["loss"] for step in alone["steps"][attention]], abs=1e-6)
    weights = results.weights("local", "bert_bias", attention)
    assert largest_difference(weights, results.weights(kind, "bert_bias", attention)) < 1e-5
    moved = weights["bert.encoder.position.weight"] - torch.tensor(alone["before"][attention])
    assert moved.abs().max() > 1e-3, "the bias did not train"


@pytest.mark.parametrize("kind", slow(KINDS, "zero1", "zero2"))
def test_weights_loaded_from_rank_0_reach_all(results, kind):
    for rank in results.of(kind, "evaluated"):
        assert rank["loss"] == pytest.approx(rank["expected"], abs=1e-6)
        assert rank["weights_norm"] == pytest.approx(results.of("local", "evaluated")[0]["weights_norm"], rel=1e-6)


@pytest.mark.parametrize("kind", UNSHARDED)
def test_fp16_scales_the_loss_on_a_cpu_too(results, kind):
    """Accelerate's own fp16 is a silent no-op there."""
    exact = results.of("local", "trained")[0]["steps"]
    for rank in results.of(kind, "fp16"):
        assert [step["applied"] for step in rank["steps"]] == [True, True, False, True, True, True]
        assert rank["scales"] == [2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**11]
        assert rank["loaded_scale"] == 2.0**11
        assert rank["steps"][0]["loss"] != exact[0]["loss"]
        assert rank["steps"][0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-3)
        assert rank["steps"][0]["norm"] == pytest.approx(exact[0]["norm"], rel=1e-2), "the norm is not unscaled"


@pytest.mark.parametrize("kind", UNSHARDED)
def test_bf16_computes_in_bf16(results, kind):
    exact = results.of("local", "trained")[0]["steps"]
    for rank in results.of(kind, "bf16"):
        assert rank["steps"][0]["loss"] != exact[0]["loss"]
        for mine, theirs in zip(rank["steps"], exact, strict=False):
            assert mine["applied"] and mine["loss"] == pytest.approx(theirs["loss"], rel=1e-2)


@pytest.mark.parametrize("kind", ["horovod", "ddp"])
def test_fp16_allreduce_drifts_a_little(results, kind):
    drift = largest_difference(results.weights(kind, "saved"), results.weights(kind, "compressed"))
    assert 0.0 < drift < 1e-2


@pytest.mark.parametrize("kind, lost, worst", [("ddp", 0.0, 2**-9), ("horovod", 0.295, 1.0)])
def test_fp16_allreduce_does_not_divide_in_fp16(results, kind, lost, worst):
    """Horovod cannot scale what it sends, but keeps what the sum still holds."""
    for rank in results.of(kind, "wide_range"):
        assert rank["lost"] <= lost
        assert rank["worst"] <= worst


def test_horovod_leaves_a_parameter_without_gradient_alone(results):
    """Horovod reads a missing gradient as zeros, with which AdamW would decay the weight."""
    assert largest_difference(results.weights("local", "partial"), results.weights("horovod", "partial")) < 1e-6


def test_ddp_refuses_a_parameter_without_gradient(results):
    for rank in results.of("ddp", "unused"):
        assert "never.weight" in rank["error"] and "find_unused_parameters=True" in rank["error"]


def test_horovod_refuses_bf16_parameters(results):
    for rank in results.of("horovod", "bf16_parameters"):
        assert "bfloat16" in rank["error"] and "--bf16" in rank["error"]


@pytest.mark.parametrize("kind", slow(["zero2", "zero3"], "zero2"))
def test_deepspeed_in_16_bits_keeps_fp32_weights_and_skips_alike(results, kind):
    for rank in results.of(kind, "zero_16bit"):
        for name in ("bf16", "fp16"):
            found = rank[name]
            assert [step["applied"] for step in found["steps"]] == [True, True, False, True]
            assert found["untouched"] and all(found["exact"]), f"{name}: fp32 weights did not survive loading"
            assert found["again"], "a step after loading is another one"
            assert all(math.isfinite(step["norm"]) for step in found["steps"] if step["applied"])
        assert rank["bf16"]["scales"] == [1.0] * 4
        assert rank["fp16"]["scales"] == [256.0, 256.0, 128.0, 128.0]
        assert rank["bf16"]["precision"] == {}
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(rank["fp16"]["precision"])
        known = scaler.state_dict()
        assert known == {name: rank["fp16"]["precision"][name] for name in known}
        assert (known["scale"], known["_growth_tracker"]) == (128.0, 1)


@pytest.mark.parametrize("kind", slow(SHARDED, "zero1", "zero2"))
def test_deepspeed_refuses_what_it_would_do_differently(results, kind):
    for rank, errors in enumerate(results.of(kind, "zero_refusals")):
        assert "--clip_grad_value" in errors["value"]
        assert "Adafactor" in errors["adafactor"]
        assert rank or "1 unexpected ['nonsense']" in errors["keys"]


@pytest.mark.slow
def test_zero3_offload_with_cpu_adam(results):
    """Compiles DeepSpeedCPUAdam the first time, about a minute and a half."""
    if reason := missing("accelerate", "deepspeed", "ninja"):
        pytest.skip(reason)
    folder = results.folder / "offload"
    folder.mkdir()
    command = [Path(__file__).with_name("worker.py"), folder, "-", "trained"]
    job = forked(shipped("zero3_offload"), *command, timeout=570, WORKER_SECONDS="560")
    assert job.returncode == 0, job.output[-3000:]
    trained = load_file(folder / "trained.safetensors")
    assert largest_difference(results.weights("local", "trained"), trained) < 1e-4
    assert json.loads((folder / "trained_0.json").read_text())["untouched"]
