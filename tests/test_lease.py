"""One job at a time in a run folder: real processes that hold it, die, hang, come back and meet."""

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.fs as pafs
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pimm_ray import CheckpointManager, SavePolicy, find_checkpoint
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.errors import RunInUse, StorageError
from pimm_ray.runtime import base, lease, lease_file
from pimm_ray.runtime.lease import Lease, Pass
from tests.elastic_jobs import folders, listening, said
from tests.ranks import die, run_ranks, try_ranks

FORK = multiprocessing.get_context("fork")
HOUR = 3600


class InAnotherProcess:
    """`work(*args)` in a forked process, which then stays alive until it is told to end, killed or stopped."""

    def __init__(self, work, *args):
        self._ours, theirs = FORK.Pipe()

        def run():
            held = work(*args)
            theirs.send(True)
            theirs.recv()
            if held is not None and not isinstance(held, CheckpointManager):
                held.release()
            os._exit(0)

        self.process = FORK.Process(target=run, daemon=True)
        self.process.start()
        assert self._ours.poll(20) and self._ours.recv()

    @property
    def pid(self):
        return self.process.pid

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def end(self):
        self._ours.send(True)
        self.process.join()


@pytest.fixture
def others():
    started = []

    def start(work, *args):
        started.append(InAnotherProcess(work, *args))
        return started[-1]

    yield start
    for other in started:
        with contextlib.suppress(ProcessLookupError):
            other.kill()
        other.process.join()


@pytest.fixture
def fast(monkeypatch):
    """A beat each 0.1 s: a holder that cannot be seen is dead after 0.3 s."""
    monkeypatch.setattr(lease, "EVERY", 0.1)


@pytest.fixture(params=["posix", "by write and read alone"])
def store(request, tmp_path):
    """A run folder, also one that is used as an object store would be."""
    kind = LocalStore if request.param == "posix" else Store
    tmp_path.joinpath("run").mkdir()
    return kind(pafs.LocalFileSystem(), str(tmp_path / "run"))


def held(store, host=None):
    if host:
        lease_file.host = lambda: host
    mine = Lease(store)
    mine.acquire()
    return mine


def seconds(call, *args):
    start = time.monotonic()
    call(*args)
    return time.monotonic() - start


def record(store):
    return json.loads(Path(store.path, ".lease").read_text())


def wait_for(condition, limit=5):
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


# Who may have it


def test_a_live_holder_on_this_machine_is_named_and_refused_at_once(store, others):
    other = others(held, store)
    start = time.monotonic()
    with pytest.raises(RunInUse) as caught:
        Lease(store).acquire()
    assert time.monotonic() - start < 5
    assert (caught.value.path, caught.value.pid) == (store.path, other.pid)
    for part in (store.path, f"process {other.pid} on ", "since 20", "another name", "within 30 s"):
        assert part in str(caught.value)
    assert record(store)["pid"] == other.pid


def test_a_killed_holder_on_this_machine_holds_nothing_not_even_before_its_parent_has_noticed(store, others):
    other = others(held, store)
    other.kill()
    wait_for(lambda: lease_file.process(other.pid)[0] == "Z")
    with listening() as lines:
        assert seconds(held, store) < 5
    assert said(lines, f"its holder (process {other.pid} on ") == said(lines, "is dead") == 1


def test_a_stopped_holder_on_this_machine_still_lives(store, others):
    os.kill(others(held, store).pid, signal.SIGSTOP)
    with pytest.raises(RunInUse):
        Lease(store).acquire()


def test_a_process_id_that_was_given_out_again_is_not_the_holder(store):
    first = held(store)
    mine = {**record(store), "owner": "another", "pid": os.getppid(), "started": 1}
    first.release()
    Path(store.path, ".lease").write_text(json.dumps(mine))
    assert seconds(held, store) < 5


def test_a_holder_that_ends_gives_it_free(store, others):
    others(held, store).end()
    assert os.listdir(store.path) == []


def test_the_end_of_the_interpreter_gives_it_free(tmp_path):
    script = (
        "import sys, os; from pimm_ray.runtime.base import make_runtime\n"
        "runtime = make_runtime(sys.argv[1], timeout=9); runtime.claim()\n"
        "assert os.listdir(sys.argv[1]) == ['.lease']; sys.exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], cwd=Path(__file__).parent.parent).returncode == 3
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("torn", [b"", b"{", b"null", b"[]", b"\xff\x00", b'{"owner": "x"}', b"{}" + b"\0" * 999])
def test_a_torn_file_is_taken_over(store, torn):
    Path(store.path, ".lease").write_bytes(torn)
    assert seconds(held, store) < 5


@pytest.mark.parametrize(
    ("name", "value"), [("pid", -1), ("pid", 2**70), ("term", "7"), ("since", 1e300), ("every", float("nan"))]
)
def test_a_file_with_a_senseless_value_is_a_torn_one(store, name, value):
    first = held(store)
    foreign = {**record(store), "owner": "another", "host": "a/b/elsewhere"}
    first.release()
    assert lease_file.Holder.parse(json.dumps(foreign).encode()) is not None
    assert lease_file.Holder.parse(json.dumps({**foreign, name: value}).encode()) is None


def test_of_many_that_come_at_once_after_a_death_one_has_it(tmp_path, others):
    store = open_store(tmp_path)
    for _ in range(5):
        other = others(held, store)
        other.kill()
        other.process.join()

        def come(rank):
            dist.barrier()
            mine = Lease(store)
            try:
                mine.acquire()
            except RunInUse:
                return None
            finally:
                dist.barrier()
            return mine.owner

        owners = [owner for owner in run_ranks(6, come) if owner]
        assert owners == [record(store)["owner"]]
        assert os.listdir(tmp_path) == [".lease"]


def link(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize(("put", "said"), [(Path.mkdir, "Is a directory"), (link, "symbolic links"), (os.mkfifo, None)])
def test_what_is_no_file_in_its_place_is_an_error_or_taken_over_and_never_waited_for(tmp_path, put, said):
    put(tmp_path / ".lease")
    script = "import sys; from pimm_ray.runtime.base import make_runtime; make_runtime(sys.argv[1], timeout=9).claim()"
    command, root = [sys.executable, "-c", script, tmp_path], Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == bool(said)
    if said:
        assert f"cannot hold {tmp_path}/.lease: " in done.stderr and said in done.stderr
        assert "trying again" not in done.stderr


class ShowsLate(Store):
    """As an object store that goes on showing what was overwritten, for so many seconds."""

    late, writes = 0.0, 0

    def _write(self, name, chunks):
        ShowsLate.writes += 1
        if self.late < HOUR:
            threading.Timer(self.late, super()._write, (name, chunks)).start()


@pytest.mark.parametrize("before", [b"", b'{"of": "a dead one"}'])
def test_a_storage_that_shows_late_what_was_written_is_waited_for_and_written_once(tmp_path, monkeypatch, before):
    if before:
        (tmp_path / ".lease").write_bytes(before)
    monkeypatch.setattr(ShowsLate, "late", 1.0)
    monkeypatch.setattr(ShowsLate, "writes", 0)
    mine = held(ShowsLate(pafs.LocalFileSystem(), str(tmp_path)))
    assert ShowsLate.writes == 1 and record(mine._file.store)["owner"] == mine.owner


def test_a_storage_that_never_shows_what_was_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(ShowsLate, "late", HOUR)
    monkeypatch.setattr(lease_file, "VISIBLE_WITHIN", 0.5)
    with pytest.raises(StorageError, match=f"{tmp_path}/.lease is not to be seen 0.5 s after it was written"):
        held(ShowsLate(pafs.LocalFileSystem(), str(tmp_path)))


# A holder on another machine


def test_a_live_holder_elsewhere_is_refused_as_soon_as_it_shows_life(store, others, fast):
    others(held, store, "boot/pid:[1]/elsewhere")
    start = time.monotonic()
    with pytest.raises(RunInUse, match="on elsewhere, since"):
        Lease(store).acquire()
    assert time.monotonic() - start < 5


def test_a_dead_holder_elsewhere_is_watched_for_three_beats_and_no_longer(store, others, fast):
    others(held, store, "boot/pid:[1]/elsewhere").kill()
    with listening() as lines:
        took = seconds(held, store)
    assert 0.25 < took < 5
    assert said(lines, "watching for 0.3 s if it lives") == said(lines, "has given no sign of life") == 1


def test_who_comes_again_later_watches_anew(store, others, fast):
    mine = Lease(store)
    for _ in range(2):
        others(held, store, "boot/pid:[1]/elsewhere").kill()
        mine.acquire()
        mine.release()


def test_a_holder_elsewhere_whose_file_is_old_by_the_storages_own_clock_is_not_watched(store, others):
    others(held, store, "boot/pid:[1]/elsewhere").kill()
    past = time.time() - HOUR
    os.utime(f"{store.path}/.lease", (past, past))
    assert seconds(held, store) < 5
    assert os.listdir(store.path) == [".lease"]


def test_a_clock_that_goes_wrong_elsewhere_costs_a_live_holder_nothing(store, others, fast):
    def an_hour_behind():
        now = time.time
        time.time = lambda: now() - HOUR
        return held(store, "boot/pid:[1]/elsewhere")

    others(an_hour_behind)
    with pytest.raises(RunInUse):
        Lease(store).acquire()


# Losing it


def test_a_holder_that_slept_through_a_takeover_is_told_so_and_does_not_take_it_back(store, others, fast):
    mine = held(store)
    sleeping = lease._lock
    with sleeping:  # no beat comes

        def take_over():
            lease_file.host = lambda: "boot/pid:[1]/elsewhere"
            return held(store)

        other = others(take_over)
    with listening() as lines:
        wait_for(lambda: not mine._thread.is_alive())
        with pytest.raises(RunInUse, match=f"another job took over .*process {other.pid} on elsewhere"):
            mine.check()
    assert said(lines, "will stop at its next save") == 1
    assert record(store)["pid"] == other.pid


def test_the_late_write_of_one_that_was_superseded_takes_nothing_away(store, others):
    first = held(store)
    late = first._record()
    second = held(store)
    Path(store.path, ".lease").write_bytes(late)
    second.check()
    assert record(store)["owner"] == second.owner
    with pytest.raises(RunInUse, match="another CheckpointManager of this process"):
        first.check()


def test_a_file_deleted_by_hand_is_written_anew(store, fast):
    mine = held(store)
    Path(store.path, ".lease").unlink()
    with listening() as lines:
        mine.check()
    assert record(store)["owner"] == mine.owner and said(lines, "is gone", "moved or deleted") == 1
    Path(store.path, ".lease").unlink()
    wait_for(Path(store.path, ".lease").exists)


def test_storage_that_fails_for_a_while_is_said_once_and_loses_nothing(tmp_path, fast, monkeypatch):
    store = open_store(tmp_path)
    mine = held(store)
    monkeypatch.setattr(mine._file, "_path", str(tmp_path / "gone" / ".lease"))
    with listening() as lines:
        wait_for(lambda: said(lines, "cannot renew"))
        time.sleep(0.5)
        monkeypatch.undo()
        monkeypatch.setattr(lease, "EVERY", 0.1)
        before = record(store)["beat"]
        wait_for(lambda: record(store)["beat"] > before)
    assert said(lines, "cannot renew the hold on") == 1
    mine.check()


def test_who_acts_for_the_holder_passes_until_somebody_else_has_it(store, others):
    mine = held(store)
    worker = Pass(store, mine.owner)
    assert worker.poll() == 0
    mine.release()
    worker.check()
    assert os.listdir(store.path) == [], "the holder alone writes"
    others(held, store)
    with pytest.raises(RunInUse, match="another job took over"):
        worker.check()


def test_the_next_process_of_one_owner_passes_at_once_and_the_one_before_is_out(store, others):
    def of_the_run():
        mine = Lease(store, "run 7")
        mine.acquire()
        return mine

    others(of_the_run)
    assert seconds(of_the_run) < 5
    first = of_the_run()
    others(of_the_run)
    with pytest.raises(RunInUse):
        first.check()


# The manager


def manager(folder, **save):
    made = CheckpointManager(model=nn.Linear(2, 1), storage=folder, save=SavePolicy(timeout_seconds=20, **save))
    made.resume()
    return made


def test_a_second_job_is_refused_on_all_its_ranks_and_passes_after_the_first_was_killed(tmp_path, others):
    first = others(manager, tmp_path)
    outcomes = try_ranks(2, lambda rank: manager(tmp_path).save().step)
    assert [outcome.kind for outcome in outcomes] == ["RunInUse"] * 2
    assert all(f"process {first.pid} on" in outcome.error for outcome in outcomes)
    assert folders(tmp_path) == []
    first.kill()
    assert run_ranks(2, lambda rank: manager(tmp_path).save().step) == [0, 0]


def test_a_job_that_was_taken_over_stops_at_its_next_save_and_writes_nothing(tmp_path):
    first = manager(tmp_path)
    first.step()
    first.save()
    second = manager(tmp_path)
    before = folders(tmp_path)
    first.step()
    with pytest.raises(RunInUse, match="another CheckpointManager of this process took over"):
        first.save()
    assert folders(tmp_path) == before
    second.step()
    assert second.save().attempt == 2


def test_a_takeover_in_the_middle_of_a_save_comes_before_the_marker(tmp_path, monkeypatch):
    first = manager(tmp_path)
    first.step()
    write, second = LocalStore.write, []

    def write_while_another_comes(store, name, chunks):
        monkeypatch.undo()
        second.append(manager(tmp_path))
        return write(store, name, chunks)

    monkeypatch.setattr(LocalStore, "write", write_while_another_comes)
    with pytest.raises(RunInUse):
        first.save()
    assert find_checkpoint(tmp_path) is None and folders(tmp_path) == []


def test_a_checkpoint_of_a_later_attempt_stops_an_earlier_one(tmp_path):
    first = manager(tmp_path)
    (tmp_path / "checkpoint_00000001-0002-abcd").mkdir()
    with pytest.raises(RunInUse, match="it made checkpoint_00000001-0002-abcd while this one is at attempt 1"):
        first.save()


def test_a_manager_that_is_finished_or_gone_holds_nothing(tmp_path, others):
    one = manager(tmp_path)
    one.finish()
    assert not (tmp_path / ".lease").exists()
    others(manager, tmp_path).end()
    two = manager(tmp_path)
    del two
    gc.collect()
    assert not (tmp_path / ".lease").exists()
    others(manager, tmp_path)


def test_a_save_after_finish_holds_the_folder_again(tmp_path, others):
    one = manager(tmp_path)
    one.finish()
    one.step()
    assert one.save().step == 1 and record(open_store(tmp_path))["pid"] == os.getpid()


def test_a_forked_copy_of_a_living_holder_commits_nothing(tmp_path):
    parent = manager(tmp_path)

    def child(rank):
        with pytest.raises(RunInUse, match="in use by process"):
            parent.save()

    run_ranks(1, child, group=False)
    assert folders(tmp_path) == [] and parent.save().name == folders(tmp_path)[0]


def test_a_forked_child_leaves_its_parents_hold_alone_and_claims_when_it_has_none(tmp_path, fast):
    parent = manager(tmp_path)

    def child(rank, ends):
        nonlocal parent
        with pytest.raises(RunInUse):
            manager(tmp_path)
        del parent
        gc.collect()
        if ends:
            wait_for(lambda: not (tmp_path / ".lease").exists())
            return manager(tmp_path).save().step
        return time.sleep(0.3)

    run_ranks(1, child, False, group=False)
    assert record(open_store(tmp_path))["pid"] == os.getpid()
    parent.save()
    process = FORK.Process(target=run_ranks, args=(1, child, True), kwargs={"group": False})
    process.start()
    time.sleep(0.5)
    parent.finish()
    process.join()
    assert process.exitcode == 0 and len(folders(tmp_path)) == 2


# The trial


def test_every_rank_tries_to_write_and_nothing_of_it_stays(tmp_path):
    def resume(rank):
        written = []
        write = LocalStore._write

        def noted(store, name, chunks):
            written.append((store.path.rsplit("/", 1)[-1][:7], name, sum(map(len, chunks))))
            return write(store, name, chunks)

        LocalStore._write = noted
        _ = manager(tmp_path)
        dist.barrier()
        left = os.listdir(tmp_path)
        dist.barrier()
        return written, left

    for rank, (written, left) in enumerate(run_ranks(3, resume)):
        assert written == [(".trial-", f"{rank:05}", 64 * 1024)]
        assert left == [".lease"]


def no_space_for_a_file():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def not_the_owner():
    os.seteuid(65534)


@pytest.mark.parametrize("spoil", [no_space_for_a_file, not_the_owner])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_write_is_an_error_on_all_ranks_before_training(tmp_path, spoil, bad):
    for parent in list(tmp_path.parents)[:-1]:
        if parent.stat().st_uid == os.getuid() and parent != Path("/tmp"):
            parent.chmod(0o755)
    folder = tmp_path / "run"
    folder.mkdir()

    def resume(rank):
        made = CheckpointManager(model=nn.Linear(2, 1), storage=folder)
        if rank == bad:
            spoil()
        made.resume()

    outcomes = try_ranks(2, resume)
    assert [outcome.kind for outcome in outcomes] == ["StorageError"] * 2
    for outcome in outcomes:
        said = outcome.error.splitlines()[-1]
        assert said.startswith(f"pimm_ray.errors.StorageError: rank {bad} cannot write into the run folder {folder}: ")
        assert "permissions, free space and quota" in said
    assert [name for name in os.listdir(folder) if name != ".lease"] == []


def test_a_file_where_the_run_folder_should_be_is_said(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match=f"rank 0 cannot write into the run folder {tmp_path}/run"):
        manager(tmp_path / "run")


def test_storage_without_room_for_the_model_is_an_error_before_training(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    runtime = base.make_runtime(tmp_path, timeout=5)
    runtime.claim(free // 2)
    with pytest.raises(StorageError, match=r"no room for one checkpoint: \d+ bytes are free and the model alone has"):
        runtime.claim(2 * free)
    with torch.device("meta"):
        huge = nn.Linear(2**20, 2**24)
    with pytest.raises(StorageError, match=f"the model alone has {4 * (2**44 + 2**24)}"):
        CheckpointManager(model=huge, storage=tmp_path).resume()


def test_what_a_killed_trial_left_goes_at_the_next_start(tmp_path):
    def dies(rank):
        LocalStore._write = lambda *_: die()
        manager(tmp_path)

    assert try_ranks(1, dies, group=False)[0].killed
    assert any(name.startswith(".trial-") for name in os.listdir(tmp_path))
    held = manager(tmp_path)
    assert os.listdir(tmp_path) == [".lease"]
    held.finish()
