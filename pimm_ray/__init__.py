"""Preempt any of it at any time, resume on any number of GPUs, lose nothing: checkpoints for PyTorch on Ray Train."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pimm_ray import errors
from pimm_ray.checkpoint.find import CheckpointInfo, Problem, find_checkpoint, open_checkpoint, verify_checkpoint
from pimm_ray.elastic.loader import ElasticLoader
from pimm_ray.elastic.plan import ElasticPolicy, Position, ResumePlan, RunShape, plan_resume
from pimm_ray.elastic.stream import ElasticStream
from pimm_ray.manager import CheckpointManager
from pimm_ray.observe.loggers import TensorBoardTracker, Tracker, WandbTracker
from pimm_ray.policy import KeepPolicy, SavePolicy
from pimm_ray.progress import TrainState
from pimm_ray.warm_start import WarmStart
from pimm_ray.weights.load import LoadReport, load_weights

if TYPE_CHECKING:
    from pimm_ray import testing
    from pimm_ray.runtime.trainer import TorchTrainer
    from pimm_ray.weights.export import export_weights

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "ElasticLoader",
    "ElasticPolicy",
    "ElasticStream",
    "KeepPolicy",
    "LoadReport",
    "Position",
    "Problem",
    "ResumePlan",
    "RunShape",
    "SavePolicy",
    "TensorBoardTracker",
    "TorchTrainer",
    "Tracker",
    "TrainState",
    "WandbTracker",
    "WarmStart",
    "errors",
    "export_weights",
    "find_checkpoint",
    "load_weights",
    "open_checkpoint",
    "plan_resume",
    "testing",
    "verify_checkpoint",
]


def __getattr__(name: str) -> Any:
    # Ray takes seconds to import, the Hub's client part of one, and training needs neither them nor faults for tests.
    if name == "testing":
        return importlib.import_module("pimm_ray.testing")
    if name == "TorchTrainer":
        from pimm_ray.runtime.trainer import TorchTrainer

        return TorchTrainer
    if name == "export_weights":
        from pimm_ray.weights.export import export_weights

        return export_weights
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
