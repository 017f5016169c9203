"""ElasticLoader alone: the same global steps for any number of ranks, loader workers and interruptions."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import ray.train
import ray.train.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from pimm_ray import CheckpointManager, ElasticLoader
from pimm_ray.errors import DataChanged
from tests.elastic_jobs import next_draws
from tests.simulated import Indices, Ranks, samples_of

TAILS = ["drop", "even", "carry"]


@dataclass(frozen=True)
class Attempt:
    """One start of a run: it commits `steps` steps, is handed `more` windows that no step finishes, and ends. What is
    left is the position as of `lost` steps before its end."""

    world: int
    steps: int = 10**9
    lost: int = 0
    more: int = 0


@dataclass(frozen=True)
class Run:
    length: int
    batch: int
    tail: str = "drop"
    order: dict[str, Any] = field(default_factory=dict)
    epochs: int = 3
    micro: int | None = None
    attempts: tuple[Attempt, ...] = ()
    loading: dict[str, Any] = field(default_factory=dict)

    def expected(self) -> list[list[int]]:
        """The samples of each global step, from the order and the rule of the tail alone."""
        order = self.ranks(1).loaders[0]._order
        streams = [order.for_epoch(epoch)(np.arange(self.length)).tolist() for epoch in range(self.epochs)]
        if self.tail == "carry":
            streams = [[index for stream in streams for index in stream]]
        steps = [stream[at : at + self.batch] for stream in streams for at in range(0, len(stream), self.batch)]
        return [sorted(step) for step in steps if self.tail != "drop" or len(step) == self.batch]

    def ranks(self, world: int, start: dict[str, Any] | None = None) -> Ranks:
        settings = {"micro_batch_size": self.micro, "tail": self.tail, "seed": 7, **self.order, **self.loading}
        return Ranks(world, Indices(self.length), self.batch, start=start, **settings)

    def steps(self) -> list[list[int]]:
        """The same, as all attempts one after the other saw them. What is seen again must be seen alike."""
        seen: list[list[int]] = []
        state, at = None, 0
        for attempt in (*self.attempts, Attempt(world=2)):
            ranks = self.ranks(attempt.world, state)
            states = [ranks.state]
            for number, window in enumerate(ranks.windows(self.epochs)):
                if number >= attempt.steps + attempt.more:
                    break
                self.check(window, ranks)
                samples = samples_of(window)
                if at + number < len(seen):
                    assert samples == seen[at + number], "a step that is repeated has the same samples"
                elif number < attempt.steps:
                    seen.append(samples)
                if number < attempt.steps:
                    ranks.commit()
                    states.append(ranks.state)
            assert ranks.state == states[-1], "what is handed over and not committed does not count"
            keep = max(0, len(states) - 1 - attempt.lost)
            state, at = states[keep], at + keep
        return seen

    def check(self, window: list[list[Any]], ranks: Ranks) -> None:
        micros = [micro for part in window for micro in part]
        assert {micro.accumulate for micro in micros} == {len(window[0])}
        assert sum(micro.weight for micro in micros) == pytest.approx(len(window)), "weights sum to the world"
        for micro in micros:
            assert micro.weight == pytest.approx(len(window) * micro.real / sum(m.real for m in micros))
            assert len(micro.batch) == max(1, micro.real) <= (self.micro or self.batch)
        shares = [sum(micro.real for micro in part) for part in window]
        assert max(shares) - min(shares) <= 1


@st.composite
def runs(draw: st.DrawFn) -> Run:
    length = draw(st.integers(1, 1000))
    order = draw(
        st.sampled_from(
            [
                {"order": "shuffle"},
                {"order": "block", "block": 7, "group": 3},
                {"order": "sequential"},
                {"order": "weighted", "weights": np.arange(1, length + 1)},
            ]
        )
    )
    attempt = st.builds(
        Attempt, world=st.integers(1, 8), steps=st.integers(0, 30), lost=st.integers(0, 4), more=st.integers(0, 2)
    )
    batch = draw(st.integers(max(1, length // 25), length))
    return Run(
        length=length,
        batch=batch,
        tail=draw(st.sampled_from(TAILS)),
        order=order,
        epochs=draw(st.integers(1, 3)),
        # At most some micro-batches a step, or an example takes seconds.
        micro=draw(st.none() | st.integers(max(1, batch // 12), 2 + batch // 2)),
        attempts=tuple(draw(st.lists(attempt, max_size=4))),
    )


@settings(max_examples=120, deadline=None)
@given(run=runs())
def test_any_worlds_and_interruptions_take_the_same_steps_and_each_sample_exactly_once(run: Run) -> None:
    steps = run.steps()
    assert steps == run.expected()
    for world in (1, 3, 8):
        loader = run.ranks(world).loaders[0]
        assert loader.total_steps(run.epochs) == len(steps), "the horizon of a schedule is known beforehand"
        assert loader.steps_per_epoch == -(-run.length // run.batch) - (
            run.tail == "drop" and run.length % run.batch > 0
        )
    if run.order["order"] != "weighted":
        counts = Counter(index for step in steps for index in step)
        whole = run.tail != "drop" or run.length % run.batch == 0
        assert sum(counts.values()) == run.epochs * (run.length if whole else run.length - run.length % run.batch)
        assert max(counts.values()) <= run.epochs
        assert not whole or (set(counts.values()) == {run.epochs} and len(counts) == run.length)


@pytest.mark.parametrize(
    "run",
    [
        Run(53, 16, tail="drop", attempts=(Attempt(3, steps=2), Attempt(1, steps=3, lost=1, more=1)), epochs=2),
        Run(53, 16, tail="even", attempts=(Attempt(2, steps=5, lost=1),), epochs=2, micro=3),
        Run(53, 16, tail="carry", attempts=(Attempt(2, steps=4), Attempt(3, steps=1, more=2)), epochs=2),
        Run(
            20, 6, tail="carry", attempts=(Attempt(3, steps=6, lost=1, more=1),), micro=1, order={"order": "sequential"}
        ),
    ],
)
@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_that_read_ahead_change_nothing(run: Run, persistent: bool) -> None:
    loading = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": persistent}
    run = Run(**{**vars(run), "loading": loading})
    assert run.steps() == run.expected()


def test_a_dropped_loader_ends_its_workers_at_once() -> None:
    """In a cycle of references they would live until garbage is collected, which then waits 5 seconds for each."""
    loader = ElasticLoader(Indices(20), 4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    workers = loader._loader._iterator._workers
    gc.disable()
    try:
        del loader
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_the_batch_sampler_gives_the_same_each_time_it_is_asked() -> None:
    """torch asks twice when it has workers: an offset that is spent by being asked for would be gone."""
    loader = ElasticLoader(Indices(40), 4, order="sequential")
    loader.load_state_dict({**loader.state_dict(), "samples": 12})
    sampler = loader.batch_sampler
    asked = iter(sampler)
    assert list(sampler) == list(sampler) == list(asked)
    assert next(iter(sampler)) == [12, 13, 14, 15] and len(sampler) == 7


# The position


def test_a_step_counts_when_it_is_committed_and_not_before() -> None:
    loader = ElasticLoader(Indices(20), 4, micro_batch_size=2, num_workers=2, prefetch_factor=4)
    loader.commits_by_itself = False
    batches = iter(loader)
    for _ in range(2):
        assert loader.position == (0, 0)
        next(batches)
    loader.commit()
    assert loader.position == (0, 4)
    next(batches)
    loader.commit()
    assert loader.position == (0, 4), "half a window is no step"
    next(batches)
    assert loader.position == (0, 4)
    loader.commit()
    loader.commit()
    assert loader.position == (0, 8)


def test_without_a_manager_a_window_is_used_up_when_the_next_is_asked_for() -> None:
    loader = ElasticLoader(Indices(20), 4, micro_batch_size=2)
    seen = [loader.position for _ in loader]
    assert seen == [(0, samples) for samples in (0, 0, 4, 4, 8, 8, 12, 12, 16, 16)]
    assert loader.position == (1, 0)
    for number, _ in enumerate(loader):
        if number == 5:
            break
    assert loader.position == (1, 8), "the third window was handed over and nobody asked for the fourth"


def test_without_a_manager_a_loop_that_is_stopped_goes_on_where_it_was() -> None:
    def walk(loader: ElasticLoader, steps: int | None = None) -> list[list[int]]:
        seen = []
        for epoch in range(loader.position[0], 2):
            loader.set_epoch(epoch)
            for batch in loader:
                if steps is not None and len(seen) == steps:
                    return seen
                seen.append(batch.tolist())
        return seen

    whole = walk(ElasticLoader(Indices(22), 4, tail="even"))
    first, second = (ElasticLoader(Indices(22), 4, tail="even") for _ in range(2))
    begin = walk(first, 8)
    second.load_state_dict(first.state_dict())
    assert begin + walk(second) == whole and len(whole) == 12


def test_after_the_last_step_of_an_epoch_the_next_one_begins() -> None:
    for tail, overlap in (("drop", 0), ("even", 0), ("carry", 2)):
        loader = ElasticLoader(Indices(10), 4, tail=tail)
        first = [index for batch in loader for index in batch.tolist()]
        assert loader.position == (1, overlap) and not loader.at_end
        loader.set_epoch(1)
        assert loader.position == (1, overlap), "it is in that epoch already"
        second = [index for batch in loader for index in batch.tolist()]
        assert loader.position[0] == 2 and first != second and second


def test_set_epoch_goes_to_the_first_sample_of_another_epoch_in_another_order() -> None:
    loader = ElasticLoader(Indices(40), 8)
    orders = []
    for epoch, restarts in ((0, 0), (3, 0), (3, 1), (3, 2), (2, 0)):
        loader.set_epoch(epoch, restarts=restarts)
        assert loader.position == (epoch, 0)
        orders.append([index for batch in loader for index in batch.tolist()])
        assert sorted(orders[-1]) == list(range(40))
    assert len({tuple(order) for order in orders}) == 5


def test_a_user_s_own_set_epoch_leaves_the_place_in_a_restarted_epoch_alone() -> None:
    loader = ElasticLoader(Indices(40), 8)
    loader.set_epoch(3, restarts=1)
    loader.load_state_dict({**loader.state_dict(), "samples": 16})
    there = next(iter(loader)).tolist()
    loader.set_epoch(3)
    assert loader.position == (3, 16) and next(iter(loader)).tolist() == there


def test_a_restarted_epoch_keeps_its_order_after_a_resume() -> None:
    loader, other = (ElasticLoader(Indices(40), 8) for _ in range(2))
    loader.set_epoch(1, restarts=1)
    whole = [batch.tolist() for batch in loader]
    loader.set_epoch(1, restarts=1)
    batches = iter(loader)
    _ = [next(batches) for _ in range(3)]
    other.load_state_dict(loader.state_dict())
    assert other.position == (1, 16)
    assert [batch.tolist() for batch in other] == whole[2:]
    assert other.state_dict()["restarts"] == 0, "the next epoch was not restarted"


def test_the_length_is_the_micro_batches_still_to_come() -> None:
    for tail in TAILS:
        for world in (1, 2, 3, 7):
            for samples in (0, 12, 48):
                ranks = Ranks(world, Indices(53), 12, tail=tail, micro_batch_size=2)
                start = {**ranks.state, "samples": samples}
                for loader in ranks.loaders:
                    loader.load_state_dict(start)
                expected = len(ranks.loaders[0])
                assert sum(len(window[0]) for window in ranks.windows_of_epoch()) == expected, (tail, world, samples)


def test_a_stored_position_is_plain_data_and_the_same_on_every_rank() -> None:
    ranks = Ranks(3, Indices(40), 8, seed=2**70)
    next(ranks.windows(1))
    ranks.commit()
    assert ranks.state == {
        "kind": "pimm_ray.elastic",
        "order": "shuffle-v1",
        "seed": 2**70,
        "length": 40,
        "epoch": 0,
        "samples": 8,
        "restarts": 0,
    }


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"order": "sequential"}, "order was 'shuffle-v1', now 'sequential-v1'"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"length": 41}, "length was 40, now 41"),
    ],
)
def test_a_position_in_other_data_is_refused_by_name_and_changes_nothing(settings: dict[str, Any], named: str) -> None:
    state = {**ElasticLoader(Indices(40), 8).state_dict(), "samples": 16}
    other = ElasticLoader(Indices(settings.pop("length", 40)), 8, **settings)
    with pytest.raises(DataChanged) as caught:
        other.load_state_dict(state)
    assert named in str(caught.value) and "start the epoch anew" in str(caught.value)
    assert other.position == (0, 0)


def test_the_position_of_another_kind_of_loader_is_refused() -> None:
    with pytest.raises(DataChanged, match="not the position of an ElasticLoader"):
        ElasticLoader(Indices(4), 2).load_state_dict({"_num_yielded": 3})


def test_other_batches_and_workers_take_over_a_position() -> None:
    state = {**ElasticLoader(Indices(40), 8).state_dict(), "samples": 16}
    other = ElasticLoader(Indices(40), 5, micro_batch_size=1, num_workers=1)
    other.load_state_dict(state)
    assert [index for batch in other for index in batch.tolist()] == [
        index for batch in list(ElasticLoader(Indices(40), 8))[2:] for index in batch.tolist()
    ][:20]


def test_deep_in_a_huge_data_set_the_first_batch_comes_at_once() -> None:
    loader = ElasticLoader(Indices(10**12), 256)
    loader.load_state_dict({**loader.state_dict(), "samples": 256 * 10**9})
    with mock.patch.object(
        loader._order.__class__, "_indices", autospec=True, side_effect=loader._order.__class__._indices
    ) as asked:
        assert len(next(iter(loader))) == 256
    assert sum(len(call.args[1]) for call in asked.call_args_list) < 10**5


# Randomness


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sample_rng", [False, True])
def test_making_and_using_an_iterator_leaves_the_global_random_streams_alone(workers: int, sample_rng: bool) -> None:
    before = next_draws()
    loader = ElasticLoader(Indices(20), 4, num_workers=workers, sample_rng=sample_rng)
    assert len(list(loader)) == 5
    assert next_draws() == before


class Noisy(Indices):
    """(index, a draw from each stream)."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def noisy_collate(items: list[torch.Tensor]) -> Any:
    return torch.stack(items), [random.random(), np.random.rand(), torch.rand(()).item()]


class Augmented(NamedTuple):
    """What a run drew: by (epoch, sample) in the data set, by step in collate."""

    samples: dict[tuple[int, int], tuple[float, ...]]
    steps: list[list[float]]


def augmented(*attempts: Attempt, tail: str = "even", **settings: Any) -> Augmented:
    """Two epochs of 20 samples in steps of 6."""
    samples: dict[tuple[int, int], tuple[float, ...]] = {}
    steps: dict[int, list[float]] = {}
    state, at = None, 0
    for attempt in attempts:
        ranks = Ranks(
            attempt.world, Noisy(20), 6, start=state, sample_rng=True, tail=tail, collate_fn=noisy_collate, **settings
        )
        for number, window in enumerate(ranks.windows(2)):
            if number == attempt.steps:
                break
            for part in window:
                for micro in part:
                    items, drawn = micro.batch
                    assert steps.setdefault(at + number, drawn) == drawn, "every rank collates a step alike"
                    for index, *values in items[: micro.real].tolist():
                        # An epoch is over when its sample comes again.
                        epoch = (0, int(index)) in samples and samples[0, int(index)] != tuple(values)
                        assert samples.setdefault((int(epoch), int(index)), tuple(values)) == tuple(values)
            ranks.commit()
        state, at = ranks.state, at + attempt.steps
    return Augmented(samples, [steps[number] for number in sorted(steps)])


@pytest.mark.parametrize("tail", ["even", "carry"])
def test_augmentations_are_the_same_for_any_world_worker_count_and_interruption(tail: str) -> None:
    before = next_draws()
    reference = augmented(Attempt(1), tail=tail)
    assert len(reference.samples) == 40 and len({values for values in reference.samples.values()}) == 40
    assert len(reference.steps) == (8 if tail == "even" else 7)
    assert len({tuple(drawn) for drawn in reference.steps}) == len(reference.steps)
    for world in (2, 3):
        assert augmented(Attempt(world), tail=tail) == reference
    assert augmented(Attempt(3), tail=tail, micro_batch_size=1) == reference
    assert augmented(Attempt(2), tail=tail, num_workers=2) == reference
    assert augmented(Attempt(2, steps=3), Attempt(3, steps=2), Attempt(1), tail=tail) == reference
    assert next_draws() == before, "the streams of the training process go on as if nothing was drawn"


def test_without_sample_rng_augmentations_are_the_data_set_s_own() -> None:
    torch.manual_seed(0)
    first = next(iter(ElasticLoader(Noisy(20), 6)))
    assert not torch.equal(first, next(iter(ElasticLoader(Noisy(20), 6))))


def test_a_sample_that_is_drawn_twice_is_augmented_twice() -> None:
    loader = ElasticLoader(Noisy(2), 2, order="weighted", weights=[1, 0], sample_rng=True)
    drawn = torch.cat(list(loader))
    assert drawn[:, 0].tolist() == [0, 0] and len(set(drawn[:, 1].tolist())) == 2


# Micro-batches without a real sample


@pytest.mark.parametrize(
    "length, batch, world, micro",
    [(6, 3, 2, 1), (9, 8, 3, 1), (9, 2, 5, None), (7, 4, 8, 2)],
    ids=["three samples on two ranks", "a short tail", "more ranks than samples", "both"],
)
def test_a_micro_batch_without_a_real_sample_weighs_nothing_and_keeps_the_ranks_together(
    length: int, batch: int, world: int, micro: int | None
) -> None:
    fill_ups = 0
    steps = []
    ranks = Ranks(world, Indices(length), batch, micro_batch_size=micro, tail="even", order="sequential")
    for window in ranks.windows(1):
        assert len({len(part) for part in window}) == 1
        for part in window:
            for micro_batch in part:
                assert len(micro_batch.batch) > 0, "there is something to run the model on"
                assert (micro_batch.real == 0) == (micro_batch.weight == 0)
                fill_ups += micro_batch.real == 0
        steps.append(samples_of(window))
        repeated = {i for part in window for m in part if not m.real for i in m.batch.tolist()}
        assert repeated <= set(steps[-1]), "it repeats a sample of its own step"
        ranks.commit()
    assert fill_ups > 0
    assert steps == [list(range(at, min(length, at + batch))) for at in range(0, length, batch)]


def test_more_ranks_than_samples_of_a_step_warn_once_and_work(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(5, Indices(9), 2)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].getMessage() == "5 ranks share global batches of 2 samples: 3 of them work with weight 0"
    for window in ranks.windows(1):
        assert [part[0].real for part in window] == [1, 1, 0, 0, 0]
        assert [part[0].weight for part in window] == [2.5, 2.5, 0, 0, 0]
        ranks.commit()
    caplog.clear()
    Ranks(2, Indices(9), 2)
    assert not caplog.records


def test_gradients_cross_the_network_with_the_last_micro_batch_of_a_window_only() -> None:
    loader = ElasticLoader(Indices(14), 6, micro_batch_size=2, tail="even")
    model = mock.MagicMock(spec=["no_sync"])
    held = []
    for _ in loader:
        model.no_sync.reset_mock()
        with loader.sync(model), loader.sync(torch.nn.Linear(1, 1)):
            held.append(model.no_sync.called)
    assert held == [True, True, False] * 2 + [False]


# Losses over something else than samples


class Clouds(Indices):
    """Item i is a cloud of i % 4 points: some are empty."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((index % 4,), float(index), dtype=torch.float64)


def test_weight_for_is_the_share_of_the_points_of_the_whole_window() -> None:
    loader = ElasticLoader(Clouds(20), 10, micro_batch_size=3, order="sequential", collate_fn=torch.cat, count=len)
    window, means = list[tuple[int, float]](), []
    for points in loader:
        window.append((len(points), loader.weight_for(len(points))))
        means.append(sum(points.tolist()) / max(1, len(points)) * window[-1][1])
        if loader.step_done:
            total = sum(n for n, _ in window)
            assert len(window) == 4
            assert [weight for _, weight in window] == pytest.approx([n / total for n, _ in window])
            window = []
    everything = [torch.cat([Clouds(20)[i] for i in step]).mean().item() for step in (range(10), range(10, 20))]
    assert [sum(means[:4]), sum(means[4:])] == pytest.approx(everything)


def test_weight_for_a_window_without_any_point_is_zero() -> None:
    loader = ElasticLoader(Indices(4), 4)
    for _ in loader:
        assert loader.weight_for(0) == 0.0


def test_weight_for_in_a_window_of_several_micro_batches_asks_for_count() -> None:
    loader = ElasticLoader(Indices(8), 4, micro_batch_size=2)
    for _ in loader:
        with pytest.raises(ValueError, match=r"give ElasticLoader\(count=fn\)"):
            loader.weight_for(2)


# Batches on a device


class Nested(Indices):
    def __getitem__(self, index: int) -> Any:
        pair = Pair(torch.tensor(index), torch.ones(2))
        return {"pair": pair, "list": [torch.zeros(1), f"name {index}"], "number": index}


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize("workers", [0, 2])
def test_nested_batches_are_moved_to_the_device_and_counted_at_hand_over(workers: int) -> None:
    loader = ElasticLoader(Nested(10), 4, micro_batch_size=2, tail="even", device="meta", num_workers=workers)
    loader.commits_by_itself = False
    said = []
    for batch in loader:
        assert isinstance(batch["pair"], Pair)
        tensors = [*batch["pair"], batch["list"][0], batch["number"]]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert [len(tensor) for tensor in tensors] == [2] * 4 and batch["list"][1][0].startswith("name")
        said.append((loader.real, loader.step_done, loader.position))
        if loader.step_done:
            loader.commit()
    ends = [(0, 0), (0, 0), (0, 4), (0, 4), (0, 8)]
    assert said == [(2, number in (1, 3, 4), end) for number, end in enumerate(ends)]
    assert loader.position == (1, 0)


def test_on_the_cpu_device_makes_no_difference() -> None:
    plain, moved = (ElasticLoader(Indices(20), 6, device=device, tail="carry") for device in (None, "cpu"))
    assert [b.tolist() for _ in range(3) for b in plain] == [b.tolist() for _ in range(3) for b in moved]


def test_without_loader_workers_nothing_is_loaded_ahead_of_the_batch_at_hand() -> None:
    """What a data set draws in the training process must stand in a checkpoint together with the batch it is of."""
    asked = []

    class Watched(Indices):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return index

    next(iter(ElasticLoader(Watched(20), 4, device="cpu")))
    assert len(asked) == 4


# What cannot work


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(10))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "dataset, arguments, kind, says",
    [
        (Indices(10), {"in_order": False}, ValueError, r"in_order=False.*would lose the position: leave in_order"),
        (Indices(10), {"sampler": range(10)}, TypeError, r"sampler=.*decides itself.*order="),
        (Indices(10), {"batch_sampler": [[0]]}, TypeError, r"batch_sampler=.*decides itself"),
        (Indices(10), {"batch_size": 4}, TypeError, r"batch_size=.*Use global_batch_size="),
        (Indices(10), {"shuffle": True}, TypeError, r"shuffle=.*order="),
        (Indices(10), {"drop_last": True}, TypeError, r"drop_last=.*tail="),
        (Indices(10), {"generator": torch.Generator()}, TypeError, r"generator=.*seed="),
        (Stream(), {}, TypeError, r"Stream has no length.*needs a map-style data set"),
        (NoLength(), {}, TypeError, r"NoLength has no length.*__len__ and __getitem__"),
        (Indices(3), {}, ValueError, r"global_batch_size=4 is larger than the data set \(3 samples\): use a smaller"),
        (Indices(10), {"micro_batch_size": 0}, ValueError, r"micro_batch_size=0\): use a whole number"),
        (Indices(10), {"micro_batch_size": 1.5}, ValueError, r"micro_batch_size=1.5\): use a whole number"),
        (Indices(10), {"tail": "keep"}, ValueError, r"tail='keep'\): use 'drop', 'even' or 'carry'"),
        (Indices(10), {"order": "random"}, ValueError, r"unknown order 'random'"),
        (Indices(10), {"order": "weighted", "weights": [1.0] * 9}, ValueError, r"9 entries for 10 samples"),
        (Indices(10), {"order": "weighted"}, ValueError, r"needs weights"),
        (Indices(10), {"weights": [1.0] * 10}, ValueError, r"weights have no effect on order 'shuffle'"),
        (Indices(10), {"seed": 0.5}, ValueError, r"seed must be an integer"),
    ],
)
def test_what_cannot_work_is_refused_and_says_what_to_do(
    dataset: Any, arguments: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        ElasticLoader(dataset, 4, **arguments)


@pytest.mark.parametrize("batch", [0, -1, 2.0, True, None])
def test_a_global_batch_that_is_no_number_of_samples_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=rf"global_batch_size={batch!r}\): use a whole number of samples above 0"):
        ElasticLoader(Indices(10), batch)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("add_dist_sampler", [True, False])
def test_ray_s_prepare_data_loader_cannot_take_the_loader_apart(
    tmp_path: Any, world: int, add_dist_sampler: bool
) -> None:
    loader = ElasticLoader(Indices(10), 4)
    context = mock.Mock(**{"get_world_size.return_value": world, "get_world_rank.return_value": 0})
    with pytest.raises(TypeError, match=r"prepare_data_loader.* would .* position.*device="):
        with (
            mock.patch.object(ray.train, "get_context", lambda: context),
            mock.patch.object(ray.train.torch, "get_device", lambda: torch.device("cpu")),
        ):
            prepared = ray.train.torch.prepare_data_loader(loader, add_dist_sampler=add_dist_sampler)
        assert world == 1 or not add_dist_sampler, "where Ray makes a loader of its own it is refused at once"
        CheckpointManager(model=torch.nn.Linear(1, 1), loader=prepared, storage=tmp_path)
