"""Any PyTorch loader, seen as something with a shape, an order and a position."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from pimm_ray.elastic.plan import RESTART_STRIDE, Position, RunShape
from pimm_ray.elastic.rng import reseeded


class PositionLoader(Protocol):
    """A loader with a position over all ranks, good for any number of them: `ElasticLoader`."""

    global_batch_size: int
    num_workers: int
    seed: int
    commits_by_itself: bool

    @property
    def real(self) -> int: ...
    @property
    def at_end(self) -> bool: ...
    @property
    def position(self) -> tuple[int, int]: ...
    @property
    def shape(self) -> dict[str, Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def set_epoch(self, epoch: int, *, final: bool = False, restarts: int = 0) -> None: ...
    def commit(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dicts(self, states: list[Any]) -> None: ...


def cursor_for(loader: Any) -> Cursor:
    """The view of a loader that fits its kind."""
    return PositionCursor(loader) if hasattr(loader, "load_state_dicts") else Cursor(loader)


class Cursor:
    """The user's own loader. One a process; every rank has the same kind.

    A `torchdata.stateful_dataloader.StatefulDataLoader` (or anything with `state_dict` and `load_state_dict`) can
    be put back into the middle of an epoch; any other iterable only to an epoch's start.
    """

    global_position = False
    """Whether one position serves all ranks, whatever their number."""

    def __init__(self, loader: Any):
        self.loader = loader
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

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
    def generators(self) -> dict[str, torch.Generator]:
        """The loader's own generators, whose streams belong to a checkpoint like the global ones."""
        owners = {"loader": self.loader, **{f"sampler.{i}": sampler for i, sampler in enumerate(self._samplers())}}
        found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
        return {name: item for name, item in found.items() if isinstance(item, torch.Generator)}

    def is_last(self, index: int) -> bool:
        """Whether the batch just handed out, the epoch's `index`th from 1, is its last."""
        return index == _length(self.loader)

    def position(self, counted: Position) -> Position:
        """Where the next batch comes from, `counted` being what the handed out batches add up to."""
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
                generator.manual_seed(reseeded(seed, epoch, drops))
                changed |= name != "loader"
        draws_from_global = any(_draws_from_global(sampler) for sampler in self._samplers())
        return changed or draws_from_global

    def state(self) -> Any:
        """Where the loader stands: after the batches handed out so far. None when it cannot say."""
        return copy.deepcopy(self.loader.state_dict()) if self.stateful else None

    def iterate(self, state: Any = None) -> Iterator[Any]:
        """A new iterator, from `state` when one is given."""
        if self.loader is None:
            raise ValueError("CheckpointManager(loader=...) was not given: manager.batches() has nothing to iterate")
        if state is not None:
            self.loader.load_state_dict(copy.deepcopy(state))
        return iter(self.loader)

    def samples_in(self, batch: Any, index: int) -> int:
        """Samples of this rank in batch number `index` of an epoch."""
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


class PositionCursor(Cursor):
    """A loader that keeps one position for all ranks: nothing of it depends on their number."""

    global_position = True
    loader: PositionLoader

    def __init__(self, loader: PositionLoader):
        super().__init__(loader)
        self.stateful = True
        loader.commits_by_itself = False

    def shape(self, world_size: int, seed: int) -> RunShape:
        return RunShape(world_size=world_size, loader_workers=self.loader.num_workers, **self.loader.shape)

    @property
    def generators(self) -> dict[str, torch.Generator]:
        return {}

    def is_last(self, index: int) -> bool:
        return self.loader.at_end

    def position(self, counted: Position) -> Position:
        epoch, samples = self.loader.position
        return replace(counted, epoch=epoch, samples=samples)

    def commit(self) -> None:
        self.loader.commit()

    def set_epoch(self, epoch: int, drops: int, seed: int, *, final: bool = False) -> bool:
        self.loader.set_epoch(epoch, final=final, restarts=drops)
        return True

    def state(self) -> Any:
        return self.loader.state_dict()

    def iterate(self, state: Any = None) -> Iterator[Any]:
        return iter(self.loader)

    def samples_in(self, batch: Any, index: int) -> int:
        return self.loader.real


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
