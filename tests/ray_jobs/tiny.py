"""A tiny training loop for real Ray workers. What it saw becomes a JSON line in the file config["notes"]."""

import json
import math
import os
import secrets
import signal
import time
from pathlib import Path

import ray.train
import torch
from ray.train.torch import prepare_model
from torch import nn
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from pimm_ray import CheckpointManager, SavePolicy, find_checkpoint
from pimm_ray.errors import PimmRayError, RankMissing
from pimm_ray.runtime.worker import RayRuntime


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, torch.tensor([index / self.length, 1.0])


def loop(config):
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    shown = ray.train.get_checkpoint()
    torch.manual_seed(rank)
    data = Numbers(config["items"])
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = StatefulDataLoader(data, batch_size=2, sampler=sampler)
    model = prepare_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    save = SavePolicy(every_steps=5, timeout_seconds=60)
    tracker = Notes(config, rank)
    manager = CheckpointManager(
        model=model, optimizer=optimizer, loader=loader, save=save, loggers=[tracker], log_every=1
    )
    plan = manager.resume()
    started = manager.state.global_step
    note(config, rank, event="start", step=started, source=plan.source, shown=shown and shown.path, pid=os.getpid())
    for _ in manager.epochs(config["epochs"]):
        for ids, x in manager.batches():
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = manager.state.global_step + 1
            time.sleep(config.get("step_seconds", 0))
            note(config, rank, event="step", step=step, ids=ids.tolist())
            manager.step(loss=loss, score=math.nan if step <= 5 else torch.tensor(float(step)), kind="tiny")
            if step == config.get("kill_at") and rank == 1 and plan.source.startswith("/"):
                os.kill(os.getpid(), signal.SIGKILL)
            while step == config.get("hold_at") and not Path(config["released"]).exists():
                time.sleep(0.1)
    manager.finish()
    if config.get("skip_a_report"):
        skip_a_report(config, rank)
    note(config, rank, event="end", step=manager.state.global_step, seen=manager.state.samples_seen)


class Notes:
    """A tracker whose every call is a note, with the id of its run."""

    name = "notes"

    def __init__(self, config, rank):
        self._config, self._rank, self.id = config, rank, None

    def _note(self, **what):
        note(self._config, self._rank, event="tracker", id=self.id, **what)

    def start(self, state, *, step):
        self.id = state["id"] if state else secrets.token_hex(4)
        self._note(call="start", step=step)

    def log(self, metrics, step):
        self._note(call="log", step=step)

    def state_dict(self):
        return {"id": self.id}

    def finish(self):
        self._note(call="finish")


def skip_a_report(config, rank):
    """Field report B29: rank 1 reports something else, then stays away from a report."""
    runtime = RayRuntime(timeout=1.5)
    try:
        runtime.report({}, find_checkpoint(runtime.store) if rank == 1 else None)
    except PimmRayError as error:
        note(config, rank, event="disagree", text=str(error))
    if rank == 1:
        time.sleep(3)
        return
    try:
        runtime.report({"loss": 0.0}, None)
    except RankMissing as error:
        note(config, rank, event="missing", ranks=error.ranks, text=str(error))


def note(config, rank, **what):
    with open(config["notes"], "a") as file:
        file.write(json.dumps({"rank": rank, **what}) + "\n")
