"""Weights wherever they lie: what they are called, and their tensors one after the other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import pyarrow.fs as pafs
import torch
from safetensors import safe_open

from pimm_ray.checkpoint import layout, pimm
from pimm_ray.checkpoint.documents import is_text, parse_json, short
from pimm_ray.checkpoint.find import candidates, find_checkpoint, open_manifest
from pimm_ray.checkpoint.folder import open_shards, read_document
from pimm_ray.checkpoint.layout import CheckpointName
from pimm_ray.checkpoint.legacy import load_file
from pimm_ray.checkpoint.names import some
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.shards import ShardIndex, Spec, spec_of
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.errors import CheckpointNotFound, CorruptCheckpoint, PimmRayError, WeightsError

logger = logging.getLogger(__name__)

CONFIGS = ("config.json", "training_config.json", "resolved_config.json", "model_config.json")
"""Names of the configuration beside the weights, best first."""
FILES = ("model.safetensors", "model.safetensors.index.json", "model.bin", "pytorch_model.bin",
         "model.bin.index.json", "pytorch_model.bin.index.json")  # fmt: skip
"""Names of a folder's weights, best first."""
_OF_PIMM = ("model_best.pth", "model/model_best.pth")
_KEYS = ("state_dict", "model", "model_state_dict", "module")
"""Where programs keep the weights in what they save by `torch.save`."""
_IS_FILE = re.compile(r"[^/]+\.(safetensors|pth|pt)")
_IS_PART = re.compile(r"-\d+-of-\d+\.")
_BATCH = 64 * 2**20
_MAX_DOCUMENT = 256 * 2**20

Tensors = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Named tensors that are read when they are asked for.

    Args:
        origin: where they are from, for people.
        entries: what there is, by the name that it is stored under.
        read: gives the tensors of these names on the CPU, as many at once as cost little memory: a local file is mapped
            and costs its own pages. They are only to be read.
        aliases: names of tensors that are another one, and the name of that.
        config: what `config.json` or one of the older names beside the weights holds.
        commit: of the repository on the Hub.
    """

    origin: str
    entries: Mapping[str, Spec]
    read: Callable[[Iterable[str]], Tensors]
    aliases: Mapping[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    commit: str | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return next(iter(self.read([name])))[name]


def open_weights(source: Any, *, commit: str | None = None) -> Weights:
    """Find weights and read their names. Anyone may call it.

    Args:
        source: as of `load_weights`.
        commit: of an `hf://` source, to be used whatever its revision points to now.

    Raises:
        CheckpointNotFound: there is nothing at the path.
        WeightsError: there are no weights in it, or the address cannot be used.
        CorruptCheckpoint, IncompleteCheckpoint, UnsafeCheckpoint: a file is damaged, unfinished, or holds code.
    """
    if is_hub(source):
        from pimm_ray.weights import hub

        fetched = hub.fetch(source, commit=commit)
        return replace(_open(open_store(fetched.path)), origin=str(source), commit=fetched.commit)
    found = _open(open_store(source))
    return replace(found, origin=source) if isinstance(source, str) and "@" not in source else found


def is_hub(source: Any) -> bool:
    """Whether it is an address on the Hugging Face Hub."""
    return isinstance(source, str) and source.startswith("hf://")


def newest_of_run(store: Store) -> Store | None:
    """The newest good checkpoint, if this is the folder of a run of ours.

    Raises:
        WeightsError: it has checkpoints, and none is good.
    """
    if store.filesystem.get_file_info(store.path).type != pafs.FileType.Directory or not candidates(store):
        return None
    newest = find_checkpoint(store)
    if newest is None:
        raise WeightsError(f"none of the checkpoints of {store.path} is good: use another source")
    return store.child(newest.name)


def _open(store: Store) -> Weights:
    kind = store.filesystem.get_file_info(store.path).type
    if kind == pafs.FileType.NotFound:
        raise CheckpointNotFound(f"no weights at {store.path}: no such file or folder. Check the path")
    if kind == pafs.FileType.File:
        path = PurePosixPath(store.path)
        return _open_file(store.at(str(path.parent)), path.name)
    is_checkpoint = CheckpointName.parse(PurePosixPath(store.path).name) is not None
    if is_checkpoint or (store.exists(layout.MARKER) and store.peek(layout.MARKER, 1)[0] == b"{"):
        return _open_ours(store)
    if newest := newest_of_run(store):
        return _open_ours(newest)
    for name in FILES:
        if store.exists(name):
            return _open_file(store, name)
    if of_pimm := pimm.locate(store):
        return _open_pimm(of_pimm)
    names = [name for name in store.files() if _IS_FILE.fullmatch(name) and not _IS_PART.search(name)]
    for name in (*_OF_PIMM, *(names if len(names) == 1 else ())):
        if store.exists(name):
            return _open_file(store, name)
    if not names and len(folders := store.folders()) == 1:
        return _open(store.child(folders[0]))
    seen = some(sorted(store.files())) or "nothing"
    raise WeightsError(f"no weights in {store.path}: it holds {seen}. Name one file of them")


def _open_ours(store: Store) -> Weights:
    """A checkpoint of ours. Every byte that is read is held against its digest."""
    reader = Reader(store, open_manifest(store)[1])
    index = open_shards(reader, layout.WEIGHTS + "/")
    return _of_index(index, store.path, read_document(reader)["model"]["aliases"])


def _open_file(folder: Store, name: str) -> Weights:
    if name.endswith(".index.json"):
        files = _parts(folder, name)
    else:
        files = [name]
    origin = folder.full(name)
    if files[0].endswith(".safetensors"):
        index = ShardIndex(folder, files)
        said = {name: to for metadata in index.metadata.values() for name, to in metadata.items()}
        found = _of_index(index, origin, said)
        if isinstance(folder, LocalStore):
            found = replace(found, read=_mapper(folder, index, found.aliases))
    else:
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors |= _state_dict(load_file(folder, file, mapped=True), folder.full(file))
        found = _of_tensors(tensors, origin)
    return replace(found, config=_config(folder))


def _open_pimm(store: Store) -> Weights:
    if store.filesystem.get_file_info(store.path).type == pafs.FileType.File:
        return _open(store)
    if store.exists(pimm.WEIGHTS):
        return _open_file(store, pimm.WEIGHTS)
    return _of_tensors(_state_dict(pimm.read_payload(store), store.path), store.path)


def _parts(folder: Store, name: str) -> list[str]:
    """The files that an index names."""
    path = folder.full(name)
    shards = parts_of(folder.read(name, limit=_MAX_DOCUMENT), where=path)
    for shard in shards:
        if not folder.exists(shard):
            raise WeightsError(
                f"{path} names {shard}, which is not there: fetch the missing file, or use another source"
            )
    return shards


def parts_of(index: bytes, *, where: str) -> list[str]:
    """The files that an index names, none of which leads out of its folder."""
    try:
        shards = sorted(set(parse_json(index)["weight_map"].values()))
        if not shards or not all(map(is_text, shards)):
            raise ValueError("its weight_map names no files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{where} is no index of weights: {short(str(error))}") from None
    for shard in shards:
        layout.check_inside(shard, where=where)
    return shards


def _of_index(index: ShardIndex, origin: str, aliases: Mapping[str, str]) -> Weights:
    aliases = {name: to for name, to in aliases.items() if to in index.tensors and name not in index.tensors}

    def read(names: Iterable[str]) -> Tensors:
        """In the order of the files."""
        first = {name: index.tensors[aliases.get(name, name)].slots[0] for name in names}
        batch: list[str] = []
        room = _BATCH
        for name in sorted(first, key=lambda name: (first[name].file, first[name].begin)):
            size = entries[name].bytes
            if batch and size > room:
                yield load(batch)
                batch, room = [], _BATCH
            batch.append(name)
            room -= size
        yield load(batch)

    def load(names: list[str]) -> dict[str, torch.Tensor]:
        tensors = index.load({aliases.get(name, name) for name in names})
        return {name: tensors[aliases.get(name, name)] for name in names}

    stored = {name: name for name in index.tensors} | aliases
    entries = {name: Spec(name, index.tensors[to].shape, index.tensors[to].dtype) for name, to in stored.items()}
    return Weights(origin=origin, entries=entries, read=read, aliases=aliases)


def _mapper(folder: LocalStore, index: ShardIndex, aliases: Mapping[str, str]) -> Callable[[Iterable[str]], Tensors]:
    def read(names: Iterable[str]) -> Tensors:
        files: dict[str, list[str]] = {}
        for name in names:
            files.setdefault(index.tensors[aliases.get(name, name)].slots[0].file, []).append(name)
        for file, held in files.items():
            with safe_open(folder.real(file), framework="pt") as opened:
                yield {name: opened.get_tensor(aliases.get(name, name)) for name in held}

    return read


def _of_tensors(tensors: dict[str, torch.Tensor], origin: str) -> Weights:
    first: dict[Any, str] = {}
    tied = {
        name: first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    return Weights(
        origin=origin,
        entries={name: spec_of(name, tensor) for name, tensor in tensors.items()},
        read=lambda names: iter([{name: tensors[name] for name in names}]),
        aliases={name: to for name, to in tied.items() if name != to},
    )


def _state_dict(held: Any, path: str) -> dict[str, torch.Tensor]:
    for _ in range(3):
        if not isinstance(held, dict):
            break
        if tensors := {str(name): value for name, value in held.items() if isinstance(value, torch.Tensor)}:
            return tensors
        held = next((held[key] for key in _KEYS if key in held), None)
    raise WeightsError(f"{path} holds no tensors by name, neither at its top nor under {', '.join(_KEYS)}")


def _config(folder: Store) -> dict[str, Any] | None:
    for name in CONFIGS:
        if folder.exists(name):
            try:
                document = parse_json(folder.read(name, limit=_MAX_DOCUMENT))
            except (PimmRayError, ValueError) as error:
                raise CorruptCheckpoint(f"{folder.full(name)} cannot be read: {error}", file=name) from None
            return document if isinstance(document, dict) else None
    return None
