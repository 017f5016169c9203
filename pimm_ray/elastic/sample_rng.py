"""Random draws inside a data set as a function of (seed, epoch, sample), whoever loads it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from pimm_ray.elastic.order import mix


class SeededDataset:
    """Keys are (sample, epoch, stream, epoch and first position of the window); `stream` is what draws depend on. The
    two epochs differ in a window that carries over."""

    def __init__(self, dataset: Any, seed: int):
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, keys: list[tuple[int, int, int, int, int]]) -> _Drawn:
        with _streams_put_back():
            items = []
            for index, epoch, stream, *_ in keys:
                _seed_streams(mix(self._seed, epoch, stream))
                items.append(self._dataset[index])
        *_, epoch, first = keys[0]
        return _Drawn(items, mix(self._seed, epoch, first, 1))


class _Drawn(list[Any]):
    """Samples, with the seed of what collate draws."""

    def __init__(self, items: list[Any], seed: int):
        super().__init__(items)
        self.seed = seed


class SeededCollate:
    """Collate whose draws are a function of the window."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, drawn: _Drawn) -> Any:
        with _streams_put_back():
            _seed_streams(drawn.seed)
            return self._collate(list(drawn))


def _seed_streams(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _streams_put_back() -> Iterator[None]:
    """The training process goes on as if nothing was drawn; a loader worker has no other use for its streams."""
    if get_worker_info() is not None:
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
