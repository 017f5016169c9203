"""Any loader, seen as something with a shape, an order and a position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from pimm_ray.elastic.own_loader import LoaderCursor
from pimm_ray.elastic.plan import Position, RunShape


class PositionLoader(Protocol):
    """A loader with one position over all ranks, good for any number of them: `ElasticLoader`."""

    global_batch_size: int
    num_workers: int
    commits_by_itself: bool

    @property
    def step_done(self) -> bool: ...
    @property
    def step_samples(self) -> int: ...
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


def cursor_for(loader: Any) -> LoaderCursor:
    """The view of a loader that fits its kind.

    Raises:
        TypeError: it is a wrapper around a loader that keeps its own position.
    """
    if hasattr(inner := getattr(loader, "_dataloader", None), "load_state_dicts"):
        kind = type(inner).__name__
        raise TypeError(
            f"ray.train.torch.prepare_data_loader(...) around a {kind} would hide its position: use the {kind} itself, "
            "with device= to have batches moved"
        )
    return PositionCursor(loader) if hasattr(loader, "load_state_dicts") else LoaderCursor(loader)


class PositionCursor(LoaderCursor):
    """Nothing of its position depends on the number of ranks, and making an iterator draws from none of the streams."""

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

    def iterate(self, state: Any = None, *, consumed: int = 0, begun: bool = False) -> Iterator[Any]:
        return iter(self.loader)

    def hand_out(self, iterator: Iterator[Any], start: int) -> Iterator[tuple[Any, int, bool]]:
        for batch in iterator:
            yield batch, self.loader.step_samples if self.loader.step_done else 0, self.loader.at_end
