"""Same number of workers: the resumed run is the run that was never interrupted, bit for bit."""

import json
import multiprocessing
import random
import time
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from pimm_ray import CheckpointManager, find_checkpoint
from tests.jobs import (
    Break,
    Job,
    Numbers,
    Training,
    adamw,
    assert_continues,
    broken,
    by_epochs,
    next_draws,
    seed_streams,
    shuffled,
    twin,
)
from tests.ranks import die, run_ranks, try_ranks


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_killed_in_mid_epoch_goes_on_as_its_twin(tmp_path, world, workers):
    job = Job(samples=20 * world, workers=workers)
    records = broken(tmp_path, job, Break(8), every=3, world=world)
    assert_continues(twin(job, world), records, at=6)


@pytest.mark.parametrize("world", [3, 4])
def test_ddp_on_three_or_more_ranks_is_exact_after_a_warm_up(tmp_path, world):
    job = Job(samples=20 * world, warmup=True, epochs=2, optimizer=adamw)
    assert_continues(twin(job, world), broken(tmp_path, job, Break(8), every=3, world=world), at=6)


def test_without_a_warm_up_three_ranks_agree_to_rounding_and_the_line_says_so(tmp_path):
    job = Job(samples=60, epochs=2, optimizer=adamw)
    records = broken(tmp_path, job, Break(8), every=3, world=3)
    for expected, found in zip(twin(job, 3), records, strict=True):
        assert not found.plan.exact
        assert "exact=no" in found.plan.explain() and "agrees to rounding" in found.plan.explain()
        assert [replace(step, loss=0) for step in found.steps] == [replace(step, loss=0) for step in expected.steps[6:]]
        assert found.next_draws == expected.next_draws and found.scheduler == expected.scheduler
        for name, value in found.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_twice_in_a_row_goes_on_as_its_twin(tmp_path, workers):
    """B11: stopped at step 13, in the second epoch; one step, a save; stopped again."""
    job = Job(samples=40, loader=shuffled, workers=workers)
    assert_continues(twin(job), broken(tmp_path, job, Break(13, save=True), Break(14, save=True)), at=14)


def test_a_second_kill_before_the_first_save_of_its_attempt_changes_nothing(tmp_path):
    job = Job(samples=40, loader=shuffled)
    records = broken(tmp_path, job, Break(8, save=True), Break(12), Break(9), Break(11))
    assert_continues(twin(job), records, at=8)


def test_a_save_on_the_last_step_of_an_epoch_holds_what_the_evaluation_after_it_drew(tmp_path):
    job = Job(samples=20, evaluate=True)
    records = broken(tmp_path, job, Break(6), every=5)
    assert_continues(twin(job), records, at=5)
    assert records[0].notes == twin(job)[0].notes[5:], "the second and third evaluation"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_of_ones_own_after_the_last_batch_goes_on_with_the_next_epoch(tmp_path, workers):
    job = Job(samples=20, workers=workers, loader=shuffled)
    records = broken(tmp_path, job, Break(5, save=True))
    assert_continues(twin(job), records, at=5)
    assert records[0].plan.cursor == "start" and records[0].plan.epoch == 1


def saving_first(run):
    run.manager.save()
    by_epochs(run)


def test_a_save_before_the_first_step_holds_where_the_run_started(tmp_path):
    job = Job(samples=20, loop=saving_first)
    assert_continues(twin(job), broken(tmp_path, job, Break(2)), at=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_right_after_a_resume_in_mid_epoch_stands_where_the_run_was_resumed(tmp_path, workers):
    job = Job(samples=20, loop=saving_first, loader=shuffled, workers=workers)
    records = broken(tmp_path, job, Break(8, save=True), Break(9))
    assert_continues(twin(job), records, at=8)
    assert "-0002-" in records[0].plan.source, "it is the second attempt's save that was resumed"


def without_epochs(run):
    while run.manager.state.epoch < run.job.epochs:
        for batch in run.manager.batches():
            run.learn(batch)
        run.after_epoch()


def leaving_early(run):
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            if run.manager.state.iter_in_epoch == 4:
                break
            run.learn(batch)


def holding_the_iterator(run):
    for _ in run.manager.epochs(run.job.epochs):
        batches = run.manager.batches()
        run.held = [*getattr(run, "held", []), batches]
        for batch in batches:
            if run.manager.state.iter_in_epoch == 4:
                break
            run.learn(batch)


def pulling_by_hand(run):
    for _ in run.manager.epochs(run.job.epochs):
        batches = run.manager.batches()
        while (batch := next(batches, None)) is not None:
            run.learn(batch)


@pytest.mark.parametrize("at", [6, 8])
@pytest.mark.parametrize("loop", [without_epochs, leaving_early, holding_the_iterator, pulling_by_hand])
def test_any_shape_of_the_users_loop_is_resumed_exactly(tmp_path, loop, at):
    """Epochs have 5 batches, of which the loops that leave early train on 4: step 8 is the last of an epoch there."""
    job = Job(samples=20, loop=loop, loader=shuffled)
    assert_continues(twin(job), broken(tmp_path, job, Break(at, save=True)), at=at)


def accumulating(run):
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            run.learn(batch)
        run.drop_window()


@pytest.mark.parametrize("at", [4, 5])
def test_several_batches_a_step_are_resumed_at_the_end_of_a_window(tmp_path, at):
    """11 batches an epoch make 3 steps of 3 and a rest."""
    job = Job(samples=44, accumulate=3, loop=accumulating)
    assert_continues(twin(job), broken(tmp_path, job, Break(at, save=True)), at=at)


def asking_within_a_window(run):
    taken = 0
    for _ in run.manager.epochs(run.job.epochs):
        for batch in run.manager.batches():
            run.learn(batch)
            taken += 1
            if taken == 6 and run.record.plan.source == "fresh":
                assert run.manager.save() is None
            if taken == 9 and run.ends is not None:
                die()
        run.drop_window()


def test_a_save_asked_within_a_window_happens_at_its_end(tmp_path):
    """B36: 4 micro-batches a step, asked after the 6th, killed after the 9th."""
    job = Job(samples=40, accumulate=4, epochs=2, loop=asking_within_a_window)
    records = broken(tmp_path, job, Break(99))
    assert_continues(twin(job), records, at=2)
    assert find_checkpoint(tmp_path).step == 2 and len(records[0].steps) == 2


def wander(rank, folder, kill):
    """Ranks take different numbers of batches and draws, then tell what would come next."""
    seed_streams(3 if kill is not None else 1000 + rank)
    order = torch.Generator().manual_seed(rank if kill is not None else 0)
    loader = StatefulDataLoader(Numbers(60, augment=True), 4, shuffle=True, generator=order)
    manager = CheckpointManager(model=nn.Linear(1, 1), loader=loader, storage=folder)
    plan = manager.resume()
    batches = manager.batches()
    if plan.source == "fresh":
        for _ in range(rank + 1):
            next(batches)
        next_draws(rank + 1)
        manager.step()
        manager.save()
        if kill:
            die()
    return [(ids.tolist(), x.tolist()) for ids, x, _ in (next(batches) for _ in range(3))], next_draws(8)


def test_every_rank_gets_back_its_own_streams_and_its_own_position(tmp_path):
    """B03."""
    expected = run_ranks(4, wander, str(tmp_path / "twin"), False)
    assert all(outcome.killed for outcome in try_ranks(4, wander, str(tmp_path / "run"), True))
    found = run_ranks(4, wander, str(tmp_path / "run"), None)
    assert found == expected
    for what in (lambda seen: seen[0], *(lambda seen, i=i: seen[1][i] for i in range(3))):
        assert len({str(what(seen)) for seen in found}) == 4, "the ranks differ from each other"


def telling(rank, folder, job, every, seed):
    """As `attempt`; each step goes to a file at once, so that it is known whatever becomes of the process."""
    run = Training(rank, folder, job, every, None, seed)
    with open(f"{folder}.log", "a") as log:
        for _ in run.manager.epochs(job.epochs):
            for batch in run.manager.batches():
                run.learn(batch)
                print(json.dumps(asdict(run.record.steps[-1])), file=log, flush=True)
    return run.finish()


def test_killed_at_any_moment_the_newest_checkpoint_loads_and_goes_on_as_the_twin(tmp_path):
    job, folder = Job(samples=40, epochs=30, loader=shuffled), tmp_path / "run"
    moments = [random.uniform(0.03, 0.3) for _ in range(10)]
    print("killed after", moments)
    reached = 0
    for moment in moments:
        seed = reached + 1  # Until there is a checkpoint it must be the twin's.
        child = multiprocessing.get_context("fork").Process(target=telling, args=(0, str(folder), job, 1, seed))
        child.start()
        time.sleep(moment)
        child.kill()
        child.join()
        newest = find_checkpoint(folder)
        assert newest is not None or not reached
        reached, before = newest.step if newest else 0, reached
        assert reached >= before
    (expected,) = twin(job)
    (record,) = run_ranks(1, telling, str(folder), job, None, 99, group=False)
    assert 0 < reached < len(expected.steps), "the moments were well chosen"
    assert_continues([expected], [record], at=reached)
    told = [json.loads(line) for line in (tmp_path / "run.log").read_text().splitlines()]
    assert told == [json.loads(json.dumps(asdict(expected.steps[step["number"] - 1]))) for step in told]
