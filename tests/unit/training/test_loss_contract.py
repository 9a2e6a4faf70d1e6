"""Any split of a batch has the gradient of the whole batch in a bare fp64 loop, whatever divides the model's loss."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.losses import Loss, targets_of
from tests.helpers.loops import make_loop
from tests.helpers.toys import gradients_at_steps

VOCABULARY, ROWS, LENGTH, CLASSES = 30, 8, 10, 3
SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]
WEIGHTS = torch.tensor([1.0, 10.0, 0.5])


class Net(nn.Module):
    """Scores of a row or, with `by_token`, of each token."""

    by_token = False

    def __init__(self, classes=CLASSES):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, classes)

    def logits(self, input_ids):
        x = self.head(self.embedding(input_ids).tanh())
        return x if self.by_token else x.mean(1)

    def weighted(self, input_ids, labels, reduction):
        return cross_entropy(self.logits(input_ids), labels, weight=WEIGHTS.to(self.head.weight), reduction=reduction)


class TakesCount(Net):
    """As with transformers' Trainer: a weighted sum over the number of labels."""

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        total = self.weighted(input_ids, labels, "sum")
        return {"loss": total / (len(labels) if num_items_in_batch is None else num_items_in_batch)}

    def whole(self, batch):
        return self.weighted(batch["input_ids"], batch["labels"], "sum") / ROWS


class ByToken(Net):
    """Labels of tokens, some of them without any; two rows have none at all."""

    by_token = True

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        total = cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)}

    def whole(self, batch):
        return cross_entropy(self.logits(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class OverRows(ByToken):
    """A mean over rows of each row's mean."""

    loss_mean_over = "rows"

    def forward(self, input_ids, labels=None):
        return {"loss": self.whole({"input_ids": input_ids, "labels": labels})}

    def whole(self, batch):
        logits, labels = self.logits(batch["input_ids"]).transpose(1, 2), batch["labels"]
        return (cross_entropy(logits, labels, reduction="none").sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


class Causal(Net):
    """Token j - 1 predicts label j; some tokens are left out by a mask."""

    by_token, shifts_labels, loss_mean_over = True, True, "labels"

    def forward(self, input_ids, labels=None, labels_mask=None):
        return {"loss": self.whole({"input_ids": input_ids, "labels": labels, "labels_mask": labels_mask})}

    def whole(self, batch):
        labels = batch["labels"].masked_fill(batch["labels_mask"] == 0, -100)[:, 1:]
        return cross_entropy(self.logits(batch["input_ids"])[:, :-1].flatten(0, 1), labels.flatten())


def rows_of(kind):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(ROWS):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        tags = torch.randint(CLASSES, (LENGTH,), generator=generator)
        valid = torch.arange(LENGTH) < (number * 3) % 8
        label = {"row": tags[0], "tags": tags.masked_fill(~valid, -100)}
        if kind == "mask":
            rows.append(
                {"input_ids": ids, "labels": tags, "labels_mask": torch.rand(LENGTH, generator=generator) < 0.4}
            )
        else:
            rows.append({"input_ids": ids, "labels": label[kind]})
    return rows


CASES = [
    (TakesCount, "row"),
    (ByToken, "tags"),
    (OverRows, "tags"),
    (Causal, "mask"),
]


def in_split(model, rows, batch_size, steps, **options):
    """Gradient of one update, and the loss of training and of validation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = gradients_at_steps(model, optimizer)
    args = {"batch_size": batch_size, "gradient_accumulation_steps": steps, "iters": 1, **options}
    loop = make_loop(model, optimizer, DataLoader(rows, len(rows)), DataLoader(rows, 3), **args)
    loop.train()
    return seen, {split: values["loss"] for split, values in loop.state.metrics.items()}


def assert_is_whole(seen, losses, model, loss):
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(seen[name].double(), parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert losses == pytest.approx(dict.fromkeys(("train", "valid"), loss.item()), rel=1e-5)


@pytest.mark.parametrize("batch_size, steps", SPLITS)
@pytest.mark.parametrize("cls, kind", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_any_split_has_the_gradient_of_the_whole_batch(cls, kind, batch_size, steps, caplog):
    rows, model = rows_of(kind), cls()
    exact = copy.deepcopy(model).double()
    seen, losses = in_split(model, rows, batch_size, steps)
    assert_is_whole(seen, losses, exact, exact.whole(default_collate(rows)))
    assert "declares no divisor" not in caplog.text


BERT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTIL = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "dropout": 0.0}


def answering(package, name):
    torch.manual_seed(0)
    cls = getattr(pytest.importorskip(package), name)
    known = DISTIL if "Distil" in name else BERT
    return cls(cls.config_class(**known, attention_dropout=0.0, qa_dropout=0.0))


@pytest.mark.parametrize("batch_size, steps", [(2, 4), (1, 8)])
@pytest.mark.parametrize(
    "package, name",
    [
        ("transformers", "BertForQuestionAnswering"),
        ("transformers", "DistilBertForQuestionAnswering"),
        ("modeling_bert", "BertForQuestionAnswering"),
    ],
)
def test_answers_beyond_the_text_do_not_count(package, name, batch_size, steps):
    """Starts and ends have a mean each, as many answers end where the text is cut (SQuAD's long contexts)."""
    model, rows = answering(package, name), rows_of("row")
    for number, row in enumerate(rows):
        del row["labels"]
        row["start_positions"] = torch.tensor([2, 5, LENGTH, 0, 30, 9, LENGTH, 1][number])
        row["end_positions"] = torch.tensor([LENGTH, 30, LENGTH, 0, 30, 9, LENGTH, 3][number])
    exact = copy.deepcopy(model).double()
    seen, losses = in_split(model, rows, batch_size, steps)
    assert_is_whole(seen, losses, exact, exact(**default_collate(rows))["loss"])


class InBatch(Net):
    """Each row is to be told from the other rows of its batch."""

    loss_mean_over = "batch"

    def forward(self, input_ids, labels=None):
        x = self.logits(input_ids)
        scores = x @ x.roll(1, -1).T
        return {"loss": cross_entropy(scores, torch.arange(len(x)))}


def test_a_loss_over_whole_batches_is_refused_in_parts_unless_asked_for():
    rows = rows_of("row")
    with pytest.raises(UserError, match=r"compares the rows of a batch.*--split_in_batch_loss"):
        in_split(InBatch(), rows, 1, 8)
    model, exact = InBatch(), InBatch().double()
    batch = default_collate(rows)
    seen, _ = in_split(model, rows, 8, 1)
    exact(**batch)["loss"].backward()
    torch.testing.assert_close(seen["head.weight"].double(), exact.head.weight.grad, rtol=1e-4, atol=1e-7)
    seen, _ = in_split(InBatch(), rows, 4, 2, split_in_batch_loss=True)
    exact.zero_grad()
    ids = batch["input_ids"]
    ((exact(ids[:4])["loss"] + exact(ids[4:])["loss"]) / 2).backward()
    torch.testing.assert_close(seen["head.weight"].double(), exact.head.weight.grad, rtol=1e-4, atol=1e-7)


def test_a_contrastive_class_of_transformers_is_known():
    transformers = pytest.importorskip("transformers")
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.CLIPConfig(text_config=tower, vision_config={**tower, "image_size": 8, "patch_size": 8})
    assert targets_of(transformers.CLIPModel(config)).mean_over == "batch"


class Undeclared(Net):
    def forward(self, input_ids, labels=None):
        return {"loss": self.weighted(input_ids, labels, "mean")}


@pytest.mark.parametrize("batch_size, steps, level", [(8, 1, logging.INFO), (4, 2, logging.WARNING)])
def test_what_is_assumed_of_a_class_that_declares_nothing_is_logged_first(batch_size, steps, level, caplog):
    caplog.set_level(logging.INFO)
    in_split(Undeclared(), rows_of("row"), batch_size, steps)
    first = next(record for record in caplog.records if record.name.startswith("lm_experiments_tools"))
    assert first.levelno == level and "Undeclared declares no divisor of its loss" in first.getMessage()
    for kind in ("num_items_in_batch", "loss_mean_over", "shifts_labels"):
        assert kind in first.getMessage()


def test_a_loss_object_declares_its_divisors_whatever_the_class_says(caplog):
    """`Loss.labels` says that a term is a mean over labels; here the class says rows of its own loss."""
    caplog.set_level(logging.INFO)

    def means(inputs, outputs):
        return {"words": cross_entropy(outputs["logits"].flatten(0, 1), inputs["labels"].flatten())}

    class Other(ByToken):
        loss_mean_over = "rows"

        def forward(self, input_ids, labels=None):
            return {"logits": self.logits(input_ids)}

    class Undeclared(Other):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids, labels)

    for cls in (Other, Undeclared):
        rows, model = rows_of("tags"), cls()
        exact, optimizer = copy.deepcopy(model).double(), torch.optim.SGD(model.parameters(), lr=0.0)
        seen = gradients_at_steps(model, optimizer)
        loader, args = DataLoader(rows, ROWS), {"batch_size": 2, "gradient_accumulation_steps": 4, "iters": 1}
        make_loop(model, optimizer, loader, loss=Loss({"words": "labels"}, means), **args).train()
        exact.whole(default_collate(rows)).backward()
        for name, parameter in exact.named_parameters():
            torch.testing.assert_close(seen[name].double(), parameter.grad, rtol=1e-4, atol=1e-7)
    assert "declares no divisor" not in caplog.text


def test_a_declaration_is_of_the_forward_that_it_was_made_for():
    class Other(OverRows):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids, labels)

    assert targets_of(OverRows()).is_declared and targets_of(OverRows()).mean_over == "rows"
    assert not targets_of(Other()).is_declared

    class Wrong(Net):
        loss_mean_over = "token"

    with pytest.raises(UserError, match=r"Wrong\.loss_mean_over is 'token'"):
        targets_of(Wrong())
