"""Names and documents of a checkpoint folder. Pure: no torch, no I/O."""

from __future__ import annotations

import json
import math
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from pimm_ray.errors import CheckpointVersionError, CorruptCheckpoint, UnsafeCheckpoint

SCHEMA = "pimm_ray.checkpoint"
VERSION = 4
MARKER = ".complete"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
WEIGHTS = "weights"
WEIGHTS_SINGLE = "weights/model.safetensors"
WEIGHTS_INDEX = "weights/model.safetensors.index.json"
TRAINER = "trainer.dcp"
RANKS = "ranks"
KEPT = "kept"
"""Sub-folder of a run for snapshots that Ray must not delete. Never searched for the newest checkpoint."""

ID_KEY = "pimm_ray.id"
DOCUMENT_KEY = "pimm_ray.state"
BLOCK = 16 * 2**20
"""Bytes covered by one digest."""

MAX_DOCUMENT = 256 * 2**20
_NOT_FINITE: dict[Any, Any] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
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
        return seal(document)

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
            files = tuple(
                FileEntry(
                    _text(entry["path"]),
                    _count(entry["bytes"]),
                    tuple(_text(digest) for digest in entry["xxh3"]),
                    _count(entry["block"]),
                )
                for entry in document["files"]
            )
            parent = document["parent"]
            manifest = Manifest(
                id=_text(document["id"]),
                parent=None if parent is None else _text(parent),
                step=_count(document["step"]),
                epoch=_count(document["epoch"]),
                attempt=_count(document["attempt"]),
                world_size=_count(document["world_size"]),
                created=float(document["created"]),
                reason=_text(document["reason"]),
                metrics={key: _NOT_FINITE.get(value, value) for key, value in document["metrics"].items()},
                files=files,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpoint(f"{path} is not a valid manifest ({error!r})", file=MARKER) from None
        for entry in files:
            check_inside(entry.path, where=path)
            if entry.block < 1 or len(entry.xxh3) != -(-entry.bytes // entry.block):
                raise CorruptCheckpoint(f"{path}: wrong number of digests for {entry.path}", file=MARKER)
        return manifest


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
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not JSON ({error})", file=path.rsplit("/", 1)[-1]) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise CheckpointVersionError(f"{path} is not of schema {SCHEMA!r}: not a checkpoint of pimm_ray")
    if document.get("version") != VERSION:
        raise CheckpointVersionError(
            f"{path} has version {document.get('version')!r}; this release reads {VERSION}: install the release "
            "that wrote it"
        )
    return document


def check_inside(path: str, *, where: str) -> None:
    """Refuse a relative path that could lead out of its folder."""
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise UnsafeCheckpoint(f"{where} names {path!r}, which is not a plain path inside the checkpoint folder")


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


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value
