"""How schedules and learning rates keep pace with a run whose steps are not those that they were made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pimm_ray.checkpoint.state import Objects
from pimm_ray.elastic import schedule
from pimm_ray.elastic.plan import ElasticPolicy, Position, ResumePlan, RunShape, share_of
from pimm_ray.feed import Feed


class Pace:
    """Steps that were replayed, and steps that count for more or fewer samples than those of the schedules."""

    def __init__(self, objects: Objects, feed: Feed, policy: ElasticPolicy):
        self._objects, self._feed = objects, feed
        self._per_rank = policy.batch == "per_rank" and feed.cursor.global_position
        self._share: float | None = None
        """Samples of a step for each rank, as batch="per_rank" keeps it; rounding must not add up over resizes."""
        self._replayed = 0
        self._lag = 0
        """How many more steps the run has done than its schedules count."""

    def shape(self, world_size: int, seed: int) -> RunShape:
        """The shape of the run as it is now."""
        return replace(self._feed.cursor.shape(world_size, seed), share=self._share)

    def saved(self) -> dict[str, Any]:
        return {"replayed": self._replayed, "schedule_lag": self._lag}

    def resume(self, document: dict[str, Any], plan: ResumePlan, *, say: bool) -> None:
        """Adjust to a checkpoint whose schedules have just been restored. Every rank calls it."""
        position, step = Position(**document["position"]), document["trainer"]["global_step"]
        dropped = position.window if plan.cursor == "dropped" else 0
        self._replayed, self._lag = document["replayed"] + dropped, document["schedule_lag"]
        if self._per_rank:
            self._keep_share_of_batch(RunShape(**document["shape"]), plan, step, say=say)
        if self._replayed or self._per_rank:
            schedule.outlive(
                self._objects.schedulers,
                extend_by=dropped if plan.schedule == "extend" else 0,
                step=step - self._lag,
                all_kinds=self._replayed > 0,
                say=say,
            )

    def _keep_share_of_batch(self, saved: RunShape, plan: ResumePlan, step: int, *, say: bool) -> None:
        self._share = share_of(saved)
        if plan.global_batch is None or saved.global_batch is None:
            return
        self._feed.cursor.loader.global_batch_size = plan.global_batch
        ratio, steps = saved.global_batch / plan.global_batch, step - self._lag
        for scheduler in self._objects.schedulers if ratio != 1 else ():
            if schedule.follows_steps(scheduler, steps):
                schedule.rescale(scheduler, ratio, say=say)
        self._lag = step - round(steps * ratio)
        for optimizer in self._objects.optimizers:
            mine = [s for s in self._objects.schedulers if getattr(s, "optimizer", None) is optimizer]
            schedule.scale_rates(optimizer, mine, plan.lr_factor)
