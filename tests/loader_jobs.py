"""A training job on an ElasticLoader, in real gloo ranks that are killed, and its twin that never is."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

from pimm_ray import CheckpointManager, ElasticLoader, ElasticPolicy, ResumePlan, SavePolicy, TrainState
from tests.elastic_jobs import listening
from tests.ranks import Outcome, die, run_ranks, try_ranks


class Numbers(Dataset):
    """Items (index, features, target), in float64."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        features = torch.sin(torch.arange(1, 4, dtype=torch.float64) * (index + 1))
        return index, features, features.prod().reshape(1)


def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)


def train(run: Run) -> None:
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            run.learn(batch)


@dataclass(frozen=True)
class Job:
    """What is trained. `loader`: more arguments of the loader, as pairs."""

    length: int = 53
    batch: int = 16
    micro: int | None = None
    epochs: int = 2
    tail: str = "drop"
    workers: int = 0
    loader: tuple[tuple[str, Any], ...] = ()
    schedule: Callable[..., Any] | None = one_cycle
    policy: ElasticPolicy = field(default_factory=ElasticPolicy)
    loop: Callable[[Run], None] = train
    every: int | None = 2

    def but(self, **changes: Any) -> Job:
        return replace(self, **changes)


@dataclass(frozen=True)
class Kill:
    """How an attempt ends, at optimizer step `at`: "after" its `manager.step()`; "before" it, when the optimizer has
    stepped already; "within" the next window; "one": before it, only the last rank, and the others find out."""

    at: int
    when: str = "after"


@dataclass(frozen=True)
class Step:
    """What one rank saw of one optimizer step: written to a file at once, so that a killed rank tells it too."""

    attempt: int
    rank: int
    world: int
    number: int
    epoch: int
    ids: list[int]
    rate: float
    state: dict[str, Any]


@dataclass
class Record:
    """What one rank had at the end of an attempt."""

    plan: ResumePlan
    lines: list[str]
    total_steps: int
    state: TrainState = field(default_factory=TrainState)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Run:
    """One attempt on one rank: what a user's script builds, and a log."""

    def __init__(self, rank: int, folder: str, job: Job, attempt: int, kill: Kill | None):
        self.job, self.rank, self.attempt, self.kill, self.log = job, rank, attempt, kill, Path(folder) / "log"
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(100 * attempt + rank)
        net = network()
        self.model = DistributedDataParallel(net) if dist.is_initialized() else net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        self.loader = ElasticLoader(
            Numbers(job.length),
            job.batch,
            micro_batch_size=job.micro,
            tail=job.tail,
            num_workers=job.workers,
            **dict(job.loader),
        )
        total = self.loader.total_steps(job.epochs)
        self.scheduler = job.schedule(self.optimizer, total) if job.schedule else None
        self.manager = CheckpointManager(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            storage=folder,
            save=SavePolicy(every_steps=job.every, at_end=False, timeout_seconds=20),
            elastic=job.policy,
        )
        with listening() as lines:
            plan = self.manager.resume()
        self.record = Record(plan, lines, total)
        self.ids: list[int] = []

    def learn(self, batch: Any) -> None:
        """One micro-batch and, when it ends a window, the step."""
        ids, x, y = batch
        loader, kill = self.loader, self.kill
        if kill and kill.when == "within" and self.manager.state.global_step == kill.at:
            die()
        with loader.sync(self.model):
            (nn.functional.mse_loss(self.model(x), y) * loader.weight).backward()
        self.ids += ids[: loader.real].tolist()
        if loader.step_done:
            self.step()

    def step(self) -> None:
        epoch, number = self.manager.state.epoch, self.manager.state.global_step + 1
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.optimizer.zero_grad()
        kill = self.kill if self.kill and self.kill.at == number else None
        if kill and (kill.when == "before" or (kill.when == "one" and self.rank == self.world - 1)):
            die()
        self.manager.step()
        step = Step(self.attempt, self.rank, self.world, number, epoch, self.ids, rate, asdict(self.manager.state))
        self.ids = []
        with open(self.log, "ab", buffering=0) as file:
            file.write((json.dumps(asdict(step)) + "\n").encode())
        if kill and kill.when == "after":
            die()

    def finish(self) -> Record:
        self.manager.finish()
        self.record.state = self.manager.state
        self.record.weights = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.record.weights = {key.removeprefix("module."): value for key, value in self.record.weights.items()}
        return self.record


def attempt(rank: int, folder: str, job: Job, number: int, kill: Kill | None) -> Record:
    run = Run(rank, folder, job, number, kill)
    job.loop(run)
    return run.finish()


@dataclass
class Global:
    """One optimizer step of one attempt, over all ranks."""

    attempt: int
    world: int
    number: int
    epoch: int
    ids: list[int]
    rate: float
    state: dict[str, Any]


def history(folder: Any) -> list[Global]:
    """The steps of all attempts that all their ranks finished."""
    by_step: dict[tuple[int, int], list[Step]] = {}
    for line in (Path(folder) / "log").read_text().splitlines():
        step = Step(**json.loads(line))
        by_step.setdefault((step.attempt, step.number), []).append(step)
    steps = []
    for (number_of_attempt, number), parts in sorted(by_step.items()):
        if len(parts) < parts[0].world:
            continue
        for part in parts:
            assert (part.epoch, part.rate, part.state) == (parts[0].epoch, parts[0].rate, parts[0].state), "ranks agree"
        ids = sorted(index for part in parts for index in part.ids)
        first = parts[0]
        steps.append(Global(number_of_attempt, first.world, number, first.epoch, ids, first.rate, first.state))
    return steps


@functools.cache
def twin(job: Job) -> tuple[Record, dict[int, Global]]:
    """The run that is never interrupted, in one process without workers: how it ended, and its steps by number."""
    with tempfile.TemporaryDirectory() as folder:
        record = attempt(0, folder, job.but(workers=0, micro=None, every=None), 0, None)
        return record, {step.number: step for step in history(folder)}


def broken(folder: Any, job: Job, *attempts: tuple[int, Kill | None], last: int) -> list[Record]:
    """A run whose attempts, of (world, kill), are followed by one of `last` ranks to the end: the records of that."""
    for number, (world, kill) in enumerate(attempts):
        ended(killed(world, folder, job, number, kill), kill)
    return run_ranks(last, attempt, str(folder), job, len(attempts), None)


def killed(world: int, folder: Any, job: Job, number: int, kill: Kill | None) -> list[Outcome]:
    return try_ranks(world, attempt, str(folder), job, number, kill)


def ended(outcomes: list[Outcome], kill: Kill | None) -> None:
    """The attempt ended as it was meant to."""
    dead = [outcome.killed for outcome in outcomes]
    errors = [outcome.error for outcome in outcomes]
    if kill is not None and kill.when == "one":
        assert dead[-1] and not any(dead[:-1]) and all(errors[:-1]), errors
    else:
        assert all(dead) if kill is not None else not any(dead), errors
        assert not any(errors), errors


def assert_same(job: Job, folder: Any, records: list[Record], attempts: int) -> None:
    """Every step that was ever taken had the twin's samples, learning rate and counters; it ended at its weights."""
    expected, steps = twin(job)
    taken = history(folder)
    for step in taken:
        other = steps[step.number]
        assert step.ids == other.ids, f"samples of step {step.number}, attempt {step.attempt} on {step.world} ranks"
        assert (step.epoch, step.rate, step.state) == (other.epoch, other.rate, other.state)
    last = [step.number for step in taken if step.attempt == attempts]
    assert last == list(range(records[0].plan.step + 1, len(steps) + 1)), "to the end, each step once"
    for record in records:
        assert record.total_steps == expected.total_steps == len(steps)
        assert record.state == expected.state
        for name, value in record.weights.items():
            assert (value - expected.weights[name]).abs().max().item() <= 1e-12, name
    assert {number for step in taken for number in [step.number]} == set(steps), "no step was skipped"
