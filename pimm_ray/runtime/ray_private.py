"""The only file that uses names which Ray does not promise. Where one is gone, Ray acts as it does without us."""

from __future__ import annotations

import importlib
import json
import os
import re
from typing import Any

from pimm_ray.checkpoint.store import Store
from pimm_ray.errors import StorageError

_CONSTANTS = "ray.train.v2._internal.constants"
_CONTEXT = "ray.train.v2._internal.execution.context"
_MANAGER = "ray.train.v2._internal.execution.checkpoint.checkpoint_manager"
_SNAPSHOT_LIMIT = 256 * 2**20
_POLL_VARIABLE = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
_POLL_SECONDS = 2.0
SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray's list of the checkpoints it knows, in the run folder."""


def check() -> list[str]:
    """What this Ray no longer offers of what we use; empty means that all is as expected. Starts nothing."""
    from ray.train import RunConfig

    missing = []
    for module, name, expected in (
        (_CONSTANTS, "is_v2_enabled", None),
        (_CONSTANTS, "HEALTH_CHECK_INTERVAL_S_ENV_VAR", _POLL_VARIABLE),
        (_CONSTANTS, "DEFAULT_HEALTH_CHECK_INTERVAL_S", _POLL_SECONDS),
        (_CONSTANTS, "CHECKPOINT_MANAGER_SNAPSHOT_FILENAME", SNAPSHOT),
        (_CONTEXT, "get_train_context", None),
    ):
        found = _private(module, name)
        if found is None or (expected is not None and found != expected):
            missing.append(f"{module}.{name} is {found!r}" + (f", not {expected!r}" if expected is not None else ""))
    context = _private(_CONTEXT, "TrainContext")
    if "checkpoint" not in getattr(context, "__dataclass_fields__", {}):
        missing.append(f"{_CONTEXT}.TrainContext has no field checkpoint")
    fields = getattr(_private(_MANAGER, "_CheckpointManagerState"), "model_fields", {})
    for name in ("ray_version", "checkpoint_results"):
        if name not in fields:
            missing.append(f"{_MANAGER}._CheckpointManagerState has no field {name}")
    if not made_up_name(RunConfig().name or ""):
        missing.append(f"RunConfig() without a name is called {RunConfig().name!r}")
    return missing


def v2_enabled() -> bool:
    """Whether Ray Train runs its V2, by Ray's own reading of RAY_TRAIN_V2_ENABLED."""
    import ray.train

    if not hasattr(ray.train, "CheckpointUploadMode"):  # V1 was chosen when ray.train was imported
        return False
    enabled = _private(_CONSTANTS, "is_v2_enabled")
    return True if enabled is None else bool(enabled())


def made_up_name(name: str) -> bool:
    """Whether a run is called what Ray calls runs that the user gave no name."""
    return re.fullmatch(r"ray_train_run-[\d_-]+", name) is not None


def poll_seconds() -> float:
    """How often Ray's controller takes reports from the workers, in seconds."""
    variable = _private(_CONSTANTS, "HEALTH_CHECK_INTERVAL_S_ENV_VAR") or _POLL_VARIABLE
    default = _private(_CONSTANTS, "DEFAULT_HEALTH_CHECK_INTERVAL_S") or _POLL_SECONDS
    try:
        return float(os.environ.get(variable, default))
    except ValueError:
        return float(default)


def offer_checkpoint(checkpoint: Any) -> None:
    """Make `ray.train.get_checkpoint()` in this worker return `checkpoint` where it would return None.

    Raises:
        Exception: this Ray has no such place.
    """
    context = importlib.import_module(_CONTEXT).get_train_context()
    if context.checkpoint is None:
        context.checkpoint = checkpoint


def snapshot_problem(run: Store) -> str | None:
    """Why Ray's controller would die of the snapshot in this run folder, or None.

    Raises:
        StorageError: the storage cannot be read.
    """
    import ray
    from ray.train import Result

    try:
        data = run.read(SNAPSHOT, limit=_SNAPSHOT_LIMIT)
    except FileNotFoundError:
        return None
    try:
        document = json.loads(data)
        named = [entry["checkpoint_dir_name"] for entry in document["checkpoint_results"]]
    except ValueError:
        return "it is torn"
    except (KeyError, TypeError):
        document, named = {}, []
    if gone := sorted(name for name in named if not run.exists(name)):
        return f"it names checkpoint folders that are gone: {', '.join(gone)}"
    try:
        # Builds the same object from the same file as the controller does, read-only.
        Result.from_path(run.path, storage_filesystem=run.filesystem)
    except OSError as error:
        raise StorageError(f"cannot read {run.full(SNAPSHOT)}: {error}") from error
    except Exception as error:
        version = document.get("ray_version")
        if version != ray.__version__:
            return f"it was written by Ray {version}, and this Ray {ray.__version__} refuses it"
        return f"Ray refuses it ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return None


def _private(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
