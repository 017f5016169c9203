"""Resume on another number of workers, or with another loader: what is dropped is said, all else comes back."""

import itertools

import pytest
import torch
from torch.amp import GradScaler
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from pimm_ray import ElasticPolicy, errors
from pimm_ray.elastic import rng, schedule
from tests.elastic_jobs import Job, Numbers, distributed, folders, said, steps_kept
from tests.ranks import try_ranks

ALL = set(range(40))


def without_draws(state):
    return {key: value for key, value in state.items() if key != "draws"}


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


# Another number of workers


@pytest.mark.parametrize("before, after", [(4, 2), (2, 4)])
def test_another_world_drops_the_cursor_on_every_rank_and_keeps_all_else(tmp_path, before, after):
    saved = Job(tmp_path, steps=3, schedule=cosine, options={"scaler": GradScaler("cpu", init_scale=64.0)}).on(before)
    options = {"scaler": GradScaler("cpu")}
    job = Job(tmp_path, schedule=cosine, batch=2 * before // after, steps=0, options=options)
    first, second = job.on(after), job.on(after)
    finished = job.but(steps=None).on(after)

    consumed = 3 * 2 * before
    for story in first:
        assert story.plan == first[0].plan
        assert (story.plan.cursor, story.plan.samples_repeated, story.plan.step) == ("dropped", consumed, 3)
        assert story.plan.reason == f"workers {before} -> {after}; batch size 2 -> {2 * before // after}"
        assert without_draws(story.restored) == without_draws(saved[0].left) | {"state": story.restored["state"]}
        assert story.restored["moments"][0]["exp_avg"] != 0 and story.restored["scaler"]["scale"] == 64
        state = story.restored["state"]
        assert (state.epoch, state.iter_in_epoch, state.global_step, state.samples_seen) == (0, 0, 3, consumed)
    told = [line for story in first for line in story.lines if "cursor=dropped" in line]
    assert len(told) == 1 and f"samples_repeated={consumed}" in told[0]
    assert not said(told, "global batch")

    restored, again = ([story.restored["draws"] for story in stories] for stories in (first, second))
    assert restored == again
    assert restored[:before] == [story.left["draws"] for story in saved][:after]
    every = [tuple(draws) for draws in restored + [story.left["draws"] for story in saved]]
    assert len(set(every)) == max(before, after)

    runs = [story.ids[0] for story in finished]
    assert set().union(*runs) == ALL and sum(map(len, runs)) == len(ALL)
    assert {story.state.global_step for story in finished} == {3 + 40 // (2 * before)}
    assert {story.state.samples_seen for story in finished} == {consumed + 40}
    assert steps_kept(tmp_path) == [3, 3 + 40 // (2 * before)]


def test_a_changed_global_batch_is_told_once_with_both_numbers(tmp_path):
    Job(tmp_path, steps=2).on(2)
    stories = Job(tmp_path, steps=0).on(4)
    lines = [line for story in stories for line in story.lines]
    assert said(lines, "global batch 4 -> 8") == said(lines, "cursor=dropped") == 1


def test_ranks_that_come_back_later_get_other_streams_than_before(tmp_path):
    Job(tmp_path, steps=1).alone()
    first = [story.restored["draws"] for story in Job(tmp_path, steps=1).on(3)]
    Job(tmp_path, steps=1).alone()
    later = [story.restored["draws"] for story in Job(tmp_path, steps=0).on(3)]
    fresh = [story.restored["draws"] for story in Job(tmp_path / "other", steps=0).on(3)]
    assert len({tuple(draws) for draws in [*first, *later, *fresh]}) == 9


def test_derived_streams_depend_on_seed_rank_and_generation_alone():
    def stream(*numbers):
        rng.derive(*numbers)
        return tuple(torch.rand(4).tolist())

    numbers = [(seed, rank, generation) for seed in (0, 1, 2**40) for rank in range(6) for generation in range(4)]
    assert len({stream(*three) for three in numbers}) == len(numbers)
    assert stream(1, 2, 3) == stream(1, 2, 3)


def test_reseeding_gives_every_rank_a_new_stream_and_keeps_the_position(tmp_path):
    saved = Job(tmp_path, steps=2).on(2)
    job = Job(tmp_path, steps=0, options={"elastic": ElasticPolicy(rng="reseed")})
    first, second = job.on(2), job.on(2)
    assert [story.restored["draws"] for story in first] == [story.restored["draws"] for story in second]
    assert len({tuple(s.restored["draws"]) for s in first} | {tuple(s.left["draws"]) for s in saved}) == 4
    assert {(story.plan.cursor, story.plan.rng, story.plan.exact) for story in first} == {("kept", "reseeded", False)}
    rest = job.but(steps=None).on(2)
    ids = [old.ids[0] + new.ids[0] for old, new in zip(saved, rest, strict=True)]
    assert sorted(ids[0] + ids[1]) == sorted(ALL)


def test_cursor_fail_stops_every_rank_before_anything_changes(tmp_path):
    Job(tmp_path, steps=2).on(2)
    outcomes = try_ranks(3, Job(tmp_path, options={"elastic": ElasticPolicy(cursor="fail")}))
    assert [outcome.kind for outcome in outcomes] == ["WorldSizeError"] * 3
    assert len(folders(tmp_path)) == 1


def test_ten_resizes_within_one_epoch_still_get_through_the_data(tmp_path):
    seen, orders, step = set(), [], 0
    for attempt in range(11):
        world = 2 - attempt % 2
        stories = Job(tmp_path, steps=4, batch=4 // world).on(world)
        ids = [story.ids[0] for story in stories]
        assert len(set().union(*ids)) == sum(map(len, ids)) == 16
        assert stories[0].plan.cursor == ("dropped" if attempt else "start")
        assert stories[0].state.global_step == step + 4
        step += 4
        orders.append(tuple(sorted(set().union(*ids))))
        seen |= set().union(*ids)
    assert len(set(orders)) == len(orders)
    assert seen == ALL
    last = Job(tmp_path, batch=4).alone()
    assert last.plan.cursor == "dropped" and set(last.ids[0]) == ALL
    assert (last.state.epoch, last.state.global_step) == (1, step + 10)


def test_an_order_after_a_drop_survives_an_exact_resume_and_ends_with_its_epoch(tmp_path):
    Job(tmp_path / "a", steps=3).alone()
    twin = Job(tmp_path / "b", steps=3).alone()
    assert twin.plan.source == "fresh"
    whole = Job(tmp_path / "a", batch=4, epochs=2).alone()
    Job(tmp_path / "b", batch=4, steps=4).alone()
    rest = Job(tmp_path / "b", batch=4, epochs=2).alone()
    assert rest.plan.cursor == "kept"
    assert whole.ids[0][16:] == rest.ids[0] and whole.ids[1] == rest.ids[1]
    assert Job(tmp_path / "c", batch=4, epochs=2).alone().ids[1] == rest.ids[1]


def test_each_rank_may_have_data_of_its_own_length(tmp_path):
    def uneven(job, rank, world):
        data = Subset(Numbers(100), range(rank * 50, rank * 50 + (job.samples if rank else 24)))
        return StatefulDataLoader(data, job.batch)

    saved = Job(tmp_path, steps=3, samples=22, loader=uneven).on(2)
    kept = Job(tmp_path, steps=2, samples=22, loader=uneven).on(2)
    assert [story.plan.cursor for story in kept] == ["kept", "kept"] and kept[0].plan.exact
    assert [s.ids[0] + k.ids[0] for s, k in zip(saved, kept, strict=True)] == [[*range(10)], [*range(50, 60)]]
    dropped = Job(tmp_path, steps=0, samples=23, loader=uneven).on(2)
    assert [story.plan.cursor for story in dropped] == ["dropped", "dropped"]
    assert dropped[0].plan.reason == "dataset length 22 -> 23"


# Another loader


@pytest.mark.parametrize(
    "change, named",
    [
        ({"workers": 0}, "loader workers 2 -> 0"),
        ({"workers": 4}, "loader workers 2 -> 4"),
        ({"batch": 4}, "batch size 2 -> 4"),
        ({"samples": 41}, "dataset length 40 -> 41"),
        ({"shuffle_seed": 5}, "seed=5"),
        ({"shuffle": False}, "shuffle=False"),
    ],
)
def test_a_changed_loader_property_is_named_and_only_the_position_is_lost(tmp_path, change, named):
    job = Job(tmp_path, steps=3, workers=2, schedule=cosine)
    saved = job.alone()
    story = job.but(**change, steps=None).alone()
    assert said(story.lines, "cursor=dropped", named, "samples_repeated=6") == 1
    assert story.plan.cursor == "dropped" and named in story.plan.reason and ";" not in story.plan.reason
    position = {"state": story.restored["state"]}
    assert story.restored == saved.left | position
    assert (position["state"].global_step, position["state"].samples_seen) == (3, 6)
    assert sorted(story.ids[0]) == list(range(change.get("samples", 40)))


def generator_only(job, rank, world):
    data = Numbers(job.samples)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(job.shuffle_seed))
    return StatefulDataLoader(data, job.batch, sampler=sampler)


class Backwards:
    """A sampler with neither set_epoch() nor a generator."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(range(len(self.data) - 1, -1, -1))

    def __len__(self):
        return len(self.data)


def fixed(job, rank, world):
    return StatefulDataLoader(Numbers(40), job.batch, sampler=Backwards(Numbers(40)), generator=torch.Generator())


def unshuffled(job, rank, world):
    return distributed(job.but(shuffle=False), rank, world)


def plain(job, rank, world):
    return DataLoader(Numbers(40), job.batch, shuffle=True)


def test_a_sampler_with_a_generator_is_reseeded_after_a_drop_the_same_in_each_resume(tmp_path):
    saved = Job(tmp_path, steps=3, loader=generator_only).alone()
    job = Job(tmp_path, batch=4, steps=5, loader=generator_only)
    first = job.but(steps=5, save=False).alone().ids[0]
    second = job.alone().ids[0]
    assert first == second and first[:6] != saved.ids[0]
    assert len(set(first)) == 20
    third = job.but(batch=2, steps=10).alone().ids[0]
    assert third[:20] != first and len(set(third)) == 20
    assert said(job.but(batch=8, steps=1).alone().lines, "same order") == 0


@pytest.mark.parametrize("loader", [fixed, unshuffled])
def test_a_sampler_that_cannot_be_given_another_order_keeps_its_own_and_says_so(tmp_path, loader):
    saved = Job(tmp_path, steps=3, loader=loader).alone()
    story = Job(tmp_path, steps=3, batch=4, loader=loader).alone()
    assert story.ids[0][:6] == saved.ids[0]
    assert said(story.lines, "epoch 0 restarts in the same order") == 1
    assert said(saved.lines, "same order") == 0


def test_a_plain_loader_restarts_its_epoch_in_another_order_and_says_why_at_the_save(tmp_path):
    saved = Job(tmp_path, steps=3, loader=plain).alone()
    assert said(saved.lines, "DataLoader cannot tell its position") == 1
    story = Job(tmp_path, loader=plain).alone()
    assert said(story.lines, "cursor=dropped", "samples_repeated=6", "cannot restore its position") == 1
    assert sorted(story.ids[0]) == sorted(ALL) and story.ids[0][:6] != saved.ids[0]


def test_cursor_fail_refuses_a_save_whose_position_could_not_be_kept(tmp_path):
    with pytest.raises(errors.DataChanged, match="StatefulDataLoader"):
        Job(tmp_path, steps=3, loader=plain, options={"elastic": ElasticPolicy(cursor="fail")}).alone()
    assert folders(tmp_path) == []
    Job(tmp_path, loader=plain, options={"elastic": ElasticPolicy(cursor="fail")}).alone()
    assert steps_kept(tmp_path) == [20]


def test_a_batch_sampler_counts_and_restarts_too(tmp_path):
    def batched(job, rank, world):
        sampler = DistributedSampler(Numbers(40), num_replicas=world, rank=rank, seed=1)
        return StatefulDataLoader(Numbers(40), batch_sampler=BatchSampler(sampler, job.batch, drop_last=False))

    Job(tmp_path, steps=3, loader=batched).alone()
    kept = Job(tmp_path, steps=2, loader=batched).alone()
    assert kept.plan.cursor == "kept" and kept.state.samples_seen == 10
    dropped = Job(tmp_path, steps=2, loader=batched).on(2)
    assert dropped[0].plan.samples_repeated == 10 and dropped[0].plan.reason == "workers 1 -> 2"


# Schedules after a dropped cursor

SCHEDULES = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "OneCycleLR in three phases": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=20, pct_start=0.2, three_phase=True
    ),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.01),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=20, power=1.5),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=15),
        ],
        milestones=[5],
    ),
}
DROP = {choice: {"elastic": ElasticPolicy(cursor="drop", schedule=choice)} for choice in ("hold", "extend")}


def planned(make, steps=20):
    """The rates of a run that nothing interrupts."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_held_schedules_follow_their_plan_and_then_keep_its_last_rate(tmp_path, name):
    make = SCHEDULES[name]
    plan = planned(make, 19 if "OneCycle" in name else 20)
    stories = [
        Job(tmp_path, steps=12, schedule=make).alone(),
        Job(tmp_path, steps=5, schedule=make, options=DROP["hold"]).alone(),  # the epoch starts anew: 20 more steps
        Job(tmp_path, steps=7, schedule=make).alone(),  # resumed again, exactly; runs past the horizon
        Job(tmp_path, schedule=make).alone(),
    ]
    assert [story.plan.schedule for story in stories] == ["kept", "hold", "kept", "kept"]
    assert [story.plan.cursor for story in stories] == ["start", "dropped", "kept", "kept"]
    rates = [rate for story in stories for rate in story.rates]
    assert rates == pytest.approx(plan + [plan[-1]] * (32 - len(plan)), abs=1e-12)
    assert [said(story.lines, "held at its end") for story in stories] == [0, 0, 1, 1]
    assert stories[-1].state.global_step == 32


@pytest.mark.parametrize("name", SCHEDULES)
def test_extended_schedules_go_on_without_a_jump_and_end_where_planned(tmp_path, name):
    make = SCHEDULES[name]
    plan = planned(make, 19 if "OneCycle" in name else 20)
    stories = [
        Job(tmp_path, steps=12, schedule=make).alone(),
        Job(tmp_path, steps=9, schedule=make, options=DROP["extend"]).alone(),
        Job(tmp_path, steps=5, schedule=make, options=DROP["extend"]).alone(),  # 12 + 9 replayed: 41 steps in all
        Job(tmp_path, schedule=make, options={"elastic": ElasticPolicy(schedule="extend")}).alone(),
    ]
    assert [story.plan.schedule for story in stories] == ["kept", "extend", "extend", "kept"]
    rates = [rate for story in stories for rate in story.rates]
    assert len(rates) == 41 and rates[:12] == pytest.approx(plan[:12], abs=1e-12)
    after = rates[11:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert rates[-1] == pytest.approx(plan[-1], abs=1e-9)
    end = len(plan) + 21
    assert rates[end - 1] == pytest.approx(plan[-1], abs=1e-9)
    assert rates[end - 2] > plan[-1] + 1e-6, "the horizon lies where the replayed steps put it"
    assert sum(said(story.lines, "held at its end") for story in stories) == (41 > end)


@pytest.mark.parametrize("at", [4, 12])
def test_an_extended_warm_up_reaches_the_planned_rate_and_no_more(tmp_path, at):
    def warm_up(optimizer):
        return lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)

    Job(tmp_path, steps=at, schedule=warm_up).alone()
    story = Job(tmp_path, schedule=warm_up, options=DROP["extend"]).alone()
    rates = story.rates
    assert all(later >= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[-1] == pytest.approx(1.0) and max(rates) == pytest.approx(1.0)
    assert rates[0] < 1.0 if at == 4 else rates[0] == pytest.approx(1.0)


def test_a_one_cycle_that_is_still_rising_when_extended_peaks_as_planned(tmp_path):
    make = SCHEDULES["OneCycleLR"]
    Job(tmp_path, steps=3, schedule=make).alone()
    rates = Job(tmp_path, schedule=make, options=DROP["extend"]).alone().rates
    assert rates[:2] == pytest.approx(planned(make)[3:5]) and max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(planned(make, 19)[-1], abs=1e-9) and len(rates) == 20


def test_a_one_cycle_s_momentum_does_not_jump_when_extended():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20)
    for _ in range(12):
        optimizer.step()
        scheduler.step()
    before = dict(optimizer.param_groups[0])
    schedule.extend(scheduler, 100)
    scheduler.step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(before["momentum"], abs=2e-3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(before["lr"], abs=2e-2)


def lambda_rate(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_extending_a_schedule_without_a_horizon_is_an_error_before_anything_changes(tmp_path):
    Job(tmp_path, steps=3, schedule=lambda_rate).alone()
    untouched = Job(tmp_path / "fresh", steps=0, schedule=lambda_rate).alone().restored

    model = {}

    def remember(optimizer):
        model["optimizer"] = optimizer
        return lambda_rate(optimizer)

    with pytest.raises(errors.PimmRayError, match=r"cannot extend a LambdaLR.*schedule='hold'"):
        Job(tmp_path, schedule=remember, options=DROP["extend"]).alone()
    optimizer = model["optimizer"]
    assert not optimizer.state
    assert [p.tolist() for p in optimizer.param_groups[0]["params"]] == untouched["weights"]
    story = Job(tmp_path, steps=0, schedule=lambda_rate, options=DROP["hold"]).alone()
    assert said(story.lines, "LambdaLR has no known horizon") == 1
    assert Job(tmp_path, steps=0, schedule=lambda_rate, options={"elastic": ElasticPolicy(schedule="extend")}).alone()


@pytest.mark.parametrize("choice", ["hold", "extend"])
def test_a_schedule_stepped_once_an_epoch_keeps_its_horizon(tmp_path, choice):
    def by_epoch(optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

    job = Job(tmp_path, epochs=4, schedule=by_epoch, schedule_per_epoch=True)
    job.but(steps=25).alone()
    story = job.but(options=DROP[choice]).alone()
    assert story.plan.epoch == 1 and story.plan.schedule == choice
    assert story.left["schedule"]["T_max"] == 4 and story.left["schedule"]["last_epoch"] == 4
    whole = job.but(folder=tmp_path / "twin").alone()
    assert story.left["rate"] == pytest.approx(whole.left["rate"], abs=1e-12)


def test_a_guarded_schedule_still_has_a_plain_state():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = SCHEDULES["OneCycleLR"](optimizer)
    keys = set(scheduler.state_dict())
    schedule.hold(scheduler, say=True)
    assert set(scheduler.state_dict()) == keys and type(scheduler).__name__ == "OneCycleLR"
    assert isinstance(scheduler, lr_scheduler.OneCycleLR)
