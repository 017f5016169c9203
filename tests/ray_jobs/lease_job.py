"""Two drivers on one run name. The first holds at step 12; the second is refused, and tries again when told to; then a
run of Ray's own trainer, whose worker dies once. Usage: lease_job.py FOLDER first|second"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from tiny import note
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, TorchTrainer
from pimm_ray.errors import RunInUse


def loop(config):
    model = nn.Linear(2, 1)
    manager = CheckpointManager(model=model, save=SavePolicy(every_steps=5, timeout_seconds=60))
    fresh = manager.resume().source == "fresh"
    lease = Path(config["run"], ".lease")
    note(config, 0, event="start", step=manager.state.global_step, pid=os.getpid(), lease=json.loads(lease.read_text()))
    while manager.state.global_step < 20:
        manager.step(loss=torch.tensor(1.0))
        step = manager.state.global_step
        if fresh and step == 12 and config["ends"] == "superseded":
            if os.fork():  # Ray ends a worker some moments after its driver; a copy of it trains on
                note(config, 0, event="holds")
                time.sleep(600)
            os.setsid()
            save_when_superseded(manager, lease, config)
            os._exit(0)
        if fresh and step == 12 and config["ends"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    manager.finish()
    note(config, 0, event="end", step=manager.state.global_step)


def save_when_superseded(manager, lease, config):
    owner, until = lease.read_text()[:40], time.monotonic() + 300
    while (not lease.exists() or lease.read_text()[:40] == owner) and time.monotonic() < until:
        time.sleep(0.01)
    try:
        manager.save()
    except RunInUse as error:
        note(config, 0, event="fenced", text=str(error))


def train(trainer, name, ends):
    trainer(
        loop,
        train_loop_config={"notes": f"{root}/{name}.notes", "run": f"{root}/{name}", "ends": ends},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=name, storage_path=root, failure_config=FailureConfig(max_failures=1)),
    ).fit()


root, which = sys.argv[1:]
local = {"address": "local", "num_cpus": 2, "include_dashboard": False}
if which == "first":
    ray.init(**local)
    train(TorchTrainer, "run", "superseded")
start = time.monotonic()
try:
    train(TorchTrainer, "run", "well")
except RunInUse as error:
    what = {"text": str(error), "seconds": time.monotonic() - start, "ray": ray.is_initialized(), "pid": error.pid}
    ray.init(**local)
    note({"notes": f"{root}/second.notes"}, 0, event="refused", **what)
while not Path(root, "go").exists():
    time.sleep(0.01)
train(TorchTrainer, "run", "well")
note({"notes": f"{root}/second.notes"}, 0, event="done", left=os.path.exists(f"{root}/run/.lease"))
train(ray.train.torch.TorchTrainer, "stock", "killed")
ray.shutdown()
