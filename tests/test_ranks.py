"""Ranks agree through rank 0, fail together, and name the one that is missing."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pimm_ray import CheckpointManager, SavePolicy
from pimm_ray.checkpoint import folder as folder_module
from pimm_ray.checkpoint.store import LocalStore
from pimm_ray.errors import (
    CorruptCheckpoint,
    PimmRayError,
    RankMissing,
    RemoteRankError,
    StateMismatch,
    StorageError,
)
from pimm_ray.runtime import ranks as module
from pimm_ray.runtime.ranks import Ranks
from tests.ranks import die, run_ranks, try_ranks


def error_of(call, *args) -> Exception:
    with pytest.raises(Exception) as caught:
        call(*args)
    return caught.value


def everyday(rank, world):
    ranks = Ranks(timeout=20)
    assert (ranks.rank, ranks.world_size, ranks.local_rank) == (rank, world, rank)
    assert ranks.gather("names", {"rank": rank, "text": "ü"}) == [{"rank": i, "text": "ü"} for i in range(world)]
    assert ranks.broadcast("seed", rank + 40) == 40
    assert ranks.exchange("sum", rank, sum) == sum(range(world))
    assert ranks.agree("double", lambda: 2 * rank, sum) == 2 * sum(range(world))
    assert ranks.agree("all", lambda: rank) == list(range(world))
    assert ranks.each("own", lambda: object) is object, "what each returns need not be JSON"
    ranks.signal(3 if rank == 0 else 9)
    assert ranks.gather("in between", rank) == list(range(world))
    assert ranks.collect_signal() == 3
    assert ranks.collect_signal() == 0, "a signal is collected once"
    return True


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_kind_of_agreement_gives_each_rank_its_answer(world):
    assert run_ranks(world, everyday, world) == [True] * world


def large(rank, size):
    ranks = Ranks(timeout=30)
    back = ranks.gather("large", chr(97 + rank) * size)
    return [text == chr(97 + i) * size for i, text in enumerate(back)]


@pytest.mark.parametrize(
    "size", [4096 - 8 - len('{"what": "large", "value": ""}') + i for i in (-1, 0, 1)] + [3_000_000]
)
def test_messages_of_every_size_arrive_whole(size):
    assert run_ranks(3, large, size) == [[True] * 3] * 3


def fails_on(rank, who, where):
    ranks = Ranks(timeout=20)

    def work():
        if rank in who:
            raise StateMismatch(f"{rank} does not fit", missing=["a", "b"], shapes={"w": ((1, 2), (3,))})
        return {}

    def on_zero(_):
        raise CorruptCheckpoint("torn", file="state.json", expected=3, found=None)

    error = error_of(ranks.agree, "try", work, on_zero) if where == "work" else error_of(
        ranks.exchange, "try", 0, on_zero
    )  # fmt: skip
    assert ranks.gather("after", rank) == [0, 1, 2], "the group still works"
    return type(error).__name__, str(error), vars(error)


@pytest.mark.parametrize("who", [[0], [2], [1, 2]])
def test_an_error_of_one_rank_is_raised_on_all_with_its_class_its_fields_and_its_rank(who):
    for rank, (kind, text, held) in enumerate(run_ranks(3, fails_on, who, "work")):
        assert kind == "StateMismatch"
        assert text == (f"{rank} does not fit" if rank in who else f"rank {who[0]}: {who[0]} does not fit")
        assert held.get("rank") == (None if rank in who else who[0])
        assert held["missing"] == ["a", "b"] and [list(map(list, s)) for s in held["shapes"].values()] == [
            [[1, 2], [3]]
        ]


def test_an_error_in_the_answer_is_raised_on_all_with_its_fields():
    fields = {"file": "state.json", "kind": "format", "expected": 3, "found": None}
    for rank, (kind, text, held) in enumerate(run_ranks(3, fails_on, [], "answer")):
        held.pop("rank", None)
        assert (kind, held) == ("CorruptCheckpoint", fields)
        assert text == ("torn" if rank == 0 else "rank 0: torn")


class Strange(Exception):
    """Of a user: its fields cannot be sent."""

    def __init__(self):
        super().__init__("strange")
        self.table = {(1, 2): "x"}
        self.itself = [self.table]
        self.itself.append(self.itself)


def fails_strangely(rank):
    ranks = Ranks(timeout=20)

    def work():
        if rank == 1:
            raise Strange

    errors = error_of(ranks.agree, "strange", work), error_of(ranks.agree, "open", lambda: open(f"/nowhere/{rank}"))
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_an_error_that_is_not_ours_arrives_as_text_and_stays_itself_where_it_was_raised():
    outcomes = run_ranks(3, fails_strangely)
    assert [first for first, _ in outcomes] == [
        "RemoteRankError: rank 1: Strange: strange",
        "Strange: strange",
        "RemoteRankError: rank 1: Strange: strange",
    ]
    for rank, (_, second) in enumerate(outcomes):
        assert second == f"FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/{rank}'"


def test_what_other_ranks_raise_is_one_of_our_errors():
    assert issubclass(RemoteRankError, PimmRayError) and issubclass(RankMissing, PimmRayError)
    assert issubclass(StorageError, OSError)


def skips(rank, absent, how, limit):
    module._GRACE = 0.5
    ranks = Ranks(timeout=limit)
    ranks.gather("together", rank)
    if rank == absent:
        if how == "killed":
            die()
        if how == "elsewhere":
            return describe(error_of(ranks.gather, "finish", rank))
        time.sleep(2 * limit + 3)
        return training_goes_on()
    started = time.monotonic()
    error = error_of(ranks.gather, "save at step 7", rank)
    assert time.monotonic() - started < 2 * limit + 2
    if how == "skips":
        assert training_goes_on() == 3
    return describe(error)


def training_goes_on() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def describe(error):
    return type(error).__name__, getattr(error, "ranks", None), str(error)


def test_a_rank_that_skips_is_named_on_all_others_within_the_limit():
    first, _, third = run_ranks(3, skips, 1, "skips", 1.5)
    for kind, ranks, text in (first, third):
        assert (kind, ranks) == ("RankMissing", [1])
        assert "save at step 7: rank 1 did not come within 1.5 s" in text
        assert "equally often" in text


def test_a_rank_that_was_killed_is_named_at_once_and_not_after_the_limit():
    outcomes = try_ranks(3, skips, 2, "killed", 30)
    assert outcomes[2].killed
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        kind, ranks, text = outcome.value
        assert (kind, ranks) == ("RankMissing", [2])
        assert "save at step 7: rank 2 is gone" in text


def comes_after_the_end_of(rank, victim):
    ranks = Ranks(timeout=30)
    ranks.gather("together", rank)
    if rank == victim:
        die()
    time.sleep(1)
    return [describe(error_of(ranks.gather, f"save at step {step}", rank)) for step in (7, 8)]


def test_a_rank_that_was_gone_before_is_named_again_and_again():
    outcomes = try_ranks(2, comes_after_the_end_of, 1)
    assert outcomes[0].error is None, outcomes[0].error
    for step, (kind, ranks, text) in zip((7, 8), outcomes[0].value, strict=True):
        assert (kind, ranks) == ("RankMissing", [1]) and f"save at step {step}: rank 1 is gone" in text


def signals(rank, victim, how):
    ranks = Ranks(timeout=1.5)
    for value in (3, 0, 5):
        ranks.signal(value)
        assert ranks.collect_signal() == value
    if rank == victim:
        if how == "killed":
            die()
        time.sleep(4)
        return None
    time.sleep(0.5)
    ranks.signal(1)
    return describe(error_of(ranks.collect_signal))


@pytest.mark.parametrize("how, said", [("killed", "is gone"), ("late", "did not come within 1.5 s")])
def test_a_rank_that_does_not_take_the_signal_is_named_by_rank_zero(how, said):
    outcomes = try_ranks(3, signals, 2, how)
    assert outcomes[0].error is None, outcomes[0].error
    kind, ranks, text = outcomes[0].value
    assert (kind, ranks) == ("RankMissing", [2]) and f"step: rank 2 {said}" in text


def test_when_rank_zero_skips_the_others_name_it():
    _, second, third = run_ranks(3, skips, 0, "skips", 1)
    for kind, ranks, text in (second, third):
        assert (kind, ranks) == ("RankMissing", [0])
        assert "save at step 7: rank 0 did not come" in text


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_at_another_point_of_the_program_is_named_with_both_points(absent):
    for rank, (kind, ranks, text) in enumerate(run_ranks(3, skips, absent, "elsewhere", 5)):
        assert kind == "RankMissing", rank
        if absent == 2:
            assert ranks == [2] and "save at step 7: rank 2 is at 'finish' instead" in text
        else:
            assert ranks == [1, 2] and "finish: rank 1 is at 'save at step 7' instead; rank 2 is" in text


def test_ranks_without_a_group_are_told_to_make_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PimmRayError, match="init_process_group"):
        Ranks(timeout=1)


def slow_save(rank, folder, rendezvous):
    dist.destroy_process_group()
    limit = timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=limit)
    model = torch.nn.Linear(3, 3)
    manager = CheckpointManager(model=model, storage=folder, save=SavePolicy(timeout_seconds=30))
    manager.resume()
    if rank == 0:
        write = LocalStore.write

        def slow(store, name, chunks):
            if name == "weights/model-00001-of-00002.safetensors":
                time.sleep(5)
            return write(store, name, chunks)

        LocalStore.write = slow
    info = manager.save()
    return info.step, training_goes_on()


def test_a_save_slower_than_the_process_groups_own_limit_completes_and_training_goes_on(tmp_path):
    assert run_ranks(2, slow_save, tmp_path / "run", tmp_path / "rendezvous") == [(0, 2.0)] * 2


def endless_save(rank, folder):
    manager = CheckpointManager(model=torch.nn.Linear(3, 3), storage=folder, save=SavePolicy(timeout_seconds=1.5))
    manager.resume()
    if rank == 1:
        folder_module.write_shard = lambda *_, **__: [time.sleep(5), die()]
    started = time.monotonic()
    error = error_of(manager.save)
    return describe(error), time.monotonic() - started


def test_a_write_that_does_not_end_is_ended_by_our_own_limit_which_names_the_save(tmp_path):
    first, _, third = try_ranks(3, endless_save, tmp_path / "run")
    for outcome in (first, third):
        assert outcome.error is None, outcome.error
        (kind, ranks, text), seconds = outcome.value
        assert (kind, ranks) == ("RankMissing", [1]) and seconds < 4
        assert "commit of the save at step 0: rank 1 did not come within 1.5 s" in text


def slow(rank, seconds):
    module._HEARTBEAT = 0.2
    ranks = Ranks(timeout=1)

    def work():
        time.sleep(seconds[rank])
        return rank

    return ranks.patiently("download", work)


def test_work_may_take_longer_than_the_limit_on_any_rank():
    assert run_ranks(3, slow, [0, 3, 1]) == [0, 1, 2]


def fails_meanwhile(rank, who):
    module._HEARTBEAT = 0.2
    ranks = Ranks(timeout=5)

    def work():
        if rank == who:
            raise CorruptCheckpoint("cut short", file="model.safetensors")
        time.sleep(60)

    started = time.monotonic()
    error = error_of(ranks.patiently, "download", work)
    return type(error), error.file, time.monotonic() - started < 10, ranks.gather("after", rank)


@pytest.mark.parametrize("who", [0, 1])
def test_no_rank_waits_for_the_rest_of_work_that_has_failed_on_one(who):
    assert run_ranks(2, fails_meanwhile, who) == [(CorruptCheckpoint, "model.safetensors", True, [0, 1])] * 2


def dies_meanwhile(rank):
    module._HEARTBEAT = 0.2
    ranks = Ranks(timeout=60)
    if rank == 1:
        die()
    return error_of(ranks.patiently, "download", lambda: time.sleep(60)).ranks


def test_a_rank_that_dies_meanwhile_is_named_at_once():
    survivor, dead = try_ranks(2, dies_meanwhile, timeout=30)
    assert survivor.value == [1] and dead.killed
