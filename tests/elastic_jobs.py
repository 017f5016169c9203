"""A tiny job that is interrupted, resumed on other workers, and tells what it saw; and folders to find it in."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from pimm_ray import CheckpointManager, ResumePlan, TrainState, find_checkpoint
from pimm_ray.checkpoint.layout import MARKER, CheckpointName, seal
from tests.ranks import run_ranks


class Numbers(Dataset):
    """`samples` items; each returns its own index."""

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def distributed(job: Job, rank: int, world: int) -> Any:
    data = Numbers(job.samples)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=job.shuffle_seed, shuffle=job.shuffle)
    return StatefulDataLoader(data, job.batch, sampler=sampler, num_workers=job.workers)


@dataclass
class Story:
    """What one rank saw of one attempt."""

    plan: ResumePlan
    lines: list[str]
    restored: dict[str, Any]
    """As `resume()` left it: weights, moments, schedule, state, and the next draws of each stream."""
    ids: dict[int, list[int]] = field(default_factory=dict)
    """Samples by epoch, in order."""
    rates: list[float] = field(default_factory=list)
    """Learning rate that each step ended with."""
    left: dict[str, Any] = field(default_factory=dict)
    """The same as `restored`, at the end."""
    state: TrainState = field(default_factory=TrainState)


@dataclass(frozen=True)
class Job:
    folder: Path
    steps: int | None = None
    """Optimizer steps of this attempt; then it saves and leaves in mid-epoch. None: to the end."""
    save: bool = True
    """Whether it saves when it leaves."""
    epochs: int = 1
    samples: int = 40
    batch: int = 2
    workers: int = 0
    shuffle: bool = True
    shuffle_seed: int = 0
    loader: Callable[[Job, int, int], Any] = distributed
    schedule: Callable[[Any], Any] | None = None
    schedule_per_epoch: bool = False
    checkpoint: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the manager."""
    on_step: Callable[[CheckpointManager, int], None] = lambda manager, step: None

    def but(self, **changes: Any) -> Job:
        return replace(self, **changes)

    def on(self, world: int) -> list[Story]:
        """Run it on real ranks; what each saw."""
        return run_ranks(world, self) if world > 1 else [self(0)]

    def alone(self) -> Story:
        return self(0)

    def __call__(self, rank: int) -> Story:
        world = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(7)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = self.schedule(optimizer) if self.schedule else None
        loader = self.loader(self, rank, world)
        options = {"storage": self.folder, "optimizer": optimizer, "scheduler": scheduler, **self.options}
        with listening() as lines:
            manager = CheckpointManager(model=model, loader=loader, **options)
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(100 + rank)
            plan = manager.resume(checkpoint=self.checkpoint)

            def now() -> dict[str, Any]:
                schedule = scheduler and {k: v for k, v in scheduler.state_dict().items() if not callable(v)}
                return {
                    "weights": [p.tolist() for p in model.parameters()],
                    "moments": [{k: v.tolist() for k, v in optimizer.state[p].items()} for p in model.parameters()],
                    "rate": [group["lr"] for group in optimizer.param_groups],
                    "schedule": schedule,
                    "scaler": "scaler" in options and options["scaler"].state_dict(),
                    "state": manager.state,
                    "draws": next_draws(),
                }

            story = Story(plan=plan, lines=lines, restored=now())
            done = 0
            for epoch in manager.epochs(self.epochs):
                for indices in manager.batches() if self.steps != 0 else ():
                    _ = [torch.rand(()) for _ in range(1 + rank)], random.random(), np.random.rand()
                    model(indices.float().reshape(-1, 1)).mean().backward()
                    for parameter in model.parameters():
                        if world > 1:
                            dist.all_reduce(parameter.grad)
                    optimizer.step()
                    optimizer.zero_grad()
                    if scheduler and not self.schedule_per_epoch:
                        scheduler.step()
                    manager.step()
                    done += 1
                    story.ids.setdefault(epoch, []).extend(indices.tolist())
                    story.rates.append(optimizer.param_groups[0]["lr"])
                    self.on_step(manager, done)
                    if done == self.steps:
                        if self.save:
                            manager.save()
                        break
                if done == self.steps or self.steps == 0:
                    break
                if scheduler and self.schedule_per_epoch:
                    scheduler.step()
            else:
                manager.finish()
            story.left, story.state = now(), manager.state
        return story


@contextmanager
def listening() -> Iterator[list[str]]:
    """What this process logs meanwhile, one text a line."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pimm_ray")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def next_draws() -> list[float]:
    """What python, numpy and torch would give next; the streams stay where they are."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draws = [x for _ in range(3) for x in (random.random(), float(np.random.rand()), torch.rand(()).item())]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return draws


def said(lines: list[str], *words: str) -> int:
    """How many lines hold all these words."""
    return sum(all(word in line for word in words) for line in lines)


def folders(root: Path) -> list[str]:
    """Names of the checkpoint folders in a run, oldest first."""
    names = {CheckpointName.parse(path.name): path.name for path in root.iterdir() if path.is_dir()}
    return [names[name] for name in sorted(name for name in names if name)]


def steps_kept(root: Path) -> list[int]:
    return [CheckpointName.parse(name).step for name in folders(root)]


def newest_step(root: Path) -> int | None:
    found = find_checkpoint(root)
    return found and found.step


def copy_as(source: Path, name: str) -> Path:
    """A complete checkpoint beside `source`, under another name, whose manifest agrees with that name."""
    parsed = CheckpointName.parse(name)
    target = source.parent / name
    shutil.copytree(source, target)
    change_marker(target, step=parsed.step, attempt=parsed.attempt)
    return target


def change_marker(folder: Path, **changes: Any) -> None:
    """Let the marker of a checkpoint say something else, as if it had been written so."""
    document = json.loads((folder / MARKER).read_bytes()) | changes
    del document["xxh3"]
    (folder / MARKER).write_bytes(seal(document))


def flip_byte(file: Path, at: int = -1) -> None:
    """Damage one byte; a second call with the same arguments heals it."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
