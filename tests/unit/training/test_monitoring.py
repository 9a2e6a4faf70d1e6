"""Norms by part beside sums that are written out here, and maxima beside those of hidden states and scores."""

import json

import pytest
import torch

import modeling_bert
import modeling_t5
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.training.monitoring import MaximaCallback, NormsCallback, part_of
from tests.helpers.toys import RaggedPairs, SeekableBatches, gradients_at_steps, tiny_t5, weights_of
from tests.unit.training.test_running_ahead import make_loop


def cpu() -> LocalBackend:
    return LocalBackend(device=torch.device("cpu"))


def records(path) -> list[dict]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if any(name.startswith(("norm/", "maximum/")) for name in r)]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.0"),
        ("base_model.model.decoder.block.11.layer.2.DenseReluDense.wo.weight", "base_model.model.decoder.block.11"),
        ("bert.encoder.layer.3._orig_mod.output.dense.bias", "bert.encoder.layer.3"),
        ("bert.embeddings.LayerNorm.weight", "embeddings"),
        ("shared.weight", "embeddings"),
        ("lm_head.weight", "head"),
        ("cls.predictions.transform.dense.weight", "head"),
        ("encoder.final_layer_norm.weight", "encoder.final_layer_norm"),
        ("weight", "model"),
    ],
)
def test_parts(name, part):
    assert part_of(name) == part


def test_norms_are_those_of_the_gradient_before_clipping_and_of_the_step(tmp_path):
    model = tiny_t5()
    seen: list[dict] = []
    loop = make_loop(
        {"iters": 4, "log_interval": 4, "log_norms": 2, "model_path": str(tmp_path), "clip_grad_norm": None}, model,
        backend=cpu(),
    )  # fmt: skip
    at_steps, step = gradients_at_steps(model, loop.backend.optimizer), loop.train_step

    def noted(*batch):
        before = weights_of(model)
        info = step(*batch)
        seen.append({"before": before, "gradient": dict(at_steps), "after": weights_of(model)})
        return info

    loop.train_step = noted
    loop.train()
    found = records(tmp_path)
    assert [record["step"] for record in found] == [2, 4]
    for record in found:
        state = seen[record["step"] - 1]
        for part in {part_of(name) for name, _ in model.named_parameters()}:
            names = [name for name, _ in model.named_parameters() if part_of(name) == part]
            tensors = {
                "gradient": [state["gradient"][name] for name in names],
                "weight": [state["after"][name] for name in names],
                "update": [state["after"][name] - state["before"][name] for name in names],
            }
            norms = {kind: torch.nn.utils.get_total_norm(of_kind).item() for kind, of_kind in tensors.items()}
            for kind, norm in norms.items():
                assert record[f"norm/{kind}/{part}"] == pytest.approx(norm, rel=1e-5), (kind, part)
            assert record[f"norm/update_over_weight/{part}"] == pytest.approx(norms["update"] / norms["weight"])


def test_norms_of_all_parts_make_the_norm_of_the_log_also_where_it_is_clipped(tmp_path):
    args = {"iters": 2, "log_interval": 2, "log_norms": 2, "clip_grad_norm": 1e-3, "model_path": str(tmp_path)}
    loop = make_loop(args, tiny_t5(), backend=cpu())
    step, norms = loop.train_step, []
    loop.train_step = lambda *batch: norms.append(step(*batch)) or norms[-1]
    loop.train()
    record = records(tmp_path)[0]
    squares = sum(v**2 for name, v in record.items() if name.startswith("norm/gradient/"))
    assert squares**0.5 == pytest.approx(norms[-1].grad_norm, rel=1e-5)


def test_watching_leaves_the_bits_of_the_run(tmp_path):
    weights = []
    for watched in ({}, {"log_norms": 1, "log_maxima": 1}):
        model = tiny_t5(dropout=0.3)
        folder = tmp_path / str(len(weights))
        loop = make_loop({"iters": 4, "log_interval": 4, "model_path": str(folder), **watched}, model, backend=cpu())
        loop.train()
        weights.append(weights_of(model))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_maxima_are_those_of_the_modules_and_no_logit_is_above_its_bound(tmp_path):
    model = tiny_t5()
    data = RaggedPairs(24)
    args = {
        "iters": 1,
        "log_interval": 1,
        "log_maxima": 1,
        "model_path": str(tmp_path),
        "gradient_accumulation_steps": 1,
    }
    loop = make_loop(args, model, backend=cpu(), loader=SeekableBatches(data, 2))
    loop.train()
    record = records(tmp_path)[0]
    batch = next(iter(SeekableBatches(data, 2)))
    seen: dict[str, float] = {}
    block, attention = model.encoder.block[1], model.encoder.block[1].layer[0].SelfAttention
    for name, module in block.named_modules():
        module.register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: (out[0] if isinstance(out, tuple) else out).detach()})
        )
    model.eval()
    with torch.no_grad():
        model(**batch)
    largest = max(value.abs().max().item() for value in seen.values())
    assert record["maximum/activation/encoder.block.1"] == pytest.approx(largest, rel=1e-6)
    q, k = (seen[f"layer.0.SelfAttention.{p}"].unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for p in "qk")
    bound = record["maximum/attention_logit_bound/encoder.block.1"]
    assert (q @ k.transpose(-1, -2)).abs().max().item() <= bound * (1 + 1e-6)
    heads = q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2))
    assert bound == pytest.approx(heads.max().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_our_fused_models_are_watched_too(kind, tmp_path):
    if kind == "t5":
        model = modeling_t5.T5ForConditionalGeneration(modeling_t5.T5Config(**tiny_t5().config.to_dict()))
    else:
        config = modeling_bert.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        model = build_model(modeling_bert.BertForMaskedLM, config, seed=0)
    model.use_fast_step()
    args = {"iters": 1, "log_interval": 1, "log_maxima": 1, "model_path": str(tmp_path)}
    loop = make_loop(args, model, backend=cpu(), batch_transform_fn=None if kind == "t5" else of_words)
    loop.train()
    parts = {name.rpartition("/")[2] for name in records(tmp_path)[0] if name.startswith("maximum/attention_logit")}
    assert len(parts) == (4 if kind == "t5" else 2)


def of_words(batch: dict) -> dict:
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def test_what_cannot_be_watched_is_refused():
    loop = make_loop({"iters": 1}, tiny_t5(), backend=cpu())
    loop.backend.shards_optimizer = True
    with pytest.raises(UserError, match="--log_norms does not work with DeepSpeed"):
        NormsCallback(1, loop)
    assert MaximaCallback(1, loop).every == 1
