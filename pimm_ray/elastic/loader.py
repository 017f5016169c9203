"""A loader whose data are exact at any world size: one global position, every global batch the same set of samples."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from pimm_ray.elastic.order import make_order, mix
from pimm_ray.elastic.plan import RESTART_STRIDE
from pimm_ray.elastic.sample_rng import SeededCollate, SeededDataset
from pimm_ray.elastic.windowed import WindowedLoader, to_device
from pimm_ray.elastic.windows import Tail, Windows, near_equal
from pimm_ray.errors import DataChanged

_CHUNK = 1 << 15
_KIND = "pimm_ray.elastic"
_OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "generator")


class ElasticLoader(WindowedLoader):
    """Micro-batches of a map-style data set, exactly once an epoch for any number of ranks and interruptions.

    A step takes `global_batch_size` samples of the epoch's order; each rank takes a contiguous near-equal share of them
    and cuts it into `.accumulate` micro-batches, the same number on every rank. What finished steps have used is a
    prefix of the order, so one integer is the whole position, for any later world. It moves at `commit()`, which
    `CheckpointManager.step()` calls; without a manager, when the next window is asked for.

    Every rank makes one, with the same arguments, after `torch.distributed` is initialised.

    Args:
        dataset: has `__len__` and `__getitem__`.
        global_batch_size: samples of one optimizer step over all ranks. Stays when the number of ranks changes.
        micro_batch_size: most samples that a rank holds at once; None for its whole share.
        seed: of the order and of `sample_rng`.
        order: "shuffle"; "block" (blocks of `block` neighbouring samples shuffled, samples shuffled within `group`
            blocks: locality for HDF5 and row groups); "sequential"; "weighted" (draws with replacement by `weights`).
        tail: what becomes of the last samples of an epoch that fill no step: "drop", "even" (a shorter step) or "carry"
            (completed from the next epoch; the run's last epoch ends as "even").
        sample_rng: random draws (python, numpy, torch) inside the data set are a function of (seed, epoch, sample), and
            those of collate of (seed, epoch, step), the same for any world, worker count and interruption.
        count: how many things that a loss averages over (points, tokens) a micro-batch has: for `weight_for` when a
            window has several micro-batches.
        device: batches are moved there, one ahead when there are workers; needs `pin_memory=True` to overlap with
            computing.
        num_workers, arguments: of `torch.utils.data.DataLoader`, which does the loading.

    Attributes:
        weight: of the micro-batch at hand: multiply its mean loss by it, and DDP's averaged, accumulated gradient is
            that of the mean over the global batch.
        real: its samples; 0 for one that only repeats a sample so that the ranks stay together (`weight` is 0 then).
        step_done: whether it is the last of its window: step the optimizer after it.
        step_samples: samples of its window over all ranks.
        accumulate: micro-batches of its window.

    Raises:
        TypeError, ValueError: an argument that cannot work; the message says what to do.

    Example:
        >>> loader = ElasticLoader(dataset, global_batch_size=256, micro_batch_size=32, num_workers=2)
        >>> for x, y in loader:
        ...     with loader.sync(model):
        ...         (loss_fn(model(x), y) * loader.weight).backward()
        ...     if loader.step_done:
        ...         optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        micro_batch_size: int | None = None,
        seed: int = 0,
        order: Literal["shuffle", "block", "sequential", "weighted"] = "shuffle",
        tail: Tail = "drop",
        num_workers: int = 0,
        weights: Any = None,
        block: int = 1024,
        group: int = 16,
        sample_rng: bool = False,
        count: Callable[[Any], int] | None = None,
        device: torch.device | str | None = None,
        **arguments: Any,
    ):
        self._refuse(dataset, tail, arguments)
        super().__init__(
            global_batch_size,
            micro_batch_size,
            seed=seed,
            tail=tail,
            num_workers=num_workers,
            count=count,
            device=device,
        )
        if global_batch_size > len(dataset):
            raise ValueError(
                f"global_batch_size={global_batch_size} is larger than the data set ({len(dataset)} samples): use a "
                "smaller one"
            )
        self.dataset = dataset
        if weights is not None and len(weights) != len(dataset):
            raise ValueError(f"weights= has {len(weights)} entries for {len(dataset)} samples: give one a sample")
        self._order = make_order(
            order, length=len(dataset), seed=seed, epoch=0, weights=weights, block=block, group=group
        )
        self._final = False
        self._handed: tuple[int, int] | None = None
        self._sampling = {"keyed": sample_rng, "by_position": order == "weighted"}
        collate = arguments.pop("collate_fn", None)
        if sample_rng:
            dataset, collate = SeededDataset(dataset, seed), SeededCollate(collate or default_collate)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            # Not a cycle: a loader that is dropped ends its persistent workers at once, and not at some collection
            # of garbage, which then waits 5 seconds for each.
            batch_sampler=MicroBatches(weakref.proxy(self), **self._sampling),
            num_workers=num_workers,
            collate_fn=collate,
            generator=self._generator,
            **arguments,
        )

    @staticmethod
    def _refuse(dataset: Any, tail: Any, arguments: Mapping[str, Any]) -> None:
        for name in _OURS:
            if name in arguments:
                raise TypeError(
                    f"ElasticLoader({name}=) is not possible: it decides itself which samples make a batch. Use "
                    "global_batch_size=, micro_batch_size=, order=, seed= and tail="
                )
        if arguments.get("in_order") is False:
            raise ValueError("ElasticLoader(in_order=False) would lose the position: leave in_order at True")
        if (
            isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__len__")
            or not hasattr(dataset, "__getitem__")
        ):
            raise TypeError(
                f"{type(dataset).__name__} has no length or no items by number, so it has no order: ElasticLoader "
                "needs a map-style data set with __len__ and __getitem__"
            )
        if tail not in ("drop", "even", "carry"):
            raise ValueError(f"ElasticLoader(tail={tail!r}): use 'drop', 'even' or 'carry'")

    @property
    def batch_sampler(self) -> Sampler[list[Any]]:
        """Indices of this rank's micro-batches from the position on, for a loader of one's own.

        `CheckpointManager(loader=StatefulDataLoader(dataset, batch_sampler=elastic.batch_sampler))` keeps the position
        of `elastic`, whose `weight`, `step_done` and so on hold for the batches at hand.
        """
        return MicroBatches(self, **self._sampling)

    @property
    def at_end(self) -> bool:
        """Whether the micro-batch at hand is the epoch's last."""
        return self._handed is not None and self._handed[0] != self._epoch

    @property
    def order_id(self) -> str:
        """Algorithm, version and parameters of the order."""
        return self._order.id

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return self._order.length

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch, for any number of ranks."""
        whole, rest = divmod(self.length, self.global_batch_size)
        return whole + (rest > 0 and self.tail != "drop")

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of a run of `epochs` epochs, for any number of ranks: the horizon of a schedule."""
        if self.tail == "carry":
            return -(-self.length * epochs // self.global_batch_size)
        return epochs * self.steps_per_epoch

    def set_epoch(self, epoch: int, *, final: bool = False, restarts: int | None = None) -> None:
        """Go to an epoch's first sample, unless the position is in that epoch already.

        Args:
            final: it is the run's last one: `tail="carry"` then ends as "even".
            restarts: how often the epoch was begun anew; each time it has another order. None: as often as before.
        """
        if restarts is None:
            restarts = self._restarts if epoch == self._epoch else 0
        if (epoch, restarts) != (self._epoch, self._restarts):
            self._epoch, self._samples, self._restarts = epoch, 0, restarts
        self._final, self._handed = final, None

    def commit(self) -> None:
        """The windows handed over so far are used up: the position moves behind them. Every rank calls it."""
        if self._handed is not None:
            if self._handed[0] != self._epoch:
                self._restarts = 0
            (self._epoch, self._samples), self._handed = self._handed, None

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is a position in; the same on every rank."""
        return {
            "kind": _KIND,
            "order": self.order_id,
            "seed": self.seed,
            "length": self.length,
            "epoch": self._epoch,
            "samples": self._samples,
            "restarts": self._restarts,
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """As `load_state_dict`, from the states of all ranks that saved, which are the same."""
        self.load_state_dict(states[0])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a stored position.

        Raises:
            DataChanged: it belongs to another order, seed or length.
        """
        if not isinstance(state, Mapping) or state.get("kind") != _KIND:
            raise DataChanged("this is not the position of an ElasticLoader: start the epoch anew, without it")
        for name, now in (("order", self.order_id), ("seed", self.seed), ("length", self.length)):
            if state[name] != now:
                raise DataChanged(
                    f"the stored position belongs to another order ({name} was {state[name]!r}, now {now!r}): restore "
                    f"the {name}, or start the epoch anew"
                )
        self._epoch, self._samples, self._restarts = state["epoch"], state["samples"], state["restarts"]
        self._handed = None

    def __iter__(self) -> Iterator[Any]:
        self._generator.manual_seed(mix(self.seed, self._epoch, self._samples, self.rank) & (2**63 - 1))
        return self.follow(self._moved(iter(self._loader), to_device))

    def follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand over the batches that another loader made of `batch_sampler`, keeping weights and position for them."""
        self._handed = None
        epoch, windows = self._epoch, self._windows()
        for number in range(windows.count):
            first, size = windows.span(number)
            shares = self._shares(first, size)
            window: Iterator[Any] = itertools.islice(batches, len(shares))
            if self._count is not None and len(shares) > 1:
                held = list(window)
                counts = zip(held, shares, strict=True)
                self._counts = [int(self._count(batch)) if low < high else 0 for batch, (low, high) in counts]
                window = iter(held)
            for cut, batch in enumerate(window, start=1):
                low, high = shares[cut - 1]
                self._at_hand(real=high - low, cut=cut, cuts=len(shares), size=size)
                if self.step_done:
                    on, samples = windows.after(number)
                    self._handed = epoch + on, samples
                yield batch
            if self.commits_by_itself:
                self.commit()

    def _windows(self) -> Windows:
        return Windows(
            length=self.length,
            start=self._samples,
            batch=self.global_batch_size,
            tail=self.tail,
            final=self._final,
        )

    def _shares(self, first: int, size: int) -> list[tuple[int, int]]:
        """Positions [low, high) of this rank's micro-batches in a window; empty ones where samples do not suffice."""
        low, high = near_equal(first, size, self.rank, self.world_size)
        cuts = self._cuts(size)
        return [near_equal(low, high - low, cut, cuts) for cut in range(cuts)]


class MicroBatches(Sampler[list[Any]]):
    """This rank's micro-batches from the loader's position on. Iterating spends nothing: torch may do it twice."""

    def __init__(self, loader: ElasticLoader, *, keyed: bool, by_position: bool):
        self.loader, self._keyed, self._by_position = loader, keyed, by_position

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[Any]]:
        loader, windows, epoch = self.loader, self.loader._windows(), self.loader._epoch
        share = -(-loader.global_batch_size // loader.world_size)
        stride = max(1, _CHUNK // share)
        for start in range(0, windows.count, stride):
            numbers = range(start, min(windows.count, start + stride))
            spans = [windows.span(number) for number in numbers]
            cuts = [(first, low, high) for first, size in spans for low, high in loader._shares(first, size)]
            # A micro-batch without a real sample repeats the window's first.
            bounds = [(low, high) if low < high else (first, first + 1) for first, low, high in cuts]
            positions = np.concatenate([np.arange(low, high) for low, high in bounds])
            samples = self._samples(epoch, positions)
            at = 0
            for (first, _, _), (low, high) in zip(cuts, bounds, strict=True):
                batch = samples[at : at + high - low]
                at += high - low
                yield [(*key, epoch, first) for key in batch] if self._keyed else batch

    def _samples(self, epoch: int, positions: np.ndarray) -> list[Any]:
        order, length = self.loader._order, self.loader.length
        ahead = positions >= length
        indices = np.empty_like(positions)
        for later in (False, True):
            part = ahead == later
            if part.any():
                number = epoch + 1 if later else epoch + self.loader._restarts * RESTART_STRIDE
                indices[part] = order.for_epoch(number)(positions[part] - length * later)
        if not self._keyed:
            return indices.tolist()
        streams = positions % length if self._by_position else indices
        return list(zip(indices.tolist(), (epoch + ahead).tolist(), streams.tolist(), strict=True))
