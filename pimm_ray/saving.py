"""One save after the other: all ranks write, rank 0 commits, old ones go, Ray hears of it."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint.find import CheckpointInfo, candidates, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.folder import Share, commit, prepare
from pimm_ray.checkpoint.layout import CheckpointName, FileEntry, Manifest
from pimm_ray.checkpoint.store import Store
from pimm_ray.errors import IncompleteCheckpoint, PimmRayError, StateMismatch
from pimm_ray.policy import KeepPolicy
from pimm_ray.resuming import Choice
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


class Saver:
    """The saves of one attempt. Every rank has one and calls its methods at the same points."""

    def __init__(self, runtime: Runtime, keep: KeepPolicy, choice: Choice):
        self._runtime, self._keep, self._attempt, self._damaged = runtime, keep, choice.attempt, choice.damaged
        self._parent = choice.manifest.id if choice.manifest else None
        self.newest: CheckpointInfo | None = choice.info if choice.own else None
        self._unreported: list[tuple[CheckpointInfo, dict[str, Any]]] = []
        self._reported_at, self._started_at = -math.inf, time.monotonic()
        self._metrics_of: dict[str, Mapping[str, Any]] = {}
        self._ours: set[str] = set()
        if self.newest and runtime.retains:
            self._make_known(self.newest)

    def save(
        self,
        make: Callable[[], Share],
        head: Callable[[Agreed], Mapping[str, Any]],
        *,
        step: int,
        epoch: int,
        reason: str,
        counts: dict[str, int],
        metrics: Mapping[str, Any],
    ) -> tuple[CheckpointInfo, Agreed]:
        """Write one checkpoint; when this returns it is complete and the newest.

        Args:
            make: this rank's share of the state.
            head: what `state.json` holds beside the state itself. Called on rank 0.
            counts: numbers of this rank, to be summed.
            metrics: of this rank; averaged.

        Raises:
            UnstorableState, StateMismatch, StorageError, ...: some rank failed; all ranks raise, the partial folder is
                gone, and the checkpoint before is still the newest.
        """
        runtime, started = self._runtime, time.monotonic()
        what = f"save at step {step}"
        shares: list[Share] = []

        def plan() -> dict[str, Any]:
            shares.append(make())
            share = shares[0]
            alike = {"fingerprint": share.fingerprint, "sample": share.sample if runtime.world_size > 1 else ""}
            return {**alike, "counts": counts, "metrics": plain_metrics(metrics)}

        def open_folder(plans: list[dict[str, Any]]) -> dict[str, Any]:
            odd = [rank for rank, p in enumerate(plans) if p["fingerprint"] != plans[0]["fingerprint"]]
            if odd:
                raise StateMismatch(
                    f"{what}: ranks {odd} hold other tensors (names, shapes or dtypes) than rank 0; every rank must "
                    "have the same model and optimizer state"
                )
            odd = [rank for rank, p in enumerate(plans) if p["sample"] != plans[0]["sample"]]
            if odd:  # no error: ranks on unlike devices may drift by rounding, and their run must not lose its saves
                logger.warning(
                    "%s: ranks %s hold other values of the parameters than rank 0: the checkpoint is a mixture. Wrap "
                    "the model in DistributedDataParallel, or average the ranks before the save", what, odd,
                )  # fmt: skip
            after = CheckpointName.parse(self.newest.name) if self.newest else None
            name = str(CheckpointName.new(step, self._attempt, after))
            prepare(runtime.store.child(name))
            return {
                "name": name,
                "id": secrets.token_hex(16),
                "counts": {key: sum(p["counts"][key] for p in plans) for key in counts},
                "metrics": merge_metrics([p["metrics"] for p in plans]),
            }

        agreed = Agreed(**runtime.agree(what, plan, open_folder))
        store, share = runtime.store.child(agreed.name), shares[0]
        facts: dict[str, Any] = {
            "id": agreed.id,
            "parent": self._parent,
            "step": step,
            "epoch": epoch,
            "attempt": self._attempt,
            "world_size": runtime.world_size,
            "reason": reason,
            "metrics": agreed.metrics,
        }

        def write() -> list[dict[str, Any]]:
            entries = share.write(store, agreed.id)
            if runtime.rank == 0:
                entries += share.write_state(store, agreed.id, head(agreed))
            return [asdict(entry) for entry in entries]

        def publish(written: list[list[dict[str, Any]]]) -> dict[str, Any]:
            files = tuple(FileEntry(**{**e, "xxh3": tuple(e["xxh3"])}) for part in written for e in part)
            manifest = Manifest(**facts, created=time.time(), files=files)
            runtime.check_claim()
            commit(store, manifest)
            spaced = time.monotonic() - self._reported_at >= runtime.report_spacing
            return {"created": manifest.created, "bytes": sum(entry.bytes for entry in files), "report": spaced}

        try:
            done = runtime.agree(f"commit of the {what}", write, publish)
        except Exception:
            self._discard(store)
            raise
        info = CheckpointInfo(
            path=store.path, filesystem=store.filesystem, created=done["created"], bytes=done["bytes"], **facts
        )
        self._parent, self.newest = info.id, info
        self._ours.add(info.name)
        if runtime.rank == 0:
            seconds = time.monotonic() - started
            logger.info(
                "save step=%d epoch=%d reason=%s bytes=%d seconds=%.3f path=%s",
                step, epoch, reason, info.bytes, seconds, info.path,
            )  # fmt: skip
            self._tidy(info, store)
        if runtime.report_spacing:
            self._unreported.append((info, dict(agreed.metrics)))
            if done["report"]:
                self.report({})
        return info, agreed

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
        own = plain_metrics(metrics)
        merged = merge_metrics(self._runtime.gather("report metrics", own)) if own else {}
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
            self._ours.add(name)
        if self._unreported:
            self.report({})

    def _tidy(self, newest: CheckpointInfo, store: Store) -> None:
        """Delete what the policy does not keep. A failure here costs disk space, never a checkpoint."""
        try:
            if self._runtime.retains:
                self._keep_for_good(newest, store)
                self._sweep(newest)
            else:
                self._retain(newest)
        except (PimmRayError, OSError) as error:
            logger.warning("could not tidy %s: %s", self._runtime.store.path, error)

    def _retain(self, newest: CheckpointInfo) -> None:
        complete = []
        self._metrics_of[newest.name] = newest.metrics
        for name in candidates(self._runtime.store):
            if name in self._damaged:
                continue
            try:
                if name not in self._metrics_of:
                    self._metrics_of[name] = open_checkpoint(self._runtime.store.child(name)).metrics
            except IncompleteCheckpoint:
                if _parsed(name) < _parsed(newest.name):  # a newer one may be the save of a run that took over
                    self._discard(self._runtime.store.child(name))
                continue
            except PimmRayError:
                continue
            complete.append((name, _parsed(name).step, self._metrics_of[name]))
        if self._keep.best and self._keep.score(newest.metrics) == -math.inf:
            value = newest.metrics.get(str(self._keep.metric), "missing")
            logger.info("%s ranks last among the best: its %s is %s", newest.name, self._keep.metric, value)
        kept = self._keep.kept(complete)
        for name, _, _ in complete:
            if name not in kept and name != newest.name:
                self._discard(self._runtime.store.child(name))

    def _sweep(self, newest: CheckpointInfo) -> None:
        """Under Ray: leftovers of earlier attempts that Ray does not know, so that nobody else will delete them."""
        leftovers = [
            name
            for name in candidates(self._runtime.store)
            if name not in self._ours and name not in self._damaged and _parsed(name) < _parsed(newest.name)
        ]
        known = self._runtime.known() if leftovers else set()
        for name in leftovers:
            if name not in known:
                self._discard(self._runtime.store.child(name))

    def _keep_for_good(self, newest: CheckpointInfo, store: Store) -> None:
        if not self._keep.every_steps or newest.step % self._keep.every_steps:
            return
        target = self._runtime.store.child(layout.KEPT).child(newest.name)
        prepare(target)
        files = sorted(store.files(), key=lambda name: name == layout.MARKER)
        for name in files:
            store.copy_file(name, target)

    def _discard(self, store: Store) -> None:
        """Rank 0 deletes a folder, its marker first: killed in between, what is left is no checkpoint."""
        if self._runtime.rank:
            return
        try:
            if store.exists(layout.MARKER):
                store.delete_file(layout.MARKER)
            store.remove()
        except FileNotFoundError:
            return  # Ray was deleting it too
        except (PimmRayError, OSError) as error:
            logger.warning("could not delete %s: %s", store.path, error)


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


def merge_metrics(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over the ranks that have a number; the lowest rank's string."""
    merged = {}
    for key in dict.fromkeys(key for metrics in by_rank for key in metrics):
        values = [metrics[key] for metrics in by_rank if key in metrics]
        same = all(value == values[0] for value in values)
        merged[key] = values[0] if same or isinstance(values[0], str) else sum(map(float, values)) / len(values)
    return merged


def _parsed(name: str) -> CheckpointName:
    parsed = CheckpointName.parse(name)
    if parsed is None:
        raise ValueError(f"{name} is not the name of a checkpoint folder")
    return parsed
