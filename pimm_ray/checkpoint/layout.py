"""Names and documents of a checkpoint folder. Pure: no torch, no I/O."""

from __future__ import annotations

import json
import math
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from pimm_ray.checkpoint.documents import (
    MAX_NAME,
    by_name,
    is_count,
    is_finite,
    is_name,
    is_number,
    is_positive,
    is_text,
    optional,
    parse_json,
    require,
    short,
)
from pimm_ray.errors import CheckpointVersionError, CorruptCheckpoint, UnsafeCheckpoint, UnstorableState

SCHEMA = "pimm_ray.checkpoint"
VERSION = 4
MARKER = ".complete"
DAMAGED = ".damaged"
"""A note for people, and for retention, in the folder of a checkpoint that was found to be damaged."""
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
WEIGHTS = "weights"
WEIGHTS_SINGLE = "weights/model.safetensors"
WEIGHTS_INDEX = "weights/model.safetensors.index.json"
TRAINER = "trainer.dcp"
RANKS = "ranks"
KEPT = "kept"
"""Sub-folder of a run for snapshots that Ray must not delete. Never searched for the newest checkpoint."""
BEST = "best"
"""Sub-folder of a run with a folder of weights alone, those of its best save."""

ID_KEY = "pimm_ray.id"
DOCUMENT_KEY = "pimm_ray.state"
BLOCK = 16 * 2**20
"""Bytes covered by one digest."""

MAX_DOCUMENT = 64 * 2**20
"""Bytes of `state.json`. JSON takes up to 25 times its size in memory."""
MAX_MARKER = 32 * 2**20
"""Bytes of a marker: 25 TB of digests, or the files of 30,000 ranks."""
MAX_FILES = 200_000
_NOT_FINITE: dict[Any, Any] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DIGEST = re.compile(r"[0-9a-f]{16}")
_HEAD: dict[str, Any] = {
    "id": is_name,
    "parent": optional(is_name),
    "step": is_count,
    "epoch": is_count,
    "attempt": is_count,
    "world_size": is_positive,
    "created": is_finite,
    "reason": is_text,
}
_MANIFEST: dict[str, Any] = {
    **_HEAD,
    "metrics": by_name(lambda value: is_text(value) or is_number(value) or type(value) is bool),
    "files": [
        {
            "path": is_text,
            "bytes": is_count,
            "xxh3": [lambda value: is_text(value) and _DIGEST.fullmatch(value)],
            # One block is read at once.
            "block": lambda value: is_count(value) and 2**12 <= value <= 2**28,
        }
    ],
}
_NAME = re.compile(r"checkpoint_(\d{1,18})-(\d{1,9})-([0-9a-f]{4})")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """`checkpoint_{step:08}-{attempt:04}-{4 random hex}`. Sorts by age: the newest has the highest (attempt, step)."""

    attempt: int
    step: int
    suffix: str

    def __str__(self) -> str:
        return f"checkpoint_{self.step:08}-{self.attempt:04}-{self.suffix}"

    @staticmethod
    def new(step: int, attempt: int, after: CheckpointName | None = None) -> CheckpointName:
        """A name that is newer than `after`, the one that this run saved last."""
        if after is not None and (after.attempt, after.step) == (attempt, step):
            return CheckpointName(attempt, step, f"{int(after.suffix, 16) + 1:04x}")
        return CheckpointName(attempt, step, f"{secrets.randbelow(0x8000):04x}")

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        """The parts of a folder name, or None for a name that is not one of ours."""
        match = _NAME.fullmatch(name)
        return CheckpointName(int(match[2]), int(match[1]), match[3]) if match else None


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: relative path, size in bytes, and the xxh3_64 digest of each block of it."""

    path: str
    bytes: int
    xxh3: tuple[str, ...]
    block: int = BLOCK


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`.complete`, the file that makes a folder a checkpoint. Sizes in bytes, `created` in seconds since 1970."""

    id: str
    parent: str | None
    step: int
    epoch: int
    attempt: int
    world_size: int
    created: float
    reason: str
    metrics: dict[str, Any] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()

    def to_json(self) -> bytes:
        document = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        document["metrics"] = {key: _plain(value) for key, value in self.metrics.items()}
        data = seal(document)
        if len(data) > MAX_MARKER:
            raise UnstorableState(
                f"{MARKER} would have {len(data)} bytes and may have {MAX_MARKER}: shorten the metrics"
            )
        return data

    @staticmethod
    def parse(data: bytes, *, path: str) -> Manifest:
        """Read a `.complete`. `path` is for messages.

        Raises:
            CorruptCheckpoint: it is not a manifest, or not the one that was written.
            CheckpointVersionError: it is one of another schema or a newer version.
            UnsafeCheckpoint: it names a file outside the folder.
        """
        document = parse_document(data, path=path)
        check_seal(data, path=path)
        try:
            require(document, _MANIFEST)
            if len(document["files"]) > MAX_FILES:
                raise ValueError(f"{len(document['files'])} files, more than {MAX_FILES}")
        except ValueError as error:
            raise CorruptCheckpoint(f"{path} is not a valid manifest: {error}", file=MARKER) from None
        files = tuple(FileEntry(e["path"], e["bytes"], tuple(e["xxh3"]), e["block"]) for e in document["files"])
        for entry in files:
            check_inside(entry.path, where=path)
            if len(entry.xxh3) != -(-entry.bytes // entry.block):
                raise CorruptCheckpoint(f"{path}: wrong number of digests for {entry.path}", file=MARKER)
        names = {entry.path for entry in files}
        if len(names) != len(files) or STATE not in names:
            raise CorruptCheckpoint(f"{path} names no {STATE}, or a file twice", file=MARKER)
        metrics = {key: _NOT_FINITE.get(value, value) for key, value in document["metrics"].items()}
        return Manifest(**{key: document[key] for key in _HEAD}, metrics=metrics, files=files)


def seal(document: dict[str, Any]) -> bytes:
    """A marker's bytes. They end with the digest of all before it: no other file holds one of the marker."""
    text = json.dumps(document).removesuffix("}").encode()
    return text + _end(text)


def check_seal(data: bytes, *, path: str) -> None:
    """Refuse a marker that is not, to the byte, what `seal` made."""
    length = len(data) - len(_end(b""))
    if data[length:] != _end(data[:length]):
        raise CorruptCheckpoint(f"{path} is damaged: it does not match the digest that it ends with", file=MARKER)


def _end(text: bytes) -> bytes:
    return f', "xxh3": "{xxhash.xxh3_64_hexdigest(text)}"}}'.encode()


def parse_document(data: bytes, *, path: str) -> dict[str, Any]:
    """The JSON object in `data`, when it is of our schema and of a version we read."""
    file = path.rsplit("/", 1)[-1]
    try:
        document = parse_json(data)
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is not JSON ({error})", file=file) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise CheckpointVersionError(f"{path} is not of schema {SCHEMA!r}: not a checkpoint of pimm_ray")
    if document.get("version") != VERSION:
        raise CheckpointVersionError(
            f"{path} has version {short(document.get('version'))}; this release reads {VERSION}: install the release "
            "that wrote it"
        )
    return document


def check_inside(path: str, *, where: str) -> None:
    """Refuse a relative path that could lead out of its folder, or that some filesystem reads otherwise."""
    parts = path.split("/")
    plain = path.isprintable() and len(path) <= MAX_NAME and not set(path) & set("\\:")
    if not plain or any(part in ("", ".", "..") or len(part) > 255 for part in parts):
        raise UnsafeCheckpoint(f"{where} names {short(path)}, which is not a plain path inside the checkpoint folder")


def rank_file(rank: int) -> str:
    return f"{RANKS}/{rank:05}.safetensors"


def trainer_file(writer: int) -> str:
    """Named as PyTorch's distributed safetensors writer names its shards; `writer` counts from 0."""
    return f"{TRAINER}/shard-{writer + 1:05}-model-00001-of-00001.safetensors"


def weights_file(index: int, count: int) -> str:
    """Named as Hugging Face names the parts of a model; `index` counts from 0."""
    return WEIGHTS_SINGLE if count == 1 else f"{WEIGHTS}/model-{index + 1:05}-of-{count:05}.safetensors"


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
