"""What a resume decides, and what the policies accept: tables, no processes."""

import math

import pytest

from pimm_ray import ElasticPolicy, KeepPolicy, Position, ResumePlan, RunShape, SavePolicy, errors, plan_resume
from pimm_ray.progress import Progress

SAVED = RunShape(
    world_size=4, loader_workers=2, global_batch=8, micro_batch=2, dataset_size=40, order_id="order(seed=0)", seed=3
)
MIDDLE = Position(epoch=1, samples=24, window=3)
START = Position(epoch=2)


def shape(**changes):
    return RunShape(**{**vars(SAVED), **changes})


CHANGES = {
    "world shrinks": (shape(world_size=2), "workers 4 -> 2"),
    "world grows": (shape(world_size=6), "workers 4 -> 6"),
    "fewer loader workers": (shape(loader_workers=0), "loader workers 2 -> 0"),
    "more loader workers": (shape(loader_workers=4), "loader workers 2 -> 4"),
    "batch size": (shape(micro_batch=4, global_batch=16), "batch size 2 -> 4"),
    "data set longer by one": (shape(dataset_size=41), "dataset length 40 -> 41"),
    "shuffle seed": (shape(order_id="order(seed=1)"), "order order(seed=0) -> order(seed=1)"),
}
change = pytest.mark.parametrize("now, named", CHANGES.values(), ids=CHANGES.keys())


def test_an_unchanged_run_keeps_everything_and_is_exact():
    plan = plan_resume(SAVED, SAVED, ElasticPolicy(), MIDDLE)
    assert (plan.cursor, plan.exact, plan.samples_repeated, plan.reason) == ("kept", True, 0, "")
    assert (plan.epoch, plan.rng, plan.schedule, plan.notes) == (1, "restored", "kept", ())


@change
def test_each_change_drops_the_cursor_and_is_named(now, named):
    plan = plan_resume(SAVED, now, ElasticPolicy(), MIDDLE)
    assert (plan.cursor, plan.exact, plan.samples_repeated, plan.epoch) == ("dropped", False, 24, 1)
    assert plan.reason == named
    assert plan.rng.startswith("restored") and plan.schedule == "hold"


@change
def test_at_the_start_of_an_epoch_there_is_no_position_to_lose(now, named):
    plan = plan_resume(SAVED, now, ElasticPolicy(cursor="fail"), START)
    assert (plan.cursor, plan.samples_repeated, plan.schedule, plan.epoch) == ("start", 0, "kept", 2)
    assert plan.reason == named and not plan.exact


@change
def test_cursor_fail_raises_what_fits_the_change(now, named):
    kind = errors.WorldSizeError if named.startswith("workers") else errors.DataChanged
    with pytest.raises(kind) as caught:
        plan_resume(SAVED, now, ElasticPolicy(cursor="fail"), MIDDLE)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, errors.PimmRayError)
    assert named in str(caught.value) and "cursor='auto'" in str(caught.value)


def test_cursor_fail_lets_an_unchanged_run_go_on():
    assert plan_resume(SAVED, SAVED, ElasticPolicy(cursor="fail"), MIDDLE).cursor == "kept"


def test_several_changes_are_all_named():
    now = shape(world_size=2, loader_workers=1, dataset_size=39)
    reason = plan_resume(SAVED, now, ElasticPolicy(), MIDDLE).reason
    assert reason == "workers 4 -> 2; loader workers 2 -> 1; dataset length 40 -> 39"


@pytest.mark.parametrize("saved, now", [(None, "x"), ("x", None), (None, None)])
def test_a_loader_that_cannot_tell_its_position_restarts_the_epoch(saved, now):
    plan = plan_resume(shape(order_id=saved), shape(order_id=now), ElasticPolicy(), MIDDLE)
    assert plan.cursor == "dropped" and plan.reason
    with pytest.raises(errors.DataChanged):
        plan_resume(shape(order_id=saved), shape(order_id=now), ElasticPolicy(cursor="fail"), MIDDLE)
    assert plan_resume(shape(order_id=None), shape(order_id=None), ElasticPolicy(), START).exact


def test_cursor_drop_drops_also_what_could_be_kept_and_still_names_changes():
    assert plan_resume(SAVED, SAVED, ElasticPolicy(cursor="drop"), MIDDLE).cursor == "dropped"
    reason = plan_resume(SAVED, shape(world_size=2), ElasticPolicy(cursor="drop"), MIDDLE).reason
    assert "workers 4 -> 2" in reason and "cursor='drop'" in reason
    assert plan_resume(SAVED, SAVED, ElasticPolicy(cursor="drop"), START).cursor == "start"


@pytest.mark.parametrize(
    "now, expected",
    [
        (shape(world_size=2, global_batch=4), True),
        (shape(world_size=2, micro_batch=4, global_batch=8), False),
        (shape(global_batch=None), False),
    ],
)
def test_another_global_batch_is_said_with_both_numbers(now, expected):
    for position in (MIDDLE, START):
        notes = plan_resume(SAVED, now, ElasticPolicy(), position).notes
        assert bool(notes) == expected
        assert not expected or "global batch 8 -> 4" in notes[0]


def test_the_manager_s_own_seed_is_no_part_of_the_data_order():
    assert plan_resume(SAVED, shape(seed=99), ElasticPolicy(), MIDDLE).exact


def test_new_ranks_and_reseeding_are_told():
    assert plan_resume(SAVED, shape(world_size=6), ElasticPolicy(), START).rng == "restored,new-ranks-4-to-5-derived"
    assert plan_resume(SAVED, shape(world_size=2), ElasticPolicy(), START).rng == "restored"
    plan = plan_resume(SAVED, SAVED, ElasticPolicy(rng="reseed"), MIDDLE)
    assert (plan.rng, plan.cursor, plan.exact) == ("reseeded", "kept", False)


@pytest.mark.parametrize("choice", ["hold", "extend"])
def test_the_schedule_is_mended_only_after_a_dropped_cursor(choice):
    policy = ElasticPolicy(schedule=choice)
    assert plan_resume(SAVED, shape(world_size=2), policy, MIDDLE).schedule == choice
    assert plan_resume(SAVED, SAVED, policy, MIDDLE).schedule == "kept"
    assert plan_resume(SAVED, shape(world_size=2), policy, START).schedule == "kept"


def test_explain_is_one_line_that_says_all():
    dropped = plan_resume(SAVED, shape(world_size=2, global_batch=4), ElasticPolicy(), MIDDLE)
    line = dropped.explain()
    for part in ("cursor=dropped", 'reason="workers 4 -> 2"', "samples_repeated=24", "rng=restored", "schedule=hold"):
        assert part in line.replace("\n", "")
    assert "exact=no" in line and 'note="global batch 8 -> 4' in line and "epoch=1" in line
    assert "samples_repeated" not in plan_resume(SAVED, SAVED, ElasticPolicy(), MIDDLE).explain()
    assert "accumulate=4" in ResumePlan(accumulate=4).explain()
    plan = ResumePlan(source="a", reason="b\nc", notes=("d\ne", "f\r\ng"))
    assert len(plan.explain().splitlines()) == 1 and plan.explain().count("note=") == 2


@pytest.mark.parametrize("field", ["cursor", "rng", "schedule"])
def test_an_elastic_policy_names_what_it_accepts(field):
    with pytest.raises(ValueError, match=rf"ElasticPolicy\({field}='maybe'\): use one of \w+, \w+"):
        ElasticPolicy(**{field: "maybe"})


# Progress


def walked(batches, *, accumulate=1, steps=None, samples=2):
    progress = Progress()
    for index in range(batches if steps is None else steps * accumulate):
        progress.hand_over(samples, last=index + 1 == batches)
        if (index + 1) % accumulate == 0:
            progress.commit()
    return progress


def test_a_position_counts_finished_steps_only():
    progress = walked(10, steps=3)
    progress.hand_over(2, last=False)
    assert (progress.step, progress.window, progress.batches, progress.open_batches) == (3, 3, 3, 1)
    assert progress.position(progress.own_epoch_samples) == Position(epoch=0, samples=6, window=3)
    assert progress.state(6).iter_in_epoch == 3


def test_a_window_of_several_micro_batches_is_one_step():
    progress = walked(10, accumulate=4, steps=2)
    assert (progress.step, progress.window, progress.batches, progress.own_epoch_samples) == (2, 2, 8, 16)


def test_after_an_epoch_s_last_batch_comes_the_start_of_the_next():
    progress = walked(5)
    assert progress.position(10) == Position(epoch=1, samples=0, window=0)
    assert (progress.state(10).epoch, progress.state(10).iter_in_epoch, progress.state(10).samples_seen) == (1, 0, 10)
    progress.drops = 2
    progress.end_epoch()
    assert progress.position(0) == Position(epoch=1) and progress.state(0).global_step == 5
    assert progress.drops == progress.own_epoch_samples == 0 and progress.own_total_samples == 10


def test_sums_over_ranks_replace_what_each_counted():
    progress = walked(10, steps=3)
    progress.absorb(24, 24)
    assert progress.position(0).samples == 24 and progress.state(0).samples_seen == 24
    progress.hand_over(2, last=False)
    progress.commit()
    assert progress.position(8) == Position(epoch=0, samples=32, window=4)


# KeepPolicy


def kept(policy, *checkpoints):
    """Of `(step, metrics)`, oldest first."""
    return sorted(int(name) for name in policy.kept([(str(s), s, metrics) for s, metrics in reversed(checkpoints)]))


SCORES = [(5, {"score": math.nan}), (10, {"score": 0.9}), (15, {"score": 0.5}), (20, {})]


def test_best_and_latest_both_stay_and_a_score_that_is_no_number_ranks_last():
    for mode, best in (("max", 10), ("min", 15)):
        assert kept(KeepPolicy(last=1, best=1, metric="score", mode=mode), *SCORES) == [best, 20]
        assert kept(KeepPolicy(last=1, best=9, metric="score", mode=mode), *SCORES) == [10, 15, 20]
        policy = KeepPolicy(last=1, best=1, metric="score", mode=mode)
        assert policy.score({"score": math.nan}) == policy.score({}) == policy.score({"score": "high"}) == -math.inf
        assert policy.score({"score": 0.5}) > -math.inf


def test_without_any_number_only_the_latest_stay():
    nothing = [(5, {}), (10, {"score": math.nan}), (15, {"other": 1.0})]
    assert kept(KeepPolicy(last=1, best=2, metric="score"), *nothing) == [15]


@pytest.mark.parametrize("mode, best", [("min", [5, 20]), ("max", [10, 15])])
def test_the_best_k_by_a_metric_stay(mode, best):
    scores = [(5, {"m": -3.0}), (10, {"m": 2.0}), (15, {"m": 1.0}), (20, {"m": -1}), (25, {"m": 0.0})]
    assert kept(KeepPolicy(last=1, best=2, metric="m", mode=mode), *scores) == sorted({*best, 25})


def test_the_last_n_stay():
    five = [(step, {}) for step in (5, 10, 15, 20, 25)]
    assert kept(KeepPolicy(last=2), *five) == [20, 25]
    assert kept(KeepPolicy(last=9), *five) == kept(KeepPolicy(last=None), *five) == [5, 10, 15, 20, 25]


def test_snapshots_for_good_stay_beside_the_last():
    ten = [(step, {}) for step in range(5, 55, 5)]
    assert kept(KeepPolicy(last=1, every_steps=20), *ten) == [20, 40, 50]


@pytest.mark.parametrize(
    "policy, settings, named",
    [
        (SavePolicy, {"every_steps": 0}, "every_steps=0"),
        (SavePolicy, {"every_steps": -5}, "every_steps=-5"),
        (SavePolicy, {"every_steps": 2.5}, "every_steps=2.5"),
        (SavePolicy, {"every_steps": True}, "every_steps=True"),
        (SavePolicy, {"every_seconds": "5"}, "every_seconds='5'"),
        (SavePolicy, {"every_seconds": math.nan}, "every_seconds=nan"),
        (SavePolicy, {"timeout_seconds": 0}, "timeout_seconds=0"),
        (SavePolicy, {"timeout_seconds": math.inf}, "timeout_seconds=inf"),
        (SavePolicy, {"timeout_seconds": None}, "timeout_seconds=None"),
        (KeepPolicy, {"last": 0}, "last=0"),
        (KeepPolicy, {"last": 1.5}, "last=1.5"),
        (KeepPolicy, {"every_steps": 0}, "every_steps=0"),
        (KeepPolicy, {"best": -1, "metric": "m"}, "best=-1"),
        (KeepPolicy, {"best": 1.5, "metric": "m"}, "best=1.5"),
        (KeepPolicy, {"best": 1}, "metric="),
        (KeepPolicy, {"mode": "least"}, "mode='least'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(policy, settings, named):
    with pytest.raises(ValueError) as caught:
        policy(**settings)
    assert policy.__name__ in str(caught.value) and named in str(caught.value)


def test_settings_are_keyword_only_and_fixed():
    for policy in (SavePolicy, KeepPolicy, ElasticPolicy):
        with pytest.raises(TypeError):
            policy(1)
        with pytest.raises(AttributeError):
            policy().cursor = "drop"
    assert SavePolicy(every_seconds=0.5).every_steps is None
