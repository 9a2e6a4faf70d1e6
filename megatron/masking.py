"""BERT's masking of whole words and n-grams, for a batch at a time, by Megatron's rule.

Words are visited in random order, each with a random n; it and the n - 1 words after it are predicted if they fit in
the remaining predictions. An n-gram that does not fit is shortened word by word; one that meets a word already taken
is skipped. Of the tokens taken, 80 % become [MASK], 10 % any id of the vocabulary, 10 % stay.

One worked example: CLS play ##ing chess SEP so ##ft ##ly SEP with 5 predictions.

    tokens       [CLS, 10, 11, 12, SEP, 20, 21, 22, SEP]
    maskable     [  0,  1,  1,  1,   0,  1,  1,  1,   0]
    starts       [  0,  1,  0,  1,   0,  1,  0,  0,   0]     words: 0 = 10 11, 1 = 12, 2 = 20 21 22
    order, n     words 1, 2, 0 with n = 2, 1, 1
    masked       [  0,  0,  0,  1,   0,  1,  1,  1,   0]

Word 1 takes words 1 and 2, four tokens (an n-gram may cross a separator, which stays). One prediction remains, too few
for word 0.
"""

import numpy as np

_LOOKED_AT = 1024  # turns looked at together once few predictions are left, over all rows
_NGRAM_BITS = 12  # low bits of a word's random number that choose n; the whole number decides its turn


def ngram_probabilities(max_ngram: int) -> np.ndarray:
    """float64[max_ngram], probability of n = 1, 2, ...: proportional to 1 / n."""
    weights = 1 / np.arange(1, max_ngram + 1)
    return weights / weights.sum()


def word_starts(tokens: np.ndarray, maskable: np.ndarray, starts_word: np.ndarray) -> np.ndarray:
    """bool[n, length]: the first token of each word; a word never reaches over a token that is not maskable.

    Args:
        tokens: int64[n, length].
        maskable: bool[n, length], tokens of text.
        starts_word: bool[vocabulary], False for pieces that continue a word.
    """
    starts = starts_word[tokens]
    starts[:, 1:] |= ~maskable[:, :-1]
    return starts & maskable


def choose_masked(
    maskable: np.ndarray, starts: np.ndarray, num_predictions: np.ndarray, words: np.ndarray, probabilities: np.ndarray
) -> np.ndarray:
    """Which tokens to predict, bool[n, length].

    Args:
        maskable, starts: bool[n, length], tokens of text and first tokens of words.
        num_predictions: int64[n], the maximum number of tokens of each row.
        words: uint64[at least the words of a row, n] random 32-bit numbers.
        probabilities: float64[N] of each n, see `ngram_probabilities`.
    """
    order, ngrams = random_order(starts.sum(axis=1), words, probabilities)
    return take_ngrams(maskable, starts, num_predictions, order, ngrams, len(probabilities))


def random_order(num_words: np.ndarray, words: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words int64[n, most words] in random order, and the n of each; values beyond a row's words are undefined.

    The word's number in a key's low bits makes keys unique, so that a row does not depend on others of the batch.
    """
    width = int(num_words.max(initial=0))
    index = np.arange(width)
    keys = words[:width].T << np.uint64(32) | index.astype(np.uint64)
    keys[index >= num_words[:, None]] |= np.uint64(0xFFFFFFFF << 32)
    keys.sort(axis=1)
    low_bits = (keys >> np.uint64(32)).astype(np.int64) & ((1 << _NGRAM_BITS) - 1)
    limits = np.rint(np.cumsum(probabilities)[:-1] * (1 << _NGRAM_BITS)).astype(np.int64)
    ngrams = np.ones_like(low_bits)
    for limit in limits.tolist():
        ngrams += low_bits >= limit
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64), ngrams


def take_ngrams(
    maskable: np.ndarray,
    starts: np.ndarray,
    num_predictions: np.ndarray,
    order: np.ndarray,
    ngrams: np.ndarray,
    max_ngram: int,
) -> np.ndarray:
    """Select the masked tokens, given the order in which words are visited and the n of each (int64[n, most words]).

    First all turns that certainly fit are decided at once; then, with few predictions left, one acceptance at a time.
    """
    num_words, word_of = starts.sum(axis=1), np.maximum(starts.cumsum(axis=1) - 1, 0)
    before = maskable.cumsum(axis=1)
    # begins[r, w]: tokens of text before word w; beyond the last word, all of them
    begins = np.repeat(before[:, -1:], order.shape[1] + max_ngram, axis=1)
    rows, columns = np.nonzero(starts)
    begins[rows, word_of[rows, columns]] = before[rows, columns] - 1
    covered = np.zeros(begins.shape, bool)
    left, turns = _take_while_fitting(begins, num_words, num_predictions, order, ngrams, covered)
    _take_the_rest(begins, num_words, left, turns, order, ngrams, covered)
    return np.take_along_axis(covered, word_of, axis=1) & maskable


def _take_while_fitting(
    begins: np.ndarray,
    num_words: np.ndarray,
    num_predictions: np.ndarray,
    order: np.ndarray,
    ngrams: np.ndarray,
    covered: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Decide the first words of all rows together; returns the predictions left and the first word not decided."""
    turns = min(order.shape[1], int(num_predictions.max(initial=0) * 0.75) + 1)  # about what is needed
    first, n = order[:, :turns], ngrams[:, :turns]
    last = first + n
    valid = np.arange(turns) < num_words[:, None]
    meets = (first[:, :, None] < last[:, None, :]) & (first[:, None, :] < last[:, :, None])
    meets &= np.triu(np.ones((turns, turns), bool), 1)
    taken, previous = valid, None
    while previous is None or (taken != previous).any():
        previous, taken = taken, valid & ~(meets & taken[:, :, None]).any(axis=1)
    sizes = np.take_along_axis(begins, last, axis=1) - np.take_along_axis(begins, first, axis=1)
    before = np.cumsum(sizes * taken, axis=1) - sizes * taken
    fits = (before + sizes <= num_predictions[:, None]) | ~valid
    decided = np.logical_and.accumulate(fits, axis=1).sum(axis=1)
    taken &= np.arange(turns) < decided[:, None]
    for k in range(int(n.max(initial=0))):
        rows, turn = np.nonzero(taken & (n > k))
        covered[rows, first[rows, turn] + k] = True
    return num_predictions - (sizes * taken).sum(axis=1), decided


def _take_the_rest(
    begins: np.ndarray,
    num_words: np.ndarray,
    left: np.ndarray,
    turns: np.ndarray,
    order: np.ndarray,
    ngrams: np.ndarray,
    covered: np.ndarray,
) -> None:
    """From turn `turns[r]` on, find each row's next n-gram that can be taken, until none is left."""
    steps = np.arange(1, begins.shape[1] - order.shape[1] + 1)
    while (rows := np.flatnonzero((left > 0) & (turns < num_words))).size:
        width = max(16, _LOOKED_AT // rows.size)
        window = turns[rows, None] + np.arange(width)
        inside = window < num_words[rows, None]
        window = np.minimum(window, order.shape[1] - 1)
        row = rows[:, None]
        first = order[row, window]
        reached = first[..., None] + steps  # the words after 1, 2, ... words
        sizes = begins[row[..., None], reached] - begins[row, first][..., None]
        n = ((sizes <= left[rows, None, None]) & (steps <= ngrams[row, window][..., None])).sum(axis=-1)
        meets = (covered[row[..., None], reached - 1] & (steps <= n[..., None])).any(axis=-1)
        possible = inside & (n > 0) & ~meets
        found, at = possible.any(axis=1), possible.argmax(axis=1)
        turns[rows] += np.where(found, at + 1, width)
        here, at = np.flatnonzero(found), at[found]
        n, first, sizes = n[here, at], first[here, at], sizes[here, at]
        left[rows[here]] -= sizes[np.arange(len(here)), n - 1]
        for k in range(int(n.max(initial=0))):
            longer = n > k
            covered[rows[here[longer]], first[longer] + k] = True


def replace_masked(
    tokens: np.ndarray, masked: np.ndarray, words: np.ndarray, mask_id: int, vocab_size: int
) -> np.ndarray:
    """`tokens` with 80 % of the masked ones replaced by [MASK] and 10 % by any id of the vocabulary.

    Args:
        tokens: int64[n, length], changed in place.
        masked: bool[n, length].
        words: uint64[at least the most masked tokens of a row, n] random 32-bit numbers, the k-th for a row's k-th
            masked token.
        mask_id, vocab_size: of the vocabulary.
    """
    rows, columns = np.nonzero(masked)
    number = np.cumsum(masked, axis=1)[rows, columns] - 1
    drawn = words[number, rows].astype(np.int64)
    mask_below, keep_below, end = int(0.8 * 2**32), int(0.9 * 2**32), 1 << 32
    any_id = (drawn - keep_below) * vocab_size // (end - keep_below)
    kept = np.where(drawn < keep_below, tokens[rows, columns], any_id)
    tokens[rows, columns] = np.where(drawn < mask_below, mask_id, kept)
    return tokens
