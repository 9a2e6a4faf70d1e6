"""`lmtools export --to`: transformers loads the very model from the folder, also by the code of its card."""

import base64
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import sentencepiece
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from lm_experiments_tools.tools.main import main
from run_t5_pretraining import main as pretrain
from tests.helpers import ROOT
from tests.helpers.pretrained_toys import ROWS, save_toy, t5_config
from tests.helpers.runs import tiny_t5_run, words
from tests.helpers.suite_toys import save_decoder_with_t5_tokenizer
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

OWN = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel


class LoudConfig(GPT2Config):
    model_type = "loud"
    loudness: float = 3.0


class Loud(GPT2LMHeadModel):
    config_class = LoudConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output["logits"] = output["logits"] * self.config.loudness
        return output


CONFIG = LoudConfig(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=64)
"""
HALVED = """
from modeling_t5 import T5Config, T5ForConditionalGeneration


class HalvedConfig(T5Config):
    model_type = "halved"


class HalvedT5(T5ForConditionalGeneration):
    config_class = HalvedConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output["logits"] = output["logits"] / 2
        return output


CONFIG = HalvedConfig(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=96)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four updates, its best checkpoint the last."""
    folder = tmp_path_factory.mktemp("exported")
    flags = tiny_t5_run(folder, tie_word_embeddings=False)
    pretrain(words(**flags, iters=4, model_path=folder / "run"))
    return folder / "run"


def logits(model) -> torch.Tensor:
    ids = torch.arange(3, 23).reshape(2, 10)
    more = {"decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **more).logits


def test_transformers_loads_the_very_model_from_shards(run, tmp_path):
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--max_shard_size", "40KB"]) == 0
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) >= 3
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    original = load_file(run / "last" / "model.safetensors")
    assert weights.keys() == original.keys() and all(torch.equal(weights[name], original[name]) for name in weights)
    assert "lm_head.weight" in weights  # not tied, as the configuration says
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(model) is T5ForConditionalGeneration
    assert torch.equal(logits(model), logits(T5ForConditionalGeneration.from_pretrained(run / "last")))
    ids = [
        AutoTokenizer.from_pretrained(folder)("word1 token2")["input_ids"]
        for folder in (tmp_path / "out", run / "last")
    ]
    assert ids[0] == ids[1]
    assert not [file for file in tmp_path.iterdir() if file.name != "out"]


def test_weights_keep_their_dtype_unless_that_would_round_them(tmp_path):
    model = T5ForConditionalGeneration(t5_config()).bfloat16()
    save_toy("", tmp_path / "narrow", model)
    shutil.copytree(tmp_path / "narrow", tmp_path / "wide")
    torch.manual_seed(0)
    wide = {
        name: weight.float() + torch.rand_like(weight.float()) / 999 for name, weight in model.state_dict().items()
    }
    save_file(wide | {"lm_head.weight": wide["shared.weight"].clone()}, tmp_path / "wide" / "model.safetensors")
    for name, dtype in (("narrow", torch.bfloat16), ("wide", torch.float32)):
        assert main(["export", str(tmp_path / name), "--to", str(tmp_path / f"{name}_out")]) == 0
        found = load_file(tmp_path / f"{name}_out" / "model.safetensors")
        assert {weight.dtype for weight in found.values()} == {dtype}
        original = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[key], original[key]) for key in found)


def test_a_model_of_16_bits_with_rotary_positions_is_exported(tmp_path):
    """Their frequencies are float32 in a buffer, which must not be rounded with the weights."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=ROWS)
    save_toy("", tmp_path / "llama", LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=1)).bfloat16())
    assert main(["export", str(tmp_path / "llama"), "--to", str(tmp_path / "out")]) == 0
    assert {weight.dtype for weight in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_the_code_of_the_card_runs(run, tmp_path, monkeypatch):
    first = run / "checkpoints" / "step_000002"
    assert main(["export", str(first), "--to", str(tmp_path / "named")]) == 0
    card = ModelCard.load(tmp_path / "named" / "README.md")
    assert card.data.license == "other" and card.data.library_name == "transformers"
    assert str(run.parent) not in card.content and "Licence: not chosen yet" in card.text
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec(card.text.partition("```python\n")[2].partition("```")[0], namespace)
    assert torch.equal(logits(namespace["model"]), logits(T5ForConditionalGeneration.from_pretrained(first)))
    assert namespace["tokenizer"]("word1")["input_ids"]


def test_an_exported_decoder_does_not_end_its_prompts(tmp_path):
    vocab = numbered_words_vocabulary(tmp_path)
    gpt = save_decoder_with_t5_tokenizer(tmp_path / "gpt", vocab, "number21")
    assert main(["export", str(gpt), "--to", str(tmp_path / "out")]) == 0
    before, after = AutoTokenizer.from_pretrained(gpt), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "word3 number21 <extra_id_7> token3"
    ids = sentencepiece.SentencePieceProcessor(str(vocab)).encode("word3 number21")
    assert before("word3 number21")["input_ids"] == [*ids, before.eos_token_id]
    assert after("word3 number21")["input_ids"] == ids
    assert after(text)["input_ids"] == before(text)["input_ids"][:-1] and after.get_vocab() == before.get_vocab()
    assert after.special_tokens_map == before.special_tokens_map and after.decode(ids) == before.decode(ids)
    prompt = after("word3", return_tensors="pt")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generate(**prompt, max_new_tokens=1)
    assert after.decode(written[0, -1]) in "number21"


def test_a_folder_that_loads_as_another_model_is_not_written(run, tmp_path, monkeypatch, capsys):
    def damaged(folder, *options, **settings):
        weights = load_file(folder / "model.safetensors")
        weights["encoder.final_layer_norm.weight"] *= 1.001
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return T5ForConditionalGeneration.from_pretrained(folder)

    monkeypatch.setattr(AutoModelForSeq2SeqLM, "from_pretrained", damaged)
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "its logits differ by up to" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_adapter_is_merged(tmp_path):
    peft = pytest.importorskip("peft")
    base = save_toy("encoder-decoder", tmp_path / "base", T5ForConditionalGeneration(t5_config()))
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], init_lora_weights=False)
    adapted = peft.get_peft_model(T5ForConditionalGeneration.from_pretrained(base), config)
    adapted.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), "--to", str(tmp_path / "out")]) == 0
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(adapted.merge_and_unload()))
    assert "an adapter is merged" in (tmp_path / "out" / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w1")["input_ids"]


@pytest.mark.slow  # each starts Python
@pytest.mark.parametrize(
    ("module", "source", "cls", "auto"),
    [
        ("loud", OWN, "Loud", AutoModelForCausalLM),
        ("halved", HALVED, "HalvedT5", AutoModelForSeq2SeqLM),
    ],
    ids=["transformers", "ours"],
)
def test_a_class_of_ones_own_brings_its_code_along(tmp_path, monkeypatch, module, source, cls, auto):
    """A new process, in another folder and without the user's, loads it as the card says."""
    code = tmp_path / "code"
    code.mkdir()
    (code / f"{module}.py").write_text(source)
    monkeypatch.chdir(code)
    monkeypatch.syspath_prepend(str(code))
    names = importlib.import_module(module)
    torch.manual_seed(0)
    model = getattr(names, cls)(names.CONFIG)
    save_toy("", tmp_path / "saved", model)
    arguments = ["export", str(tmp_path / "saved"), "--to", str(tmp_path / "out")]
    assert main(arguments) == 2  # its class is nowhere named
    assert main([*arguments, "--model_cls", f"{module}:{cls}"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"][auto.__name__] == f"{module}.{cls}"
    card = (tmp_path / "out" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    program = f"{card}\nimport torch\ntorch.save(model.state_dict(), 'weights.pt')\nprint(type(model).__name__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == cls, done.stderr
    found = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["MODEL"], "there is nothing to write"),
        (["MODEL", "--to", "."], "nothing is overwritten"),
        (["MODEL/config.json", "--to", "out"], "holds weights alone"),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path, capsys, monkeypatch, flags, message):
    save_toy("decoder", tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["export", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert [file.name for file in tmp_path.iterdir()] == ["MODEL"]


class FakeHub(BaseHTTPRequestHandler):
    """The Hub's answers to an upload, as huggingface_hub's client calls it; keeps the requests in `seen`."""

    seen: ClassVar[dict[str, str]] = {}

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.seen[path] = body
        where = f"http://127.0.0.1:{self.server.server_port}/me/t5"
        answer = {"url": where, "commitUrl": f"{where}/commit/0", "commitOid": "0"}
        if path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in files]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Log no request."""


@pytest.mark.slow
def test_a_folder_is_uploaded_to_a_private_repository(run, tmp_path):
    """By huggingface_hub's own client, from a process of its own, since it reads the address at its import."""

    def export(folder, address):
        environ = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_me"}
        command = [sys.executable, "-m", "lm_experiments_tools.tools.main", "export", str(run), "--to", str(folder)]
        return subprocess.run([*command, "--push_to_hub", "me/t5"], env=environ, capture_output=True, text=True)

    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{hub.server_port}"
        done = export(tmp_path / "mine", address)
        hub.shutdown()
    assert done.returncode == 0 and f"uploaded to {address}/me/t5" in done.stdout, done.stderr
    asked = json.loads(FakeHub.seen["/api/repos/create"])
    assert (asked["name"], asked["organization"], asked["visibility"]) == ("t5", "me", "private")
    lines = map(json.loads, FakeHub.seen["/api/models/me/t5/commit/main"].splitlines())
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }
    assert sent == {file.name: file.read_bytes() for file in (tmp_path / "mine").iterdir()}
    # Nobody listens there any more.
    failed = export(tmp_path / "again", address)
    assert failed.returncode == 2 and (tmp_path / "again").is_dir(), failed.stderr
    assert "--push_to_hub me/t5: " in failed.stderr and "Traceback" not in failed.stderr
