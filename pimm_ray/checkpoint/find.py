"""Checkpoints from outside: find the newest good one of a run, open one, verify one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint.folder import read_document, read_manifest
from pimm_ray.checkpoint.layout import CheckpointName, Manifest
from pimm_ray.checkpoint.store import Store, open_store
from pimm_ray.errors import CheckpointNotFound, IncompleteCheckpoint, PimmRayError, StorageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint. `path` is on `filesystem`; `bytes` is its size, `created` seconds since 1970, `parent`
    the id of the checkpoint before it: the last one its attempt saved, or the one that the attempt resumed from."""

    path: str
    filesystem: pafs.FileSystem
    id: str
    step: int
    epoch: int
    attempt: int
    world_size: int
    created: float
    bytes: int
    reason: str
    parent: str | None
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Problem:
    """Something wrong with a checkpoint. `kind`: "incomplete" (its save never finished), "missing", "size", "digest",
    "identity" (of another checkpoint), "marker" (not one we can use) or "unreadable"; then `found` tells more."""

    file: str
    kind: str
    expected: object = None
    found: object = None

    def __str__(self) -> str:
        if self.expected is None:
            return f"{self.file}: {self.kind}: {self.found}"
        return f"{self.file}: {self.kind}, expected {self.expected}, found {self.found}"

    @staticmethod
    def of(error: Exception) -> Problem:
        """What an error at opening a checkpoint says of it."""
        file = getattr(error, "file", None) or layout.MARKER
        if getattr(error, "expected", None) is not None:
            return Problem(file, "identity", error.expected, error.found)  # type: ignore[attr-defined]
        if isinstance(error, IncompleteCheckpoint):
            return Problem(file, "incomplete", None, str(error))
        return Problem(file, "unreadable" if isinstance(error, StorageError) else "marker", None, str(error))


def open_checkpoint(source: Any) -> CheckpointInfo:
    """Read what a checkpoint says of itself. Anyone may call it; no process group is needed.

    Args:
        source: a path, a URI (`s3://bucket/run/checkpoint_...`) or a `ray.train.Checkpoint`.

    Raises:
        CheckpointNotFound: there is no such folder.
        IncompleteCheckpoint: its save never finished.
        CorruptCheckpoint, CheckpointVersionError, UnsafeCheckpoint: its `.complete` cannot be used.

    Example:
        >>> open_checkpoint("runs/demo/checkpoint_00000400-0001-7f3c").step
        400
    """
    return open_manifest(open_store(source))[0]


def open_manifest(store: Store) -> tuple[CheckpointInfo, Manifest]:
    """As `open_checkpoint`, with the manifest."""
    try:
        manifest = read_manifest(store)
    except FileNotFoundError:
        if not store.exists():
            raise CheckpointNotFound(f"no checkpoint at {store.path}: no such folder. Check the path") from None
        if names := candidates(store):
            raise IncompleteCheckpoint(
                f"{store.path} is a run folder, not a checkpoint; give one of its checkpoints, such as {names[0]}"
            ) from None
        raise IncompleteCheckpoint(
            f"{store.path} holds no {layout.MARKER}: it is not a checkpoint, or its save never finished. Use another"
        ) from None
    info = CheckpointInfo(
        path=store.path,
        filesystem=store.filesystem,
        bytes=sum(entry.bytes for entry in manifest.files),
        **{
            key: getattr(manifest, key)
            for key in ("id", "step", "epoch", "attempt", "world_size", "created", "reason", "parent", "metrics")
        },
    )
    return info, manifest


def verify_checkpoint(source: Any, *, deep: bool = True) -> list[Problem]:
    """What is wrong with a checkpoint; an empty list means that it is good. Never raises for a bad checkpoint.

    Anyone may call it; no process group is needed. The digests find accidents, not forgery.

    Args:
        source: a path, a URI or a `ray.train.Checkpoint`.
        deep: read every byte and compare digests. False compares names and sizes only.
    """
    store = open_store(source)
    try:
        _, manifest = open_manifest(store)
        problems = check_sizes(store, manifest)
        if deep and not problems:
            problems = check_digests(store, manifest)
        if not problems:
            problems = check_marker(store, manifest)
    except (PimmRayError, OSError) as error:
        return [Problem.of(error)]
    return problems


def check_sizes(store: Store, manifest: Manifest) -> list[Problem]:
    """Compare the folder's files with the manifest, by one listing."""
    present = store.files()
    problems = []
    for entry in manifest.files:
        if entry.path not in present:
            problems.append(Problem(entry.path, "missing", entry.bytes, None))
        elif present[entry.path] != entry.bytes:
            problems.append(Problem(entry.path, "size", entry.bytes, present[entry.path]))
    return problems


def check_digests(store: Store, manifest: Manifest, *, part: int = 0, parts: int = 1) -> list[Problem]:
    """Read and compare part number `part` of `parts` near-equal parts of a checkpoint's bytes."""
    blocks = sum(len(entry.xxh3) for entry in manifest.files)
    start, stop = part * blocks // parts, (part + 1) * blocks // parts
    problems = []
    position = 0
    for entry in manifest.files:
        first = max(0, start - position)
        count = min(len(entry.xxh3), stop - position) - first
        position += len(entry.xxh3)
        if count <= 0:
            continue
        expected = list(entry.xxh3[first : first + count])
        try:
            found: list[str | None] = list(store.digests(entry.path, entry.block, first, count))
        except (StorageError, FileNotFoundError) as error:
            problems.append(Problem(entry.path, "unreadable", None, str(error)))
            continue
        if found != expected:
            found += [None] * (len(expected) - len(found))
            wrong = next(pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1])
            problems.append(Problem(entry.path, "digest", *wrong))
    return problems


def check_marker(store: Store, manifest: Manifest) -> list[Problem]:
    """Compare what the marker, of which there is no digest, says of the checkpoint with what its files and name say."""
    document = read_document(store, manifest.id)
    said = {"epoch": document.get("epoch"), "world_size": document.get("shape", {}).get("world_size")}
    if name := CheckpointName.parse(store.path.rsplit("/", 1)[-1]):
        said |= {"step": name.step, "attempt": name.attempt}
    return [
        Problem(layout.MARKER, "identity", value, getattr(manifest, key))
        for key, value in said.items()
        if value != getattr(manifest, key)
    ]


def find_checkpoint(run_dir: Any, *, verified: bool = True) -> CheckpointInfo | None:
    """The newest good checkpoint of a run, or None. Newest means the highest (attempt, step). Anyone may call it.

    Logs one line for each newer one that is passed over; never raises for a bad checkpoint, and deletes nothing.

    Args:
        run_dir: the folder that holds the checkpoints: a path or URI.
        verified: read every byte and compare digests. False takes the newest one that is complete.
    """
    store = open_store(run_dir)
    for name in candidates(store):
        problems = verify_checkpoint(store.child(name), deep=verified)
        if not problems:
            return open_checkpoint(store.child(name))
        logger.warning("passed over %s: %s", store.full(name), problems[0])
    return None


def candidates(store: Store) -> list[str]:
    """Names of the checkpoint folders of a run, newest first. Other names are ignored."""
    names = {name: parsed for name in store.folders() if (parsed := CheckpointName.parse(name))}
    return sorted(names, key=lambda name: names[name], reverse=True)
