"""Exact resume with every kind of loader a user brings."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

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


class Stream(IterableDataset):
    """The items one after the other; how many there are is not known beforehand."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        worker = get_worker_info()
        start, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.items[index] for index in range(start, len(self.items), stride))


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
    ],
)
def test_a_loader_is_put_back_where_it_stood(tmp_path, loader, workers):
    """Stopped in the first epoch, on its last batch, and in the second."""
    job = Job(samples=40, loader=loader, workers=workers)
    records = broken(tmp_path, job, *(Break(at, save=True) for at in (3, 10, 13)))
    assert_continues(twin(job), records, at=13)
