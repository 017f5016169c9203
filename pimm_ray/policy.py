"""When to save and what to keep: settings that check themselves. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """When the manager saves by itself.

    Args:
        every_steps: save at each optimizer step whose number is a multiple of this.
        every_seconds: save when this long has passed since the last save. Rank 0's clock decides at one step and
            all ranks save at the next.
        on_preemption: save at once when a part of the job is about to be stopped: a node of Ray's cluster that is being
            drained, or, outside Ray, a SIGTERM to any rank, after which every rank ends with `SystemExit(143)`.
            False leaves SIGTERM alone.
        poll_every_seconds: how often the ranks look for such a notice together, where rank 0 cannot know of it alone,
            and the shortest time between two saves after one.
        at_end: save in `finish()` when the newest checkpoint is older.
        timeout_seconds: how long ranks wait for each other at a save or a resume before `RankMissing` names the one
            that did not come. Longer than the slowest save.
        on_error: what a failed save does, on all ranks alike. "raise": every rank raises. "warn": one warning, training
            goes on and the next due save tries again; a missing rank, another job in this run folder and the last
            save, in `finish()`, still raise.

    A save that falls on the last step of an epoch is taken after the epoch's own end (your evaluation, your own
    `save()`), so that what it drew from the random streams is in it.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    on_preemption: bool = True
    poll_every_seconds: float = 2.0
    at_end: bool = True
    timeout_seconds: float = 1800.0
    on_error: Literal["raise", "warn"] = "raise"

    def __post_init__(self) -> None:
        _positive(self, "every_steps")
        _positive(self, "every_seconds", "poll_every_seconds", "timeout_seconds", whole=False)
        if self.timeout_seconds is None:
            raise ValueError("SavePolicy(timeout_seconds=None): ranks must not wait for each other for ever")
        if self.poll_every_seconds is None:
            raise ValueError("SavePolicy(poll_every_seconds=None): on_preemption=False is what looks for no notice")
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"SavePolicy(on_error={self.on_error!r}): use 'raise' or 'warn'")


@dataclass(frozen=True, kw_only=True)
class KeepPolicy:
    """Which checkpoints of a run stay. The newest always does; nothing is deleted before its successor is complete.

    Args:
        last: how many of the newest. None keeps all.
        best: how many of the best by `metric`, a key of `manager.save(metrics=...)`; NaN and missing rank last.
        metric: name of that metric.
        mode: whether a smaller ("min") or a larger ("max") value is better.
        every_steps: those whose step is a multiple of this stay for good.
        export_best: leave the weights of the best save by `metric` in the run's folder `best/`, in Hugging Face's
            layout, whatever becomes of its checkpoint. By hard link where the filesystem can.
    """

    last: int | None = 3
    best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    every_steps: int | None = None
    export_best: bool = False

    def __post_init__(self) -> None:
        _positive(self, "last", "every_steps")
        if self.mode not in ("min", "max"):
            raise ValueError(f"KeepPolicy(mode={self.mode!r}): use 'min' or 'max'")
        if not isinstance(self.best, int) or self.best < 0:
            raise ValueError(f"KeepPolicy(best={self.best!r}): use a whole number, 0 or more")
        if (self.best or self.export_best) and not self.metric:
            asked = f"best={self.best}" if self.best else "export_best=True"
            raise ValueError(f"KeepPolicy({asked}) needs metric=: the name that manager.save(metrics=) uses")

    def score(self, metrics: Mapping[str, Any]) -> float:
        """Larger is better; -inf for a metric that is missing or not a number."""
        try:
            value = float(metrics.get(self.metric or "", math.nan))
        except (TypeError, ValueError):
            return -math.inf
        return -math.inf if math.isnan(value) else value if self.mode == "max" else -value

    def kept(self, checkpoints: Sequence[tuple[str, int, Mapping[str, Any]]]) -> set[str]:
        """Names to keep of `(name, step, metrics)`, newest first."""
        names = {name for name, _, _ in checkpoints[: self.last]}
        if self.every_steps:
            names |= {name for name, step, _ in checkpoints if step % self.every_steps == 0}
        if self.best:
            scored = [(self.score(metrics), name) for name, _, metrics in checkpoints]
            ranked = sorted((item for item in scored if item[0] > -math.inf), key=lambda item: -item[0])
            names |= {name for _, name in ranked[: self.best]}
        return names


def _positive(policy: Any, *names: str, whole: bool = True) -> None:
    for name in names:
        value = getattr(policy, name)
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if value is not None and not (fits and 0 < value < math.inf):
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{type(policy).__name__}({name}={value!r}): use {kind} above 0, or None")
