"""Orders of a data set: which sample stands at which position of an epoch.

An order is a pure function of (id, seed, epoch, length), evaluated at any positions without a table of the epoch: every
rank computes its own slice, and one integer, the position, is the whole cursor for any number of ranks. Integer
arithmetic modulo 2**64 only: no library's random generator and no rounding can change an order. Whoever changes what an
algorithm yields changes the version in its id.
"""

from __future__ import annotations

import copy
import hashlib
import math
import operator
from abc import ABC, abstractmethod
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

__all__ = ["Order", "make_order", "mix"]

_MAX_LENGTH = 2**62
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
# The temporaries of a chunk stay in a core's cache, and no call needs more memory than its result and one chunk's.
_CHUNK = 1 << 13

U64 = np.uint64
UintArray = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]


def mix(*words: SupportsIndex) -> int:
    """Hash integers of any size and sign, in order, to 64 bits.

    Args:
        *words: the integers; `mix(1, 2)`, `mix(2, 1)` and `mix(1 + (2 << 64))` are unrelated.

    Raises:
        TypeError: a word is not an integer.

    Example:
        >>> sample_seed = mix(seed, epoch, index)

    Anyone calls it. The finaliser of splitmix64, chained (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014). Not cryptographic.
    """
    state = 0
    for word in map(operator.index, words):
        limbs = word.bit_length() // 64 + 1
        # The number of limbs goes first, so that no two lists of words are absorbed alike.
        for limb in (limbs, *(word >> shift for shift in range(0, 64 * limbs, 64))):
            state = (state + limb + _GOLDEN) & _MASK
            state = (state ^ state >> 30) * _MULTIPLIER_1 & _MASK
            state = (state ^ state >> 27) * _MULTIPLIER_2 & _MASK
            state ^= state >> 31
    return state


def _mix_array(x: UintArray) -> UintArray:
    """The finaliser of splitmix64 on a fresh array, in place."""
    x ^= x >> U64(30)
    x *= U64(_MULTIPLIER_1)
    x ^= x >> U64(27)
    x *= U64(_MULTIPLIER_2)
    x ^= x >> U64(31)
    return x


def _permute(x: UintArray, size: int, key: UintArray) -> UintArray:
    """Apply the permutation of [0, size) that belongs to key: of shape (1,), or (len(x),) for one key an element.

    Feistel network (Luby, Rackoff 1988) on a rectangle of rows x columns >= size cells, cycle-walked back into
    [0, size) (Black, Rogaway: Ciphers with arbitrary finite domains, 2002). The rectangle has at most about
    2 * sqrt(size) cells too many, so walking is rare.
    """
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2  # with both sides odd the network makes even permutations only
    columns = -(-size // rows)
    y = _feistel(x, rows, columns, key)
    outside = np.flatnonzero(y >= U64(size))
    while outside.size:
        y[outside] = _feistel(y[outside], rows, columns, key if key.size == 1 else key[outside])
        outside = outside[y[outside] >= U64(size)]
    return y


def _feistel(x: UintArray, rows: int, columns: int, key: UintArray) -> UintArray:
    # The narrower the rectangle, the more rounds until pairs are uniform; an even number leaves the sides in place.
    rounds = max(8, 48 // columns.bit_length() // 2 * 2)
    left, right = np.divmod(x, U64(columns))
    n_left, n_right = U64(rows), U64(columns)
    for number in range(rounds):
        hashed = _mix_array(right + (key + U64(number * _GOLDEN & _MASK)))
        hashed >>= U64(32)
        hashed *= n_left
        hashed >>= U64(32)
        left += hashed
        # Modulo n_left: the difference, when negative, wraps to a huge number and loses.
        np.minimum(left, left - n_left, out=left)
        left, right, n_left, n_right = right, left, n_right, n_left
    left *= U64(columns)
    left += right
    return left


class Order(ABC):
    """The order of one epoch, made by `make_order`: call it with positions to get sample indices.

    Attributes:
        id: algorithm, version and parameters, for example "block-v1(block=1024,group=16)".
        length: positions of an epoch.
        seed, epoch: as given.
    """

    def __init__(self, order_id: str, length: int, seed: int, epoch: int) -> None:
        self.id = order_id
        self.length = length
        self.seed = _integer("seed", seed)
        self._set_epoch(epoch)

    def for_epoch(self, epoch: int) -> Order:
        """Return the order of another epoch (an integer from 0, else ValueError), sharing the tables of this one.

        Example:
            >>> following = order.for_epoch(order.epoch + 1)
        """
        other = copy.copy(self)
        other._set_epoch(epoch)
        return other

    def __call__(self, positions: npt.ArrayLike) -> IntArray:
        """Return the sample indices at these positions of the epoch.

        Args:
            positions: integers in [0, length), of any shape, in any sequence.

        Returns:
            int64 array of the same shape.

        Raises:
            TypeError: positions are not integers.
            IndexError: a position is outside [0, length).

        Example:
            >>> indices = order(np.arange(cursor, cursor + global_batch)[rank::world])
        """
        asked = np.asarray(positions)
        if asked.dtype.kind not in "iu" and asked.size:
            raise TypeError(f"positions must be integers, not {asked.dtype}; convert them with astype(numpy.int64)")
        if asked.size and (asked.min() < 0 or asked.max() >= self.length):
            raise IndexError(
                f"positions {asked.min()}..{asked.max()} reach outside [0, {self.length}); "
                "continue with the next epoch: order.for_epoch(epoch + 1)"
            )
        flat = asked.astype(np.uint64, copy=False).reshape(-1)
        indices = np.empty(flat.shape, dtype=np.int64)
        for start in range(0, flat.size, _CHUNK):
            indices[start : start + _CHUNK] = self._indices(flat[start : start + _CHUNK])
        return indices.reshape(asked.shape)

    def __repr__(self) -> str:
        return f"Order(id={self.id!r}, length={self.length}, seed={self.seed}, epoch={self.epoch})"

    def _set_epoch(self, epoch: int) -> None:
        self.epoch = _integer("epoch", epoch, 0)
        self._set_key(mix(int.from_bytes(self.id.encode(), "big"), self.length, self.seed, self.epoch))

    def _set_key(self, key: int) -> None:
        """Prepare for the epoch that this key stands for."""
        self._key = np.array([key], dtype=np.uint64)

    @abstractmethod
    def _indices(self, positions: UintArray) -> UintArray | IntArray:
        """Map at most _CHUNK valid positions, a 1-D array that must stay as it is."""


class _Sequential(Order):
    def _indices(self, positions: UintArray) -> UintArray:
        return positions


class _Shuffle(Order):
    def _indices(self, positions: UintArray) -> UintArray:
        return _permute(positions, self.length, self._key)


class _Block(Order):
    """Blocks in shuffled order, and the samples shuffled within each `group` successive blocks of that order."""

    def __init__(self, length: int, seed: int, epoch: int, block: int, group: int) -> None:
        self._block = _integer("block", block, 1, _MAX_LENGTH)
        group = _integer("group", group, 1, _MAX_LENGTH)
        self._blocks = -(-length // self._block)
        self._group = min(group, self._blocks)
        self._missing = self._blocks * self._block - length
        super().__init__(f"block-v1(block={self._block},group={group})", length, seed, epoch)

    def _set_key(self, key: int) -> None:
        self._block_key = np.array([mix(key, 0)], dtype=np.uint64)
        self._sample_key = U64(mix(key, 1))
        # The short block, the data set's last, stands last in a random group. That costs no randomness, since the
        # samples of a group are shuffled, and spares the inverse permutation that would find its place.
        self._short_group = mix(key, 2) % self._blocks // self._group
        self._short_place = min((self._short_group + 1) * self._group, self._blocks) - 1

    def _group_length(self, number: int) -> int:
        blocks = min(self._group, self._blocks - number * self._group)
        return blocks * self._block - self._missing * (number == self._short_group)

    def _indices(self, positions: UintArray) -> UintArray:
        block, full = U64(self._block), U64(self._block * self._group)
        behind_short = positions >= U64(self._short_group * int(full) + self._group_length(self._short_group))
        group, place = np.divmod(positions + behind_short * U64(self._missing), full)

        lengths = np.full(place.shape, full)
        for number in (self._short_group, (self._blocks - 1) // self._group):
            lengths[group == U64(number)] = self._group_length(number)
        keys = _mix_array(group * U64(_GOLDEN) + self._sample_key)
        for length in np.unique(lengths):
            same = lengths == length
            place[same] = _permute(place[same], int(length), keys[same])

        slot, offset = np.divmod(place, block)
        slot += group * U64(self._group)
        short = slot == U64(self._short_place)
        slot -= slot > U64(self._short_place)
        slot[short] = 0
        chosen = _permute(slot, max(1, self._blocks - 1), self._block_key)
        chosen[short] = self._blocks - 1
        chosen *= block
        chosen += offset
        return chosen


class _Weighted(Order):
    """Draws with replacement by the alias method (Walker 1977; Vose 1991), one hash of the position a draw."""

    def __init__(self, length: int, seed: int, epoch: int, weights: npt.ArrayLike) -> None:
        masses = _masses(weights)
        digest = hashlib.sha256(masses.astype("<i8", copy=False).data).hexdigest()[:16]
        self._capacity = int(masses.sum()) // masses.size
        self._threshold, self._alias = _alias_table(masses, self._capacity)
        super().__init__(f"weighted-v1({digest})", length, seed, epoch)

    def _indices(self, positions: UintArray) -> IntArray:
        state = positions * U64(2 * _GOLDEN & _MASK) + self._key
        column = (_mix_array(state + U64(_GOLDEN)) % U64(self._alias.size)).astype(np.int64)
        level = (_mix_array(state + U64(2 * _GOLDEN & _MASK)) % U64(self._capacity)).astype(np.int64)
        drawn: IntArray = np.where(level < self._threshold[column], column, self._alias[column])
        return drawn


def _masses(weights: npt.ArrayLike) -> IntArray:
    """Turn weights into integers that sum to a multiple of their number, at most 2**40 times it.

    Only exact operations (maximum, scaling by a power of two, truncation) touch floating point: a sum of floats would
    depend on the order in which a version of numpy adds.
    """
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"weights must be a 1-D array with one weight a sample, got shape {values.shape}")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise ValueError(f"weights must be finite and not negative, got {values[wrong[0]]} for sample {wrong[0]}")
    largest = int(values.argmax())
    if not values[largest]:
        raise ValueError("weights are all zero; give at least one sample a positive weight")
    count = values.size
    scale = 61 - count.bit_length() - int(np.frexp(values[largest])[1])
    rough = int(np.ldexp(values, scale).astype(np.int64).sum()) + count
    # At most 2**40 levels a column keep the bias of a 64-bit hash modulo that number below 2**-24.
    limit = min(2**61, count << 40)
    masses = np.ldexp(values, scale + limit.bit_length() - rough.bit_length() - 1).astype(np.int64)
    masses[largest] += -int(masses.sum()) % count
    return masses


def _alias_table(masses: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Return the threshold and the alias of each of the columns of `capacity` that the masses fill exactly.

    Vose's pairing, written as a merge of prefix sums: large items in turn fill up the small ones, and one that falls
    below the capacity is itself filled up by the next (Huebschle-Schneider, Sanders 2019).
    """
    small, large = np.flatnonzero(masses < capacity), np.flatnonzero(masses >= capacity)
    need = capacity - masses[small]
    needed, spare = np.cumsum(need), np.cumsum(masses[large] - capacity)
    threshold, alias = np.minimum(masses, capacity), np.arange(masses.size)
    alias[small] = large[np.searchsorted(spare, needed - need, side="left")]
    overdrawn = large[:-1][spare[:-1] < spare[-1]]
    debt = needed[np.searchsorted(needed, spare[: overdrawn.size], side="right")] - spare[: overdrawn.size]
    threshold[overdrawn] = capacity - debt
    alias[overdrawn] = large[1 : overdrawn.size + 1]
    return threshold, alias


def _integer(name: str, value: SupportsIndex, low: int | None = None, high: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name} must be {f'at least {low}' if high is None else f'in [{low}, {high}]'}, got {number}")
    return number


def make_order(
    name: str,
    *,
    length: int,
    seed: int,
    epoch: int,
    weights: npt.ArrayLike | None = None,
    block: int = 1024,
    group: int = 16,
) -> Order:
    """Make the order of one epoch.

    Args:
        name: "shuffle", a pseudorandom permutation; "block", one with locality, for files and row groups: blocks are
            shuffled, and samples within groups of blocks; "sequential"; "weighted", draws with replacement.
        length: samples of an epoch, 1 to 2**62; for "weighted" draws of an epoch, whatever the number of weights.
        seed: any integer, of any size and sign.
        epoch: number of the epoch, from 0.
        weights: for "weighted", one a sample, finite, not negative, of any sum; the table takes 16 bytes a sample.
        block: for "block", neighbouring samples in a block; the last block of the data set may be shorter.
        group: for "block", blocks in a group: block * group samples are shuffled together.

    Raises:
        ValueError: an unknown name or a bad argument; says which, and what to do.

    Example:
        >>> order = make_order("shuffle", length=10**12, seed=0, epoch=3)
        >>> order(np.arange(5_000_000, 5_000_256))

    Anyone calls it. Equal (id, seed, epoch, length) give equal orders, on every rank and in every version.
    """
    length = _integer("length", length, 1, _MAX_LENGTH)
    if weights is not None and name != "weighted":
        raise ValueError(f"weights have no effect on order {name!r}; drop them or ask for 'weighted'")
    if name == "shuffle":
        return _Shuffle("shuffle-v1", length, seed, epoch)
    if name == "block":
        return _Block(length, seed, epoch, block, group)
    if name == "sequential":
        return _Sequential("sequential-v1", length, seed, epoch)
    if name != "weighted":
        raise ValueError(f"unknown order {name!r}; choose 'shuffle', 'block', 'sequential' or 'weighted'")
    if weights is None:
        raise ValueError("order 'weighted' needs weights; pass weights=, one a sample")
    return _Weighted(length, seed, epoch, weights)
