"""Exact data at any world size: the same training, once undisturbed and once on 2 -> 3 -> 1 -> 2 workers with kills.

    python examples/elastic.py            writes elastic.png

Both runs train on scikit-learn's handwritten digits (real images) with `ElasticLoader`, global batch 64, in float64.
The second one loses all its workers to SIGKILL in the middle of an epoch, three times, and comes back with another
number of them each time. Every global batch must be the same set of images as in the first run, every image must come
exactly once an epoch, and the final weights must agree to rounding. About a minute and a half on 2 cores.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # an epoch takes half a second here
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import prepare_model
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy, TorchTrainer

EPOCHS, BATCH = 4, 64
LEGS = ((2, 31), (3, 52), (1, 74), (2, None))
"""Workers, and the step at which they are killed."""


def train_loop(config: dict[str, Any]) -> None:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float64).flatten(1) / 16
    dataset = TensorDataset(images, torch.tensor(data.target), torch.arange(len(images)))

    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ElasticLoader(dataset, BATCH, micro_batch_size=24, tail="carry", seed=0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=loader.total_steps(EPOCHS))
    manager = CheckpointManager(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, save=SavePolicy(every_steps=5)
    )
    manager.resume()

    rank, workers = get_context().get_world_rank(), get_context().get_world_size()
    with open(Path(config["facts"], f"{time.time():.3f}-{rank}.jsonl"), "a", buffering=1) as facts:
        for _ in manager.epochs(EPOCHS):
            ids: list[int] = []
            loss_sum = 0.0
            for x, y, index in manager.batches():
                with loader.sync(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    (loss * loader.weight).backward()
                ids += index.tolist() if loader.real else []
                loss_sum += loss.item() * loader.real
                if loader.step_done:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    manager.step(loss=loss)
                    step = manager.state.global_step
                    facts.write(json.dumps({"step": step, "workers": workers, "ids": ids, "loss": loss_sum}) + "\n")
                    ids, loss_sum = [], 0.0
                    if step == config["kill_at"]:
                        os.kill(os.getpid(), signal.SIGKILL)
    manager.finish()


def fit(name: str, workers: int, kill_at: int | None, storage: Path) -> ray.train.Result | None:
    print(f"\n=== {name}: {workers} worker(s)" + (f", killed at step {kill_at}" if kill_at else ""), flush=True)
    facts = storage / f"{name}.facts"
    facts.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"facts": str(facts), "kill_at": kill_at},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(storage)),
    )
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError:
        if kill_at is None:
            raise
        return None


def steps_of(name: str, storage: Path) -> dict[int, dict[str, Any]]:
    """What each step that counts was made of: a step that was lost with its workers and done again counts once."""
    files = sorted(Path(storage, f"{name}.facts").iterdir())
    steps: dict[int, dict[str, Any]] = {}
    for file in files:
        start = file.name.split("-")[0]
        for line in file.read_text().splitlines():
            fact = json.loads(line)
            step = steps.setdefault(fact["step"], {"parts": {}})
            rank = int(file.stem.rsplit("-", 1)[1])
            step["parts"] = {r: part for r, part in step["parts"].items() if r != rank and r < fact["workers"]}
            step["parts"][rank] = fact
            step["workers"], step["start"] = fact["workers"], start
    for step in steps.values():
        step["ids"] = sorted(index for part in step["parts"].values() for index in part["ids"])
        step["loss"] = sum(part["loss"] for part in step["parts"].values()) / len(step["ids"])
    return steps


def weights(result: ray.train.Result) -> dict[str, torch.Tensor]:
    files = Path(result.checkpoint.path, "weights").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def picture(calm: dict[int, Any], stormy: dict[int, Any], path: Path) -> None:
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1))
    steps = sorted(calm)
    top.plot(steps, [calm[step]["loss"] for step in steps], color="0.75", lw=5, label="2 workers, undisturbed")
    top.plot(steps, [stormy[step]["loss"] for step in steps], color="C0", lw=1.2, label="2 → 3 → 1 → 2 workers, killed")
    top.set_ylabel("loss of the global batch")
    top.legend(frameon=False)
    bottom.step(steps, [stormy[step]["workers"] for step in steps], where="mid", color="C0")
    for _, kill_at in LEGS:
        if kill_at:
            for axis in (top, bottom):
                axis.axvline(kill_at, color="C3", ls=":", lw=1)
    bottom.set(xlabel="optimizer step", ylabel="workers", yticks=(1, 2, 3), ylim=(0.5, 3.5))
    figure.suptitle("ElasticLoader on handwritten digits: dotted lines are SIGKILL of all workers")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    started = time.monotonic()
    storage = Path(os.environ.get("PIMM_RAY_STORAGE") or tempfile.mkdtemp(prefix="pimm_ray_elastic_"))
    ray.init(address="local", num_cpus=4, logging_level=logging.WARNING)
    calm_result = fit("calm", 2, None, storage)
    for workers, kill_at in LEGS:
        stormy_result = fit("stormy", workers, kill_at, storage)
    ray.shutdown()

    calm, stormy = steps_of("calm", storage), steps_of("stormy", storage)
    same = [step for step in calm if step in stormy and calm[step]["ids"] == stormy[step]["ids"]]
    seen = Counter(index for step in stormy.values() for index in step["ids"])
    a, b = weights(calm_result), weights(stormy_result)
    difference = max(float((a[name] - b[name]).abs().max()) for name in a)
    print("\nsteps     workers  global batches equal to the undisturbed run's")
    spans = [(w, [s for s in sorted(stormy) if stormy[s]["start"] == start]) for w, start in legs_of(stormy)]
    for workers, steps in spans:
        print(f"{steps[0]:3}-{steps[-1]:<3} {workers:9}  {sum(step in same for step in steps)} of {len(steps)}")
    print(f"\nglobal batches that are the same set of images: {len(same)} of {len(calm)}")
    print(f"each of {len(seen)} images came exactly {EPOCHS} times: {set(seen.values()) == {EPOCHS}}")
    print(f"largest difference of any final weight: {difference:.1e}")
    path = Path("elastic.png").absolute()
    picture(calm, stormy, path)
    print(f"{path}\n{time.monotonic() - started:.0f} s; everything is in {storage}")
    if len(same) != len(calm) or set(seen.values()) != {EPOCHS} or difference > 1e-12:
        sys.exit("the disturbed run differs from the undisturbed one")


def legs_of(steps: dict[int, Any]) -> list[tuple[int, str]]:
    return sorted({(step["workers"], step["start"]) for step in steps.values()}, key=lambda leg: leg[1])


if __name__ == "__main__":
    main()
