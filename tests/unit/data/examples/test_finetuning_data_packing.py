"""--packing: each example once, none sees another, and a model gives it the logits it gives it alone."""

import itertools

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.packing import Segments, pack
from lm_experiments_tools.labels import IGNORED_LABEL
from tests.helpers.finetuning_toys import pairs, read, word_tokenizer, write_json

LENGTHS = {"input_seq_len": 64, "target_seq_len": 32}


def packed(tmp_path, count=60, **flags):
    path = write_json(tmp_path / "a.jsonl", pairs(count))
    train = read(word_tokenizer(), data_path=(path,), packing=True, **LENGTHS, **flags).train
    return train.dataset


def expected_pairs(count=60):
    ids = [
        [[int(word[1:]) + 3 for word in row[name].split()] for name in ("source", "target")] for row in pairs(count)
    ]
    return sorted((tuple(source), tuple(target)) for source, target in ids)


def test_first_fit_is_the_textbook_one():
    lengths = np.array([[5, 7, 5, 2, 4, 2, 5, 1, 6]])  # into rows of 10: the worked example of bin packing lectures
    items, sizes = pack(lengths, np.array([10]))
    assert items.tolist() == [0, 2, 1, 3, 7, 4, 5, 6, 8] and sizes.tolist() == [2, 3, 2, 1, 1]


def test_segments_lay_out_the_worked_example_of_the_module():
    segments = Segments(np.array([2, 1]), np.array([3, 2, 4]), 6)
    assert segments.ids().tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    assert segments.positions().tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert segments.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert segments.filled(np.arange(9), -1).tolist() == [[0, 1, 2, 3, 4, -1], [5, 6, 7, 8, -1, -1]]


def test_an_epoch_of_an_encoder_decoder_has_each_example_once_within_the_limits(tmp_path):
    dataset = packed(tmp_path)
    for epoch in range(2):
        batch = dataset.batch(np.arange(len(dataset)) + epoch * len(dataset))
        assert batch["input_ids"].shape[1] <= 64 and batch["labels"].shape[1] <= 32
        found = []
        for row in range(len(dataset)):
            segments = batch["segment_ids"][row], batch["decoder_segment_ids"][row]
            assert (batch["attention_mask"][row] == (segments[0] > 0)).all()
            assert (batch["labels"][row][segments[1] == 0] == IGNORED_LABEL).all()
            assert segments[0].max() == segments[1].max() > 0
            for number in range(1, segments[0].max() + 1):
                source = batch["input_ids"][row][segments[0] == number].tolist()
                target = batch["labels"][row][segments[1] == number].tolist()
                assert source.pop() == target.pop() == 1
                found.append((tuple(source), tuple(target)))
        assert sorted(found) == expected_pairs()
    assert len(dataset) < 60 / 2
    assert f"packed in {len(dataset)} rows" in dataset.describe()


def sequences(batch):
    """(row, first column, ids, labels) of each example of a decoder's batch."""
    for row, (ids, labels, places) in enumerate(
        zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True)
    ):
        bounds = [*np.flatnonzero(places == 0).tolist(), len(ids)]
        for begin, end in itertools.pairwise(bounds):
            if (labels[begin:end] != IGNORED_LABEL).any():
                yield row, begin, ids[begin:end], labels[begin:end]


def test_an_epoch_of_a_decoder_has_each_example_once(tmp_path):
    dataset = packed(tmp_path, model_type="decoder")
    batch = dataset.batch(np.arange(len(dataset)))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    found = []
    for _, _, ids, labels in sequences(batch):
        answer = labels != IGNORED_LABEL
        assert (ids[answer] == labels[answer]).all()
        target = ids[answer].tolist()
        assert target.pop() == 1
        found.append((tuple(ids[~answer].tolist()), tuple(target)))
    assert sorted(found) == expected_pairs()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_huggingfaces_decoders_give_a_packed_example_the_logits_it_has_alone(kind, attention, tmp_path):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=203, n_positions=64, n_embd=16, n_layer=2, n_head=2))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=203, **sizes))
    model.set_attn_implementation(attention)
    model.eval()
    batch = packed(tmp_path, model_type="decoder").batch(np.arange(4))
    inputs = {name: torch.from_numpy(values) for name, values in batch.items()}
    with torch.no_grad():
        inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits  # with a cache transformers does not look for packed rows
        checked = 0
        for row, begin, ids, _ in sequences(batch):
            alone = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
            torch.testing.assert_close(logits[row, begin : begin + len(ids)], alone, atol=1e-5, rtol=1e-4)
            checked += begin > 0
    assert checked >= 4


@pytest.mark.parametrize("task", ["classification", "regression", "multi_label"])
def test_an_epoch_of_an_encoder_has_each_example_once_with_its_label(task, tmp_path):
    label = {
        "classification": lambda number: "abc"[number % 3],
        "regression": lambda number: number / 7,
        "multi_label": lambda number: [name for name in "abc" if number % (ord(name) - 95)],
    }[task]
    rows = [{"s1": row["source"], "s2": row["target"], "label": label(number)} for number, row in enumerate(pairs(60))]
    path = write_json(tmp_path / "a.jsonl", rows)
    flags = {"model_type": "encoder", "task": task, "text_fields": ("s1", "s2"), "input_seq_len": 64}
    tokenizer = word_tokenizer()
    processor = TemplateProcessing(single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    alone, packed = (read(tokenizer, data_path=(path,), packing=packing, **flags).train for packing in (False, True))
    single, packed = Dataset(alone.dataset.members).batch(np.arange(60)), packed.dataset
    expected = sorted(
        (ids[:length].tolist(), types[:length].tolist(), np.array(label).tolist())
        for ids, types, length, label in zip(
            single["input_ids"], single["token_type_ids"], single["attention_mask"].sum(1), single["labels"],
            strict=True,
        )
    )  # fmt: skip
    for epoch in range(2):
        batch = packed.batch(np.arange(len(packed)) + epoch * len(packed))
        found = []
        for ids, types, segments, mask, labels in zip(
            *(batch[name] for name in ("input_ids", "token_type_ids", "segment_ids", "attention_mask", "labels")),
            strict=True,
        ):
            assert ((segments > 0) == mask).all() and (labels[segments.max() :] == IGNORED_LABEL).all()
            for number in range(1, segments.max() + 1):
                here = segments == number
                found.append((ids[here].tolist(), types[here].tolist(), labels[number - 1].tolist()))
        assert sorted(found) == expected
    assert packed.batch(np.arange(len(packed)))["input_ids"].shape[1] <= 64 and len(packed) < 60 / 2


@pytest.mark.parametrize(
    "flags", [{"model_type": "decoder", "target_seq_len": 8}, {"model_type": "encoder", "task": "classification"}]
)
def test_a_row_is_the_same_whatever_is_made_with_it(tmp_path, flags):
    rows = [{"source": " ".join(["w1"] * (1 + n % 7)), "target": "w2", "label": "ab"[n % 2]} for n in range(60)]
    if "task" in flags:
        rows = [{"text": row["source"], "label": row["label"]} for row in rows]
    path = write_json(tmp_path / "a.jsonl", rows)
    train = read(word_tokenizer(), data_path=(path,), packing=True, input_seq_len=64, **flags).train
    numbers = np.arange(len(train.dataset))
    together = train.dataset.batch(numbers)
    for number in numbers:
        alone = train.dataset.batch(numbers[number : number + 1])
        for name in ("labels", *(["input_ids", "position_ids"] if "position_ids" in alone else [])):
            assert np.array_equal(alone[name][0], together[name][number]), name


def test_lengths_of_packed_rows_are_those_of_their_batch(tmp_path):
    rows = packed(tmp_path).members[0]
    numbers = np.arange(len(rows))
    batch, (inputs, targets) = (
        rows.batch(np.zeros_like(numbers), numbers),
        rows.lengths(np.zeros_like(numbers), numbers),
    )
    assert (inputs == batch["attention_mask"].sum(1)).all()
    assert (targets == (batch["labels"] != IGNORED_LABEL).sum(1)).all()
