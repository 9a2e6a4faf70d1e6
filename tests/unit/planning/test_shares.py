"""Shares and buffers of a worker, against torch's tracker in two processes, and bitsandbytes' weights."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.models.freezing import summary
from lm_experiments_tools.planning.plan import held_weights, make_plan
from lm_experiments_tools.planning.shapes import describe
from lm_experiments_tools.planning.trace import _PeakTracker
from tests.unit.planning.test_plan import BERT, GIVEN, T5, settings

TOKENS = 64


def build(kind):
    config, sizes = (T5Config, T5) if kind == "t5" else (BertConfig, BERT)
    cls = T5ForConditionalGeneration if kind == "t5" else BertForSequenceClassification
    return cls(config(**{name: value for name, value in sizes.items() if name != "model_type"})).train()


def measure(rank, folder):
    """Write the peaks of two steps under DDP and FSDP2, as torch's tracker counts them, for rows of one and eight."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {}
    for kind in ("t5", "bert"):
        for sharding in ("none", "fsdp"):
            for rows in (1, 8):
                found[f"{kind} {sharding} {rows}"] = peak(build(kind), kind, sharding, rows)
    if rank == 0:
        (folder / "peaks.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def peak(model, kind, sharding, rows):
    if sharding == "fsdp":
        mesh = dist.init_device_mesh("cpu", (2,))
        for block in [*model.encoder.block, *model.decoder.block] if kind == "t5" else model.bert.encoder.layer:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tracker = _PeakTracker()
    tracker.track_external(model, optimizer)
    ids = torch.ones(rows, TOKENS, dtype=torch.long)
    with tracker:
        run = DistributedDataParallel(model, gradient_as_bucket_view=True) if sharding == "none" else model
        for _ in range(2):
            run(input_ids=ids, labels=ids if kind == "t5" else ids[:, 0]).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.filterwarnings("ignore")
def test_two_workers_hold_what_is_planned_within_10_percent(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    multiprocessing.spawn(measure, (tmp_path,), nprocs=2)
    ratios = {}
    for name, measured in json.loads((tmp_path / "peaks.json").read_text()).items():
        kind, sharding, rows = name.split()
        flags = {"model_type": "encoder"} if kind == "bert" else {"freeze": (), "target_seq_len": TOKENS}
        args = settings(tmp_path, T5 if kind == "t5" else BERT, input_seq_len=TOKENS, batch_size=int(rows), **flags)
        plan = make_plan(args, PlanningArgs(device="cpu", workers=2, sharding=sharding), GIVEN)
        ratios[name] = plan.peak.total / measured
    assert list(ratios.values()) == pytest.approx([1] * 8, abs=0.1)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_weights_in_few_bits_are_as_large_as_those_of_bitsandbytes(tmp_path, kind, name):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    build(name).save_pretrained(tmp_path)
    options = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    cls = type(build(name))
    model = cls.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32)
    shape = describe(T5) if name == "t5" else replace(describe(BERT), labels=2)
    assert held_weights(shape, kind) == pytest.approx(summary(model).all.bytes, rel=0.02)
