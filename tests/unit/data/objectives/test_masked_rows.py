"""Masks against transformers' collator, and against the binomial distributions that they are draws of."""

from math import sqrt

import numpy as np
import pytest
import tokenizers
import torch
from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.mixture import Mixture
from lm_experiments_tools.data.objectives.document_rows import DocumentRows
from lm_experiments_tools.data.objectives.mlm import Blocks, MaskedLM, SampleMasking
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from megatron.tokenizers import build_tokenizer
from tests.helpers.bert_toys import documents
from tests.helpers.token_toys import token_data

WIDTH = 64


def within(found: int, number: int, probability: float) -> bool:
    """True within six standard deviations of a binomial distribution: false once in 500 million draws."""
    return abs(found - number * probability) <= 6 * sqrt(number * probability * (1 - probability)) + 1e-9


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """(transformers' tokenizer, ours, pages, rows of them)."""
    folder, pages = tmp_path_factory.mktemp("text"), [". ".join(page) for page in documents()]
    wordpiece = tokenizers.BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(pages, vocab_size=600, show_progress=False)
    wordpiece.save_model(str(folder))
    ours = build_tokenizer("BertWordPieceLowerCase", vocab_file=folder / "vocab.txt")
    tokens = token_data(folder / "tokens", [[ids] for ids in ours.encode_batch(pages)])
    ids = {"cls_id": ours.cls_id, "sep_id": ours.sep_id, "pad_id": ours.pad_id, "vocab_size": ours.size}
    return BertTokenizerFast(str(folder / "vocab.txt")), ours, pages, DocumentRows(tokens, WIDTH, **ids)


def masked(text, members=None, **options):
    ours = text[1]
    ids = TokenIds(ours.size, ours.pad_id, mask_id=ours.mask_id, special_ids=ours.special_ids)
    seed = options.pop("seed", 0)
    masking = SampleMasking(MaskedLM.create(ids, WIDTH, model_kind="encoder", **options), seed)
    members = [text[3]] if members is None else members
    mixture = Mixture([len(member) for member in members]) if len(members) > 1 else None
    return Dataset(members, mixture, masking)


def unmasked(batch):
    return np.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])


@pytest.mark.parametrize("replace", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.6, 0.4, 0.0)])
@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_masks_are_distributed_as_those_of_transformers_on_the_same_rows(text, probability, replace):
    """Shares of chosen, masked, and changed tokens of both are within the bounds of the same binomials."""
    theirs, ours, _, rows = text
    numbers = np.arange(len(rows))
    batch, original = (
        masked(text, mlm_probability=probability, replace=replace).batch(numbers),
        Dataset(rows).batch(numbers),
    )
    assert (unmasked(batch) == original["input_ids"]).all(), "labels are the tokens that were there"
    assert all((batch[name] == original[name]).all() for name in ("segment_ids", "attention_mask"))
    collate = DataCollatorForLanguageModeling(
        theirs, mlm_probability=probability, mask_replace_prob=replace[0], random_replace_prob=replace[1], seed=1
    )
    other = {k: v.numpy() for k, v in collate([torch.from_numpy(row) for row in original["input_ids"]]).items()}
    is_text = ~np.isin(original["input_ids"], theirs.all_special_ids)
    number_of_ids = np.count_nonzero(is_text)
    for found, candidates in ((batch, ours.size - len(ours.special_ids)), (other, len(theirs))):
        chosen = found["labels"] != -100
        assert not chosen[~is_text].any(), "special tokens are never chosen"
        assert (found["input_ids"][~chosen] == original["input_ids"][~chosen]).all()
        count = np.count_nonzero(chosen)
        assert within(count, number_of_ids, probability)
        is_mask = found["input_ids"][chosen] == ours.mask_id
        is_same = found["input_ids"][chosen] == original["input_ids"][chosen]
        assert within(is_mask.sum(), count, replace[0] + (replace[1] / candidates if found is other else 0))
        assert within(is_same.sum(), count, replace[2] + replace[1] / candidates)


def test_words_are_chosen_whole_where_transformers_says_they_are(text):
    """A word is a run of subwords without a gap between their offsets; WordPiece's also end at punctuation."""
    theirs, ours, pages, _ = text
    pages = [" ".join("".join(c if c.isalpha() else " " for c in page).split()) for page in pages[:40]]
    encoded = theirs(pages, max_length=WIDTH, truncation=True, padding="max_length", return_offsets_mapping=True,
                     return_special_tokens_mask=True)  # fmt: skip
    ids, special = np.array(encoded["input_ids"]), np.array(encoded["special_tokens_mask"])
    word_ids, _ = DataCollatorForLanguageModeling._calc_word_ids_and_prob_mask(
        np.array(encoded["offset_mapping"]), special
    )

    rounds = 40
    masking = masked(text, mlm_probability=0.3, starts_word=ours.starts_word).masking
    labels = masking({"input_ids": np.tile(ids, (rounds, 1))}, np.arange(rounds * len(ids)))
    chosen = (labels["labels"] != -100).reshape(rounds, *ids.shape)
    in_words = [word_ids[row] == word for row in range(len(ids)) for word in range(1, word_ids[row].max() + 1)]
    owners = [row for row in range(len(ids)) for _ in range(word_ids[row].max())]
    numbers = [chosen[:, row][:, where] for row, where in zip(owners, in_words, strict=True)]
    assert sum(word.shape[1] > 1 for word in numbers) > 300, "words of several subwords"
    assert all((word.all(axis=1) == word.any(axis=1)).all() for word in numbers), "all of a word or nothing of it"
    assert within(sum(int(word.any(axis=1).sum()) for word in numbers), rounds * len(numbers), 0.3)
    assert not chosen[:, special.astype(bool)].any()
    inputs = labels["input_ids"].reshape(rounds, *ids.shape)
    assert within(np.count_nonzero(inputs[chosen] == ours.mask_id), np.count_nonzero(chosen), 0.8), (
        "each by its own bits"
    )


def test_masks_are_a_function_of_the_sample_number_in_mixtures_too(text):
    _, ours, _, rows = text
    objective = Blocks.create(TokenIds(ours.size, ours.pad_id), WIDTH, model_kind="encoder")
    blocks = TokenRows(rows.tokens, objective, seed=3)
    others = DocumentRows(
        rows.tokens,
        WIDTH,
        cls_id=ours.cls_id,
        sep_id=ours.sep_id,
        pad_id=ours.pad_id,
        vocab_size=ours.size,
        packed=False,
    )
    for inner in ([rows], [blocks], [blocks, others]):
        dataset = masked(text, inner, mlm_probability=0.3)
        whole = dataset.batch(np.arange(600))
        for part in (np.arange(599, -1, -7), np.array([3, 599, 3])):
            assert all((values == whole[name][part]).all() for name, values in dataset.batch(part).items())
        assert dataset.order is not None and (len(inner) > 1 or dataset.order == inner[0].order)
    epoch = len(rows)
    again = masked(text).batch(np.concatenate([np.arange(epoch), np.arange(epoch) + epoch]))
    masks = {(tuple(row), tuple(label >= 0)) for row, label in zip(unmasked(again), again["labels"], strict=True)}
    assert len(masks) == 2 * epoch, "each epoch has masks of its own"


def test_settings_of_masks_change_the_fingerprint_and_not_the_order(text):
    starts = text[1].starts_word
    variants = [
        {}, {"mlm_probability": 0.2}, {"replace": (1.0, 0.0, 0.0)},
        {"starts_word": starts}, {"seed": 1},
    ]  # fmt: skip
    datasets = [masked(text, **options) for options in variants]
    assert len({dataset.fingerprint for dataset in datasets}) == len(variants)
    assert len({dataset.order for dataset in datasets}) == 1
