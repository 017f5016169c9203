"""What `ElasticLoader` and `ElasticStream` share: the micro-batch at hand, its weight, and the other ranks."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pimm_ray.elastic.plan import ELASTIC
from pimm_ray.elastic.windows import Tail, Windows, micro_batches

logger = logging.getLogger(__name__)


class WindowedLoader(ABC):
    """Hands over the micro-batches of one window (one optimizer step) after the other, aligned over all ranks."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int | None,
        *,
        seed: int,
        tail: Tail,
        num_workers: int,
        count: Callable[[Any], int] | None,
        device: torch.device | str | None,
    ):
        for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
            unset = value is None and name == "micro_batch_size"
            if not unset and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{type(self).__name__}({name}={value!r}): use a whole number of samples above 0")
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.seed, self.tail, self.num_workers = seed, tail, num_workers
        self._epoch = self._samples = self._restarts = 0
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.weight, self.real, self.step_done, self.step_samples = 0.0, 0, False, 0
        self.accumulate = micro_batches(global_batch_size, self.world_size, micro_batch_size)
        self.commits_by_itself = True
        self._count, self._counts, self._total = count, list[int](), 0
        self._device = torch.device(device) if device is not None else None
        self._generator = torch.Generator()
        self._group: Any = None
        if self.rank == 0 and self.world_size > global_batch_size:
            logger.warning(
                "%d ranks share global batches of %d samples: %d of them work with weight 0",
                self.world_size, global_batch_size, self.world_size - global_batch_size,
            )  # fmt: skip

    @property
    @abstractmethod
    def order_id(self) -> str:
        """Algorithm, version and parameters of the order."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Samples of an epoch; None when unknown."""

    @property
    @abstractmethod
    def at_end(self) -> bool:
        """Whether the micro-batch at hand is the epoch's last."""

    @abstractmethod
    def set_epoch(self, epoch: int, *, final: bool = False, restarts: int | None = None) -> None:
        """Go to an epoch's first sample, unless the position is in that epoch already.

        Args:
            final: it is the run's last one: `tail="carry"` then ends as "even".
            restarts: how often the epoch was begun anew; each time it has another order. None: as often as before.
        """

    @abstractmethod
    def commit(self) -> None:
        """The windows handed over so far are used up: the position moves behind them. Every rank calls it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the position, and what it is a position in."""

    @abstractmethod
    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to a stored position, from the parts of all ranks that saved. Every rank calls it."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def _windows(self) -> Windows:
        """The windows from the position to the epoch's end."""

    def __len__(self) -> int:
        """Micro-batches that the next iteration hands over: from the position to the epoch's end."""
        windows = self._windows()
        if not windows.count:
            return 0
        last = self._cuts(windows.span(windows.count - 1)[1])
        return (windows.count - 1) * self._cuts(self.global_batch_size) + last

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and samples of it over all ranks, that committed steps have used up."""
        return self._epoch, self._samples

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

    def weight_for(self, n_local: int) -> float:
        """As `weight`, for a loss that is a mean over something else than samples. One small all-reduce a window.

        Every rank calls it for every micro-batch.

        Args:
            n_local: how many points or tokens this micro-batch's loss averages over. 0 is allowed; for a micro-batch
                with `real == 0` it counts as 0.

        Raises:
            ValueError: a window has several micro-batches and the loader was not given `count=`.
        """
        if self.accumulate > 1 and self._count is None:
            raise ValueError(
                "weight_for() in a window of several micro-batches has to know them all: give "
                f"{type(self).__name__}(count=fn), which returns that number for a micro-batch"
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
    def sampler(self) -> Any:
        """Not to be had: who asks wants to deal the samples out anew."""
        raise TypeError(
            f"{type(self).__name__} deals samples to ranks itself: do not wrap it (ray.train.torch.prepare_data_loader "
            "would build another loader and lose the position); give it device= to have batches moved"
        )

    def _at_hand(self, *, real: int, cut: int, cuts: int, size: int) -> None:
        """The micro-batch about to be handed over: number `cut`, from 1, of `cuts` in a window of `size` samples."""
        self.real, self.accumulate, self.step_done, self.step_samples = real, cuts, cut == cuts, size
        self.weight = self.world_size * real / size

    def _cuts(self, size: int) -> int:
        return micro_batches(size, self.world_size, self.micro_batch_size)

    def _moved(self, items: Iterator[Any], move: Callable[[Any, torch.device], Any]) -> Iterator[Any]:
        if self._device is None:
            yield from items
            return
        # Without workers what a data set draws comes from this process' streams: no batch may be loaded before the
        # step that the streams are saved at.
        most = 1 if self.num_workers else 0
        ahead: deque[Any] = deque()
        for item in items:
            ahead.append(move(item, self._device))
            if len(ahead) > most:
                yield ahead.popleft()
        yield from ahead

    def _sum_over_ranks(self, *values: int) -> list[int]:
        if self.world_size == 1:
            return list(values)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        total = torch.tensor(values)
        dist.all_reduce(total, group=self._group)
        return [int(value) for value in total]


def to_device(value: Any, device: torch.device) -> Any:
    """Move a batch and the tensors inside it, without waiting for pinned ones."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return type(value)({key: to_device(item, device) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
