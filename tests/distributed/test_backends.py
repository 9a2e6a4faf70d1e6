"""Every backend trains the same T5 to the same weights as one process alone, and says what it really is.

Each backend runs worker.py in two jobs (train, then resume in new processes); tests read the files of its ranks. The
second job of FSDP and DeepSpeed has the environment that `accelerate launch` makes of a file in accelerate_configs/.
Tolerances: Horovod and DDP are bitwise equal for two workers; sums in another order move fp32 weights by about 1e-7.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

from lm_experiments_tools.checkpoint.tree import load_tree
from tests.distributed.launch import KINDS, Job, forked, shipped, skip_without, slow
from tests.distributed.worker import BROKEN, SAVED_AT, STEPS
from tests.helpers.toys import tiny_t5

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("worker.py")
FSDP = ["ahead", "trained", "talked", "evaluated", "fp16", "frozen", "sparse"]
PLAIN = [*FSDP, "clipped", "bf16"]
ZERO = ["trained", "talked", "evaluated"]
SCENARIOS = {
    "alone": [*PLAIN, "partial"],
    "horovod": [*PLAIN, "partial", "wide_range"],
    "ddp": [*PLAIN, "wide_range"],
    "fsdp": FSDP,
    "zero1": ZERO,
    "zero2": [*ZERO, "zero_16bit"],
    "zero3": ZERO,
}
# class of the wrapped model, words of its description
DESCRIBED = {
    "alone": ("T5ForConditionalGeneration", "backend local, 1 worker"),
    "horovod": ("T5ForConditionalGeneration", "backend horovod, 2 worker", "reduced by Horovod"),
    "ddp": ("DistributedDataParallel", "backend accelerate, 2 worker", "MULTI_CPU (DDP)"),
    "fsdp": ("FSDPT5ForConditionalGeneration", "2 worker", "FSDP (FSDP2)"),
    **{f"zero{stage}": ("DeepSpeedEngine", "2 worker", f"ZeRO stage {stage}") for stage in (1, 2, 3)},
}
RESHARDED = {  # kind and number of the workers that continue, kind whose checkpoint it is, DeepSpeed file
    "alone_after_zero": ("alone", 1, "zero3"),
    "zero2_on_3": ("zero2", 3, "zero3"),
    "zero1_on_3": ("zero1", 3, "zero2"),
    "zero3_on_3": ("zero3", 3, "zero1"),
    "zero1_on_1": ("zero1", 1, "zero3"),
    "zero2_on_1": ("zero2", 1, "zero2"),
    "zero3_on_1": ("zero3", 1, "fsdp"),
    "zero1_after_alone": ("zero1", 2, "alone"),
    "zero2_after_ddp": ("zero2", 2, "ddp"),
    "zero3_after_horovod": ("zero3", 2, "horovod"),
    "fsdp_after_zero": ("fsdp", 2, "zero2"),
    "horovod_after_zero": ("horovod", 2, "zero1"),
    # slices in other orders than those of the shipped files
    "round_robin_on_3": ("zero2", 3, "ddp", "zero2_slices.json"),
    "sub_groups_on_3": ("zero3", 3, "ddp", "zero3_slices.json"),
}
OTHERS = [kind for kind in SCENARIOS if kind != "alone"]
SHARDED = [kind for kind in SCENARIOS if kind.startswith("zero")]
UNSHARDED = [kind for kind in SCENARIOS if kind not in SHARDED]


def workers_of(kind: str) -> int:
    return 1 if kind == "alone" else 2


def read(folder: Path, scenario: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{scenario}_{rank}.json").read_text())


class Results:
    """The jobs of each backend, run once and read by all tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, {}

    def run(self, name: str, kind: str, launcher: list[str], *command: object, **variables: Any) -> Path:
        """The folder of a job, started once; skips if a package is absent, fails if the job did."""
        skip_without("accelerate", *KINDS[kind].needs)
        folder = self.folder / name
        if folder not in self.jobs:
            folder.mkdir()
            self.jobs[folder] = forked(launcher, WORKER, folder, *command, **{**KINDS[kind].variables, **variables})
        job: Job = self.jobs[folder]
        assert job.returncode == 0, job.output[-3000:]
        return folder

    def first(self, kind: str) -> Path:
        """The folder of a backend's first job."""
        return self.run(kind, kind, KINDS[kind].command(2), "-", *SCENARIOS[kind])

    def resumed(self, kind: str) -> Path:
        """The folder of its second job, which continues from the files of the first."""
        return self.run(f"{kind}_resumed", kind, KINDS[kind].launcher(), self.first(kind), "resumed")

    def resharded(self, name: str) -> Path:
        """The folder of a job of RESHARDED."""
        kind, workers, earlier, *file = RESHARDED[name]
        variables = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(WORKER.with_name(*file))} if file else {}
        return self.run(name, kind, KINDS[kind].command(workers), self.first(earlier), "resumed", **variables)

    def _folder(self, kind: str, scenario: str) -> Path:
        return self.resumed(kind) if scenario == "resumed" else self.first(kind)

    def of(self, kind: str, scenario: str) -> list[dict[str, Any]]:
        """The results of each rank in a scenario."""
        folder = self._folder(kind, scenario)
        return [read(folder, scenario, rank) for rank in range(workers_of(kind))]

    def weights(self, kind: str, *names: str) -> dict[str, torch.Tensor]:
        """The weights that rank 0 saved in a scenario, or in a part of it."""
        return load_file(self._folder(kind, names[0]) / f"{'_'.join(names)}.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("jobs"))


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.parametrize("kind", slow(SCENARIOS, "zero1", "zero2"))
def test_the_backend_is_what_was_asked_for(results, kind):
    trained, talked = results.of(kind, "trained"), results.of(kind, "talked")
    for rank in range(workers_of(kind)):
        wrapped, *words = DESCRIBED[kind]
        assert trained[rank]["wrapped"] == wrapped
        assert all(word in trained[rank]["describe"] for word in words), trained[rank]["describe"]
        assert trained[rank]["unwraps"]
        assert talked[rank]["rank"] == rank
        assert talked[rank]["world_size"] == workers_of(kind)


@pytest.mark.parametrize("kind", slow(OTHERS, "zero1", "zero2"))
def test_adamw_steps_equal_one_process(results, kind, record_property):
    """Accumulation, clipping, ragged steps and a skipped one; the norm is of the reduced gradient before clipping."""
    alone, together = results.of("alone", "trained")[0]["steps"], results.of(kind, "trained")
    difference = largest_difference(results.weights("alone", "trained"), results.weights(kind, "trained"))
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
        results.of("alone", "trained")[0]["weights_norm"], rel=1e-5
    )


def test_horovod_equals_ddp_bit_for_bit(results):
    for scenario in ("trained", "clipped", "fp16"):
        assert largest_difference(results.weights("horovod", scenario), results.weights("ddp", scenario)) == 0.0


@pytest.mark.parametrize("kind", slow(SCENARIOS, "zero1", "zero2"))
def test_a_broken_gradient_on_one_worker_skips_on_all(results, kind):
    for rank in results.of(kind, "trained"):
        assert [step["applied"] for step in rank["steps"]] == [step != BROKEN for step in range(STEPS)]
        assert not math.isfinite(rank["steps"][BROKEN]["norm"])
        assert rank["untouched"], "weights or optimizer state changed in a skipped step"


@pytest.mark.parametrize("kind", slow(SCENARIOS, *SHARDED))
def test_resumed_in_new_processes_equals_uninterrupted(results, kind):
    resumed, trained = results.of(kind, "resumed"), results.of(kind, "trained")
    for rank in range(workers_of(kind)):
        assert resumed[rank]["steps"] == trained[rank]["steps"][SAVED_AT:]
    assert largest_difference(results.weights(kind, "resumed"), results.weights(kind, "trained")) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", RESHARDED)
def test_optimizer_state_goes_on_in_other_slices_or_in_none(results, name):
    """The worker compares the whole state, once loaded, with the file, bit for bit."""
    folder, earlier = results.resharded(name), RESHARDED[name][2]
    trained = results.weights(earlier, "trained")
    assert largest_difference(trained, load_file(folder / "resumed.safetensors")) < 1e-5
    steps, resumed = results.of(earlier, "trained")[0]["steps"][SAVED_AT:], read(folder, "resumed")["steps"]
    assert [one["loss"] for one in resumed] == pytest.approx([one["loss"] for one in steps], abs=1e-5)


def test_fsdp_saves_the_same_optimizer_tree_as_ddp(results):
    """So that either can go on from the other's checkpoint."""
    trees = []
    for kind in ("ddp", "fsdp"):
        tree = load_tree(results.first(kind) / "state")
        trees.append(tree_map(lambda leaf: (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf, tree))
    assert trees[0] == trees[1]


@pytest.mark.parametrize("kind", slow(SCENARIOS, "zero1", "zero2"))
def test_collectives(results, kind):
    workers = workers_of(kind)
    for rank in results.of(kind, "talked"):
        assert rank["int64"] == [sum(range(1, workers + 1)), workers * (2**53 + 1)]
        assert rank["float64"] == [workers * (1.0 + 2.0**-40)]
        assert rank["scalar"] == sum(r + 0.5 for r in range(workers))
        assert rank["argument_kept"]
        assert rank["gather"] == [{"rank": r, "text": "x" * (100 * r)} for r in range(workers)]
        assert rank["broadcast"] == {"from": 0}


@pytest.mark.parametrize("kind", ["horovod", "ddp"])
def test_clipping_by_value_equals_one_process(results, kind):
    assert largest_difference(results.weights("alone", "clipped"), results.weights(kind, "clipped")) < 2e-6


@pytest.mark.parametrize("kind", UNSHARDED[1:])
def test_clipped_gradients_of_a_partly_frozen_model_equal_one_process(results, kind):
    alone, *ranks = results.of("alone", "frozen") + results.of(kind, "frozen")
    for rank in ranks:
        for name in ("loss", "norm"):
            assert [s[name] for s in rank["steps"]] == pytest.approx([s[name] for s in alone["steps"]], abs=1e-4)
    assert ranks[0]["bits"] == ranks[1]["bits"], "the workers' weights differ"
    assert largest_difference(results.weights("alone", "frozen"), results.weights(kind, "frozen")) < 2e-6


@pytest.mark.parametrize("kind", UNSHARDED[1:])
def test_block_sparse_attention_equals_one_process(results, kind):
    alone, together = results.weights("alone", "sparse"), results.weights(kind, "sparse")
    assert largest_difference(alone, together) < 1e-5  # float32 in another order: up to 2.7e-6, depending on the CPU
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert (alone[bias] - tiny_t5(seed=0).state_dict()[bias]).abs().max() > 1e-3, "the bias did not train"


@pytest.mark.parametrize("kind", UNSHARDED)
def test_a_device_that_skips_by_itself_ends_where_one_that_is_told_does(results, kind):
    """Also where gradients are sharded, or not finite on one worker alone."""
    for rank in results.of(kind, "ahead"):
        assert all(rank["late"]["queued"])
        assert not any(rank["at_once"]["queued"])
        assert rank["sent"] == ([True] * 5 if kind == "horovod" else [])  # while the backward pass goes on
        assert rank["host_group"] == (kind in ("ddp", "fsdp"))
        assert [step["applied"] for step in rank["late"]["steps"]] == [True, True, False, True, True]
        assert str(rank["late"]["steps"]) == str(rank["at_once"]["steps"])  # the norm of one is NaN
        assert rank["late"]["state"] == rank["at_once"]["state"]


@pytest.mark.slow  # compiling takes 20 s; test_speed_in_runs.py has it in one process
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_compiled_model_trains_as_it_is(results, kind):
    folder = results.run(f"{kind}_compiled", kind, KINDS[kind].command(2), "-", "compiled")
    for rank in (read(folder, "compiled", number) for number in range(2)):
        assert rank["frames"] > 0 and rank["fell_back"] == 0  # the hooks of DDP and FSDP are in no graph
        for compiled, eager in zip(rank["compiled"], rank["eager"], strict=True):
            assert compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("kind", slow(SCENARIOS, "zero1", "zero2"))
def test_weights_loaded_from_rank_0_reach_all(results, kind):
    for rank in results.of(kind, "evaluated"):
        assert rank["loss"] == pytest.approx(rank["expected"], abs=1e-6)
        assert rank["weights_norm"] == pytest.approx(results.of("alone", "evaluated")[0]["weights_norm"], rel=1e-6)


@pytest.mark.parametrize("kind", UNSHARDED)
def test_fp16_scales_the_loss_on_a_cpu_too(results, kind):
    """Accelerate's own fp16 is a silent no-op there."""
    exact = results.of("alone", "trained")[0]["steps"]
    for rank in results.of(kind, "fp16"):
        assert [step["applied"] for step in rank["steps"]] == [True, True, False, True, True, True]
        assert rank["scales"] == [2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**11]
        assert rank["loaded_scale"] == 2.0**11
        assert rank["steps"][0]["loss"] != exact[0]["loss"]
        assert rank["steps"][0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-3)
        assert rank["steps"][0]["norm"] == pytest.approx(exact[0]["norm"], rel=1e-2), "the norm is not unscaled"


@pytest.mark.parametrize("kind", ["alone", "horovod", "ddp"])
def test_bf16_computes_in_bf16(results, kind):
    exact = results.of("alone", "trained")[0]["steps"]
    for rank in results.of(kind, "bf16"):
        assert rank["steps"][0]["loss"] != exact[0]["loss"]
        for mine, theirs in zip(rank["steps"], exact, strict=False):
            assert mine["applied"] and mine["loss"] == pytest.approx(theirs["loss"], rel=1e-2)


@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_fp16_allreduce_keeps_small_gradients(results, kind):
    """Within fp16's unit of the mean in float64, from 1 to 2e-8; nothing becomes 0, and none overflows."""
    for rank in results.of(kind, "wide_range"):
        assert rank["lost"] == 0
        assert rank["worst"] <= 2**-9


def test_horovod_leaves_a_parameter_without_gradient_alone(results):
    """Horovod reads a missing gradient as zeros, with which AdamW would decay the weight."""
    assert largest_difference(results.weights("alone", "partial"), results.weights("horovod", "partial")) < 1e-6


@pytest.mark.slow
def test_deepspeed_in_16_bits_keeps_fp32_weights_and_skips_alike(results):
    for rank in results.of("zero2", "zero_16bit"):
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


@pytest.mark.slow
def test_zero3_offload_with_cpu_adam(results):
    """Compiles DeepSpeedCPUAdam the first time, about a minute and a half."""
    skip_without("ninja")
    options = {"timeout": 570, "WORKER_SECONDS": "560"}
    folder = results.run("offload", "zero3", shipped("zero3_offload"), "-", "trained", **options)
    trained = load_file(folder / "trained.safetensors")
    assert largest_difference(results.weights("alone", "trained"), trained) < 1e-4
    assert json.loads((folder / "trained_0.json").read_text())["untouched"]
