"""One training job on one rank: its objects, where it stands, and what a save holds of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pimm_ray.checkpoint.folder import Share
from pimm_ray.checkpoint.names import parameter_names
from pimm_ray.checkpoint.pimm_read import Present
from pimm_ray.checkpoint.state import Objects, collect
from pimm_ray.elastic.plan import ElasticPolicy
from pimm_ray.errors import DataChanged
from pimm_ray.feed import Feed
from pimm_ray.observe.loggers import Trackers
from pimm_ray.pace import Pace
from pimm_ray.policy import KeepPolicy
from pimm_ray.progress import Progress
from pimm_ray.runtime.base import Runtime
from pimm_ray.saving import Agreed, Request

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Job:
    """What a resume changes and a save reads. Every rank has one."""

    runtime: Runtime
    objects: Objects
    feed: Feed
    pace: Pace
    keep: KeepPolicy
    elastic: ElasticPolicy
    trackers: Trackers
    warm_start: dict[str, str | None] | None = None
    """Source and commit of the weights that the run began with."""
    progress: Progress = field(default_factory=Progress)
    seed: int = 0
    generation: int = 0
    """How often the run was resumed: the streams of ranks that are new depend on it."""
    _warned: set[str] = field(default_factory=set)

    def shape(self) -> dict[str, Any]:
        """The `RunShape` as it is now, as plain data."""
        return asdict(self.pace.shape(self.runtime.world_size, self.seed))

    def present(self) -> Present:
        """What checkpoints of an older pimm do not tell of themselves."""
        cursor, names = self.feed.cursor, parameter_names(self.objects.model)
        groups = [
            [names.get(id(parameter), "") for parameter in group["params"]]
            for optimizer in self.objects.optimizers[:1]
            for group in optimizer.param_groups
        ]
        return Present(
            world_size=self.runtime.world_size,
            iterations=cursor.length,
            global_batch=cursor.shape(self.runtime.world_size, 0).global_batch,
            groups=groups,
        )

    def request(self, reason: str, metrics: Mapping[str, Any]) -> Request:
        """A save of the job as it is now; `metrics` are this rank's."""
        progress, feed, runtime = self.progress, self.feed, self.runtime
        within = progress.within_epoch

        def make() -> Share:
            if within and not feed.cursor.stateful and feed.cursor.loader is not None:
                self._refuse_or_warn()
            own = feed.saved(progress) | {"shape": self.shape()}
            return Share(collect(self.objects), own, rank=runtime.rank, world=runtime.world_size)

        def head(agreed: Agreed) -> dict[str, Any]:
            trainer = progress.state(agreed.counts["total"])
            return {
                "step": progress.step,
                "epoch": trainer.epoch,
                "position": asdict(feed.cursor.position(progress.position(agreed.counts["epoch"]))),
                "trainer": asdict(replace(trainer, best_metric_value=self._best_with(agreed.metrics))),
                "shape": self.shape(),
                "generation": self.generation,
                "drops": progress.drops if within else 0,
                **self.pace.saved(),
                "seed": self.seed,
                "loggers": self.trackers.state_dict(),
                "warm_start": self.warm_start,
            }

        counts = {"epoch": progress.own_epoch_samples, "total": progress.own_total_samples}
        if feed.cursor.global_position and runtime.rank:
            counts = dict.fromkeys(counts, 0)  # every rank has counted the samples of all of them
        return Request(
            make=make,
            head=head,
            step=progress.step,
            epoch=progress.epoch + progress.at_last_batch,
            reason=reason,
            counts=counts,
            metrics=metrics,
        )

    def saved(self, agreed: Agreed) -> bool:
        """A request was carried out. Whether it is the best so far."""
        before, self.progress.best = self.progress.best, self._best_with(agreed.metrics)
        self.progress.absorb(agreed.counts["epoch"], agreed.counts["total"])
        return self.progress.best != before

    def _best_with(self, metrics: Mapping[str, Any]) -> float | None:
        best, name = self.progress.best, self.keep.metric
        if name is None or self.keep.score(metrics) <= (-math.inf if best is None else self.keep.score({name: best})):
            return best
        return float(metrics[name])

    def _refuse_or_warn(self) -> None:
        kind = type(self.feed.cursor.loader).__name__
        if self.elastic.cursor == "fail":
            raise DataChanged(
                f"a save in mid-epoch cannot keep the position of a {kind} and ElasticPolicy(cursor='fail') forbids to "
                "drop it: use torchdata's StatefulDataLoader, or save at the end of epochs"
            )
        self.warn_once(
            f"a {kind} cannot tell its position: a resume from this save restarts the epoch (torchdata's "
            "StatefulDataLoader can)"
        )

    def warn_once(self, text: str) -> None:
        """On rank 0, and no second time."""
        if text not in self._warned and self.runtime.rank == 0:
            logger.warning(text)
        self._warned.add(text)
