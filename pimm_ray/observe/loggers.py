"""Trackers of a run, such as Weights & Biases and TensorBoard: after a resume they go on where the checkpoint is."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from pimm_ray.errors import TrackerError

logger = logging.getLogger(__name__)

_STEP = "train/global_step"
_PLACE = ("entity", "project")
_IDENTITY = ("run_id", *_PLACE, "group", "name", "job_type")
_OLD_NAMES = {
    "run_id": ("wandb_run_id",),
    "name": ("run_name", "wandb_run_name"),
    "step": ("next_step", "resume_step", "wandb_resume_step"),
    **{key: (f"wandb_{key}",) for key in (*_PLACE, "group", "job_type")},
}
_GONE = re.compile(r"HTTP 409|previously created and deleted")
"""How the service says that a run of this id was deleted: it never takes that id again."""


class Tracker(Protocol):
    """What `CheckpointManager(loggers=[...])` needs of a tracker. Every rank makes one; its methods are called on rank
    0 alone. An error that one of them raises is a warning, and training goes on; a `TrackerError` of `start` is not.

    Example:
        >>> class MLflow:
        ...     name = "mlflow"
        ...     def start(self, state, *, step):
        ...         self.run = mlflow.start_run(run_id=state["run_id"] if state else None)
        ...     def log(self, metrics, step):
        ...         mlflow.log_metrics({k: v for k, v in metrics.items() if not isinstance(v, str)}, step=step)
        ...     def state_dict(self):
        ...         return {"run_id": self.run.info.run_id}
        ...     def finish(self):
        ...         mlflow.end_run()
    """

    name: str
    """Where its state stands in the checkpoint. No two trackers of a manager have the same."""

    def start(self, state: dict[str, Any] | None, *, step: int) -> None:
        """Begin, or go on. Called once, after the resume.

        Args:
            state: what `state_dict` returned when the checkpoint was saved. None: there is nothing to go on with.
            step: steps that are done. Steps beyond it that were logged before are about to be repeated.
        """

    def log(self, metrics: Mapping[str, float | int | str], step: int) -> None:
        """Put down what was measured at the end of step number `step`."""

    def state_dict(self) -> dict[str, Any]:
        """What `start` needs to go on, as plain JSON data. Called for each checkpoint, which counts on that what was
        logged so far is not lost."""

    def finish(self) -> None:
        """The end of the run: write out all that is left."""


class Trackers:
    """The trackers of one manager. Every rank has one, and does with it what the others do.

    Args:
        trackers: no two of one name.
        live: whether this is rank 0. Elsewhere nothing is ever started.

    Raises:
        ValueError: two trackers have one name.
    """

    def __init__(self, trackers: Iterable[Tracker], *, live: bool):
        self._given: dict[str, Tracker] = {}
        for tracker in trackers:
            if self._given.setdefault(tracker.name, tracker) is not tracker:
                raise ValueError(f"loggers=: two trackers are named {tracker.name!r}; give one of them another .name")
        self._live, self._running = live, dict[str, Tracker]()
        self._states: dict[str, Any] = {}
        self._failed: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._given)

    def start(self, states: Mapping[str, Any], *, step: int) -> None:
        """Start each with its state of the checkpoint.

        Raises:
            TrackerError: a setting is missing without which one would not find its run.
        """
        # Also of trackers that do not run this time: they go on at the next one.
        self._states = dict(states)
        for name, tracker in self._given.items() if self._live else ():
            state = states.get(name)
            try:
                tracker.start(state if isinstance(state, dict) else None, step=step)
            except TrackerError:
                raise
            except ImportError as error:
                logger.warning("tracker %s: %s. Install it to log there; training goes on without", name, error)
            except Exception as error:
                logger.warning(
                    "tracker %s could not start: %s: %s. Training goes on without it, and the next start tries again",
                    name, type(error).__name__, error,
                )  # fmt: skip
            else:
                self._running[name] = tracker

    def log(self, metrics: Mapping[str, float | int | str], step: int) -> None:
        """Put down the metrics of step number `step`."""
        for name, tracker in self._running.items() if metrics else ():
            try:
                tracker.log(metrics, step)
            except Exception as error:
                self._failed[name] += 1
                if self._failed[name] == 1:
                    logger.warning(
                        "tracker %s: step %d was not logged: %s: %s. Training goes on; finish() counts what else fails",
                        name, step, type(error).__name__, error,
                    )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """By name, for the checkpoint. Of a tracker that does not run: what it had before."""
        for name, tracker in self._running.items():
            try:
                self._states[name] = json.loads(json.dumps(tracker.state_dict(), allow_nan=False))
            except Exception as error:
                logger.warning("tracker %s: state_dict() failed: %s: %s", name, type(error).__name__, error)
        return dict(self._states)

    def finish(self) -> None:
        """Finish each, and say how much was lost."""
        for name, tracker in self._running.items():
            try:
                tracker.finish()
            except Exception as error:
                logger.warning("tracker %s: finish() failed: %s: %s", name, type(error).__name__, error)
            if self._failed[name]:
                logger.warning("tracker %s: %d steps were not logged", name, self._failed[name])
        self._running.clear()


class WandbTracker:
    """Logs to Weights & Biases, and goes on with the same run after a resume, on whatever node.

    The x axis is `train/global_step`. After a crash the steps since the checkpoint are logged a second time; the
    service keeps both, and the charts show both. wandb keeps points for up to 15 s before it writes or sends them, and
    loses those when the process is killed: the checkpoint holds the last 64, and what did not arrive is logged again.
    A run that was deleted on the server gets a new id (wandb finds that out after its `init_timeout`, 90 s).

    Args:
        project, entity: where the run is. Default: as `wandb.init`, which looks at WANDB_PROJECT and WANDB_ENTITY.
        history: "continue": the run of the checkpoint goes on, where it is. "new": each start is a run of its own.
        init: all else that `wandb.init` takes, for example `name`, `group`, `job_type`, `config`, `mode`, `settings`.

    Example:
        >>> CheckpointManager(..., loggers=[WandbTracker(project="demo", entity="lab", config=config)])
    """

    name = "wandb"

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        history: Literal["continue", "new"] = "continue",
        **init: Any,
    ):
        if history not in ("continue", "new"):
            raise ValueError(f"WandbTracker(history={history!r}): use 'continue' or 'new'")
        if taken := {"resume", "resume_from", "fork_from"} & init.keys():
            raise TypeError(f"WandbTracker({taken.pop()}=): the checkpoint decides that; history='new' begins anew")
        self._init = {"project": project, "entity": entity, **init}
        self._history = history
        self._before: dict[str, Any] = {}
        self._step = self._count = 0
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=64)
        """Points by wandb's own number of them."""
        self.run: Any = None
        """The `wandb.Run`, for images and tables; None before the start, and always on other ranks than 0."""

    def start(self, state: dict[str, Any] | None, *, step: int) -> None:
        """As `Tracker.start`.

        Raises:
            TrackerError: there is a run to go on with, and nothing says in which project or entity it is.
        """
        wandb = importlib.import_module("wandb")
        self._before = state or {}
        saved = _saved_run(self._before) if self._history == "continue" else {}
        run_id = saved.pop("run_id", None)
        self._step = saved.pop("step", 0)
        init = {**self._init, "resume": "allow"}
        if run_id is not None:
            place = {key: saved[key] for key in _PLACE if key in saved}
            moved = {key: init[key] for key in place if init[key] not in (None, place[key])}
            if moved:
                logger.warning("W&B run %s goes on where it is, %s, not in %s", run_id, place, moved)
            init = {**saved, **{key: value for key, value in init.items() if value is not None}, **place, "id": run_id}
            self._require_place(init)
        try:
            self.run = wandb.init(**init)
        except Exception as error:
            if init.get("id") is None or not _GONE.search(str(error)):
                raise
            logger.warning("W&B run %s was deleted; this one goes on under a new id. (%s)", init["id"], error)
            self.run = wandb.init(**{**init, "id": secrets.token_hex(4)})
        # Not step=: the service silently drops points whose step is not above all before, and steps are repeated.
        self.run.define_metric(_STEP)
        self.run.define_metric("*", step_metric=_STEP)
        self._count = arrived = self.run.starting_step
        for number, point in self._before.get("recent", ()) if run_id is not None else ():
            if number >= arrived:
                self._put(point)

    def log(self, metrics: Mapping[str, float | int | str], step: int) -> None:
        """As `Tracker.log`."""
        self._put({**metrics, _STEP: step})

    def state_dict(self) -> dict[str, Any]:
        """As `Tracker.state_dict`: which run it is. No key or token."""
        run = self.run
        if run.disabled:
            return self._before
        found = [run.id, run.entity, run.project, run.group, run.name, run.job_type]
        own = {"step": max(self._count, self._step), "recent": [list(point) for point in self._recent]}
        return {**dict(zip(_IDENTITY, found, strict=True)), **own}

    def finish(self) -> None:
        """As `Tracker.finish`. Waits until all is uploaded; `wandb.Settings(finish_timeout=...)` bounds that."""
        self.run.finish()

    def _put(self, point: dict[str, Any]) -> None:
        self._recent.append((self._count, point))
        self._count += 1
        self.run.log(point)

    def _require_place(self, init: Mapping[str, Any]) -> None:
        modes = init.get("mode"), getattr(init.get("settings"), "mode", None), os.environ.get("WANDB_MODE")
        if {"offline", "disabled", "dryrun"} & {*modes}:
            return
        missing = [key for key in _PLACE if not (init.get(key) or os.environ.get(f"WANDB_{key.upper()}"))]
        if missing:
            ways = " and ".join(f"{key}= (or WANDB_{key.upper()})" for key in missing)
            raise TrackerError(
                f"the checkpoint goes on with W&B run {init['id']} but does not say where that is: give WandbTracker "
                f"{ways}, or history='new' for a new run"
            )


class TensorBoardTracker:
    """Logs to TensorBoard event files. After a resume the steps that are repeated replace those logged before.

    Args:
        log_dir: where the event files go, on a storage that the next start sees too: a path, or a URI that TensorBoard
            takes. The same at every start.
    """

    name = "tensorboard"

    def __init__(self, log_dir: str | os.PathLike[str]):
        self.log_dir = os.fspath(log_dir)
        self.writer: Any = None
        """The `SummaryWriter`, for images and histograms; None before the start, and always on other ranks than 0."""

    def start(self, state: dict[str, Any] | None, *, step: int) -> None:
        """As `Tracker.start`."""
        from torch.utils.tensorboard import SummaryWriter

        # Without a checkpoint too: the run may have been killed before its first one.
        self.writer = SummaryWriter(self.log_dir, purge_step=step + 1)

    def log(self, metrics: Mapping[str, float | int | str], step: int) -> None:
        """As `Tracker.log`."""
        for name, value in metrics.items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(name, value, step)

    def state_dict(self) -> dict[str, Any]:
        """As `Tracker.state_dict`. Writes out what was logged: no later start repeats the steps before a checkpoint."""
        self.writer.flush()
        return {"log_dir": self.log_dir}

    def finish(self) -> None:
        """As `Tracker.finish`."""
        self.writer.close()


def _saved_run(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run, ours or an older one, without what is unset."""
    if isinstance(nested := state.get("wandb"), dict):
        state = nested
    found: dict[str, Any] = {}
    for key in (*_IDENTITY, "step"):
        kind = int if key == "step" else str
        values = (state.get(name) for name in (key, *_OLD_NAMES[key]))
        if fit := [value for value in values if value and isinstance(value, kind)]:
            found[key] = fit[0]
    return found
