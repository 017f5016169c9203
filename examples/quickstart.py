"""The main job: train on real data with Ray, lose a worker half way, resume on other numbers of workers.

    python examples/quickstart.py

Trains a small network on scikit-learn's handwritten digits (1,797 real images) four times on this machine:

  twin     2 workers, nothing happens
  spot     2 workers; one is killed with SIGKILL in the middle of an epoch, and the run carries on by itself
  wider    3 workers, from spot's checkpoint at step 30, in the middle of an epoch
  single   1 worker, from wider's first mid-epoch checkpoint

and ends with a table of what each start found, kept and dropped, and with a proof: the weights that spot ends with are
the twin's, bit for bit. wider and single begin their first epoch anew, since a position of torchdata's loader belongs
to its number of workers (examples/elastic.py shows the loader whose position does not). One to two minutes on 2 cores.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # an epoch takes half a second here
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import prepare_model
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from pimm_ray import CheckpointManager, ElasticPolicy, SavePolicy, TorchTrainer, open_checkpoint

EPOCHS = 4
KILL_AT = 57


def digits() -> tuple[TensorDataset, TensorDataset]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def train_loop(config: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata's
    rank, workers = get_context().get_world_rank(), get_context().get_world_size()
    training, test = digits()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 10))
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["steps"])
    sampler = DistributedSampler(training, workers, rank, shuffle=True, seed=0)
    loader = StatefulDataLoader(training, batch_size=64 // workers, sampler=sampler)
    torch.manual_seed(1000 + rank)

    manager = CheckpointManager(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        save=SavePolicy(every_steps=10),
        elastic=ElasticPolicy(schedule="extend"),
    )
    plan = manager.resume()
    if rank == 0:
        with open(config["facts"], "a") as file:
            fact = {"workers": workers, "step": plan.step, "cursor": plan.cursor, "repeated": plan.samples_repeated}
            file.write(json.dumps({"run": get_context().get_experiment_name(), **fact}) + "\n")

    for _ in manager.epochs(EPOCHS):
        model.train()
        for images, labels in manager.batches():
            noisy = images + 0.05 * torch.randn_like(images)
            loss = nn.functional.cross_entropy(model(noisy), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            manager.step(loss=loss)
            if config["kill"] and rank == 0 and plan.step == 0 and manager.state.global_step == KILL_AT - 1:
                print(f"at step {KILL_AT} rank 1 is killed with SIGKILL: the errors that follow are meant", flush=True)
            if config["kill"] and rank == 1 and plan.step == 0 and manager.state.global_step == KILL_AT:
                os.kill(os.getpid(), signal.SIGKILL)
        manager.save(metrics={"accuracy": accuracy(model, test)})
    manager.finish()


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def fit(name: str, workers: int, storage: Path, *, kill: bool = False, resume: str | None = None) -> ray.train.Result:
    print(f"\n=== {name}: {workers} worker(s){f', from {Path(resume).name}' if resume else ''}", flush=True)
    return TorchTrainer(
        train_loop,
        train_loop_config={"kill": kill, "facts": str(storage / "facts.jsonl"), "steps": EPOCHS * 23},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=20),
        ),
        resume_from_checkpoint=resume,
    ).fit()


def mid_epoch_checkpoint(run: str, step: int) -> str:
    """The first checkpoint of a run from `step` on that does not stand at an epoch's start."""
    for path in sorted(Path(run).glob("checkpoint_[0-9]*")):
        if open_checkpoint(path).step >= step and json.loads((path / "state.json").read_text())["position"]["samples"]:
            return str(path)
    raise FileNotFoundError(f"no mid-epoch checkpoint in {run}")


def weights(result: ray.train.Result) -> dict[str, torch.Tensor]:
    files = Path(result.checkpoint.path, "weights").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def main() -> None:
    started = time.monotonic()
    storage = Path(os.environ.get("PIMM_RAY_STORAGE") or tempfile.mkdtemp(prefix="pimm_ray_quickstart_"))
    ray.init(address="local", num_cpus=4)  # Ray gives each worker a CPU: 3 workers would wait for ever on 2 cores
    results = {"twin": fit("twin", 2, storage)}
    results["spot"] = fit("spot", 2, storage, kill=True)
    results["wider"] = fit("wider", 3, storage, resume=mid_epoch_checkpoint(results["spot"].path, 30))
    results["single"] = fit("single", 1, storage, resume=mid_epoch_checkpoint(results["wider"].path, 60))
    ray.shutdown()

    print("\nrun      attempt  workers  resumed at step  cursor    samples repeated  final test accuracy")
    facts = [json.loads(line) for line in (storage / "facts.jsonl").read_text().splitlines()]
    attempts: dict[str, int] = {}
    for fact in facts:
        run = fact["run"]
        attempts[run] = attempts.get(run, 0) + 1
        last = attempts[run] == sum(other["run"] == run for other in facts)
        score = f"{results[run].metrics['accuracy']:.4f}" if last else f"killed at step {KILL_AT}"
        print(
            f"{run:8} {attempts[run]:7}  {fact['workers']:7}  {fact['step']:15}  {fact['cursor']:8}  "
            f"{fact['repeated']:16}  {score}"
        )
    twin, spot = weights(results["twin"]), weights(results["spot"])
    same = twin.keys() == spot.keys() and all(torch.equal(twin[name], spot[name]) for name in twin)
    info = open_checkpoint(results["spot"].checkpoint)
    print("dropped: the epoch begins anew in another order, and its samples so far (of 1437) come a second time")
    print(f"\nspot ends at step {info.step}, epoch {info.epoch}, attempt {info.attempt}: {info.path}")
    print(f"its weights are the uninterrupted twin's, bit for bit: {'yes' if same else 'NO'}")
    print(f"{time.monotonic() - started:.0f} s; everything is in {storage}")
    if not same:
        raise SystemExit("the interrupted run differs from its twin")


if __name__ == "__main__":
    main()
