"""The command that is given again after its driver was killed in a save. Usage: death_job.py FOLDER RUN..."""

import os
import sys

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from tiny import note
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, TorchTrainer
from pimm_ray.testing import SlowStore


def loop(config):
    torch.manual_seed(0)
    manager = CheckpointManager(model=nn.Linear(2, 1), save=SavePolicy(every_steps=5, timeout_seconds=60))
    storage = manager._runtime.store = SlowStore(manager._runtime.store)
    fresh = manager.resume().source == "fresh"
    note(config, 0, event="start", step=manager.state.global_step, pid=os.getpid())
    while manager.state.global_step < 20:
        if fresh and manager.state.global_step == 14:
            storage._seconds = 3  # the next save outlasts the worker, which outlives its driver by some seconds
        manager.step(loss=torch.tensor(1.0))
    manager.finish()


root, *names = sys.argv[1:]
ray.init("local", num_cpus=2, include_dashboard=False)
for name in names:
    TorchTrainer(
        loop,
        train_loop_config={"notes": f"{root}/{name}.notes"},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=name, storage_path=root),
    ).fit()
ray.shutdown()
