"""The weights that a run begins with when it has nothing to resume from."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pimm_ray.checkpoint.names import bare_names
from pimm_ray.checkpoint.store import Store, open_store
from pimm_ray.errors import PimmRayError
from pimm_ray.job import Job
from pimm_ray.weights.load import LoadReport, apply
from pimm_ray.weights.rules import Rules
from pimm_ray.weights.source import Weights, is_hub, newest_of_run, open_weights

logger = logging.getLogger(__name__)

_PIN = ".warm_start"
"""In the run folder: which commit a run began with whose first save may be yet to come."""
_PIN_BYTES = 64 * 1024


@dataclass(frozen=True)
class WarmStart:
    """Weights to begin with, for `CheckpointManager.resume(warm_start=...)`. Unused when there is anything to resume.

    Args:
        source: as `load_weights` takes it: a path, URI, `ray.train.Checkpoint` or `hf://repo[@revision][/file]`. None
            or "" stands for a setting that is not set: nothing is loaded.
        rules, strict: as `load_weights` takes them.

    Example:
        >>> manager.resume(warm_start=WarmStart("hf://org/model@v2", rules={"encoder": "backbone.enc"}))
    """

    source: Any
    rules: Rules = field(default=(), kw_only=True)
    strict: bool = field(default=False, kw_only=True)

    def __bool__(self) -> bool:
        return self.source is not None and self.source != ""

    @property
    def name(self) -> str:
        """The source, for people."""
        return str(getattr(self.source, "path", self.source))


def begin(job: Job, start: WarmStart) -> str:
    """Put the weights into the model of a run that begins, and say whose they are. Every rank calls it.

    Rank 0 decides which checkpoint or commit that is; a retry before the first save uses the same commit.

    Raises:
        CheckpointNotFound, WeightsError, StateMismatch, ...: as `load_weights`, on every rank.
    """
    runtime, objects = job.runtime, job.objects

    def look() -> dict[str, str | None]:
        return _pin(start, runtime.store) if runtime.rank == 0 else {}

    pin = runtime.broadcast("resume: warm start", runtime.patiently("resume: look for the weights", look))
    source = open_store(start.source).at(pin["checkpoint"]) if pin["checkpoint"] else start.source

    def load() -> tuple[Weights, LoadReport]:
        weights = open_weights(source, commit=pin["commit"])
        return weights, apply(objects.model, weights, rules=start.rules, strict=start.strict)

    weights, report = runtime.patiently("resume: load the weights", load)
    job.warm_start = {"source": weights.origin, "commit": weights.commit}
    if runtime.rank == 0:
        report.say()
    if isinstance(objects.ema, nn.Module):
        _follow(objects.ema, objects.model)
    elif objects.ema is not None:
        job.warn_once("ema= is no module and keeps the weights that it was made of: load_weights before you make it")
    return f"weights of {weights.origin}" + (f" at commit {weights.commit}" if weights.commit else "")


def _pin(start: WarmStart, run: Store) -> dict[str, str | None]:
    """The commit of a repository on the Hub, or the checkpoint of a run folder."""
    if is_hub(start.source):
        from pimm_ray.weights import hub

        commit = _pinned(start, run) or hub.resolve(start.source)
        run.publish(_PIN, json.dumps({"source": start.name, "commit": commit}).encode())
        return {"commit": commit, "checkpoint": None}
    newest = newest_of_run(open_store(start.source))
    return {"commit": None, "checkpoint": newest.path if newest else None}


def _pinned(start: WarmStart, run: Store) -> str | None:
    try:
        said = json.loads(run.read(_PIN, limit=_PIN_BYTES))
        return str(said["commit"]) if said["source"] == start.name else None
    except FileNotFoundError:
        return None
    except (PimmRayError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s in %s cannot be used: %s", _PIN, run.path, error)
        return None


def _follow(ema: nn.Module, model: nn.Module) -> None:
    """An average that was made of the model before its weights were loaded begins with them too."""
    live, averaged = model.state_dict(), ema.state_dict()
    loaded = {bare: live[key] for key, bare in bare_names(model).items()}
    for key, bare in bare_names(ema).items():
        source = loaded.get(bare, loaded.get(bare.removeprefix("module.")))
        if source is not None and source.shape == averaged[key].shape:
            averaged[key].copy_(source)
