"""A run on S3 that ends, and another one that resumes from it. Usage: s3_job.py NOTES_FOLDER ENDPOINT PATH."""

import json
import sys

import pyarrow.fs as pafs
import ray
from ray.train import RunConfig, ScalingConfig
from tiny import loop

from pimm_ray import TorchTrainer

root, endpoint, path = sys.argv[1:]
filesystem = pafs.S3FileSystem(
    access_key="test", secret_key="test", region="us-east-1", scheme="http", endpoint_override=endpoint
)
ray.init(address="local", num_cpus=1, include_dashboard=False)


def run(name, epochs, given=None):
    trainer = TorchTrainer(
        loop,
        train_loop_config={"items": 20, "epochs": epochs, "notes": f"{root}/{name}.notes"},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=name, storage_path=path, storage_filesystem=filesystem),
        resume_from_checkpoint=given,
    )
    return trainer.fit().checkpoint


first = run("first", 1)
second = run("second", 2, first)
with open(f"{root}/results.json", "w") as file:
    json.dump({"first": first.path, "second": second.path}, file)
ray.shutdown()
