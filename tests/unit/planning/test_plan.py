"""The closed form and the trace of a run's memory, against models as they are built and trained."""

import json
import subprocess
import sys

import pytest
import torch

from lm_experiments_tools.config.planning import PlanningArgs, bytes_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import OWN_CLASSES, build_model, load_model_config, num_parameters
from lm_experiments_tools.models.freezing import freeze
from lm_experiments_tools.models.presets import read_model_settings
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from lm_experiments_tools.optimizers import build_optimizer
from lm_experiments_tools.planning.build import trace_plan
from lm_experiments_tools.planning.fit import USABLE, fit
from lm_experiments_tools.planning.optimizer_state import state_of
from lm_experiments_tools.planning.plan import make_plan, model_settings
from lm_experiments_tools.planning.shapes import KINDS, describe
from lm_experiments_tools.planning.show import of_launcher
from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tools.plan import PlanBertArgs, PlanFinetuningArgs, PlanT5Args
from tests.helpers import ROOT

T5 = {
    "model_type": "t5", "vocab_size": 4000, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
T5_GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "dropout_rate": 0.0}
BERT = {
    "model_type": "bert", "vocab_size": 4000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 512,
}  # fmt: skip
OWN_T5, OWN_BERT = "modeling_t5:T5ForConditionalGeneration", OWN_CLASSES["bert"]
GIVEN = dict.fromkeys(("bf16", "model_cls"), "command line")  # so that nothing depends on this CPU


def settings(tmp_path, config, cls=None, **flags):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    kinds = {"t5": PlanT5Args, "bert": PlanBertArgs}
    more = {"input_seq_len": 128, "batch_size": 4, "lr": 1e-3, "device": "cpu", "speed": "off", **flags}
    tuned = {"peft", "freeze", "model_type"} & set(flags)
    if config["model_type"] == "bert" and not tuned:
        more.setdefault("vocab_file", "-")
    if cls is not None:
        more["model_cls"] = cls
    return (PlanFinetuningArgs if tuned else kinds[config["model_type"]])(model_cfg=str(path), **more)


def traced(plan, **options):
    return trace_plan(plan.args, plan.step.source, plan.step.target, plan.step.scored, **options)


@pytest.mark.parametrize("preset", ["t5-small", "t5-v1_1-base", "t5-base-memory10", "bert-mini", "bert_large_uncased"])
def test_the_parameters_of_a_preset_are_those_of_the_model(preset):
    config = read_model_settings(preset)
    cls = get_cls_by_name(OWN_CLASSES[KINDS[config["model_type"]]])
    with torch.device("meta"):
        model = build_model(cls, load_model_config(preset, cls.config_class), seed=0)
    assert describe(config).parameters() == num_parameters(model).total


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (T5, {}),
        (T5, {"gradient_checkpointing": True, "optimizer": "Adafactor", "batch_size": 16}),
        (T5, {"cls": OWN_T5, "speed": "auto", "gradient_accumulation_steps": 2, "batch_size": 16}),
        (T5_GATED, {"cls": OWN_T5, "speed": "auto", "bf16": True, "dropout_rate": 0.1, "batch_size": 16}),
        (BERT, {"mlm_positions": "all"}),
        (BERT, {"cls": OWN_BERT, "speed": "auto", "batch_size": 16, "optimizer": "SGD"}),
        (T5, {"peft": "lora", "batch_size": 16}),
        (T5, {"peft": "lora", "batch_size": 16, "lora_targets": ("all-linear",), "lora_dropout": 0.1}),
        (T5, {"freeze": ("encoder",), "batch_size": 16}),
        (T5, {"freeze": ("decoder",), "batch_size": 16}),
        (T5, {"freeze": ("embeddings", "encoder"), "batch_size": 16, "target_seq_len": 128}),
        (T5, {"freeze": ("embeddings", "encoder"), "input_seq_len": 512, "target_seq_len": 8}),
        (T5, {"freeze": (), "batch_size": 16, "task": "classification", "target_seq_len": 8}),
        (BERT, {"model_type": "encoder"}),
        (BERT, {"model_type": "encoder", "cls": "modeling_bert:BertForSequenceClassification", "speed": "auto"}),
        (BERT, {"model_type": "encoder", "freeze": ("embeddings",)}),
        (BERT, {"model_type": "encoder", "peft": "lora", "batch_size": 16}),
    ],
)
def test_the_closed_form_is_within_5_percent_of_the_trace(tmp_path, config, flags):
    if "peft" in flags:
        pytest.importorskip("peft")
    plan = make_plan(args := settings(tmp_path, config, **flags), args, GIVEN)
    assert plan.peak.total == pytest.approx(traced(plan).peak, rel=0.05)


@pytest.mark.parametrize("frozen", ["embeddings", "encoder", "decoder", "head"])
@pytest.mark.parametrize("config", [T5, T5_GATED, BERT])
def test_what_freeze_leaves_is_what_the_model_trains(tmp_path, config, frozen):
    (tmp_path / "config.json").write_text(json.dumps(config))
    cls = get_cls_by_name("modeling_bert:BertForSequenceClassification" if config is BERT else OWN_T5)
    with torch.device("meta"):
        model = build_model(cls, load_model_config(tmp_path / "config.json", cls.config_class), seed=0)
    try:
        freeze(model, [frozen])
    except UserError:
        assert describe(config).frozen([frozen]) == 0  # there is no such part
        return
    kind = "encoder" if config is BERT else "encoder-decoder"
    args = settings(tmp_path, config, model_type=kind, freeze=(frozen,))
    assert make_plan(args, args, GIVEN).trained == num_parameters(model).trainable


@pytest.mark.parametrize(("cls", "speed"), [(None, "off"), (OWN_T5, "auto")])
def test_the_trace_is_what_the_same_steps_hold_with_real_tensors(tmp_path, cls, speed):
    args = settings(tmp_path, T5, cls, speed=speed, batch_size=2, input_seq_len=32)
    plan = make_plan(args, args, GIVEN)
    fake, real = traced(plan), traced(plan, fake=False)  # in this order: nothing of the first may be left behind
    assert fake.peak == pytest.approx(real.peak, rel=1e-3)
    assert fake.parts["parameters"] == 4 * plan.model.parameters()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamWScale", "Adafactor", "Muon", "RMSprop", "NAdam", "Adagrad"])
def test_the_state_of_an_optimizer_is_what_it_holds_after_a_step(name):
    torch.manual_seed(0)
    from transformers import T5Config, T5ForConditionalGeneration

    values = {key: value for key, value in T5.items() if key != "model_type"}
    model = T5ForConditionalGeneration(T5Config(**values))
    optimizer = build_optimizer(model, name=name, lr=1e-3, weight_decay=0.0)
    model(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss.backward()
    optimizer.step()
    tensors = [
        x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor) and x.ndim
    ]
    held = sum(tensor.nbytes for tensor in tensors) + getattr(optimizer, "_memory", torch.empty(0)).nbytes
    shape = describe(T5)
    assert state_of(name, shape, shape.parameters()).size == pytest.approx(held, rel=0.01, abs=1)


def test_what_fits_keeps_the_rows_of_an_update_and_stays_below(tmp_path):
    args = settings(tmp_path, T5, batch_size=32, input_seq_len=256)
    config = model_settings(args)
    plan = make_plan(args, args, GIVEN, config)
    memories = [int(plan.peak.total / part) for part in (0.9, 4, 12)]
    for memory in memories:
        planning = PlanningArgs(device="cpu", fit=f"{memory}B")
        found = fit(args, planning, GIVEN, config, plan)
        assert found.plan.args.rows_per_worker() == 32
        assert found.plan.peak.total <= USABLE * memory
    assert found.changed["batch_size"] < 32
    with pytest.raises(UserError, match=r"1\.0 MiB are too little: .*Adafactor .*shorten the rows"):
        fit(args, PlanningArgs(device="cpu", fit="1MiB"), GIVEN, config, plan)


def test_shards_divide_what_they_say(tmp_path):
    args = settings(tmp_path, T5)
    whole, *others = (
        make_plan(args, PlanningArgs(device="cpu", workers=4, sharding=kind), GIVEN).fixed
        for kind in ("none", "zero1", "zero2", "fsdp")
    )
    divided = [
        [getattr(part, name) / getattr(whole, name) for name in ("weights", "gradients", "state")] for part in others
    ]
    assert divided == [[1, 1, 0.25], [1, 0.25, 0.25], [0.25, 0.25, 0.25]]
    assert of_launcher({"WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true"}) == PlanningArgs(workers=4, sharding="fsdp")


def test_eleven_billions_are_planned_without_torch():
    code = (
        "import sys; from lm_experiments_tools.tools.main import main; "
        "main(['plan', 'pretrain-t5', '--model_cfg', 't5-11b', '--no_trace', '--device', 'cpu']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "11,307,321,344 parameters" in done.stdout
    assert "optimizer state" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["pretrain"], "name one of pretrain-t5"),
        (["none.yaml"], "none.yaml"),
        (["pretrain-t5"], "no model is named"),
        (["pretrain-t5", "--model_cfg", "t5-smal"], "did you mean 't5-small'"),
        (["finetune", "--from_pretrained", "nowhere"], "no config.json"),
        (["pretrain-t5", "--model_cfg", "t5-small", "--fit", "lots"], "--fit lots is no size"),
        (["pretrain-t5", "--model_cfg", "t5-small", "--fit", "1KiB", "--no_trace"], "1.0 KiB are too little"),
        (["pretrain-t5", "--model_cfg", "t5-small", "--sharding", "fsdp"], "add --workers"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and not captured.out


def test_a_class_that_cannot_be_traced_is_a_sentence_and_the_rest_is_shown(tmp_path, monkeypatch, capsys):
    (tmp_path / "looks.py").write_text(
        "from modeling_t5 import T5ForConditionalGeneration\n"
        "class Looks(T5ForConditionalGeneration):\n"
        "    def forward(self, input_ids=None, labels=None, **kwargs):\n"
        "        raise RuntimeError('wants to see numbers')\n"
    )
    (tmp_path / "model.json").write_text(json.dumps(T5))
    monkeypatch.chdir(tmp_path)
    words = ["--model_cfg", "model.json", "--model_cls", "looks:Looks", "--device", "cpu"]
    assert main(["plan", "pretrain-t5", *words]) == 0
    shown = capsys.readouterr().out
    assert "not traced: looks:Looks cannot be traced: RuntimeError: wants to see numbers" in shown
    assert "the trace knows better" in shown


def test_sizes_are_read():
    assert bytes_of("24GiB") == bytes_of("24G") == bytes_of("24576 MiB") == 24 * 2**30
