"""The complete programs examples/library_*.py train to their end, under the launchers that they name."""

import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from tests.distributed.launch import start
from tests.helpers import ROOT

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", ["horovod", pytest.param("alone", marks=pytest.mark.slow)])
def test_own_model_on_horovod(kind, tmp_path):
    output = start(kind, ROOT / "examples" / "library_trainer.py", tmp_path / "run")
    accuracy, step = re.search(r"test accuracy (\S+) of the best step, (\d+)", output).groups()
    assert float(accuracy) > 0.8 and int(step) % 20 == 0  # the majority class: 0.25
    workers = 2 if kind == "horovod" else 1
    assert f"backend horovod, {workers} worker(s)" in output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero2", "ddp"])
def test_t5_by_accelerate(kind, tmp_path):
    output = start(kind, ROOT / "examples" / "library_accelerate.py", tmp_path / "run")
    described, loss = re.search(r"(.*): test loss (\S+), accuracy", output).groups()
    assert {"zero2": "DeepSpeedEngine", "ddp": "DistributedDataParallel"}[kind] in described
    assert float(loss) < 3.4  # log 30 for a model that knows nothing


@pytest.mark.slow
def test_finetuner_gives_probabilities(tmp_path):
    words = "a fine lovely great charming dull awful boring weak film book play song meal trip".split()
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(tmp_path / "bert")
    output = start("alone", ROOT / "examples" / "library_finetuner.py", tmp_path / "bert", tmp_path / "run")
    assert float(re.search(r"test accuracy (\S+)", output)[1]) > 0.9
    lines = re.findall(r"negative (\S+), positive (\S+)", output)
    assert len(lines) == 2 and all(abs(float(a) + float(b) - 1) < 2e-3 for a, b in lines)
    assert float(lines[0][1]) > 0.5 > float(lines[1][1])
