"""One save after the other: all ranks write, rank 0 commits, old ones go, Ray hears of it."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from pimm_ray.checkpoint.find import CheckpointInfo, candidates, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.folder import Share, commit, prepare
from pimm_ray.checkpoint.layout import CheckpointName, FileEntry, Manifest
from pimm_ray.errors import RankMissing, RunInUse, StateMismatch
from pimm_ray.policy import KeepPolicy
from pimm_ray.resuming import Choice
from pimm_ray.retention import Retention
from pimm_ray.runtime.base import Runtime

logger = logging.getLogger(__name__)

_METRICS_SPACING = 10.0


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What the ranks agreed on before they write: the folder's name and id, counts summed and metrics averaged."""

    name: str
    id: str
    counts: dict[str, int]
    metrics: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one rank wants to be saved.

    Args:
        make: this rank's share of the state.
        head: what `state.json` holds beside the state itself. Called on rank 0.
        counts: numbers of this rank, to be summed.
        metrics: of this rank; averaged.
    """

    make: Callable[[], Share]
    head: Callable[[Agreed], Mapping[str, Any]]
    step: int
    epoch: int
    reason: str
    counts: dict[str, int]
    metrics: Mapping[str, Any]


class Saver:
    """The saves of one attempt. Every rank has one and calls its methods at the same points."""

    def __init__(self, runtime: Runtime, keep: KeepPolicy, choice: Choice):
        self._runtime, self._attempt, self._damaged = runtime, choice.attempt, choice.damaged
        self._keep, self._retention = keep, Retention(runtime, keep, choice)
        self._parent = choice.info.id if choice.info else None
        self.newest: CheckpointInfo | None = choice.info if choice.own else None
        self.failed = 0
        """Saves that failed since the last good one."""
        self.took: deque[float] = deque(maxlen=3)
        """How many seconds the last good ones took."""
        self._tried: CheckpointName | None = None
        self._said: set[str] = set()
        self._unreported: list[tuple[CheckpointInfo, dict[str, Any]]] = []
        self._reported_at, self._started_at = -math.inf, time.monotonic()
        if self.newest and runtime.retains:
            self._make_known(self.newest)

    def save(self, request: Request, *, forgive: bool) -> tuple[CheckpointInfo, Agreed] | None:
        """Write one checkpoint; when this returns it is complete and the newest. None: the save failed, which was said.

        Args:
            forgive: whether a failure is only said.

        Raises:
            UnstorableState, StateMismatch, StorageError, ...: some rank failed; all ranks raise, the partial folder is
                gone, and the checkpoint before is still the newest.
        """
        started = time.monotonic()
        try:
            info, agreed, spaced = self._write(request)
        except (RankMissing, RunInUse):
            raise
        except Exception as error:
            self.failed += 1
            if not forgive:
                raise
            if self._runtime.rank == 0:
                self._say_failed(request.step, error)
            return None
        self.failed, self._parent, self.newest = 0, info.id, info
        self.took.append(time.monotonic() - started)
        if self._runtime.rank == 0:
            logger.info(
                "save step=%d epoch=%d reason=%s bytes=%d seconds=%.3f path=%s",
                info.step, info.epoch, info.reason, info.bytes, self.took[-1], info.path,
            )  # fmt: skip
            self._retention.tidy(info)
        if self._runtime.report_spacing:
            self._unreported.append((info, dict(agreed.metrics)))
            if spaced:
                self.report({})
        return info, agreed

    def leave_best(self, info: CheckpointInfo) -> None:
        """It is the best so far."""
        if self._keep.export_best and self._runtime.rank == 0:
            self._retention.leave_best(info)

    def _say_failed(self, step: int, error: Exception) -> None:
        newest = self.newest
        good = f"{newest.name}, {step - newest.step} steps ago" if newest else "none of this run"
        whose = "" if getattr(error, "rank", None) is not None else "rank 0: "  # the others' are in the text
        logger.warning(
            "save at step %d failed (%d in a row) with %s: %s%s. Training goes on and the next due save tries again; "
            "newest checkpoint: %s", step, self.failed, type(error).__name__, whose, error, good,
        )  # fmt: skip

    def _write(self, request: Request) -> tuple[CheckpointInfo, Agreed, bool]:
        """The checkpoint, and whether a report now would not wait for the one before."""
        runtime = self._runtime
        step, what = request.step, f"save at step {request.step}"
        shares: list[Share] = []

        def plan() -> dict[str, Any]:
            shares.append(request.make())
            share = shares[0]
            alike: dict[str, Any] = {"fingerprint": share.fingerprint}
            if runtime.world_size > 1:
                alike |= {"sample": share.sample, "documents": share.documents}
            return {**alike, "counts": request.counts, "metrics": plain_metrics(request.metrics)}

        def open_folder(plans: list[dict[str, Any]]) -> dict[str, Any]:
            runtime.check_claim(self._attempt)
            odd = [rank for rank, p in enumerate(plans) if p["fingerprint"] != plans[0]["fingerprint"]]
            if odd:
                raise StateMismatch(
                    f"{what}: ranks {odd} hold other tensors (names, shapes or dtypes) than rank 0; every rank must "
                    "have the same model and optimizer state"
                )
            self._warn_of_unlike(what, plans)
            # Newer than a save that failed, too: should that have left its folder, it must not pass for the newest.
            self._tried = CheckpointName.new(step, self._attempt, after=self._tried)
            name = str(self._tried)
            self._retention.ours.add(name)
            try:
                prepare(runtime.store.child(name))
            except Exception:
                self._retention.discard(name)
                raise
            return {
                "name": name,
                "id": secrets.token_hex(16),
                "counts": {key: sum(p["counts"][key] for p in plans) for key in request.counts},
                "metrics": merge_metrics([p["metrics"] for p in plans]),
            }

        agreed = Agreed(**runtime.agree(what, plan, open_folder))
        store, share = runtime.store.child(agreed.name), shares[0]
        facts: dict[str, Any] = {
            "id": agreed.id,
            "parent": self._parent,
            "step": step,
            "epoch": request.epoch,
            "attempt": self._attempt,
            "world_size": runtime.world_size,
            "reason": request.reason,
            "metrics": agreed.metrics,
        }

        def write() -> list[dict[str, Any]]:
            entries = share.write(store, agreed.id)
            if runtime.rank == 0:
                entries += share.write_state(store, agreed.id, request.head(agreed))
            return [asdict(entry) for entry in entries]

        def publish(written: list[list[dict[str, Any]]]) -> dict[str, Any]:
            files = tuple(FileEntry(**{**e, "xxh3": tuple(e["xxh3"])}) for part in written for e in part)
            manifest = Manifest(**facts, created=time.time(), files=files)
            runtime.check_claim(self._attempt)
            commit(store, manifest)
            spaced = time.monotonic() - self._reported_at >= runtime.report_spacing
            return {"created": manifest.created, "bytes": sum(entry.bytes for entry in files), "report": spaced}

        done = runtime.agree(f"commit of the {what}", write, publish, undo=lambda: self._retention.discard(agreed.name))
        info = CheckpointInfo(
            path=store.path, filesystem=store.filesystem, created=done["created"], bytes=done["bytes"], **facts
        )
        return info, agreed, done["report"]

    def _warn_of_unlike(self, what: str, plans: list[dict[str, Any]]) -> None:
        """Rank 0: no error, since ranks on unlike devices may drift by rounding, and must not lose their saves."""
        odd = [rank for rank, p in enumerate(plans) if p.get("sample") != plans[0].get("sample")]
        if odd:
            logger.warning(
                "%s: ranks %s hold other values of the parameters than rank 0: the checkpoint is a mixture. Wrap the "
                "model in DistributedDataParallel, or average the ranks before the save", what, odd,
            )  # fmt: skip
        for part, digest in plans[0].get("documents", {}).items():
            odd = [rank for rank, p in enumerate(plans) if p["documents"].get(part) != digest]
            if odd and part not in self._said:
                self._said.add(part)
                logger.warning(
                    "%s: %s of ranks %s is not what rank 0 holds, and the checkpoint keeps rank 0's: a resume gives "
                    "all ranks that. Keep what each rank has of its own elsewhere", what, part, odd,
                )  # fmt: skip

    @property
    def report_is_due(self) -> bool:
        """Rank 0 asks: whether a report now would not wait for the one before, and there is something to say."""
        waited = time.monotonic() - self._reported_at
        spacing = self._runtime.report_spacing
        if not self._unreported:
            waited = min(waited, time.monotonic() - self._started_at)
            return bool(spacing) and waited >= max(spacing, _METRICS_SPACING)
        return bool(spacing) and waited >= spacing

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Tell of the oldest unreported checkpoint, else of metrics alone."""
        merged = over_ranks(self._runtime, "report metrics", metrics)
        info, held = self._unreported.pop(0) if self._unreported else (None, {})
        if info is not None or merged:
            self._runtime.report({**merged, **held}, info)
        self._reported_at = time.monotonic()

    def drain(self, metrics: Mapping[str, Any]) -> None:
        """Report all that is left and wait until it is on record."""
        while self._unreported:
            self.report(metrics)
        self._runtime.settle()

    def _make_known(self, newest: CheckpointInfo) -> None:
        """Ray retains what it knows: tell it of complete checkpoints that an attempt before had no time to report."""
        runtime = self._runtime

        def unknown(_: Any) -> list[str]:
            names = candidates(runtime.store)
            held = runtime.known() | self._damaged
            older = [name for name in reversed(names[names.index(newest.name) :]) if name not in held]
            return [name for name in older if not verify_checkpoint(runtime.store.child(name), deep=False)]

        for name in runtime.exchange("resume: compare with Ray", None, unknown):
            info = open_checkpoint(runtime.store.child(name))
            self._unreported.append((info, dict(info.metrics)))
            self._retention.ours.add(name)
        if self._unreported:
            self.report({})


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics to hold until they are reported: tensors detached, nothing read from a device yet.

    Raises:
        TypeError: a name is no string, or a value is neither a number, a tensor or array of one element, nor a string.
    """
    held = {}
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"metric {key!r} has a name of type {type(key).__name__}: use a string")
        size, kind = 1, type(value).__name__
        if isinstance(value, torch.Tensor):
            value = value.detach()
            size, plain, kind = value.numel(), not value.is_complex(), f"{kind} of {value.dtype}"
        elif isinstance(value, np.ndarray | np.generic):
            size, plain, kind = value.size, value.dtype.kind in "biufU", f"{kind} of {value.dtype}"
        else:
            plain = isinstance(value, int | float | str)
        if not plain or size != 1:
            kind = type(value).__name__ + f" of {size} values" if size != 1 else kind
            raise TypeError(f"metric {key!r} is a {kind}: give one number (or a string), for example its .mean()")
        held[key] = value
    return held


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, str | int | float) else v.item() for k, v in check_metrics(metrics).items()}


def over_ranks(runtime: Runtime, what: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Every rank's metrics, merged. Who calls it: every rank, also one that has none."""
    return merge_metrics(runtime.gather(what, plain_metrics(metrics)))


def merge_metrics(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over the ranks that have a number; the lowest rank's string."""
    merged = {}
    for key in dict.fromkeys(key for metrics in by_rank for key in metrics):
        values = [metrics[key] for metrics in by_rank if key in metrics]
        same = all(value == values[0] for value in values)
        merged[key] = values[0] if same or isinstance(values[0], str) else sum(map(float, values)) / len(values)
    return merged
