"""--speed auto: what it chooses for a machine and a run; flags, and what a run recorded, go first."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import modeling_bert
import modeling_t5
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.lengths import Tokens
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import speed
from lm_experiments_tools.models.speed import choose_speed, compile_blocks, describe_speed
from lm_experiments_tools.recipes import common

OURS, THEIRS = "modeling_t5:T5ForConditionalGeneration", "transformers:T5ForConditionalGeneration"
LONG = 10**6  # updates


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A CPU with bfloat16 and a compiler; the settings of this process stay."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(speed, "set_up_process", lambda **settings: None)
    monkeypatch.setattr(speed, "has_bf16", lambda device: True)
    monkeypatch.setattr(speed, "lacks_compiler", lambda device: None)
    return monkeypatch


def t5(**flags):
    flags = {"model_cfg": "t5-v1_1-small", "iters": LONG, **flags}
    return T5PretrainingArgs(data_path=("data",), lr=1e-3, **flags), dict.fromkeys(flags, "command line")


def chosen(args, origins, **options):
    args, origins = choose_speed(args, origins, **options)
    return (args.speed, args.model_cls, args.bf16, args.compile), origins


def test_a_long_run_of_a_known_model_has_it_all():
    found, origins = chosen(*t5())
    assert found == ("auto", OURS, True, True)
    assert all(origins[name].startswith("--speed auto: ") for name in speed.CHOSEN)


def test_a_flag_that_is_given_is_not_changed():
    assert chosen(*t5(model_cls=THEIRS, bf16=False, compile=False))[0] == ("auto", THEIRS, False, False)
    assert chosen(*t5(fp16=True))[0] == ("auto", OURS, False, True)


def test_off_is_plain():
    assert chosen(*t5(speed="off"))[0] == ("off", THEIRS, False, False)
    assert chosen(*t5(speed="off", bf16=True, compile=True))[0] == ("off", THEIRS, True, True)


def test_compiling_has_to_pay():
    pays = [iters for iters in (10, 100, 1000, 10**4, 10**5) if chosen(*t5(iters=iters, batch_size=16))[0][3]]
    assert pays == [10**4, 10**5]
    assert not chosen(*t5(validate_only=True, valid_data_path="v"))[0][3]
    assert not chosen(*t5(gradient_checkpointing=True))[0][3]
    (*_, compiled), origins = chosen(*t5(dropout_rate=0.1))
    assert not compiled and "dropout" in origins["compile"]


def test_compiling_has_to_pay_over_all_phases():
    def compiles(*phases):
        flags = {"model_cfg": "t5-v1_1-small", "phases": phases, "model_path": "run", "batch_size": 8}
        return chosen(T5PretrainingArgs(data_path=("data",), lr=1e-3, **flags), dict.fromkeys(flags, "file"))[0][3]

    assert compiles("iters: 5000", "iters: 5000") and not compiles("iters: 4000", "iters: 5000")
    assert compiles("tokens: 9M", "tokens: 1M")
    assert compiles("iters: 100", "{iters: 100, input_seq_len: 2048, batch_size: 64}")
    assert not compiles("iters: 20000", "{iters: 10, dropout_rate: 0.1}")


def test_compiling_has_to_pay_for_each_worker(machine):
    for workers in (1, 4):
        machine.setenv("WORLD_SIZE", str(workers))
        pays = [count for count in (9, 10, 39, 40) if chosen(*t5(iters=Tokens(count * 10**6)))[0][3]]
        assert pays == ([10, 39, 40] if workers == 1 else [40])
        assert chosen(*t5(iters=10**4, batch_size=8))[0][3]  # each worker's updates, however many work
        ranks = {"reproducible": "elastic", "virtual_ranks": 4, "iters": 3000, "batch_size": 8}
        assert chosen(*t5(**ranks))[0][3] is (workers == 1)


@pytest.mark.parametrize(
    ("variable", "compiles"), [("ACCELERATE_USE_FSDP", True), ("ACCELERATE_USE_DEEPSPEED", False)]
)
def test_blocks_are_compiled_under_fsdp_and_not_under_deepspeed(machine, variable, compiles):
    machine.setenv(variable, "true")
    assert chosen(*t5())[0][3] is compiles


def test_what_is_not_there_is_replaced_and_its_cost_said(machine):
    machine.setattr(speed, "has_bf16", lambda device: False)
    machine.setattr(speed, "lacks_compiler", lambda device: "there is no C++ compiler g++")
    args, origins = choose_speed(*t5())
    line = describe_speed(args, origins, modeling_t5.T5Model(modeling_t5.T5Config(**SIZES)))
    assert (args.bf16, args.compile) == (False, False)
    assert "fp32 (this CPU has no bfloat16)" in line and "not compiled (there is no C++ compiler g++)" in line


def test_what_is_not_there_is_refused_where_it_was_asked_for(machine):
    machine.setattr(speed, "lacks_compiler", lambda device: "there is no C++ compiler g++")
    with pytest.raises(UserError, match=r"--compile: there is no C\+\+ compiler g\+\+"):
        choose_speed(*t5(compile=True))


def test_small_models_and_unknown_kinds_stay_as_they_are(tmp_path):
    (tmp_path / "small.json").write_text('{"model_type": "t5", "d_model": 32, "d_ff": 64}')
    (tmp_path / "other.json").write_text('{"model_type": "gpt2", "n_embd": 32}')
    (tmp_path / "named.json").write_text('{"base": "t5-small", "attn_implementation": "eager"}')
    (tmp_path / "broken.json").write_text("{")
    classes = {"small": OURS, "other": "transformers:GPT2LMHeadModel", "named": THEIRS, "broken": THEIRS}
    for name, model_cls in classes.items():
        given = {"model_cls": model_cls} if name == "other" else {}
        found = chosen(*t5(model_cfg=str(tmp_path / f"{name}.json"), iters=10, **given))[0]
        assert found == ("auto", model_cls, name == "named", False)


def test_bert_and_fine_tuning(tmp_path):
    bert = BertPretrainingArgs(data_path=("d",), vocab_file="v", lr=1e-3, model_cfg="bert_base_uncased", iters=LONG)
    assert chosen(bert, {})[0] == ("auto", "modeling_bert:BertForPreTraining", True, False)  # it has dropout
    bert = replace(bert, dropout_rate=0.0)
    assert chosen(bert, {})[0] == ("auto", "modeling_bert:BertForPreTraining", True, True)
    for kind, config, model_cls in (
        ("encoder-decoder", {"model_type": "t5"}, OURS),
        ("encoder", {"model_type": "bert"}, "modeling_bert:BertForSequenceClassification"),
        ("decoder", {"model_type": "gpt2", "n_embd": 768}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        task = "classification" if kind == "encoder" else "causal_lm" if kind == "decoder" else "text_to_text"
        args = FinetuningArgs(model_type=kind, task=task, from_pretrained=str(tmp_path))
        assert chosen(args, {})[0] == ("auto", model_cls, True, False)
        if kind == "encoder-decoder":
            adapted = FinetuningArgs(model_type=kind, from_pretrained=str(tmp_path), peft="lora")
            assert chosen(adapted, {})[0][1] is None


def recorded(folder, **settings):
    """A run directory of these settings, which has trained."""
    (folder / "config.json").write_text(json.dumps({"validate_only": False, **settings}))
    (folder / "metrics.jsonl").write_text("{}\n")
    return str(folder)


def test_a_run_that_was_begun_before_the_flag_goes_on_without(tmp_path):
    run = recorded(tmp_path, model_cls=THEIRS, bf16=False)
    assert chosen(*t5(model_path=run))[0] == ("off", THEIRS, False, False)
    assert chosen(*t5(resume=f"{run}/last"))[0][0] == "off"
    assert chosen(*t5(model_path=run, speed="auto"))[0][:2] == ("auto", OURS)
    (tmp_path / "metrics.jsonl").unlink()  # nothing was trained
    assert chosen(*t5(model_path=run))[0][0] == "auto"


def test_a_run_goes_on_as_it_recorded(tmp_path, machine):
    run = recorded(tmp_path, speed="auto", model_cls=THEIRS, bf16=True, compile=True)
    machine.setattr(speed, "has_bf16", lambda device: False)  # another machine
    found, origins = chosen(*t5(model_path=run, iters=10))
    assert found == ("auto", THEIRS, True, True)
    assert origins["bf16"] == "--speed auto: as the run recorded"
    machine.setattr(speed, "lacks_compiler", lambda device: "there is no triton")
    found, origins = chosen(*t5(model_path=run))
    assert found[3] is False and "there is no triton" in origins["compile"]


@pytest.mark.slow
def test_no_thread_computes_with_denormal_numbers():
    """Threads of torch too, each of which has this setting of its own."""
    code = (
        "import torch; from lm_experiments_tools.models.speed import set_up_process; set_up_process(fast=True)\n"
        "torch.set_num_threads(3); x = torch.full((3 * 2**20,), 1e-39)\n"
        "print(int((x * 0.5).count_nonzero()), torch.get_num_threads())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "3"]


SIZES = {
    "vocab_size": 64, "num_heads": 4, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
BERT_SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 1024,
}  # fmt: skip
MODELS = {
    "t5": lambda: modeling_t5.T5ForConditionalGeneration(modeling_t5.T5Config(**SIZES)),
    "bert": lambda: modeling_bert.BertForMaskedLM(modeling_bert.BertConfig(**BERT_SIZES)),
}


@pytest.mark.parametrize(
    ("kind", "graphs"), [pytest.param("t5", [6, 10, 10], marks=pytest.mark.slow), ("bert", [1, 2, 2])]
)
def test_blocks_that_are_alike_share_one_graph_for_a_shape_and_one_for_all_others(kind, graphs):
    """Losses and gradients are those of the model before."""
    torch.compiler.reset()
    counters.clear()
    plain, compiled, numbers = MODELS[kind](), MODELS[kind](), []
    compiled.load_state_dict(plain.state_dict())
    made = []
    compile_blocks(compiled, backend=lambda graph, inputs: made.append(graph) or graph.forward)
    for length, target in [(64, 24), (80, 32), (300, 56)]:
        inputs = {
            "input_ids": torch.randint(2, 64, (2, length)),
            "labels": torch.randint(2, 64, (2, target if kind == "t5" else length)),
            **({"use_cache": False} if kind == "t5" else {}),
        }
        for model in (plain, compiled):
            model.zero_grad()
            model.train()(**inputs).loss.backward()
        for name, parameter in plain.named_parameters():
            found = compiled.get_parameter(name).grad
            assert found is parameter.grad or torch.allclose(found, parameter.grad, rtol=1e-5, atol=1e-7), name
        numbers.append(len(made))
    assert numbers == graphs
    assert not counters["graph_break"] and counters["frames"]["total"] == counters["frames"]["ok"]


@torch._dynamo.config.patch(optimize_ddp=True)  # undone by monkeypatch, the setting would be gone
def test_ddp_splits_no_block(tmp_path):
    torch.compiler.reset()
    # Once in many runs an earlier test of this process has left one.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        numbers = []
        for wraps in (False, True):
            torch.compiler.reset()
            model, made = MODELS["bert"](), []
            compile_blocks(model, backend=lambda graph, inputs, made=made: made.append(graph) or graph.forward)
            # Buckets smaller than a block.
            model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-3) if wraps else model
            ids = torch.randint(2, 64, (2, 16))
            model(input_ids=ids, labels=ids).loss.backward()
            numbers.append(len(made))
        assert numbers == [1, 1]
    finally:
        torch.distributed.destroy_process_group()


def test_workers_that_chose_differently_are_refused():
    ours, theirs = (choose_speed(*t5(model_cls=cls))[0] for cls in (OURS, THEIRS))
    other = SimpleNamespace(gather=lambda mine: [mine, theirs.model_cls if isinstance(mine, str) else mine])
    common._check_choices(theirs, other)
    with pytest.raises(UserError, match="workers choose model_cls differently: give --model_cls"):
        common._check_choices(ours, other)
