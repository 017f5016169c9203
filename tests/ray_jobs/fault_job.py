"""A worker that a FailureInjector kills in a save. Usage: fault_job.py FOLDER"""

import sys

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig

from pimm_ray import CheckpointManager, SavePolicy, TorchTrainer
from pimm_ray.testing import FailureInjector


def loop(config):
    manager = CheckpointManager(model=torch.nn.Linear(2, 2), save=SavePolicy(every_steps=1, timeout_seconds=10))
    config["fault"].attach(manager)
    start = manager.resume().step
    if manager._runtime.rank == 0:
        with open(config["starts"], "a") as file:
            print(start, file=file)
    while manager.state.global_step < 5:
        manager.step()
    manager.finish()


(root,) = sys.argv[1:]
ray.init("local", num_cpus=2, include_dashboard=False)
trainer = TorchTrainer(
    loop,
    train_loop_config={
        "fault": FailureInjector(rank=1, step=3, event=2),
        "starts": f"{root}/starts",
    },
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run", storage_path=root, failure_config=FailureConfig(max_failures=1)),
)
trainer.fit()
ray.shutdown()
