"""The user's own PyTorch loader, seen as something with a shape, an order and a position."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from pimm_ray.elastic import rng
from pimm_ray.elastic.plan import RESTART_STRIDE, Position, RunShape

_END = object()


class LoaderCursor:
    """The user's own loader. One a process; every rank has the same kind.

    A `torchdata.stateful_dataloader.StatefulDataLoader` (or anything with `state_dict` and `load_state_dict`) can
    be put back into the middle of an epoch; any other iterable only to an epoch's start.
    """

    global_position = False
    """Whether one position serves all ranks, whatever their number."""

    def __init__(self, loader: Any):
        self.loader = loader
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._iterated = False

    def check(self, world_size: int) -> None:
        """Raises WorldSizeError when the loader was made for another number of ranks."""

    def shape(self, world_size: int, seed: int) -> RunShape:
        """What this loader's positions depend on."""
        micro = getattr(self.loader, "batch_size", None)
        return RunShape(
            world_size=world_size,
            loader_workers=getattr(self.loader, "num_workers", 0),
            global_batch=micro * world_size if micro else None,
            micro_batch=micro,
            dataset_size=_length(getattr(self.loader, "dataset", None)),
            order_id=self._order_id() if self.stateful else None,
            seed=seed,
        )

    @property
    def length(self) -> int | None:
        """Batches of an epoch on this rank, where the loader can tell."""
        return _length(self.loader)

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """The loader's own generators, whose streams belong to a checkpoint like the global ones."""
        owners = {"loader": self.loader, **{f"sampler.{i}": sampler for i, sampler in enumerate(self._samplers())}}
        found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
        return {name: item for name, item in found.items() if isinstance(item, torch.Generator)}

    def position(self, counted: Position) -> Position:
        """Where the next batch comes from, `counted` being what the batches of finished steps add up to."""
        return counted

    def commit(self) -> None:
        """A step is finished."""

    def set_epoch(self, epoch: int, drops: int, seed: int, *, final: bool = False) -> bool:
        """Tell the samplers which epoch begins; `final`: the run's last. After `drops` restarts of it they get another
        order; returns False when none of them can be given one."""
        changed = False
        for part in (self.loader, *self._samplers(), getattr(self.loader, "dataset", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch + drops * RESTART_STRIDE)
                changed |= bool(getattr(part, "shuffle", True))
        if drops and not changed:
            for name, generator in self.generators.items():
                generator.manual_seed(rng.reseeded(seed, epoch, drops))
                changed |= name != "loader"
        draws_from_global = any(_draws_from_global(sampler) for sampler in self._samplers())
        return changed or draws_from_global

    def state(self) -> Any:
        """Where the loader stands: after the batches handed out so far. None when it cannot say."""
        return copy.deepcopy(self.loader.state_dict()) if self.stateful else None

    def iterate(self, state: Any = None, *, consumed: int = 0, begun: bool = False) -> Iterator[Any]:
        """A new iterator, from `state`, after `consumed` batches, when one is given.

        `begun`: the run has iterated in an epoch before this one, if perhaps in another process. Whatever is drawn here
        is drawn from the streams that the never interrupted run drew it from.
        """
        loader = self.loader
        if loader is None:
            raise ValueError("CheckpointManager(loader=...) was not given: manager.batches() has nothing to iterate")
        # Persistent workers are started once a run, and the start draws: not so in the never interrupted run by now.
        starts_late = begun and not self._iterated and getattr(loader, "persistent_workers", False)
        self._iterated = True
        if state is None or _is_replayed(state):
            if starts_late:
                before = rng.capture(self.generators)
                iter(loader)
                rng.restore(before, self.generators)
            iterator = iter(loader)
            for _ in range(consumed if state is not None else 0):
                if next(iterator, _END) is _END:
                    break
            return iterator
        loader.load_state_dict(copy.deepcopy(state))
        if starts_late:
            held, loader.generator = loader.generator, torch.Generator()
            iterator = iter(loader)
            loader.generator = held
        else:
            iterator = iter(loader)
        if not getattr(loader, "num_workers", 0):
            _skip_now(iterator)
        return iterator

    def hand_out(self, iterator: Iterator[Any], start: int) -> Iterator[tuple[Any, int, bool]]:
        """Batches from an iterator, each with its number of samples and whether it is the epoch's last. `start` is how
        many of the epoch came before."""
        # Workers cut an iterable data set into batches, each its own part: the length is a guess then.
        guess = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        in_all = None if guess else _length(self.loader)
        index = start
        batch = next(iterator, _END)
        while batch is not _END:
            index += 1
            # A sampler may draw when it finds its end: before a save that will stand at the next epoch's start.
            ahead = next(iterator, _END) if index == in_all else None
            yield batch, self._samples_in(batch, index - 1), ahead is _END
            batch = next(iterator, _END) if ahead is None else ahead

    def _samples_in(self, batch: Any, index: int) -> int:
        size = getattr(self.loader, "batch_size", None)
        if size:
            held = _length(getattr(self.loader, "sampler", None))
            return int(size) if held is None else max(0, min(size, held - index * size))
        return _leading_size(batch)

    def _samplers(self) -> list[Any]:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        found = [batch_sampler, getattr(batch_sampler, "sampler", None), getattr(self.loader, "sampler", None)]
        unique: list[Any] = []
        for sampler in found:
            if sampler is not None and all(sampler is not other for other in unique):
                unique.append(sampler)
        return unique

    def _order_id(self) -> str:
        said = [type(self.loader).__name__]
        for sampler in self._samplers():
            settings = {k: getattr(sampler, k) for k in ("shuffle", "seed", "drop_last") if hasattr(sampler, k)}
            said.append(f"{type(sampler).__name__}({','.join(f'{key}={value}' for key, value in settings.items())})")
        return "/".join(said)


def _is_replayed(state: Any) -> bool:
    """Whether a StatefulDataLoader gets back to `state` only by iterating, its dataset being iterable and stateless.

    torchdata 0.11 then counts what it skips twice, so that its next state is of no use: we skip ourselves.
    """
    if not isinstance(state, Mapping):
        return False
    parts = [state, *state.get("_snapshot", {}).get("_worker_snapshots", {}).values()]
    fetchers = [(part, fetcher) for part in parts if (fetcher := part.get("fetcher_state")) is not None]
    return bool(fetchers) and all(
        part.get("dataset_state") is None and fetcher.get("dataset_iter_state") is None for part, fetcher in fetchers
    )


def _skip_now(iterator: Any) -> None:
    """Skip in a batch sampler without state what a StatefulDataLoader without workers would skip at the first batch.

    That is too late: the sampler draws its order then, and the streams will have moved on.
    """
    if isinstance(getattr(iterator, "_sampler_iter", None), itertools.islice):
        indices = iter(iterator._index_sampler)
        for _ in range(iterator._sampler_iter_yielded):
            next(indices, None)
        iterator._sampler_iter = indices


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _draws_from_global(sampler: Any) -> bool:
    """Whether a sampler shuffles by the global torch stream, which has moved on since the epoch first began."""
    random_kind = "Random" in type(sampler).__name__
    return random_kind and getattr(sampler, "generator", None) is None


def _leading_size(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return _leading_size(next(iter(batch.values()), ()))
    if isinstance(batch, list | tuple):
        nested = batch and (isinstance(batch[0], Mapping | list | tuple) or hasattr(batch[0], "shape"))
        return _leading_size(batch[0]) if nested else len(batch)
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 1
