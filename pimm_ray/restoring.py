"""A chosen checkpoint put back into the live objects, the loader and the random streams of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from pimm_ray.checkpoint.state import apply
from pimm_ray.elastic import schedule
from pimm_ray.elastic.plan import ElasticPolicy, Position, ResumePlan, RunShape, plan_resume
from pimm_ray.job import Job
from pimm_ray.progress import Progress
from pimm_ray.resuming import Choice
from pimm_ray.runtime.base import Runtime


def restore(job: Job, choice: Choice, warmup: Callable[[], Any] | None, given_seed: int | None) -> ResumePlan:
    """Put the chosen checkpoint back into the job. Who calls it: every rank.

    Raises:
        StateMismatch, WorldSizeError, DataChanged: as `CheckpointManager.resume`.
    """
    runtime, objects, feed, pace, elastic = job.runtime, job.objects, job.feed, job.pace, job.elastic
    contents = choice.contents
    assert contents is not None
    document, own, info = contents.document, contents.rank_state, contents.info
    seed, position = document["seed"], Position(**document["position"])
    now = asdict(pace.shape(runtime.world_size, seed))
    plan = _agreed_plan(runtime, own["shape"], now, elastic, position)
    if plan.schedule == "extend":
        schedule.require_horizon(objects.schedulers)
    if warmup is not None and info.step > 0:
        warmup()
        for parameter in objects.model.parameters():
            parameter.grad = None
    positions: list[dict[str, Any]] = []
    if plan.cursor == "kept" and feed.cursor.global_position:
        saved_by = range(own["shape"]["world_size"])
        positions = runtime.each("resume: read positions", lambda: [contents.read_rank(rank) for rank in saved_by])
    notes = runtime.each("resume: restore", lambda: apply(objects, contents.snapshot))
    job.progress = _progress(document, position, plan, by_hand=feed.cursor.loader is None)
    job.warm_start = document["warm_start"]
    job.seed, job.generation = seed, document["generation"] + 1
    pace.resume(document, plan, say=runtime.rank == 0)
    if runtime.rank >= own["shape"]["world_size"] or elastic.rng == "reseed":
        feed.derive_streams(own, seed, runtime.rank, job.generation)
    else:
        feed.restore_streams(own)
    if plan.cursor == "kept":
        job.progress.batches = own["batches"]
        feed.keep_position(own, positions, position)
    if given_seed not in (None, seed):
        notes.append(f"seed {seed} of the checkpoint holds, not {given_seed}")
    if feed.cursor.loader is None:
        notes.append("no loader given: the data position is yours to keep")
    exact, ddp = plan.exact, isinstance(objects.model, DistributedDataParallel)
    if ddp and runtime.world_size > 2 and info.step and warmup is None:
        exact = False
        notes.append("first step agrees to rounding: DDP on 3 or more ranks needs resume(warmup=) to be exact")
    return replace(
        plan,
        source=info.name if choice.own else info.path,
        step=info.step,
        exact=exact,
        notes=(*choice.notes, *plan.notes, *notes),
    )


def _agreed_plan(
    runtime: Runtime, saved: dict[str, Any], now: dict[str, Any], elastic: ElasticPolicy, position: Position
) -> ResumePlan:
    """Each rank's data may have a shape of its own, but when one rank drops its position all do."""
    plans = [
        plan_resume(RunShape(**before), RunShape(**after), elastic, position)
        for before, after in runtime.gather("resume: shapes", [saved, now])
    ]
    return next((plan for plan in plans if plan.reason), plans[0])


def _progress(document: dict[str, Any], position: Position, plan: ResumePlan, *, by_hand: bool) -> Progress:
    """Where the run stands."""
    trainer, dropped = document["trainer"], plan.cursor == "dropped"
    counted_by_hand = plan.cursor == "start" and by_hand
    kept = position if plan.cursor == "kept" or counted_by_hand else Position(epoch=position.epoch)
    return Progress(
        epoch=kept.epoch,
        window=kept.window,
        epoch_samples=kept.samples,
        step=trainer["global_step"],
        best=trainer["best_metric_value"],
        total_samples=trainer["samples_seen"],
        drops=document["drops"] + dropped,
    )
