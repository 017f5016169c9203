"""Three runs on a symlinked storage path: Ray's own trainer; ours from step 10 of it (B01); ours from its step 5 with a
worker killed at step 17 (B06). Usage: resume_job.py FOLDER"""

import functools
import json
import os
import sys

import ray
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from tiny import loop

from pimm_ray import TorchTrainer

root = sys.argv[1]
os.makedirs(f"{root}/real")
os.symlink(f"{root}/real", f"{root}/runs")
os.chdir(root)
ray.init(address="local", num_cpus=4, include_dashboard=False)
workers = ScalingConfig(num_workers=2)


def arguments(name, **config):
    return {"items": 20, "notes": f"{root}/{name}.notes", **config}


def run_config(name, **more):
    return RunConfig(name=name, storage_path=f"{root}/runs", **more)


def summary(result):
    best = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
    return {"checkpoint": result.checkpoint.path, "best": best, "metrics": result.metrics}


results = {}
stock = ray.train.torch.TorchTrainer(
    loop,
    train_loop_config=arguments("stock", epochs=2, skip_a_report=True),
    scaling_config=workers,
    run_config=run_config("stock"),
)
results["stock"] = summary(stock.fit())
five, ten = sorted(name for name in os.listdir(f"{root}/runs/stock") if name.startswith("checkpoint_0"))

no_parameter = functools.partial(loop, arguments("b01", epochs=3))
b01 = TorchTrainer(
    no_parameter, scaling_config=workers, run_config=run_config("b01"), resume_from_checkpoint=f"runs/stock/{ten}"
)
results["b01"] = summary(b01.fit())

b06 = TorchTrainer(
    loop,
    train_loop_config=arguments("b06", epochs=4, kill_at=17),
    scaling_config=workers,
    run_config=run_config("b06", failure_config=FailureConfig(max_failures=1)),
    resume_from_checkpoint=ray.train.Checkpoint.from_directory(f"{root}/runs/stock/{five}"),
)
results["b06"] = summary(b06.fit())

with open(f"{root}/results.json", "w") as file:
    json.dump({"five": five, "ten": ten, **results}, file)
ray.shutdown()
