"""Operations of training, compared with those that torch counts in real forward and backward passes."""

import copy
import json

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import modeling_bert
import modeling_t5
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.backends.precision import Precision
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.training import flops
from lm_experiments_tools.training.flops import count_flops
from tests.unit.training.test_trainer import make_loop

T5 = {
    "vocab_size": 100, "d_model": 32, "d_kv": 4, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
BERT = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1,
}  # fmt: skip


class Looks(transformers.T5ForConditionalGeneration):
    """Reads numbers from its inputs."""

    def forward(self, input_ids=None, **kwargs):
        assert input_ids.sum().item() > 0
        return super().forward(input_ids=input_ids, **kwargs)


def t5(cls=transformers.T5ForConditionalGeneration, **settings):
    config_cls = modeling_t5.T5Config if cls.__module__.startswith("modeling_t5") else transformers.T5Config
    return build_model(cls, config_cls(**{**T5, **settings}), seed=0)


def our_t5(**settings):
    return t5(modeling_t5.T5ForConditionalGeneration, **settings)


def fast(model):
    model.use_fast_step(True)
    return model


def gpt2():
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, **shape))


SEQ2SEQ = {
    "t5": t5,
    "our t5": our_t5,
    "our t5 1.1": lambda: our_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "our t5, fast step": lambda: fast(our_t5(dropout_rate=0.1)),
    "our t5, checkpointed": our_t5,
    "reads values": lambda: t5(Looks),
}
ONE_STACK = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "our bert": lambda: modeling_bert.BertForMaskedLM(modeling_bert.BertConfig(**BERT)),
    "our bert, fast step": lambda: fast(modeling_bert.BertForMaskedLM(modeling_bert.BertConfig(**BERT))),
    "gpt2": gpt2,
    "modernbert": lambda: transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**BERT)),
}


def whole(model, dtype=None):
    backend = LocalBackend(Precision(dtype), torch.device("cpu"))
    backend.setup(model.train(), None)
    return backend


def batch_of(name, rows=3):
    ids = torch.randint(2, 100, (rows, 30))
    labels = ids if name in ONE_STACK else torch.randint(2, 100, (rows, 12))
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def both_passes(model, inputs):
    """The operations of a real forward and backward pass; torch counts no fused attention of a CPU."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        model(**inputs).loss.backward()
    return counted.get_total_flops()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, None) for name in (*SEQ2SEQ, *ONE_STACK)), ("our t5, fast step", torch.bfloat16)],
)
def test_the_count_is_that_of_both_passes(name, dtype):
    model, inputs = {**SEQ2SEQ, **ONE_STACK}[name](), batch_of(name)
    if "checkpointed" in name:
        model.gradient_checkpointing_enable()
    counted = count_flops(whole(model, dtype), inputs)
    if "fast" in name:
        model.use_fast_step(False)
    if "checkpointed" in name:
        model.gradient_checkpointing_disable()
    assert counted == pytest.approx(both_passes(model, inputs), rel=0.01)  # products of positions have no gradient


class Convolves(nn.Module):
    """Has what a forward pass changes: the running means of a norm, dropout, and a buffer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(self.norm(self.conv(x))).sum()


def test_counting_leaves_no_trace():
    model, x = Convolves(), torch.randn(2, 4, 10)
    before, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    counted = count_flops(whole(model), {"x": x})
    assert counted == 3 * 2 * (2 * 8 * 10) * (4 * 3)
    assert torch.equal(torch.random.get_rng_state(), random) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_log_gives_the_share_of_the_peak(tmp_path):
    """Two lines of two steps each; a step's micro-batches count by their tokens."""
    model, calls = t5(vocab_size=128), []
    model.register_forward_pre_hook(
        lambda m, a, inputs: calls.append(dict(inputs)) if torch.is_grad_enabled() else None, with_kwargs=True
    )
    loop = make_loop({"model_path": str(tmp_path), "iters": 4, "log_interval": 2, "peak_tflops": 1e-3}, model=model)
    loop.train()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [record for record in records if record["split"] == "train"]
    sizes = [call["input_ids"].numel() + call["labels"].numel() for call in calls]
    first = both_passes(model, calls[0])
    for line, tokens in zip(lines, (sum(sizes[:2]), sum(sizes[2:])), strict=True):
        done = line["mfu"] * line["seconds_per_step"] * 2 * 1e9
        assert done == pytest.approx(first * tokens / sizes[0])


def test_nothing_is_counted_where_no_peak_is_known(tmp_path, monkeypatch):
    """On a CPU, and in an evaluation of a fine-tuner, which trains nothing."""
    monkeypatch.setattr(flops, "count_flops", lambda *_: pytest.fail("an extra forward pass"))
    make_loop({"model_path": str(tmp_path), "log_interval": 1, "iters": 2}).train()
    assert "mfu" not in (tmp_path / "metrics.jsonl").read_text()
