"""Bits per byte in logs; the oracle is a sum over transformers' logits, divided by the bytes that Python counts."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.training.losses import LANGUAGE_MODEL_LOSS, MODEL_LOSS, bert_loss, with_bytes
from tests.helpers.loops import make_loop
from tests.helpers.thread_workers import Workers
from tests.helpers.toys import tiny_t5

BYTES = Tokenizer.load("bytes").token_bytes
TEXTS = ["naïve cafés, 你好", "short", "a third text — of another length", "🎉"]


def gpt2(zero=False):
    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=8, n_layer=1, n_head=1, n_positions=64, **off))
    if zero:
        torch.nn.init.zeros_(model.transformer.wte.weight)
    return model.eval()


def rows(texts=TEXTS):
    """Texts between two EOS tokens, of which a causal model predicts the second."""
    vocabulary = Tokenizer.load("bytes")
    encoded = [[1, *vocabulary.encode(text), 1] for text in texts]
    ids = torch.zeros(len(texts), max(map(len, encoded)), dtype=torch.long)
    for row, values in zip(ids, encoded, strict=True):
        row[: len(values)] = torch.tensor(values)
    mask = torch.tensor([[i < len(values) for i in range(ids.shape[1])] for values in encoded])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def loop(model, batch, loss, batch_size=4, accumulate=1, backend=None):
    args = {"batch_size": batch_size, "gradient_accumulation_steps": accumulate, "pad_to_multiple_of": 4}
    return make_loop(model, torch.optim.SGD, [batch], backend=backend, lr=0.0, iters=1, loss=loss, **args)


def num_bytes(texts=TEXTS):
    return sum(len(text.encode()) for text in texts)


def test_a_uniform_model_needs_the_bits_of_its_vocabulary_for_each_token():
    model = gpt2(zero=True)
    values = loop(model, rows(), with_bytes(LANGUAGE_MODEL_LOSS, BYTES, model)).validate([rows()])
    num_tokens = num_bytes() + len(TEXTS)  # EOS is predicted, and has no bytes
    assert values["bits_per_byte"] == pytest.approx(num_tokens * math.log2(384) / num_bytes(), rel=1e-6)
    assert "bytes_per_token" not in values


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 1), (1, 4), (3, 2)])
def test_training_and_validation_measure_the_nats_of_the_text_for_any_split(batch_size, accumulate):
    model, batch = gpt2(), rows()
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].double()
    nats = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum").item()
    trainer = loop(model, batch, with_bytes(LANGUAGE_MODEL_LOSS, BYTES, model), batch_size, accumulate)
    trainer.train()
    expected = pytest.approx(nats / math.log(2) / num_bytes(), rel=1e-6)
    assert trainer.state.metrics["train"]["bits_per_byte"] == expected
    assert trainer.validate([batch])["bits_per_byte"] == expected


class Part(list):
    """Batches of one of two workers."""

    world_size = 2


def test_workers_with_different_numbers_of_tokens_measure_all_bytes():
    batch, model = rows(), gpt2()
    part_of = {0: slice(0, 1), 1: slice(1, 4)}

    def work(backend):
        own, mine = copy.deepcopy(model), {name: value[part_of[backend.rank]] for name, value in batch.items()}
        trainer = loop(own, mine, with_bytes(LANGUAGE_MODEL_LOSS, BYTES, own), backend=backend)
        return trainer.validate(Part([mine]))["bits_per_byte"]

    alone = loop(model, batch, with_bytes(LANGUAGE_MODEL_LOSS, BYTES, model)).validate([batch])["bits_per_byte"]
    assert Workers(2).run(work) == pytest.approx([alone, alone], rel=1e-6)


def test_span_corruption_divides_all_nats_by_the_bytes_of_the_masked_text():
    model = tiny_t5()
    counts = np.arange(model.config.vocab_size) % 5
    labels = torch.tensor([[7, 8, 11, 1], [9, 1, -100, -100]])
    batch = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), "labels": labels}
    values = loop(model, batch, with_bytes(MODEL_LOSS, counts, model)).validate([batch])
    total = counts[[7, 8, 11, 1, 9, 1]].sum()
    assert values["bits_per_byte"] == pytest.approx(6 * values["loss"] / math.log(2) / total, rel=1e-6)


def test_bert_leaves_sentence_pairs_out():
    torch.manual_seed(0)
    settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForPreTraining(BertConfig(vocab_size=384, **settings))
    batch = rows() | {"next_sentence_label": torch.tensor([0, 1, 1, 0])}
    values = loop(model, batch, with_bytes(bert_loss(use_nsp=True), BYTES, model)).validate([batch])
    num_tokens = num_bytes() + 2 * len(TEXTS)
    expected = num_tokens * values["loss_mlm"] / math.log(2) / num_bytes()
    assert values["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
