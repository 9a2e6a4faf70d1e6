"""modeling_t5 where it is used: the run script, docs/new_variant.md, PEFT, torch.compile, every shipped preset."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.models.presets import list_presets
from modeling_t5 import T5Config, T5ForConditionalGeneration, losses
from run_t5_pretraining import main
from tests.distributed.launch import ROOT
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

SIZES = {
    "vocab_size": 512,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 2,
}
VARIANT = {
    "encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 1, "num_memory_tokens": 2,
    "z_loss": 1e-4, "cross_entropy_chunk_size": 16,
}  # fmt: skip
PRESETS = sorted(name for name, path in list_presets().items() if path.parent.name == "t5_configs")
PARAMETERS = {  # of the checkpoints of those names on the Hugging Face Hub, the output layer included
    "mt5-base": 582_401_280, "flan-t5-base": 247_577_856,
}  # fmt: skip


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return numbered_words_vocabulary(tmp_path_factory.mktemp("vocab"))


@pytest.fixture
def start(tmp_path, monkeypatch, vocab):
    """A folder with text as the current one, and a function that trains in it."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")

    def run(model_cls, config, **changed):
        (tmp_path / "config.json").write_text(json.dumps(config))
        flags = {
            "data_path": "text.jsonl", "vocab": vocab, "model_path": "run", "model_cfg": "config.json",
            "model_cls": model_cls, "input_seq_len": 32, "target_seq_len": 16, "batch_size": 8, "lr": 1e-2, "iters": 2,
            "log_interval": 1, "data_n_workers": 1, "backend": "local", **changed,
        }  # fmt: skip
        main([f"--{name}={value}" for name, value in flags.items()])
        return json.loads((tmp_path / flags["model_path"] / "metrics.json").read_text())["train"]["loss"]

    return run


def test_the_script_trains_it_and_from_pretrained_reads_the_checkpoint(start, tmp_path):
    """Under the name that t5-experiments gives the class."""
    assert start("modeling_t5.modeling_t5:T5ForConditionalGeneration", {"base": "t5-small", **SIZES, **VARIANT}) > 0
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "run" / "last")
    assert model.encoder.memory_tokens.shape == (2, 16) and model.config.num_cdq_heads == 1
    assert model.generate(torch.tensor([[5, 6, 1]]), max_new_tokens=3).shape[0] == 1


def test_chunks_bound_the_logits_of_training_and_of_validation(start, monkeypatch):
    """The same numbers as whole logits."""
    rows, forward = [], torch.nn.Linear.forward

    def counted(self, x):
        if self.out_features == 512:
            rows.append((torch.is_grad_enabled(), x.shape[:-1].numel()))
        return forward(self, x)

    def loss_is_made(*args):
        rows.append((torch.is_grad_enabled(), 0))
        return make(*args)

    def logits_are_made(logits, *args):
        rows.append((True, logits.shape[0]))
        return turn(logits, *args)

    make, turn = losses.linear_token_loss, losses.turn_into_gradient
    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    monkeypatch.setattr(losses, "linear_token_loss", loss_is_made)
    monkeypatch.setattr(losses, "turn_into_gradient", logits_are_made)
    flags = {"valid_data_path": "text.jsonl", "valid_interval": 1, "iters": 2}
    found = {}
    for chunk_size in (16, 0):
        rows.clear()
        config = {"base": "t5-small", **SIZES, "cross_entropy_chunk_size": chunk_size}
        start("modeling_t5:T5ForConditionalGeneration", config, model_path=f"run{chunk_size}", **flags)
        found[chunk_size] = json.loads(Path(f"run{chunk_size}", "metrics.json").read_text())["valid"]["loss"]
        assert {trains for trains, _ in rows} == {True, False}
        assert (max(number for _, number in rows) <= 16) == bool(chunk_size)
    assert found[16] == pytest.approx(found[0], rel=1e-5)


def test_the_page_about_variants_is_right(start, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "new_variant.md").read_text()
    code, config = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "json"))
    assert len(code.splitlines()) <= 40
    (tmp_path / "my_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    start("my_model:MyT5", {**json.loads(config), **SIZES})
    model = importlib.import_module("my_model").MyT5.from_pretrained(tmp_path / "run" / "last")
    assert model.config.window == 2
    model.set_attn_implementation("eager")
    weights = model.encoder(torch.arange(5, 15)[None], output_attentions=True).attentions
    distance = (torch.arange(10)[:, None] - torch.arange(10)).abs()
    assert all(((layer > 0) == (distance <= 2)).all() for layer in weights)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_is_built_and_round_trips(preset, tmp_path):
    config = load_model_config(preset, T5Config)
    layers = {} if preset in PARAMETERS else {"num_layers": 1, "num_decoder_layers": 1}  # quicker
    with torch.device("meta"):
        model = build_model(T5ForConditionalGeneration, T5Config(**config.to_dict() | layers), seed=0)
    config.save_pretrained(tmp_path)
    for again in (T5Config.from_pretrained(tmp_path), load_model_config(tmp_path / "config.json", T5Config)):
        written = {key: value for key, value in again.to_dict().items() if key != "_name_or_path"}
        assert written == {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    values = json.loads(list_presets()[preset].read_text())
    for key in values.keys() - {"base", "tie_word_embeddings"}:
        assert getattr(read, key) == values[key]
    number = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert number == PARAMETERS.get(preset, number)
    assert (model.lm_head.weight is model.shared.weight) == config.tie_word_embeddings
    assert ("cdQ" in preset) == any(name.endswith("cd_q.weight") for name in model.state_dict())


def tiny(**settings):
    torch.manual_seed(0)
    values = {**SIZES, "dropout_rate": 0.0, "decoder_start_token_id": 0, **settings}
    return T5ForConditionalGeneration(T5Config(**values))


def batch():
    ids = torch.randint(2, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.flip(1)[:, :7]}


@pytest.mark.parametrize(("kind", "settings"), [("lora", VARIANT), ("prompt", {})], ids=["lora", "prompt"])
def test_peft(kind, settings):
    peft = pytest.importorskip("peft")
    config = {
        "lora": lambda: peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q", "v", "wo"]),
        "prompt": lambda: peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=4),
    }[kind]()
    model = peft.get_peft_model(tiny(**settings), config)
    model(**batch()).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and "lora_A" not in name}
    assert gradients and all(gradient.any() for gradient in gradients.values())
    inputs = batch()
    del inputs["labels"]
    assert model.eval().generate(**inputs, max_new_tokens=4).shape[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_run_stops_goes_on_and_ends_as_one_that_is_not_compiled(start, tmp_path, monkeypatch, backend):
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    compile_in_place = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_in_place(self, backend=backend))
    layout = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 16}}
    config = {"base": "t5-small", **SIZES, "num_layers": 1, "dropout_rate": 0.0, **layout}
    whole = start("modeling_t5:T5ForConditionalGeneration", config, iters=4)
    assert not frames["total"]
    settings = {"model_path": "compiled", "compile": "true"}
    start("modeling_t5:T5ForConditionalGeneration", config, **settings)
    assert frames["total"] == frames["ok"] == 4  # a block and the last norm of the encoder, and of the decoder
    again = start("modeling_t5:T5ForConditionalGeneration", config, iters=4, **settings)
    assert again == pytest.approx(whole, rel=1e-5) and frames["total"] == frames["ok"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settings", [{}, {**VARIANT, "position_embedding_type": "rotary"}], ids=["base", "variant"])
def test_compiled_model_has_the_same_loss_and_gradients(settings):
    found = []
    for is_compiled in (False, True):
        model = tiny(**settings)
        loss = (torch.compile(model) if is_compiled else model)(**batch()).loss
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
