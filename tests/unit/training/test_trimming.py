"""Micro-batches without the columns that hold nothing: which are cut, and that no loss changes."""

import pytest
import torch

from lm_experiments_tools.training.micro_batches import split_batch, used_widths
from tests.helpers.toys import VOCABULARY_SIZE, tiny_t5


def ragged(rows, columns, lengths, value=1, padding=0):
    batch = torch.full((rows, columns), padding)
    for row, length in enumerate(lengths):
        batch[row, :length] = value
    return batch


def batch_of(input_lengths, label_lengths, columns=20):
    rows = len(input_lengths)
    return {
        "input_ids": ragged(rows, columns, input_lengths, 5),
        "attention_mask": ragged(rows, columns, input_lengths),
        "labels": ragged(rows, columns, label_lengths, 7, -100),
    }


@pytest.mark.parametrize(
    ("inputs", "labels", "has_decoder", "widths"),
    [
        ([3, 9], [1, 2], True, {"input_ids": 16, "attention_mask": 16, "labels": 8}),
        ([3, 8], [17, 2], True, {"input_ids": 8, "attention_mask": 8}),  # 24 would be more than there is
        ([20, 20], [20, 20], True, {}),
        ([3, 9], [1, 2], False, {"input_ids": 16, "attention_mask": 16, "labels": 16}),
        ([3, 3], [0, 0], True, {"input_ids": 8, "attention_mask": 8, "labels": 8}),
    ],
)
def test_widths_are_the_least_multiples_that_hold_everything(inputs, labels, has_decoder, widths):
    assert used_widths(batch_of(inputs, labels), 8, has_decoder) == widths


def test_each_micro_batch_is_cut_by_its_own_rows_and_keeps_its_weights():
    batch = batch_of([3, 4, 18, 20], [9, 2, 3, 4])
    names = set(batch)
    whole = split_batch(batch, 2, names, torch.device("cpu"), True)
    cut = split_batch(batch, 2, names, torch.device("cpu"), True, trim_to=8)
    assert [m.inputs["input_ids"].shape[1] for m in cut] == [8, 20]
    assert [m.inputs["labels"].shape[1] for m in cut] == [16, 8]
    assert [m.weights for m in cut] == [m.weights for m in whole]
    assert [(m.tokens, m.rows) for m in cut] == [(m.tokens, m.rows) for m in whole]
    assert all(value.is_contiguous() for m in cut for value in m.inputs.values())


def test_losses_and_gradients_do_not_change():
    generator = torch.Generator().manual_seed(0)
    batch = batch_of([5, 11, 9], [3, 9, 6])
    for name, padding in (("input_ids", 0), ("labels", -100)):
        noise = torch.randint(2, VOCABULARY_SIZE, batch[name].shape, generator=generator)
        batch[name] = torch.where(batch[name] == padding, batch[name], noise)
    model = tiny_t5().eval()
    results = []
    for trim_to in (None, 4):
        model.zero_grad()
        part = split_batch(batch, 3, set(batch), torch.device("cpu"), True, trim_to=trim_to)[0]
        loss = model(**part.inputs).loss
        loss.backward()
        results.append((part.inputs["input_ids"].shape[1], loss, model.shared.weight.grad.clone()))
    assert [width for width, *_ in results] == [20, 12]
    torch.testing.assert_close(results[0][1:], results[1][1:])


@pytest.mark.parametrize("labels", [torch.zeros(4, dtype=torch.long), torch.zeros(4, 3)])
def test_labels_of_rows_are_no_columns(labels):
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[:, 9:] = 0
    widths = used_widths({"attention_mask": mask, "input_ids": mask, "labels": labels}, 8, has_decoder=False)
    assert widths == {"attention_mask": 16, "input_ids": 16}
