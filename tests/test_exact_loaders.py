"""Exact resume with every kind of loader a user brings."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from pimm_ray import CheckpointManager, find_checkpoint
from tests.jobs import Break, Job, Numbers, assert_continues, broken, distributed, shuffled, twin


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
    return StatefulDataLoader(dataset, job.batch, shuffle=True, num_workers=job.workers, persistent_workers=True)


def persistent_workers_and_plain_random_sampler(dataset, job, rank, world):
    return StatefulDataLoader(
        dataset, job.batch, sampler=RandomSampler(dataset), num_workers=job.workers, persistent_workers=True
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
        self.items, self.given, self.start = items, 0, 0

    def __iter__(self):
        self.given, self.start = self.start, 0
        return self.rest()

    def rest(self):
        worker = get_worker_info()
        start, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        while (index := start + stride * self.given) < len(self.items):
            self.given += 1
            yield self.items[index]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.start = state["given"]


class SizedStream(StatefulStream):
    def __len__(self):
        return len(self.items)


def stateful_stream(dataset, job, rank, world):
    return StatefulDataLoader(StatefulStream(dataset), job.batch, num_workers=job.workers)


def sized_stream(dataset, job, rank, world):
    """Each worker cuts its part into batches, the last one shorter: they may be more than the loader's length."""
    return StatefulDataLoader(SizedStream(dataset), 5, num_workers=job.workers)


def stream(dataset, job, rank, world):
    return StatefulDataLoader(Stream(dataset), job.batch, num_workers=job.workers)


WITHOUT_WORKERS = [
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
    stream,
    stateful_stream,
]
WITH_WORKERS = [
    shuffled,
    stateful_distributed,
    plain_random_sampler,
    plain_random_sampler_with_own_generator,
    drawing_with_replacement,
    plain_batch_sampler_with_own_generator,
    rarely_asking_its_workers,
    stream,
    stateful_stream,
]


@pytest.mark.parametrize("loader", WITHOUT_WORKERS)
def test_a_loader_is_put_back_where_it_stood(tmp_path, loader):
    """Stopped in the first epoch, on its last batch (the 7th), and in the second."""
    job = Job(samples=28, loader=loader, epochs=2)
    records = broken(tmp_path, job, *(Break(at, save=True) for at in (3, 7, 9)))
    assert_continues(twin(job), records, at=9)
    orders = [[step.ids for step in twin(job)[0].steps if step.epoch == epoch] for epoch in (0, 1)]
    assert (orders[0] == orders[1]) == (loader in (stream, stateful_stream)), "each epoch has its own order"


@pytest.mark.parametrize("loader", WITH_WORKERS)
def test_a_loader_with_two_workers_is_put_back_where_it_stood(tmp_path, loader):
    """Stopped in the first epoch and in the second, where the workers have not yet been given all their work."""
    job = Job(samples=40, loader=loader, workers=2, epochs=2)
    records = broken(tmp_path, job, *(Break(at, save=True) for at in (3, 13)))
    assert_continues(twin(job), records, at=13)


@pytest.mark.parametrize("at", [10, 13])
@pytest.mark.parametrize("loader", [persistent_workers, persistent_workers_and_plain_random_sampler])
def test_persistent_workers_started_in_a_later_epoch_draw_nothing_that_the_twin_did_not(tmp_path, loader, at):
    job = Job(samples=40, loader=loader, workers=2, epochs=2)
    assert_continues(twin(job), broken(tmp_path, job, Break(at, save=True)), at=at)


@pytest.mark.parametrize("at", [7, 8])
def test_a_save_where_a_guessed_length_ends_loses_no_batch(tmp_path, at):
    """34 items in batches of 5 are 8 batches when two workers make them, and 7 by the loader's own account."""
    job = Job(samples=34, loader=sized_stream, workers=2, epochs=2)
    (record,) = broken(tmp_path, job, Break(at, save=True))
    assert_continues(twin(job), [record], at=at)
    assert len(twin(job)[0].steps) == 16


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


class Ragged(Numbers):
    """Its items begin with a list that is often empty, so that nobody can count the samples of a batch."""

    def __getitem__(self, index):
        return [], super().__getitem__(index)


def ragged_batches():
    def collate(items):
        return [part for parts, _ in items for part in parts], [item[0] for _, item in items]

    data = Ragged(20, augment=False)
    return StatefulDataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False), collate_fn=collate)


def test_batches_whose_samples_nobody_can_count_are_not_handed_out_again(tmp_path):
    def attempt(stop):
        manager = CheckpointManager(model=torch.nn.Linear(1, 1), loader=ragged_batches(), storage=tmp_path)
        manager.resume()
        seen = []
        for _, ids in manager.batches():
            seen += ids
            manager.step()
            if len(seen) == stop:
                manager.save()
                return seen
        return seen

    assert attempt(6) + attempt(None) == [*range(20)]


def test_a_loop_that_goes_around_the_manager_s_batches_is_told(tmp_path, caplog):
    loader = ragged_batches()
    manager = CheckpointManager(model=torch.nn.Linear(1, 1), loader=loader, storage=tmp_path)
    manager.resume()
    for _ in loader:
        manager.step()
    assert caplog.text.count("step() without a batch of manager.batches()") == 1
