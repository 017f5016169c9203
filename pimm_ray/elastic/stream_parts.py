"""What a rank of an ElasticStream reads, in which micro-batches, and how far it has come."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from pimm_ray.elastic.windows import Windows, micro_batches, near_equal
from pimm_ray.errors import DataChanged, StorageError

NO_END = -1
_END = object()

Part = tuple[int, int, int]
"""Shard, first sample that is still to come, and the sample before which it ends (NO_END: where the shard does)."""


@dataclass
class Lane:
    """What one loader worker of a rank reads: parts of shards, and how far it has come, as committed."""

    parts: list[Part]
    made: int = 0
    """Micro-batches since the deal."""
    at: int = 0
    offset: int = -1

    def __post_init__(self) -> None:
        if self.parts:
            self.offset = self.parts[0][1]

    @property
    def rest(self) -> list[Part]:
        if not self.parts:
            return []
        shard, _, stop = self.parts[self.at]
        return [(shard, self.offset, stop)] * (self.offset != stop) + self.parts[self.at + 1 :]


class Item(NamedTuple):
    """A micro-batch (None without a sample), its samples, and where its lane stands after it."""

    batch: Any
    real: int
    lane: int
    made: int = 0
    at: int = 0
    offset: int = 0


NOTHING = Item(None, 0, -1)
Window = tuple[Iterable[Item], int, int, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How many samples the micro-batches of one rank have. Number n since the deal is made by lane n % lanes."""

    rank: int
    world: int
    batch: int
    limit: int | None
    lanes: int
    windows: Windows | None

    def cuts(self, size: int) -> int:
        return micro_batches(size, self.world, self.limit)

    @property
    def own(self) -> int:
        """Samples of this rank in a whole step."""
        low, high = near_equal(0, self.batch, self.rank, self.world)
        return high - low

    def size(self, n: int) -> int | None:
        """Samples of micro-batch number n; None behind the epoch's end, when that is known."""
        size, cuts = self.batch, self.cuts(self.batch)
        if self.windows is None:
            # Turned from time to time, or a lane could meet nothing but empty cuts and never use its shards up.
            cut = (n + n // math.lcm(cuts, self.lanes)) % cuts
        else:
            number = min(n // cuts, self.windows.count - 1)
            cut = n - number * cuts
            if number < 0:
                return None
            size = self.windows.span(number)[1]
            cuts = self.cuts(size)
            if cut >= cuts:
                return None
        low, high = near_equal(0, size, self.rank, self.world)
        low, high = near_equal(low, high - low, cut, cuts)
        return high - low

    def quotas(self) -> list[int]:
        """Samples of each lane until the epoch's end. All windows but the last are alike, so few are looked at."""
        assert self.windows is not None
        cuts, alike = self.cuts(self.batch), max(0, self.windows.count - 1)
        totals, period = [0] * self.lanes, self.lanes // math.gcd(self.lanes, cuts)
        for first in range(min(period, alike)):
            for n in range(first * cuts, (first + 1) * cuts):
                totals[n % self.lanes] += (self.size(n) or 0) * -(-(alike - first) // period)
        for n in range(alike * cuts, (alike + 1) * cuts):
            totals[n % self.lanes] += self.size(n) or 0
        return totals

    def before(self) -> int:
        """Samples of the ranks before this one until the epoch's end."""
        assert self.windows is not None
        alike = max(0, self.windows.count - 1)
        last = self.windows.span(alike)[1] if self.windows.count else 0
        ahead = [near_equal(0, size, self.rank, self.world)[0] for size in (self.batch, last)]
        return alike * ahead[0] + ahead[1]


class Reader(IterableDataset[Item]):
    """Runs in the loader workers: reads the parts of a lane and makes its micro-batches."""

    def __init__(self, shards: list[Any], lengths: list[int] | None, open: Callable[..., Any], collate: Any):
        self._shards, self._lengths, self._open, self._collate = shards, lengths, open, collate
        self._spare: list[Any] = []

    def take(self, shares: Shares, lanes: list[tuple[int, Lane]]) -> None:
        """What the next iteration reads: a lane, with its number, for each worker."""
        self._shares, self._lanes = shares, lanes

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        number, lane = self._lanes[info.id if info else 0]
        made, at, offset = lane.made, lane.at, lane.offset
        samples = (
            (sample, at, offset)
            for at, (shard, start, stop) in enumerate(lane.parts)
            for sample, offset in self.samples(shard, start, stop)
        )
        ahead = next(samples, None)
        while (size := self._shares.size(number + made * self._shares.lanes)) is not None:
            if ahead is None and self._lengths is None:
                return
            batch: list[Any] = []
            while ahead is not None and len(batch) < size:
                sample, at, offset = ahead
                batch.append(sample)
                ahead = next(samples, None)
            made += 1
            yield Item(self._collate(batch) if batch else None, len(batch), number, made, at, offset)

    def one_batch(self) -> Any:
        """A batch of one sample, for a rank that never had one of its own."""
        if not self._spare:
            shards = range(len(self._shards))
            self._spare = [next(sample for shard in shards for sample, _ in self.samples(shard, 0))]
        return self._collate(self._spare)

    def samples(self, shard: int, start: int, stop: int = NO_END) -> Iterator[tuple[Any, int]]:
        """Samples of a shard, each with the offset behind it."""
        name, offset, more = self._shards[shard], start, False
        iterator: Any = None
        try:
            iterator = iter(self._open(name, start))
            while offset != stop and (sample := next(iterator, _END)) is not _END:
                offset += 1
                yield sample, offset
            if self._lengths is not None and stop == self._lengths[shard]:
                more = next(iterator, _END) is not _END
        except Exception as error:
            raise StorageError(
                f"shard {name!r} cannot be read at sample {offset} ({type(error).__name__}: {error}): mend it, or "
                "leave it out and start the epoch anew"
            ) from error
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
        if more or stop not in (NO_END, offset):
            raise DataChanged(
                f"shard {name!r} holds {'more than ' * more}{offset} samples and its length is said to be "
                f"{self._lengths and self._lengths[shard]}: give the right length="
            )


def cut_parts(parts: list[Part], sums: list[int], low: int, high: int) -> list[Part]:
    """Samples [low, high) of the parts laid end to end; `sums` are their running sums."""
    cut = []
    for number in range(bisect.bisect_right(sums, low), len(parts)):
        shard, start, stop = parts[number]
        first = sums[number] - (stop - start)
        if first >= high:
            break
        cut.append((shard, start + max(0, low - first), min(stop, start + high - first)))
    return cut if low < high else []


def plain(parts: list[Part]) -> list[list[int]]:
    return [list(part) for part in parts]


def check_states(states: Sequence[Mapping[str, Any]], kind: str, identity: Mapping[str, Any]) -> None:
    """Raises DataChanged unless these are the parts of one whole position in the data that `identity` describes."""
    if not states or any(not isinstance(state, Mapping) or state.get("kind") != kind for state in states):
        raise DataChanged("this is not the position of an ElasticStream: start the epoch anew, without it")
    words = {"shards": "list of shards (number and digest of names)", "length": "samples of all shards"}
    for name, value in identity.items():
        for state in states:
            if state[name] != value:
                raise DataChanged(
                    f"the stored position belongs to other data ({words.get(name, name)} was {state[name]!r}, now "
                    f"{value!r}): restore the {name}, or start the epoch anew"
                )
    for name in ("epoch", "samples", "restarts", "topology", "dealt_at"):
        if any(state[name] != states[0][name] for state in states):
            raise DataChanged(
                f"the ranks' parts of the position contradict each other ({name}: "
                f"{[state[name] for state in states]}): give those of one checkpoint, or start the epoch anew"
            )
    ranks, world = [state["rank"] for state in states], states[0]["topology"][0]
    if ranks != list(range(world)):
        raise DataChanged(
            f"the position is not whole: {world} ranks saved parts of it and those of ranks {ranks} are here: give "
            "load_state_dicts() those of all, once each"
        )


def merged(parts: list[Part], order: list[int], names: list[Any]) -> list[Part]:
    """What is left, in the epoch's order of shards, neighbours joined."""
    place = {shard: number for number, shard in enumerate(order)}
    found: list[Part] = []
    if strange := [part for part in parts if part[0] not in place]:
        raise DataChanged(f"the stored position names shard {strange[0][0]} of {len(order)}: start the epoch anew")
    for shard, start, stop in sorted(parts, key=lambda part: (place[part[0]], part[1])):
        last = found[-1] if found else None
        if last and last[0] == shard and (last[2] == NO_END or last[2] > start):
            raise DataChanged(
                f"the ranks' parts of the position contradict each other: two hold sample {start} of shard "
                f"{names[shard]!r}: give those of one checkpoint, or start the epoch anew"
            )
        if last and last[0] == shard and last[2] == start:
            found[-1] = (shard, last[1], stop)
        else:
            found.append((shard, start, stop))
    return found


def as_it_is(item: Any) -> Any:
    return item
