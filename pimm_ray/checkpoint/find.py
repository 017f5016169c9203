"""Checkpoints from outside: find the newest good one of a run, open one, verify one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint.folder import open_all, read_document, read_manifest
from pimm_ray.checkpoint.layout import CheckpointName, Manifest
from pimm_ray.checkpoint.legacy import pickled
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.store import Store, open_store
from pimm_ray.errors import (
    CheckpointNotFound,
    CheckpointVersionError,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    PimmRayError,
    StorageError,
    UnsafeCheckpoint,
)

logger = logging.getLogger(__name__)

_LISTINGS = 10


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
    """Something wrong with a checkpoint: in which file, what kind of thing, and what was expected and found there.

    `kind` is "incomplete" (its save never finished, or there is no such folder), "missing" (no such file; its size was
    expected), "size" (in bytes), "digest" (of the first wrong block), "identity" (of another checkpoint), "format" (the
    bytes are those that were saved but cannot be used), "marker" (`.complete` cannot be used), "version" (another
    release wrote it) or "unreadable" (the storage failed; the checkpoint may be good). Where nothing was expected,
    `found` tells more.
    """

    file: str
    kind: str
    expected: object = None
    found: object = None

    @property
    def is_damage(self) -> bool:
        """Whether the bytes in the folder are not those that a finished save left there."""
        return self.kind not in ("incomplete", "version", "unreadable")

    def __str__(self) -> str:
        if self.expected is None:
            return f"{self.file}: {self.kind}: {self.found}"
        unit = " bytes" if self.kind in ("size", "missing") else ""
        found = "nothing" if self.found is None else self.found
        return f"{self.file}: {self.kind}, expected {self.expected}{unit}, found {found}"

    @staticmethod
    def of(error: Exception) -> Problem:
        """What an error at opening or reading a checkpoint says of it."""
        file = getattr(error, "file", "") or layout.MARKER
        if isinstance(error, CorruptCheckpoint) and file != layout.MARKER:
            said = error.expected is not None
            return Problem(file, error.kind, error.expected, error.found if said else str(error))
        if isinstance(error, FileNotFoundError | IncompleteCheckpoint):
            return Problem(file, "incomplete", None, str(error))
        if isinstance(error, CheckpointVersionError):
            return Problem(file, "version", None, str(error))
        return Problem(file, "unreadable" if isinstance(error, OSError) else "marker", None, str(error))


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
    except (FileNotFoundError, StorageError, CorruptCheckpoint, CheckpointVersionError) as error:
        if what := pickled(store):
            raise UnsafeCheckpoint(
                f"{store.path} is {what}, not a checkpoint of pimm_ray, and reading it could run code: give a "
                "checkpoint folder of a run (of one of pimm, `pimm-ray convert` makes one), or load its weights in the "
                "loop by torch.load(weights_only=True)"
            ) from None
        if not isinstance(error, FileNotFoundError):
            raise
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
    return _examine(open_store(source), deep)[1]


def _examine(store: Store, deep: bool) -> tuple[CheckpointInfo | None, list[Problem]]:
    """What a checkpoint says of itself, and what is wrong with it."""
    try:
        info, manifest = open_manifest(store)
        return info, check_sizes(store, manifest) or (check_content(Reader(store, manifest)) if deep else [])
    except (PimmRayError, OSError) as error:
        return None, [Problem.of(error)]


def check_sizes(store: Store, manifest: Manifest) -> list[Problem]:
    """Compare the folder's files with the manifest, by one listing."""
    present = store.files()
    problems = []
    for entry in manifest.files:
        # A listing may lag behind: what it lacks is asked for by name before it is called missing.
        size = present[entry.path] if entry.path in present else store.size(entry.path)
        if size is None:
            problems.append(Problem(entry.path, "missing", entry.bytes, None))
        elif size != entry.bytes:
            problems.append(Problem(entry.path, "size", entry.bytes, size))
    return problems


def check_content(reader: Reader) -> list[Problem]:
    """Read every byte; when the digests are right, prove that all files belong together."""
    problems = [Problem.of(error) for error in reader.rest()] or check_marker(reader, read_document(reader))
    if not problems:
        open_all(reader)
    return problems


def check_marker(reader: Reader, document: dict[str, Any]) -> list[Problem]:
    """Compare what the marker, of which no other file has a digest, says with what `state.json` and the name say."""
    manifest = reader.manifest
    said = {"epoch": document.get("epoch"), "world_size": document.get("shape", {}).get("world_size")}
    if name := CheckpointName.parse(reader.store.path.rsplit("/", 1)[-1]):
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
    store, passed, looked_at = open_store(run_dir), dict[str, Problem](), list[str]()
    # A run that lives may complete a newer one and delete all others between the listing and the look: look twice.
    for _ in range(_LISTINGS):
        names = candidates(store)
        for name in names:
            if name in passed and passed[name].is_damage:
                continue
            info, problems = _examine(store.child(name), verified)
            if not problems:
                return info
            if name not in passed:
                logger.warning("passed over %s: %s", store.full(name), problems[0])
            passed[name] = problems[0]
        if names == looked_at:
            break
        looked_at = names
    return None


def candidates(store: Store) -> list[str]:
    """Names of the checkpoint folders of a run, newest first. Other names are ignored."""
    names = {name: parsed for name in store.folders() if (parsed := CheckpointName.parse(name))}
    return sorted(names, key=lambda name: names[name], reverse=True)
