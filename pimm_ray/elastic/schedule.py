"""Learning-rate schedules after a restarted epoch: replayed steps must neither raise nor make the rate rise again."""

from __future__ import annotations

import functools
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
        if type(scheduler) not in _HORIZON:
            raise PimmRayError(
                f"ElasticPolicy(schedule='extend') cannot extend a {type(scheduler).__name__}: use schedule='hold', or "
                f"one of {', '.join(kind.__name__ for kind in _HORIZON)}"
            )


def extend(scheduler: Any, steps: int) -> None:
    """Move the horizon of a schedule `steps` further. Only what is left of it is stretched, so that the learning rate
    goes on from where it is and ends where it was planned to; a schedule at its end stays there."""
    attribute = _HORIZON[type(scheduler)]
    before, now = getattr(scheduler, attribute), scheduler.last_epoch
    if now >= _last_step(scheduler):
        return
    setattr(scheduler, attribute, before + steps)
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        *_, rise, fall = scheduler._schedule_phases
        start, end = rise["end_step"], fall["end_step"]
        fall["end_step"] = end + steps
        if now > start:
            done = (now - start) / (end - start)
            rise["end_step"] = now - (end + steps - now) * done / (1 - done)
    elif isinstance(scheduler, lr_scheduler.LinearLR):
        factor = scheduler.start_factor + (scheduler.end_factor - scheduler.start_factor) * now / before
        slope = (scheduler.end_factor - factor) / (before + steps - now)
        scheduler.start_factor = factor - slope * now


def hold(scheduler: Any, *, say: bool) -> None:
    """Make `scheduler.step` on this instance keep the last learning rate once its horizon is reached."""
    attribute = _HORIZON.get(type(scheduler))
    if attribute is None:
        if say:
            logger.warning(
                "%s has no known horizon: replayed steps may run it past the end that you planned",
                type(scheduler).__name__,
            )
        return
    last = _last_step(scheduler)
    if scheduler.last_epoch > last:
        return
    step, state_dict = scheduler.step, scheduler.state_dict

    @functools.wraps(step)
    def held(*args: Any, **kwargs: Any) -> None:
        if scheduler.last_epoch < last:
            step(*args, **kwargs)
        elif not held.said:  # type: ignore[attr-defined]
            held.said = True  # type: ignore[attr-defined]
            if say:
                logger.warning("schedule held at its end: %s=%s, step %s", attribute, last, scheduler.last_epoch)

    @functools.wraps(state_dict)
    def state_without_guard() -> dict[str, Any]:
        # torch's state_dict is the instance's whole __dict__, so it would hold these two functions.
        return {key: value for key, value in state_dict().items() if key not in ("step", "state_dict")}

    held.said = False  # type: ignore[attr-defined]
    scheduler.step, scheduler.state_dict = held, state_without_guard


def _last_step(scheduler: Any) -> int:
    """The `last_epoch` at which a schedule has arrived."""
    return int(getattr(scheduler, _HORIZON[type(scheduler)])) - isinstance(scheduler, lr_scheduler.OneCycleLR)


def follows_steps(scheduler: Any, global_step: int) -> bool:
    """Whether this schedule is advanced once a step (and not once an epoch)."""
    return bool(scheduler.last_epoch >= global_step > 0)
