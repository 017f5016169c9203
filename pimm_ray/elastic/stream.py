"""Iterable data in shards, each sample exactly once an epoch for any number of ranks and interruptions."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from pimm_ray.elastic.order import make_order, mix
from pimm_ray.elastic.plan import RESTART_STRIDE
from pimm_ray.elastic.stream_files import Files, checked_shards, digest, lengths_of, names_of
from pimm_ray.elastic.stream_parts import (
    NO_END,
    NOTHING,
    Item,
    Lane,
    Part,
    Reader,
    Shares,
    Window,
    as_it_is,
    check_states,
    cut_parts,
    merged,
    plain,
)
from pimm_ray.elastic.windowed import WindowedLoader, to_device
from pimm_ray.elastic.windows import Windows
from pimm_ray.errors import DataChanged

logger = logging.getLogger(__name__)

_KIND = "pimm_ray.stream"
_OURS = ("batch_size", "batch_sampler", "sampler", "drop_last")


class ElasticStream(WindowedLoader):
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
        self._refuse(tail, arguments)
        super().__init__(
            global_batch_size,
            micro_batch_size,
            seed=seed,
            tail=tail,
            num_workers=num_workers,
            count=count,
            device=device,
        )
        self.shards = checked_shards(shards, open)
        self.lengths = lengths_of(self.shards, length, files=open is None)
        self._length = None if self.lengths is None else sum(self.lengths)
        if self.length is None and tail == "drop":
            raise ValueError("ElasticStream(tail='drop') needs the shards' lengths: give length=, or use tail='even'")
        if self.length == 0:
            raise ValueError(f"none of the {len(self.shards)} shards holds a sample: give some that do")
        if self.length is not None and tail == "drop" and global_batch_size > self.length:
            raise ValueError(
                f"global_batch_size={global_batch_size} is larger than the data ({self.length} samples) and "
                "tail='drop' would leave all out: use a smaller one, or tail='even'"
            )
        self._order = make_order("shuffle" if shuffle else "sequential", length=len(self.shards), seed=seed, epoch=0)
        self._identity: dict[str, Any] = {
            "order": f"stream-v1({self._order.id})",
            "seed": seed,
            "shards": [len(self.shards), digest(names_of(self.shards))],
            "length": self.length,
            "lengths": None if self.lengths is None else digest(self.lengths),
        }
        self._lanes: list[Lane] | None = None
        self._undealt: list[Part] = []
        self._dealt_at = self._turn = 0
        self._handed: tuple[int, int, list[tuple[int, int, int]], int] | None = None
        self._dataset = Reader(self.shards, self.lengths, open or Files(columns), collate_fn or default_collate)
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=as_it_is,
            generator=self._generator,
            **arguments,
        )
        if self.rank == 0:
            self._warn()

    @staticmethod
    def _refuse(tail: Any, arguments: Mapping[str, Any]) -> None:
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
        if tail not in ("even", "drop"):
            raise ValueError(f"ElasticStream(tail={tail!r}): use 'even' or 'drop'")

    def _warn(self) -> None:
        ranks, workers = self.world_size, self._workers
        if ranks <= self.global_batch_size and self.length is None and len(self.shards) < ranks * workers:
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
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch, for any number of ranks. TypeError when lengths are unknown."""
        return self._windows(start=0).count

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of a run of `epochs` epochs, for any number of ranks. TypeError when lengths are unknown."""
        return epochs * self.steps_per_epoch

    def set_epoch(self, epoch: int, *, final: bool = False, restarts: int | None = None) -> None:
        """Go to an epoch's start, unless the position is in that epoch already.

        Args:
            final: has no meaning here.
            restarts: how often the epoch was begun anew; each time its shards have another order. None: as often as
                before.
        """
        if restarts is None:
            restarts = self._restarts if epoch == self._epoch else 0
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
            "lanes": [[lane.made, plain(lane.rest)] for lane in lanes],
            "undealt": plain(self._undealt) if self._samples and self.rank == 0 else [],
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to a stored position, on any number of ranks. Every rank calls it with the parts of all that saved.

        Args:
            states: what `state_dict()` returned on each rank of the run that saved, in any order.

        Raises:
            DataChanged: they belong to other shards or another order or seed, or are not one whole; says which.
        """
        parts = sorted(states, key=lambda state: state.get("rank", -1))
        check_states(parts, _KIND, self._identity)
        first = parts[0]
        self._begin(first["epoch"], first["restarts"])
        if not first["samples"]:
            return
        left = [part for state in parts for _, lane in state["lanes"] for part in lane]
        left = merged(
            [(*part,) for part in itertools.chain(left, *(state["undealt"] for state in parts))],
            self._order_of_shards(),
            self.shards,
        )
        if self.length is not None and first["samples"] + sum(stop - start for _, start, stop in left) != self.length:
            raise DataChanged("the ranks' parts of the position do not add up to an epoch: start the epoch anew")
        self._samples = first["samples"]
        if first["topology"] != self._topology or not first["lanes"]:
            self._undealt = left
            return
        mine = parts[self.rank]
        self._dealt_at, self._turn = mine["dealt_at"], mine["turn"]
        self._undealt = [(*part,) for part in mine["undealt"]]
        self._lanes = [Lane([(*part,) for part in lane], made) for made, lane in mine["lanes"]]

    def __iter__(self) -> Iterator[Any]:
        self._handed = None
        if self._lanes is None:
            self._deal()
        lanes = self._lanes = [Lane(lane.rest, lane.made) for lane in self._lanes or ()]
        shares, turn = self._shares(), self._turn
        # torch asks its workers in turn, from the first on: the first one gets the lane whose turn it is.
        turns = [(turn + number) % len(lanes) for number in range(len(lanes))]
        self._dataset.take(shares, [(number, lanes[number]) for number in turns])
        self._generator.manual_seed(mix(self.seed, self._epoch, self._samples, self.rank) & (2**63 - 1))
        items = self._moved(iter(self._loader), lambda item, device: item._replace(batch=to_device(item.batch, device)))
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
                    last = self._dataset.one_batch()
                    last = last if self._device is None else to_device(last, self._device)
                self._at_hand(real=item.real, cut=cut, cuts=cuts, size=size)
                if self.step_done:
                    self._handed = on, samples, list(ends_now), turn
                yield last
            if self.commits_by_itself:
                self.commit()

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

    def _windows(self, *, start: int | None = None) -> Windows:
        if self.length is None:
            raise TypeError("the number of steps is unknown, because the shards' lengths are: give length=")
        start = self._samples if start is None else start
        return Windows(length=self.length, start=start, batch=self.global_batch_size, tail=self.tail)

    def _shares(self) -> Shares:
        return Shares(
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
            ends = [NO_END] * len(self.shards) if self.lengths is None else self.lengths
            left = [(shard, 0, ends[shard]) for shard in self._order_of_shards() if ends[shard]]
        self._dealt_at, self._turn, workers = self._samples, 0, self._workers
        shares = self._shares()
        if shares.windows is None:
            # A rank whose share of a step is empty would never use its shards up.
            ranks = min(self.world_size, self.global_batch_size)
            mine = left[self.rank :: ranks] if self.rank < ranks else []
            self._lanes, self._undealt = [Lane(mine[worker::workers]) for worker in range(workers)], []
            return
        sums = list(itertools.accumulate(stop - start for _, start, stop in left))
        bounds = list(itertools.accumulate(shares.quotas(), initial=shares.before()))
        self._lanes = [Lane(cut_parts(left, sums, low, high)) for low, high in itertools.pairwise(bounds)]
        used = min(sums[-1], shares.windows.count * self.global_batch_size)
        self._undealt = cut_parts(left, sums, used, sums[-1])

    def _planned(self, items: Iterator[Item], shares: Shares) -> Iterator[Window]:
        """Windows, when lengths are known: their items, how many, samples over all ranks, the position after them."""
        windows = shares.windows
        assert windows is not None
        for number in range((self._samples - windows.start) // windows.batch, windows.count):
            size = windows.span(number)[1]
            cuts = shares.cuts(size)
            yield itertools.islice(items, cuts), cuts, size, windows.after(number)

    def _agreed(self, items: Iterator[Item], shares: Shares) -> Iterator[Window]:
        """Windows, when lengths are unknown: the ranks tell each other what they have, and whether more will come."""
        samples, cuts = self._samples, shares.cuts(shares.batch)
        ahead, more = next(items, None), 1
        while more:
            window: list[Item] = []
            left = shares.own
            # Once a worker has run out, the cuts that come together need not be those of one share.
            while ahead is not None and len(window) < cuts and ahead.real <= left:
                window.append(ahead)
                left -= ahead.real
                ahead = next(items, None)
            size, more = self._sum_over_ranks(shares.own - left, int(ahead is not None))
            samples += size
            if size:
                window += [NOTHING] * (cuts - len(window))
                yield window, cuts, size, (0, samples) if more else (1, 0)
        if not samples:
            raise ValueError(f"none of the {len(self.shards)} shards holds a sample: give some that do")
