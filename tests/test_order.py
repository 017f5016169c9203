"""Orders: permutations that any rank evaluates anywhere, the same for ever, as good as numpy's shuffle."""

from __future__ import annotations

import itertools
import math
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pimm_ray.elastic.order import Order, _alias_table, _masses, make_order, mix

IntArray = npt.NDArray[np.int64]
WEIGHTS = [0, 1, 2, 3, 4, 0.5, 1e-3, 10]
SEEDS = st.integers(-(2**200), 2**200)
PERMUTATIONS: st.SearchStrategy[tuple[str, dict[str, int]]] = st.one_of(
    st.just(("shuffle", {})),
    st.just(("sequential", {})),
    st.tuples(st.just("block"), st.fixed_dictionaries({"block": st.integers(1, 700), "group": st.integers(1, 40)})),
)
EVERY_ORDER: list[tuple[str, dict[str, Any]]] = [
    ("shuffle", {}),
    ("block", {"block": 64, "group": 4}),
    ("sequential", {}),
    ("weighted", {"weights": WEIGHTS}),
]


def whole(order: Order) -> IntArray:
    return order(np.arange(order.length))


# Each sample once


@settings(max_examples=300, deadline=None)
@given(kind=PERMUTATIONS, length=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_an_epoch_has_each_sample_exactly_once(
    kind: tuple[str, dict[str, int]], length: int, seed: int, epoch: int
) -> None:
    name, parameters = kind
    order = make_order(name, length=length, seed=seed, epoch=epoch, **parameters)
    assert np.array_equal(np.sort(whole(order)), np.arange(length))


@pytest.mark.parametrize("length", [*range(1, 70), 9973, 2**16, 257**2, 1_000_003])
@pytest.mark.parametrize("name", ["shuffle", "block"])
def test_lengths_around_squares_primes_and_powers_of_two_are_permuted_too(name: str, length: int) -> None:
    order = make_order(name, length=length, seed=length, epoch=0, block=5, group=3)
    assert np.array_equal(np.sort(whole(order)), np.arange(length))


@pytest.mark.parametrize("length", [2**31 - 1, 2**32, 10**12, 2**53 + 1, (2**31 - 1) ** 2, 2**62 - 1, 2**62])
def test_a_huge_shuffle_stays_inside_and_repeats_nothing_it_was_seen_to_give(length: int) -> None:
    order = make_order("shuffle", length=length, seed=1, epoch=0)
    window = 20_000
    starts = (0, length // 3, length - window)
    samples = np.concatenate([order(start + np.arange(window)) for start in starts])
    assert samples.min() >= 0
    assert samples.max() < length
    assert np.unique(samples).size == samples.size
    assert samples.max() - samples.min() > 0.99 * length


@pytest.mark.parametrize("length", [10**12, 10**12 - 17, 2**62, 2**62 - 1023, 16 * 1024 * 10**6 + 1])
def test_a_huge_block_order_gives_each_sample_of_the_blocks_of_a_group_once(length: int) -> None:
    block, group = 1024, 16
    order = make_order("block", length=length, seed=3, epoch=1)
    seen: set[int] = set()
    for number in range(4):
        samples = order(number * block * group + np.arange(block * group))
        blocks = np.unique(samples // block)
        assert np.array_equal(np.sort(samples), (blocks[:, None] * block + np.arange(block)).ravel())
        assert seen.isdisjoint(blocks.tolist())
        seen.update(blocks.tolist())


# Slices


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(EVERY_ORDER), length=st.integers(1, 30_000), seed=SEEDS, cuts=st.lists(st.integers(0, 30_000))
)
def test_slices_cut_anywhere_make_up_the_whole(
    kind: tuple[str, dict[str, Any]], length: int, seed: int, cuts: list[int]
) -> None:
    name, parameters = kind
    order = make_order(name, length=length, seed=seed, epoch=0, **parameters)
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    slices = [order(np.arange(start, stop)) for start, stop in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(slices), whole(order))


@pytest.mark.parametrize(("name", "parameters"), EVERY_ORDER)
def test_each_position_is_looked_up_on_its_own_in_any_sequence_and_shape(name: str, parameters: dict[str, Any]) -> None:
    order = make_order(name, length=20_011, seed=5, epoch=0, **parameters)
    expected = whole(order)
    positions = np.random.default_rng(0).integers(0, order.length, (3, 7_001))
    assert np.array_equal(order(positions), expected[positions])
    assert np.array_equal(order(positions.astype(np.uint16)), expected[positions.astype(np.uint16)])
    assert np.array_equal(order(positions.T), expected[positions].T)
    assert np.array_equal(order(range(10, 0, -1)), expected[10:0:-1])
    assert order(17) == expected[17]
    assert order([]).shape == (0,)
    assert order(positions).dtype == np.int64


def test_the_positions_passed_in_are_left_as_they_were() -> None:
    for name, parameters in EVERY_ORDER:
        positions = np.arange(1000, dtype=np.uint64)
        make_order(name, length=1000, seed=0, epoch=0, **parameters)(positions)
        assert np.array_equal(positions, np.arange(1000)), name


# A pure function of (id, seed, epoch, length)


@pytest.mark.parametrize(("name", "parameters"), [kind for kind in EVERY_ORDER if kind[0] != "sequential"])
def test_another_seed_epoch_or_length_gives_an_unrelated_order(name: str, parameters: dict[str, Any]) -> None:
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63, -(2**63), 2**64 - 1, 2**64, 2**64 + 1, -(2**64), 7 * 2**200, 2**200]
    variants = [(seed, 0, 4000) for seed in seeds] + [(0, epoch, 4000) for epoch in (1, 2, 2**20, 2**64)]
    variants += [(0, 0, 4001), (1, 0, 4001)]
    orders = [
        whole(make_order(name, length=length, seed=seed, epoch=epoch, **parameters))[:4000]
        for seed, epoch, length in variants
    ]
    chance = float(np.square(np.array(WEIGHTS) / sum(WEIGHTS)).sum()) if name == "weighted" else 1 / 4000
    limit = 4000 * chance + 6 * math.sqrt(4000 * chance)
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one == other) <= limit


@pytest.mark.parametrize(("name", "parameters"), EVERY_ORDER)
def test_an_order_made_again_for_another_epoch_or_in_another_process_is_the_same(
    name: str, parameters: dict[str, Any]
) -> None:
    first = make_order(name, length=777, seed=-3, epoch=0, **parameters)
    later = make_order(name, length=777, seed=-3, epoch=5, **parameters)
    expected = whole(first)
    assert np.array_equal(whole(first.for_epoch(5)), whole(later))
    assert np.array_equal(whole(first), expected), "for_epoch must leave the order that it came from alone"
    assert np.array_equal(whole(pickle.loads(pickle.dumps(later))), whole(later))
    assert (later.id, later.length, later.seed, later.epoch) == (first.id, 777, -3, 5)


def test_other_parameters_have_another_id_and_an_unrelated_order() -> None:
    made = [
        make_order("block", length=4000, seed=0, epoch=0, block=b, group=g) for b, g in [(64, 4), (64, 5), (32, 8)]
    ] + [make_order("shuffle", length=4000, seed=0, epoch=0), make_order("sequential", length=4000, seed=0, epoch=0)]
    assert [order.id for order in made] == [
        "block-v1(block=64,group=4)",
        "block-v1(block=64,group=5)",
        "block-v1(block=32,group=8)",
        "shuffle-v1",
        "sequential-v1",
    ]
    for one, other in itertools.combinations(map(whole, made), 2):
        assert np.count_nonzero(one == other) < 10
    one, other = (
        whole(make_order("weighted", length=10_000, seed=0, epoch=0, weights=[1] * 99 + [last])) for last in (1, 2)
    )
    assert np.count_nonzero(one == other) < 160


def test_the_id_of_a_weighted_order_tells_weights_apart_but_not_their_scale() -> None:
    def name_of(weights: npt.ArrayLike) -> str:
        return make_order("weighted", length=10, seed=0, epoch=0, weights=weights).id

    reference = name_of(WEIGHTS)
    assert name_of(np.array(WEIGHTS) * 2.0**-900) == reference
    assert name_of(np.array(WEIGHTS) * 2.0**900) == reference
    changed = [[*WEIGHTS[:-1], 10 + 1e-9], WEIGHTS[::-1], [*WEIGHTS, 0], WEIGHTS[:-1]]
    assert len({reference, *map(name_of, changed)}) == 5


GOLDEN: list[tuple[str, int, dict[str, Any], str, list[int]]] = [
    ("shuffle", 10, {}, "shuffle-v1", [0, 7, 9, 1, 5, 4, 8, 3, 6, 2]),
    ("shuffle", 10**7, {}, "shuffle-v1", [7998561, 9430204, 9562262, 9249223, 8662074, 9395574, 2001173, 4326201]),
    (
        "shuffle",
        10**12,
        {},
        "shuffle-v1",
        [614257203925, 750343727276, 908103668390, 91323655138, 350864917495, 123371793071, 471133915409, 530754766402],
    ),
    (
        "shuffle",
        2**62,
        {},
        "shuffle-v1",
        [
            2636868666411384724,
            3030070095517961953,
            1961166179464561149,
            550924315363890625,
            4375209563167510544,
            10076239600780531,
            170861036242616758,
            1978020399195828100,
        ],
    ),
    (
        "block",
        23,
        {"block": 4, "group": 2},
        "block-v1(block=4,group=2)",
        [20, 21, 12, 15, 13, 22, 14, 0, 11, 1, 3, 2, 8, 10, 9, 17, 6, 4, 19, 16, 18, 5, 7],
    ),
    (
        "block",
        10**12 + 5,
        {},
        "block-v1(block=1024,group=16)",
        [
            270254164046,
            493037487803,
            361546142605,
            761916851269,
            537276629095,
            798043882218,
            161789446225,
            161789446846,
        ],
    ),
    ("sequential", 10**12, {}, "sequential-v1", [0, 1, 2, 3, 500000000000, 500000000001, 999999999998, 999999999999]),
    ("weighted", 10**12, {"weights": WEIGHTS}, "weighted-v1(5c9358a3991a9873)", [7, 3, 7, 3, 7, 4, 7, 7]),
    (
        "weighted",
        10**12,
        {"weights": range(1000)},
        "weighted-v1(d566408d1ee8ba12)",
        [854, 500, 333, 814, 443, 138, 652, 985],
    ),
]


@pytest.mark.parametrize(("name", "length", "parameters", "order_id", "samples"), GOLDEN)
def test_the_orders_of_version_1_are_these_for_ever(
    name: str, length: int, parameters: dict[str, Any], order_id: str, samples: list[int]
) -> None:
    order = make_order(name, length=length, seed=7, epoch=3, **parameters)
    positions = range(length) if length < 30 else [0, 1, 2, 3, length // 2, length // 2 + 1, length - 2, length - 1]
    assert order.id == order_id
    assert order(positions).tolist() == samples


# Quality, beside numpy's permutation. Seeds are fixed: a score of 5 standard deviations is a fault, never chance.


def score(counts: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Chi-square of counts against expected ones, in standard deviations from its mean."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(np.broadcast_to(expected, np.shape(counts)))
    assert expected.min() >= 5, "too few draws for the chi-square distribution"
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@cache
def ours(length: int, draws: int, name: str = "shuffle", **parameters: int) -> IntArray:
    first = make_order(name, length=length, seed=11, epoch=0, **parameters)
    return np.stack([whole(first.for_epoch(epoch)) for epoch in range(draws)])


@cache
def numpys(length: int, draws: int) -> IntArray:
    return np.stack([np.random.default_rng([11, draw]).permutation(length) for draw in range(draws)])


Maker = Callable[[int, int], IntArray]
BOTH = pytest.mark.parametrize("maker", [ours, numpys])


@BOTH
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_each_of_all_orders_of_few_samples_is_equally_likely(maker: Maker, length: int) -> None:
    orders = maker(length, 6000)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == math.factorial(length)
    assert abs(score(list(counts.values()), 6000 / len(counts))) < 5


@BOTH
def test_half_of_the_orders_are_odd_even_on_odd_squares(maker: Maker) -> None:
    orders = maker(9, 1000)
    inversions = sum((orders[:, i] > orders[:, j]) for i, j in itertools.combinations(range(9), 2))
    assert abs(np.count_nonzero(inversions % 2) - 500) < 5 * math.sqrt(250)


@BOTH
@pytest.mark.parametrize(("length", "draws"), [(5, 6000), (9, 1000), (17, 3000), (40, 3000), (257, 2000)])
def test_each_sample_stands_at_each_position_equally_often(maker: Maker, length: int, draws: int) -> None:
    orders = maker(length, draws)
    slots = np.bincount((np.arange(length) * length + orders).ravel(), minlength=length**2)
    # Each row and column adds up to `draws`, so only (length - 1)**2 of the length**2 cells are free.
    chi_square = ((slots - draws / length) ** 2 / (draws / length)).sum() * (length - 1) / length
    assert abs(chi_square - (length - 1) ** 2) < 5 * math.sqrt(2) * (length - 1)


@BOTH
@pytest.mark.parametrize(("length", "draws"), [(5, 6000), (6, 6000), (9, 1000), (17, 3000)])
def test_the_two_samples_at_two_positions_are_independent(maker: Maker, length: int, draws: int) -> None:
    orders = maker(length, draws)
    different = ~np.eye(length, dtype=bool).ravel()
    for one, other in [(0, 1), (0, length - 1), (length // 2 - 1, length // 2)]:
        pairs = np.bincount(orders[:, one] * length + orders[:, other], minlength=length**2)[different]
        assert abs(score(pairs, draws / pairs.size)) < 5


@BOTH
@pytest.mark.parametrize(("length", "draws"), [(5, 6000), (17, 3000), (40, 3000), (257, 2000), (2003, 400)])
def test_steps_between_neighbours_are_uniform(maker: Maker, length: int, draws: int) -> None:
    steps = np.diff(maker(length, draws)) % length
    counts = np.bincount(steps.ravel(), minlength=length)[1:]
    assert abs(score(counts, steps.size / counts.size)) < 5


@pytest.mark.parametrize("length", [100_003, 1_000_000])
@pytest.mark.parametrize("source", ["shuffle", "numpy"])
def test_a_long_order_has_no_serial_correlation_and_none_with_position_or_the_next_epoch(
    source: str, length: int
) -> None:
    if source == "shuffle":
        order = make_order("shuffle", length=length, seed=2, epoch=0)
        this, following = whole(order), whole(order.for_epoch(1))
    else:
        generator = np.random.default_rng(2)
        this, following = generator.permutation(length), generator.permutation(length)
    columns = math.isqrt(length - 1) + 1
    lags = (1, 2, 3, 32, 256, columns - 1, columns, columns + 1)
    neighbours = [(this[:-lag], this[lag:]) for lag in lags]
    for one, other in [*neighbours, (this, np.arange(length)), (this, following)]:
        assert abs(np.corrcoef(one, other)[0, 1]) * math.sqrt(length) < 5
    assert np.count_nonzero(this == following) < 10
    assert np.count_nonzero(this == np.arange(length)) < 10


@pytest.mark.parametrize("length", [10**7, 10**9, 10**12, 2**62])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_batches_of_a_huge_order_come_from_all_over_the_data(length: int, where: float) -> None:
    draws = 100_000
    samples = make_order("shuffle", length=length, seed=4, epoch=9)(
        min(int(length * where), length - draws) + np.arange(draws)
    )
    for bins in (samples // -(-length // 512), samples % 512, samples // 512 % 512):
        counts = np.bincount(bins, minlength=512)
        assert abs(score(counts, draws / 512)) < 5
    coarse = samples // -(-length // 64)
    assert abs(score(np.bincount(coarse[:-1] * 64 + coarse[1:], minlength=64**2), (draws - 1) / 64**2)) < 5


# Locality of the block order


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 5000), block=st.integers(1, 300), group=st.integers(1, 20), seed=SEEDS)
def test_a_reader_of_a_block_order_has_no_more_than_a_group_of_blocks_open(
    length: int, block: int, group: int, seed: int
) -> None:
    opened = whole(make_order("block", length=length, seed=seed, epoch=0, block=block, group=group)) // block
    first_use = {number: position for position, number in reversed(list(enumerate(opened.tolist())))}
    last_use = {number: position for position, number in enumerate(opened.tolist())}
    groups = sorted((first, last_use[number]) for number, first in first_use.items())
    for start in range(0, len(groups), group):
        together = groups[start : start + group]
        following = groups[start + group :]
        assert not following or max(last for _, last in together) < following[0][0]


def test_blocks_are_shuffled_and_so_are_the_samples_of_a_group() -> None:
    length, block, group, draws = 4 * 3 * 5, 5, 3, 3000
    orders = ours(length, draws, "block", block=block, group=group)
    blocks = np.sort(orders[:, : block * group] // block)[:, ::block]
    chosen: Counter[tuple[int, ...]] = Counter(map(tuple, blocks.tolist()))
    assert len(chosen) == math.comb(12, 3)
    assert abs(score(list(chosen.values()), draws / math.comb(12, 3))) < 5
    within = np.argsort(np.argsort(orders[:, : block * group]))
    ranks = np.bincount((np.arange(block * group) * block * group + within).ravel(), minlength=(block * group) ** 2)
    assert abs(score(ranks, draws / (block * group))) < 5


def test_the_groups_of_an_epoch_are_shuffled_each_in_its_own_way() -> None:
    block, group = 32, 32
    order = make_order("block", length=block * group * 40, seed=0, epoch=0, block=block, group=group)
    within = np.argsort(np.argsort(whole(order).reshape(40, block * group)))
    for one, other in itertools.combinations(within, 2):
        assert np.count_nonzero(one == other) < 12


def test_the_short_last_block_comes_anywhere_with_the_chance_of_any_block() -> None:
    length, block, group, draws = 7 * 4 + 3, 4, 3, 2000
    orders = ours(length, draws, "block", block=block, group=group)
    is_short = orders // block == 7
    first = np.argmax(is_short, axis=1)
    last = length - 1 - np.argmax(is_short[:, ::-1], axis=1)
    # Groups of 3, 3 and 2 blocks; the one with the short block is a sample shorter, and later ones start earlier.
    in_first, in_last = last < 3 * 4, first >= length - 2 * 4 + 1
    counts = [np.count_nonzero(in_first), draws - np.count_nonzero(in_first | in_last), np.count_nonzero(in_last)]
    assert abs(score(counts, [draws * 3 / 8, draws * 3 / 8, draws * 2 / 8])) < 5


# Weighted draws


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.floats(1e-300, 1e300), st.integers(1, 9).map(float)),
        min_size=1,
        max_size=60,
    ).filter(any)
)
def test_the_alias_table_holds_each_weight_exactly(weights: list[float]) -> None:
    masses = _masses(weights)
    capacity, remainder = divmod(int(masses.sum()), masses.size)
    assert remainder == 0
    assert 2**36 <= capacity <= 2**40
    threshold, alias = _alias_table(masses, capacity)
    assert threshold.min() >= 0
    assert threshold.max() <= capacity
    held = threshold.tolist()
    for column, other in enumerate(alias.tolist()):
        held[other] += capacity - int(threshold[column])
    assert held == masses.tolist()
    total = math.fsum(weight / max(weights) for weight in weights)
    for weight, mass in zip(weights, held, strict=True):
        wanted = weight / max(weights) / total
        assert abs(mass / (capacity * masses.size) - wanted) <= 2.0**-36 / masses.size * len(weights)
        assert weight or not mass


def test_samples_are_drawn_as_often_as_their_weights_say_and_never_at_weight_zero() -> None:
    weights = np.random.default_rng(0).random(500) ** 4 + 1e-2
    weights[::7] = 0
    draws = 1_000_000
    order = make_order("weighted", length=draws, seed=0, epoch=0, weights=weights)
    counts = np.bincount(whole(order), minlength=500)
    assert not counts[::7].any()
    wanted = weights > 0
    assert abs(score(counts[wanted], draws * weights[wanted] / weights.sum())) < 5


def test_a_draw_tells_nothing_about_the_next_one_or_the_next_epoch() -> None:
    weights = np.arange(1, 25)
    order = make_order("weighted", length=500_000, seed=1, epoch=0, weights=weights)
    this, following = whole(order), whole(order.for_epoch(1))
    expected = np.outer(weights, weights) / weights.sum() ** 2
    for other in (np.roll(this, 1), np.roll(this, 8), following):
        assert abs(score(np.bincount(this * 24 + other, minlength=24**2), expected.ravel() * this.size)) < 5


def test_column_and_level_of_a_draw_and_of_its_neighbours_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    # Few levels, which weights never give, show what 2**40 of them hide: a shared bit, a threshold off by one.
    masses = np.array([0, 1, 3, 4])
    monkeypatch.setattr("pimm_ray.elastic.order._masses", lambda weights: masses)
    samples = whole(make_order("weighted", length=100_000, seed=0, epoch=0, weights=[1.0]))
    expected = np.outer(masses, masses)[1:, 1:] / 64 * (samples.size - 1)
    pairs = np.bincount(samples[:-1] * 4 + samples[1:], minlength=16).reshape(4, 4)
    assert not pairs[0].any()
    assert not pairs[:, 0].any()
    assert abs(score(pairs[1:, 1:], expected)) < 5


def test_a_million_weights_of_very_different_size_are_kept_apart() -> None:
    weights = np.full(1_000_000, 1e-9)
    weights[123_456] = 1.0
    samples = make_order("weighted", length=200_000, seed=0, epoch=0, weights=weights)(np.arange(200_000))
    share = 1 / (1 + 1e-9 * 999_999)
    others = np.count_nonzero(samples != 123_456)
    assert abs(others - 200_000 * (1 - share)) < 5 * math.sqrt(200_000 * (1 - share))


# The hash


def test_mix_gives_these_values_for_ever() -> None:
    assert mix(0) == 0x5E41AB087439611E
    assert mix(1, 2) == 0xB1746F35E2AA4965
    assert mix(-(2**200), 5) == 0x1FF4948DBC756097


def test_mix_tells_apart_words_their_sign_size_number_and_sequence() -> None:
    edges = [0, 1, 2, -1, -2, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 2**64 + 1, -(2**64), 2**128 - 1, 2**128]
    words = [(), *((a,) for a in edges), *itertools.product(edges, repeat=2), *itertools.product(edges, repeat=3)]
    assert len({mix(*w) for w in words}) == len(words)
    assert all(0 <= mix(*w) < 2**64 for w in words)


def test_mix_flips_half_of_the_bits_when_one_is_flipped() -> None:
    flipped = np.zeros((64, 64))
    for word in range(200):
        for bit in range(64):
            change = mix(3, word) ^ mix(3, word ^ 1 << bit)
            flipped[bit] += [change >> out & 1 for out in range(64)]
    assert np.abs(flipped / 200 - 0.5).max() < 0.5 / math.sqrt(200) * 5


def test_mix_takes_numpy_integers_and_refuses_other_types() -> None:
    assert mix(np.int64(-5), np.uint8(3)) == mix(-5, 3)
    with pytest.raises(TypeError):
        mix(1.0)  # type: ignore[arg-type]


# Memory


@pytest.mark.parametrize("name", ["shuffle", "block", "sequential"])
@pytest.mark.parametrize("length", [10**7, 10**12])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.99])
def test_the_first_batch_at_any_position_needs_no_memory_to_speak_of(name: str, length: int, where: float) -> None:
    tracemalloc.start()
    order = make_order(name, length=length, seed=0, epoch=0)
    order(int(length * where) + np.arange(256))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("name", ["shuffle", "block", "sequential"])
def test_a_long_slice_needs_its_positions_its_result_and_little_more(name: str) -> None:
    order = make_order(name, length=10**12, seed=0, epoch=0)
    positions = np.arange(2_000_000)
    tracemalloc.start()
    order(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * positions.nbytes + 2_000_000


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "random"}, "unknown order 'random'; choose 'shuffle', 'block', 'sequential' or 'weighted'"),
        ({"length": 0}, "length must be in .1, .*got 0"),
        ({"length": 2**62 + 1}, "length must be in"),
        ({"length": 10.0}, "length must be an integer, got 10.0"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"epoch": -1}, "epoch must be at least 0, got -1"),
        ({"epoch": "3"}, "epoch must be an integer"),
        ({"name": "block", "block": 0}, "block must be in .1, .*got 0"),
        ({"name": "block", "group": -1}, "group must be in .1, .*got -1"),
        ({"name": "weighted"}, "needs weights; pass weights="),
        ({"weights": [1.0]}, "weights have no effect on order 'shuffle'"),
        ({"name": "weighted", "weights": []}, r"1-D array with one weight a sample, got shape \(0,\)"),
        ({"name": "weighted", "weights": [[1, 2]]}, r"got shape \(1, 2\)"),
        ({"name": "weighted", "weights": [1, -2, 3]}, "got -2.0 for sample 1"),
        ({"name": "weighted", "weights": [1, 2, math.nan]}, "got nan for sample 2"),
        ({"name": "weighted", "weights": [math.inf]}, "got inf for sample 0"),
        ({"name": "weighted", "weights": [0, 0]}, "all zero; give at least one sample"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_order(**{"name": "shuffle", "length": 10, "seed": 0, "epoch": 0, **arguments})


@pytest.mark.parametrize(("name", "parameters"), EVERY_ORDER)
def test_positions_outside_the_epoch_or_of_another_type_are_refused(name: str, parameters: dict[str, Any]) -> None:
    order = make_order(name, length=10, seed=0, epoch=0, **parameters)
    for positions in ([-1], [3, 10], [2**62], np.array([2**64 - 1], dtype=np.uint64)):
        with pytest.raises(IndexError, match=r"outside \[0, 10\); continue with the next epoch"):
            order(positions)
    for wrong in ([0.0], [True], ["1"]):
        with pytest.raises(TypeError, match="positions must be integers"):
            order(wrong)
