"""The faults that users can give their own tests: they come when, where and as often as they were asked for."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pyarrow.fs as pafs
import pytest
import torch

from pimm_ray import CheckpointManager, KeepPolicy, SavePolicy, find_checkpoint, testing
from pimm_ray.checkpoint import store
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.errors import StorageError
from pimm_ray.testing import FailureInjector, FaultyStore, SlowStore
from tests.elastic_jobs import listening, said, steps_kept
from tests.ranks import try_ranks


@pytest.fixture
def bucket():
    memory = fsspec.filesystem("memory", skip_instance_cache=True)
    memory.store.clear(), memory.pseudo_dirs.clear()
    return pafs.PyFileSystem(pafs.FSSpecHandler(memory))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(store, "PAUSES", (0.001, 0.001, 0.001))


def train(rank, storage, fault=None, steps=4, **options):
    """Saves each step; the steps it did, and how often a save failed."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"save": SavePolicy(every_steps=1, timeout_seconds=5), "keep": KeepPolicy(last=1)} | options
    manager = CheckpointManager(model=model, optimizer=optimizer, storage=storage, **options)
    if fault is not None:
        pickle.loads(pickle.dumps(fault)).attach(manager)
    start = manager.resume().step
    while manager.state.global_step < steps:
        manager.step()
    return start, manager.state.global_step


# A rank that fails or dies


def test_the_chosen_rank_dies_once_after_the_chosen_step_and_its_save(tmp_path):
    fault = FailureInjector(rank=1, step=3)
    other, victim = try_ranks(2, train, tmp_path, fault)
    assert victim.killed and other.kind in ("RankMissing", "RuntimeError")
    assert steps_kept(tmp_path)[0] == 3
    again = try_ranks(2, train, tmp_path, fault, 2 + 3)
    assert [outcome.value for outcome in again] == [(3, 5)] * 2


def test_an_attempt_that_comes_to_the_same_step_again_is_spared_unless_it_is_not_to_be(tmp_path):
    never = {"save": SavePolicy(at_end=False)}
    for once, ends in ((True, [True, False]), (False, [True, True])):
        root = tmp_path / str(once)
        fault = FailureInjector(step=2, once=once)
        for killed in ends:
            (outcome,) = try_ranks(1, functools.partial(train, **never), root, fault, group=False)
            assert outcome.killed == killed, outcome.error


def test_several_faults_may_be_attached_and_each_comes_in_its_turn(tmp_path):
    faults = [FailureInjector(step=2, event=7), FailureInjector(step=3, event=12), FailureInjector(rank=None, step=4)]

    def doomed(rank):
        model = torch.nn.Linear(2, 2)
        manager = CheckpointManager(model=model, storage=tmp_path, save=SavePolicy(every_steps=1, timeout_seconds=5))
        for fault in faults:
            fault.attach(manager)
        start = manager.resume().step
        while manager.state.global_step < 5:
            manager.step()
        return start

    for _ in faults:
        assert try_ranks(1, doomed, group=False)[0].killed
    assert try_ranks(1, doomed, group=False)[0].value == 4


def test_an_error_is_raised_where_the_training_is(tmp_path):
    with pytest.raises(RuntimeError, match="cosmic ray"):
        train(0, tmp_path, FailureInjector(step=2, error=RuntimeError("cosmic ray")))
    assert steps_kept(tmp_path) == [2]


def test_at_an_event_of_a_save_it_dies_before_that_change_is_made(tmp_path):
    counts = []
    for event in itertools.count(1):
        root = tmp_path / str(event)
        train(0, root, steps=1)
        fault = FailureInjector(step=2, event=event, once=False)
        (outcome,) = try_ranks(1, train, root, fault, 2, group=False)
        if not outcome.killed:
            break
        counts.append(len([path for path in root.rglob("*") if path.is_file()]))
        assert find_checkpoint(root, verified=False) is not None
        assert event > 2 or steps_kept(root) == [1, 2][:event], "the first change is to make the folder"
    assert outcome.value == (1, 2) and len(counts) > 30
    changes = [b - a for a, b in itertools.pairwise(counts)]
    assert set(changes) == {-1, 0, 1}, "never two changes of the folder between two events"


def test_without_a_step_it_is_the_first_save_and_deletions_belong_to_it(tmp_path):
    train(0, tmp_path, steps=1)
    kinds, paths = [], []

    class Listed(LocalStore):
        def _event(self, kind, path):
            if "/.lease" not in path:
                kinds.append(kind)
                paths.append(path)

    root = Listed(pafs.LocalFileSystem(), str(tmp_path))
    train(0, root, steps=2)
    last = len(kinds) - kinds[::-1].index("unlink")
    first = next(i for i, path in enumerate(paths) if "/checkpoint_" in path and kinds[i] == "mkdir")
    before = sum(folder.is_dir() for folder in tmp_path.iterdir())
    fault = FailureInjector(event=last - first, once=False)
    (outcome,) = try_ranks(1, train, tmp_path, fault, 9, group=False)
    assert outcome.killed and find_checkpoint(tmp_path).step == 3
    assert sum(folder.is_dir() for folder in tmp_path.iterdir()) == before + 1, "the one before was being deleted"


def test_an_error_at_an_event_meets_what_the_storage_meets(tmp_path):
    passing = FailureInjector(event=5, error=OSError(errno.EIO, "flaky"))
    with listening() as lines:
        assert train(0, tmp_path / "a", passing) == (0, 4)
    assert said(lines, "trying again", "flaky") == 1
    lasting = FailureInjector(step=2, event=5, error=OSError(errno.ENOSPC, "disk full"))
    with pytest.raises(StorageError, match="disk full"):
        train(0, tmp_path / "b", lasting)
    assert find_checkpoint(tmp_path / "b").step == 1
    assert train(0, tmp_path / "b", lasting) == (1, 4)


@pytest.mark.parametrize("wrong", [{}, {"rank": 1}, {"event": 0}])
def test_a_fault_that_would_never_come_is_refused(wrong):
    with pytest.raises(ValueError, match=r"step= or event=|counted from 1"):
        FailureInjector(**wrong)


# Storage that fails


@pytest.fixture(params=["disk", "bucket", "subtree"])
def place(request, tmp_path, bucket):
    if request.param == "disk":
        return str(tmp_path / "run")
    if request.param == "subtree":
        return Store(pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), "/run")
    return Store(bucket, "bucket/run")


def test_a_faulty_store_is_the_store_it_stands_for_and_so_are_the_folders_in_it(place):
    plain, faulty = open_store(place), FaultyStore(place)
    assert isinstance(faulty, FaultyStore) and isinstance(faulty, type(plain))
    child = faulty.child("a").child("b")
    assert type(child) is type(faulty) and child.path == plain.child("a").child("b").path
    child.make()
    child.write("x", [b"1"])
    assert plain.files() == faulty.files() == {"a/b/x": 1} and child.read("x") == b"1"
    assert open_store(faulty) is faulty


def test_the_first_changes_fail_in_all_folders_together_and_are_tried_again(place):
    faulty = FaultyStore(place, fail_first=3, kinds=["create"])
    faulty.make("a", "b")
    with listening() as lines:
        faulty.child("a").write("x", [b"1"])
        faulty.child("b").write("y", [b"2"])
    assert said(lines, "trying again", "injected") == 3
    assert faulty.files() == {"a/x": 1, "b/y": 1}


def test_from_a_change_on_all_fail_but_only_where_they_match(place):
    faulty = FaultyStore(place, fail_from=2, matching="*.safetensors", error=PermissionError(errno.EACCES, "denied"))
    faulty.make("weights")
    for number in range(4):
        faulty.write(f"{number}.json", [b"1"])
    for number in range(2):
        with pytest.raises(StorageError, match="denied"):
            faulty.write(f"weights/{number}.safetensors", [b"1"])


def test_reading_looking_and_listing_fail_only_when_they_are_named(place):
    open_store(place).make()
    open_store(place).write("x", [b"1"])
    assert FaultyStore(place, fail_from=1).read("x") == b"1"
    looks = {"read": lambda faulty: faulty.read("x"), "list": Store.files, "exists": lambda faulty: faulty.exists("x")}
    for kind in looks:
        for other, look in looks.items():
            if kind == other:
                with pytest.raises(StorageError, match="injected"):
                    look(FaultyStore(place, fail_from=1, kinds=[kind]))
                assert look(FaultyStore(place, fail_first=2, kinds=[kind]))
            else:
                assert look(FaultyStore(place, fail_from=1, kinds=[kind]))


def test_a_run_outlives_a_storage_that_fails_now_and_then_and_not_one_that_is_gone(tmp_path):
    assert train(0, FaultyStore(tmp_path / "a", fail_first=3, kinds=["fsync"])) == (0, 4)
    with pytest.raises(StorageError, match="injected"):
        train(0, FaultyStore(tmp_path / "b", fail_from=3 * 40))
    assert find_checkpoint(tmp_path / "b") is not None


# Storage that lags


def seen_after(look, limit=5.0):
    start = time.monotonic()
    while not look():
        assert time.monotonic() - start < limit
        time.sleep(0.002)
    return time.monotonic() - start


def test_what_others_make_is_seen_late_and_a_folder_with_all_that_is_in_it(place):
    plain = open_store(place)
    plain.make("old")
    plain.write("old/x", [b"1"])
    lagging = FaultyStore(place, late=0.2)
    assert lagging.exists("old") and lagging.read("old/x") == b"1" and lagging.folders() == ["old"]
    plain.make("new")
    plain.write("new/x", [b"1"])
    assert lagging.folders() == ["old"] and lagging.files() == {"old/x": 1} and not lagging.child("new").exists()
    with pytest.raises(FileNotFoundError):
        lagging.child("new").read("x")
    assert 0.1 < seen_after(lambda: lagging.exists("new")) < 1
    assert lagging.child("new").read("x") == b"1" and lagging.files() == {"old/x": 1, "new/x": 1}


def test_a_file_that_was_looked_for_in_vain_is_seen_late_in_a_folder_that_is_seen(place):
    plain = open_store(place)
    plain.make("old")
    lagging = FaultyStore(place, late=0.2)
    assert not lagging.exists("old/x")
    with pytest.raises(FileNotFoundError):
        lagging.read("old/y")
    for name in ("x", "y"):
        plain.write(f"old/{name}", [b"1"])
        assert 0.1 < seen_after(lambda name=name: lagging.exists(f"old/{name}")) < 1
    plain.write("old/z", [b"1"])
    assert lagging.exists("old/z")


def test_what_one_makes_oneself_is_seen_at_once(place):
    lagging = FaultyStore(place, late=9.0)
    lagging.child("a").make("b")
    assert not lagging.exists("a/b/x")
    lagging.write("a/b/x", [b"1"])
    assert lagging.exists("a/b/x") and lagging.files() == {"a/b/x": 1} and lagging.folders() == ["a"]
    lagging.child("a").publish("y", b"1")
    assert lagging.read("a/y") == b"1"


def test_a_mkdir_or_a_rename_sent_twice_says_what_it_says_on_nfs(tmp_path, monkeypatch):
    twice, mkdir, sent = FaultyStore(tmp_path, retransmits=1), os.mkdir, []
    monkeypatch.setattr(os, "mkdir", lambda path: (sent.append(os.path.basename(path)), mkdir(path)))
    twice.make("a")
    twice.write("a/x", [b"1"])
    with pytest.raises(FileNotFoundError):
        twice._rename("a/x", "a/y")
    twice.make("b")
    twice._rename("a/y", "a/z")
    assert sent == ["a", "a", "b"]
    assert open_store(tmp_path).files() == {"a/z": 1} and sorted(open_store(tmp_path).folders()) == ["a", "b"]


# Storage that is slow


def test_a_slow_store_waits_at_each_change_and_look(place):
    slow = SlowStore(place, seconds=0.05)
    for change in (slow.make, lambda: slow.write("x", [b"1"]), lambda: slow.read("x"), slow.files, slow.exists):
        start = time.monotonic()
        change()
        assert time.monotonic() - start >= 0.05


def test_bytes_pass_a_slow_store_no_faster_than_its_rate(place):
    slow, buffer = SlowStore(place, bytes_per_second=10_000), bytearray(1000)
    slow.make()
    for change in (
        lambda: slow.write("x", [bytes(500), memoryview(bytes(1500))]),
        lambda: slow.read("x"),
        lambda: slow.read_into("x", [(0, memoryview(buffer)), (5, memoryview(buffer))]),
        lambda: slow.peek("x", 2000),
    ):
        start = time.monotonic()
        change()
        assert time.monotonic() - start >= 0.2
    assert open_store(place).files() == {"x": 2000}


def test_faults_can_be_laid_over_each_other(tmp_path):
    both = SlowStore(FaultyStore(tmp_path, fail_first=1), seconds=0.05)
    start = time.monotonic()
    with listening() as lines:
        both.child("a").make()
    assert said(lines, "trying again") == 1 and time.monotonic() - start >= 0.1


def test_it_is_found_under_its_name_in_the_package():
    import pimm_ray

    assert pimm_ray.testing is testing


@pytest.mark.ray
def test_under_ray_a_fault_travels_in_the_config_and_kills_its_worker_once(tmp_path):
    job = Path(__file__).parent / "ray_jobs" / "fault_job.py"
    done = subprocess.run([sys.executable, job, tmp_path], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "starts").read_text().split() == ["0", "2"]
    assert find_checkpoint(tmp_path / "run").step == 5
