"""Texts that end by [SEP], of tokenizers without an end-of-sequence token, as those of Chinese GPT-2s."""

import pytest
import torch
from transformers import BertTokenizerFast, GPT2Config, GPT2LMHeadModel, T5ForConditionalGeneration

from lm_experiments_tools import FineTuner
from lm_experiments_tools.data.examples.example_encoder import ExampleEncoder
from tests.helpers.finetuning_toys import word_tokenizer, write_json
from tests.helpers.pretrained_toys import SPREAD, t5_config

CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def bert_tokenizer(tmp_path_factory):
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60))]) + "\n")
    return BertTokenizerFast(str(file))


def test_nothing_stands_between_a_decoders_source_and_target(bert_tokenizer):
    words = bert_tokenizer("w1 w2 w3 w4", add_special_tokens=False)["input_ids"]
    encoder = ExampleEncoder(bert_tokenizer, 4, 8, decoder=True)
    cut = encoder.encode_sources(["w1 w2 w3 w4"])
    assert cut["input_ids"] == [[CLS, *words[:3]]] and cut["token_type_ids"] == [[0] * 4]
    assert encoder.num_tokens("w1 w2") == 3 and encoder.sources.lost == 1
    assert encoder.encode_targets(["w1 w2"]) == [[*words[:2], SEP]]
    whole = ExampleEncoder(bert_tokenizer, 8, 8).encode_sources(["w1 w2"])["input_ids"]
    assert whole == [bert_tokenizer("w1 w2")["input_ids"]]
    for end in ("template", "token"):
        assert ExampleEncoder(word_tokenizer(end), 8, 8, decoder=True).encode_sources(["w0 w1"])["input_ids"] == [
            [3, 4]
        ]


@pytest.mark.parametrize("kind", ["decoder", pytest.param("encoder-decoder", marks=pytest.mark.slow)])
def test_generation_ends_where_targets_do(kind, bert_tokenizer, tmp_path):
    torch.manual_seed(0)
    if kind == "decoder":
        sizes = dict(n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=90, eos_token_id=91)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=96, **sizes, initializer_range=SPREAD))
    else:
        model = T5ForConditionalGeneration(t5_config(num_layers=1))
    model.save_pretrained(tmp_path)
    bert_tokenizer.save_pretrained(tmp_path)
    data = write_json(tmp_path / "one.jsonl", [{"source": "w5", "target": "w6 w7"}, {"source": "w8", "target": "w9"}])
    tuner = FineTuner(
        tmp_path,
        model_type=kind,
        data_path=data,
        batch_size=2,
        iters=60,
        lr=1e-2,
        input_seq_len=24,
        target_seq_len=12,
        metrics="none",
    )
    tuner.train()
    assert tuner.predict(["w5", "w8"]) == ["w6 w7", "w9"]
    assert tuner.model.generation_config.eos_token_id == SEP
