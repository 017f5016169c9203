"""An ElasticLoader whose run comes back with other data, other policies, or as many samples a rank as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from pimm_ray import CheckpointManager, ElasticLoader, ElasticPolicy, Position, RunShape, plan_resume
from pimm_ray.elastic import schedule
from pimm_ray.errors import DataChanged, WorldSizeError
from tests.loader_jobs import Global, Job, Kill, attempt, broken, ended, history, killed, one_cycle
from tests.ranks import run_ranks
from tests.simulated import Indices

SMALL = Job(length=40, batch=8, schedule=None, every=1)
"""Killed after its third step: two of the five of the first epoch are left."""


def resumed(folder: Path, job: Job, changed: Job, *, first: int = 1, then: int = 1) -> tuple[Any, list[Global]]:
    """`job`, killed after its third step, and resumed as `changed`: the record of rank 0, and the steps of both."""
    ended(killed(first, folder, job, 0, Kill(3)), Kill(3))
    return run_ranks(then, attempt, str(folder), changed, 1, None)[0], history(folder)


def epoch_of(steps: list[Global], epoch: int, attempt: int) -> list[int]:
    return [index for step in steps if (step.epoch, step.attempt) == (epoch, attempt) for index in step.ids]


@pytest.mark.parametrize(
    "change, named",
    [
        ({"length": 41}, "dataset length 40 -> 41"),
        ({"length": 39}, "dataset length 40 -> 39"),
        ({"loader": (("order", "sequential"),)}, "order elastic:shuffle-v1/drop -> elastic:sequential-v1/drop"),
        ({"loader": (("order", "block"), ("block", 4))}, "-> elastic:block-v1(block=4,group=16)/drop"),
        ({"loader": (("seed", 1),)}, "seed 0 -> 1"),
        ({"tail": "even"}, "order elastic:shuffle-v1/drop -> elastic:shuffle-v1/even"),
    ],
)
def test_other_data_drop_the_position_restart_the_epoch_and_are_named(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    job = SMALL.but(**change)
    record, steps = resumed(tmp_path, SMALL, job)
    plan = record.plan
    assert (plan.cursor, plan.samples_repeated, plan.step, plan.epoch, plan.exact) == ("dropped", 24, 3, 0, False)
    assert named in plan.reason and named in "".join(record.lines)
    whole = job.length - job.length % 8
    for epoch in (0, 1):
        seen = epoch_of(steps, epoch, 1)
        assert len(set(seen)) == len(seen) == whole, "the whole epoch, from its first sample"


@pytest.mark.parametrize("then", [1, 2])
def test_cursor_fail_names_the_data_that_changed_whatever_the_number_of_workers(tmp_path: Path, then: int) -> None:
    ended(killed(1, tmp_path, SMALL, 0, Kill(3)), Kill(3))
    outcomes = killed(then, tmp_path, SMALL.but(length=41, policy=ElasticPolicy(cursor="fail")), 1, None)
    for outcome in outcomes:
        assert outcome.kind == DataChanged.__name__, outcome.error
        assert outcome.error is not None and "dataset length 40 -> 41" in outcome.error


def test_cursor_fail_lets_another_number_of_workers_go_on(tmp_path: Path) -> None:
    job = SMALL.but(policy=ElasticPolicy(cursor="fail"))
    record, steps = resumed(tmp_path, job, job, then=3)
    assert record.plan.cursor == "kept" and record.plan.reason == ""
    assert sorted(epoch_of(steps, 0, 0) + epoch_of(steps, 0, 1)) == list(range(40))


def test_other_batches_keep_the_position_and_the_line_says_both_numbers(tmp_path: Path) -> None:
    record, steps = resumed(tmp_path, SMALL, SMALL.but(batch=4))
    assert (record.plan.cursor, record.plan.exact) == ("kept", False)
    assert "global batch 8 -> 4 samples" in record.plan.notes[0] and "batch size x workers" not in record.plan.notes[0]
    assert sorted(epoch_of(steps, 0, 0) + epoch_of(steps, 0, 1)) == list(range(40))
    assert [len(step.ids) for step in steps if step.attempt == 1] == [4] * 14


def test_cursor_drop_restarts_the_epoch_in_another_order_and_a_kill_after_it_keeps_that(tmp_path: Path) -> None:
    job = SMALL.but(policy=ElasticPolicy(cursor="drop"))
    ended(killed(2, tmp_path, job, 0, Kill(3)), Kill(3))
    ended(killed(2, tmp_path, job, 1, Kill(5)), Kill(5))
    auto = job.but(policy=ElasticPolicy())
    record = run_ranks(3, attempt, str(tmp_path), auto, 2, None)[0]
    steps = history(tmp_path)
    dropped, kept = epoch_of(steps, 0, 1), epoch_of(steps, 0, 2)
    assert record.plan.cursor == "kept"
    assert sorted(dropped + kept) == list(range(40)), "the restarted epoch, exactly once, over two attempts"
    first = {step.number: step.ids for step in steps if step.attempt == 0}
    again = {step.number - 3: step.ids for step in steps if step.attempt == 1}
    assert all(first[number] != again[number] for number in (1, 2)), "another order than before"
    assert sorted(epoch_of(steps, 1, 2)) == list(range(40))


def test_a_changed_seed_at_an_epoch_s_start_is_not_exact() -> None:
    """Also a global batch: the plan must not call a run exact that has other data."""
    saved = RunShape(world_size=2, global_batch=8, dataset_size=40, order_id="elastic:shuffle-v1/drop", seed=0)
    for change in ({"seed": 1}, {"global_batch": 16}, {"dataset_size": 41}, {"order_id": "elastic:block-v1/drop"}):
        for position in (Position(epoch=1), Position(epoch=1, samples=8, window=1)):
            assert not plan_resume(saved, RunShape(**{**vars(saved), **change}), ElasticPolicy(), position).exact
    assert plan_resume(saved, saved, ElasticPolicy(), Position(epoch=1, samples=8, window=1)).exact


def test_a_loader_made_before_the_process_group_is_refused(tmp_path: Path) -> None:
    loader = ElasticLoader(Indices(8), 4)

    def program(rank: int) -> None:
        with pytest.raises(WorldSizeError, match=r"made for 1 ranks and there are 2: make it after torch.distributed"):
            CheckpointManager(model=nn.Linear(1, 1), loader=loader, storage=tmp_path)
        dist.barrier()  # A rank that ends while others still connect makes them fail.

    run_ranks(2, program)


# As many samples a rank as before


def rates(total: int, peak: float) -> list[float]:
    """Of a whole one-cycle schedule."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = one_cycle(optimizer, total)
    found = []
    for _ in range(total):
        found.append(scheduler.get_last_lr()[0] * peak)
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("lr_scale, factor", [("none", 1.0), ("linear", 1.5), ("sqrt", 1.5**0.5)])
def test_per_rank_keeps_each_rank_s_share_and_the_schedule_s_fraction_there_and_back(
    tmp_path: Path, lr_scale: Any, factor: float
) -> None:
    """Two workers have steps of 16 samples, three of 24: with the same schedule over the same samples."""
    policy = ElasticPolicy(batch="per_rank", lr_scale=lr_scale)
    job = Job(length=96, batch=16, epochs=5, every=1, policy=policy)
    records = broken(tmp_path, job, (2, Kill(3)), (3, Kill(6)), (3, Kill(7)), last=2)
    steps = history(tmp_path)
    by_attempt = [[step for step in steps if step.attempt == number] for number in range(4)]
    assert [{len(step.ids) for step in part} for part in by_attempt] == [{16}, {24}, {24}, {16}]
    assert len(steps) == 3 + 3 + 1 + 3 + 18
    for epoch in range(5):
        seen = sorted(index for step in steps if step.epoch == epoch for index in step.ids)
        assert seen == list(range(96)), "each sample exactly once an epoch"
    small, large = rates(30, 1.0), rates(20, factor)
    found = [[step.rate for step in part] for part in by_attempt]
    assert found[0] == pytest.approx(small[:3])
    # The first step after a change has the rate that the one before it had set, between two steps of the new schedule.
    assert found[1][0] == pytest.approx(factor * small[3])
    assert found[1][1:] == pytest.approx(large[3:5]) and found[2] == pytest.approx(large[5:6])
    assert found[3][0] == pytest.approx(large[6] / factor)
    assert found[3][1:] == pytest.approx(small[10:])
    plan = records[0].plan
    assert (plan.cursor, plan.global_batch, plan.lr_factor) == ("kept", 16, pytest.approx(1 / factor))
    line = records[0].lines[-1]
    assert f"global_batch=16 lr_factor={1 / factor:g}" in line and "global batch 24 -> 16 (batch='per_rank')" in line
    assert records[0].state.samples_seen == 480


def test_per_rank_at_the_same_number_of_workers_as_before_keeps_the_batch_that_the_run_had(tmp_path: Path) -> None:
    job = SMALL.but(policy=ElasticPolicy(batch="per_rank"), length=64)
    records = broken(tmp_path, job, (1, Kill(2)), (2, Kill(3)), last=2)
    assert records[0].plan.step == 3
    assert {len(step.ids) for step in history(tmp_path) if step.attempt == 2} == {16}
    assert "global batch 16 -> 16 (batch='per_rank'), not the 8 that the loader was given" in records[0].lines[-1]
    assert records[0].plan.lr_factor == 1


def test_per_rank_comes_back_to_the_batch_that_the_run_began_with(tmp_path: Path) -> None:
    """Two and a half samples a rank: one rank alone takes two, and four of them ten again, not eight."""
    job = Job(length=50, batch=10, epochs=1, every=1, schedule=None, policy=ElasticPolicy(batch="per_rank"))
    broken(tmp_path, job, (4, Kill(2)), (1, Kill(4)), last=4)
    sizes = [{len(step.ids) for step in history(tmp_path) if step.attempt == number} for number in range(3)]
    assert sizes == [{10}, {2}, {10}]


def test_per_rank_with_batches_that_do_not_divide_ends_within_the_schedule(tmp_path: Path) -> None:
    """Rounding makes more steps than the schedule was given: it holds its end instead of raising or rising again."""
    job = Job(length=53, batch=16, epochs=3, tail="even", every=1, policy=ElasticPolicy(batch="per_rank"))
    records = broken(tmp_path, job, (2, Kill(4)), (3, Kill(6)), last=3)
    assert records[0].state.epoch == 3 and records[0].state.samples_seen == 3 * 53
    last = [step.rate for step in history(tmp_path) if step.attempt == 2]
    assert last == sorted(last, reverse=True)


def plan_for(saved: RunShape, world: int, **policy: Any) -> Any:
    now = RunShape(**{**vars(saved), "world_size": world, "global_batch": 10, "share": None})
    return plan_resume(saved, now, ElasticPolicy(batch="per_rank", **policy), Position(epoch=1))


def test_per_rank_does_not_drift_by_rounding() -> None:
    first = RunShape(world_size=4, global_batch=10, dataset_size=40, order_id="elastic:x")
    alone = plan_for(first, 1, lr_scale="linear")
    assert alone.global_batch == 2 and alone.lr_factor == pytest.approx(0.2)
    saved = RunShape(world_size=1, global_batch=2, dataset_size=40, order_id="elastic:x", share=2.5)
    back = plan_for(saved, 4, lr_scale="linear")
    assert back.global_batch == 10 and back.lr_factor == pytest.approx(5)


def test_per_rank_never_asks_for_more_than_the_data_set_has() -> None:
    """More nodes must not end a run: a step of all samples at most."""
    saved = RunShape(world_size=1, global_batch=16, dataset_size=20, order_id="elastic:x", micro_batch=4)
    plan = plan_for(saved, 8)
    assert plan.global_batch == 20 and plan.accumulate == 1
    assert "global batch 16 -> 20" in plan.notes[0]


def stepped(scheduler: Any, optimizer: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def warm_up_and_cosine(stretch: int) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1 * (2 if stretch == 1 else 1))
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3 * stretch)
    low = 0.01 * (2 if stretch == 1 else 1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12 * stretch, eta_min=low)
    return optimizer, lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3 * stretch])


@pytest.mark.parametrize("done", [2, 6, 10])
def test_a_schedule_of_parts_is_measured_in_other_steps_and_its_rates_scaled_in_all_of_them(done: int) -> None:
    """Steps of twice the samples and twice the learning rate: the rest is that of the schedule made so."""
    optimizer, scheduler = warm_up_and_cosine(stretch=2)
    stepped(scheduler, optimizer, done)
    schedule.rescale(scheduler, 0.5, say=True)
    schedule.scale_rates(optimizer, [scheduler], 2.0)
    other_optimizer, other = warm_up_and_cosine(stretch=1)
    stepped(other, other_optimizer, done // 2)
    assert stepped(scheduler, optimizer, 15 - done // 2) == pytest.approx(
        stepped(other, other_optimizer, 15 - done // 2)
    )


def test_a_schedule_without_a_horizon_goes_on_as_it_is_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    stepped(scheduler, optimizer, 4)
    schedule.rescale(scheduler, 0.5, say=True)
    assert stepped(scheduler, optimizer, 1) == [0.5**5]
    assert "LambdaLR has no known horizon" in caplog.text
