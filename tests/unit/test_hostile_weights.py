"""A folder of weights of a stranger runs no code and leads nowhere else, whichever command reads it."""

import ast
import builtins
import json
import logging
import sys

import pytest

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.models.saved import open_saved
from lm_experiments_tools.recipes.finetuner import FineTuner
from lm_experiments_tools.tools.main import main
from modeling_t5 import T5Config, T5ForConditionalGeneration
from tests.helpers import ROOT
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.fuzz import watching
from tests.helpers.pretrained_toys import save_toy

EVIL = """
open("canary", "w")
from lm_experiments_tools.attention import SparsityConfig
from lm_experiments_tools.attention.positions import PositionScheme
from modeling_t5 import T5Attention, T5ForConditionalGeneration
from transformers import PreTrainedTokenizerFast, T5Config

class Layout(SparsityConfig): pass
class Position(PositionScheme): pass
class Attention(T5Attention): pass
class Model(T5ForConditionalGeneration): pass
class Tokenizer(PreTrainedTokenizerFast): pass
class Config(T5Config): pass
"""
OURS = {"model_type": "lm_experiments_t5"}
EDITS = {
    "layout": {**OURS, "sparse_config_cls": "bad.evil:Layout", "sparse_attention": {"block": 4}},
    "layout of transformers": {"sparse_config_cls": "bad.evil:Layout", "sparse_attention": {"block": 4}},
    "layout by dots": {"sparse_config_cls": "bad.evil.Layout", "attn_implementation": "block_sparse"},
    "position": {**OURS, "position_embedding_type": "bad.evil:Position"},
    "layer": {**OURS, "encoder_self_attention_layer": "bad.evil:Attention"},
    "kernel": {"attn_implementation": "someone/kernel"},
    "auto_map": {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForSeq2SeqLM": "evil.Model"}},
    "unknown kind": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}},
    "class": {"architectures": ["bad.evil:Model"]},
    "base": {"base": "../outside.json"},
}
TRAIN = ("--data_path", "rows.jsonl", "--lr", "1e-3", "--iters", "1", "--batch_size", "2", "--input_seq_len", "16")
TRAIN += ("--backend", "local")
SHORT = ("--target_seq_len", "8")
PRETRAIN = ("pretrain-t5", *TRAIN, "--vocab", "bytes", "--text_key", "source", "--model_path", "run")
PRETRAIN += ("--model_cls", "modeling_t5:T5ForConditionalGeneration")
COMMANDS = {
    "generate": ("generate", "bad", "w1 w2", "--max_new_tokens", "2"),
    "generate --model_cls": ("generate", "bad", "w1", "--model_cls", "modeling_t5:T5ForConditionalGeneration"),
    "finetune": ("finetune", "--from_pretrained", "bad", *TRAIN, *SHORT),
    "finetune --init_checkpoint": ("finetune", "--init_checkpoint", "bad", "--tokenizer", "good", *TRAIN, *SHORT),
    "pretrain --init_checkpoint": (*PRETRAIN, "--init_checkpoint", "bad"),
    "pretrain --base_model": (*PRETRAIN, "--base_model", "bad"),
    "export": ("export", "bad", "--to", "exported"),
    "evaluate": ("evaluate", "--checkpoints", "bad", "--valid_data_path", "rows.jsonl", "--input_seq_len", "16"),
    "plan": ("plan", "finetune", "--from_pretrained", "bad", "--batch_size", "2"),
}  # fmt: skip


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """A folder of a T5 with its tokenizer, evil.py in it and beside it, where Python would find either."""
    folder = save_toy("encoder-decoder", tmp_path / "bad")
    save_toy("encoder-decoder", tmp_path / "good")
    write_json(tmp_path / "rows.jsonl", pairs(8))
    (tmp_path / "outside.json").write_text("{}")
    for place in (tmp_path, folder):
        (place / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a question was asked"))
    monkeypatch.setattr(sys, "argv", ["lmtools"])
    monkeypatch.setattr(logging.root, "handlers", logging.root.handlers[:])
    yield folder
    assert not {"evil", "bad", "bad.evil"} & set(sys.modules)
    assert not (tmp_path / "canary").exists()


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def run(argv, capsys):
    """Exit code and what was printed, of a command that runs nothing of the folder."""
    with watching() as ran:
        try:
            code = main(list(argv))
        except SystemExit as end:
            code = end.code
    out, err = capsys.readouterr()
    assert not [event for event in ran if "evil" in event]
    assert "Traceback" not in err
    return code or 0, out + err


CASES = [(command, what) for command in COMMANDS for what in ("layout", "unknown kind")]
CASES += [(command, what) for command in ("generate", "finetune") for what in EDITS if (command, what) not in CASES]


@pytest.mark.parametrize(("command", "what"), CASES)
def test_a_configuration_runs_no_code_of_its_folder(bad, capsys, command, what):
    edit(bad / "config.json", **EDITS[what], **({"vocab_size": 512} if "pretrain" in command else {}))
    code, said = run(COMMANDS[command], capsys)
    assert code in (0, 2), said
    if what in ("layout", "position", "layer") and command != "plan":  # which may count it without making it
        assert code == 2 and "run no code" in said


BROKEN = {"width": '"d_model": 100000000', "text for a number": '"d_model": "64"'}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_configuration_ends_in_a_sentence_that_names_it(bad, capsys, what):
    text = (bad / "config.json").read_text().rstrip().removesuffix("}")
    (bad / "config.json").write_text(f"{text}, {BROKEN[what]}}}")
    code, said = run(COMMANDS["generate"], capsys)
    assert code == 2
    error = next(line for line in said.splitlines() if line.startswith("error: "))
    assert "config.json" in error or "bad" in error, error


@pytest.mark.parametrize("command", ["generate", "finetune", "export"])
def test_a_tokenizer_runs_no_code_of_its_folder(bad, capsys, command):
    edit(bad / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]}, tokenizer_class="Evil")
    code, _ = run(COMMANDS[command], capsys)
    assert code in (0, 2)


def test_the_base_of_an_adapter_and_the_adapter_run_no_code(bad, capsys):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(open_saved("good").model, peft.LoraConfig(target_modules=["q"]))
    adapted.save_pretrained("adapter")
    config = bad.parent / "adapter" / "adapter_config.json"
    edit(config, base_model_name_or_path=str(bad.parent / "good"), megatron_config={}, megatron_core="evil")
    edit(config, megatron_config={"a": 1}, auto_mapping={"base_model_class": "Model", "parent_library": "evil"})
    run(("generate", "adapter", "w1"), capsys)
    edit(config, base_model_name_or_path=str(bad), megatron_config=None)
    edit(bad / "config.json", **EDITS["layout"])
    code, said = run(("generate", "adapter", "w1"), capsys)
    assert code == 2 and "run no code" in said


def test_the_library_runs_no_code_of_a_folder(bad):
    edit(bad / "config.json", **EDITS["layout"])
    for read in (
        lambda: FineTuner("bad"),
        lambda: open_saved("bad"),
        lambda: T5ForConditionalGeneration.from_pretrained("bad"),
    ):
        with pytest.raises(UserError, match=r"bad\.evil is not imported"):
            read()


def test_names_in_the_file_of_a_flag_and_of_imported_modules_are_taken(bad, monkeypatch):
    """--model_cfg names its classes; a saved model finds them once their module is imported."""
    (bad.parent / "mine.py").write_text(
        "from lm_experiments_tools.attention.positions import NoPosition\nclass Position(NoPosition):\n"
        "    def __init__(self, config, bidirectional):\n        super().__init__()\n"
    )
    edit(bad / "config.json", **OURS, position_embedding_type="mine:Position", architectures=None)
    (bad / "config.json").rename("mine.json")
    config = json.loads((bad.parent / "mine.json").read_text()) | {"model_type": "t5"}
    (bad.parent / "mine.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    model = build_model(T5ForConditionalGeneration, load_model_config("mine.json", T5Config), seed=0)
    model.save_pretrained("saved")
    assert type(open_saved("saved").model.encoder.block[0].layer[0].SelfAttention.position).__name__ == "Position"


def test_each_call_of_from_pretrained_says_that_remote_code_is_not_trusted():
    """Without the argument transformers asks, and `yes` runs the code of the folder."""
    concrete = {"BertTokenizerFast", "T5Tokenizer", "PeftConfig", "PeftModel", "GenerationConfig"}
    missing = []
    for file in [*(ROOT / "lm_experiments_tools").rglob("*.py"), *(ROOT / "megatron").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            given = {word.arg for word in node.keywords} & {"trust_remote_code", None}
            if node.func.attr in ("from_pretrained", "from_config") and not given and owner not in concrete:
                missing.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert missing == []
