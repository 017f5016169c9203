"""Iterable data in shards, each sample exactly once an epoch for any number of ranks and interruptions."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from pimm_ray.elastic.loader import _to_device
from pimm_ray.elastic.order import make_order, mix
from pimm_ray.elastic.plan import ELASTIC, RESTART_STRIDE
from pimm_ray.elastic.windows import Windows, micro_batches, near_equal
from pimm_ray.errors import DataChanged, StorageError

logger = logging.getLogger(__name__)

_KIND = "pimm_ray.stream"
_OURS = ("batch_size", "batch_sampler", "sampler", "drop_last")
_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
_ROWS = 256  # turned into Python values at once
_NO_END = -1

Part = tuple[int, int, int]
"""Shard, first sample that is still to come, and the sample before which it ends (_NO_END: where the shard does)."""


class ElasticStream:
    """Micro-batches of data in shards, exactly once an epoch for any number of ranks and interruptions.

    `global_batch_size` counts over all ranks, as in `ElasticLoader`: each rank takes a near-equal share of it a step
    and cuts it into `.accumulate` micro-batches of at most `micro_batch_size`, the same number on every rank. Ranks and
    their loader workers read different parts of the shards. The position is one offset for each part; it moves at
    `commit()`, which `CheckpointManager.step()` calls; without a manager, when the next window is asked for. What a
    worker has prefetched is delivered again after a resume. Another number of ranks or workers: what is left of the
    epoch is dealt anew.

    *Lengths known* (Parquet and Arrow files, or `length=`): shards are cut so that every rank has its share of every
    step; no communication; the number of steps does not depend on the number of ranks. *Unknown*: whole shards are
    dealt to ranks, and one small all-reduce a step sums up who has how much; a rank whose shards ran out goes along
    with weight 0 (shards of unequal lengths, or fewer of them than ranks x workers, waste time), and steps get shorter
    towards the end.

    Not promised: a global order, or the same global batches with another number of ranks or workers (a resume on the
    same numbers does continue as if nothing had happened). The order of shards is shuffled, samples within a shard are
    not: write them in random order. A shuffle buffer inside `open` has read ahead of its offset: fill it by a rule that
    `offset` can repeat.

    Every rank makes one, with the same arguments, after `torch.distributed` is initialised.

    Args:
        shards: paths or URIs of Parquet, Arrow IPC or Feather files; or a folder of them; or, with `open`, anything
            with a stable repr (names, numbers, tuples). The same list on every rank; where the files lie may change
            between runs.
        global_batch_size: samples of one optimizer step over all ranks; at most, when lengths are unknown.
        micro_batch_size: most samples that a rank holds at once; None for its whole share.
        open: `open(shard, offset)` returns an iterator of the shard's samples from number `offset` on. Without it
            shards are files and a sample is a dict by column of Python values, numeric lists as numpy arrays.
        length: samples of a shard: a function of the shard, or one number for each shard.
        columns: of files: read only these.
        seed: of the order of shards.
        shuffle: another order of shards each epoch.
        tail: of an epoch's last samples that fill no step: "even" (a shorter step) or "drop" (needs lengths).
        num_workers: loader processes of a rank, each with its own parts.
        collate_fn: makes a batch of a list of samples, in the loader process.
        count: how many things that a loss averages over (points, tokens) a micro-batch has: for `weight_for` when a
            window has several micro-batches.
        device: batches are moved there one ahead; needs `pin_memory=True` to overlap with computing.
        arguments: of `torch.utils.data.DataLoader`. Remote files and `num_workers`: pass
            `multiprocessing_context="forkserver"`, object-store clients do not survive a fork.

    Attributes:
        weight: of the micro-batch at hand: multiply its mean loss by it, and DDP's averaged, accumulated gradient is
            that of the mean over the samples of the step.
        real: its samples; 0 for one that only repeats the rank's last batch so that the ranks stay together.
        step_done: whether it is the last of its window: step the optimizer after it.
        accumulate: micro-batches of its window.

    Raises:
        TypeError, ValueError: an argument that cannot work; the message says what to do.
        StorageError: a shard cannot be read; names it. Also while iterating.
        DataChanged: while iterating, a shard is shorter or longer than its length.

    Example:
        >>> stream = ElasticStream("s3://bucket/train", global_batch_size=256, micro_batch_size=32, num_workers=2)
        >>> for batch in stream:
        ...     with stream.sync(model):
        ...         (loss_fn(model(batch["x"]), batch["y"]) * stream.weight).backward()
        ...     if stream.step_done:
        ...         optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        shards: Any,
        global_batch_size: int,
        *,
        micro_batch_size: int | None = None,
        open: Callable[[Any, int], Iterable[Any]] | None = None,
        length: Callable[[Any], int | None] | Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["even", "drop"] = "even",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        count: Callable[[Any], int] | None = None,
        device: torch.device | str | None = None,
        **arguments: Any,
    ):
        self._refuse(global_batch_size, micro_batch_size, tail, arguments)
        self.shards = _checked_shards(shards, open)
        self.lengths = _lengths(self.shards, length, files=open is None)
        self._length = None if self.lengths is None else sum(self.lengths)
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.seed, self.tail, self.num_workers = seed, tail, num_workers
        if self.length is None and tail == "drop":
            raise ValueError("ElasticStream(tail='drop') needs the shards' lengths: give length=, or use tail='even'")
        if self.length == 0:
            raise ValueError(f"none of the {len(self.shards)} shards holds a sample: give some that do")
        if self.length is not None and tail == "drop" and global_batch_size > self.length:
            raise ValueError(
                f"global_batch_size={global_batch_size} is larger than the data ({self.length} samples) and "
                "tail='drop' would leave all out: use a smaller one, or tail='even'"
            )
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.weight, self.real, self.step_done = 0.0, 0, False
        self.accumulate = micro_batches(global_batch_size, self.world_size, micro_batch_size)
        self.commits_by_itself = True
        self._order = make_order("shuffle" if shuffle else "sequential", length=len(self.shards), seed=seed, epoch=0)
        self._identity: dict[str, Any] = {
            "order": f"stream-v1({self._order.id})",
            "seed": seed,
            "shards": [len(self.shards), _digest(_names(self.shards))],
            "length": self.length,
            "lengths": None if self.lengths is None else _digest(self.lengths),
        }
        self._epoch = self._samples = self._restarts = 0
        self._lanes: list[_Lane] | None = None
        self._undealt: list[Part] = []
        self._dealt_at = self._turn = 0
        self._handed: tuple[int, int, list[tuple[int, int, int]], int] | None = None
        self._count, self._counts, self._total = count, list[int](), 0
        self._device = torch.device(device) if device is not None else None
        self._group: Any = None
        self._spare: Any = None
        self._dataset = _Reader(self.shards, self.lengths, open or _Files(columns), collate_fn or default_collate)
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            generator=self._generator,
            **arguments,
        )
        if self.rank == 0:
            self._warn()

    @staticmethod
    def _refuse(batch: Any, micro: Any, tail: Any, arguments: Mapping[str, Any]) -> None:
        for name in _OURS:
            if name in arguments:
                raise TypeError(
                    f"ElasticStream({name}=) is not possible: it decides itself what makes a batch and who reads it. "
                    "Use global_batch_size=, micro_batch_size= and tail="
                )
        if arguments.get("persistent_workers"):
            raise ValueError(
                "ElasticStream(persistent_workers=True) is not possible: workers start anew with the parts that each "
                "epoch deals to them; leave it out"
            )
        if arguments.get("in_order") is False:
            raise ValueError("ElasticStream(in_order=False) would lose the position: leave in_order at True")
        for name, value in (("global_batch_size", batch), ("micro_batch_size", micro)):
            unset = value is None and name == "micro_batch_size"
            if not unset and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"ElasticStream({name}={value!r}): use a whole number of samples above 0")
        if tail not in ("even", "drop"):
            raise ValueError(f"ElasticStream(tail={tail!r}): use 'even' or 'drop'")

    def _warn(self) -> None:
        ranks, workers = self.world_size, self._workers
        if ranks > self.global_batch_size:
            logger.warning(
                "%d ranks share global batches of %d samples: %d of them work with weight 0",
                ranks, self.global_batch_size, ranks - self.global_batch_size,
            )  # fmt: skip
        elif self.length is None and len(self.shards) < ranks * workers:
            logger.warning(
                "%d shards of unknown length for %d ranks with %d readers each: some have none. Give length=, so that "
                "shards can be cut, or more shards", len(self.shards), ranks, workers,
            )  # fmt: skip

    @property
    def at_end(self) -> bool:
        """Whether the micro-batch at hand is the epoch's last."""
        return self._handed is not None and self._handed[0] > 0

    @property
    def order_id(self) -> str:
        """Algorithm of the order, and which data it is an order of."""
        shards, lengths = self._identity["shards"], self._identity["lengths"]
        return f"{self._identity['order']}/{'-'.join(map(str, shards))}/{lengths}"

    @property
    def length(self) -> int | None:
        """Samples of an epoch; None when unknown."""
        return self._length

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and samples of it over all ranks, that committed steps have used up."""
        return self._epoch, self._samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch, for any number of ranks. TypeError when lengths are unknown."""
        return self._windows(start=0).count

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of a run of `epochs` epochs, for any number of ranks. TypeError when lengths are unknown."""
        return epochs * self.steps_per_epoch

    def __len__(self) -> int:
        """Micro-batches that the next iteration hands over: from the position to the epoch's end."""
        windows = self._windows(start=self._samples)
        if not windows.count:
            return 0
        last = micro_batches(windows.span(windows.count - 1)[1], self.world_size, self.micro_batch_size)
        whole = micro_batches(self.global_batch_size, self.world_size, self.micro_batch_size)
        return (windows.count - 1) * whole + last

    @property
    def shape(self) -> dict[str, Any]:
        """What a position depends on, in the words of `RunShape`."""
        return {
            "global_batch": self.global_batch_size,
            "micro_batch": self.micro_batch_size,
            "dataset_size": self.length,
            "order_id": f"{ELASTIC}{self.order_id}/{self.tail}",
            "seed": self.seed,
        }

    def set_epoch(self, epoch: int, *, final: bool = False, restarts: int = 0) -> None:
        """Go to an epoch's start, unless the position is in that epoch already.

        Args:
            final: has no meaning here.
            restarts: how often the epoch was begun anew; each time its shards have another order.
        """
        if (epoch, restarts) != (self._epoch, self._restarts):
            self._begin(epoch, restarts)
        self._handed = None

    def commit(self) -> None:
        """The windows handed over so far are used up: the position moves behind them. Every rank calls it."""
        if self._handed is None:
            return
        (on, samples, ends, turn), self._handed = self._handed, None
        if on:
            self._begin(self._epoch + 1)
            return
        self._samples, self._turn = samples, turn
        for lane, end in zip(self._lanes or (), ends, strict=True):
            lane.made, lane.at, lane.offset = end

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the position: what is left of the shards that it reads. Another one on every rank."""
        lanes = self._lanes if self._samples and self._lanes else []
        return {
            "kind": _KIND,
            **self._identity,
            "epoch": self._epoch,
            "samples": self._samples,
            "restarts": self._restarts,
            "rank": self.rank,
            "topology": self._topology,
            "dealt_at": self._dealt_at if lanes else 0,
            "turn": self._turn if lanes else 0,
            "lanes": [[lane.made, _plain(lane.rest)] for lane in lanes],
            "undealt": _plain(self._undealt) if self._samples and self.rank == 0 else [],
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to a stored position, on any number of ranks. Every rank calls it with the parts of all that saved.

        Args:
            states: what `state_dict()` returned on each rank of the run that saved, in any order.

        Raises:
            DataChanged: they belong to other shards or another order or seed, or are not one whole; says which.
        """
        parts = sorted(states, key=lambda state: state.get("rank", -1))
        self._refuse_states(parts)
        first = parts[0]
        self._begin(first["epoch"], first["restarts"])
        if not first["samples"]:
            return
        left = [part for state in parts for _, lane in state["lanes"] for part in lane]
        left = self._merged([(*part,) for part in itertools.chain(left, *(state["undealt"] for state in parts))])
        if self.length is not None and first["samples"] + sum(stop - start for _, start, stop in left) != self.length:
            raise DataChanged("the ranks' parts of the position do not add up to an epoch: start the epoch anew")
        self._samples = first["samples"]
        if first["topology"] != self._topology or not first["lanes"]:
            self._undealt = left
            return
        mine = parts[self.rank]
        self._dealt_at, self._turn = mine["dealt_at"], mine["turn"]
        self._undealt = [(*part,) for part in mine["undealt"]]
        self._lanes = [_Lane([(*part,) for part in lane], made) for made, lane in mine["lanes"]]

    def _refuse_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if not states or any(state.get("kind") != _KIND for state in states):
            raise DataChanged("this is not the position of an ElasticStream: start the epoch anew, without it")
        words = {"shards": "list of shards (number and digest of names)", "length": "samples of all shards"}
        for name, value in self._identity.items():
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

    def _merged(self, parts: list[Part]) -> list[Part]:
        """What is left, in the epoch's order of shards, neighbours joined."""
        place = {shard: number for number, shard in enumerate(self._order_of_shards())}
        merged: list[Part] = []
        for shard, start, stop in sorted(parts, key=lambda part: (place[part[0]], part[1])):
            last = merged[-1] if merged else None
            if last and last[0] == shard and (last[2] == _NO_END or last[2] > start):
                raise DataChanged(
                    f"the ranks' parts of the position contradict each other: two hold sample {start} of shard "
                    f"{self.shards[shard]!r}: give those of one checkpoint, or start the epoch anew"
                )
            if last and last[0] == shard and last[2] == start:
                merged[-1] = (shard, last[1], stop)
            else:
                merged.append((shard, start, stop))
        return merged

    def __iter__(self) -> Iterator[Any]:
        self._handed = None
        if self._lanes is None:
            self._deal()
        lanes = self._lanes = [_Lane(lane.rest, lane.made) for lane in self._lanes or ()]
        shares, turn = self._shares(), self._turn
        # torch asks its workers in turn, from the first on: the first one gets the lane whose turn it is.
        turns = [(turn + number) % len(lanes) for number in range(len(lanes))]
        self._dataset.take(shares, [(number, lanes[number]) for number in turns])
        self._generator.manual_seed(mix(self.seed, self._epoch, self._samples, self.rank) & (2**63 - 1))
        items = self._moved(iter(self._loader))
        ends_now = [(lane.made, lane.at, lane.offset) for lane in lanes]
        last: Any = None
        windows = self._planned if shares.windows is not None else self._agreed
        for window, cuts, size, (on, samples) in windows(items, shares):
            if self._count is not None and cuts > 1:
                window = list(window)
                self._counts = [int(self._count(item.batch)) if item.real else 0 for item in window]
            for cut, item in enumerate(window, start=1):
                if item.lane >= 0:
                    ends_now[item.lane], turn = (item.made, item.at, item.offset), (item.lane + 1) % len(lanes)
                if item.real:
                    last = item.batch
                elif last is None:
                    last = self._one_batch()
                self.real, self.accumulate, self.step_done = item.real, cuts, cut == cuts
                self.weight = self.world_size * self.real / size
                if self.step_done:
                    self._handed = on, samples, list(ends_now), turn
                yield last
            if self.commits_by_itself:
                self.commit()

    def weight_for(self, n_local: int) -> float:
        """As `weight`, for a loss that is a mean over something else than samples. One small all-reduce a window.

        Every rank calls it for every micro-batch.

        Args:
            n_local: how many points or tokens this micro-batch's loss averages over. 0 is allowed; for a micro-batch
                with `real == 0` it counts as 0.

        Raises:
            ValueError: a window has several micro-batches and the stream was not given `count=`.
        """
        if self.accumulate > 1 and self._count is None:
            raise ValueError(
                "weight_for() in a window of several micro-batches has to know them all: give ElasticStream(count=fn), "
                "which returns that number for a micro-batch"
            )
        n_local = int(n_local) if self.real else 0
        if self.accumulate == 1:
            (self._total,) = self._sum_over_ranks(n_local)
        elif self._counts:
            (self._total,) = self._sum_over_ranks(sum(self._counts))
            self._counts = []
        return self.world_size * n_local / self._total if self._total else 0.0

    def sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """DDP's `no_sync()` for all micro-batches of a window but the last: gradients cross the network once a step."""
        return contextlib.nullcontext() if self.step_done or not hasattr(model, "no_sync") else model.no_sync()

    @property
    def _workers(self) -> int:
        return max(1, self.num_workers)

    @property
    def _topology(self) -> list[Any]:
        """Where this is the same, a rank goes on with the parts it had."""
        return [self.world_size, self._workers, self.global_batch_size, self.micro_batch_size, self.tail]

    def _begin(self, epoch: int, restarts: int = 0) -> None:
        self._epoch, self._restarts, self._samples, self._handed = epoch, restarts, 0, None
        self._lanes, self._undealt, self._dealt_at, self._turn = None, [], 0, 0

    def _order_of_shards(self) -> list[int]:
        order = self._order.for_epoch(self._epoch + self._restarts * RESTART_STRIDE)
        return order(np.arange(len(self.shards))).tolist()

    def _windows(self, *, start: int) -> Windows:
        if self.length is None:
            raise TypeError("the number of steps is unknown, because the shards' lengths are: give length=")
        return Windows(length=self.length, start=start, batch=self.global_batch_size, tail=self.tail)

    def _shares(self) -> _Shares:
        return _Shares(
            rank=self.rank,
            world=self.world_size,
            batch=self.global_batch_size,
            limit=self.micro_batch_size,
            lanes=self._workers,
            windows=None if self.lengths is None else self._windows(start=self._dealt_at),
        )

    def _deal(self) -> None:
        """Share out what is left of the epoch: every rank computes the same deal and keeps its part."""
        left = self._undealt
        if not self._samples:
            ends = [_NO_END] * len(self.shards) if self.lengths is None else self.lengths
            left = [(shard, 0, ends[shard]) for shard in self._order_of_shards() if ends[shard]]
        self._dealt_at, self._turn, workers = self._samples, 0, self._workers
        shares = self._shares()
        if shares.windows is None:
            # A rank whose share of a step is empty would never use its shards up.
            ranks = min(self.world_size, self.global_batch_size)
            mine = left[self.rank :: ranks] if self.rank < ranks else []
            self._lanes, self._undealt = [_Lane(mine[worker::workers]) for worker in range(workers)], []
            return
        sums = list(itertools.accumulate(stop - start for _, start, stop in left))
        bounds = list(itertools.accumulate(shares.quotas(), initial=shares.before()))
        self._lanes = [_Lane(_cut(left, sums, low, high)) for low, high in itertools.pairwise(bounds)]
        used = min(sums[-1], shares.windows.count * self.global_batch_size)
        self._undealt = _cut(left, sums, used, sums[-1])

    def _planned(self, items: Iterator[_Item], shares: _Shares) -> Iterator[_Window]:
        """Windows, when lengths are known: their items, how many, samples over all ranks, the position after them."""
        windows = shares.windows
        assert windows is not None
        for number in range((self._samples - windows.start) // windows.batch, windows.count):
            size = windows.span(number)[1]
            cuts = shares.cuts(size)
            yield itertools.islice(items, cuts), cuts, size, windows.after(number)

    def _agreed(self, items: Iterator[_Item], shares: _Shares) -> Iterator[_Window]:
        """Windows, when lengths are unknown: the ranks tell each other what they have, and whether more will come."""
        samples, cuts = self._samples, shares.cuts(shares.batch)
        ahead, more = next(items, None), 1
        while more:
            window: list[_Item] = []
            left = shares.own
            # Once a worker has run out, the cuts that come together need not be those of one share.
            while ahead is not None and len(window) < cuts and ahead.real <= left:
                window.append(ahead)
                left -= ahead.real
                ahead = next(items, None)
            size, more = self._sum_over_ranks(shares.own - left, int(ahead is not None))
            samples += size
            if size:
                window += [_NOTHING] * (cuts - len(window))
                yield window, cuts, size, (0, samples) if more else (1, 0)
        if not samples:
            raise ValueError(f"none of the {len(self.shards)} shards holds a sample: give some that do")

    def _one_batch(self) -> Any:
        """A batch of one sample, for a rank that never had one of its own."""
        if self._spare is None:
            shards = range(len(self.shards))
            self._spare = [next(sample for shard in shards for sample, _ in self._dataset.samples(shard, 0))]
        batch = self._dataset.collate(self._spare)
        return batch if self._device is None else _to_device(batch, self._device)

    def _moved(self, items: Iterator[_Item]) -> Iterator[_Item]:
        if self._device is None:
            yield from items
            return
        ahead: deque[_Item] = deque()
        for item in items:
            ahead.append(item._replace(batch=_to_device(item.batch, self._device)))
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead

    def _sum_over_ranks(self, *values: int) -> list[int]:
        if self.world_size == 1:
            return list(values)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        total = torch.tensor(values)
        dist.all_reduce(total, group=self._group)
        return total.tolist()


@dataclass
class _Lane:
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


class _Item(NamedTuple):
    """A micro-batch (None without a sample), its samples, and where its lane stands after it."""

    batch: Any
    real: int
    lane: int
    made: int = 0
    at: int = 0
    offset: int = 0


_NOTHING = _Item(None, 0, -1)
_Window = tuple[Iterable[_Item], int, int, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class _Shares:
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


class _Reader(IterableDataset[_Item]):
    """Runs in the loader workers: reads the parts of a lane and makes its micro-batches."""

    def __init__(self, shards: list[Any], lengths: list[int] | None, open: Callable[..., Any], collate: Any):
        self._shards, self._lengths, self._open, self.collate = shards, lengths, open, collate

    def take(self, shares: _Shares, lanes: list[tuple[int, _Lane]]) -> None:
        """What the next iteration reads: a lane, with its number, for each worker."""
        self._shares, self._lanes = shares, lanes

    def __iter__(self) -> Iterator[_Item]:
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
            yield _Item(self.collate(batch) if batch else None, len(batch), number, made, at, offset)

    def samples(self, shard: int, start: int, stop: int = _NO_END) -> Iterator[tuple[Any, int]]:
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
        if more or stop not in (_NO_END, offset):
            raise DataChanged(
                f"shard {name!r} holds {'more than ' * more}{offset} samples and its length is said to be "
                f"{self._lengths and self._lengths[shard]}: give the right length="
            )


_END = object()


@dataclass(frozen=True)
class _Files:
    """`open` for Parquet and Arrow files."""

    columns: Sequence[str] | None

    def __call__(self, path: Any, offset: int) -> Iterator[dict[str, Any]]:
        for rows, read in _blocks(path, self.columns):
            if offset >= rows:
                offset -= rows
                continue
            for batch in read():
                for start in range(offset, batch.num_rows, _ROWS):
                    yield from _rows(batch.slice(start, _ROWS))
                offset = max(0, offset - batch.num_rows)


def _blocks(path: Any, columns: Any = None) -> Iterator[tuple[int, Callable[[], Iterable[Any]]]]:
    """The row groups or record batches of a file: how many rows, and a function that reads them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    filesystem, place = _filesystem(path)
    with filesystem.open_input_file(place) as source:
        magic = source.read_at(6, 0)
        if magic[:4] == b"PAR1":
            parquet = pq.ParquetFile(source)
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                yield rows, partial(parquet.iter_batches, batch_size=1024, row_groups=[group], columns=columns)
        elif magic == b"ARROW1":
            reader = pa.ipc.open_file(source)
            # Arrow has no table of rows: a block that is left out costs its narrowest column.
            widths = [_width(field.type) for field in reader.schema]
            options = pa.ipc.IpcReadOptions(included_fields=[widths.index(min(widths))])
            narrow = pa.ipc.open_file(source, options=options)
            for number in range(reader.num_record_batches):
                yield narrow.get_batch(number).num_rows, partial(_read, reader, number, columns)
        elif magic[:4] == b"\xff\xff\xff\xff":
            # A stream has no index, but leaving out a block of a local, uncompressed one costs nothing.
            for batch in pa.ipc.open_stream(source):
                yield batch.num_rows, partial(_select, batch, columns)
        else:
            raise ValueError("it is neither Parquet nor Arrow: give open=, which reads it")


def _read(reader: Any, number: int, columns: Any) -> list[Any]:
    return _select(reader.get_batch(number), columns)


def _select(batch: Any, columns: Any) -> list[Any]:
    return [batch if columns is None else batch.select(columns)]


def _width(kind: Any) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:
        return 1 << 30


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    def values(column: Any) -> list[Any]:
        kind = column.type
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if listed and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
            sizes = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            flat = column.flatten().to_numpy(zero_copy_only=False).copy()
            rows = np.split(flat, np.cumsum(sizes)[:-1])
            valid = column.is_valid().to_pylist() if column.null_count else itertools.repeat(True)
            return [row if given else None for row, given in zip(rows, valid, strict=False)]
        return column.to_pylist()

    names = batch.schema.names
    for row in zip(*(values(column) for column in batch.columns), strict=True):
        yield dict(zip(names, row, strict=True))


def _filesystem(path: Any) -> tuple[Any, str]:
    import pyarrow.fs as pafs

    path = os.fspath(path)
    return pafs.FileSystem.from_uri(path) if "://" in path else (pafs.LocalFileSystem(use_mmap=True), path)


def _checked_shards(shards: Any, open: Any) -> list[Any]:
    if isinstance(shards, str | os.PathLike):
        if open is not None:
            raise TypeError("ElasticStream(shards=) with open= is a list: give each shard's name")
        shards = _listed(os.fspath(shards))
    shards = list(shards)
    if not shards:
        raise ValueError("ElasticStream has no shards: give at least one")
    for shard in shards:
        if open is None and not isinstance(shard, str | os.PathLike):
            raise TypeError(
                f"shard {shard!r} is not a file: give open=, a function (shard, offset) that returns an iterator of "
                "its samples from number `offset` on"
            )
        if type(shard).__repr__ is object.__repr__:
            raise TypeError(
                f"a shard is a {type(shard).__name__}, which a resumed run would not know again: use names, numbers or "
                "tuples, and make the object in open()"
            )
    seen: set[str] = set()
    for name in _names(shards):
        if name in seen:
            raise ValueError(f"shard {name} is in the list twice: its samples would come twice; leave one out")
        seen.add(name)
    return shards


def _names(shards: list[Any]) -> list[str]:
    """What a shard is known by in another run: of a file the path from the files' common folder on."""
    if not all(isinstance(shard, str | os.PathLike) for shard in shards):
        return [repr(shard) for shard in shards]
    paths = [os.fspath(shard) for shard in shards]
    # Not commonpath: it does not know URIs. Of all paths the first and the last in order have least in common.
    first, last, common = min(paths), max(paths), 0
    while (end := first.find("/", common) + 1) and last.startswith(first[:end]):
        common = end
    return [path[common:] for path in paths]


def _listed(folder: str) -> list[str]:
    import pyarrow.fs as pafs

    filesystem, place = _filesystem(folder)
    try:
        infos = filesystem.get_file_info(pafs.FileSelector(place, recursive=True))
    except OSError as error:
        raise StorageError(f"folder {folder!r} of shards cannot be listed ({error}): give a list of files") from error
    found = sorted(info.path for info in infos if info.is_file and info.path.endswith(_SUFFIXES))
    if not found:
        raise ValueError(f"folder {folder!r} holds no shards ({', '.join(_SUFFIXES)}): give a list of files")
    return [folder.rstrip("/") + path[len(place.rstrip("/")) :] for path in found]


def _lengths(shards: list[Any], length: Any, *, files: bool) -> list[int] | None:
    if length is None and not files:
        return None
    if length is None:
        with ThreadPoolExecutor(min(16, len(shards))) as threads:
            return list(threads.map(_rows_in, shards))
    found = [length(shard) for shard in shards] if callable(length) else list(length)
    if len(found) != len(shards):
        raise ValueError(f"length= has {len(found)} entries for {len(shards)} shards: give one a shard")
    if any(number is None for number in found):
        return None
    for shard, number in zip(shards, found, strict=True):
        if int(number) != number or number < 0:
            raise ValueError(f"the length of shard {shard!r} is said to be {number!r}: give whole numbers of samples")
    return [int(number) for number in found]


def _rows_in(path: Any) -> int:
    try:
        return sum(rows for rows, _ in _blocks(path))
    except (OSError, ValueError) as error:
        raise StorageError(f"shard {path!r} cannot be read ({error}): mend it or leave it out") from error


def _cut(parts: list[Part], sums: list[int], low: int, high: int) -> list[Part]:
    """Samples [low, high) of the parts laid end to end; `sums` are their running sums."""
    cut = []
    for number in range(bisect.bisect_right(sums, low), len(parts)):
        shard, start, stop = parts[number]
        first = sums[number] - (stop - start)
        if first >= high:
            break
        cut.append((shard, start + max(0, low - first), min(stop, start + high - first)))
    return cut if low < high else []


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _plain(parts: list[Part]) -> list[list[int]]:
    return [list(part) for part in parts]


def _as_it_is(item: Any) -> Any:
    return item
