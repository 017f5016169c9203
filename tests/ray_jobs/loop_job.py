"""Two runs with a bug: one that may fail for ever, with a worker killed in between, and one that may fail once (B35).
Usage: loop_job.py FOLDER"""

import os
import signal
import sys
import time

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from tiny import note
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, TorchTrainer


def loop(config):
    manager = CheckpointManager(model=nn.Linear(2, 1), save=SavePolicy(every_steps=5, timeout_seconds=60))
    manager.resume()
    with open(config["notes"]) as file:
        attempt = len(file.readlines())
    note(config, 0, event="start", step=manager.state.global_step)
    while manager.state.global_step < 7:
        manager.step(loss=torch.tensor(1.0))
    if attempt == config["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"bad sample at {time.time()}")


root = sys.argv[1]
ray.init("local", num_cpus=2, include_dashboard=False)
for name, failures, kill_at in (("endless", -1, 1), ("once", 1, None)):
    open(f"{root}/{name}.notes", "w").close()
    trainer = TorchTrainer(
        loop,
        train_loop_config={"notes": f"{root}/{name}.notes", "kill_at": kill_at},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=name, storage_path=root, failure_config=FailureConfig(max_failures=failures)),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        note({"notes": f"{root}/errors.notes"}, 0, run=name, text=str(error))
ray.shutdown()
