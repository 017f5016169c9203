"""Ranks of an ElasticLoader in one process, driven in step: what a global step is made of, without any network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils.data import Dataset

from pimm_ray import ElasticLoader


class Indices(Dataset):
    """Item i is i."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index


@dataclass(frozen=True)
class MicroBatch:
    """What one rank was handed, and what its loader said of it."""

    batch: Any
    real: int
    weight: float
    accumulate: int


class Ranks:
    """One loader a rank, all in the same place. `start`: a stored position."""

    def __init__(self, world: int, dataset: Any, batch: int, *, start: dict[str, Any] | None = None, **settings: Any):
        self.loaders = []
        for rank in range(world):
            place = {"is_initialized": lambda: True, "get_rank": lambda r=rank: r, "get_world_size": lambda: world}
            with mock.patch.multiple(dist, **place):
                loader = ElasticLoader(dataset, batch, **settings)
            loader.commits_by_itself = False
            if start is not None:
                loader.load_state_dict(start)
            self.loaders.append(loader)

    @property
    def state(self) -> dict[str, Any]:
        """The position, which is the same on every rank, as a checkpoint holds it."""
        states = [json.dumps(loader.state_dict()) for loader in self.loaders]
        assert len(set(states)) == 1, "every rank is in the same place"
        return json.loads(states[0])

    def commit(self) -> None:
        for loader in self.loaders:
            loader.commit()

    def windows(self, epochs: int) -> Iterator[list[list[MicroBatch]]]:
        """Window by window, what each rank was handed, to the end of the run. Whoever iterates commits, or does not."""
        while (epoch := self.state["epoch"]) < epochs:
            for loader in self.loaders:
                loader.set_epoch(epoch, final=epoch + 1 == epochs)
            yield from self.windows_of_epoch()
            if self.state["epoch"] == epoch:
                assert self.loaders[0].at_end, "after an epoch's last step the next one begins"
                return  # that step was not committed

    def windows_of_epoch(self) -> Iterator[list[list[MicroBatch]]]:
        iterators = [iter(loader) for loader in self.loaders]
        while True:
            window: list[list[MicroBatch]] = [[] for _ in self.loaders]
            while True:
                batches = [next(iterator, None) for iterator in iterators]
                assert len({batch is None for batch in batches}) == 1, "all ranks end together"
                if batches[0] is None:
                    assert not any(window), "an epoch ends with a whole window"
                    return
                for part, batch, loader in zip(window, batches, self.loaders, strict=True):
                    part.append(MicroBatch(batch, loader.real, loader.weight, loader.accumulate))
                ended = {loader.step_done for loader in self.loaders}
                assert len(ended) == 1, "all ranks end a window together"
                if ended == {True}:
                    break
            yield window


def samples_of(window: list[list[MicroBatch]]) -> list[int]:
    """The samples of a global step, sorted, without those that only fill up."""
    return sorted(index for part in window for micro in part for index in micro.batch[: micro.real].tolist())
