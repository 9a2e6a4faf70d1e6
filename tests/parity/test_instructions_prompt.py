"""Prompts of Super-Natural-Instructions: those of Tk-Instruct's `DataCollatorForNI`, written out by hand."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from lm_experiments_tools.data.examples.dataset import ExampleRows, encode_examples
from lm_experiments_tools.data.examples.example_encoder import ExampleEncoder
from lm_experiments_tools.data.examples.instructions import (
    TK_INSTRUCT,
    PromptParts,
    instruction_examples,
    prompt_text,
)
from lm_experiments_tools.data.text.records import RejectedRecords
from tests.helpers.real_data import DATA, lacking

TASK = {
    "Task": "task001_add",
    "Definition": "Add the numbers",
    "Positive Examples": [
        {"input": "1 2 ", "output": " 3", "explanation": "1 + 2 is 3"},
        {"input": "Is 2 + 2 four?", "output": "yes!"},
    ],
    "Negative Examples": [{"input": "5 5", "output": "11", "explanation": "It is 10."}],
}
DEFINITION = "Definition: Add the numbers.\n\n"
FIRST = " Positive Example 1 -\nInput: 1 2.\n Output: 3.\n"
SECOND = " Positive Example 2 -\nInput: Is 2 + 2 four?\n Output: yes!\n\n"
NEGATIVE = " Negative Example 1 -\nInput: 5 5.\n Output: 11.\n"
QUESTION = "Now complete the following example -\nInput: 4 5.\nOutput: "
OTHER_PARTS = (
    PromptParts(add_task_name=True, add_task_definition=False),
    PromptParts(add_task_name=True, num_pos_examples=1, num_neg_examples=1, add_explanation=True),
    PromptParts(num_pos_examples=100, num_neg_examples=100, add_explanation=True),
)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (TK_INSTRUCT[0], DEFINITION + QUESTION),
        (TK_INSTRUCT[1], FIRST + "\n" + SECOND + QUESTION),
        (TK_INSTRUCT[2], DEFINITION + FIRST + "\n" + SECOND + QUESTION),
        (TK_INSTRUCT[3], DEFINITION + FIRST + "\n" + SECOND + NEGATIVE + "\n" + QUESTION),
        (TK_INSTRUCT[4], DEFINITION + FIRST + " Explanation: 1 + 2 is 3.\n\n" + SECOND + QUESTION),
        (OTHER_PARTS[0], "task001_add. " + QUESTION),
        (
            OTHER_PARTS[1],
            "task001_add. " + DEFINITION + FIRST + " Explanation: 1 + 2 is 3.\n\n" + NEGATIVE
            + " Explanation: It is 10.\n\n" + QUESTION,
        ),
    ],
)  # fmt: skip
def test_prompt_is_the_one_written_out_by_hand(parts, expected):
    assert prompt_text(TASK, " 4 5\n", parts, lambda pieces: True) == expected


@pytest.mark.parametrize("kept", range(4))
def test_examples_are_left_out_from_the_first_that_does_not_fit(kept):
    parts = PromptParts(num_pos_examples=2, num_neg_examples=1)
    pieces = [FIRST + "\n", SECOND, NEGATIVE + "\n"][:kept]
    limit = len(DEFINITION + "".join(pieces) + QUESTION) + max(min(kept, 2) - 1, 0)  # Tk-Instruct's own blank
    prompt = prompt_text(TASK, "4 5", parts, lambda some: len("".join(some)) <= limit)
    assert prompt == DEFINITION + "".join(pieces) + QUESTION


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = DATA / "vocabs" / "t5_32k" / "sentencepiece.model"
    if reason := lacking(path, DATA / "sni"):
        pytest.skip(reason)
    from transformers import AutoTokenizer

    from lm_experiments_tools.data.text.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.load(path).save(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_tk_instruct_draws_every_form_and_every_output_by_seed_epoch_and_example(tokenizer):
    listing, encoder = DATA / "sni" / "splits" / "default" / "test_tasks.txt", ExampleEncoder(tokenizer, 1024, 64)
    found = instruction_examples(listing, 2, TK_INSTRUCT, RejectedRecords(0), encoder.num_tokens, 1024)
    examples = list(islice(found, 6))
    assert all(len(set(example.variants)) == 5 for example in examples)
    encoded = encode_examples(examples, encoder, "encoder-decoder", all_targets=True)
    data = ExampleRows(encoded, "encoder-decoder", pad_id=0, seed=1, limits=(1024, 64))

    epochs, rows = np.divmod(np.arange(40 * len(data)), len(data))
    sources, targets = data.draw("source", epochs, rows), data.draw("target", epochs, rows)
    for number, example in enumerate(examples):
        forms = sources[rows == number] - encoded.sources.firsts[number]
        assert set(forms.tolist()) == set(range(5))
        drawn = targets[rows == number] - encoded.targets.firsts[number]
        assert set(drawn.tolist()) == set(range(len(example.targets)))
    batch = {name: torch.from_numpy(values) for name, values in data.batch(epochs[7:9], rows[7:9]).items()}
    for row, ids in enumerate(batch["input_ids"]):
        text = tokenizer.decode(ids[batch["attention_mask"][row].bool()], skip_special_tokens=True)
        forms = [tokenizer.decode(tokenizer(form)["input_ids"], skip_special_tokens=True)
                 for form in examples[batch["example"][row]].variants]  # fmt: skip
        assert text in forms
