"""The one door for other people's files that are pickles: plain data and tensors come through, code does not.

`torch.save` files are read by `torch.load(weights_only=True)`; stock Distributed Checkpoint (DCP) folders, and pickles
of plain data, by an unpickler whose every global stands in one table. The same files are written here for programs that
read no others. Nothing else in this package may import pickle or call `torch.load` or `torch.save`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import pyarrow.fs as pafs
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from pimm_ray.checkpoint.documents import is_count, is_text, short
from pimm_ray.checkpoint.shards import Slot, fill_exactly, is_possible
from pimm_ray.checkpoint.store import LocalStore, Store
from pimm_ray.errors import CorruptCheckpoint, UnsafeCheckpoint

METADATA = ".metadata"
_TRACES = (METADATA, "trainer.dcp/.metadata", "weights.pth", "pytorch_model.bin", "data.pkl")
_MAX_METADATA = 256 * 2**20
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],
    *sorted({type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}, key=repr),
]
"""What `weights_only` needs beyond torch's own list for numpy arrays of plain numbers."""
_BASE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
_MDM = "torch.distributed.checkpoint.metadata"


def pickled(store: Store) -> str | None:
    """What the file or folder is, if it is one that only pickle reads in full. Unpickles nothing."""
    info = store.filesystem.get_file_info(store.path)
    if info.type == pafs.FileType.File:
        with store.filesystem.open_input_file(store.path) as file:
            start = file.read(264)
        if start[:4] == b"PK\x03\x04" or start[257:262] == b"ustar" or start[:1] == b"\x80":
            return "a torch.save file, or another pickle"
        return None
    names = {name for name in _TRACES if store.exists(name)}
    if METADATA in names:
        return "a stock PyTorch Distributed Checkpoint, whose .metadata is a pickle"
    return f"a folder of pickles ({', '.join(sorted(names))})" if names else None


def load_file(store: Store, name: str, *, allow_pickle: bool = False, mapped: bool = False) -> Any:
    """What `torch.save` wrote: tensors on the CPU, numpy arrays and plain data.

    Args:
        allow_pickle: read it by pickle, which runs whatever code the file holds: only for a file that you trust.
        mapped: tensors are views of the file where it is a local one of today's kind; only to be read.

    Raises:
        FileNotFoundError: there is none.
        UnsafeCheckpoint: it refers to something else than plain data; the message names that.
        CorruptCheckpoint: it cannot be read.
    """
    path = store.full(name)
    if mapped and isinstance(store, LocalStore) and store.peek(name, 4)[0] == b"PK\x03\x04":
        return _load(store.real(name), path, name, allow_pickle, mmap=True)
    with store.filesystem.open_input_file(path) as file:
        return _load(io.BufferedReader(file), path, name, allow_pickle)


def load_dcp(store: Store, *, allow_pickle: bool = False) -> dict[tuple[str | int, ...], Any]:
    """All leaves of a stock DCP folder, by their path in the state dict that was saved: whole tensors on the CPU, and
    what `torch.save` wrote of the others.

    Args:
        allow_pickle: read `.metadata` and the leaves by pickle, which runs whatever code they hold: only for a folder
            that you trust.

    Raises:
        FileNotFoundError: there is no `.metadata`. Files of other names are never taken for it.
        UnsafeCheckpoint: it refers to something else than a DCP folder of plain data does; the message names that.
        CorruptCheckpoint: it contradicts itself, or cannot be read.
    """
    data = store.read(METADATA, limit=_MAX_METADATA)
    path = store.full(METADATA)
    try:
        found = pickle.loads(data) if allow_pickle else _Unpickler(io.BytesIO(data), _table()).load()  # noqa: S301
        entries, paths, places = _checked(found, store.files())
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{path} {error}. {_WAY_OUT}") from None
    except Exception as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}", file=METADATA) from None

    def leaf(key: str, offsets: tuple[int, ...] | None) -> Any:
        file, begin, length = places[key, offsets]
        held = bytearray(length)
        store.read_into(file, [(begin, memoryview(held))])
        return _load(io.BytesIO(held), store.full(file), file, allow_pickle)

    leaves: dict[tuple[str | int, ...], Any] = {}
    for key, entry in entries.items():
        if entry is None:
            leaves[paths[key]] = leaf(key, None)
            continue
        dtype, shape, chunks = entry
        whole = torch.empty(shape, dtype=dtype)
        for chunk in chunks:
            part, target = leaf(key, chunk.offsets), whole
            for axis, (offset, size) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                target = target.narrow(axis, offset, size)
            if not isinstance(part, torch.Tensor) or (part.dtype, part.shape) != (dtype, target.shape):
                raise CorruptCheckpoint(f"{store.path}: {short(key)} is not the tensor that {METADATA} says")
            target.copy_(part)
        leaves[paths[key]] = whole
    return leaves


def load_pickle(data: bytes, what: str, *, allow_pickle: bool = False) -> Any:
    """What `pickle.dumps` made of plain data, numpy arrays and tensors. `what` is for messages.

    Args:
        allow_pickle: read it by pickle, which runs whatever code it holds: only for data that you trust.

    Raises:
        UnsafeCheckpoint: it refers to something else than plain data; the message names that.
        CorruptCheckpoint: it cannot be read.
    """
    try:
        return pickle.loads(data) if allow_pickle else _Unpickler(io.BytesIO(data), _plain_table()).load()  # noqa: S301
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{what} {error}. {_WAY_OUT}") from None
    except Exception as error:
        raise CorruptCheckpoint(f"{what} cannot be read: {type(error).__name__}: {short(str(error))}") from None


def dump_pickle(value: Any) -> bytes:
    """For programs that store plain data so."""
    return pickle.dumps(value)


def save_file(value: Any, path: str) -> None:
    """A new file that `torch.load(weights_only=True)` reads: of tensors and plain data. On disk when this returns."""
    with open(path, "xb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def save_dcp(value: dict[str, Any], path: str) -> None:
    """A new stock DCP folder of one rank, by PyTorch's own writer, which also syncs it to disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save_by_dcp(value, checkpoint_id=path, no_dist=True)


_WAY_OUT = (
    "Only if you trust whoever wrote it, as these run whatever code it holds: pimm-ray convert --allow-pickle for a "
    "checkpoint of pimm's, torch.load(weights_only=False) and safetensors' save_file for weights"
)


def _load(file: BinaryIO | str, path: str, name: str, allow_pickle: bool, *, mmap: bool = False) -> Any:
    if allow_pickle:
        return torch.load(file, weights_only=False, map_location="cpu")
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(file, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            named = re.search(r"GLOBAL (\S+)", str(error))
            what = f"refers to {named[1]}, which is not" if named else "holds more than"
            raise UnsafeCheckpoint(f"{path} {what} plain data. {_WAY_OUT}") from None
        raise CorruptCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}", file=name) from None


class _Unpickler(pickle._Unpickler):
    """Of the two that Python has the one whose memo is a dict: the other makes as much room for it as a pickle says."""

    def __init__(self, file: BinaryIO, table: dict[tuple[str, str], Any]):
        super().__init__(file)
        self._table = table

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._table[module, name]
        except KeyError:
            raise UnsafeCheckpoint(f"refers to {module}.{name}, which no pickle of plain data does") from None

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeCheckpoint("refers to objects outside itself")


class _Record:
    """Stands for a class of DCP: holds what the pickle says of an instance, until that has been checked."""

    def __setstate__(self, state: Any) -> None:
        self.fields = state if type(state) is dict else {"state": state}


def _table() -> dict[tuple[str, str], Any]:
    """Every global that a `.metadata` may refer to, and what stands for it. New ones for each pickle, since a pickle
    may set attributes of whatever it gets."""
    records = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
    table: dict[tuple[str, str], Any] = {
        (_MDM, name): type(name, (_Record,), {}) for name in (*records, "TensorProperties", "StorageMeta")
    }
    table["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = type("_StorageInfo", (_Record,), {})
    table[_MDM, "_MEM_FORMAT_ENCODING"] = formats = _nothing()
    table["builtins", "getattr"] = _member_of(formats)
    table["torch.serialization", "_get_layout"] = _nothing()
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"):
            table[module, name] = _nothing()
    table["torch", "Size"] = type("Size", (), {"__new__": lambda cls, sizes=(): tuple(sizes)})
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return table | {("torch", name): value for name, value in dtypes.items()}


def _nothing() -> Callable[..., None]:
    """Stands for what is not used: layouts, memory formats, the path that the folder once had."""
    return type("nothing", (), {"__new__": lambda cls, *arguments: None})


def _member_of(enumeration: Any) -> Any:
    """Stands for `getattr`, by which Python 3.11.0 to 3.11.3 pickle the members of an enumeration: of this one only."""

    def member(*arguments: Any) -> None:
        if len(arguments) != 2 or arguments[0] is not enumeration or not is_text(arguments[1]):
            raise UnsafeCheckpoint("calls builtins.getattr, which no pickle of plain data does")

    return _call(member)


def _plain_table() -> dict[tuple[str, str], Any]:
    """Every global that a pickle of plain data, arrays and tensors may refer to. New ones for each pickle, as above."""
    array: Any = np.empty(0)
    table: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): _call(OrderedDict),
        ("numpy", "ndarray"): _nothing(),
        ("numpy", "dtype"): _call(np.dtype),
        ("torch", "Size"): _call(torch.Size),
        ("torch._utils", "_rebuild_tensor_v2"): _call(torch._utils._rebuild_tensor_v2),
        ("torch.storage", "_load_from_bytes"): _call(lambda data: _load(io.BytesIO(data), "a tensor", "", False)),
    }
    for room in ("numpy._core", "numpy.core"):
        table[f"{room}.multiarray", "_reconstruct"] = _call(lambda *arguments: np.ndarray(0))
        table[f"{room}.multiarray", "scalar"] = _call(array.sum().__reduce__()[0])
        table[f"{room}.numeric", "_frombuffer"] = _call(array.__reduce_ex__(5)[0])
    return table


def _call(function: Callable[..., Any]) -> Any:
    """A class that gives what the function gives: attributes that are set on it are not the function's."""
    return type("call", (), {"__new__": lambda cls, *arguments: function(*arguments)})


Entry = tuple[torch.dtype, tuple[int, ...], list[Slot]]
Paths = dict[str, tuple[str | int, ...]]
Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


def _checked(found: Any, files: dict[str, int]) -> tuple[dict[str, Entry | None], Paths, Places]:
    """What a `.metadata` says, every part of it held against its type and against the files that are there: the entries
    by key (None for what is no tensor), their paths, and the file, first byte and number of bytes of each piece."""
    meta = _fields(found, "Metadata")
    places: Places = {}
    room = sum(files.values())
    for index, place in _dict(meta["storage_data"]).items():
        at, held = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
        offset, file = at.get("offset"), held["relative_path"]
        if not is_text(file) or not _BASE_NAME.fullmatch(file):
            raise UnsafeCheckpoint(f"names the file {short(file)}, which is not a plain name in its folder")
        begin, length = _count(held["offset"]), _count(held["length"])
        room -= length
        if begin + length > files.get(file, 0) or room < 0 or held.get("transform_descriptors"):
            raise ValueError(f"{length} bytes from {begin} of {file}, which are not there")
        places[_text(at["fqn"]), None if offset is None else _sizes(offset)] = file, begin, length
    entries: dict[str, Entry | None] = {}
    pieces = 0
    for key, entry in _dict(meta["state_dict_metadata"]).items():
        if type(entry).__name__ == "BytesStorageMetadata":
            entries[_text(key)], _ = None, places[key, None]
            continue
        tensor = _fields(entry, "TensorStorageMetadata")
        dtype, shape = _dtype(tensor["properties"]), _sizes(tensor["size"])
        pieces += len(tensor["chunks"])
        if pieces > len(places):
            raise ValueError(f"{short(key)} has pieces that are in no file")
        slots = []
        for chunk in map(lambda chunk: _fields(chunk, "ChunkStorageMetadata"), tensor["chunks"]):
            offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
            file, begin, length = places[key, offsets]
            if len(offsets) != len(shape) or len(sizes) != len(shape) or length < math.prod(sizes) * dtype.itemsize:
                raise ValueError(f"the pieces of {short(key)} are not there")
            slots.append(Slot(file, begin, sizes, offsets))
        if not is_possible(shape, dtype) or not fill_exactly(shape, slots):
            raise ValueError(f"the pieces of {short(key)} do not make up a tensor")
        entries[_text(key)] = dtype, shape, slots
    named = _dict(meta.get("planner_data") or {})
    paths = {key: tuple(named.get(key, (key,))) for key in entries}
    if not all(is_text(part) or is_count(part) for path in paths.values() for part in path):
        raise ValueError("planner_data holds something else than paths")
    return entries, paths, places


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Of a `_Record`, or of the real thing that pickle makes."""
    if type(value).__name__ != name:
        raise ValueError(f"{short(value)} where a {name} belongs")
    return value.fields if isinstance(value, _Record) else vars(value)


def _dtype(properties: Any) -> torch.dtype:
    state = _fields(properties, "TensorProperties")
    dtype = state["state"][0] if "state" in state else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{short(dtype)} where a dtype belongs")
    return dtype


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{short(value)} where a dict belongs")
    return value


def _text(value: Any) -> str:
    if not is_text(value):
        raise ValueError(f"{short(value)} where a name belongs")
    return str(value)


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{short(value)} where a count belongs")
    return int(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise ValueError(f"{short(value)} where a size belongs")
    return tuple(map(_count, value))
