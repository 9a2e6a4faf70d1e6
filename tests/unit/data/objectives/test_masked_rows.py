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
from lm_experiments_tools.data.objectives.mlm import MaskedLM
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.data.order import row_generators
from megatron.tokenizers import build_tokenizer
from tests.helpers.bert_toys import documents
from tests.helpers.token_toys import token_data

WIDTH = 64


def within(found: int, number: int, probability: float) -> bool:
    """True within six standard deviations of a binomial distribution: false once in 500 million draws."""
    return abs(found - number * probability) <= 6 * sqrt(number * probability * (1 - probability)) + 1e-9


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """(transformers' tokenizer, ours, pages, token file of them)."""
    folder, pages = tmp_path_factory.mktemp("text"), [". ".join(page) for page in documents()]
    wordpiece = tokenizers.BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(pages, vocab_size=600, show_progress=False)
    wordpiece.save_model(str(folder))
    ours = build_tokenizer("BertWordPieceLowerCase", vocab_file=folder / "vocab.txt")
    tokens = token_data(folder / "tokens", [[ids] for ids in ours.encode_batch(pages)])
    return BertTokenizerFast(str(folder / "vocab.txt")), ours, pages, tokens


def objective_of(ours, **options):
    ids = TokenIds(ours.size, ours.pad_id, mask_id=ours.mask_id, special_ids=ours.special_ids)
    return MaskedLM.create(ids, WIDTH, model_kind="encoder", **options)


def masked(text, seed=0, packed=True, **options):
    _, ours, _, tokens = text
    ids = {"cls_id": ours.cls_id, "sep_id": ours.sep_id}
    return DocumentRows(tokens, objective_of(ours, **options), **ids, packed=packed, seed=seed)


def unmasked(batch):
    return np.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])


@pytest.mark.parametrize("replace", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.6, 0.4, 0.0)])
@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_masks_are_distributed_as_those_of_transformers_on_the_same_rows(text, probability, replace):
    """Shares of chosen, masked, and changed tokens of both are within the bounds of the same binomials."""
    theirs, ours, _, _ = text
    numbers = np.arange(len(masked(text)))
    batch, original = (
        Dataset(masked(text, mlm_probability=chosen, replace=replace)).batch(numbers) for chosen in (probability, 0.0)
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
    objective, numbers = (
        objective_of(ours, mlm_probability=0.3, starts_word=ours.starts_word),
        np.arange(rounds * len(ids)),
    )
    labels = objective.examples(np.tile(ids, (rounds, 1)), row_generators(7, np.zeros_like(numbers), numbers))
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


def test_masks_are_a_function_of_epoch_and_row_in_mixtures_too(text):
    _, ours, _, tokens = text
    rows, others = masked(text, mlm_probability=0.3), masked(text, packed=False, mlm_probability=0.3)
    blocks = TokenRows(tokens, objective_of(ours, mlm_probability=0.3), seed=3)
    for members in ([rows], [blocks], [blocks, others]):
        dataset = Dataset(members, Mixture(list(map(len, members))) if len(members) > 1 else None)
        whole = dataset.batch(np.arange(600))
        for part in (np.arange(599, -1, -7), np.array([3, 599, 3])):
            assert all((values == whole[name][part]).all() for name, values in dataset.batch(part).items())
        assert dataset.order is not None and (len(members) > 1 or dataset.order == members[0].order)
    epoch = len(rows)
    again = Dataset(masked(text)).batch(np.concatenate([np.arange(epoch), np.arange(epoch) + epoch]))
    masks = {(tuple(row), tuple(label >= 0)) for row, label in zip(unmasked(again), again["labels"], strict=True)}
    assert len(masks) == 2 * epoch, "each epoch has masks of its own"


def test_settings_of_masks_change_the_fingerprint_and_not_the_order(text):
    starts = text[1].starts_word
    variants = [
        {}, {"mlm_probability": 0.2}, {"replace": (1.0, 0.0, 0.0)},
        {"starts_word": starts}, {"seed": 1},
    ]  # fmt: skip
    datasets = [Dataset(masked(text, **options)) for options in variants]
    assert len({dataset.fingerprint for dataset in datasets}) == len(variants)
    assert len({dataset.order for dataset in datasets}) == 2, "one for each seed"
