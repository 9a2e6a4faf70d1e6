"""Bytes that offloading sends, against the copies that DeepSpeed and FSDP2 make; and what the plan says of them."""

import json
import os
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import T5Config, T5ForConditionalGeneration

from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.planning import offload
from lm_experiments_tools.planning.plan import make_plan
from lm_experiments_tools.planning.show import of_launcher
from lm_experiments_tools.tools.main import main
from tests.helpers import ROOT
from tests.unit.planning.test_plan import GIVEN, T5, settings

# Where DeepSpeed's and torch's code sends to a GPU or from it: the method and the function that calls it.
UP = ("copy_ accumulate_gradients", "to __init__", "to all_gather_inputs")
DOWN = (
    "copy_ copy_gradients_to_cpu", "copy_ async_inplace_copy_grad_to_fp32_buffer_from_gpu", "copy_ partition_grads",
    "copy_ _offload_grad_partition_at_boundary", "to foreach_reduce",
)  # fmt: skip
STAYS = {"stage3_param_persistence_threshold": 0}  # the toy's weights are all below the usual one
FAR = {**STAYS, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
CASES = [("zero1", "optimizer", 3, {}), ("zero2", "optimizer", 1, {}), ("zero2", "optimizer", 3, {}),
         ("zero3", "optimizer", 2, STAYS), ("zero3", "all", 2, STAYS), ("zero3", "all", 2, FAR),
         ("fsdp", "all", 2, {})]  # fmt: skip


def toy():
    return T5ForConditionalGeneration(T5Config(**{name: x for name, x in T5.items() if name != "model_type"})).train()


def spied(count, name):
    """Tensor's method, which notes the bytes that it writes or sends, and for whom."""
    method = getattr(Tensor, name)

    def call(self, *args, **kwargs):
        count[f"{name} {sys._getframe(1).f_code.co_name}"] += self.nbytes
        return method(self, *args, **kwargs)

    return call


def steps_of_deepspeed(sharding, kept, passes, options):
    """A function that makes an optimizer step."""
    import deepspeed

    model, cpu = toy(), {"device": "cpu"}
    zero = {"stage": int(sharding[-1]), "contiguous_gradients": True, "offload_optimizer": cpu, **options}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": passes, "zero_optimization": zero,
        "bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 1.0,
    }  # fmt: skip
    if kept == "all":
        zero["offload_param"] = cpu
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)

    def step():
        for number in range(passes):
            engine.set_gradient_accumulation_boundary(number == passes - 1)
            engine.backward(engine(input_ids=torch.ones(1, 8).long(), labels=torch.ones(1, 8).long()).loss)
        engine.step()

    return step


def steps_of_fsdp(passes):
    model, options = toy(), {"mesh": dist.init_device_mesh("cpu", (1,)), "offload_policy": CPUOffloadPolicy(False)}
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        for number in range(passes):
            model.set_requires_gradient_sync(number == passes - 1)
            model(input_ids=torch.ones(1, 8).long(), labels=torch.ones(1, 8).long()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def count_copies(rank, folder):
    """Write what a third step sends, for each case."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    torch.set_num_threads(1)
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes to compile
    type(get_accelerator()).on_accelerator = lambda self, tensor: False  # as main memory is not on a GPU
    found, own = [], (Tensor.copy_, Tensor.to)
    for sharding, kept, passes, options in CASES:
        step = steps_of_fsdp(passes) if sharding == "fsdp" else steps_of_deepspeed(sharding, kept, passes, options)
        step(), step()
        count = Counter()
        Tensor.copy_, Tensor.to = spied(count, "copy_"), spied(count, "to")
        step()
        Tensor.copy_, Tensor.to = own
        found.append(count)
    (folder / "copies.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_sends_the_bytes_that_are_planned(tmp_path, monkeypatch):
    """A third step, in one process, whose CPU is the GPU: each copy that would cross is made."""
    pytest.importorskip("deepspeed")
    multiprocessing.spawn(count_copies, (tmp_path,), nprocs=1)
    for (sharding, kept, passes, options), count in zip(
        CASES, json.loads((tmp_path / "copies.json").read_text()), strict=True
    ):
        args = settings(tmp_path, T5, bf16=True, gradient_accumulation_steps=passes)
        with monkeypatch.context() as patched:
            if options is FAR:
                patched.setattr(offload, "REUSED", 0)
            planning = PlanningArgs(device="cuda", sharding=sharding, offload=kept)
            plan = make_plan(args, planning, GIVEN)
        up, down = (sum(count.get(place, 0) for place in places) for places in (UP, DOWN))
        if sharding == "zero3":  # of each micro-batch gradients come back; a second `.to` there changes types alone
            up += passes * 2 * plan.trained
        if sharding == "zero3" and kept == "optimizer":
            up -= count["to __init__"]  # weights are on the GPU already, but for the updated ones
            up += count["copy_ _reassign_or_swap_out_partitioned_parameters"]
        if options is FAR:  # the table comes for each of its three uses, and both uses' backward passes: not counted
            up -= passes * 3 * 2 * T5["vocab_size"] * T5["d_model"]
        if sharding in ("zero1", "zero2"):
            up += count["copy_ step"] / 2  # of which half is from float32 to 16 bits in main memory
        case = (sharding, kept, passes)
        assert (plan.offload.up, plan.offload.down) == (pytest.approx(up, rel=0.02), pytest.approx(down, rel=0.02)), (
            case
        )


def test_offloading_takes_from_the_gpu_and_gives_to_main_memory(tmp_path):
    args = settings(tmp_path, T5, bf16=True)
    zero3 = PlanningArgs(device="cuda", workers=2, sharding="zero3")
    kept, away = (make_plan(args, planning, GIVEN) for planning in (zero3, of_shipped()))
    assert away.fixed.state == away.fixed.weights == 0 < kept.fixed.state < away.offload.held
    assert away.host() - kept.host() == pytest.approx(away.offload.held)
    assert away.offload.touched == (28 + 6) * away.trained / 2  # AdamW's update, and a copy of 16 bits
    whole = make_plan(args, PlanningArgs(device="cuda", sharding="zero3", offload="all"), GIVEN)
    assert whole.offload.up == pytest.approx(2 * away.offload.up)


def of_shipped():
    """What `accelerate launch --config_file accelerate_configs/zero3_offload.yaml` tells a script."""
    file = str(ROOT / "accelerate_configs/zero3_offload.json")
    told = of_launcher({"WORLD_SIZE": "2", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file})
    assert told == PlanningArgs(workers=2, sharding="zero3", offload="all")
    return PlanningArgs(device="cuda", workers=told.workers, sharding=told.sharding, offload=told.offload)


def test_the_environment_says_what_is_offloaded(tmp_path):
    (file := tmp_path / "odd.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": null}}')
    odd = {"WORLD_SIZE": "2", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    assert of_launcher(odd) == PlanningArgs(workers=2, sharding="zero3")
    zero2 = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    assert of_launcher(zero2) == PlanningArgs(sharding="zero2", offload="optimizer")
    fsdp = {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
    assert of_launcher(fsdp) == PlanningArgs(workers=2, sharding="fsdp", offload="all")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pretrain-t5", "--model_cfg", "t5-11b", "--device", "cuda", "--sharding", "zero2", "--offload", "optimizer"],
         ["offload, each optimizer step", "of gradients down", "update on the CPU", "GB/s (assumed"]),
        (["finetune", "--model_cfg", "t5-11b", "--device", "cuda", "--device_map", "auto"],
         ["--device_map auto: each GiB", "for each token that is generated"]),
        (["finetune", "--model_cfg", "t5-v1_1-small", "--device", "cuda", "--embeddings_on_cpu"],
         ["--embeddings_on_cpu, each optimizer step: "]),
    ],
)  # fmt: skip
def test_the_plan_says_what_it_costs(words, said, capsys):
    assert main(["plan", *words, "--no_trace"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in said), shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--offload", "all", "--sharding", "zero2"], "--offload all is for --sharding zero3 or fsdp, not zero2"),
        (["--offload", "optimizer"], "for --sharding zero1 or zero2 or zero3, not none"),
        (["--offload", "all", "--sharding", "zero3", "--device", "cpu"], "add --device cuda"),
    ],
)
def test_what_cannot_be_offloaded_is_a_sentence(words, sentence, capsys):
    assert main(["plan", "pretrain-t5", "--model_cfg", "t5-small", *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and not captured.out
