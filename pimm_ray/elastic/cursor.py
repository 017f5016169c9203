"""Any loader, seen as something with a shape, an order and a position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from pimm_ray.elastic.loader import ElasticLoader, MicroBatches
from pimm_ray.elastic.own_loader import LoaderCursor
from pimm_ray.elastic.plan import Position, RunShape
from pimm_ray.elastic.windowed import WindowedLoader
from pimm_ray.errors import PimmRayError, WorldSizeError


def cursor_for(loader: Any) -> LoaderCursor:
    """The view of a loader that fits its kind.

    Raises:
        TypeError: it is a wrapper around a loader that keeps its own position.
    """
    if isinstance(inner := getattr(loader, "_dataloader", None), WindowedLoader):
        kind = type(inner).__name__
        raise TypeError(
            f"ray.train.torch.prepare_data_loader(...) around a {kind} would hide its position: use the {kind} itself, "
            "with device= to have batches moved"
        )
    if isinstance(loader, WindowedLoader):
        return PositionCursor(loader)
    sampler = getattr(loader, "batch_sampler", None)
    return PositionCursor(sampler.loader, made_by=loader) if isinstance(sampler, MicroBatches) else LoaderCursor(loader)


class PositionCursor(LoaderCursor):
    """Nothing of its position depends on the number of ranks."""

    global_position = True
    loader: WindowedLoader

    def __init__(self, loader: WindowedLoader, *, made_by: Any = None):
        """`made_by`: the loader that makes the batches, when it is not `loader` itself."""
        super().__init__(loader)
        self.stateful = True
        self._made_by = made_by
        loader.commits_by_itself = False

    def check(self, world_size: int) -> None:
        if self.loader.world_size != world_size:
            raise WorldSizeError(
                f"the {type(self.loader).__name__} was made for {self.loader.world_size} ranks and there are "
                f"{world_size}: make it after torch.distributed is initialised"
            )

    def shape(self, world_size: int, seed: int) -> RunShape:
        workers = (self._made_by or self.loader).num_workers
        return RunShape(world_size=world_size, loader_workers=workers, **self.loader.shape)

    @property
    def generators(self) -> dict[str, torch.Generator]:
        own = getattr(self._made_by, "generator", None)
        return {"loader": own} if isinstance(own, torch.Generator) else {}

    def position(self, counted: Position) -> Position:
        epoch, samples = self.loader.position
        return replace(counted, epoch=epoch, samples=samples)

    def commit(self) -> None:
        if self.loader.step_samples and not self.loader.step_done:
            raise PimmRayError(
                "manager.step() in the middle of a window: step and call it `if loader.step_done:` only, or "
                "the position would fall behind the steps"
            )
        self.loader.commit()

    def set_epoch(self, epoch: int, drops: int, seed: int, *, final: bool = False) -> bool:
        self.loader.set_epoch(epoch, final=final, restarts=drops)
        return True

    def state(self) -> Any:
        return self.loader.state_dict()

    def iterate(self, state: Any = None, *, consumed: int = 0, begun: bool = False) -> Iterator[Any]:
        if self._made_by is None:
            return iter(self.loader)
        assert isinstance(self.loader, ElasticLoader)
        return self.loader.follow(iter(self._made_by))

    def hand_out(self, iterator: Iterator[Any], start: int) -> Iterator[tuple[Any, int, bool]]:
        for batch in iterator:
            yield batch, self.loader.step_samples if self.loader.step_done else 0, self.loader.at_end
