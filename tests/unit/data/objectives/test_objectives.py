"""Objectives on one token stream: docstrings, closed forms, every token once an epoch, order, buckets."""

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lm_experiments_tools.config.objectives import PAPER_DENOISERS
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.mixture import Mixture
from lm_experiments_tools.data.objectives.causal_lm import CausalLM
from lm_experiments_tools.data.objectives.mlm import MaskedLM
from lm_experiments_tools.data.objectives.objective import Objective, TokenIds
from lm_experiments_tools.data.objectives.prefix_lm import PrefixLM
from lm_experiments_tools.data.objectives.span_corruption import SpanCorruption
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.data.objectives.ul2 import UL2, build_schedule, mode_ids
from lm_experiments_tools.data.order import Buckets, LongestFirst, epoch_shift, row_generators
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.t5_data import build_objective, training_dataset
from tests.helpers.vocabulary_toys import train_vocabulary

SENTINELS = np.arange(9_999, 9_899, -1)
MODES = {"R": 9_890, "X": 9_891, "S": 9_892}
SPECIAL = 9_890  # ids from here on, and below 10, are no text


@dataclass(frozen=True)
class Ids(TokenIds):
    """Ids with UL2's mode tokens."""

    size: int = 10_000
    sentinel_ids: np.ndarray = field(default_factory=lambda: SENTINELS)
    modes: dict[str, int] = field(default_factory=lambda: MODES)

    def find(self, piece):
        return self.modes.get({"[NLU]": "R", "[NLG]": "X", "[S2S]": "S"}[piece])


def source(tokens, name="x"):
    return SimpleNamespace(tokens=np.asarray(tokens, np.uint16), fingerprint=name)


def text(num_tokens):
    """Every token is its own id, 10, 11, ..., so that a token can be recognised wherever it turns up."""
    return source(np.arange(10, 10 + num_tokens))


def dataset(kind, tokens, seed=0, ids=None, **settings):
    return Dataset(TokenRows(tokens, kind.create(ids or Ids(), **settings), seed))


def span_corruption(tokens, **options):
    return dataset(SpanCorruption, tokens, **{"input_length": 32, **options})


def prefix_lm(tokens, **options):
    return dataset(PrefixLM, tokens, **{"input_length": 32, **options})


def ul2(tokens, **options):
    return dataset(UL2, tokens, **{"input_length": 48, **options})


def causal_lm(tokens, **options):
    return dataset(CausalLM, tokens, **{"input_length": 32, "model_kind": "decoder", **options})


def causal_lm_of_a_decoder_of_two(tokens, **options):
    return causal_lm(tokens, model_kind="encoder-decoder", **options)


MASKED = Ids(mask_id=9_999, special_ids=[0, 1, *SENTINELS.tolist(), *range(2, 10)])


def mlm(tokens, **options):
    return dataset(MaskedLM, tokens, **{"input_length": 32, "model_kind": "encoder", "ids": MASKED, **options})


def in_buckets(tokens, seed=0, bucket_rows=4, **options):
    data = ul2(tokens, seed=seed, **options)
    return data.arranged(Buckets(data.lengths, len(data), bucket_rows, seed))


OBJECTIVES = [span_corruption, prefix_lm, ul2, causal_lm, causal_lm_of_a_decoder_of_two, mlm, in_buckets]
every_objective = pytest.mark.parametrize("make", OBJECTIVES)


def tokens_of(make, batch):
    """The text behind each row of a batch."""
    rows = []
    for inputs, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        if make is mlm:
            rows.append([i if label == -100 else label for i, label in zip(inputs, labels, strict=True)])
        elif make in (causal_lm, causal_lm_of_a_decoder_of_two):
            rows.append(labels)
        else:
            rows.append([*inputs, *labels])
    return [[token for token in row if 10 <= token < SPECIAL] for row in rows]


def same(first, second):
    return first.keys() == second.keys() and all((np.asarray(first[k]) == np.asarray(second[k])).all() for k in first)


def in_epoch_that_starts_at(dataset, token, wanted):
    """The rows of an epoch that starts at `token`, once `wanted` is among them."""
    rows_of_tokens = dataset.members[0]
    for epoch in range(2000):
        if epoch_shift(rows_of_tokens.seed, epoch, rows_of_tokens.num_tokens) == token:
            batch = dataset.batch(np.arange(len(dataset)) + epoch * len(dataset))
            rows = [[values[i].tolist() for values in batch.values()] for i in range(len(dataset))]
            if wanted in rows:
                return rows
    raise AssertionError(f"{wanted} never came up")


# ---- worked examples


def test_worked_example_of_prefix_lm():
    objective = PrefixLM.create(Ids(), 6)
    rng = SimpleNamespace(integers=lambda low, high: {(1, 5): 3}[low, high])
    example = objective.example(np.array([10, 11, 12, 13, 14]), rng)
    assert {name: ids.tolist() for name, ids in example.items()} == {
        "input_ids": [10, 11, 12], "labels": [13, 14]
    }  # fmt: skip


def test_worked_example_of_ul2():
    ids = Ids(modes={"R": 90, "X": 91, "S": 92}, sentinel_ids=np.array([99, 98]))
    data = ul2(source(range(10, 19)), input_length=6, target_length=4, denoisers=("R:2:0.4", "S:0.5"), ids=ids)
    rows = in_epoch_that_starts_at(data, 0, [[92, 15, 16, 1, 0, 0], [1, 1, 1, 1, 0, 0], [17, 18, 1, -100]])
    assert [[90, 10, 11, 12, 99, 1], [1] * 6, [99, 13, 14, 1]] in rows and len(rows) == 2


def test_worked_examples_of_causal_lm():
    tokens = source(range(10, 20))
    first = [[13, 14, 15, 16, 17, 18], [1] * 6, [-100, 14, 15, 16, 17, 18]]
    rows = in_epoch_that_starts_at(causal_lm(tokens, input_length=6), 4, first)
    assert [[18, 19, 10, 11, 12, 13], [1] * 6, [-100, 19, 10, 11, 12, 13]] in rows and len(rows) == 2
    rows = in_epoch_that_starts_at(
        causal_lm(tokens, input_length=5, model_kind="encoder-decoder"), 4, [[1], [1], [14, 15, 16, 17, 18]]
    )
    assert [[1], [1], [19, 10, 11, 12, 13]] in rows and len(rows) == 2


def test_worked_example_of_masked_lm():
    random = np.array([0.5, 0.1, 0.13, 0.14, 0.1, 0.9])
    ids = TokenIds(100, mask_id=99, special_ids=[*range(10), *range(20, 99)])
    example = MaskedLM.create(ids, 6, model_kind="encoder").masked(np.array([[10, 11, 12, 13, 1, 14]]), random[None])
    assert example["input_ids"].tolist() == [[10, 99, 16, 13, 1, 14]]
    assert example["labels"].tolist() == [[-100, 11, 12, 13, -100, -100]]


# ---- the token stream


@every_objective
@pytest.mark.parametrize("num_tokens", [33, 34, 997])
def test_every_token_is_read_exactly_once_an_epoch(make, num_tokens):
    data = make(text(num_tokens))
    for epoch in range(3):
        batch = data.batch(np.arange(len(data)) + epoch * len(data))
        counts = Counter(token for row in tokens_of(make, batch) for token in row)
        assert set(counts) == set(range(10, 10 + num_tokens)) and set(counts.values()) == {1}


@every_objective
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 20])
def test_less_than_a_row_is_one_padded_example(make, num_tokens):
    data = make(text(num_tokens))
    assert len(data) == 1
    for row in tokens_of(make, data.batch(np.arange(4))):
        assert sorted(row) == list(range(10, 10 + num_tokens))


@every_objective
def test_an_example_does_not_depend_on_its_batch(make):
    data = make(text(1000))
    samples = np.array([*range(70, 0, -1), 5, 0, 999_999, 2 * len(data) + 3, len(data) - 1, 7, 5])
    whole = data.batch(samples)
    for place, sample in [*enumerate(samples.tolist())][60:]:
        assert same(make(text(1000)).batch(np.array([sample])), {k: v[place : place + 1] for k, v in whole.items()})


@every_objective
def test_masks_and_labels_say_what_is_padding(make):
    data = make(text(1000))
    batch = data.batch(np.arange(len(data)))
    assert (batch["attention_mask"] == (batch["input_ids"] != 0)).all()
    for name in ("attention_mask", "labels"):
        used = batch[name] != -100 if name == "labels" else batch[name] == 1
        if name == "attention_mask" or make is not mlm:
            last = used.shape[1] - used[:, ::-1].argmax(axis=1)
            context = make is causal_lm and name == "labels"
            assert (used.sum(axis=1) == last - context).all()  # nothing but padding after the last token


@every_objective
def test_epochs_and_seeds_differ(make):
    data, other = make(text(1000)), make(text(1000), seed=1)
    here = np.arange(len(data) - 1)
    first = data.batch(here)
    for changed in (data.batch(here + len(data)), other.batch(here)):
        assert ((first["labels"] == changed["labels"]) | (first["labels"] == -100)).all(axis=1).mean() < 0.2


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (span_corruption, {"input_length": 33, "noise_density": 0.3, "mean_noise_span_length": 4.0}),
        (span_corruption, {"ids": Ids(eos_id=2)}),
        (span_corruption, {"ids": Ids(sentinel_ids=SENTINELS[:50])}),
        (prefix_lm, {"input_length": 33, "target_length": 16, "ids": Ids(eos_id=2)}),
        (ul2, {"input_length": 49, "target_length": 40, "denoisers": PAPER_DENOISERS[:6], "mode_tokens": False}),
        (ul2, {"denoisers": PAPER_DENOISERS[::-1], "ids": Ids(modes={**MODES, "S": 9_893})}),
        (causal_lm, {"input_length": 33, "model_kind": "encoder-decoder", "ids": Ids(pad_id=2)}),
        (mlm, {"input_length": 33, "mlm_probability": 0.2, "ids": Ids(mask_id=9_998)}),
        (in_buckets, {"bucket_rows": 8, "denoisers": PAPER_DENOISERS[:6]}),
    ],
)
def test_fingerprint_names_data_objective_and_seed(make, changes):
    single = [{name: value} for name, value in changes.items()]
    prints = [make(text(1000), **change).fingerprint for change in [{}, {"seed": 1}, *single]]
    prints += [make(source(np.arange(10, 1010), "other")).fingerprint]
    assert len(set(prints)) == len(prints) and make(text(1000)).fingerprint == prints[0]


def test_fingerprints_differ_between_objectives():
    assert len({make(text(1000)).fingerprint for make in OBJECTIVES}) == len(OBJECTIVES)


@pytest.mark.parametrize("make", [span_corruption, ul2, mlm])
def test_examples_of_many_rows_are_those_of_each_row(make):
    data = make(text(3000))
    for member in data.members[0].objective.members:
        for length in (member.row_length, 7, 2, 1):
            rows = np.random.default_rng(0).integers(10, SPECIAL, (50, length))
            key, epochs, numbers = 5, np.full(50, 3), np.arange(50)
            many = member.examples(rows, row_generators(key, epochs, numbers))
            for n in numbers:
                one = slice(n, n + 1)
                single = member.examples(rows[one], row_generators(key, epochs[one], numbers[one]))
                assert same({name: values[0] for name, values in single.items()}, {k: v[n] for k, v in many.items()})


# ---- closed forms


def chi_square(counts, expected):
    return ((np.asarray(counts) - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(("density", "room", "shortest"), [(0.5, 21, 1), (0.25, 21, 10), (0.5, 11, 11)])
def test_prefixes_are_uniform(density, room, shortest):
    objective, rows = PrefixLM.create(Ids(), 22, room, noise_density=density), np.arange(20_000)
    tokens = np.full((len(rows), 21), 20)
    prefixes, targets = objective.lengths(tokens, row_generators(3, np.zeros_like(rows), rows))
    counts = np.bincount(prefixes, minlength=21)[shortest:]
    assert prefixes.min() == shortest == objective.shortest(21) and prefixes.max() == 20
    assert (prefixes + targets == 21).all()
    assert chi_square(counts, 20_000 / len(counts)) < 45.3  # at most 19 degrees of freedom, p = 0.0006


def test_masked_tokens_have_the_rates_of_bert():
    tokens = np.random.default_rng(0).integers(10, SPECIAL, 300_000)
    data = mlm(source(np.where(np.arange(300_000) % 50 == 7, 1, tokens)), input_length=100, mlm_probability=0.2)
    batch = data.batch(np.arange(len(data)))
    inputs, labels = batch["input_ids"], batch["labels"]
    chosen = labels != -100
    assert not (labels == 1).any()  # every fiftieth token is EOS
    kinds = {"mask": inputs == 9_999, "kept": inputs == labels}
    kinds["random"] = ~(kinds["mask"] | kinds["kept"])
    possible = 300_000 * 49 // 50
    for name, share in (("mask", 0.8), ("random", 0.1), ("kept", 0.1)):
        expected = 0.2 * share
        error = (expected * (1 - expected) / possible) ** 0.5
        assert abs((kinds[name] & chosen).sum() / possible - expected) < 4 * error, name
    replaced = inputs[kinds["random"] & chosen]
    assert replaced.min() >= 10 and replaced.max() < 9_900
    counts = np.histogram(replaced, bins=19, range=(10, 9_900))[0]
    assert chi_square(counts, replaced.size / 19) < 44  # 18 degrees of freedom, p = 0.0006


def test_denoisers_have_their_shares_and_their_modes():
    data = ul2(source(np.full(60_000, 20)))
    batch = data.batch(np.arange(len(data)))
    counts = Counter(batch["input_ids"][:, 0].tolist())
    assert [round(counts[mode] / len(data), 2) for mode in MODES.values()] == [0.27, 0.53, 0.2]


@pytest.mark.parametrize(
    ("weights", "turn"),
    [(["1"], [0]), (["2", "2"], [0, 1]), (["1", "1", "0.5"], [0, 1, 2, 0, 1]), (["0.3", "0.1"], [0, 0, 1, 0])],
)
def test_a_turn_has_exact_shares(weights, turn):
    found = build_schedule([Fraction(weight) for weight in weights])
    assert sorted(found.tolist()) == sorted(turn)


def test_denoisers_read_as_much_as_fits():
    """The lengths that t5 prints for 512 inputs, less one for the mode token; X:3:0.5 ends where sentinels do."""
    data = ul2(source(np.full(60_000, 20)), input_length=513, target_length=512)
    objective = data.members[0].objective
    rows = {str(spec): member.row_length for spec, member in zip(objective.specs, objective.members, strict=True)}
    assert rows == {
        "R:3:0.15": 568, "R:8:0.15": 588, "X:3:0.5": 602, "X:8:0.5": 908, "X:64:0.15": 600, "X:64:0.5": 1006,
        "S:0.25": 511,
    }  # fmt: skip
    labels = data.batch(np.arange(len(data)))["labels"]
    assert np.isin(labels, SENTINELS).sum(axis=1).max() == 100
    short = ul2(source(np.full(60_000, 20)), input_length=513, target_length=114).members[0].objective.members
    assert all(member.target_length <= 114 for member in short) and short[0].row_length == 568


# ---- buckets


class EvenTokens(Objective):
    """An objective whose lengths depend on the tokens."""

    def example(self, tokens, rng):
        return {"input_ids": tokens[tokens % 2 == 0], "labels": tokens[tokens % 3 == 0]}


def test_lengths_are_those_of_the_samples():
    members = [ul2(text(997)).members[0], ul2(text(500)).members[0]]
    mixture = Dataset(members, Mixture([len(member) for member in members]))
    for data in (prefix_lm(text(997)), ul2(text(997)), mixture, dataset(EvenTokens, text(997), input_length=32)):
        samples = np.arange(2 * len(data))
        batch = data.batch(samples)
        lengths = np.stack([batch["attention_mask"].sum(axis=1), (batch["labels"] != -100).sum(axis=1)])
        np.testing.assert_array_equal(data.lengths(samples), lengths)


@pytest.mark.parametrize("task", ["prefix_lm", "ul2"])
def test_a_step_holds_the_same_samples_however_it_is_split(tmp_path, task):
    words = vocabulary(tmp_path)
    step = {}
    for batch_size, accumulation, world_size in ((32, 1, 1), (16, 2, 1), (8, 1, 4), (4, 4, 2)):
        args = T5PretrainingArgs(
            data_path=("x",), task=task, input_seq_len=64, model_cfg="x", lr=1.0, batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        data = mixed(args, words, [source(np.full(9000, 20))], world_size)
        loaders = [TrainLoader(data, batch_size * accumulation, rank, world_size) for rank in range(world_size)]
        step[batch_size] = torch.stack([next(loader)["labels"] for loader in loaders], 1).flatten(0, 1)
        for loader in loaders:
            loader.close()
    assert all(torch.equal(step[32], other) for other in step.values())


def test_samples_to_validate_on_are_a_random_choice_and_do_not_depend_on_the_batch():
    data = prefix_lm(source(np.full(300_000, 20)), input_length=128, target_length=128)
    chosen = data.arranged(LongestFirst(data.lengths, 64))
    found = (chosen.batch(np.arange(64))["labels"] != -100).sum(axis=1)
    expected = np.sort(data.lengths(np.arange(64))[1])[::-1]  # what needs most memory comes first
    np.testing.assert_array_equal(found, expected)
    assert len(set(found.tolist())) > 25 and len(LongestFirst(data.lengths, len(data))) == len(data)


# ---- ids out of the vocabulary, and the registry


def mixed(args, words, tokens, world_size=1):
    return training_dataset(args, build_objective(args, words, args.objective().models[0]), tokens, world_size)


def vocabulary(folder, *pieces, extra_ids=100):
    lines = [f"word{i} number{i * 7 % 101}" for i in range(300)]
    model = train_vocabulary(folder / "v.model", lines, 80, user_defined_symbols=list(pieces))
    return Tokenizer.load(model, extra_ids)


def test_mode_tokens_and_mask_are_pieces_of_the_vocabulary_where_it_has_them(tmp_path):
    words = vocabulary(tmp_path, "[NLU]", "[NLG]", "[S2S]", "<mask>")
    assert [words.piece(index) for index in mode_ids(words).values()] == ["[NLU]", "[NLG]", "[S2S]"]
    assert words.piece(MaskedLM.create(words, 8).mask_id) == "<mask>"


def test_else_they_are_sentinels_the_modes_from_the_last_one_down(tmp_path):
    words = vocabulary(tmp_path, "[NLU]", "[NLG]")  # not all three
    assert [words.piece(i) for i in mode_ids(words).values()] == [f"<extra_id_{k}>" for k in (99, 98, 97)]
    assert words.piece(MaskedLM.create(words, 8).mask_id) == "<extra_id_0>"
    args = T5PretrainingArgs(data_path=("x",), task="ul2", input_seq_len=64, model_cfg="x", lr=1.0)
    data = mixed(args, words, [source(np.full(9000, 20))])
    assert data.members[0].objective.members[0].sentinel_ids.tolist() == words.sentinel_ids[:97].tolist()
    ids = data.batch(np.arange(len(data)))
    assert set(ids["input_ids"][:, 0].tolist()) == set(mode_ids(words).values())
    assert not np.isin(ids["input_ids"][:, 1:], list(mode_ids(words).values())).any()


def test_a_vocabulary_without_room_for_them_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"nor more than 3 sentinels .*--no_mode_tokens"):
        mode_ids(vocabulary(tmp_path, extra_ids=3))
    with pytest.raises(UserError, match=r"neither \[MASK\] nor <mask> nor a sentinel"):
        MaskedLM.create(vocabulary(tmp_path, extra_ids=0), 8)


# ---- refusals


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (prefix_lm, {"input_length": 2}, "--input_seq_len is"),
        (prefix_lm, {"target_length": 1}, "--input_seq_len is"),
        (ul2, {"input_length": 3}, "--input_seq_len"),
        (
            ul2,
            {"input_length": 8, "target_length": 2},
            "Spans of 3 tokens in 0.15 of the text need a larger --input_seq_len",
        ),
        (causal_lm, {"input_length": 1}, "rows of 1 tokens cannot be made for --input_seq_len 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, options, sentence):
    with pytest.raises(UserError, match=sentence):
        make(text(1000), **options)


@every_objective
def test_no_tokens_and_foreign_tokens_are_refused(make):
    with pytest.raises(UserError, match="empty"):
        make(text(0))
    with pytest.raises(UserError, match="id 60000, but the vocabulary has ids 0 to 9999"):
        make(source([60_000] * 50))
