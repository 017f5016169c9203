"""Training on an ElasticLoader, with real gloo ranks, loader workers and SIGKILL, against its uninterrupted twin."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pimm_ray import ElasticLoader, find_checkpoint
from tests import jobs
from tests.loader_jobs import (
    Job,
    Kill,
    Numbers,
    Run,
    assert_same,
    attempt,
    broken,
    ended,
    history,
    killed,
    network,
    train,
    twin,
)
from tests.ranks import die, run_ranks


def random_run(seed: int) -> tuple[Job, list[tuple[int, Kill]], int]:
    """A job, attempts that are killed, and the number of ranks that finish it."""
    draw = random.Random(seed)
    length = draw.randint(30, 60)
    job = Job(
        length=length,
        batch=draw.randint(5, 13),
        micro=draw.choice([None, 2, 3]),
        tail=draw.choice(["drop", "even", "carry"]),
        workers=2,
        loader=(("order", draw.choice(["shuffle", "block", "sequential"])), ("block", 5)),
    )
    # A step is lost or two: the saves stand at even ones.
    kills = [Kill(at, draw.choice(["after", "before", "within"])) for at in (draw.randint(2, 4), draw.randint(5, 6))]
    return job, [(draw.randint(1, 4), kill) for kill in kills], draw.randint(1, 4)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_and_resized_at_random_is_the_run_that_never_was(tmp_path: Path, seed: int) -> None:
    job, attempts, last = random_run(seed)
    assert_same(job, tmp_path, broken(tmp_path, job, *attempts, last=last), len(attempts))


@pytest.mark.parametrize(
    "job, attempts, last",
    [
        (Job(length=60, batch=16, micro=2, tail="carry"), [(5, Kill(3)), (7, Kill(5, "before"))], 2),
        (Job(length=50, batch=16, tail="even"), [(7, Kill(3, "within")), (1, Kill(5))], 5),
        (Job(length=33, batch=3, tail="carry", workers=1), [(2, Kill(7, "before")), (5, Kill(12))], 4),
        (Job(length=20, batch=3, micro=1, tail="even", epochs=1), [(4, Kill(2)), (2, Kill(5))], 3),
    ],
    ids=["five and seven ranks", "ending on five", "more ranks than samples of a step", "micro-batches of one"],
)
def test_also_on_five_and_seven_ranks_and_on_more_than_a_step_has_samples(
    tmp_path: Path, job: Job, attempts: list[tuple[int, Kill]], last: int
) -> None:
    assert_same(job, tmp_path, broken(tmp_path, job, *attempts, last=last), len(attempts))


@pytest.mark.parametrize("tail", ["even", "carry"])
def test_one_rank_alone_is_killed_and_the_run_goes_on_with_one_less(tmp_path: Path, tail: str) -> None:
    job = Job(tail=tail, workers=0)
    assert_same(job, tmp_path, broken(tmp_path, job, (3, Kill(3, "one")), (2, Kill(5, "one")), last=1), 2)


def own_set_epoch(run: Run) -> None:
    """The habit of a loop around a DistributedSampler."""
    for epoch in run.manager.epochs(run.job.epochs):
        run.loader.set_epoch(epoch)
        for batch in run.manager.batches():
            run.learn(batch)


def test_a_loop_that_calls_set_epoch_itself_changes_nothing(tmp_path: Path) -> None:
    job = Job(tail="carry", loop=own_set_epoch)
    assert_same(job, tmp_path, broken(tmp_path, job, (2, Kill(3)), (3, Kill(6, "before")), last=2), 2)


def test_learning_rates_and_horizon_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    for tail, total in (("drop", 6), ("even", 8), ("carry", 7)):
        for world in (1, 2, 3):
            folder = tmp_path / f"{tail}{world}"
            folder.mkdir()
            job = Job(tail=tail, every=None)
            record = run_ranks(world, attempt, str(folder), job, 0, None)[0]
            rates = [step.rate for step in history(folder)]
            assert record.total_steps == len(rates) == total
            assert rates == [step.rate for step in twin(job)[1].values()]


# The same number of workers: bit for bit


def elastic(dataset: Any, job: jobs.Job, rank: int, world: int) -> ElasticLoader:
    return ElasticLoader(dataset, job.batch * world, num_workers=job.workers, seed=5, tail="carry")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_on_the_same_workers_the_run_is_its_twin_bit_for_bit(tmp_path: Path, world: int, workers: int) -> None:
    job = jobs.Job(samples=22 * world, loader=elastic, workers=workers, evaluate=True)
    records = jobs.broken(tmp_path, job, jobs.Break(8), jobs.Break(12, save=True), every=3, world=world)
    jobs.assert_continues(jobs.twin(job, world), records, at=12)


def on_a_device(dataset: Any, job: jobs.Job, rank: int, world: int) -> ElasticLoader:
    return ElasticLoader(dataset, job.batch, num_workers=job.workers, device="cpu")


@pytest.mark.parametrize("workers", [0, 2])
def test_moved_batches_change_no_bit(tmp_path: Path, workers: int) -> None:
    job = jobs.Job(samples=20, loader=on_a_device, workers=workers)
    records = jobs.broken(tmp_path, job, jobs.Break(8), every=3)
    jobs.assert_continues(jobs.twin(job), records, at=6)


# Windows of several micro-batches


def save_in_mid_window(run: Run) -> None:
    """B36: a save is asked for after the sixth micro-batch of windows of four, and again between `step_done` and
    `step()`; the run is killed in the window after."""
    micro = 0
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            micro += 1
            assert run.loader.accumulate == 4
            fresh = run.record.plan.source == "fresh"
            if fresh and micro == 7:
                assert run.manager.save() is None, "it waits for the end of the window"
                assert run.manager.state.global_step == 1 and find_checkpoint(run.log.parent) is None
            if fresh and micro == 11:
                assert find_checkpoint(run.log.parent).step == 2
                die()
            run.learn(batch)


def test_b36_a_save_asked_for_inside_a_window_stands_at_its_end(tmp_path: Path) -> None:
    job = Job(length=64, batch=16, micro=2, epochs=1, loop=save_in_mid_window, every=None)
    ended(killed(2, tmp_path, job, 0, None), Kill(2))
    record = run_ranks(2, attempt, str(tmp_path), job, 1, None)[0]
    assert (record.plan.step, record.plan.cursor, record.plan.exact) == (2, "kept", True)
    state = json.loads(next(tmp_path.glob("checkpoint_00000002*/state.json")).read_text())
    assert state["position"] == {"epoch": 0, "samples": 32, "window": 2}
    assert state["trainer"]["samples_seen"] == 32 and state["trainer"]["iter_in_epoch"] == 2
    expected, steps = twin(job.but(loop=train))
    assert [step.number for step in history(tmp_path)] == [1, 2, 3, 4], "no micro-batch twice"
    assert [step.ids for step in history(tmp_path)] == [steps[number].ids for number in (1, 2, 3, 4)]
    for name, value in record.weights.items():
        assert (value - expected.weights[name]).abs().max() <= 1e-12


def save_before_the_step_counts(run: Run) -> None:
    """The optimizer has stepped, `manager.step()` was not called: such a state must not be stored with a position."""
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            if run.loader.step_done and run.manager.state.global_step == 2 and run.attempt < 2:
                run.model(batch[1]).mean().backward()
                run.optimizer.step()
                assert run.manager.save() is None
                if run.attempt == 0:
                    die()
                run.loader.commit()
                assert run.manager.save() is None
                die()
            run.learn(batch)


def test_a_save_between_the_optimizer_s_step_and_the_manager_s_stores_nothing_half(tmp_path: Path) -> None:
    job = Job(loop=save_before_the_step_counts, every=1, tail="even", epochs=1)
    for number in (0, 1):
        ended(killed(2, tmp_path, job, number, None), Kill(2))
        assert find_checkpoint(tmp_path).step == 2
    record = run_ranks(3, attempt, str(tmp_path), job, 2, None)[0]
    expected, steps = twin(job.but(loop=train))
    assert [step.ids for step in history(tmp_path)] == [steps[number].ids for number in (1, 2, 3, 4)]
    for name, value in record.weights.items():
        assert (value - expected.weights[name]).abs().max() <= 1e-12


def leaves_early(run: Run) -> None:
    """Two steps of each epoch; then on with the next. The last window that is handed over is not used."""
    for _ in run.manager.epochs(run.job.epochs):
        done = run.manager.state.iter_in_epoch
        for batch in run.manager.batches():
            if done == 2:
                break
            run.learn(batch)
            done += run.loader.step_done


@pytest.mark.parametrize("tail", ["drop", "even", "carry"])
def test_breaking_out_of_batches_ends_the_epoch_on_any_number_of_workers(tmp_path: Path, tail: str) -> None:
    job = Job(length=53, batch=16, epochs=3, tail=tail, loop=leaves_early, every=1, schedule=None)
    records = broken(tmp_path, job, (2, Kill(3)), (3, Kill(4)), last=1)
    taken = {step.number: step for step in history(tmp_path)}
    expected, steps = twin(job)
    assert len(steps) == 6 and [steps[number].epoch for number in steps] == [0, 0, 1, 1, 2, 2]
    assert {number: step.ids for number, step in taken.items()} == {n: step.ids for n, step in steps.items()}
    for first, second in ((1, 2), (3, 4), (5, 6)):
        assert not set(steps[first].ids) & set(steps[second].ids)
    assert records[0].state == expected.state and records[0].state.samples_seen == 96


def test_a_finished_run_goes_on_when_it_is_given_more_epochs(tmp_path: Path) -> None:
    """The run's last epoch ended with a short step although the tail carries over; the next begin at their start."""
    job = Job(length=53, batch=16, epochs=2, tail="carry", schedule=None, every=1)
    record = run_ranks(2, attempt, str(tmp_path), job, 0, None)[0]
    assert record.state.epoch == 2 and record.state.samples_seen == 106
    more = run_ranks(3, attempt, str(tmp_path), job.but(epochs=4), 1, None)[0]
    assert more.plan.step == 7 and more.state.epoch == 4 and more.state.samples_seen == 212
    later = [index for step in history(tmp_path) if step.attempt == 1 for index in step.ids]
    assert sorted(later) == sorted([*range(53), *range(53)])


# Gradients


class Clouds(Numbers):
    """Item i is a cloud of up to four points, each (features, target): some are empty."""

    def __getitem__(self, index: int) -> Any:
        rows = torch.sin(torch.arange(4, dtype=torch.float64) * (index + 1) + torch.arange(index % 5)[:, None])
        return rows[:, :3], rows[:, 3:]


def cat(items: list[Any]) -> Any:
    return [torch.cat(part) for part in zip(*items, strict=True)]


def gradient(model: nn.Module) -> torch.Tensor:
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return found.double()


def off_by(rank: int, batch: int, micro: int | None, dtype: torch.dtype, points: bool) -> list[float]:
    """Of each step of an epoch: the relative distance of DDP's gradient from that of the whole global batch."""
    net, alone = network().to(dtype), network().to(dtype)
    model = DistributedDataParallel(net)
    data = Clouds(2 * batch + 3) if points else Numbers(2 * batch + 3)
    collate, count = (cat, lambda part: len(part[0])) if points else (None, None)
    loader = ElasticLoader(
        data, batch, micro_batch_size=micro, tail="even", order="sequential", collate_fn=collate, count=count
    )
    fill_ups, at, distances = 0, 0, []
    for *_, x, y in loader:
        with loader.sync(model):
            errors = (model(x.to(dtype)) - y.to(dtype)) ** 2
            weight = loader.weight_for(len(x)) if points else loader.weight
            (errors.sum() / max(1, len(x)) * weight).backward()
        fill_ups += loader.real == 0
        if loader.step_done:
            items = [data[index] for index in range(at, min(at + batch, len(data)))]
            *_, x, y = cat(items) if points else torch.utils.data.default_collate(items)
            ((alone(x.to(dtype)) - y.to(dtype)) ** 2).mean().backward()
            found, expected = gradient(model), gradient(alone)
            distances.append((torch.linalg.norm(found - expected) / torch.linalg.norm(expected)).item())
            at += batch
    assert len(distances) == 3
    if micro == 1 and not points:
        total = torch.tensor(fill_ups)
        dist.all_reduce(total)
        assert total > 0, "some micro-batch has no real sample"
    return distances


def every_gradient(rank: int) -> dict[Any, list[float]]:
    cases = [(16, None), (48, None), (48, 5), (16, 1), (8, 1)]
    return {
        (batch, micro, dtype, points): off_by(rank, batch, micro, dtype, points)
        for batch, micro in cases
        for dtype in (torch.float32, torch.float64)
        for points in (False, True)
    }


@pytest.mark.parametrize("world", [3, 5, 7])
def test_gradients_of_uneven_shares_are_those_of_the_global_batch(world: int) -> None:
    for by_case in run_ranks(world, every_gradient):
        for case, distances in by_case.items():
            limit = 2e-6 if torch.float32 in case else 1e-12
            assert max(distances) <= limit, (case, distances)
