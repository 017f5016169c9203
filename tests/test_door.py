"""The one door for other people's pickles: plain data and tensors come through it, and nothing that they hold runs."""

import enum
import io
import os
import pickle
import shutil
import subprocess
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pimm_ray import CheckpointManager, errors, find_checkpoint, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.legacy import load_dcp, load_file
from pimm_ray.checkpoint.store import open_store

PAYLOAD = {
    "weights": {"a": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
    "step": 7,
    "names": ["x", ("y", None, True)],
    "array": np.arange(4, dtype=np.int16),
    "times": np.array([1.5, float("inf")]),
    "blob": b"\0\xff",
}
MDM = "torch.distributed.checkpoint.metadata"


class Plant:
    """Makes a file when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.fixture
def sentinel(tmp_path):
    """Must never exist."""
    path = tmp_path / "sentinel"
    yield path
    assert not path.exists(), "a pickle was run"


def saved(tmp_path):
    """A stock DCP folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(PAYLOAD, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("trusted", [False, True])
def test_plain_data_tensors_and_arrays_of_a_torch_save_file_come_through(tmp_path, zipped, trusted):
    torch.save(PAYLOAD, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    assert equal(load_file(open_store(tmp_path), "x.pth", allow_pickle=trusted), PAYLOAD)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_stock_dcp_folder_comes_through_by_paths(tmp_path, trusted):
    found = load_dcp(open_store(saved(tmp_path)), allow_pickle=trusted)
    assert found.keys() == {
        ("weights", "a"), ("weights", "half"), ("step",), ("names",), ("array",), ("times",), ("blob",),
    }  # fmt: skip
    assert equal(found["weights", "a"], PAYLOAD["weights"]["a"]) and equal(found["array",], PAYLOAD["array"])
    assert found["names",] == PAYLOAD["names"] and found["step",] == 7


class PicklerOfPython3112(pickle.Pickler):
    """Members of an enumeration as Python 3.11.0 to 3.11.3 pickle them."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_a_stock_dcp_folder_that_another_python_wrote_comes_through(tmp_path):
    folder = saved(tmp_path)
    before = load_dcp(open_store(folder))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with open(folder / ".metadata", "wb") as file:
        PicklerOfPython3112(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert equal(load_dcp(open_store(folder)), before)


def stack_global(module, name):
    return b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"


def calling(module, name, argument):
    """A pickle that calls a global with one string."""
    return b"\x80\x04" + stack_global(module, name) + b"\x8c" + bytes([len(argument)]) + argument.encode() + b"\x85R."


def hostile_pickles(sentinel):
    touch = f"touch {sentinel}"
    record, getattr_ = stack_global(MDM, "Metadata"), stack_global("builtins", "getattr")
    pickles = {
        name.replace("/", " "): calling(*name.split("/"), touch)
        for name in (
            "os/system", "posix/system", "subprocess/getoutput", "torch.serialization/os.system", "torch/os.system",
            "torch/serialization.os.system", "torch.distributed.checkpoint.filesystem/os.system", f"{MDM}/os.system",
            "pathlib/os.system", "pathlib/Path.touch", "builtins/eval", "builtins/getattr", "torch/load",
            "torch/Size.__new__", "torch.hub/load", "copyreg/_reconstructor", "functools/partial", "numpy/load",
            "torch.jit/load",
        )
    }  # fmt: skip
    return {
        **pickles,
        "a reduce of ours": pickle.dumps(Plant(os.system, touch)),
        "inside a plain dict": pickle.dumps({"state_dict_metadata": Plant(subprocess.getoutput, touch)}),
        "protocol 0": b"cos\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "an old instance": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "a persistent id": b"\x80\x02X\x01\x00\x00\x00xQ.",
        "an extension": b"\x80\x02\x82\x01.",
        "a method of a class": b"\x80\x04" + record + b"N}\x8c\x08__init__" + stack_global("os", "system") + b"s\x86b.",
        "builtins getattr of another class": b"\x80\x04" + getattr_ + record + b"\x8c\x08__init__\x86R.",
        "builtins getattr of a number": b"\x80\x04" + getattr_ + b"K\x01\x8c\x04real\x86R.",
        "an attribute of a class": b"\x80\x04" + record + b"N}\x8c\x01xK\x01s\x86b.",
        "an attribute of a dtype": b"\x80\x04" + stack_global("torch", "float32") + b"}\x8c\x01xK\x01sb.",
        "a huge memo": b"\x80\x02Nr\xff\xff\xff\xff.",
        "a huge string": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        "an empty file": b"",
        "no pickle": b"\x00\x01garbage",
        "another root": pickle.dumps({"a": 1}),
        "nested": b"\x80\x02" + b"(" * 100_000 + b".",
    }


NAMES = list(hostile_pickles("x"))


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_metadata_is_refused_and_nothing_runs(tmp_path, sentinel, name):
    folder = saved(tmp_path)
    (folder / ".metadata").write_bytes(hostile_pickles(sentinel)[name])
    with pytest.raises((errors.UnsafeCheckpoint, errors.CorruptCheckpoint)) as caught:
        load_dcp(open_store(folder))
    if " " in name and name.split()[0] in ("os", "posix", "torch", "builtins", MDM):
        module, attribute, *_ = name.split(" ")
        assert isinstance(caught.value, errors.UnsafeCheckpoint)
        assert f"{module}.{attribute}" in str(caught.value) and "--allow-pickle" in str(caught.value)
    assert not hasattr(torch.float32, "x")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("another root", "a huge memo")])
def test_a_hostile_pickle_in_place_of_a_torch_save_file_or_leaf_is_refused_and_nothing_runs(tmp_path, sentinel, name):
    data = hostile_pickles(sentinel)[name]
    good = io.BytesIO()
    torch.save({"a": torch.ones(1)}, good)
    zipped = tmp_path / "zip.pth"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(zipped, "w") as target:
        for entry in source.namelist():
            target.writestr(entry, data if entry.endswith("data.pkl") else source.read(entry))
    (tmp_path / "plain.pth").write_bytes(data)
    (tmp_path / "magic.pth").write_bytes(
        b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {})) + data
    )
    for file in ("zip.pth", "plain.pth", "magic.pth"):
        with pytest.raises((errors.UnsafeCheckpoint, errors.CorruptCheckpoint)):
            load_file(open_store(tmp_path), file)
    folder = saved(tmp_path)
    leaf = next(folder.glob("*.distcp"))
    # In place of every leaf: the folder's own metadata says where they lie and how long they are.
    leaf.write_bytes((zipped.read_bytes() * 9)[: leaf.stat().st_size])
    with pytest.raises((errors.UnsafeCheckpoint, errors.CorruptCheckpoint)):
        load_dcp(open_store(folder))


def test_a_forbidden_global_is_named_together_with_the_way_out(tmp_path, sentinel):
    torch.save({"a": Plant(os.system, f"touch {sentinel}")}, tmp_path / "x.pth")
    with pytest.raises(errors.UnsafeCheckpoint, match=r"posix\.system.*--allow-pickle"):
        load_file(open_store(tmp_path), "x.pth")


def test_whoever_says_allow_pickle_gets_pickle(tmp_path):
    torch.save({"a": Plant(os.system, f"touch {tmp_path / 'asked'}")}, tmp_path / "x.pth")
    load_file(open_store(tmp_path), "x.pth", allow_pickle=True)
    assert (tmp_path / "asked").exists()


def test_only_the_metadata_itself_is_read_and_never_that_of_one_rank(tmp_path, sentinel):
    folder = saved(tmp_path)
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(FileNotFoundError):
        load_dcp(open_store(folder))


def changed(folder, change):
    """The folder's metadata as another writer would have made it."""
    meta = pickle.loads((folder / ".metadata").read_bytes())
    change(meta)
    (folder / ".metadata").write_bytes(pickle.dumps(meta))


def first(meta, kind=dcp.metadata.TensorStorageMetadata):
    return next(entry for entry in meta.state_dict_metadata.values() if isinstance(entry, kind))


def held_by(meta):
    return meta.storage_data.values()


def place(**fields):
    return lambda meta: [vars(held).update(fields) for held in held_by(meta)]


CONTRADICTIONS = {
    "a file outside": place(relative_path="../other/__0_0.distcp"),
    "a file by its full path": place(relative_path="/etc/passwd"),
    "a hidden name": place(relative_path=".."),
    "a file that is not there": place(relative_path="__7_0.distcp"),
    "bytes beyond the end": place(length=10**9),
    "a negative offset": place(offset=-1),
    "an offset that is no number": place(offset="0"),
    "the same bytes for all": lambda meta: place(offset=0, length=max(held.length for held in held_by(meta)))(meta),
    "a transformed stream": place(transform_descriptors=["zstd"]),
    "no storage": lambda meta: meta.storage_data.clear(),
    "a larger tensor": lambda meta: setattr(first(meta), "size", torch.Size([2**40, 3])),
    "a huge chunk": lambda meta: setattr(first(meta).chunks[0], "sizes", torch.Size([2**40, 3])),
    "a chunk elsewhere": lambda meta: setattr(first(meta).chunks[0], "offsets", torch.Size([1, 0])),
    "another dtype": lambda meta: setattr(first(meta).properties, "dtype", torch.int32),
    "many chunks": lambda meta: setattr(first(meta), "chunks", first(meta).chunks * 10**5),
    "a path of other things": lambda meta: meta.planner_data.update(step=(None,)),
    "an entry of another kind": lambda meta: meta.state_dict_metadata.update(step=3),
    "no entries": lambda meta: setattr(meta, "state_dict_metadata", None),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_metadata_that_contradicts_itself_or_the_files_is_refused(tmp_path, name):
    folder = saved(tmp_path)
    changed(folder, CONTRADICTIONS[name])
    outside = name in ("a file outside", "a file by its full path", "a hidden name")
    with pytest.raises(errors.UnsafeCheckpoint if outside else errors.CorruptCheckpoint):
        load_dcp(open_store(folder))


def legacy_tar(path):
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())


def test_every_public_function_says_what_a_pickle_is_and_reads_none(tmp_path, sentinel):
    plant = Plant(os.system, f"touch {sentinel}")
    torch.save({"a": plant}, tmp_path / "zip.pth")
    torch.save({"a": plant}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(plant))
    legacy_tar(tmp_path / "tar.pth")
    folder = saved(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(plant))
    last = Path(shutil.copytree(folder, tmp_path / "last" / "trainer.dcp")).parent
    (last / ".complete").write_text("ok")
    torch.save({"state_dict": plant}, last / "weights.pth")
    for path, what in [
        *((tmp_path / name, "torch.save file") for name in ("zip.pth", "old.pth", "plain.pkl", "tar.pth")),
        (folder, "Distributed Checkpoint"),
        (last, "folder of pickles"),
    ]:
        with pytest.raises(errors.UnsafeCheckpoint, match=f"{path.name}.*{what}"):
            open_checkpoint(path)
        (problem,) = verify_checkpoint(path)
        assert problem.kind == "marker" and what in str(problem)
        manager = CheckpointManager(model=torch.nn.Linear(1, 1), storage=tmp_path / "run")
        with pytest.raises((errors.UnsafeCheckpoint, errors.IncompleteCheckpoint, errors.CorruptCheckpoint)):
            manager.resume(checkpoint=path)
        if path.is_dir():
            assert find_checkpoint(path) is None
    with pytest.raises((errors.UnsafeCheckpoint, errors.CorruptCheckpoint)):
        load_file(open_store(tmp_path), "tar.pth")
