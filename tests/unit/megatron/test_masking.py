"""Masking: the rule turn by turn, whole words, the laws of the random choices."""

import numpy as np
import pytest

from megatron.masking import (
    choose_masked,
    ngram_probabilities,
    random_order,
    replace_masked,
    take_ngrams,
    word_starts,
)

CLS, SEP = 1, 2


def one_by_one(words, num_predictions, order, ngrams):
    """The rule in plain words, for one row: `words` are lists of positions."""
    taken = []
    for turn in order:
        for n in range(ngrams[list(order).index(turn)], 0, -1):
            positions = [position for word in words[turn : turn + n] for position in word]
            if len(taken) + len(positions) <= num_predictions:
                if not set(positions) & set(taken):
                    taken += positions
                break
    return sorted(taken)


def random_rows(rng, rows, length, start_rate=0.7):
    """Rows of text with separators within, padded at the end; words never reach over a separator."""
    maskable = np.zeros((rows, length), bool)
    for row in maskable:
        row[1 : rng.integers(3, length)] = True
        row[rng.integers(0, length, 2)] = False
    starts = word_starts(np.zeros((rows, length), np.int64), maskable, np.ones(1, bool))
    starts &= rng.random((rows, length)) < start_rate
    starts[:, 1:] |= maskable[:, 1:] & ~maskable[:, :-1]
    return maskable, starts & maskable


def words_of(maskable, starts):
    words = []
    for position in np.flatnonzero(maskable).tolist():
        if starts[position]:
            words.append([])
        words[-1].append(position)
    return words


def test_the_worked_example():
    tokens = np.array([[CLS, 10, 11, 12, SEP, 20, 21, 22, SEP]])
    maskable = tokens > SEP
    starts_word = ~np.isin(np.arange(30), (11, 21, 22))
    starts = word_starts(tokens, maskable, starts_word)
    assert starts.astype(int).tolist() == [[0, 1, 0, 1, 0, 1, 0, 0, 0]]
    masked = take_ngrams(maskable, starts, np.array([5]), np.array([[1, 2, 0]]), np.array([[2, 1, 1]]), 2)
    assert masked.astype(int).tolist() == [[0, 0, 0, 1, 0, 1, 1, 1, 0]]


@pytest.mark.parametrize(("length", "rate"), [(12, 0.3), (60, 0.15), (60, 0.9), (200, 0.15), (200, 0.5)])
def test_a_batch_follows_the_rule_turn_by_turn(length, rate):
    rng = np.random.default_rng(length)
    maskable, starts = random_rows(rng, 40, length)
    num_words = starts.sum(axis=1)
    num_predictions = np.maximum(1, np.rint(rate * maskable.sum(axis=1)).astype(np.int64))
    order, ngrams = random_order(num_words, rng.integers(0, 1 << 32, (length, 40), np.uint64), np.full(4, 0.25))
    masked = take_ngrams(maskable, starts, num_predictions, order, ngrams, 4)
    for row in range(40):
        n = num_words[row]
        expected = one_by_one(
            words_of(maskable[row], starts[row]),
            num_predictions[row],
            order[row, :n].tolist(),
            ngrams[row, :n].tolist(),
        )
        assert np.flatnonzero(masked[row]).tolist() == expected


def test_a_row_does_not_depend_on_those_beside_it():
    rng = np.random.default_rng(0)
    maskable, starts = random_rows(rng, 30, 80)
    words = rng.integers(0, 1 << 32, (80, 30), np.uint64)
    budget, law = np.full(30, 12), ngram_probabilities(3)
    together = choose_masked(maskable, starts, budget, words, law)
    for row in range(30):
        here = slice(row, row + 1)
        alone = choose_masked(maskable[here], starts[here], budget[here], words[:, here], law)
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_word_ends_where_text_ends():
    tokens = np.array([[CLS, 11, 11, SEP, 11, 10, 11]])
    starts = word_starts(tokens, tokens > SEP, ~np.isin(np.arange(12), (11,)))
    assert starts.astype(int).tolist() == [[0, 1, 0, 0, 1, 1, 0]]


def test_lengths_of_ngrams_follow_their_law():
    law, expected = ngram_probabilities(3), [6 / 11, 3 / 11, 2 / 11]
    np.testing.assert_allclose(law, expected)
    words = np.random.default_rng(2).integers(0, 1 << 32, (50, 2000), np.uint64)
    order, ngrams = random_order(np.full(2000, 50), words, law)
    share = np.bincount(ngrams.ravel(), minlength=4)[1:] / ngrams.size
    np.testing.assert_allclose(share, expected, atol=4 * np.sqrt(0.25 / ngrams.size) + 2**-13)
    # each word is as likely at each turn, whatever n it has
    np.testing.assert_array_equal(np.sort(order, axis=1), np.broadcast_to(np.arange(50), order.shape))
    assert abs(np.corrcoef(np.arange(50), order.mean(axis=0))[0, 1]) < 0.6
    assert abs(order[:, 0].mean() - 24.5) < 4 * np.sqrt(50**2 / 12 / 2000)
    assert abs(ngrams[:, 0].mean() - (law * [1, 2, 3]).sum()) < 4 * np.sqrt(1 / 2000)


def test_masked_tokens_become_mask_any_id_or_stay():
    rng = np.random.default_rng(3)
    shape, vocab_size, mask_id = (300, 400), 1000, 7
    tokens = rng.integers(500, 600, shape)
    masked = rng.random(shape) < 0.5
    words = rng.integers(0, 1 << 32, (int(masked.sum(axis=1).max()), 300), np.uint64)
    replaced = replace_masked(tokens.copy(), masked, words, mask_id, vocab_size)
    np.testing.assert_array_equal(replaced[~masked], tokens[~masked])
    new, old = replaced[masked], tokens[masked]
    tolerance = 4 * np.sqrt(0.25 / new.size)
    assert abs((new == mask_id).mean() - (0.8 + 0.1 / vocab_size)) < tolerance
    assert abs((new == old).mean() - (0.1 + 0.1 / vocab_size)) < tolerance
    random = new[(new != mask_id) & (new != old)]
    counts = np.bincount(random, minlength=vocab_size)
    assert random.max() < vocab_size and (counts > 0).mean() > 0.99
    assert abs(random.mean() - (vocab_size - 1) / 2) < 4 * vocab_size / np.sqrt(12 * random.size)
