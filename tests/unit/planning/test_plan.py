"""Memory estimates, against what PyTorch's allocator reports of the same model in real training steps."""

import json

import pytest

from benchmarks.memory_plan import allocated_peak
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import OWN_CLASSES
from lm_experiments_tools.planning.build import resolve
from lm_experiments_tools.planning.estimate import estimate_memory
from lm_experiments_tools.planning.fit import largest_fit
from lm_experiments_tools.planning.show import show
from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tools.plan import PlanBertArgs, PlanFinetuningArgs, PlanT5Args

T5 = {
    "model_type": "t5", "vocab_size": 4000, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
T5_GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "dropout_rate": 0.0}
BERT = {
    "model_type": "bert", "vocab_size": 4000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 512,
}  # fmt: skip
ROTARY = {**BERT, "pre_layer_norm": True, "position_embedding_type": "rotary", "rotary_base": 10000, "rotary_dim": 32}
LAYOUT = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 32, "num_random_blocks": 2}}
LONG = {"max_position_embeddings": 1024, "num_hidden_layers": 8}
GPT2 = {"model_type": "gpt2", "vocab_size": 4000, "n_embd": 128, "n_layer": 2, "n_head": 4}
OWN_T5, OWN_BERT = "modeling_t5:T5ForConditionalGeneration", OWN_CLASSES["bert"]
GIVEN = dict.fromkeys(("bf16", "model_cls"), "command line")  # so that nothing depends on this CPU


def settings(tmp_path, config, cls=None, **flags):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    more = {"input_seq_len": 128, "batch_size": 4, "lr": 1e-3, "device": "cpu", "speed": "off", **flags}
    tuned = {"peft", "freeze", "model_type"} & set(flags)
    if config["model_type"] == "bert" and not tuned:
        more.setdefault("vocab_file", "-")
    if cls is not None:
        more["model_cls"] = cls
    kinds = {"t5": PlanT5Args, "bert": PlanBertArgs}
    return (PlanFinetuningArgs if tuned else kinds[config["model_type"]])(model_cfg=str(path), **more)


def estimated(args, **hardware):
    return estimate_memory(args, PlanningArgs(device="cpu", **hardware), GIVEN)


CASES = [
    (T5, {"cls": OWN_T5, "speed": "auto", "gradient_accumulation_steps": 2}),
    (BERT, {"cls": OWN_BERT, "speed": "auto", "optimizer": "SGD"}),
    (T5, {"peft": "lora", "lora_targets": ("all-linear",), "lora_dropout": 0.1}),
]
MORE_CASES = [
    (T5, {}),
    (GPT2, {"model_type": "decoder", "task": "causal_lm"}),
    (T5, {"gradient_checkpointing": True, "optimizer": "Adafactor"}),
    (T5_GATED, {"cls": OWN_T5, "speed": "auto", "bf16": True, "dropout_rate": 0.1}),
    (T5, {"batch_size": 1, "input_seq_len": 32, "optimizer": "AdamWScale", "gradient_accumulation_steps": 2}),
    ({**T5, **LAYOUT}, {"cls": OWN_T5, "input_seq_len": 1024, "batch_size": 1}),
    (BERT, {"mlm_positions": "all"}),
    ({**BERT, **LAYOUT, **LONG}, {"input_seq_len": 1024, "batch_size": 1}),
    (ROTARY, {"cls": OWN_BERT, "bf16": True, "gradient_checkpointing": True, "batch_size": 8}),
    (T5, {"freeze": ("embeddings", "encoder"), "target_seq_len": 128}),
    (T5, {"freeze": (), "task": "classification", "target_seq_len": 8}),
    (BERT, {"model_type": "encoder", "peft": "lora"}),
]


@pytest.mark.parametrize(
    ("config", "flags"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)]
)
def test_an_estimate_is_within_4_percent_of_the_allocator(tmp_path, config, flags):
    if "peft" in flags:
        pytest.importorskip("peft")
    args = settings(tmp_path, config, **flags)
    total = estimated(args).total  # before real steps: neither may leave anything behind for the other
    measured = allocated_peak(resolve(args, GIVEN, "cpu"))
    assert total == pytest.approx(measured, rel=0.04)
    assert estimated(args).total == total


@pytest.mark.slow
def test_a_fit_keeps_the_rows_of_an_update_and_stays_below(tmp_path):
    args = settings(tmp_path, T5, batch_size=32, input_seq_len=256)
    peak = estimated(args).total
    for memory in (peak / 0.9, peak / 4, peak / 12):
        found = largest_fit(args, estimated, memory)
        assert found.args.rows_per_worker() == 32
        assert found.estimate.total <= memory
        assert (found.flags == "") == (memory > peak)
    assert found.args.batch_size < 32
    with pytest.raises(UserError, match=r"1\.0 MiB for tensors is too little: .*Adafactor .*Shorten the rows"):
        largest_fit(args, estimated, 2**20)


@pytest.mark.slow
def test_of_phases_the_one_that_needs_most_is_shown(tmp_path, capsys):
    phases = ("iters: 1", "{iters: 1, input_seq_len: 256, batch_size: 8}", "{iters: 1, input_seq_len: 256}")
    args = settings(tmp_path, T5, phases=phases, model_path="run")
    show(args, PlanningArgs(device="cpu"), GIVEN)
    shown = capsys.readouterr().out
    alone = estimated(settings(tmp_path, T5, input_seq_len=256, batch_size=8))
    assert shown == "\n".join(["phase 2 of 3 needs most:", *alone.lines()]) + "\n"


def test_the_largest_micro_batch_that_fits_is_found(tmp_path):
    args = settings(tmp_path, T5, batch_size=12, input_seq_len=64)

    def rows_above_4_do_not_fit(args):
        return type("Estimate", (), {"total": 100 * args.batch_size})

    found = largest_fit(args, rows_above_4_do_not_fit, 499)
    assert found.flags == "--batch_size 4 --gradient_accumulation_steps 3"


@pytest.mark.slow
def test_shards_divide_what_they_say(tmp_path):
    args = settings(tmp_path, T5, gradient_accumulation_steps=2)  # so that all gradients are held at any moment
    whole, *others = (
        estimated(args, workers=workers, sharding=kind).parts
        for workers, kind in ((1, "none"), (4, "zero1"), (4, "zero2"), (4, "fsdp"))
    )
    names = "parameters", "gradients", "optimizer state"
    divided = [[part[name] / whole[name] for name in names] for part in others]
    assert divided == [[1, 1, 0.25], [1, 0.25, 0.25], [0.25, 0.25, 0.25]]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["pretrain"], "name one of pretrain-t5"),
        (["pretrain-t5", "--model_cfg", "t5-small", "--sharding", "fsdp"], "add --workers"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and not captured.out
