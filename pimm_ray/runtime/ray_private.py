"""The only file that uses names which Ray does not promise. Where one is gone, Ray acts as it does without us."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pimm_ray.checkpoint.store import Store
from pimm_ray.errors import StorageError

logger = logging.getLogger(__name__)

_CONSTANTS = "ray.train.v2._internal.constants"
_CONTEXT = "ray.train.v2._internal.execution.context"
_MANAGER = "ray.train.v2._internal.execution.checkpoint.checkpoint_manager"
_SCALING = "ray.train.v2._internal.execution.scaling_policy"
_GROUP = "ray.train.v2._internal.execution.worker_group"
_FAILURES = "ray.train.v2._internal.execution.failure_handling"
_PREEMPTION = "ray.train.v2._internal.execution.preemption"
_COORDINATOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
_SNAPSHOT_LIMIT = 256 * 2**20
_COORDINATOR_SECONDS = 5.0
_POLL_VARIABLE = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
_POLL_SECONDS = 2.0
SPOT_DEFAULTS = {_POLL_VARIABLE: "0.5", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}
"""How often Ray's controller looks at its workers (Ray: 2 s) and for notices of the cluster (Ray: 5 s), in seconds."""
ELASTIC_DEFAULTS = {**SPOT_DEFAULTS, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}
"""The same, and how long a start waits for its places before the number of workers is decided anew (Ray: 60 s)."""
NOTICE_SECONDS = 120.0
"""How long after a notice without a deadline Ray restarts the workers."""
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
    if "train_run_context" not in getattr(context, "__dataclass_fields__", {}):
        missing.append(f"{_CONTEXT}.TrainContext has no field train_run_context")
    if "run_id" not in getattr(_private(_CONTEXT, "TrainRunContext"), "__dataclass_fields__", {}):
        missing.append(f"{_CONTEXT}.TrainRunContext has no field run_id")
    fields = getattr(_private(_MANAGER, "_CheckpointManagerState"), "model_fields", {})
    for name in ("ray_version", "checkpoint_results"):
        if name not in fields:
            missing.append(f"{_MANAGER}._CheckpointManagerState has no field {name}")
    if not made_up_name(RunConfig().name or ""):
        missing.append(f"RunConfig() without a name is called {RunConfig().name!r}")
    return missing + check_scaling() + check_notice() + check_failures()


def check_scaling() -> list[str]:
    """The same for what decides about the number of workers."""
    import ray.train.torch

    missing = []
    for variable in ELASTIC_DEFAULTS:
        if variable not in (_private(_CONSTANTS, "ENV_VARS_TO_PROPAGATE") or ()):
            missing.append(f"{_CONSTANTS}.ENV_VARS_TO_PROPAGATE lacks {variable}")
    policy, worker = _private(_SCALING, "ElasticScalingPolicy"), _private(_GROUP, "RayTrainWorker")
    coordinator = _private(_COORDINATOR, "_AutoscalingCoordinatorActor")
    for owner, name, parameters in (
        (policy, "make_decision_for_non_running_worker_group", ["self"]),
        (policy, "make_decision_for_running_worker_group", ["self", "worker_group_state", "worker_group_status"]),
        (policy, "_get_resize_decision", ["self", "num_workers"]),
        (policy, "_maybe_send_resource_request", ["self"]),
        (coordinator, "get_reserved_resources", ["self", "requester_id", "recompute"]),
        (worker, "execute", ["self", "fn", "fn_args", "fn_kwargs"]),
        (ray.train.torch.TorchTrainer, "_initialize_and_run_controller", ["self", "controller_init_kwargs"]),
    ):
        function = getattr(owner, name, None)
        found = list(inspect.signature(function).parameters) if function else None
        if found != parameters:
            missing.append(f"{owner}.{name} takes {found}, not {parameters}")
    for owner, names in (
        (_private(_GROUP, "WorkerGroupState"), ("start_time", "workers")),
        (_private(_GROUP, "WorkerGroupPollStatus"), ("worker_statuses",)),
        (_private(_GROUP, "WorkerStatus"), ("training_report",)),
        (_private(_GROUP, "Worker"), ("actor", "metadata")),
        (_private(_SCALING, "ResizeDecision"), ("num_workers",)),
    ):
        fields = getattr(owner, "__dataclass_fields__", {})
        missing += [f"{owner} has no field {name}" for name in names if name not in fields]
    example: Any = ray.train.ScalingConfig()
    made = vars(policy(example)) if policy else {}
    missing += [f"{policy} has no {name}" for name in ("_coordinator_client", "_requester_id") if name not in made]
    for name in ("get_draining_nodes", "available_resources_per_node"):
        if not hasattr(_private("ray._private.state", "state"), name):
            missing.append(f"ray._private.state has no {name}")
    return missing


def check_notice() -> list[str]:
    """The same for the notice that a worker has got."""
    context = _private(_CONTEXT, "TrainContext")
    held = _private(_PREEMPTION, "PreemptionContext")
    seconds = _private(_CONSTANTS, "DEFAULT_PREEMPTION_DEADLINE_S")
    missing = []
    if "preemption_context" not in getattr(context, "__dataclass_fields__", {}):
        missing.append(f"{_CONTEXT}.TrainContext has no field preemption_context")
    if "preemption_info" not in getattr(held, "__dataclass_fields__", {}):
        missing.append(f"{_PREEMPTION}.PreemptionContext has no field preemption_info")
    if seconds != NOTICE_SECONDS:
        missing.append(f"{_CONSTANTS}.DEFAULT_PREEMPTION_DEADLINE_S is {seconds!r}, not {NOTICE_SECONDS!r}")
    return missing


def check_failures() -> list[str]:
    """The same for what decides whether a run that failed is started again."""
    import ray.train

    missing = []
    decide = getattr(_private(_FAILURES, "DefaultFailurePolicy"), "make_decision", None)
    found = list(inspect.signature(decide).parameters) if decide else None
    if found != ["self", "training_failed_error"]:
        missing.append(f"{_FAILURES}.DefaultFailurePolicy.make_decision takes {found}")
    if not {"RAISE", "RETRY"} <= {*getattr(_private(_FAILURES, "FailureDecision"), "__members__", {})}:
        missing.append(f"{_FAILURES}.FailureDecision has no RAISE or RETRY")
    if not hasattr(ray.train.WorkerGroupError("", {}), "worker_failures"):
        missing.append("WorkerGroupError has no worker_failures")
    if not hasattr(ray.train.ControllerError(ValueError()), "controller_failure"):
        missing.append("ControllerError has no controller_failure")
    if "current_report_index" not in getattr(_private(_CONTEXT, "TrainContext"), "__dataclass_fields__", {}):
        missing.append(f"{_CONTEXT}.TrainContext has no field current_report_index")
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


def run_id() -> str | None:
    """What all workers of one `fit()` have in common, also those that Ray starts after a failure, and no others."""
    with contextlib.suppress(Exception):
        return str(importlib.import_module(_CONTEXT).get_train_context().train_run_context.run_id)
    return None


def sees_notices() -> bool:
    """Whether `notice()` works in this worker."""
    try:
        notice()
    except Exception:
        return False
    return not check_notice()


def notice() -> Any:
    """The `ray.train.PreemptionInfo` that this worker has got, or None. Ray's own call waits for all ranks."""
    return importlib.import_module(_CONTEXT).get_train_context().preemption_context.preemption_info


def show_checkpoint(checkpoint: Any) -> None:
    """Make `ray.train.get_checkpoint()` in this worker return `checkpoint`.

    Raises:
        Exception: this Ray has no such place.
    """
    context = importlib.import_module(_CONTEXT).get_train_context()
    if not hasattr(context, "checkpoint"):
        raise AttributeError("Ray's TrainContext has no checkpoint")
    context.checkpoint = checkpoint


def snapshot_problem(run: Store) -> str | None:
    """Why Ray's controller would die of the snapshot in this run folder; None when it would not, or there is none.

    Raises:
        StorageError: the storage cannot be read.
    """
    import ray
    from ray.train import Result

    try:
        document = _read_snapshot(run)
    except FileNotFoundError:
        return None
    except ValueError:
        return "it is torn"
    if gone := sorted(entry["checkpoint_dir_name"] for entry in _entries(document) if not _there(run, entry)):
        return f"it names checkpoint folders that are gone: {', '.join(gone)}"
    try:
        # Builds the same object from the same file as the controller does, read-only.
        Result.from_path(run.path, storage_filesystem=run.filesystem)
    except OSError as error:
        raise StorageError(f"cannot read {run.full(SNAPSHOT)}: {error}") from error
    except Exception as error:
        version = document.get("ray_version") if isinstance(document, dict) else None
        if version != ray.__version__:
            return f"it was written by Ray {version}, and this Ray {ray.__version__} refuses it"
        return f"Ray refuses it ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return None


def write_snapshot(run: Store, aside: str | None, metrics: Mapping[str, Mapping[str, Any]], config: Any) -> bool:
    """Write a new snapshot, so that Ray goes on keeping and deleting what it kept and deleted before.

    Args:
        run: the run folder, without a snapshot.
        aside: name of the file with the snapshot before; its entries are taken over where their folders still exist.
        metrics: of each complete checkpoint by folder name, oldest first.
        config: the run's CheckpointConfig.

    Returns:
        Whether Ray accepts it. If not, there is none: Ray then starts with an empty list.
    """
    import ray

    entries: dict[str, dict[str, Any]] = {
        name: {"version": 0, "checkpoint_dir_name": name, "metrics": dict(own)} for name, own in metrics.items()
    }
    with contextlib.suppress(ValueError, FileNotFoundError):
        kept = [entry for entry in _entries(_read_snapshot(run, aside or SNAPSHOT)) if _there(run, entry)]
        foreign = {entry["checkpoint_dir_name"]: entry for entry in kept if entry["checkpoint_dir_name"] not in entries}
        entries = {**foreign, **entries, **{entry["checkpoint_dir_name"]: entry for entry in kept}}
    by_age = list(entries.values())
    ranked = list(range(len(by_age)))
    if attribute := config.checkpoint_score_attribute:
        _nan_for_null(by_age, attribute)
        sign = 1.0 if config.checkpoint_score_order == "max" else -1.0
        ranked.sort(key=lambda i: _score(by_age[i]["metrics"].get(attribute), sign))  # stable: the older one first
    document = {
        "ray_version": ray.__version__,
        "checkpoint_results": [by_age[i] for i in ranked],
        "checkpoint_report_indices": ranked,
        "latest_checkpoint_result": by_age[-1] if by_age else None,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": len(by_age),
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
    run.publish(SNAPSHOT, json.dumps(document).encode())
    if snapshot_problem(run) is None:
        return True
    run.delete_file(SNAPSHOT)
    return False


def restore_lost_scores(run: Store, attribute: str) -> None:
    """Put back the NaN scores of a readable snapshot.

    Ray writes NaN and infinity as null, and after a restart its controller dies of the null when it ranks a checkpoint.
    """
    try:
        document = _read_snapshot(run)
    except FileNotFoundError:
        return
    if _nan_for_null([*document["checkpoint_results"], document.get("latest_checkpoint_result")], attribute):
        run.publish(SNAPSHOT, json.dumps(document).encode())


class ControllerHook:
    """Makes a trainer of Ray's give its controller our settings. A Ray that has no such place ignores it."""

    def _adapt(self, policy: Any) -> Any:
        return policy

    def _watch(self, policy: Any) -> Any:
        return policy

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        policy = arguments.get("scaling_policy")
        try:
            if policy is not None:
                arguments["scaling_policy"] = self._adapt(policy)
        except Exception as error:
            logger.warning("resize: left to Ray's own policy: %r", error)
        try:
            if "failure_policy" in arguments:
                arguments["failure_policy"] = self._watch(arguments["failure_policy"])
        except Exception as error:
            logger.warning("crash loop: left to Ray's own policy: %r", error)
        with _environment(ELASTIC_DEFAULTS if is_elastic(policy) else SPOT_DEFAULTS):
            return super()._initialize_and_run_controller(**arguments)  # type: ignore[misc]


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Variables as they are where they are set, else these. Ray hands them on to the controller and the workers."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def is_elastic(policy: Any) -> bool:
    """Whether this is Ray's own scaling policy for `num_workers=(min, max)`."""
    return type(policy) is _private(_SCALING, "ElasticScalingPolicy")


def decide(decision: Any, name: str) -> Any:
    """Ray's decision about a failure that is called so, given any other one."""
    return type(decision)[name]


def reports() -> int:
    """How many reports of all attempts this worker knows of. Raises when it has no such number."""
    return int(importlib.import_module(_CONTEXT).get_train_context().current_report_index)


def stay() -> Any:
    """The decision to change nothing."""
    return importlib.import_module(_SCALING).NoopDecision()


def start(policy: Any, workers: int) -> Any:
    """The decision to start or restart with so many workers."""
    return policy._get_resize_decision(workers)


def renew_request(policy: Any) -> None:
    """Go on asking the cluster's autoscaler for nodes; sent from time to time, and forgotten there after 180 s."""
    policy._maybe_send_resource_request()


def need_of_worker(policy: Any) -> dict[str, float]:
    return dict(policy.scaling_config._resources_per_worker_not_none)


def reserved(policy: Any, *, fresh: bool) -> dict[str, dict[str, float]]:
    """By node: what the cluster keeps for this run.

    Args:
        fresh: look at the cluster now; costs the cluster's coordinator a tick. Else its view may be 20 s old.
    """
    import ray

    asked = policy._autoscaling_coordinator.get_reserved_resources.remote(policy._requester_id, fresh)
    return dict(ray.get(asked, timeout=_COORDINATOR_SECONDS))


def free() -> dict[str, dict[str, float]]:
    """By node: what nobody uses."""
    return dict(_global_state().available_resources_per_node())


def draining() -> set[str]:
    """Nodes that are about to be taken away."""
    return set(_global_state().get_draining_nodes())


def workers_of(group: Any) -> list[tuple[Any, str]]:
    """The workers of a group by rank, each with its node."""
    return [(worker.actor, worker.metadata.node_id) for worker in group.workers]


def reports_in(status: Any) -> dict[int, bool]:
    """By rank that handed in a report at this poll: whether it has a checkpoint."""
    reports = {rank: worker.training_report for rank, worker in status.worker_statuses.items()}
    return {rank: report.checkpoint is not None for rank, report in reports.items() if report is not None}


def run_on(actor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in the process of a worker, beside its loop; returns where the answer will be."""
    return actor.execute.remote(function, *arguments)


def _global_state() -> Any:
    return importlib.import_module("ray._private.state").state


def _nan_for_null(entries: list[Any], attribute: str) -> bool:
    lost = [entry["metrics"] for entry in entries if entry and entry["metrics"].get(attribute, 0) is None]
    for metrics in lost:
        metrics[attribute] = float("nan")
    return bool(lost)


def _read_snapshot(run: Store, name: str = SNAPSHOT) -> Any:
    return json.loads(run.read(name, limit=_SNAPSHOT_LIMIT))


def _entries(document: Any) -> list[dict[str, Any]]:
    """What a snapshot says of each checkpoint, as far as it can be understood."""
    results = document.get("checkpoint_results") if isinstance(document, dict) else None
    return [
        entry
        for entry in (results if isinstance(results, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("checkpoint_dir_name"), str)
        and isinstance(entry.get("metrics"), dict)
    ]


def _there(run: Store, entry: dict[str, Any]) -> bool:
    return run.exists(entry["checkpoint_dir_name"])


def _score(value: Any, sign: float) -> tuple[bool, float]:
    """Ray's own order: NaN is worst, then what has no score."""
    number = sign * value if isinstance(value, int | float) else float("-inf")
    return (False, float("-inf")) if math.isnan(number) else (True, number)


def _private(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
