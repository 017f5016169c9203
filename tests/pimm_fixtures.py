"""A job that trains and saves as pimm does, with stock torch alone, and a loader that reads as pimm does."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.jobs import Numbers, seed_streams

SAMPLES, BATCH, EPOCHS = 24, 4, 4


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Parts:
    """The objects of a training script. Two groups, so that the optimizer's order is not the model's."""

    def __init__(self, *, seed: int = 3, stateful: bool = True, workers: int = 0, batch: int = BATCH):
        seed_streams(seed + 100 * rank())
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = nn.Sequential(
                nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
            )
        self.model = DistributedDataParallel(net) if world() > 1 else net
        head, rest = list(net[4].parameters()), [*net[0].parameters(), *net[1].parameters()]
        self.optimizer = torch.optim.AdamW([{"params": head, "lr": 0.02}, {"params": rest}], lr=0.01)
        dataset = Numbers(SAMPLES, augment=False)
        sampler = DistributedSampler(dataset, num_replicas=world(), rank=rank(), seed=5)
        kind = StatefulDataLoader if stateful else DataLoader
        self.loader = kind(dataset, batch, sampler=sampler, num_workers=workers)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, [0.02, 0.01], total_steps=EPOCHS * len(self.loader)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    def learn(self, batch: Any) -> tuple[list[int], list[float], float]:
        """One step: the samples, the learning rates and the loss."""
        ids, x, y = batch
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        loss = nn.functional.mse_loss(self.model(x + 0.1 * random.random() + 0.1 * np.random.rand()), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return ids.tolist(), rates, loss.item()


class Pimm(Parts):
    """Trains from the start, saves after step `at` and goes on to the end: `seen` are the steps after the save."""

    def __init__(self, at: int, save: Any = None, **settings: Any):
        super().__init__(**settings)
        self.at, self.save = at, save
        self.step = self.epoch = self.iteration = 0
        self.seen: list[Any] = []
        self.best = 0.75

    def train(self, epochs: int = EPOCHS) -> list[Any]:
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for iteration, batch in enumerate(self.loader, 1):
                step = self.learn(batch)
                self.epoch, self.iteration, self.step = epoch, iteration, self.step + 1
                if self.step > self.at:
                    self.seen.append(step)
                if self.step == self.at and self.save:
                    self.save(self)
        return self.seen


def streams() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def of_all_ranks(own: Any) -> list[Any]:
    states = [None] * world()
    if dist.is_initialized():
        dist.all_gather_object(states, own)
        return states
    return [own]


def payload_of(job: Pimm) -> dict[str, Any]:
    """Version 3, key for key."""
    at_end = job.iteration == len(job.loader)
    if hasattr(job.loader, "state_dict"):
        cursor: Any = {"format": "pimm.torchdata_state.v1", "state": pickle.dumps(job.loader.state_dict())}
    else:
        cursor = {"format": "pimm.dataloader_state.unsupported.v1", "loader_type": type(job.loader).__name__}
    if dist.is_initialized():
        cursor = {"_pimm_distributed_state": True, "world_size": world(), "states": of_all_ranks(cursor)}
    rng = {"world_size": world(), "states": of_all_ranks(streams())}
    return {
        "schema": "pimm.trainer_checkpoint",
        "version": 3,
        "checkpoint_version": 3,
        "model": {"state_dict": job.model.state_dict()},
        "optimizer": {
            "state_dict": get_optimizer_state_dict(job.model, job.optimizer),
            "class": "AdamW",
            "format": "torch.distributed.checkpoint.state_dict",
        },
        "scheduler": {
            "state_dict": job.scheduler.state_dict(),
            "class": "OneCycleLR",
            "total_steps": job.scheduler.total_steps,
        },
        "scaler": {"enabled": True, "state_dict": job.scaler.state_dict()},
        "dataloader": {
            "backend": type(job.loader).__name__,
            "state": cursor,
            "world_size": world(),
            "batch_size_per_rank": job.loader.batch_size,
            "num_workers": job.loader.num_workers,
            "drop_last": False,
        },
        "rng": {"world_size": world(), "state": rng},
        "trainer": {
            "epoch": job.epoch + at_end,
            "iter_in_epoch": 0 if at_end else job.iteration,
            "global_step": job.step,
            "samples_seen": job.step * BATCH * world(),
            "best_metric_value": job.best,
        },
        "logger": {
            "backend": "wandb",
            "wandb": {
                "group": None,
                "run_name": "first",
                "run_id": "abc123",
                "job_type": "train",
                "resume": "allow",
                "step_offset": 0,
                "checkpoint_global_step": job.step,
            },
        },
        "distributed": {"world_size": world(), "backend": None, "rank_order": list(range(world()))},
    }


def save_split(folder: Any) -> Any:
    """As `model/last`. Every rank."""

    def save(job: Pimm) -> None:
        payload = payload_of(job)
        model = payload.pop("model")
        os.makedirs(folder, exist_ok=True)
        save_whole(Path(folder) / "trainer.dcp")(payload)
        if rank() == 0:
            torch.save(model, Path(folder) / "weights.pth")
            (Path(folder) / ".complete").write_text("ok\n")

    return save


def save_whole(folder: Any) -> Any:
    """One Distributed Checkpoint of a job, or of a payload. Every rank."""

    def save(job: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(job if isinstance(job, dict) else payload_of(job), checkpoint_id=str(folder))
        if rank() == 0:
            (Path(folder) / ".complete").write_text("ok\n")
        if dist.is_initialized():
            dist.barrier()

    return save


def save_file(path: Any) -> Any:
    """As `model_last.pth`. Every rank."""

    def save(job: Pimm) -> None:
        payload = payload_of(job)
        if rank() == 0:
            torch.save(payload, path)

    return save


def save_flat(path: Any) -> Any:
    """As an older pimm: state by number, `epoch` counted from one."""

    def save(job: Pimm) -> None:
        torch.save(
            {
                "epoch": job.epoch + 1,
                "iter": job.iteration if job.iteration < len(job.loader) else 0,
                "state_dict": job.model.state_dict(),
                "optimizer": job.optimizer.state_dict(),
                "scheduler": job.scheduler.state_dict(),
                "scaler": job.scaler.state_dict(),
                "best_metric_value": job.best,
                "wandb_run_id": "old7",
                "wandb_resume_step": 41,
            },
            path,
        )

    return save


def load_as_pimm_does(folder: Any, job: Pimm) -> dict[str, Any]:
    """The trainer state read into a payload of the live job, the optimizer set from it. One process, or every rank."""
    folder = Path(folder)
    for marker in (folder, folder / "trainer.dcp"):
        assert (marker / ".complete").is_file()
    job.loader.sampler.set_epoch(job.epoch)
    payload = payload_of(job)
    payload.pop("model")
    payload["trainer"] = {
        "epoch": 0, "iter_in_epoch": 0, "global_step": 0, "samples_seen": 0, "best_metric_value": -float("inf")
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            payload, checkpoint_id=str(folder / "trainer.dcp"), planner=DefaultLoadPlanner(allow_partial_load=True)
        )
    weights = torch.load(folder / "weights.pth", map_location="cpu", weights_only=False)["state_dict"]
    prefix = "module." if world() > 1 else ""
    job.model.load_state_dict({prefix + name.removeprefix("module."): value for name, value in weights.items()})
    set_optimizer_state_dict(job.model, job.optimizer, payload["optimizer"]["state_dict"])
    assert job.optimizer.state_dict()["state"]
    job.scheduler.load_state_dict(payload["scheduler"]["state_dict"])
    job.scaler.load_state_dict(payload["scaler"]["state_dict"])
    return payload


def go_on_as_pimm_does(folder: Any, job: Pimm, epochs: int = EPOCHS) -> list[Any]:
    """Resume from `folder` as pimm does, and train to the end."""
    payload = load_as_pimm_does(folder, job)
    trainer, seen = payload["trainer"], []
    cursor = payload["dataloader"]["state"]
    cursor = cursor["states"][rank()] if "states" in cursor else cursor
    state = payload["rng"]["state"]["states"][rank()]
    for epoch in range(trainer["epoch"], epochs):
        job.loader.sampler.set_epoch(epoch)
        if epoch == trainer["epoch"]:
            # Else an epoch goes on that began when the placeholder asked the loader for its state.
            job.loader.load_state_dict(pickle.loads(cursor["state"]) if trainer["iter_in_epoch"] else {})
            restore_streams(state)
        iterator = iter(job.loader)
        if epoch == trainer["epoch"] and trainer["iter_in_epoch"]:
            restore_streams(state)  # to compare: what is drawn for an iterator was drawn before the save
        seen += [job.learn(batch) for batch in iterator]
    return seen


def restore_streams(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
