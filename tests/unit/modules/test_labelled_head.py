"""Scoring tokens with a label alone gives the loss and gradients of scoring all, for any head that works by tokens."""

import re

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounter

import modeling_bert
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.modules.labelled_head import LABEL_POSITIONS, pick_labelled, spread_labels
from lm_experiments_tools.training.micro_batches import MicroBatch

SIZES = dict(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attention_dropout=0.0)
ROWS, LENGTH, MOST = 3, 12, 8


class ConvolutionHead(transformers.BertForMaskedLM):
    """A head that looks at the tokens beside a token."""

    def __init__(self, config):
        super().__init__(config)
        self.cls = nn.Sequential(Beside(config.hidden_size), nn.Linear(config.hidden_size, config.vocab_size))


class Beside(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class NormOverTokens(transformers.BertForMaskedLM):
    """In evaluation a norm over the batch works on each token by itself."""

    def __init__(self, config):
        super().__init__(config)
        norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(config.hidden_size), nn.Unflatten(0, (-1, LENGTH)))
        self.cls = nn.Sequential(norm, nn.Linear(config.hidden_size, config.vocab_size))


class CountedLabels(transformers.BertForMaskedLM):
    def forward(self, input_ids, labels):
        assert labels.shape == input_ids.shape
        return super().forward(input_ids=input_ids, labels=labels)


def built(model_cls, **changed):
    torch.manual_seed(0)
    known = model_cls.config_class()
    options = {k: v for k, v in {**SIZES, **NO_DROPOUT, **changed}.items() if hasattr(known, k)}
    return model_cls(model_cls.config_class(**options))


def micro_batch(numbers=(2, 0, 4)):
    """Rows with so many labels each."""
    torch.manual_seed(1)
    ids, labels = torch.randint(60, 97, (ROWS, LENGTH)), torch.full((ROWS, LENGTH), -100)
    for row, number in enumerate(numbers):
        labels[row, 3 : 3 + number] = ids[row, :number]
    inputs = {"input_ids": ids, "labels": labels}
    return MicroBatch(inputs, dict(inputs), {"labels": sum(numbers)}).with_a_label()


CLASSES = [
    (modeling_bert.BertForPreTraining, {}),
    (modeling_bert.BertForMaskedLM, {"position_embedding_type": "rotary"}),
    (transformers.BertForPreTraining, {}),
    (transformers.RobertaForMaskedLM, {"pad_token_id": 0}),
    (transformers.ModernBertForMaskedLM, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    (transformers.DebertaV2ForMaskedLM, {}),
    (transformers.AlbertForMaskedLM, {}),
    (
        transformers.DistilBertForMaskedLM,
        dict(dim=16, hidden_dim=32, n_layers=1, n_heads=2, dropout=0.0),
    ),
]


@pytest.mark.parametrize("model_cls, changed", CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_loss_and_gradients_are_those_of_all_positions(model_cls, changed):
    model, part = built(model_cls, **changed).train(), micro_batch()
    if "next_sentence_label" in forward_names(model):  # without which this class gives no loss
        part.inputs["next_sentence_label"] = torch.tensor([0, 1, 0])
    found = {}
    for way in ("all", "labels"):
        if way == "labels":
            assert pick_labelled(model, LENGTH) is None and model.training
            part = part.with_valid_labels_only(MOST)
        outputs = model(**part.inputs)
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        model.zero_grad()
        outputs["loss"].backward()
        found[way] = outputs["loss"].detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert logits.shape == (1, MOST, 97)
    (loss, gradients), (picked_loss, picked) = found.values()
    torch.testing.assert_close(picked_loss, loss, rtol=1e-6, atol=0)
    assert picked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(picked[name], gradient, rtol=1e-4, atol=2e-7, msg=name)
    whole = model(input_ids=part.inputs["input_ids"])
    assert whole.get("prediction_logits", whole.get("logits")).shape == (ROWS, LENGTH, 97)


@pytest.mark.parametrize(
    "model_cls, reason",
    [
        (ConvolutionHead, "depend on other tokens"),
        (NormOverTokens, "norm over tokens"),
        (CountedLabels, r"fails with labels of a few tokens \(AssertionError\)"),
        (transformers.T5ForConditionalGeneration, "fails with labels of a few tokens|no module of its head"),
    ],
)
def test_a_head_that_needs_all_positions_keeps_them(model_cls, reason):
    model = built(model_cls, num_layers=1, d_model=16, num_heads=2, decoder_start_token_id=0)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    assert re.search(reason, pick_labelled(model, LENGTH))
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_a_model_that_picks_labels_by_itself_is_left_alone():
    model = built(
        transformers.ModernBertForMaskedLM, sparse_prediction=True, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    assert "selects them itself" in pick_labelled(model, LENGTH)


def test_more_labels_than_there_is_room_for_are_all_kept():
    part = micro_batch((6, 5, 0))
    assert part.with_valid_labels_only(10) is part  # 11 labels
    assert part.with_valid_labels_only(ROWS * LENGTH) is part
    picked = part.with_valid_labels_only(11)
    labels = part.inputs["labels"].flatten()
    assert picked.inputs["labels"].tolist() == [labels[labels != -100].tolist()]
    assert picked.batch["labels"] is picked.inputs["labels"]
    none = micro_batch((0, 0, 0)).with_valid_labels_only(4)
    assert (none.inputs["labels"] != -100).sum() == 1 and none.inputs[LABEL_POSITIONS].shape == (4,)
    assert 614 < spread_labels(8 * 512, 0.15) < 614 + 6 * 24


def test_one_compiled_graph_serves_any_number_of_labels():
    model, counter = built(modeling_bert.BertForPreTraining), CompileCounter()
    model.compile(backend=counter, dynamic=False)
    assert pick_labelled(model, LENGTH) is None
    for numbers in ((2, 0, 4), (1, 1, 1), (0, 0, 0), (3, 2, 3)):
        outputs = model(**micro_batch(numbers).with_valid_labels_only(MOST).inputs)
        assert outputs.prediction_logits.shape == (1, MOST, 97)
    assert counter.frame_count == 1
