"""A folder on any filesystem: what a save needs of it, and where it points to."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import fsspec
import pyarrow.fs as pafs
import pytest
import torch
import xxhash

from pimm_ray import CheckpointManager, find_checkpoint, verify_checkpoint
from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint import store as store_module
from pimm_ray.checkpoint.layout import BLOCK
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.errors import StorageError
from pimm_ray.testing import FaultyStore


@pytest.fixture
def bucket():
    """An object store in memory."""
    memory = fsspec.filesystem("memory", skip_instance_cache=True)
    memory.store.clear(), memory.pseudo_dirs.clear()
    return pafs.PyFileSystem(pafs.FSSpecHandler(memory))


class Handle:
    """What a `ray.train.Checkpoint` looks like."""

    def __init__(self, path, filesystem):
        self.path, self.filesystem = path, filesystem


def test_a_path_a_uri_and_a_checkpoint_handle_open_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    local = pafs.LocalFileSystem()
    name = tmp_path.name
    handles = Handle(str(tmp_path), local), Handle(name, pafs.SubTreeFileSystem(str(tmp_path.parent), local))
    for source in (tmp_path, str(tmp_path), f"{tmp_path}/", name, f"~/{name}", f"file://{tmp_path}", *handles):
        store = open_store(source)
        assert isinstance(store, LocalStore) and store.real("a") == str(tmp_path / "a"), source
    assert open_store(store) is store


def test_what_is_no_place_at_all_is_an_error_that_says_so():
    with pytest.raises(TypeError, match=r"17 is not a path, a URI or a ray\.train\.Checkpoint"):
        open_store(17)
    with pytest.raises(StorageError, match="cannot open nowhere://x"):
        open_store("nowhere://x")


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path, bucket):
    made = open_store(tmp_path / "run") if request.param == "disk" else Store(bucket, "bucket/run")
    assert not made.exists() and made.files() == {} and made.folders() == []
    made.make("a", "b/c")
    return made


def test_what_is_written_is_listed_read_copied_and_deleted(store):
    store.write("a/x", [b"one", memoryview(b"two"), b""])
    store.write("b/c/y", [])
    assert store.files() == {"a/x": 6, "b/c/y": 0}
    assert sorted(store.folders()) == ["a", "b"] and store.child("b").folders() == ["c"]
    assert store.read("a/x") == b"onetwo" and store.read("a/x", limit=6) == b"onetwo"
    with pytest.raises(StorageError, match="has 6 bytes, more than the 5"):
        store.read("a/x", limit=5)
    with pytest.raises(FileNotFoundError):
        store.read("a/z")
    store.child("copy").make("a")
    store.copy_file("a/x", store.child("copy"))
    store.delete_file("a/x")
    assert not store.exists("a/x") and store.child("copy").read("a/x") == b"onetwo"
    store.child("copy").remove()
    assert not store.child("copy").exists() and store.exists()


def test_ranges_are_read_into_place_and_a_short_file_is_an_error(store):
    store.write("a/x", [bytes(range(100))])
    first, second = bytearray(5), bytearray(3)
    store.read_into("a/x", [(10, memoryview(first)), (90, memoryview(second))])
    assert first == bytes(range(10, 15)) and second == bytes(range(90, 93))
    with pytest.raises(StorageError, match="ends 2 bytes too early"):
        store.read_into("a/x", [(95, memoryview(bytearray(7)))])


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_digests_are_of_whole_blocks_however_the_bytes_came(store, size):
    data = memoryview(os.urandom(size))
    cuts = [0, min(7, size), min(BLOCK - 1, size), size]
    entry = store.write("a/x", [data[start:stop] for start, stop in itertools.pairwise(cuts)])
    expected = [xxhash.xxh3_64_hexdigest(data[start : start + BLOCK]) for start in range(0, size, BLOCK)]
    assert (entry.path, entry.bytes, list(entry.xxh3), entry.block) == ("a/x", size, expected, BLOCK)


def test_a_run_on_an_object_store_saves_marker_last_and_resumes(bucket, monkeypatch):
    written = []
    write = Store.write
    monkeypatch.setattr(Store, "write", lambda self, name, *rest: (written.append(name), write(self, name, *rest))[1])
    handle = Handle("bucket/run", bucket)

    def job():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return CheckpointManager(model=model, optimizer=optimizer, storage=handle), model, optimizer

    manager, model, optimizer = job()
    manager.resume()
    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        manager.step()
        written.clear()
        info = manager.save()
        assert written[-1] == layout.MARKER and written.count(layout.MARKER) == 1
    assert len(open_store(handle).folders()) == 3, "the older ones are deleted"
    assert verify_checkpoint(Handle(info.path, bucket)) == []
    assert find_checkpoint(handle) == info
    again, fresh, _ = job()
    assert again.resume().step == 5
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))


def test_a_run_folder_may_be_moved(tmp_path):
    model = torch.nn.Linear(2, 2)
    manager = CheckpointManager(model=model, storage=tmp_path / "here")
    manager.resume()
    name = manager.save().name
    (tmp_path / "here").rename(tmp_path / "there")
    found = find_checkpoint(tmp_path / "there")
    assert Path(found.path) == tmp_path / "there" / name


def test_a_uri_that_pathlib_has_eaten_a_slash_of_is_an_error_not_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="give it as a string, 's3://bucket/x'"):
        CheckpointManager(model=torch.nn.Linear(1, 1), storage=Path("s3://bucket/x"))
    assert list(tmp_path.iterdir()) == []


def test_the_hub_is_no_place_for_a_run_and_no_password_is_shown():
    with pytest.raises(StorageError, match="the path is empty"):
        open_store("")
    with pytest.raises(StorageError, match=r"hf://me/run: .*holds weights only, no runs or checkpoints"):
        open_store("hf://me/run")
    with pytest.raises(StorageError) as caught:
        open_store("s3://key:password@bucket/run?nonsense=1")
    assert "s3://bucket/run" in str(caught.value) and "password" not in str(caught.value)


def test_what_only_fsspec_knows_is_opened_through_it():
    store = open_store("memory://elsewhere/run")
    store.make("a")
    store.write("a/x", [b"one"])
    assert open_store(Handle("elsewhere/run", fsspec.filesystem("memory"))).files() == {"a/x": 3}
    store.remove()
    with pytest.raises(StorageError, match="fsspec says: Protocol not known: nowhere"):
        open_store("nowhere://x")
    with pytest.raises(TypeError, match="17 is not a filesystem of pyarrow or fsspec"):
        open_store(Handle("bucket/run", 17))


def test_a_local_disk_behind_fsspec_is_written_as_a_local_disk(tmp_path):
    local = fsspec.filesystem("file")
    for filesystem in (local, pafs.PyFileSystem(pafs.FSSpecHandler(local))):
        store = open_store(Handle(str(tmp_path), filesystem))
        assert isinstance(store, LocalStore) and store.real("a") == str(tmp_path / "a")
    assert isinstance(open_store(f"local://{tmp_path}"), LocalStore)


def test_names_that_are_not_utf8_are_passed_by(tmp_path):
    manager = CheckpointManager(model=torch.nn.Linear(1, 1), storage=tmp_path)
    manager.resume()
    manager.save()
    (tmp_path / os.fsdecode(b"run-\xff")).mkdir()
    (tmp_path / os.fsdecode(b"file-\xfe")).touch()
    assert find_checkpoint(tmp_path).step == 0
    again = CheckpointManager(model=torch.nn.Linear(1, 1), storage=tmp_path)
    assert again.resume().source != "fresh"


class Waiting(LocalStore):
    """A mount that does not show a folder of another machine until so many tries have failed."""

    blind = 0

    def _event(self, kind, path):
        if kind == "create" and self.blind:
            self.blind -= 1
            raise FileNotFoundError(2, "No such file or directory", path)


def test_a_folder_that_another_rank_made_is_waited_for_a_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "PAUSES", (0.01, 0.02, 0.03))
    store = Waiting(pafs.LocalFileSystem(), str(tmp_path))
    store.blind = 3
    store.write("x", [b"one"])
    assert store.read("x") == b"one"
    store.blind = 4
    with pytest.raises(StorageError, match=r"cannot write .*/y: .*No such file.*\(waited 0.06 s for it\)"):
        store.write("y", [b"one"])


def test_a_folder_that_is_said_to_exist_may_appear_later_but_a_file_in_its_place_is_an_error(tmp_path, monkeypatch):
    def exists_but_hidden(path):
        mkdir(f"{path}.hidden")
        monkeypatch.setattr(os, "mkdir", mkdir)
        raise FileExistsError(17, "File exists", path)

    mkdir = os.mkdir
    monkeypatch.setattr(os, "mkdir", exists_but_hidden)
    open_store(tmp_path / "run").make()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot create .*/file"):
        open_store(tmp_path / "file").make()


def test_a_rename_that_is_sent_twice_is_one_publication_and_one_that_fails_is_none(tmp_path):
    twice = FaultyStore(tmp_path, retransmits=1)
    twice.publish("marker", b"new")
    assert twice.files() == {"marker": 3}

    class Lost(LocalStore):
        def _rename(self, old, new):
            os.unlink(self.real(old))
            super()._rename(old, new)

    (tmp_path / "marker").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        Lost(pafs.LocalFileSystem(), str(tmp_path)).publish("marker", b"new")
    assert (tmp_path / "marker").read_bytes() == b"old"
