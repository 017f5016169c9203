"""Checkpoints on a real S3 server: what is requested, in which order, and what each fault of it comes to."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import boto3
import pyarrow.fs as pafs
import pytest
import torch
import torch.distributed as dist

from pimm_ray import CheckpointManager, KeepPolicy, find_checkpoint, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint import store as store_module
from pimm_ray.checkpoint.layout import BLOCK
from pimm_ray.checkpoint.store import open_store
from pimm_ray.errors import StorageError
from pimm_ray.testing import FaultyStore
from tests.elastic_jobs import Job, listening, said
from tests.ranks import run_ranks, try_ranks
from tests.s3 import BUCKET, S3Server

WRITES = ("PUT", "COMPLETE", "COPY", "PART", "CREATE")


@pytest.fixture(scope="module")
def server():
    started = S3Server()
    started.filesystem(allow_bucket_creation=True).create_dir(BUCKET)
    return started


@pytest.fixture
def s3(server, request):
    """The server, and the URI of a run of this test alone."""
    server.reset()
    path = f"{BUCKET}/runs/{abs(hash(request.node.name))}"
    return SimpleNamespace(server=server, path=path, uri=server.uri(path))


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(store_module, "PAUSES", (0.01, 0.01, 0.01))


def make(storage, *, numbers=30, layers=1, **settings):
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(numbers, 2) for _ in range(layers))
    return CheckpointManager(model=model, storage=storage, **settings), model


def saved(storage, steps=1, **settings):
    """Names of the checkpoints that a run of one process has saved, oldest first."""
    manager, _ = make(storage, **settings)
    manager.resume()
    names = []
    for _ in range(steps):
        manager.step()
        names.append(manager.save().name)
    return names


# Saves and resumes


def test_a_run_changes_its_number_of_ranks_and_none_of_its_steps_is_lost(s3):
    for number, world in enumerate((1, 2, 3, 2)):
        stories = Job(s3.uri, steps=2).on(world)
        assert [story.plan.step for story in stories] == [2 * number] * world
        found = find_checkpoint(s3.uri)
        assert (found.step, found.world_size) == (2 * number + 2, world)
        assert verify_checkpoint(s3.server.uri(found.path)) == []
        assert open_checkpoint(SimpleNamespace(path=found.path, filesystem=found.filesystem)) == found
    assert len(open_store(s3.uri).folders()) == 3, "the oldest is deleted"


def test_bucket_and_run_alone_are_enough_where_the_environment_says_the_rest(s3, monkeypatch):
    named = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}
    for name, value in {**named, "ENDPOINT_URL": f"http://{s3.server.endpoint}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    (name,) = saved(f"s3://{s3.path}/")
    assert find_checkpoint(f"s3://{s3.path}").name == name


def order_of_a_save(rank, server, path):
    saved(SimpleNamespace(path=path, filesystem=server.filesystem()))


@pytest.mark.parametrize("how", ["uri", "filesystem"])
def test_the_marker_is_put_last_and_whole_and_nothing_is_renamed(s3, how):
    if how == "uri":
        Job(s3.uri, steps=1).on(3)
    else:
        run_ranks(3, order_of_a_save, s3.server, s3.path)
    name = find_checkpoint(s3.uri).name
    writes = s3.server.seen(*WRITES, key=f"{name}/.*[^/]$")
    marker = [write for write in writes if write.key.endswith(layout.MARKER)]
    last = [write for write in marker if write.kind in ("PUT", "COMPLETE")]
    assert len(last) == 1 and writes[-1] is last[0]
    assert max(write.ended for write in writes if write not in marker) < marker[0].begun
    assert s3.server.seen("COPY") == []
    if how == "uri":
        assert {write.kind for write in writes} == {"PUT"}, "one request a small file"


# Killed


class Watched:
    """A run whose process the server can kill."""

    def __init__(self, folder: Path):
        self.file = folder / "pid"

    def kill(self):
        os.kill(int(self.file.read_text()), signal.SIGKILL)
        raise ConnectionAbortedError

    def __call__(self, rank, uri, target, numbers):
        if rank == target:
            self.file.write_text(str(os.getpid()))
        if dist.is_initialized():
            dist.barrier()
        return saved(uri, numbers=numbers)


@pytest.mark.parametrize(
    ("world", "target", "kind", "key"),
    [
        (1, 0, "PUT", "checkpoint_[^/]*/$"),
        (1, 0, "PUT", "model.safetensors"),
        (2, 1, "PUT", "ranks/00001.safetensors"),
        (2, 0, "PUT", "state.json"),
        (1, 0, "PUT", r"\.complete"),
        (1, 0, "PART", "model.safetensors"),
    ],
)
def test_killed_in_an_upload_the_one_before_is_newest_and_the_next_save_works(s3, tmp_path, world, target, kind, key):
    numbers = 2_000_000 if kind == "PART" else 30  # 16 MB come in parts
    (good,) = saved(s3.uri, numbers=numbers)
    run = Watched(tmp_path)
    fault = s3.server.fail(kind, key=key, skip=kind == "PART", before=run.kill)
    outcomes = try_ranks(world, run, s3.uri, target, numbers, group=world > 1)
    assert fault.hits and outcomes[target].killed
    s3.server.reset()
    assert find_checkpoint(s3.uri).name == good
    half = [name for name in open_store(s3.uri).folders() if name != good]
    (after,) = saved(s3.uri, numbers=numbers)
    assert find_checkpoint(s3.uri).name == after
    assert set(open_store(s3.uri).folders()) == {good, after}, f"{half} was swept"


def uploads(s3):
    client = boto3.client(
        "s3", endpoint_url=f"http://{s3.server.endpoint}", region_name="us-east-1",
        aws_access_key_id="test", aws_secret_access_key="test",
    )  # fmt: skip
    return client.list_multipart_uploads(Bucket=BUCKET, Prefix=s3.path.removeprefix(f"{BUCKET}/")).get("Uploads", [])


def test_the_parts_of_a_killed_upload_are_no_file_and_stay_for_the_buckets_own_rule(s3, tmp_path):
    run = Watched(tmp_path)
    s3.server.fail("PART", skip=1, before=run.kill)
    assert try_ranks(1, run, s3.uri, 0, 2_000_000, group=False)[0].killed
    assert len(uploads(s3)) == 1, "pyarrow has no call to end it: README, object stores"
    assert not [file for file in open_store(s3.uri).files() if file.endswith("model.safetensors")]
    saved(s3.uri)
    assert len(uploads(s3)) == 1


# Faults


def test_a_server_that_is_busy_for_a_moment_costs_a_moment(s3, impatient):
    s3.server.fail("PUT", key="state.json", times=4, status=503)  # pyarrow tries three times, then it is our turn
    s3.server.fail("PUT", key="model.safetensors", times=1, status=500)
    (name,) = saved(s3.uri)
    assert find_checkpoint(s3.uri).name == name
    s3.server.fail("GET", key="model.safetensors", times=1, cut=True)
    s3.server.fail("GET", key="state.json", times=1, status=503)
    s3.server.fail("LIST", times=1, status=500)
    manager, model = make(s3.uri)
    torch.nn.init.zeros_(model[0].weight)
    assert manager.resume().step == 1 and model[0].weight.any()


def test_a_server_that_stays_busy_ends_the_save_after_a_bounded_number_of_tries(s3, impatient):
    (good,) = saved(s3.uri)
    filesystem = s3.server.filesystem(allow_delayed_open=True, retry_strategy=pafs.AwsStandardS3RetryStrategy(2))
    manager, _ = make(SimpleNamespace(path=s3.path, filesystem=filesystem))
    manager.resume()
    fault = s3.server.fail("PUT", key="state.json", status=503)
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot write .*state.json: .*SLOW_DOWN.*\(tried 4 times\)"):
        manager.save()
    assert fault.hits == 8 and time.monotonic() - start < 10, "four tries of ours, each two of pyarrow's"
    s3.server.reset()
    assert find_checkpoint(s3.uri).name == good and manager.save() is not None


def test_what_is_forbidden_or_has_no_bucket_is_an_error_at_once(s3):
    manager, _ = make(s3.uri)
    manager.resume()
    start = time.monotonic()
    fault = s3.server.fail("PUT", key="state.json", status=403)
    with pytest.raises(StorageError, match=r"cannot write .*state.json: .*ACCESS_DENIED"):
        manager.save()
    assert fault.hits == 1
    with pytest.raises(StorageError, match=r"cannot (create|write) nowhere/.*(not found|NO_SUCH_BUCKET)"):
        saved(s3.server.uri("nowhere/run"))
    assert time.monotonic() - start < 2


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(s3, impatient):
    (name,) = saved(s3.uri)
    s3.server.fail("GET", key="model.safetensors", status=403)
    (problem,) = verify_checkpoint(s3.server.uri(f"{s3.path}/{name}"))
    assert problem.kind == "unreadable" and "ACCESS_DENIED" in str(problem.found)


def test_what_the_server_shows_late_is_neither_lost_nor_deleted(s3):
    s3.server.late = 0.5
    with listening() as lines:
        names = saved(s3.uri, steps=4, keep=KeepPolicy(last=2))
    assert said(lines, "could not") == 0
    time.sleep(0.5)
    assert find_checkpoint(s3.uri).name == names[-1]
    assert names[-2] in open_store(s3.uri).folders()
    s3.server.late = 0.0
    assert make(s3.uri)[0].resume().step == 4


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_a_problem_not_a_mixture(s3, impatient):
    (name,) = saved(s3.uri)
    uri = s3.server.uri(f"{s3.path}/{name}")
    fault = s3.server.fail("GET", key="safetensors", times=1, before=lambda: open_store(uri).remove())
    problems = verify_checkpoint(uri)
    assert fault.hits and problems
    assert find_checkpoint(s3.uri) is None


# Reads


def resumed(rank, uri, delays, temp, size):
    tempfile.tempdir = str(temp)
    os.environ["TMPDIR"] = str(temp)
    time.sleep(delays[rank])
    manager, model = make(uri, **size)
    torch.nn.init.zeros_(model[0].weight)
    manager.resume()
    return model[0].weight.detach().double().sum().item()


def test_b30_neighbours_read_at_their_own_pace_and_nothing_is_put_beside_them(s3, tmp_path):
    size = {"numbers": 2_000_000}
    (name,) = saved(s3.uri, **size)
    s3.server.fail("GET", key="model.safetensors", wait=0.2)
    s3.server.requests.clear()
    expected = make("unused", **size)[1][0].weight.detach().double().sum().item()
    assert run_ranks(3, resumed, s3.uri, (0.0, 0.2, 0.4), tmp_path, size) == [expected] * 3
    assert list(tmp_path.iterdir()) == []
    assert s3.server.seen(*WRITES, "DELETE", "DELETES", key=name) == []


def test_b30_a_file_may_be_opened_again_while_it_is_open(s3):
    (name,) = saved(s3.uri)
    store, halves = open_store(s3.uri).child(name), (bytearray(100), bytearray(100))
    with store.reader("weights/model.safetensors") as fill:
        fill(0, [memoryview(halves[0])])
        assert verify_checkpoint(store) == []
        fill(100, [memoryview(halves[1])])
    assert b"".join(halves) == store.read("weights/model.safetensors")[:200]


def saved_together(rank, uri, shape):
    return saved(uri, **shape)


def test_a_rank_reads_each_byte_that_it_needs_once_and_no_others_in_few_requests(s3, tmp_path):
    world, shape = 2, {"numbers": 50_000, "layers": 40}
    run_ranks(world, saved_together, s3.uri, shape)
    name = find_checkpoint(s3.uri).name
    sizes = open_store(s3.uri).child(name).files()
    s3.server.requests.clear()
    run_ranks(world, resumed, s3.uri, (0.0, 0.0), tmp_path, shape)
    for file, size in sizes.items():
        reads = s3.server.seen("GET", key=f"{name}/{file}")
        readers = 1 if file.startswith("ranks/") else world
        if file == layout.MARKER:
            continue
        assert sum(read.sent for read in reads) <= readers * size, file
        assert len(reads) <= readers * (1 + size // BLOCK + 1), file


# Places


def test_folders_of_an_object_store_are_what_is_in_them_or_made(s3):
    store = open_store(f"{s3.uri}")
    assert not store.exists() and store.folders() == [] and store.files() == {}
    store.make("empty", "a/b")
    store.write("c/x", [b"one"])  # nobody has made c
    assert sorted(store.folders()) == ["a", "c", "empty"] and store.files() == {"c/x": 3}
    assert store.exists("empty") and store.exists("c") and not store.exists("d")
    store.child("empty").make()
    store.copy_file("c/x", store.child("copy"))
    assert store.child("copy").files() == {"c/x": 3}
    store.child("c").remove()
    assert sorted(store.folders()) == ["a", "copy", "empty"]
    with pytest.raises(FileNotFoundError):
        store.child("c").remove()


# The same on a mount that shows things late and sends changes twice


def on_a_mount(rank, folder):
    return saved(FaultyStore(folder, late=0.5 if rank else 0.0, retransmits=2), steps=2)


def test_b28_two_nodes_on_a_mount_with_late_folders_and_changes_sent_twice(tmp_path):
    run = tmp_path / "run"
    first = run_ranks(2, on_a_mount, run)
    half = run / "checkpoint_00000003-0001-aaaa"
    (half / "weights").mkdir(parents=True)
    (half / ".complete.1234.tmp").write_bytes(b"{")
    second = run_ranks(2, on_a_mount, run)
    assert first[0] == first[1] and second[0] == second[1]
    found = find_checkpoint(run)
    assert (found.name, found.step, found.world_size) == (second[0][-1], 4, 2)
    assert verify_checkpoint(run / found.name) == [] and not half.exists()
