"""Choice of the tokens that BERT masks and predicts: whole words and n-grams by Megatron's rule, for a batch of rows.

An n-gram is n consecutive words. The words of a row are visited in random order, each with a random n. The n-gram that
starts at the word is masked if it has at most as many tokens as predictions remain. Otherwise it is shortened word by
word. It is skipped if one of its words is masked already. Of the masked tokens, 80 % become [MASK], 10 % a random id,
and 10 % stay unchanged.

Example: CLS play ##ing chess SEP so ##ft ##ly SEP with 5 predictions.

    tokens       [CLS, 10, 11, 12, SEP, 20, 21, 22, SEP]
    maskable     [  0,  1,  1,  1,   0,  1,  1,  1,   0]
    starts       [  0,  1,  0,  1,   0,  1,  0,  0,   0]     words: 0 = 10 11, 1 = 12, 2 = 20 21 22
    order, n     words 1, 2, 0 with n = 2, 1, 1
    masked       [  0,  0,  0,  1,   0,  1,  1,  1,   0]

Word 1 masks words 1 and 2, four tokens. (An n-gram may cross a separator, which is not masked.) One prediction
remains, too few for word 0.
"""

import numpy as np

_LOOKED_AT = 1024  # turns looked at together once few predictions are left, over all rows
_NGRAM_BITS = 12  # low bits of a word's random number that choose n; the whole number decides its turn


def ngram_probabilities(max_ngram: int) -> np.ndarray:
    """Return float64[max_ngram]: the probability that a masked span has n words, proportional to 1 / n."""
    weights = 1 / np.arange(1, max_ngram + 1)
    return weights / weights.sum()


def word_starts(tokens: np.ndarray, maskable: np.ndarray, starts_word: np.ndarray) -> np.ndarray:
    """Find the first token of each word, to mask whole words. Words do not continue over special tokens.

    Args:
        tokens: int64[n, length], n rows of token ids.
        maskable: bool[n, length], False for special tokens.
        starts_word: bool[vocab_size], False for subwords that continue a word.

    Returns:
        bool[n, length], True at the first token of each word.
    """
    starts = starts_word[tokens]
    starts[:, 1:] |= ~maskable[:, :-1]
    return starts & maskable


def choose_masked(
    maskable: np.ndarray,
    starts: np.ndarray,
    num_predictions: np.ndarray,
    random_integers: np.ndarray,
    probabilities: np.ndarray,
) -> np.ndarray:
    """Choose the tokens that BERT predicts, as whole words and n-grams (spans of n words).

    Args:
        maskable: bool[n, length] for n rows, False for special tokens.
        starts: bool[n, length], True at the first token of each word.
        num_predictions: int64[n], maximum number of masked tokens per row.
        random_integers: uint64[at least the number of words in a row, n], uniform on [0, 2**32).
        probabilities: float64[max_ngram], see `ngram_probabilities`.

    Returns:
        bool[n, length], True for the tokens to predict.
    """
    order, ngrams = random_order(starts.sum(axis=1), random_integers, probabilities)
    return take_ngrams(maskable, starts, num_predictions, order, ngrams, len(probabilities))


def random_order(
    num_words: np.ndarray, random_integers: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a random order of each row's words, and for each word the length of the span to mask from it on.

    Args:
        num_words: int64[n], number of words of each row.
        random_integers: uint64[at least the number of words in a row, n], uniform on [0, 2**32).
        probabilities: float64[max_ngram], see `ngram_probabilities`.

    Returns:
        The order, and the lengths in words, int64[n, most words in a row] each. Values beyond the number of words of a
        row are undefined.
    """
    width = int(num_words.max(initial=0))
    index = np.arange(width)
    # The word's number in the low bits makes keys unique, so that a row does not depend on the others of the batch.
    keys = random_integers[:width].T << np.uint64(32) | index.astype(np.uint64)
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
    """Choose the tokens that BERT predicts, given the order in which words are visited and the span length of each.

    Args:
        maskable, starts, num_predictions: see `choose_masked`.
        order, ngrams: int64[n, most words in a row], the results of `random_order`.
        max_ngram: maximum number of words in a span.

    Returns:
        bool[n, length], True for the tokens to predict.
    """
    num_words, word_of = starts.sum(axis=1), np.maximum(starts.cumsum(axis=1) - 1, 0)
    before = maskable.cumsum(axis=1)
    # begins[r, w]: tokens of text before word w; beyond the last word, all of them
    begins = np.repeat(before[:, -1:], order.shape[1] + max_ngram, axis=1)
    rows, columns = np.nonzero(starts)
    begins[rows, word_of[rows, columns]] = before[rows, columns] - 1
    covered = np.zeros(begins.shape, bool)
    # First decide all words that certainly fit, together; then, with few predictions left, one at a time.
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
    tokens: np.ndarray, masked: np.ndarray, random_integers: np.ndarray, mask_id: int, vocab_size: int
) -> np.ndarray:
    """Replace 80 % of the tokens to predict by [MASK] and 10 % by a random id. The others stay unchanged.

    Args:
        tokens: int64[n, length], n rows of token ids, changed in place.
        masked: bool[n, length], True for the tokens to predict.
        random_integers: uint64[at least the number of masked tokens in a row, n], uniform on [0, 2**32).
        mask_id, vocab_size: id of [MASK], and number of ids.

    Returns:
        `tokens`.
    """
    rows, columns = np.nonzero(masked)
    number = np.cumsum(masked, axis=1)[rows, columns] - 1
    drawn = random_integers[number, rows].astype(np.int64)
    mask_below, keep_below, end = int(0.8 * 2**32), int(0.9 * 2**32), 1 << 32
    any_id = (drawn - keep_below) * vocab_size // (end - keep_below)
    kept = np.where(drawn < keep_below, tokens[rows, columns], any_id)
    tokens[rows, columns] = np.where(drawn < mask_below, mask_id, kept)
    return tokens
