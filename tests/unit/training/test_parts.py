"""Models, optimizers, loaders and batches that do not fit together are refused or named; odd ones that fit train."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.micro_batches import split_batch
from lm_experiments_tools.training.validation import generate
from tests.helpers.loops import make_loop
from tests.helpers.toys import VOCABULARY_SIZE, RaggedPairs, TinyLabeller, tiny_t5


def made(model=None, optimizer=torch.optim.SGD, loader="pairs", valid=None, transform=None, **args):
    loader = DataLoader(RaggedPairs(8), batch_size=2) if loader == "pairs" else loader
    args = {"batch_size": 2, "iters": 2, "lr": 0.1, "batch_transform_fn": transform, **args}
    return make_loop(model, optimizer, loader, valid, **args)


class SparseLabeller(TinyLabeller):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY_SIZE, 16, sparse=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"loader": DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)},
            "a batch is a list, but must be a",
        ),
        ({"loader": [{"input_ids": [[1, 2]] * 2, "labels": [[1]] * 2}]}, "tensors, but input_ids is a list"),
        ({"loader": None}, "made without train_dataloader, so it can only validate"),
        ({"optimizer": None}, "made without optimizer, so it can only validate"),
        ({"optimizer": torch.optim.SGD(TinyLabeller().parameters())}, "has none of the 3 trained parameters"),
        ({"model": SparseLabeller()}, "embedding has sparse gradients"),
        ({"save_best": True, "model_path": "run"}, "no validation data for save_best: give valid_dataloader"),
        ({"early_stopping_patience": 2}, "no validation data for early_stopping_patience"),
        ({"use_lr_drop": True}, "no validation data for use_lr_drop"),
    ],
)
def test_what_cannot_train_is_refused_in_a_sentence(options, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        made(**options).train()
    assert not list(tmp_path.iterdir())


def test_a_loss_of_several_numbers_is_refused():
    class Unreduced(TinyLabeller):
        def forward(self, input_ids, labels):
            return {"loss": super().forward(input_ids, labels)["loss"].repeat(2)}

    with pytest.raises(UserError, match=r"loss has the shape \[2\], but must be one number"):
        made(Unreduced()).train()


def test_a_layer_that_replaced_one_the_optimizer_holds_is_warned_of(caplog):
    model = TinyLabeller()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made(model, optimizer)
    assert not warnings_of(caplog)
    model.head = torch.nn.Linear(16, VOCABULARY_SIZE)
    made(model, optimizer)
    assert "2 of the 3 parameters of the optimizer are not the model's, and 2 of the model's 3 trained" in caplog.text


def test_a_compiled_model_is_refused_in_a_sentence():
    compiled = torch.compile(tiny_t5(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"compiled by torch\.compile, which renames its weights"):
        made(compiled, optimizer)


def test_tuples_train_where_a_transform_names_them():
    rows = RaggedPairs(8).batch(list(range(8)))
    loader = DataLoader(TensorDataset(rows["input_ids"], rows["labels"]), batch_size=2)
    losses = []
    for options in ({"loader": loader, "transform": lambda t: {"input_ids": t[0], "labels": t[1]}}, {}):
        torch.manual_seed(0)
        loop = made(**options)
        loop.train()
        losses.append(loop.state.metrics["train"]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("rows", [1, 5])
def test_batches_that_are_not_of_a_step_are_warned_of(rows, caplog):
    made(loader=DataLoader(RaggedPairs(15), batch_size=rows), gradient_accumulation_steps=2).train()
    assert f"gives {rows} rows a batch" in caplog.text
    caplog.clear()
    made(loader=DataLoader(RaggedPairs(16), batch_size=4), gradient_accumulation_steps=2).train()
    assert "rows a batch" not in caplog.text


def warnings_of(caplog):
    """Messages of level WARNING or above; an earlier test may have set the level to INFO."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Weighted(torch.nn.Module):
    """Several labels a row, whose positives may weigh more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, features, labels=None, **others):
        weight = others.get("pos_weight")
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.head(features), labels, pos_weight=weight)
        return {"loss": loss}


class TakesWeight(Weighted):
    def forward(self, features, labels=None, pos_weight=None):
        return super().forward(features, labels, pos_weight=pos_weight)


def test_an_entry_that_forward_does_not_take_is_named_once(caplog):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(6, 4, generator=generator)
    labels = torch.randint(2, (6, 3), generator=generator).float()
    rows = [{"features": f, "labels": y, "pos_weight": torch.full((3,), 8.0)} for f, y in zip(features, labels)]  # noqa: B905

    def loss(model):
        loop = made(model, None, None)
        for _ in range(2):
            values = loop.validate(DataLoader(rows, batch_size=2))
        return values["loss"]

    weighted, plain = (
        torch.nn.functional.binary_cross_entropy_with_logits(
            Weighted().head(features), labels, pos_weight=weight
        ).item()
        for weight in (torch.tensor(8.0), None)
    )
    assert loss(TakesWeight()) == pytest.approx(weighted, rel=1e-6)
    assert not warnings_of(caplog)
    assert loss(Weighted()) == pytest.approx(plain, rel=1e-6)
    (warning,) = warnings_of(caplog)
    assert "Weighted.forward does not take, and that only metrics functions see: pos_weight" in warning


def columns_first(rows):
    """Collate by pad_sequence(...).T, whose rows are not contiguous."""
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: pad_sequence([row[name] for row in rows], padding_value=value).T for name, value in padding.items()}


def test_labels_that_are_not_contiguous_train_and_validate():
    """The last batches of validation have no label at all, so that one is set for the pass to give a number."""
    rows = [dict(row) for row in RaggedPairs(8).rows]
    for row in rows[4:]:
        row["labels"] = torch.full((8,), -100)
    assert not columns_first(rows)["labels"].is_contiguous()
    metrics = []
    for collate in (None, columns_first):
        torch.manual_seed(0)
        loop = made(loader=DataLoader(rows, 2, collate_fn=collate), valid=DataLoader(rows, 2, collate_fn=collate))
        loop.train()
        metrics.append({split: values["loss"] for split, values in loop.state.metrics.items()})
    assert metrics[0] == metrics[1] and set(metrics[0]) == {"train", "valid"}


def test_a_prompt_beside_the_input_is_what_is_generated_after():
    import transformers

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 40, "initializer_range": 0.5}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, pad_token_id=0, eos_token_id=0)).eval()
    prompts = torch.tensor([[0, 5, 6], [7, 8, 9]])
    answered = torch.randint(1, 40, (2, 8))
    batch = {
        "input_ids": answered, "attention_mask": torch.ones_like(answered), "labels": answered,
        "input_ids_generate": prompts, "attention_mask_generate": prompts != 0,
    }  # fmt: skip
    (part,) = split_batch(batch, 2, {"input_ids", "attention_mask", "labels"}, torch.device("cpu")).micro_batches
    expected = model.generate(input_ids=prompts, attention_mask=prompts != 0, max_length=9)
    assert torch.equal(generate(model, part, {}), expected)
    assert expected.shape[1] > 3


def test_a_run_whose_first_steps_have_nothing_to_predict_ends():
    def rows(number):
        return [{"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.full((2, 3), -100)}] * number

    with pytest.raises(UserError, match=r"first 2 steps have nothing to predict: all their labels are ignored"):
        made(loader=rows(4)).train()
    with pytest.raises(UserError, match="first 10 steps have nothing to predict"):
        made(loader=rows(40), iters=30).train()
    loop = made(
        loader=[
            *rows(9),
            {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)},
            *rows(20),
        ],
        iters=30,
    )
    loop.train()
    assert loop.state.step == 30
