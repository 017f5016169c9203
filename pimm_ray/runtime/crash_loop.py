"""An error that comes back at the same place each time: the run is stopped, for another start would end there, too.

The worker marks the loop's error with the place, Ray's controller compares the marks of one failure with those of the
ones before, and the driver puts the report in front of what `fit()` raises.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed

from pimm_ray.checkpoint.find import find_checkpoint
from pimm_ray.checkpoint.passing import may_pass
from pimm_ray.checkpoint.store import Store
from pimm_ray.runtime import ray_private
from pimm_ray.runtime.base import show_messages

logger = logging.getLogger(__name__)

TIMES = 3
LOST_TIMES = 100
"""How many workers of one run may be lost in that moment before it is no chance any more."""
_ATTRIBUTE = "pimm_ray_mark"
_MOST_CHARACTERS = 2000
_NUMBER = r"(?:0x)?[0-9a-fA-F]*[0-9][0-9a-fA-F]*"
_CHANGING = re.compile(rf"{_NUMBER}(?:[.+-]{_NUMBER})*")
"""Numbers, addresses, and names that are drawn: in each attempt another one."""
_NETWORK = re.compile(r"gloo/|NCCL|connect|broken pipe|timed? ?out|max retries", re.IGNORECASE)


@dataclass
class _Mark:
    place: str
    text: str
    error: str | None
    """What is compared; None for an error that may pass by itself."""
    times: int = 0


def mark(error: BaseException, place: Callable[[], str]) -> None:
    """Note on an error of the training loop where it happened. The worker calls it, before Ray gets the error."""
    with contextlib.suppress(Exception):
        text = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
        error.__dict__[_ATTRIBUTE] = _Mark(place(), text, None if _may_pass(error, text) else _CHANGING.sub("#", text))


def _may_pass(error: BaseException, text: str) -> bool:
    """Whether it may be the echo of a lost node, or of a storage that is away for a while: those are Ray's to count."""
    if isinstance(error, torch.distributed.DistError) or _NETWORK.search(text):
        return True
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) and may_pass(cause)


class FailurePolicy:
    """Stands in for Ray's failure policy in the controller: as Ray decides, but no more than `TIMES` in a row at one
    place with one error.

    The death of a process says nothing about the loop and is left to Ray: it may have been its node's. So are
    preemptions. The rank is not compared: with another number of workers the same sample is another rank's.
    """

    def __init__(self, rays: Any):
        self._rays = rays
        self._same: set[tuple[str, str]] = set()
        self._times = 0
        self._lost = 0

    def make_decision(self, training_failed_error: Any) -> Any:
        decision = self._rays.make_decision(training_failed_error)
        try:
            if self._lost_at_start(training_failed_error):
                return ray_private.decide(decision, "RETRY")
            return ray_private.decide(decision, "RAISE") if self._count(training_failed_error) >= TIMES else decision
        except Exception as error:  # one that leaves here would end the run
            logger.warning("crash loop: left to Ray's own policy: %r", error)
            return decision

    def _lost_at_start(self, failure: Any) -> bool:
        """Whether a worker was lost while its group was starting. Ray starts again for that, too, but not where the
        loss falls into its last call, which hands the loop over: that would end the run."""
        import ray.exceptions

        lost = isinstance(getattr(failure, "controller_failure", None), ray.exceptions.RayActorError)
        self._lost += lost
        if lost and self._lost <= LOST_TIMES:
            show_messages()
            logger.warning("a worker was lost while its group was starting: starting again (%s)", failure)
        return lost and self._lost <= LOST_TIMES

    def _count(self, failure: Any) -> int:
        """How often in a row this failure has come; 0 when it does not count."""
        marks = _marks(failure)
        found = {(mark.place, mark.error) for mark in marks if mark is not None and mark.error is not None}
        if None in marks or not found:
            return 0
        again = self._same & found
        self._same, self._times = again or found, self._times + 1 if again else 1
        for mark in marks:
            if mark is not None and (mark.place, mark.error) in self._same:
                mark.times, last = self._times, mark
        show_messages()
        logger.warning("failure %s: %s (%d in a row; at %d the run stops)", last.place, last.text, self._times, TIMES)
        return self._times


def explain(failure: BaseException, run: Store) -> None:
    """Put a report in front of the text of what `fit()` raises, if the run was in a crash loop. The driver calls it."""
    try:
        looped = next((mark for mark in _marks(failure) if mark is not None and mark.times >= TIMES), None)
        if looped is None:
            return
        newest = find_checkpoint(run, verified=False)
        kept = f"goes on from the newest checkpoint, {newest.path} (step {newest.step})" if newest else "starts fresh"
        report = (
            f"crash loop: {looped.times} failures in a row {looped.place} with the same error: {looped.text}\n"
            "The run was stopped, whatever FailureConfig allows: another start would end there, too. Correct the "
            f"cause and give the same command again: it {kept}."
        )
        logger.error("%s", report)
        failure.args = (f"{report}\n\n{failure}",)
    except Exception as error:
        logger.warning("the failure cannot be explained: %r", error)


def _marks(failure: Any) -> list[_Mark | None]:
    """Of each worker that failed; None for one whose process died."""
    return [vars(error).get(_ATTRIBUTE) for error in getattr(failure, "worker_failures", {}).values()]
