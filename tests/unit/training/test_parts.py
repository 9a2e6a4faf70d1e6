"""Models, optimizers, loaders and batches that do not fit together are refused or named; odd ones that fit train."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.batches import BatchStream
from lm_experiments_tools.training.checks import check_training_data
from lm_experiments_tools.training.micro_batches import split_batch
from lm_experiments_tools.training.validation import generate
from tests.helpers.loops import make_loop
from tests.helpers.thread_workers import Workers
from tests.helpers.toys import VOCABULARY_SIZE, RaggedPairs, TinyLabeller


def made(model=None, optimizer=torch.optim.SGD, loader="pairs", valid=None, transform=None, **args):
    loader = DataLoader(RaggedPairs(8), batch_size=2) if loader == "pairs" else loader
    args = {"batch_size": 2, "iters": 2, "lr": 0.1, "batch_transform_fn": transform, **args}
    return make_loop(model, optimizer, loader, valid, **args)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loader": DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)}, "a batch is a list, but must be a"),
        ({"loader": [{"input_ids": [[1, 2]] * 2, "labels": [[1]] * 2}]}, "no entry of the batch .* is a tensor"),
        ({"loader": None}, "made without train_dataloader, so it can only validate"),
        ({"optimizer": torch.optim.SGD(TinyLabeller().parameters())}, "has none of the 3 trained parameters"),
        ({"save_best": True, "model_path": "run"}, "no validation data for save_best: give valid_dataloader"),
    ],
)
def test_what_cannot_train_is_refused_in_a_sentence(options, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        made(**options).train()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rows", [1, 5])
def test_batches_that_are_not_of_a_step_are_warned_of(rows, caplog):
    made(loader=DataLoader(RaggedPairs(15), batch_size=rows), gradient_accumulation_steps=2).train()
    assert f"gives {rows} rows a batch" in caplog.text
    caplog.clear()
    made(loader=DataLoader(RaggedPairs(16), batch_size=4), gradient_accumulation_steps=2).train()
    assert "rows a batch" not in caplog.text


@pytest.mark.parametrize(("is_split", "warnings"), [(False, 1), (True, 0)])
def test_workers_that_read_the_same_rows_are_warned_of(is_split, warnings, caplog):
    data, optimizer = RaggedPairs(8), torch.optim.SGD(TinyLabeller().parameters())

    def work(backend):
        sampler = DistributedSampler(data, 2, backend.rank) if is_split else None
        check_training_data(BatchStream(DataLoader(data, 4, sampler=sampler)), optimizer, backend)

    Workers(2).run(work)
    assert caplog.text.count("each of the 2 workers reads its whole training DataLoader") == warnings


def warnings_of(caplog):
    """Messages of level WARNING or above; an earlier test may have set the level to INFO."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Weighted(torch.nn.Module):
    """Several labels a row, whose positives may weigh more: any entry of the batch is taken."""

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


class TakesNone(Weighted):
    def forward(self, features, labels=None):
        return super().forward(features, labels)


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
    assert loss(TakesWeight()) == loss(Weighted()) == pytest.approx(weighted, rel=1e-6)
    assert not warnings_of(caplog)
    assert loss(TakesNone()) == pytest.approx(plain, rel=1e-6)
    (warning,) = warnings_of(caplog)
    assert "TakesNone.forward does not take, and that only metrics functions see: pos_weight" in warning


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
    (part,) = split_batch(batch, 2, {"input_ids", "attention_mask", "labels"}, torch.device("cpu"))
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


class Tempered(TinyLabeller):
    """Takes numbers that belong to no row."""

    def forward(self, input_ids, labels, temperature=1.0, class_weight=None):
        logits = super().forward(input_ids, labels)["logits"] / float(temperature)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=class_weight)
        return {"loss": loss, "logits": logits}


def test_what_belongs_to_no_row_is_refused_with_the_way_on():
    rows = RaggedPairs(8).batch(list(range(8)))
    weight = torch.ones(VOCABULARY_SIZE)
    with pytest.raises(UserError, match=r"'class_weight': 64\}; what belongs to no row goes into forward_kwargs"):
        made(Tempered(), loader=[{**rows, "class_weight": weight}]).train()
    made(Tempered(), loader=[rows], forward_kwargs={"class_weight": weight}).train()
