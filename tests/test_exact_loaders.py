"""Exact resume with every kind of loader a user brings."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from pimm_ray import find_checkpoint
from tests.jobs import Break, Job, assert_continues, broken, distributed, shuffled, twin


def generator():
    """Another one in each attempt, so that what goes on as the twin was restored."""
    return torch.Generator().manual_seed(torch.initial_seed())


def shuffled_by_own_generator(dataset, job, rank, world):
    return StatefulDataLoader(dataset, job.batch, shuffle=True, generator=generator(), num_workers=job.workers)


def stateful_distributed(dataset, job, rank, world):
    sampler = StatefulDistributedSampler(dataset, num_replicas=world, rank=rank, seed=5)
    return StatefulDataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers)


def plain_random_sampler(dataset, job, rank, world):
    return StatefulDataLoader(dataset, job.batch, sampler=RandomSampler(dataset), num_workers=job.workers)


def plain_random_sampler_with_own_generator(dataset, job, rank, world):
    sampler = RandomSampler(dataset, generator=generator())
    return StatefulDataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers)


def drawing_with_replacement(dataset, job, rank, world):
    sampler = RandomSampler(dataset, replacement=True, num_samples=job.samples, generator=generator())
    return StatefulDataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers)


def weighted(dataset, job, rank, world):
    sampler = WeightedRandomSampler(torch.arange(1.0, job.samples + 1), job.samples, generator=generator())
    return StatefulDataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers)


def plain_batch_sampler(dataset, job, rank, world):
    sampler = BatchSampler(RandomSampler(dataset), job.batch, drop_last=False)
    return StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=job.workers)


def plain_batch_sampler_with_own_generator(dataset, job, rank, world):
    sampler = BatchSampler(RandomSampler(dataset, generator=generator()), job.batch, drop_last=False)
    return StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=job.workers)


def persistent_workers(dataset, job, rank, world):
    return StatefulDataLoader(
        dataset, job.batch, shuffle=True, num_workers=job.workers, persistent_workers=job.workers > 0
    )


def rarely_asking_its_workers(dataset, job, rank, world):
    return StatefulDataLoader(
        dataset, job.batch, sampler=RandomSampler(dataset), num_workers=job.workers, snapshot_every_n_steps=4
    )


class Stream(IterableDataset):
    """The items one after the other; how many there are is not known beforehand."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        worker = get_worker_info()
        start, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.items[index] for index in range(start, len(self.items), stride))


class StatefulStream(IterableDataset):
    """As `Stream`, and it can say where it stands."""

    def __init__(self, items):
        self.items, self.given = items, 0

    def __iter__(self):
        worker = get_worker_info()
        start, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        while (index := start + stride * self.given) < len(self.items):
            self.given += 1
            yield self.items[index]
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class SizedStream(Stream):
    def __len__(self):
        return len(self.items)


def stateful_stream(dataset, job, rank, world):
    return StatefulDataLoader(StatefulStream(dataset), job.batch, num_workers=job.workers)


def sized_stream(dataset, job, rank, world):
    """Two workers cut 20 items each into batches of 7: one batch more than the length of the loader, which is 6."""
    return StatefulDataLoader(SizedStream(dataset), 7, num_workers=job.workers)


def stream(dataset, job, rank, world):
    return StatefulDataLoader(Stream(dataset), job.batch, num_workers=job.workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "loader",
    [
        shuffled,
        shuffled_by_own_generator,
        distributed,
        stateful_distributed,
        plain_random_sampler,
        plain_random_sampler_with_own_generator,
        drawing_with_replacement,
        weighted,
        plain_batch_sampler,
        plain_batch_sampler_with_own_generator,
        persistent_workers,
        stream,
        stateful_stream,
        sized_stream,
        rarely_asking_its_workers,
    ],
)
def test_a_loader_is_put_back_where_it_stood(tmp_path, loader, workers):
    """Stopped in the first epoch, on its last batch, and in the second."""
    job = Job(samples=40, loader=loader, workers=workers)
    records = broken(tmp_path, job, *(Break(at, save=True) for at in (3, 10, 13)))
    assert_continues(twin(job), records, at=13)


@pytest.mark.parametrize("at", [5, 6])
def test_a_save_where_a_guessed_length_ends_loses_no_batch(tmp_path, at):
    """40 items in batches of 7 by two workers are 6 batches, while the loader says that they are 5 or 6."""
    job = Job(samples=33, loader=sized_stream, workers=2, epochs=2)
    (record,) = broken(tmp_path, job, Break(at, save=True))
    assert_continues(twin(job), [record], at=at)
    assert len(twin(job)[0].steps) == 12


def plain(dataset, job, rank, world):
    return DataLoader(dataset, job.batch, shuffle=True, num_workers=job.workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_dataloader_resumes_exactly_at_the_start_of_an_epoch(tmp_path, workers):
    job = Job(samples=20, loader=plain, workers=workers, evaluate=True)
    assert_continues(twin(job), broken(tmp_path, job, Break(8), every=5), at=5)


def test_a_plain_dataloader_restarts_the_epoch_it_was_saved_in_and_says_so(tmp_path):
    job = Job(samples=20, loader=plain)
    (record,) = broken(tmp_path, job, Break(8, save=True))
    (expected,) = twin(job)
    line = record.plan.explain()
    assert record.plan.cursor == "dropped" and not record.plan.exact and "samples_repeated=12" in line
    assert "cannot restore its position" in line
    assert [step.epoch for step in record.steps] == [1] * 5 + [2] * 5
    assert record.steps[0].number == 9 and record.steps[0].lr == expected.steps[8].lr


def none(dataset, job, rank, world):
    return None


def own_batch(run):
    x = torch.randn(run.job.batch, 4)
    return torch.arange(run.job.batch), x, x.sum(dim=1, keepdim=True)


def by_counting_in_epochs(run):
    for _ in run.manager.epochs(run.job.epochs):
        for _ in range(run.manager.state.iter_in_epoch, 5):
            run.learn(own_batch(run))


def by_counting_steps(run):
    while run.manager.state.global_step < 15:
        run.learn(own_batch(run))


@pytest.mark.parametrize("loop", [by_counting_in_epochs, by_counting_steps])
def test_without_a_loader_the_counters_say_where_the_loop_goes_on(tmp_path, loop):
    job = Job(loader=none, loop=loop)
    (record,) = broken(tmp_path, job, Break(6, save=True), Break(8, save=True))
    assert_continues(twin(job), [record], at=8)
    assert "the data position is yours to keep" in record.plan.explain()
    assert find_checkpoint(tmp_path).step == 8
