"""What goes when a newer checkpoint is complete. Rank 0's work; what another job wrote is left alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint.find import CheckpointInfo, candidates, open_checkpoint
from pimm_ray.checkpoint.folder import prepare
from pimm_ray.checkpoint.layout import CheckpointName
from pimm_ray.errors import IncompleteCheckpoint, PimmRayError
from pimm_ray.policy import KeepPolicy
from pimm_ray.resuming import Choice
from pimm_ray.runtime.base import Runtime

logger = logging.getLogger(__name__)


class Retention:
    """Deletes of one attempt. A failure here costs disk space, never a checkpoint and never a save."""

    def __init__(self, runtime: Runtime, keep: KeepPolicy, choice: Choice):
        self._runtime, self._keep, self._attempt, self._damaged = runtime, keep, choice.attempt, choice.damaged
        self.ours: set[str] = set()
        """Names of the folders that this attempt has begun, or has told Ray of."""
        self._foreign: set[str] = set()
        self._metrics_of: dict[str, Mapping[str, Any]] = {}

    def tidy(self, newest: CheckpointInfo) -> None:
        """Delete what the policy does not keep, now that `newest` is complete."""
        try:
            if self._runtime.retains:
                self._keep_for_good(newest)
                self._sweep()
            else:
                self._retain(newest)
        except Exception as error:
            logger.warning("could not tidy %s: %s", self._runtime.store.path, error)

    def leave_best(self, best: CheckpointInfo) -> None:
        """Put the weights of the best save so far beside the checkpoints, and take those of the one before away."""
        run = self._runtime.store
        source, bests = run.child(best.name).child(layout.WEIGHTS), run.child(layout.BEST)
        name = best.name.replace("checkpoint_", "step_")
        try:
            bests.make(name)
            # The index last: without it, parts are no weights.
            for file in sorted(source.files(), key=lambda file: file.endswith(".json")):
                source.copy_file(file, bests.child(name))
            bests.child(name).sync()
            logger.info("best step=%d %s=%s path=%s", best.step, self._keep.metric,
                        best.metrics[str(self._keep.metric)], bests.child(name).path)  # fmt: skip
            for other in bests.folders():
                if other != name:
                    bests.child(other).remove()
        except Exception as error:
            logger.warning("could not leave the weights of %s in %s: %s", best.name, bests.path, error)

    def discard(self, name: str) -> None:
        """Delete a folder, its marker first: killed in between, what is left is no checkpoint."""
        store = self._runtime.store.child(name)
        try:
            if not store.is_link() and store.exists(layout.MARKER):
                store.delete_file(layout.MARKER)
            store.remove()
        except FileNotFoundError:
            return  # Ray was deleting it too
        except Exception as error:
            logger.warning("could not delete %s: %s", store.path, error)

    def _retain(self, newest: CheckpointInfo) -> None:
        complete = []
        self._metrics_of[newest.name] = newest.metrics
        for name in candidates(self._runtime.store):
            if name in self._damaged or self._is_foreign(name):
                continue
            try:
                if name not in self._metrics_of:
                    self._metrics_of[name] = open_checkpoint(self._runtime.store.child(name)).metrics
            except IncompleteCheckpoint:
                self.discard(name)
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
                self.discard(name)

    def _is_foreign(self, name: str) -> bool:
        """Whether it appeared since this attempt took its number, and is not its own: another job's, done or not."""
        if name in self.ours or _parsed(name).attempt < self._attempt:
            return False
        if name not in self._foreign:
            self._foreign.add(name)
            logger.warning(
                "%s is not a checkpoint of this job: another job writes into this run folder. It is left alone; end "
                "one of the two", self._runtime.store.full(name),
            )  # fmt: skip
        return True

    def _sweep(self) -> None:
        """Under Ray: leftovers of earlier attempts that Ray does not know, so that nobody else will delete them."""
        leftovers = [
            name
            for name in candidates(self._runtime.store)
            if name not in self.ours and name not in self._damaged and _parsed(name).attempt < self._attempt
        ]
        known = self._runtime.known() if leftovers else set()
        for name in leftovers:
            if name not in known:
                self.discard(name)

    def _keep_for_good(self, newest: CheckpointInfo) -> None:
        if not self._keep.every_steps or newest.step % self._keep.every_steps:
            return
        store = self._runtime.store.child(newest.name)
        target = self._runtime.store.child(layout.KEPT).child(newest.name)
        prepare(target)
        files = sorted(store.files(), key=lambda name: name == layout.MARKER)
        for name in files:
            store.copy_file(name, target)


def _parsed(name: str) -> CheckpointName:
    parsed = CheckpointName.parse(name)
    if parsed is None:
        raise ValueError(f"{name} is not the name of a checkpoint folder")
    return parsed
