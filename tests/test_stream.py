"""Streams of shards: each sample once for any number of ranks, workers and kills, and gradients of the whole step."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import pimm_ray.elastic.stream_parts as module
from pimm_ray import CheckpointManager, SavePolicy, find_checkpoint
from pimm_ray.elastic import stream_files
from pimm_ray.elastic.stream import ElasticStream
from pimm_ray.elastic.stream_files import Files, lengths_of
from pimm_ray.errors import DataChanged, StorageError
from tests.ranks import die, run_ranks, try_ranks

EMPTY = np.zeros(0, dtype=np.int64)


def numbers(shard: tuple[int, int], offset: int) -> Any:
    """Sample i of shard (k, n) is 1000 k + i."""
    return iter(range(1000 * shard[0] + offset, 1000 * shard[0] + shard[1]))


def size_of(shard: tuple[int, int]) -> int:
    return shard[1]


def shards_of(lengths: list[int]) -> list[tuple[int, int]]:
    return list(enumerate(lengths))


def all_of(lengths: list[int]) -> Counter[int]:
    return Counter(sample for shard in shards_of(lengths) for sample in numbers(shard, 0))


# Ranks as threads, loader workers as generators that read ahead: thousands of runs in seconds.

_worker = threading.local()


class Turns:
    """torch's DataLoader over an iterable data set: workers asked in turn, those at their end left out."""

    def __init__(self, dataset: Any, workers: int):
        self.dataset, self.workers = dataset, workers

    def __iter__(self) -> Any:
        queues = [(worker, iter(self.dataset), []) for worker in range(max(1, self.workers))]
        while queues:
            for entry in list(queues):
                worker, made, ahead = entry
                _worker.id = worker
                ahead += itertools.islice(made, 3 - len(ahead))
                if ahead:
                    yield ahead.pop(0)
                else:
                    queues.remove(entry)


class Exchange:
    """`_sum_over_ranks` of threads."""

    def __init__(self, world: int):
        self.barrier, self.values = threading.Barrier(world, timeout=20), [()] * world

    def sums(self, rank: int) -> Any:
        def add(*values: int) -> list[int]:
            self.values[rank] = values
            self.barrier.wait()
            total = [sum(column) for column in zip(*self.values, strict=True)]
            self.barrier.wait()
            return total

        return add


@pytest.fixture(scope="module", autouse=True)
def _worker_by_thread():
    real = module.get_worker_info
    module.get_worker_info = lambda: real() or (SimpleNamespace(id=_worker.id) if hasattr(_worker, "id") else None)
    yield
    module.get_worker_info = real


class Leg:
    """One life of a run on `world` simulated ranks: what each delivered, and each rank's state after each step."""

    def __init__(self, world: int, states: Any, steps: int | None, **settings: Any):
        self.windows: list[list[list[Any]]] = [[] for _ in range(world)]
        self.states: list[list[Any]] = [[] for _ in range(world)]
        self.ends = [False] * world
        self._exchange, self._errors = Exchange(world), []
        ranks = [
            threading.Thread(target=self._live, args=(rank, world, states, steps, settings)) for rank in range(world)
        ]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        for error in self._errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error

    def _live(self, rank: int, world: int, states: Any, steps: int | None, settings: Any) -> None:
        try:
            stream = make(rank, world, self._exchange, **settings)
            if states:
                stream.load_state_dicts(json.loads(json.dumps(states)))
            self.states[rank].append(stream.state_dict())
            window: list[Any] = []
            standing = None
            for batch in stream:
                window.append((batch.tolist() if stream.real else [], stream.real, stream.weight, stream.accumulate))
                standing = standing or stream.state_dict()
                assert stream.state_dict() == standing, "handing over is not using up"
                if stream.step_done:
                    self.ends[rank] = stream.at_end
                    if steps is not None and len(self.windows[rank]) == steps:
                        break  # killed between optimizer.step() and commit()
                    stream.commit()
                    self.windows[rank].append(window)
                    standing = stream.state_dict()
                    self.states[rank].append(standing)
                    window = []
        except BaseException as error:
            self._errors.append(error)
            self._exchange.barrier.abort()

    def step(self, number: int) -> Counter[int]:
        return Counter(sample for rank in self.windows for batch, *_ in rank[number] for sample in batch)


class Quiet(ElasticStream):
    def _warn(self) -> None:
        pass


def make(rank: int, world: int, exchange: Exchange, *, lengths: list[int], known: bool, **settings: Any) -> Any:
    stream = Quiet(shards_of(lengths), open=numbers, length=size_of if known else None, **settings)
    stream.rank, stream.world_size, stream.commits_by_itself = rank, world, False
    stream._sum_over_ranks = exchange.sums(rank)
    stream._loader = Turns(stream._dataset, stream.num_workers)
    return stream


def check(leg: Leg, world: int, batch: int, micro: int | None, known: bool) -> None:
    """What holds in every life: ranks aligned, weights right, limits kept."""
    count = len(leg.windows[0])
    assert all(len(rank) == count for rank in leg.windows)
    for number in range(count):
        ranks = [rank[number] for rank in leg.windows]
        g = sum(real for rank in ranks for _, real, _, _ in rank)
        assert len({len(rank) for rank in ranks}) == 1
        assert 0 < g <= batch
        for rank in ranks:
            for samples, real, weight, accumulate in rank:
                assert len(samples) == real <= (micro or batch)
                assert accumulate == len(rank)
                assert weight == pytest.approx(world * real / g)
    for number in range(count + 1):
        positions = {(rank[number]["epoch"], rank[number]["samples"]) for rank in leg.states}
        assert len(positions) == 1
    if known:
        sizes = [leg.step(number).total() for number in range(count)]
        assert all(size == batch for size in sizes[:-1])


def moved(states: list[Any], world: int, settings: Any) -> list[Any]:
    """The states that another number of ranks saves between its resume and its first batch."""
    streams = [make(rank, world, Exchange(1), **settings) for rank in range(world)]
    for stream in streams:
        stream.load_state_dicts(states)
    return [stream.state_dict() for stream in streams]


RUNS = {
    "lengths": st.lists(st.integers(0, 14), min_size=1, max_size=7).filter(any),
    "batch": st.integers(1, 9),
    "micro": st.one_of(st.none(), st.integers(1, 4)),
    "seed": st.integers(0, 2**32),
    "luck": st.randoms(use_true_random=False),
}


@settings(max_examples=150, deadline=None)
@given(known=st.booleans(), tail=st.sampled_from(["even", "even", "drop"]), **RUNS)
def test_each_sample_comes_once_whatever_the_worlds_workers_and_lost_steps(
    known: bool, tail: str, lengths: list[int], batch: int, micro: int | None, seed: int, luck: random.Random
) -> None:
    if tail == "drop" and (not known or batch > sum(lengths)):
        tail = "even"
    settings = dict(lengths=lengths, known=known, global_batch_size=batch, micro_batch_size=micro, seed=seed, tail=tail)
    states: Any = None
    for epoch in range(2):
        seen: Counter[int] = Counter()
        steps = 0
        for life in itertools.count():
            world, workers = luck.randint(1, 4), luck.randint(0, 3)
            last = life == 5
            leg = Leg(world, states, None if last else luck.randint(0, 4), num_workers=workers, **settings)
            check(leg, world, batch, micro, known)
            made = len(leg.windows[0])
            ended = leg.states[0][-1]["epoch"] > epoch
            saved = made if ended else luck.randint(0, made)
            for number in range(saved):
                seen += leg.step(number)
            steps += saved
            states = [rank[saved] for rank in leg.states]
            luck.shuffle(states)
            if ended:
                assert all(leg.ends)
                break
            if luck.random() < 0.3:
                states = moved(states, luck.randint(1, 4), settings)  # saved again before its first batch
            assert not last, "the epoch did not end"
            assert (states[0]["epoch"], states[0]["samples"]) == (epoch, seen.total())
        assert max(seen.values()) == 1
        whole = all_of(lengths)
        if tail == "drop":
            assert not seen - whole
            assert seen.total() == sum(lengths) // batch * batch
        else:
            assert seen == whole
        if known:
            assert steps == (sum(lengths) // batch if tail == "drop" else -(-sum(lengths) // batch))


@settings(max_examples=60, deadline=None)
@given(known=st.booleans(), world=st.integers(1, 4), workers=st.integers(0, 3), **RUNS)
def test_the_same_numbers_of_ranks_and_workers_go_on_as_if_nothing_had_happened(
    known: bool, world: int, workers: int, lengths: list[int], batch: int, micro: int | None, seed: int, luck: Any
) -> None:
    settings = dict(lengths=lengths, known=known, global_batch_size=batch, micro_batch_size=micro, seed=seed)
    twin = Leg(world, None, None, num_workers=workers, **settings)
    windows: list[list[Any]] = [[] for _ in range(world)]
    states: Any = None
    while not states or states[0]["epoch"] == 0:
        leg = Leg(world, states, luck.randint(1, 3), num_workers=workers, **settings)
        saved = len(leg.windows[0])
        states = [rank[saved] for rank in leg.states]
        for rank in range(world):
            windows[rank] += leg.windows[rank][:saved]
    assert windows == twin.windows


def test_with_known_lengths_every_step_is_full_until_the_last_for_any_world() -> None:
    for world, workers in itertools.product((1, 2, 3, 5, 9), (0, 2, 3)):
        leg = Leg(
            world, None, None, lengths=[40, 1, 13, 7], known=True, global_batch_size=8, micro_batch_size=2,
            num_workers=workers,
        )  # fmt: skip
        assert [leg.step(number).total() for number in range(8)] == [8] * 7 + [5]


@pytest.mark.parametrize(("world", "batch", "micro"), [(2, 3, 1), (3, 7, 1), (3, 2, None), (4, 9, 2)])
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_shards_of_unknown_length_are_used_up_where_shares_are_empty(
    world: int, batch: int, micro: int | None, workers: int
) -> None:
    settings = dict(lengths=[6] * 9, known=False, global_batch_size=batch, micro_batch_size=micro)
    leg = Leg(world, None, None, num_workers=workers, **settings)
    check(leg, world, batch, micro, False)
    assert sum((leg.step(number) for number in range(len(leg.windows[0]))), Counter()) == all_of([6] * 9)


def test_shards_lie_in_another_order_each_epoch_and_in_the_given_one_without_shuffle() -> None:
    def order(epoch: int, shuffle: bool) -> list[int]:
        stream = ElasticStream(shards_of([2] * 20), 4, open=numbers, length=size_of, seed=5, shuffle=shuffle)
        stream.set_epoch(epoch)
        return [sample // 1000 for batch in stream for sample in batch.tolist()][::2]

    assert order(0, False) == order(3, False) == list(range(20))
    assert sorted(order(0, True)) == sorted(order(1, True)) == list(range(20))
    assert len({tuple(order(epoch, True)) for epoch in range(4)} | {tuple(range(20))}) == 5
    assert order(2, True) == order(2, True)


# The loop's view


def test_without_a_manager_a_window_counts_when_the_next_is_asked_for() -> None:
    stream = ElasticStream(shards_of([10]), 4, open=numbers, length=size_of)
    batches = iter(stream)
    next(batches)
    assert stream.position == (0, 0)
    next(batches)
    assert stream.position == (0, 4)
    assert [batch.tolist() for batch in stream] == [[4, 5, 6, 7], [8, 9]]
    assert stream.position == (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_draws_nothing_from_the_global_streams(workers: int) -> None:
    stream = ElasticStream(shards_of([10, 3]), 4, open=numbers, length=size_of, num_workers=workers)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(stream)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_lengths_say_how_many_batches_and_steps_there_are() -> None:
    stream = ElasticStream(shards_of([10, 4]), 4, micro_batch_size=3, open=numbers, length=[10, 4])
    assert (len(stream), stream.steps_per_epoch, stream.total_steps(3), stream.length) == (7, 4, 12, 14)
    assert len(list(stream)) == 7
    unknown = ElasticStream(shards_of([10, 4]), 4, open=numbers)
    assert unknown.length is None
    for ask in (lambda: len(unknown), lambda: unknown.steps_per_epoch, lambda: unknown.total_steps(2)):
        with pytest.raises(TypeError, match="length="):
            ask()


def test_another_epoch_begins_at_its_start_and_the_same_one_goes_on() -> None:
    stream = ElasticStream(shards_of([12]), 4, open=numbers, length=size_of)
    for _ in itertools.islice(stream, 2):
        pass
    stream.set_epoch(0)
    assert stream.position == (0, 4)
    stream.set_epoch(1, final=True)
    assert stream.position == (1, 0)
    assert len(list(stream)) == 3


def test_batches_are_moved_one_ahead_and_counted_when_handed_over() -> None:
    stream = ElasticStream(shards_of([9]), 4, open=numbers, length=size_of, device="cpu")
    stream.commits_by_itself = False
    for _ in stream:
        stream.commit()
        break
    assert stream.state_dict()["lanes"] == [[1, [[0, 4, 9]]]]


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_without_shards_hands_over_a_real_sample_with_weight_0(known: bool) -> None:
    leg = Leg(3, None, None, lengths=[2], known=known, global_batch_size=2)
    assert [rank[0][0][1:3] for rank in leg.windows][2] == (0, 0.0)
    assert leg.step(0).total() + (leg.step(1).total() if not known else 0) == 2


# Real processes


def write_folder(folder: Path, kind: str, lengths: list[int]) -> None:
    folder.mkdir()
    at = 0
    for number, length in enumerate(lengths):
        ids = np.arange(at, at + length)
        at += length
        table = pa.table({"id": ids, "x": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids / 7, 3)), 3)})
        if kind == "parquet":
            pq.write_table(table, folder / f"{number:03}.parquet", row_group_size=5)
        else:
            pyarrow.feather.write_feather(table, folder / f"{number:03}.feather", chunksize=5)


def train(rank: int, folder: Path, kind: str, life: int, saved: int | None, dies_at: int | None, dying: int) -> int:
    """Steps of an epoch, each noted with what it used; the state after every second. `dying`: who is killed."""
    world = dist.get_world_size()
    if kind == "unknown":
        stream = ElasticStream(
            shards_of([23, 9, 14, 2, 17]), 8, micro_batch_size=2, open=numbers, num_workers=2, seed=3
        )  # fmt: skip
    else:
        stream = ElasticStream(folder / kind, 8, micro_batch_size=2, num_workers=2, seed=3)
    stream.commits_by_itself = False
    step = 0
    if saved is not None:
        texts = sorted(folder.glob(f"state-{life - 1}-{saved}-*.json"))
        states = [json.loads(text.read_text()) for text in texts]
        stream.load_state_dicts(states)
        step = saved
    used: list[int] = []
    for batch in stream:
        ids = batch["id"] if isinstance(batch, dict) else batch
        used += ids.tolist() if stream.real else []
        if stream.step_done:
            dist.all_reduce(torch.ones(1))
            if step == dies_at and rank in (dying, dying % world, rank if dying < 0 else -1):
                die()
            step += 1
            stream.commit()
            with (folder / f"used-{life}-{step}-{rank}.json").open("w") as file:
                json.dump(used, file)
            used = []
            if step % 2 == 0:
                temporary = folder / f"temporary-{rank}"
                temporary.write_text(json.dumps(stream.state_dict()))
                temporary.rename(folder / f"state-{life}-{step}-{rank}.json")
    return stream.position[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "unknown"])
def test_killed_ranks_with_two_loader_workers_each_lose_and_repeat_nothing(tmp_path: Path, kind: str) -> None:
    lengths = [23, 9, 14, 2, 17]
    if kind != "unknown":
        write_folder(tmp_path / kind, kind, lengths)
    whole = all_of(lengths) if kind == "unknown" else Counter(range(sum(lengths)))
    seen: Counter[int] = Counter()
    saved = None
    for life, (world, dies_at, dying) in enumerate([(2, 3, -1), (3, 5, 1), (1, None, 0)]):
        if dies_at is None:
            assert run_ranks(world, train, tmp_path, kind, life, saved, None, dying) == [1]
            last = 10**6
        else:
            outcomes = try_ranks(world, train, tmp_path, kind, life, saved, dies_at, dying)
            assert sum(outcome.killed for outcome in outcomes) == (world if dying < 0 else 1)
            last = max(
                int(path.name.split("-")[2])
                for path in tmp_path.glob(f"state-{life}-*-*.json")
                if len(list(tmp_path.glob(f"state-{life}-{path.name.split('-')[2]}-*.json"))) == world
            )
        for path in tmp_path.glob(f"used-{life}-*.json"):
            if int(path.name.split("-")[2]) <= last:
                seen += Counter(json.loads(path.read_text()))
        saved = last
    assert seen == whole


def managed(rank: int, folder: Path, known: bool, dies_at: int | None) -> tuple[Any, ...]:
    """Two epochs under the manager, each step noted; killed in mid-window after step `dies_at`."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream = ElasticStream(
        shards_of([23, 9, 14, 2, 17]), 8, micro_batch_size=2, open=numbers, length=size_of if known else None,
        num_workers=2, seed=3,
    )  # fmt: skip
    manager = CheckpointManager(
        model=model, optimizer=optimizer, loader=stream, storage=folder / "run", save=SavePolicy(every_steps=4)
    )
    plan = manager.resume()
    step, used = plan.step, []
    for epoch in manager.epochs(2):
        for batch in manager.batches():
            used += batch.tolist() if stream.real else []
            (model(batch[:, None].float()).mean() * stream.weight * 1e-6).backward()
            if stream.step_done:
                optimizer.step()
                dist.all_reduce(torch.ones(1))
                if step == dies_at:
                    die()
                step += 1
                (folder / f"used-{epoch}-{step}-{rank}.json").write_text(json.dumps(used))
                used = []
                manager.step()
    manager.finish()
    return plan.step, plan.cursor, manager.state.samples_seen, manager.state.epoch


@pytest.mark.parametrize("known", [True, False])
def test_under_the_manager_two_epochs_on_changing_ranks_use_each_sample_twice(tmp_path: Path, known: bool) -> None:
    seen: Counter[int] = Counter()
    for world, dies_at in [(3, 6), (2, 13), (1, None)]:
        outcomes = try_ranks(world, managed, tmp_path, known, dies_at)
        assert [outcome.killed for outcome in outcomes] == [dies_at is not None] * world
        last = 10**6 if dies_at is None else find_checkpoint(tmp_path / "run").step
        for path in tmp_path.glob("used-*.json"):
            if int(path.name.split("-")[2]) <= last:
                seen += Counter(json.loads(path.read_text()))
            path.unlink()
    assert outcomes[0].value == (12, "kept", 130, 2), outcomes[0].error
    assert seen == Counter({sample: 2 for sample in all_of([23, 9, 14, 2, 17])})


def gradients(rank: int) -> dict[str, float]:
    """The worst relative difference between DDP's gradient of a step and that of the mean over the samples of it."""

    def row(sample: int) -> torch.Tensor:
        return torch.sin(torch.arange(1.0, 5.0, dtype=torch.float64) * (sample + 1))

    def worst(known: bool, parts: Any, micro: int) -> float:
        def points(samples: list[int]) -> int:
            return sum(map(parts, samples))

        def loss_of(model: Any, samples: list[int]) -> torch.Tensor:
            return (model(torch.stack([row(sample) for sample in samples for _ in range(parts(sample))])) ** 2).mean()

        torch.manual_seed(0)
        plain = torch.nn.Linear(4, 1).double()
        model = DistributedDataParallel(torch.nn.Linear(4, 1).double())
        model.module.load_state_dict(plain.state_dict())
        stream = ElasticStream(
            shards_of([11, 3, 8, 5]), 7, micro_batch_size=micro, open=numbers, length=size_of if known else None,
            num_workers=2, collate_fn=list, count=points,
        )  # fmt: skip
        found, window, empty = 0.0, [], False
        for batch in stream:
            window += batch if stream.real else []
            empty |= not stream.real
            weight = stream.weight if parts is one else stream.weight_for(points(batch))
            with stream.sync(model):
                (loss_of(model, batch) * weight).backward()
            if stream.step_done:
                gathered: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, window)
                expected = torch.autograd.grad(loss_of(plain, list(itertools.chain(*gathered))), [*plain.parameters()])
                for mine, theirs in zip(model.parameters(), expected, strict=True):
                    found = max(found, float((mine.grad - theirs).norm() / theirs.norm()))
                model.zero_grad()
                window = []
        assert empty or micro > 1 or rank == 0, "the case has micro-batches without a sample"
        return found

    def one(sample: int) -> int:
        return 1

    def several(sample: int) -> int:
        return 1 + sample % 3

    cases = [(True, one, 2), (True, several, 1), (False, one, 1), (False, several, 2)]
    return {f"{known} {parts.__name__}": worst(known, parts, micro) for known, parts, micro in cases}


def test_the_averaged_gradient_is_that_of_the_mean_over_the_step() -> None:
    for differences in run_ranks(3, gradients):
        assert max(differences.values()) < 1e-12, differences


# Files


@pytest.fixture
def table() -> pa.Table:
    wide = [bytes([number % 251]) * 500 for number in range(4000)]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8000.0)), 2)
    lists = pa.array([[number] * (number % 3) for number in range(4000)])
    text = pa.array([f"t{number}" for number in range(4000)]).dictionary_encode()
    return pa.table({"wide": wide, "y": np.arange(4000), "vector": vectors, "list": lists, "text": text})


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path, chunksize=500)
    else:
        opened = pa.ipc.new_file if path.suffix == ".ipc" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
            for batch in table.to_batches(500):
                writer.write_batch(batch)


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.ipc", "a.arrow"])
@pytest.mark.parametrize("offset", [0, 1, 499, 500, 3750, 3999, 4000])
def test_a_file_is_read_from_any_offset(tmp_path: Path, table: pa.Table, name: str, offset: int) -> None:
    write(tmp_path / name, table)
    rows = list(Files(None)(tmp_path / name, offset))
    assert lengths_of([tmp_path / name], None, files=True) == [4000]
    assert [row["y"] for row in rows] == list(range(offset, 4000))
    for row in rows[::97]:
        number = row["y"]
        assert row["wide"] == bytes([number % 251]) * 500
        assert row["vector"].tolist() == [2 * number, 2 * number + 1]
        assert row["list"].tolist() == [number] * (number % 3)
        assert row["text"] == f"t{number}"


class Counting:
    """A file that counts the bytes read of it, without memory mapping."""

    def __init__(self, path: Path):
        self.file, self.read_bytes = path.open("rb"), 0

    def read(self, count: int = -1) -> bytes:
        data = self.file.read(count)
        self.read_bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("name", ["a.parquet", "a.ipc"])
def test_what_lies_before_the_offset_is_not_read(tmp_path: Path, table: pa.Table, monkeypatch: Any, name: str) -> None:
    write(tmp_path / name, table)
    counting = Counting(tmp_path / name)
    files = SimpleNamespace(open_input_file=lambda place: pa.PythonFile(counting, "r"))
    monkeypatch.setattr(stream_files, "_filesystem", lambda path: (files, str(path)))
    assert next(Files(None)(tmp_path / name, 3600))["y"] == 3600
    assert counting.read_bytes < (tmp_path / name).stat().st_size / 5


def test_columns_that_are_not_asked_for_are_left_out(tmp_path: Path, table: pa.Table) -> None:
    for name in ("a.parquet", "a.feather", "a.arrow"):
        write(tmp_path / name, table)
    stream = ElasticStream(tmp_path, 1000, columns=["y", "vector"])
    batch = next(iter(stream))
    assert stream.length == 12000
    assert {key: tuple(value.shape) for key, value in batch.items()} == {"y": (1000,), "vector": (1000, 2)}


def test_nulls_and_empty_files_pass(tmp_path: Path) -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    lists = pa.array([[1.5], None, []], pa.list_(pa.float32()))
    holes = pa.table({"a": pa.array([1, None, 3]), "v": lists, "f": fixed})
    pq.write_table(holes, tmp_path / "a.parquet")
    pq.write_table(holes.slice(0, 0), tmp_path / "b.parquet")
    stream = ElasticStream(tmp_path, 3, collate_fn=list)
    (batch,) = list(stream)
    assert [row["a"] for row in batch] == [1, None, 3]
    assert [row["v"] if row["v"] is None else row["v"].tolist() for row in batch] == [[1.5], None, []]
    assert [row["f"] if row["f"] is None else row["f"].tolist() for row in batch] == [[1, 2], None, [3, 4]]
    batch[0]["v"] += 1  # samples are the user's own, not views of the file


# What changed


def test_a_restarted_epoch_has_another_order_and_so_has_the_resume_of_it() -> None:
    def order(stream: Any) -> list[int]:
        return [sample // 1000 for batch in stream for sample in batch.tolist()]

    def restarted() -> ElasticStream:
        stream = ElasticStream(shards_of([2] * 20), 2, open=numbers, length=size_of)
        stream.set_epoch(0, restarts=1)
        return stream

    stream = restarted()
    assert order(restarted()) != order(ElasticStream(shards_of([2] * 20), 2, open=numbers, length=size_of))
    stream.commits_by_itself = False
    for _ in itertools.islice(stream, 3):
        stream.commit()
    resumed = ElasticStream(shards_of([2] * 20), 2, open=numbers, length=size_of)
    resumed.load_state_dicts([stream.state_dict()])
    resumed.set_epoch(0, restarts=1)
    assert order(resumed) == order(restarted())[6:]
    assert resumed.position == (1, 0)
    assert resumed.state_dict()["restarts"] == 0


def test_another_global_batch_may_be_set_between_a_resume_and_the_first_batch() -> None:
    states = states_of(2)
    stream = other()
    stream.load_state_dicts(states)
    stream.global_batch_size = 6
    assert [len(batch) for batch in stream] == [6, 6, 6, 1]


def states_of(world: int, steps: int = 2, **settings: Any) -> list[Any]:
    leg = Leg(world, None, steps, **{"lengths": [9, 9, 9], "known": True, "global_batch_size": 4, **settings})
    return [rank[steps] for rank in leg.states]


def other(**changes: Any) -> ElasticStream:
    return ElasticStream(**{"shards": shards_of([9, 9, 9]), "global_batch_size": 4, "open": numbers, "length": size_of}
                         | changes)  # fmt: skip


def test_a_position_in_other_data_is_refused_and_what_changed_is_named() -> None:
    states = states_of(2)
    other().load_state_dicts(states)
    for change, words in [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"shuffle": False}, "order"),
        ({"shards": shards_of([9, 9])}, "list of shards"),
        ({"shards": [(0, 9), (1, 9), (5, 9)]}, "list of shards"),
        ({"length": [9, 9, 10]}, r"samples of all shards\) was 27, now 28|samples of all shards was 27, now 28"),
        ({"length": [9, 8, 10]}, "lengths"),
        ({"length": None}, "samples of all shards"),
    ]:
        with pytest.raises(DataChanged, match=words):
            other(**change).load_state_dicts(states)
    for strange in ([], [{"kind": "pimm_ray.elastic"}], [{}]):
        with pytest.raises(DataChanged, match="not the position of an ElasticStream"):
            other().load_state_dicts(strange)


def test_parts_that_are_not_one_whole_are_refused() -> None:
    states = states_of(3)
    with pytest.raises(DataChanged, match=r"3 ranks saved parts of it and those of ranks \[0, 2\] are here"):
        other().load_state_dicts([states[0], states[2]])
    with pytest.raises(DataChanged, match="not whole"):
        other().load_state_dicts([*states, states[1]])
    with pytest.raises(DataChanged, match="contradict each other \\(samples"):
        other().load_state_dicts([*states[:2], states_of(3, steps=3)[2]])
    with pytest.raises(DataChanged, match="two hold sample"):
        other().load_state_dicts([*states[:2], {**states[2], "lanes": states[1]["lanes"]}])
    with pytest.raises(DataChanged, match="contradict each other \\(restarts"):
        other().load_state_dicts([*states[:2], {**states[2], "restarts": 1}])
    with pytest.raises(DataChanged, match="do not add up"):
        other().load_state_dicts([*states[:2], {**states[2], "lanes": [[2, []]]}])


def test_files_may_move_between_runs(tmp_path: Path) -> None:
    write_folder(tmp_path / "before", "parquet", [9, 9])
    stream = ElasticStream(tmp_path / "before", 4)
    first = next(iter(stream))["id"].tolist()
    stream.commit()
    (tmp_path / "before").rename(tmp_path / "after")
    moved = ElasticStream(tmp_path / "after", 4)
    moved.load_state_dicts([stream.state_dict()])
    assert sorted(first + [number for batch in moved for number in batch["id"].tolist()]) == list(range(18))


# Errors


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"shards": []}, ValueError, "no shards"),
        ({"shards": [(0, 9), (0, 9)]}, ValueError, "in the list twice"),
        ({"shards": ["a/b", Path("a/b")]}, ValueError, "in the list twice"),
        ({"shards": "folder"}, TypeError, "is a list"),
        ({"shards": [object()]}, TypeError, "names, numbers or tuples"),
        ({"open": None}, TypeError, "give open="),
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0"),
        ({"global_batch_size": None}, ValueError, "global_batch_size=None"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size=0"),
        ({"tail": "carry"}, ValueError, "'even' or 'drop'"),
        ({"tail": "drop", "length": None}, ValueError, "needs the shards' lengths"),
        ({"tail": "drop", "global_batch_size": 28}, ValueError, "larger than the data"),
        ({"length": [1, 2]}, ValueError, "2 entries for 3 shards"),
        ({"length": [1, 2, -1]}, ValueError, "whole numbers"),
        ({"length": [0, 0, 0]}, ValueError, "none of the 3 shards"),
        ({"batch_size": 3}, TypeError, "global_batch_size="),
        ({"persistent_workers": True}, ValueError, "persistent_workers"),
        ({"in_order": False}, ValueError, "in_order"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(arguments: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        other(**arguments)


def test_a_file_that_cannot_be_read_is_named_at_once(tmp_path: Path) -> None:
    for make_it in (lambda path: path.write_bytes(b"PAR1 and no more"), lambda path: path.write_text("words"),
                    lambda path: path.write_bytes(b"ARROW1\0\0"), lambda path: None):  # fmt: skip
        path = tmp_path / "broken.parquet"
        make_it(path)
        with pytest.raises(StorageError, match=r"broken\.parquet"):
            ElasticStream([path], 4)
        path.unlink(missing_ok=True)
    with pytest.raises(ValueError, match="holds no shards"):
        ElasticStream(tmp_path, 4)
    with pytest.raises(StorageError, match="cannot be listed"):
        ElasticStream(tmp_path / "none", 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_breaks_off_is_named_with_its_offset(workers: int) -> None:
    def breaks(shard: str, offset: int) -> Any:
        for number in range(offset, 9):
            if shard == "bad" and number == 5:
                raise EOFError("torn")
            yield number

    stream = ElasticStream(["good", "bad"], 2, open=breaks, num_workers=workers)
    with pytest.raises(StorageError, match=r"shard 'bad' cannot be read at sample 5 \(EOFError: torn\)"):
        list(stream)


@pytest.mark.parametrize(("said", "words"), [(8, "more than 8"), (10, "holds 9")])
def test_a_length_that_is_not_true_is_found(said: int, words: str) -> None:
    with pytest.raises(DataChanged, match=words):
        list(other(length=[9, said, 9]))


def test_data_without_a_sample_are_an_error_not_an_endless_run() -> None:
    with pytest.raises(ValueError, match="none of the 2 shards"):
        list(ElasticStream(shards_of([0, 0]), 4, open=numbers))


def test_shards_that_some_ranks_will_not_have_are_said_once(caplog: Any) -> None:
    ElasticStream(shards_of([5]), 4, open=numbers, num_workers=2)
    assert "1 shards of unknown length for 1 ranks with 2 readers" in caplog.text
