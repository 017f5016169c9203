"""The command that is given again after its driver died (B07). Usage: relaunch_job.py FOLDER RUN..."""

import json
import sys

import ray
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from tiny import loop

from pimm_ray import TorchTrainer

root, *names = sys.argv[1:]
ray.init(address="local", num_cpus=2, include_dashboard=False)
results = {}
for name in names:
    trainer = TorchTrainer(
        loop,
        train_loop_config={
            "items": 40,
            "epochs": 1,
            "notes": f"{root}/{name}.notes",
            "step_seconds": 0.15,  # long enough that Ray hears of the checkpoint of step 5 before step 12
            "hold_at": 12,
            "released": f"{root}/released",
        },
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name=name,
            storage_path=root,
            checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score"),
        ),
    )
    result = trainer.fit()
    results[name] = {
        "checkpoint": result.checkpoint.path,
        "best": [[checkpoint.path, metrics["score"]] for checkpoint, metrics in result.best_checkpoints],
    }
with open(f"{root}/results.json", "w") as file:
    json.dump(results, file)
ray.shutdown()
