"""One checkpoint folder: every rank writes its share, rank 0 commits, and any process reads it back."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint.codec import decode, encode
from pimm_ray.checkpoint.documents import parse_json
from pimm_ray.checkpoint.layout import FileEntry, Manifest
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.schema import check_head, check_rank
from pimm_ray.checkpoint.shards import Piece, ShardIndex, raw_bytes, spec_of, split_rows, split_whole, write_shard
from pimm_ray.checkpoint.state import Snapshot
from pimm_ray.checkpoint.store import Store
from pimm_ray.errors import CorruptCheckpoint, UnstorableState

logger = logging.getLogger(__name__)


class Share:
    """What one rank of `world` writes of a snapshot. Making it reads no tensor data and asks no other rank."""

    def __init__(self, snapshot: Snapshot, own: Mapping[str, Any], *, rank: int, world: int):
        self.snapshot, self.rank, self.world = snapshot, rank, world
        self._own_tensors: dict[str, torch.Tensor] = {}
        self._own = json.dumps(encode(dict(own), "rank", self._own_tensors))
        specs = [spec_of(name, tensor) for name, tensor in sorted(snapshot.weights.items())]
        parameters = [spec for spec in specs if spec.key in snapshot.parameters]
        buffers = [spec for spec in specs if spec.key not in snapshot.parameters]
        shares = split_whole(parameters, world, first=buffers)
        replicated = [
            spec_of(k, tensor) for k, tensor in snapshot.trainer.items() if k not in snapshot.averaged_buffers
        ]
        averaged_buffers = [spec_of(key, snapshot.trainer[key]) for key in snapshot.averaged_buffers]
        self._trainer = split_rows(replicated, world, first=averaged_buffers)
        self._state = [Piece(spec_of(key, tensor), -1, 0, 1) for key, tensor in snapshot.tensors.items()]
        self._own_pieces = [Piece(spec_of(key, tensor), -1, 0, 1) for key, tensor in self._own_tensors.items()]
        writers = [writer for writer in range(world) if shares[writer]] or [0]
        self._weights = [
            (layout.weights_file(i, len(writers)), writer, shares[writer]) for i, writer in enumerate(writers)
        ]

    @property
    def fingerprint(self) -> str:
        """Equal on all ranks exactly when their shares fit together to one whole."""
        shares = [*(pieces for _, _, pieces in self._weights), *self._trainer]
        plan = [[(piece.spec.key, piece.spec.shape, str(piece.spec.dtype)) for piece in share] for share in shares]
        return xxhash.xxh3_64_hexdigest(json.dumps(plan).encode())

    @property
    def sample(self) -> str:
        """A digest of one number of each parameter: unequal when ranks train models of their own, of which a checkpoint
        would be a mixture. Reads these numbers from the device, all at once."""
        firsts: dict[Any, list[torch.Tensor]] = {}
        for name in sorted(self.snapshot.parameters):
            tensor = self.snapshot.weights[name]
            if tensor.numel():
                firsts.setdefault((tensor.device, tensor.dtype), []).append(tensor[(-1,) * tensor.dim()])
        digest = xxhash.xxh3_64()
        for tensors in firsts.values():
            digest.update(raw_bytes(torch.stack(tensors)))
        return digest.hexdigest()

    @property
    def documents(self) -> dict[str, str]:
        """Digests of the small parts of the state, which are written as rank 0 holds them. Tensors do not count."""
        parts = {key: value for key, value in self.snapshot.document.items() if key not in ("extra", "versions")}
        parts |= {f"extra[{name!r}]": value for name, value in self.snapshot.document["extra"].items()}
        return {key: xxhash.xxh3_64_hexdigest(json.dumps(value).encode()) for key, value in parts.items()}

    def write(self, store: Store, id: str) -> list[FileEntry]:
        """Write this rank's files into an existing folder. Rank 0's `state.json` is written by `write_state`."""
        mark = {layout.ID_KEY: id}
        entries = []
        for name, writer, pieces in self._weights:
            if writer == self.rank:
                metadata = {"format": "pt", **mark}
                entries.append(write_shard(store, name, pieces, self.snapshot.weights, metadata))
        if self._trainer[self.rank]:
            name = layout.trainer_file(self.rank)
            pieces = self._trainer[self.rank]
            entries.append(write_shard(store, name, pieces, self.snapshot.trainer, mark, distributed=True))
        name, metadata = layout.rank_file(self.rank), {**mark, layout.DOCUMENT_KEY: self._own}
        entries.append(write_shard(store, name, self._own_pieces, self._own_tensors, metadata))
        return entries

    def write_state(self, store: Store, id: str, head: Mapping[str, Any]) -> list[FileEntry]:
        """Rank 0: write `state.json` and what belongs to it. `head` are its entries beside the state itself."""
        marked = {"schema": layout.SCHEMA, "version": layout.VERSION, "id": id}
        text = json.dumps({**marked, **head, **self.snapshot.document}).encode()
        if len(text) > layout.MAX_DOCUMENT:
            parts = {key: len(json.dumps(value)) for key, value in self.snapshot.document.items()}
            raise UnstorableState(
                f"{layout.STATE} would have {len(text)} bytes and may have {layout.MAX_DOCUMENT}, most of it in "
                f"{max(parts, key=lambda key: parts[key])!r}: keep long lists and arrays as tensors"
            )
        entries = [store.write(layout.STATE, [text])]
        if self._state:
            mark = {layout.ID_KEY: id}
            entries.append(write_shard(store, layout.STATE_TENSORS, self._state, self.snapshot.tensors, mark))
        if len(self._weights) > 1:
            held = {piece.spec: name.split("/")[1] for name, _, pieces in self._weights for piece in pieces}
            weight_map = {spec.key: name for spec, name in held.items()}
            total = sum(spec.bytes for spec in held)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            entries.append(store.write(layout.WEIGHTS_INDEX, [json.dumps(index).encode()]))
        return entries


def prepare(store: Store) -> None:
    """Rank 0, before any rank writes."""
    store.make(layout.WEIGHTS, layout.TRAINER, layout.RANKS)


def commit(store: Store, manifest: Manifest) -> None:
    """Rank 0, when every rank has written: from here on the folder is a checkpoint. Killed before, it never was one.

    When this raises there is no marker (or the storage does not answer): ranks and the next resume believe the same.
    """
    # A marker that survives a power cut must not name files whose folder entries did not.
    store.sync()
    data = manifest.to_json()
    try:
        store.publish(layout.MARKER, data)
    except Exception as error:
        # It may be in place all the same: what follows the rename failed, or only the answer of the storage was lost.
        if not _cannot_be_withdrawn(store, data):
            raise
        logger.warning("%s is complete, but may not survive a power cut: %s", store.path, error)


def _cannot_be_withdrawn(store: Store, marker: bytes) -> bool:
    try:
        store.delete_file(layout.MARKER)
    except Exception:
        with contextlib.suppress(Exception):
            return store.read(layout.MARKER) == marker
    return False


def read_manifest(store: Store) -> Manifest:
    """Raises FileNotFoundError when there is no marker, CorruptCheckpoint and others as `Manifest.parse`."""
    data = store.read(layout.MARKER, limit=layout.MAX_MARKER)
    return Manifest.parse(data, path=store.full(layout.MARKER))


def read_document(reader: Reader) -> dict[str, Any]:
    """`state.json`, proven to belong to the reader's checkpoint."""
    data = reader.read(layout.STATE, limit=layout.MAX_DOCUMENT)
    document = layout.parse_document(data, path=reader.full(layout.STATE))
    _same_id(reader, layout.STATE, document.get("id"))
    with _checking(reader, layout.STATE):
        check_head(document)
    return document


def read_snapshot(reader: Reader, document: dict[str, Any]) -> Snapshot:
    """The whole state, on the CPU. Who calls it: every rank that restores."""
    return Snapshot(
        weights=open_shards(reader, layout.WEIGHTS + "/").load(),
        parameters=frozenset(),
        trainer=open_shards(reader, layout.TRAINER + "/").load(),
        document=document,
        tensors=open_shards(reader, layout.STATE_TENSORS).load(),
    )


def read_rank(reader: Reader, rank: int) -> Any:
    """What rank `rank` of the saving job stored of its own."""
    index, name = open_rank(reader, rank), layout.rank_file(rank)
    tensors = index.load()
    with _checking(reader, name):
        own = decode(parse_json(index.metadata[name].get(layout.DOCUMENT_KEY, "")), tensors, "rank", file=name)
        check_rank(own, reader.manifest.world_size)
    return own


@contextlib.contextmanager
def _checking(reader: Reader, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CorruptCheckpoint(f"{reader.full(name)}: {error}", file=name) from None


def open_all(reader: Reader) -> None:
    """Prove by their headers that all files belong to the reader's checkpoint."""
    for prefix in (layout.WEIGHTS + "/", layout.TRAINER + "/", layout.STATE_TENSORS):
        open_shards(reader, prefix)
    for rank in range(reader.manifest.world_size):
        open_rank(reader, rank)


def open_rank(reader: Reader, rank: int) -> ShardIndex:
    index, name = open_shards(reader, layout.rank_file(rank)), layout.rank_file(rank)
    if name not in index.metadata:
        raise CorruptCheckpoint(f"{reader.full(layout.MARKER)} names no {name}", file=layout.MARKER)
    return index


def open_shards(reader: Reader, prefix: str) -> ShardIndex:
    """The tensors of all files whose names begin so, proven to belong to the reader's checkpoint."""
    names = [entry.path for entry in reader.manifest.files if entry.path.endswith(".safetensors")]
    index = ShardIndex(reader, [name for name in names if name.startswith(prefix)])
    for name, metadata in index.metadata.items():
        _same_id(reader, name, metadata.get(layout.ID_KEY))
    return index


def _same_id(reader: Reader, name: str, found: Any) -> None:
    expected = reader.manifest.id
    if found != expected:
        raise CorruptCheckpoint(
            f"{reader.full(name)} belongs to checkpoint {found}, not to {expected}: files of two checkpoints are mixed",
            file=name,
            kind="identity",
            expected=expected,
            found=found,
        )
