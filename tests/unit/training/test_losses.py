"""A loss of two terms has one gradient however its rows are split; the oracle is transformers' loss of all rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.losses import bert_loss
from tests.helpers.loops import make_loop
from tests.helpers.toys import gradients_at_steps

MASKED = (1, 9, 0, 3, 12, 2, 0, 5)  # tokens of each row: a micro-batch of the third row alone has none
CONFIG = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def rows(use_nsp=True):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (len(MASKED), 14), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, number in enumerate(MASKED):
        labels[row, 1 : 1 + number] = ids[row, 1 : 1 + number]
        ids[row, 1 : 1 + number] = 4
    pairs = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0])
    types = (torch.arange(14) > 6).long().expand_as(ids).contiguous()
    batch = {"input_ids": ids, "token_type_ids": types, "labels": labels}
    return {**batch, "next_sentence_label": pairs} if use_nsp else batch


class TermsApart(BertForPreTraining):
    """Returns its two losses beside their sum; `names` are those of the losses that it gives."""

    names = ("mlm_loss", "nsp_loss")
    factor = 1.0

    def forward(self, input_ids, token_type_ids, labels, next_sentence_label):
        found = super().forward(input_ids=input_ids, token_type_ids=token_type_ids)
        mlm = cross_entropy(found.prediction_logits.flatten(0, 1), labels.flatten())
        nsp = cross_entropy(found.seq_relationship_logits, next_sentence_label)
        losses = dict(zip(("mlm_loss", "nsp_loss"), (mlm, nsp), strict=True))
        return {"loss": mlm + self.factor * nsp, **{name: losses[name] for name in self.names}}


class MaskedApart(TermsApart):
    names = ("mlm_loss",)


class OneLoss(TermsApart):
    names = ()


class Scaled(TermsApart):
    factor = 0.5


def build(cls):
    torch.manual_seed(0)
    return cls(CONFIG)


def one_step(cls, use_nsp, batch_size):
    """Gradients and logged losses of a step over all rows in micro-batches of `batch_size`."""
    model = build(cls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    captured = gradients_at_steps(model, optimizer)
    args = {"batch_size": batch_size, "gradient_accumulation_steps": -(-8 // batch_size), "iters": 1}
    loop = make_loop(model, optimizer, [rows(use_nsp)], loss=bert_loss(use_nsp), **args)
    loop.train()
    validated = loop.validate([rows(use_nsp)])
    return captured, loop.state.metrics["train"], validated


def expected_of(cls, use_nsp):
    """transformers' loss of all rows at once, its gradients, and the two parts of it."""
    model, batch = build(cls if cls is BertForMaskedLM else BertForPreTraining), rows()
    pairs = batch.pop("next_sentence_label")
    if cls is BertForMaskedLM:
        loss = mlm = model(**batch).loss
    else:
        found = model(**batch, next_sentence_label=pairs)
        mlm = cross_entropy(found.prediction_logits.flatten(0, 1), batch["labels"].flatten())
        loss = found.loss if use_nsp else mlm
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    values = {"loss": loss.item(), "loss_mlm": mlm.item(), **({"loss_nsp": (loss - mlm).item()} if use_nsp else {})}
    return gradients, values


@pytest.mark.parametrize("batch_size", [8, 3, 1])
@pytest.mark.parametrize(
    "cls, use_nsp",
    [
        (BertForPreTraining, True),
        (BertForPreTraining, False),
        (BertForMaskedLM, False),
        (TermsApart, True),
        (MaskedApart, True),
    ],
)
def test_any_split_has_the_gradient_of_transformers_loss_of_all_rows(cls, use_nsp, batch_size):
    gradients, values = expected_of(cls, use_nsp)
    found, trained, validated = one_step(cls, use_nsp, batch_size)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    assert trained == pytest.approx(values, rel=1e-5) and validated == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(
    "cls, message",
    [
        (OneLoss, "one loss for its two tasks.*return loss_mlm and loss_nsp.*--use_nsp 0"),
        (Scaled, "its loss_mlm and loss_nsp add up to.*would be left out"),
    ],
)
def test_a_loss_that_cannot_be_taken_apart_is_refused(cls, message):
    with pytest.raises(UserError, match=message):
        one_step(cls, True, 4)
