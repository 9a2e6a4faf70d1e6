"""Scoring tokens with a label alone gives the loss and gradients of scoring all."""

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter

import modeling_bert
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.labels import LABEL_POSITIONS
from lm_experiments_tools.models.from_args import spread_labels
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.recipes.common import labels_alone
from lm_experiments_tools.training.micro_batches import MicroBatch

SIZES = dict(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attention_dropout=0.0)
ROWS, LENGTH, MOST = 3, 12, 8
ARGS = BertPretrainingArgs(lr=1e-3, model_cfg="bert_base_uncased", data_path=("data",), vocab_file="vocab.txt")


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
    (transformers.ModernBertForMaskedLM, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
]


@pytest.mark.parametrize("model_cls, changed", CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_loss_and_gradients_are_those_of_all_positions(model_cls, changed):
    model, part = built(model_cls, **changed).train(), micro_batch()
    if "next_sentence_label" in forward_names(model):  # without which this class gives no loss
        part.inputs["next_sentence_label"] = torch.tensor([0, 1, 0])
    found = {}
    for way in ("all", "labels"):
        if way == "labels":
            most = labels_alone(ARGS, LocalBackend(), model)
            assert (most is None) == isinstance(model, transformers.ModernBertForMaskedLM)
            part = part if most is None else part.with_valid_labels_only(MOST)
        outputs = model(**part.inputs)
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        model.zero_grad()
        outputs["loss"].backward()
        found[way] = outputs["loss"].detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert logits.shape == ((1, MOST, 97) if most else (6, 97))
    (loss, gradients), (picked_loss, picked) = found.values()
    torch.testing.assert_close(picked_loss, loss, rtol=1e-6, atol=0)
    assert picked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(picked[name], gradient, rtol=1e-4, atol=2e-7, msg=name)
    whole = model(input_ids=part.inputs["input_ids"])
    assert whole.get("prediction_logits", whole.get("logits")).shape == (ROWS, LENGTH, 97)


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
    for numbers in ((2, 0, 4), (1, 1, 1), (0, 0, 0), (3, 2, 3)):
        outputs = model(**micro_batch(numbers).with_valid_labels_only(MOST).inputs)
        assert outputs.prediction_logits.shape == (1, MOST, 97)
    assert counter.frame_count == 1
