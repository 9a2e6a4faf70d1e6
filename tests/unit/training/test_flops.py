"""The FLOP of a training step beside those that torch counts, and their share of the peak in the log."""

import json

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import modeling_bert
import modeling_t5
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.training import flops
from lm_experiments_tools.training.metrics import Window
from tests.helpers.toys import tiny_t5
from tests.unit.training.test_trainer import make_loop

T5 = {
    "vocab_size": 100, "d_model": 32, "d_kv": 4, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
BERT = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "attn_implementation": "eager",
}  # fmt: skip
MODELS = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, T5),
    "t5 1.1": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        {**T5, "feed_forward_proj": "gated-gelu"},
    ),
    "our t5": (modeling_t5.T5ForConditionalGeneration, modeling_t5.T5Config, T5),
    "our t5 1.1": (
        modeling_t5.T5ForConditionalGeneration,
        modeling_t5.T5Config,
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, BERT),
    "bert with pairs": (transformers.BertForPreTraining, transformers.BertConfig, BERT),
    "our bert": (modeling_bert.BertForMaskedLM, modeling_bert.BertConfig, BERT),
    "our bert with pairs": (modeling_bert.BertForPreTraining, modeling_bert.BertConfig, BERT),
}


def made(name):
    model_cls, config_cls, settings = MODELS[name]
    return build_model(model_cls, config_cls(**settings), seed=0).train()


@pytest.mark.parametrize("name", MODELS)
def test_torch_counts_as_many(name):
    model = made(name)
    is_t5 = hasattr(model.config, "d_model")
    inputs = {"input_ids": torch.randint(2, 100, (3, 30)), "labels": torch.randint(2, 100, (3, 12 if is_t5 else 30))}
    if "pairs" in name:
        inputs["next_sentence_label"] = torch.tensor([0, 1, 0])
    counter = flops.counter(model)
    with FlopCounterMode(display=False) as counted:
        model(**inputs).loss.backward()
    assert counter(inputs) == pytest.approx(counted.get_total_flops(), rel=0.01)
    if is_t5:  # the usual estimate is of another size
        parameters = sum(p.numel() for n, p in model.named_parameters() if "shared" not in n)
        assert abs(6 * parameters * 3 * 42 / counted.get_total_flops() - 1) > 0.1


def test_what_has_no_formula_is_named():
    class Mine(transformers.T5ForConditionalGeneration):
        """A user's."""

    assert flops.counter(Mine(transformers.T5Config(**T5))) == "no formula is known for Mine"
    model = made("our t5")
    model.config.num_memory_tokens = 2
    assert flops.counter(model) == "no formula is known for T5ForConditionalGeneration with num_memory_tokens"
    frozen = made("bert")
    next(frozen.parameters()).requires_grad = False
    assert flops.counter(frozen) == "some of the model's parameters are not trained"


def test_the_log_gives_the_share_of_the_peak(tmp_path, monkeypatch):
    """Two lines of two steps each, by the shapes that the model was called with."""
    model, calls = tiny_t5(), []
    model.register_forward_pre_hook(
        lambda m, a, inputs: calls.append(dict(inputs)) if m.training else None, with_kwargs=True
    )
    loop = make_loop({"model_path": str(tmp_path), "iters": 4, "log_interval": 2, "peak_tflops": 1e-3}, model=model)
    seconds = []
    log = flops.FlopMeter.mfu
    monkeypatch.setattr(flops.FlopMeter, "mfu", lambda meter, w: seconds.append(w.seconds) or log(meter, w))
    loop.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [line["mfu"] for line in lines if line["split"] == "train"]
    half, config = len(calls) // 2, model.config
    for share, part, took in zip(shares, (calls[:half], calls[half:]), seconds, strict=True):
        done = sum(flops.t5_flops(config, *c["input_ids"].shape, c["labels"].shape[1]) for c in part)
        assert share == pytest.approx(done / took / 1e9) and share > 0


def test_what_was_done_before_a_restart_is_left_out():
    meter, window = flops.FlopMeter.__new__(flops.FlopMeter), Window()
    meter.flops, meter._uncounted, meter.peak, window.seconds = 6.0, 10.0, 4.0, 13.0
    assert meter.mfu(window) == {"mfu": 0.5} and meter.mfu(window) == {}


def test_the_peak_draws_no_random_numbers_and_is_measured_once():
    before = torch.random.get_rng_state()
    peak = flops.measured_peak(torch.device("cpu"), torch.float32)
    assert 1e9 < peak < 1e14 and torch.equal(torch.random.get_rng_state(), before)
    assert flops.measured_peak(torch.device("cpu"), torch.float32) == peak
