"""Learning-rate schedules after a restarted epoch: replayed steps must neither raise nor make the rate rise again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.optim import lr_scheduler

from pimm_ray.errors import PimmRayError

logger = logging.getLogger(__name__)

_HORIZON = {
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
}


def require_horizon(schedulers: Iterable[Any]) -> None:
    """Raises PimmRayError when one of them has no horizon that we know."""
    for scheduler in schedulers:
        if _end(scheduler) is None:
            raise PimmRayError(
                f"ElasticPolicy(schedule='extend') cannot extend a {type(scheduler).__name__}: use schedule='hold', or "
                f"one of {', '.join(kind.__name__ for kind in _HORIZON)}, or a SequentialLR that ends in one"
            )


def outlive(schedulers: Iterable[Any], *, extend_by: int, step: int, all_kinds: bool, say: bool) -> None:
    """Prepare schedules for more steps than they were made for; unless `all_kinds`, only those whose end we know."""
    for scheduler in schedulers:
        if extend_by and follows_steps(scheduler, step):
            extend(scheduler, extend_by)
        if all_kinds or has_horizon(scheduler):
            hold(scheduler, say=say)


def extend(scheduler: Any, steps: int) -> None:
    """Move the horizon of a schedule `steps` further. Only what is left of it is stretched, so that the learning rate
    goes on from where it is and ends where it was planned to; a schedule at its end stays there."""
    scheduler = _last_part(scheduler)
    attribute = _HORIZON[type(scheduler)]
    before, now = getattr(scheduler, attribute), scheduler.last_epoch
    if now >= before - isinstance(scheduler, lr_scheduler.OneCycleLR):
        return
    setattr(scheduler, attribute, before + steps)
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        *_, turn, last = scheduler._schedule_phases
        start, end = turn["end_step"], last["end_step"]
        last["end_step"] = end + steps
        if now > start:
            done = (now - start) / (end - start)
            turn["end_step"] = now - (end + steps - now) * done / (1 - done)
    elif isinstance(scheduler, lr_scheduler.LinearLR):
        factor = scheduler.start_factor + (scheduler.end_factor - scheduler.start_factor) * now / before
        slope = (scheduler.end_factor - factor) / (before + steps - now)
        scheduler.start_factor = factor - slope * now


def hold(scheduler: Any, *, say: bool) -> None:
    """Make `scheduler.step` on this instance keep the last learning rate once its horizon is reached."""
    last = _end(scheduler)
    if last is None:
        if say:
            logger.warning(
                "%s has no known horizon: replayed steps may run it past the end that you planned",
                type(scheduler).__name__,
            )
        return
    if scheduler.last_epoch > last:
        return
    kind = type(scheduler)
    said = not say

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal said
        if self.last_epoch < last:
            kind.step(self, *args, **kwargs)
        elif not said:
            said = True
            rates = sorted({float(group["lr"]) for group in self.optimizer.param_groups})
            logger.warning(
                "%s held at its end, step %d: the learning rate stays at %s%s",
                kind.__name__,
                last,
                ", ".join(f"{rate:g}" for rate in rates),
                ""
                if any(rates)
                else " and nothing is learned any more; ElasticPolicy(schedule='extend') moves the end",
            )

    # A class of its own, not an attribute of the instance: those are part of a scheduler's state_dict.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})


def rescale(scheduler: Any, ratio: float, *, say: bool) -> None:
    """Measure a schedule in other steps, `ratio` of them for one of before: the fraction of its way stays. One with a
    part whose horizon is not known goes on as it is."""
    if not has_horizon(scheduler):
        if say:
            logger.warning(
                "%s has no known horizon: it goes on by steps, although a step now has another number of samples",
                type(scheduler).__name__,
            )
        return
    for part in getattr(scheduler, "_schedulers", ()):
        rescale(part, ratio, say=say)
    if hasattr(scheduler, "_milestones"):
        scheduler._milestones = [round(milestone * ratio) for milestone in scheduler._milestones]
    if attribute := _HORIZON.get(type(scheduler)):
        setattr(scheduler, attribute, max(1, round(getattr(scheduler, attribute) * ratio)))
    for phase in getattr(scheduler, "_schedule_phases", ()):
        phase["end_step"] = (phase["end_step"] + 1) * ratio - 1
    scheduler.last_epoch = round(scheduler.last_epoch * ratio)


def scale_rates(optimizer: Any, schedulers: Iterable[Any], factor: float) -> None:
    """Multiply an optimizer's learning rates, and those that its schedules start from or aim at."""
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if key in group:
                group[key] *= factor
    for scheduler in schedulers:
        for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
            if hasattr(part, "base_lrs"):
                part.base_lrs = [rate * factor for rate in part.base_lrs]
            if hasattr(part, "eta_min"):
                part.eta_min *= factor


def has_horizon(scheduler: Any) -> bool:
    """Whether we know the horizon of every part of a schedule."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        return all(map(has_horizon, scheduler._schedulers))
    return type(scheduler) in _HORIZON


def follows_steps(scheduler: Any, global_step: int) -> bool:
    """Whether this schedule is advanced once a step (and not once an epoch)."""
    parts = getattr(scheduler, "_schedulers", [])  # a ChainedScheduler has no count of its own
    return max(getattr(part, "last_epoch", 0) for part in (scheduler, *parts)) >= global_step > 0


def _last_part(scheduler: Any) -> Any:
    return _last_part(scheduler._schedulers[-1]) if isinstance(scheduler, lr_scheduler.SequentialLR) else scheduler


def _end(scheduler: Any) -> int | None:
    """The `last_epoch` at which a schedule has its last planned learning rate."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        own = _end(scheduler._schedulers[-1])
        return None if own is None else int(scheduler._milestones[-1]) + own
    attribute = _HORIZON.get(type(scheduler))
    return int(getattr(scheduler, attribute)) - isinstance(scheduler, lr_scheduler.OneCycleLR) if attribute else None
