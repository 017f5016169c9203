"""What resizes in mid-epoch cost: the user's own loader under pimm_ray, the same loader without it, and ElasticLoader.

    python benchmarks/resize.py            a Markdown table; --json: the same as JSON, with more numbers

The same small training (scikit-learn's handwritten digits, or made-up data without it; float64, DDP over gloo, global
batch 48, 30 steps an epoch, 3 epochs) runs once undisturbed on 2 ranks and once on 2 -> 3 -> 1 -> 2 ranks. It saves
every 5 steps; all ranks die by SIGKILL 3 steps after a save and come back in another number. Three ways:

- own loader, pimm_ray: torchdata's StatefulDataLoader over a DistributedSampler, batch 48 // ranks, given to
  CheckpointManager, which drops a position that is another world's and begins the epoch anew.
- own loader, by hand: the same loader, its state saved and loaded rank by rank with `torch.save` and `torch.load`;
  nobody notices that the world has changed. A new rank takes rank 0's state: the kindest choice, as with none it would
  leave the epoch at a later step than the others.
- ElasticLoader, given to CheckpointManager.

Steps that died with their ranks and were done again count once, in the version that the final weights come from.
"Repeated" are samples beyond once an epoch; a global batch of the undisturbed run is "kept" when the same set came in
the same epoch, at whatever step (JSON: at the same step, too). Each way is compared with its own undisturbed run.
About 20 seconds on 2 cores. Linux only (fork).
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # An optimizer imports it, which takes a second: here once, not in every rank.
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy

Leg = tuple[int, int | None]
"""Ranks, and the optimizer step after which they are killed."""
Step = tuple[int, tuple[int, ...]]
"""Epoch and samples of one global batch, sorted."""

EPOCHS, BATCH, TRAIN, SAVE_EVERY = 3, 48, 1440, 5
STEPS = EPOCHS * TRAIN // BATCH
CALM: list[Leg] = [(2, None)]
RESIZED: list[Leg] = [(2, 18), (3, 53), (1, 78), (2, None)]
LEG_LIMIT = 60.0  # seconds
ROUNDING = 1e-12


@functools.cache  # the ranks are forks of a process that has them
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, in a fixed random order: the first `TRAIN` are for training, the others for the test."""
    numbers = np.random.default_rng(0)
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        labels = numbers.integers(0, 10, 1797)
        images = numbers.random((10, 64))[labels] + numbers.normal(0, 0.5, (len(labels), 64))
    else:
        images, labels = load_digits(return_X_y=True)
        images = images / 16
    shuffled = numbers.permutation(len(labels))
    return images[shuffled], labels[shuffled]


class Run:
    """One attempt on one rank: what every training script has, and a log of the samples of each step."""

    def __init__(self, rank: int, world: int, folder: Path, attempt: int, kill_at: int | None) -> None:
        self.rank, self.world, self.folder, self.kill_at = rank, world, folder, kill_at
        images, labels = map(torch.from_numpy, digits())
        self.train = TensorDataset(images[:TRAIN], labels[:TRAIN], torch.arange(TRAIN))
        self.test = images[TRAIN:], labels[TRAIN:]
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.log = open(folder / f"{attempt}-{rank}.jsonl", "a", buffering=1)

    def own_loader(self) -> tuple[StatefulDataLoader[Any], DistributedSampler[Any]]:
        sampler = DistributedSampler(self.train, self.world, self.rank)
        return StatefulDataLoader(self.train, batch_size=BATCH // self.world, sampler=sampler), sampler

    def learn(self, images: torch.Tensor, labels: torch.Tensor, weight: float = 1.0) -> None:
        (nn.functional.cross_entropy(self.model(images), labels) * weight).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after(self, step: int, epoch: int, samples: torch.Tensor) -> None:
        self.log.write(json.dumps([step, epoch, samples.tolist()]) + "\n")
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self) -> None:
        if self.rank == 0:
            images, labels = self.test
            right = (self.net(images).argmax(1) == labels).double().mean().item()
            torch.save({"weights": self.net.state_dict(), "accuracy": right}, self.folder / "end.pt")


def managed(run: Run, loader: Any) -> None:
    checkpoints, save = run.folder / "checkpoints", SavePolicy(every_steps=SAVE_EVERY)
    manager = CheckpointManager(
        model=run.model, optimizer=run.optimizer, loader=loader, storage=str(checkpoints), save=save
    )
    manager.resume()
    for epoch in manager.epochs(EPOCHS):
        for images, labels, samples in manager.batches():
            # One micro-batch is a whole step here, and every rank has equally many samples: the weight is 1.
            run.learn(images, labels, loader.weight if isinstance(loader, ElasticLoader) else 1.0)
            manager.step()
            run.after(manager.state.global_step, epoch, samples)
    manager.finish()


def own_managed(run: Run) -> None:
    managed(run, run.own_loader()[0])


def elastic(run: Run) -> None:
    managed(run, ElasticLoader(run.train, BATCH))


def own_by_hand(run: Run) -> None:
    loader, sampler = run.own_loader()
    first_epoch = step = 0
    if saves := sorted(run.folder.glob("step-*")):
        own = saves[-1] / f"{run.rank}.pt"
        state = torch.load(own if own.exists() else saves[-1] / "0.pt", weights_only=True)
        run.net.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        first_epoch, step = state["epoch"], state["step"]
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels, samples in loader:
            run.learn(images, labels)
            step += 1
            if step % SAVE_EVERY == 0:
                save = run.folder / f"step-{step:04}"
                save.mkdir(exist_ok=True)
                state = {"model": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}
                state |= {"loader": loader.state_dict(), "epoch": epoch, "step": step}
                torch.save(state, save / f"{run.rank}.pt")
            run.after(step, epoch, samples)


WAYS: dict[str, Callable[[Run], None]] = {
    "`StatefulDataLoader` + `DistributedSampler`, pimm_ray": own_managed,
    "the same, state saved and loaded by hand": own_by_hand,
    "`ElasticLoader`, pimm_ray": elastic,
}


def one_rank(
    way: Callable[[Run], None], rank: int, world: int, folder: Path, attempt: int, kill_at: int | None
) -> None:
    torch.set_num_threads(1)
    meeting = folder / f"rendezvous-{attempt}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    run = Run(rank, world, folder, attempt, kill_at)
    way(run)
    run.finish()
    dist.barrier()  # A rank that leaves early would make those fail that still talk to it.
    os._exit(0)


def train(way: Callable[[Run], None], legs: list[Leg], folder: Path) -> dict[int, Step]:
    """Run all legs; the steps that the final weights come from, by number."""
    folder.mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    for attempt, (world, kill_at) in enumerate(legs):
        arguments = [(way, rank, world, folder, attempt, kill_at) for rank in range(world)]
        ranks = [fork.Process(target=one_rank, args=each) for each in arguments]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + LEG_LIMIT
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in ranks if process.is_alive()]
        for process in late:
            process.kill()
        # When one rank is dead already, another may find out before its own end.
        codes = [process.exitcode for process in ranks]
        if late or (any(codes) if kill_at is None else -signal.SIGKILL not in codes):
            raise RuntimeError(f"{len(late)} of {world} ranks were late (limit {LEG_LIMIT:.0f} s); the codes: {codes}")
    return history(folder, legs)


def history(folder: Path, legs: list[Leg]) -> dict[int, Step]:
    steps: dict[int, Step] = {}
    for attempt, (world, _) in enumerate(legs):
        samples_of: dict[tuple[int, int], list[int]] = {}
        for rank in range(world):
            for line in (folder / f"{attempt}-{rank}.jsonl").read_text().splitlines():
                step, epoch, samples = json.loads(line)
                samples_of.setdefault((step, epoch), []).extend(samples)
        steps |= {step: (epoch, tuple(sorted(samples))) for (step, epoch), samples in samples_of.items()}
    return steps


@dataclass(frozen=True)
class Cost:
    """How a resized run differs from the undisturbed one of the same way."""

    way: str
    steps: int
    repeated: int
    never_seen: int
    same_batches: int
    same_batches_at_same_step: int
    largest_difference: float
    accuracy: float
    accuracy_undisturbed: float

    @property
    def exact(self) -> bool:
        counts = self.steps, self.repeated, self.never_seen, self.same_batches_at_same_step
        return counts == (STEPS, 0, 0, STEPS) and self.largest_difference <= ROUNDING


def measure(name: str, folder: Path) -> Cost:
    calm, resized = train(WAYS[name], CALM, folder / "calm"), train(WAYS[name], RESIZED, folder / "resized")
    seen = Counter((epoch, sample) for epoch, samples in resized.values() for sample in samples)
    ends = [torch.load(folder / run / "end.pt", weights_only=True) for run in ("calm", "resized")]
    weights = [end["weights"] for end in ends]
    return Cost(
        way=name,
        steps=len(resized),
        repeated=sum(seen.values()) - len(seen),
        never_seen=EPOCHS * TRAIN - len(seen),
        same_batches=len(set(calm.values()) & set(resized.values())),
        same_batches_at_same_step=sum(resized.get(step) == batch for step, batch in calm.items()),
        largest_difference=max(float((weights[1][key] - weights[0][key]).abs().max()) for key in weights[0]),
        accuracy=ends[1]["accuracy"],
        accuracy_undisturbed=ends[0]["accuracy"],
    )


def markdown(costs: list[Cost]) -> str:
    worlds = " → ".join(str(world) for world, _ in RESIZED)
    head = [f"{worlds} workers within {EPOCHS} epochs", f"steps (of {STEPS})", "samples repeated", "samples never seen"]
    rows = [[*head, "global batches kept", "largest difference of a weight", "test accuracy (undisturbed)"]]
    for cost in costs:
        row = [cost.way, f"{cost.steps}", f"{cost.repeated}", f"{cost.never_seen}", f"{cost.same_batches} of {STEPS}"]
        accuracies = f"{cost.accuracy:.1%} ({cost.accuracy_undisturbed:.1%})"
        rows.append([*row, f"{cost.largest_difference:.1e}", accuracies])
    rows.insert(1, ["---", *["---:"] * (len(rows[0]) - 1)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asked = parser.parse_args()
    started = time.monotonic()
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
    digits()
    costs = []
    with tempfile.TemporaryDirectory(prefix="pimm_ray_resize_") as folder:
        for number, name in enumerate(WAYS):
            print(f"{number + 1} of {len(WAYS)}: {name}", file=sys.stderr)
            costs.append(measure(name, Path(folder) / str(number)))
    print(json.dumps([asdict(cost) for cost in costs], indent=2) if asked.json else markdown(costs))
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    if not costs[-1].exact:
        sys.exit("ElasticLoader's resized run differs from the undisturbed one")


if __name__ == "__main__":
    main()
