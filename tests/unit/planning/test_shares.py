"""Estimates of one of two workers, against PyTorch's allocator in two processes."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from benchmarks.memory_plan import peak_of
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.planning.estimate import estimate_memory
from tests.unit.planning.test_plan import BERT, GIVEN, T5, settings

TOKENS = 64
CASES = [  # model, sharding, rows, bfloat16
    ("t5", "none", 8, False),
    ("t5", "fsdp", 2, False),
    ("t5", "fsdp", 8, True),
    ("bert", "none", 8, False),
    ("bert", "fsdp", 8, False),
]


def build(kind, sharding, is_bf16):
    config, sizes = (T5Config, T5) if kind == "t5" else (BertConfig, BERT)
    cls = T5ForConditionalGeneration if kind == "t5" else BertForSequenceClassification
    model = cls(config(**{name: value for name, value in sizes.items() if name != "model_type"})).train()
    if sharding == "fsdp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        options = {"mesh": dist.init_device_mesh("cpu", (2,))} | ({"mp_policy": policy} if is_bf16 else {})
        for block in [*model.encoder.block, *model.decoder.block] if kind == "t5" else model.bert.encoder.layer:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def measure(rank, folder):
    """Write the largest peak of each case; DDP rebuilds its buckets in the first two steps, which are not measured."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)

    def train(case, model, optimizer):
        kind, _, rows, is_bf16 = case
        ids = torch.ones(rows, TOKENS, dtype=torch.long)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                loss = model(input_ids=ids, labels=ids if kind == "t5" else ids[:, 0]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def trained(case):
        kind, sharding, _, is_bf16 = case
        model = build(kind, sharding, is_bf16)
        optimizer = torch.optim.AdamW(model.parameters())
        train(case, model, optimizer)
        return model, optimizer

    def peak(case):
        return max(peak_of(partial(trained, case), lambda built: train(case, *built)) for _ in range(3))

    peaks = [peak(case) for case in CASES]
    if rank == 0:
        (folder / "peaks.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_workers_hold_what_is_estimated_within_15_percent(tmp_path, monkeypatch):
    """A peak varies by 10 to 20 % with the order in which collectives end, hence the largest of three."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    multiprocessing.spawn(measure, (tmp_path,), nprocs=2)
    ratios = []
    for case, peak in zip(CASES, json.loads((tmp_path / "peaks.json").read_text()), strict=True):
        kind, sharding, rows, is_bf16 = case
        flags = {"model_type": "encoder"} if kind == "bert" else {"freeze": (), "target_seq_len": TOKENS}
        flags |= {"input_seq_len": TOKENS, "batch_size": rows, "bf16": is_bf16}
        args = settings(tmp_path, T5 if kind == "t5" else BERT, **flags)
        planning = PlanningArgs(device="cpu", workers=2, sharding=sharding)
        ratios.append(estimate_memory(args, planning, GIVEN).total / peak)
    assert ratios == pytest.approx([1] * len(ratios), abs=0.15)
