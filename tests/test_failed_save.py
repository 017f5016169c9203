"""A save that fails: all ranks hear of it, nothing of it is left, training and the next save go on."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pyarrow.fs import LocalFileSystem
from torch import nn

from pimm_ray import CheckpointManager, KeepPolicy, SavePolicy, errors, find_checkpoint, verify_checkpoint
from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint import store as store_module
from pimm_ray.checkpoint.store import LocalStore
from pimm_ray.runtime import ranks as ranks_module
from tests.elastic_jobs import folders, listening, newest_step, said, steps_kept
from tests.ranks import die, run_ranks, try_ranks


class Watched(LocalStore):
    """A run folder that asks `rule(kind, path)` before each change; the rule may raise, wait or kill."""

    rule: Callable[[str, str], None]

    def __init__(self, folder):
        super().__init__(LocalFileSystem(), str(folder))
        self.rules = [lambda kind, path: None]

    def _event(self, kind, path):
        self.rules[-1](kind, path)

    def obey(self, rule):
        self.rules.append(rule)

    def heal(self):
        del self.rules[1:]


class FailAt:
    """Raises at the change of this number, counted from 0; with `stays`, at each later one too."""

    def __init__(self, number, *, stays=False, code=errno.ENOSPC):
        self.left, self.stays, self.code, self.fired = number, stays, code, 0

    def __call__(self, kind, path):
        self.left -= 1
        if self.left == -1 or (self.stays and self.left < 0):
            self.fired += 1
            raise OSError(self.code, os.strerror(self.code), path)


class Loop:
    """A training loop of one rank, without data."""

    def __init__(self, storage, *, every=None, keep=None, extra=None, **save):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        save = {"timeout_seconds": 30, "at_end": False, **save}
        self.manager = CheckpointManager(
            model=self.model, optimizer=self.optimizer, storage=storage, extra=extra,
            save=SavePolicy(every_steps=every, **save), keep=keep or KeepPolicy(),
        )  # fmt: skip
        self.manager.resume()

    def train(self, steps=1, **metrics):
        for _ in range(steps):
            self.model(torch.ones(1, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.manager.step(**metrics)


def error_of(call, *args, **settings):
    """What a call raises, and after how many seconds; None when it does not."""
    start = time.monotonic()
    try:
        call(*args, **settings)
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def ranks_alive() -> int:
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


# Every change of a save fails once, or from there on


def fails_at_each_change(rank, root, broken, first, stays):
    """What all ranks believed, by the number of the change at which one rank failed."""
    beliefs, loop, run = [], None, None
    for number in itertools.count():
        if first or loop is None:
            run = root / str(number)
            run.mkdir(exist_ok=True)
            store = Watched(run)
            loop = Loop(store, keep=KeepPolicy(last=1))
            if not first:
                loop.manager.save()
        loop.train()
        before = loop.manager._saver.newest
        fault = FailAt(number, stays=stays)
        if rank == broken:
            store.obey(fault)
        error, seconds = error_of(loop.manager.save)
        fired, failed = zip(*loop.manager._runtime.gather("test", [fault.fired, error is not None]), strict=True)
        store.heal()
        if not sum(fired):
            return beliefs
        assert len(set(failed)) == 1, (number, failed)
        assert seconds < 5
        step = loop.manager.state.global_step
        if error is not None:
            assert isinstance(error, errors.StorageError) and "No space left" in str(error), error
            assert (error.rank is None) == (rank == broken)
            assert find_checkpoint(run) == before, number
            if not stays:
                assert steps_kept(run) == ([before.step] if before else []), number
        else:
            assert newest_step(run) == step, number
        assert loop.manager._runtime.gather("looked", ranks_alive()) == [2, 2]
        beliefs.append(error is None)
        assert loop.manager.save().step == step
        loop.train()
        assert loop.manager.save().step == step + 1
        loop.manager._runtime.gather("tidied", None)
        assert steps_kept(run) == [step + 1] and verify_checkpoint(run / folders(run)[0]) == []
        loop.manager._runtime.gather("looked again", None)


@pytest.mark.parametrize(
    ("first", "stays"),
    [(True, False), (False, False), (False, True)],
    ids=["first save, once", "later save, once", "later save, from there on"],
)
@pytest.mark.parametrize("broken", [0, 1])
def test_whichever_change_of_a_save_fails_all_ranks_and_the_next_resume_believe_the_same(
    tmp_path, broken, first, stays
):
    beliefs, again = run_ranks(2, fails_at_each_change, tmp_path, broken, first, stays)
    assert beliefs == again
    failed = beliefs.count(False)
    assert beliefs == [False] * failed + [True] * (len(beliefs) - failed), "after the marker nothing fails a save"
    assert failed >= (25 if broken == 0 else 9)
    assert bool(len(beliefs) - failed) == (broken == 0 and (stays or not first)), "old ones that could not be deleted"


# Real faults


class Grumpy:
    """Its state_dict() raises what it is told."""

    def __init__(self):
        self.error = None

    def state_dict(self):
        if self.error is not None:
            raise self.error
        return {}

    def load_state_dict(self, state):
        pass


def no_space():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def no_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


def no_right():
    os.seteuid(65534)
    return lambda: os.seteuid(0)


def really_fails(rank, folder, broken):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    grumpy = Grumpy()
    loop = Loop(folder, extra={"grumpy": grumpy})
    found = {}

    def in_state_dict(error):
        def start():
            grumpy.error = error
            return lambda: setattr(grumpy, "error", None)

        return start

    faults = {"space": no_space, "files": no_files, "own": in_state_dict(KeyError("mine"))}
    faults |= {"memory": in_state_dict(MemoryError())}
    if os.geteuid() == 0:
        os.chmod(folder.parent, 0o755)
        faults["right"] = no_right
    loop.train()
    for name, fault in faults.items():
        good = loop.manager.save()
        loop.train()
        mend = fault() if rank == broken else None
        error, seconds = error_of(loop.manager.save)
        if mend:
            mend()
        kind = type(error).__name__, str(error), seconds
        alone = find_checkpoint(folder) == good and steps_kept(folder)[-1] == good.step
        found[name] = (*kind, alone, ranks_alive())
    return found, loop.manager.save().step, loop.manager.failed_saves


@pytest.mark.parametrize("broken", [0, 1])
def test_what_really_fails_on_one_rank_is_raised_on_both_within_seconds_and_nothing_is_left(tmp_path, broken):
    said = {
        "space": ("StorageError", "File too large"), "files": ("StorageError", "Too many open files"),
        "right": ("StorageError", "Permission denied"), "own": ("KeyError", "mine"), "memory": ("MemoryError", ""),
    }  # fmt: skip
    for rank, (found, step, failed) in enumerate(run_ranks(2, really_fails, tmp_path / "run", broken)):
        assert len(found) >= 4 and step == len(found) + 1 and failed == 0
        for name, (kind, text, seconds, alone, alive) in found.items():
            expected, words = said[name]
            foreign = rank != broken and expected != "StorageError"
            assert kind == ("RemoteRankError" if foreign else expected), (name, text)
            assert words in text and (rank == broken or text.startswith(f"rank {broken}: "))
            assert seconds < 5 and alone and alive == 2, name


# Training goes on


def warned(rank, folder, broken):
    store = Watched(folder)
    loop = Loop(store, every=2, on_error="warn")
    seen = []
    with listening() as lines:
        loop.train(2)
        if rank == broken:
            store.obey(FailAt(0, stays=True))
        for _ in range(2):
            loop.train(2)
            seen.append(loop.manager.failed_saves)
        by_hand = loop.manager.save(metrics={"score": 3})
        seen.append(loop.manager.failed_saves)
        store.heal()
        loop.train(2)
        seen.append(loop.manager.failed_saves)
    return lines, seen, by_hand, steps_kept(folder), loop.manager._saver.newest.metrics


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failed_save_is_said_counted_and_tried_again_when_the_next_one_is_due(tmp_path, broken):
    outcomes = run_ranks(2, warned, tmp_path, broken)
    for _, seen, by_hand, kept, metrics in outcomes:
        assert seen == [1, 2, 3, 0] and by_hand is None
        assert kept == [2, 8] and metrics == {}
    first, second = ([line for line in lines if " failed (" in line] for lines, *_ in outcomes)
    assert second == [], "one line for all ranks"
    assert len(first) == 3
    name = folders(tmp_path)[0]
    for number, (step, line) in enumerate(zip((4, 6, 6), first, strict=True), start=1):
        assert f"save at step {step} failed ({number} in a row) with StorageError: rank {broken}: cannot " in line
        assert "No space left on device" in line and f"newest checkpoint: {name}, {step - 2} steps ago" in line


def test_the_line_of_a_failed_save_says_when_there_is_no_checkpoint_at_all(tmp_path):
    store = Watched(tmp_path)
    loop = Loop(store, every=1, on_error="warn")
    store.obey(FailAt(0, stays=True))
    with listening() as lines:
        loop.train()
    assert said(lines, "save at step 1 failed (1 in a row)", "rank 0: cannot create", "none of this run") == 1


def test_a_save_due_by_the_clock_is_tried_again_after_the_same_time(tmp_path):
    store = Watched(tmp_path)
    start = time.monotonic()
    loop = Loop(store, every_seconds=0.2, on_error="warn")
    store.obey(FailAt(0, stays=True))
    while loop.manager.failed_saves < 2:
        assert time.monotonic() - start < 10
        loop.train()
    assert time.monotonic() - start >= 0.4
    store.heal()
    while loop.manager.failed_saves:
        loop.train()
    assert newest_step(tmp_path) == loop.manager.state.global_step


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("healed", [True, False])
def test_the_last_save_raises_although_failures_are_only_warned_of(tmp_path, at_end, healed):
    store = Watched(tmp_path)
    loop = Loop(store, every=2, on_error="warn", at_end=at_end)
    store.obey(FailAt(0, stays=True))
    loop.train(2)
    if healed:
        store.heal()
        loop.manager.finish()
        assert newest_step(tmp_path) == 2, "the save that failed was tried once more, even without at_end"
    else:
        with pytest.raises(errors.StorageError, match="No space left"):
            loop.manager.finish()


def dies_in_a_save(rank, folder):
    store = Watched(folder)
    loop = Loop(store, every=1, on_error="warn")
    loop.train()
    if rank == 1:
        store.obey(lambda kind, path: die())
    error, seconds = error_of(loop.train)
    return type(error).__name__, error.ranks, seconds, steps_kept(folder)


def test_a_rank_that_is_gone_ends_the_run_whatever_the_policy_says(tmp_path):
    first, second = try_ranks(2, dies_in_a_save, tmp_path)
    assert second.killed and first.error is None, first.error
    kind, gone, seconds, kept = first.value
    assert (kind, gone) == ("RankMissing", [1]) and seconds < 5
    assert kept == [1], "what the others had written is removed"


def taken_over(rank, folder):
    loop = Loop(folder, every=1, on_error="warn")
    loop.train()

    def gone(*_):
        raise errors.RunInUse("another job took over", path=str(folder))

    loop.manager._runtime.check_claim = gone
    error, _ = error_of(loop.train)
    return type(error).__name__, steps_kept(folder)


def test_a_run_folder_that_another_job_took_over_ends_the_run_whatever_the_policy_says(tmp_path):
    assert run_ranks(2, taken_over, tmp_path) == [("RunInUse", [1])] * 2


def test_saves_that_fail_leave_no_trace_in_the_training(tmp_path):
    twin, loop = Loop(tmp_path / "twin"), None
    twin.train(6)
    expected = [p.clone() for p in twin.model.parameters()], torch.rand(3)
    store = Watched(tmp_path / "run")
    loop = Loop(store, every=1, on_error="warn")
    for number in range(6):
        store.obey(FailAt(4 * number))
        loop.train()
        store.heal()
    assert loop.manager.failed_saves >= 5
    assert all(map(torch.equal, expected[0], loop.model.parameters())) and torch.equal(expected[1], torch.rand(3))


def test_after_a_failed_save_best_metrics_and_parent_are_those_of_the_last_good_one(tmp_path):
    store = Watched(tmp_path)
    loop = Loop(store, keep=KeepPolicy(last=1, best=1, metric="score", mode="max"))
    loop.train()
    first = loop.manager.save(metrics={"score": 1})
    loop.train()
    store.obey(FailAt(9))
    assert isinstance(error_of(loop.manager.save, metrics={"score": 5})[0], errors.StorageError)
    store.heal()
    assert loop.manager.state.best_metric_value == 1
    second = loop.manager.save(metrics={"score": 2})
    assert second.parent == first.id and loop.manager.state.best_metric_value == 2


def test_a_failed_save_whose_folder_cannot_be_looked_at_is_older_than_the_next_one_of_the_same_step(
    tmp_path, monkeypatch
):
    store, high = Watched(tmp_path), iter([0x7000, 0x100, 0x10])
    monkeypatch.setattr(layout.secrets, "randbelow", lambda limit: next(high))
    loop = Loop(store)

    def gone_once_the_marker_is_there(kind, path):
        if any(tmp_path.glob(f"*/{layout.MARKER}")):
            monkeypatch.setattr(LocalStore, "read", lambda *_, **__: (_ for _ in ()).throw(errors.StorageError("gone")))
            raise OSError(errno.ENOSPC, "gone")

    store.obey(gone_once_the_marker_is_there)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read", LocalStore.read)
        assert isinstance(error_of(loop.manager.save)[0], errors.StorageError)
    store.heal()
    assert len(folders(tmp_path)) == 1
    info = loop.manager.save()
    assert folders(tmp_path)[1:] == [info.name] and find_checkpoint(tmp_path) == info


def test_a_policy_that_is_neither_is_refused():
    with pytest.raises(ValueError, match="on_error='ignore'"):
        SavePolicy(on_error="ignore")


# Storage that is slow, or fails in passing (B27), and groups that are impatient (B31)


@pytest.mark.parametrize("kind", ["mkdir", "create", "write", "fsync", "rename"])
def test_what_fails_twice_in_passing_is_done_the_third_time(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(store_module, "PAUSES", (0.01, 0.01, 0.01))
    store, left = Watched(tmp_path), [2]

    def twice(happens, path):
        if happens == kind and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "I/O error")

    loop = Loop(store)
    store.obey(twice)
    with listening() as lines:
        info = loop.manager.save()
    assert left == [0] and said(lines, "I/O error", "trying again") == 2
    assert verify_checkpoint(info.path) == [] and folders(tmp_path) == [info.name]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_what_fails_for_ever_is_tried_a_bounded_number_of_times_and_then_the_policy_decides(
    tmp_path, monkeypatch, on_error
):
    monkeypatch.setattr(store_module, "PAUSES", (0.01, 0.01, 0.01))
    store, tries = Watched(tmp_path), []

    def never(kind, path):
        if kind == "create":
            tries.append(path)
            raise OSError(errno.EIO, "I/O error")

    loop = Loop(store, on_error=on_error)
    good = loop.manager.save()
    loop.train()
    store.obey(never)
    error, _ = error_of(loop.manager.save)
    assert (error is None) == (on_error == "warn")
    assert len(tries) == 4 and len(set(tries)) == 1
    assert find_checkpoint(tmp_path) == good and folders(tmp_path) == [good.name]


def killed_while_slow(rank, folder, at):
    store = Watched(folder)
    loop = Loop(store)
    loop.manager.save()
    loop.train()
    count = itertools.count()
    store.obey(lambda kind, path: (time.sleep(0.01), die() if rank == 0 and next(count) == at else None))
    error_of(loop.manager.save)


@pytest.mark.parametrize("at", [3, 12, 20])
def test_killed_half_way_in_a_slow_save_no_marker_is_there_and_the_one_before_is_the_newest(tmp_path, at):
    assert try_ranks(2, killed_while_slow, tmp_path, at)[0].killed
    assert len(folders(tmp_path)) == 2 and not (tmp_path / folders(tmp_path)[1] / layout.MARKER).exists()
    assert newest_step(tmp_path) == 0


def logged(rank, folder, log):
    store = Watched(folder)
    loop = Loop(store)

    def note(kind, path):
        time.sleep(0.003 * rank)
        with log.open("a") as file:
            file.write(f"{kind} {os.path.basename(path)}\n")

    store.obey(note)
    loop.manager.save()


def test_the_marker_is_the_last_thing_made_by_any_rank(tmp_path):
    log = tmp_path / "log"
    run_ranks(2, logged, tmp_path / "run", log)
    lines = log.read_text().splitlines()
    lines = [line for line in lines if not line.endswith(" .lease")]
    marked = lines.index(f"rename {layout.MARKER}")
    assert {line.split()[0] for line in lines[marked + 1 :]} == {"fsync"}
    temporary = next(i for i, line in enumerate(lines) if line.startswith(f"create {layout.MARKER}"))
    made = [line for line in lines[temporary + 1 :] if line.split()[0] in ("create", "mkdir")]
    assert made == [], "all files of all ranks are there before the marker's bytes are written"
    assert sum(line.startswith("create") for line in lines) == 7


def waits_for_rank_zero(rank, folder):
    ranks_module._GRACE = 0.5
    store = Watched(folder)
    loop = Loop(store, timeout_seconds=1, on_error="warn")
    if rank == 0:
        store.obey(lambda kind, path: kind == "create" and (time.sleep(4), die()))
    error, seconds = error_of(loop.manager.save)
    return type(error).__name__, str(error), seconds


def test_a_write_of_rank_zero_that_does_not_end_is_ended_by_our_own_limit_which_names_the_save(tmp_path):
    outcome = try_ranks(2, waits_for_rank_zero, tmp_path)[1]
    kind, text, seconds = outcome.value
    assert kind == "RankMissing" and 2 < seconds < 5
    assert "commit of the save at step 0: rank 0 did not come within 2.5 s" in text, "the limit it really waited"


def dies_before_the_answer(rank, folder):
    store = Watched(folder)
    loop = Loop(store)
    receive = ranks_module._receive
    if rank == 0:
        store.obey(lambda kind, path: time.sleep(1) if kind == "rename" else None)
    else:
        calls = itertools.count()
        ranks_module._receive = lambda *args: die() if next(calls) == 1 else receive(*args)
    error, _ = error_of(loop.manager.save)
    return type(error).__name__


def test_a_checkpoint_stays_when_a_rank_dies_after_it_has_written_its_share(tmp_path):
    first, second = try_ranks(2, dies_before_the_answer, tmp_path)
    assert second.killed and first.value in ("RankMissing", "NoneType")
    assert newest_step(tmp_path) == 0


# What ranks hold differently


def holds_its_own(rank, folder):
    counter = {"rank": rank, "same": [1, 2]}
    with listening() as lines:
        loop = Loop(folder, extra={"counter": counter, "alike": {"a": {"x", "y"}}})
        loop.manager.save()
        loop.train()
        loop.manager.save()
    return lines


def test_an_extra_that_is_not_alike_on_all_ranks_is_said_once(tmp_path):
    lines, others = run_ranks(2, holds_its_own, tmp_path)
    assert said(lines, "extra['counter'] of ranks [1]", "keeps rank 0's") == 1
    assert said(lines, "not what rank 0 holds") == 1 and said(others, "not what") == 0


def test_metrics_of_two_saves_in_one_window_are_both_kept(tmp_path):
    manager = CheckpointManager(model=nn.Linear(1, 1), loader=[1, 2, 3], storage=Path(tmp_path))
    manager.resume()
    next(batches := manager.batches())
    assert manager.save(metrics={"a": 1, "b": 1}) is None and manager.save(metrics={"b": 2}) is None
    manager.step()
    assert find_checkpoint(tmp_path).metrics == {"a": 1, "b": 2}
    batches.close()
