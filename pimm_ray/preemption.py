"""What a job does about a notice that it will be stopped: it saves in time, and does no work that cannot be saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from pimm_ray.runtime.base import Notice, Runtime
from pimm_ray.saving import Saver

logger = logging.getLogger(__name__)

SIGTERM_EXIT = 143
"""What a shell reports of a process that SIGTERM ended."""
PATIENCE_SECONDS = 60.0
"""How long after the deadline the job waits for its restart before it goes on."""
SLACK_SECONDS = 1.0
"""For clocks of nodes that differ, and steps and saves that take longer than the last ones."""
_SAVING_SHARE = 4
"""After a notice, this many times as long as a save takes lies between two saves."""

Action = Literal["nothing", "save", "wait", "too late", "exit"]


class Preemption:
    """One a rank. Rank 0 decides by its clock, after a step or a poll, and all ranks act at the next one.

    Args:
        every: seconds between two looks of all ranks together, where rank 0 cannot know alone; and at least between
            two saves after a notice.
    """

    def __init__(self, runtime: Runtime, saver: Saver, every: float):
        self._runtime, self._saver, self._every = runtime, saver, every
        self._stepped = time.monotonic()
        self._next = self._stepped + every
        self._step_seconds = 0.0
        self._known: Notice | None = None
        self._over = False

    def due(self) -> bool:
        """Rank 0, after each step or poll: whether all ranks call `answer()` at the next one."""
        now = time.monotonic()
        self._step_seconds, self._stepped = now - self._stepped, now
        pending = self._runtime.pending()
        return now >= self._next if pending is None or self._known else pending

    def answer(self, save: Callable[[], object]) -> None:
        """Look for a notice and act on it. Every rank calls it, at the same step, outside a window.

        Args:
            save: saves what is not saved yet.

        Raises:
            SystemExit: the notice was a SIGTERM, and all is saved.
        """
        notice = self._runtime.notice()
        if notice is None:
            self._next = time.monotonic() + self._every
            return
        action, left = self._decide(notice)
        if action == "too late" and self._runtime.rank == 0:
            logger.warning("preemption: no save fits in: the restart goes back to the newest checkpoint")
        if action in ("save", "wait", "exit"):
            save()
        if action == "save":
            action, left = self._decide(notice)  # that may have been the last one that fits
        if action == "exit":
            self._leave()
        if action in ("wait", "too late"):
            self._wait(left)
        spacing = max(self._every, _SAVING_SHARE * self._save_seconds)
        self._next = time.monotonic() + (min(spacing, left - self._margin) if action == "save" else self._every)

    def close(self) -> None:
        """The run is finished, and all is on record. Every rank calls it.

        Raises:
            SystemExit: a SIGTERM has come that no step has answered.
        """
        notice = self._runtime.notice()
        if notice is not None and notice.deadline is None:
            self._leave()
        self._runtime.deafen()

    @property
    def _save_seconds(self) -> float:
        return max(self._saver.took, default=0.0)

    @property
    def _margin(self) -> float:
        """How long before the deadline the last save is begun: it is decided a step before, takes its time, is on
        record a report later, and then two more would still fit."""
        return 2 * self._step_seconds + 3 * self._save_seconds + self._runtime.report_spacing + SLACK_SECONDS

    def _decide(self, notice: Notice) -> tuple[Action, float]:
        """What to do, and how many seconds are left. Every rank."""
        decided = self._choose(notice) if self._runtime.rank == 0 else None
        action, left = self._runtime.broadcast("notice: what to do", decided)
        return action, left

    def _choose(self, notice: Notice) -> tuple[Action, float]:
        left = 0.0 if notice.deadline is None else notice.deadline - time.time()
        if notice != self._known:
            self._known, self._over = notice, False
            ends = "none, ends when saved" if notice.deadline is None else f"in {left:.1f} s"
            cost = f"{self._save_seconds:.1f} s" if self._saver.took else "not known"
            logger.warning("preemption: notice %s deadline=%s (a save takes: %s)", notice.what, ends, cost)
        if self._over:
            return "nothing", left
        if notice.deadline is None:
            return "exit", left
        if left > self._margin:
            return "save", left
        return ("wait" if left > self._save_seconds else "too late"), left

    def _leave(self) -> None:
        self._runtime.release()
        self._runtime.deafen()
        raise SystemExit(SIGTERM_EXIT)

    def _wait(self, left: float) -> None:
        """No more save fits in before the deadline. What is done from here on would be done again."""
        deadline, newest = time.monotonic() + left, self._saver.newest
        self._saver.drain({})
        left = max(0.0, deadline - time.monotonic())
        if self._runtime.rank == 0:
            saved = f"saved up to step={newest.step} and on record" if newest else "nothing is saved"
            logger.warning("preemption: waiting for the restart, %s; deadline in %.1f s", saved, left)
        time.sleep(left + PATIENCE_SECONDS)
        self._over = True
        if self._runtime.rank == 0:
            logger.warning("preemption: not restarted %g s after the deadline: training goes on", PATIENCE_SECONDS)
