"""A tiny training job for tests of exact resume: run it whole or in pieces, and compare what was seen on the way."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from pimm_ray import CheckpointManager, ResumePlan, SavePolicy
from tests.ranks import die, run_ranks, try_ranks


class Numbers(Dataset):
    """Items (index, features, target); `augment` adds noise from each global stream of the process that loads."""

    def __init__(self, length: int, augment: bool):
        self.length, self.augment = length, augment

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        features = torch.sin(torch.arange(4) * (index + 1.0))
        noise = random.random() + np.random.rand() + torch.rand(()).item() if self.augment else 0.0
        return index, features + 0.1 * noise, features.sum().reshape(1)


def distributed(dataset: Any, job: Job, rank: int, world: int) -> Any:
    """Each rank its own part of the data, in an order that the epoch number decides."""
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=5)
    return StatefulDataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers)


def shuffled(dataset: Any, job: Job, rank: int, world: int) -> Any:
    return StatefulDataLoader(dataset, job.batch, shuffle=True, num_workers=job.workers)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)


def by_epochs(run: Training) -> None:
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            run.learn(batch)
        run.after_epoch()


@dataclass(frozen=True)
class Job:
    """What is trained, and how. Two runs of equal jobs must see the same and end the same."""

    samples: int = 24
    batch: int = 4
    epochs: int = 3
    loader: Callable[..., Any] = distributed
    workers: int = 0
    accumulate: int = 1
    optimizer: Callable[..., Any] = momentum
    schedule: Callable[..., Any] = cosine
    loop: Callable[[Training], None] = by_epochs
    warmup: bool = False
    evaluate: bool = False
    poll_every: float = 2.0


@dataclass(frozen=True)
class Break:
    """How one attempt of a run ends: killed after step `at`. `save`: ask for a save just before."""

    at: int
    save: bool = False


@dataclass(frozen=True)
class Step:
    """What one optimizer step saw."""

    number: int
    epoch: int
    ids: tuple[int, ...]
    lr: tuple[float, ...]
    loss: float
    draws: tuple[float, ...]


@dataclass
class Record:
    """What one rank of one attempt saw, from its resume to its end."""

    plan: ResumePlan
    steps: list[Step] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    next_draws: tuple[list[float], ...] = ()
    state: Any = None
    notes: list[Any] = field(default_factory=list)
    """Whatever a test's own loop wants to tell."""


class Training:
    """One attempt on one rank: everything that a user's script builds, and a log."""

    def __init__(self, rank: int, folder: str, job: Job, every: int | None, ends: Break | None, seed: int):
        self.job, self.ends = job, ends
        seed_streams(seed + 100 * rank)
        world = dist.get_world_size() if dist.is_initialized() else 1
        dataset = Numbers(job.samples, augment=job.workers == 0)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # No bias before the BatchNorm: its gradient would be nothing but rounding, which AdamW makes large.
            first = nn.Linear(4, 16, bias=False)
            net = nn.Sequential(
                first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 9), nn.Linear(9, 1)
            )
        self.model = DistributedDataParallel(net) if world > 1 else net
        self.optimizer = job.optimizer(net.parameters())
        self.scheduler = job.schedule(self.optimizer)
        self.loader = job.loader(dataset, job, rank, world)
        self.manager = CheckpointManager(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            save=SavePolicy(every_steps=every, at_end=every is not None, timeout_seconds=30,
                            poll_every_seconds=job.poll_every),
            storage=folder,
        )
        self.record = Record(self.manager.resume(warmup=self.warm_up if job.warmup else None))
        self.window: list[tuple[list[int], float, float]] = []

    def warm_up(self) -> None:
        self.model(torch.randn(self.job.batch, 4)).sum().backward()

    def learn(self, batch: Any) -> None:
        """One micro-batch and, when it ends a window, the step."""
        ids, x, y = batch
        draw = random.random() + np.random.rand() + torch.rand(()).item()
        loss = nn.functional.mse_loss(self.model(x + 0.1 * draw), y) / self.job.accumulate
        loss.backward()
        self.window.append((ids.tolist(), loss.item(), draw))
        if len(self.window) == self.job.accumulate:
            self.step()

    def step(self) -> None:
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        epoch = self.manager.state.epoch
        ids, losses, draws = zip(*self.window, strict=True)
        self.window = []
        self.optimizer.step()
        self.scheduler.step(*([losses[-1]] if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        self.optimizer.zero_grad()
        number = self.manager.state.global_step + 1
        seen = tuple(index for part in ids for index in part)
        self.record.steps.append(Step(number, epoch, seen, rates, sum(losses), draws))
        self.manager.step(loss=losses[-1])
        if self.ends is not None and number == self.ends.at:
            if self.ends.save:
                self.manager.save()
            die()

    def drop_window(self) -> None:
        """Forget the batches that no step has used."""
        self.window = []
        self.optimizer.zero_grad()

    def after_epoch(self) -> None:
        """An evaluation, which draws from the global stream because it iterates a DataLoader."""
        if self.job.evaluate:
            dataset = Numbers(self.job.samples, augment=True)
            for _, x, _ in DataLoader(dataset, self.job.batch, shuffle=True):
                self.record.notes.append(x.sum().item())

    def finish(self) -> Record:
        self.manager.finish()
        record = self.record
        record.weights = {key: value.clone() for key, value in self.model.state_dict().items()}
        record.optimizer, record.scheduler = self.optimizer.state_dict(), self.scheduler.state_dict()
        record.next_draws, record.state = next_draws(), self.manager.state
        return record


def seed_streams(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def next_draws(count: int = 8) -> tuple[list[float], ...]:
    """The next values of the python, numpy and torch streams."""
    return [random.random() for _ in range(count)], np.random.rand(count).tolist(), torch.rand(count).tolist()


def attempt(rank: int, folder: str, job: Job, every: int | None, ends: Break | None, seed: int) -> Record:
    run = Training(rank, folder, job, every, ends, seed)
    job.loop(run)
    return run.finish()


@functools.cache
def twin(job: Job, world: int = 1) -> list[Record]:
    """The records, by rank, of a run that is never interrupted and never saves."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(world, attempt, folder, job, None, None, 1, group=world > 1)


def broken(folder: Any, job: Job, *ends: Break, every: int | None = None, world: int = 1) -> list[Record]:
    """The records of the last attempt of a run whose earlier attempts were each killed. Each starts from other seeds,
    so that what is equal to the twin's afterwards was restored."""
    for number, end in enumerate(ends):
        outcomes = try_ranks(world, attempt, str(folder), job, every, end, 1 + 1000 * number, group=world > 1)
        assert all(outcome.killed for outcome in outcomes), [outcome.error for outcome in outcomes]
    return run_ranks(world, attempt, str(folder), job, every, None, 9999, group=world > 1)


def assert_continues(twins: list[Record], records: list[Record], *, at: int) -> None:
    """From its resume at step `at` on, each rank saw and became what its twin did, bit for bit."""
    for expected, found in zip(twins, records, strict=True):
        assert found.plan.step == at and found.plan.exact, found.plan.explain()
        assert found.steps == expected.steps[at:]
        for name in ("weights", "optimizer", "scheduler", "next_draws", "state"):
            assert identical(getattr(found, name), getattr(expected, name)), name


def identical(a: Any, b: Any) -> bool:
    """Equal to the last bit, tensors and containers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    return bool(a == b)


def batches_of(loader: Any) -> Iterator[list[int]]:
    for ids, *_ in loader:
        yield ids.tolist()
