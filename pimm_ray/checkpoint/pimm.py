"""Checkpoints that pimm wrote: which one a path means, and all that it holds."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow.fs as pafs

from pimm_ray.checkpoint.documents import short
from pimm_ray.checkpoint.find import candidates
from pimm_ray.checkpoint.layout import CheckpointName
from pimm_ray.checkpoint.legacy import METADATA, load_dcp, load_file, pickled
from pimm_ray.checkpoint.store import Store
from pimm_ray.errors import CorruptCheckpoint, IncompleteCheckpoint

logger = logging.getLogger(__name__)

MARKER = ".complete"
"""Of each finished folder: it holds "ok"."""
WEIGHTS = "weights.pth"
TRAINER = "trainer.dcp"
_DEEPEST = 80
_OF_A_RUN = ("last", "last.prev", "model_last.pth")


def locate(store: Store) -> Store | None:
    """The checkpoint of pimm that a path means: `last` (weights beside a folder of trainer state), a folder or a `.pth`
    file that holds both, or of a run or its `model` folder the newest complete one. None: nothing here is pimm's.

    Who calls it: the driver, and rank 0.

    Raises:
        IncompleteCheckpoint: its save never finished.
    """
    if _is_file(store):
        return store if pickled(store) else None
    if _is_ours(store):
        return None
    if _is_checkpoint(store):
        if missing := _missing(store):
            raise IncompleteCheckpoint(f"{store.path} holds no {missing}: its save never finished. Use another")
        return store
    found = [
        folder.child(name) for folder in (store, store.child("model")) for name in _OF_A_RUN if folder.exists(name)
    ]
    complete = {}
    for one in found:
        if missing := None if _is_file(one) else _missing(one):
            logger.warning("passed over %s: it holds no %s, its save never finished", one.path, missing)
        else:
            complete[one] = written_at(one)
    if found and not complete:
        raise IncompleteCheckpoint(f"no checkpoint of pimm in {store.path} is complete, not even {found[0].path}")
    return max(complete, key=lambda one: complete[one]) if complete else None


def read_payload(store: Store, *, allow_pickle: bool = False) -> dict[str, Any]:
    """What pimm saved, as it was before it was laid out in files. `store` is what `locate` found.

    Args:
        allow_pickle: as of `legacy.load_file`.

    Raises:
        UnsafeCheckpoint, CorruptCheckpoint: as `legacy.load_file` and `legacy.load_dcp`.
    """
    if _is_file(store):
        folder, _, name = store.path.rpartition("/")
        payload = load_file(store.at(folder or "/"), name, allow_pickle=allow_pickle)
    elif store.exists(WEIGHTS):
        weights = load_file(store, WEIGHTS, allow_pickle=allow_pickle)
        payload = _nested(load_dcp(store.child(TRAINER), allow_pickle=allow_pickle))
        payload["model"] = {"state_dict": weights["state_dict"] if "state_dict" in weights else weights}
    else:
        payload = _nested(load_dcp(store, allow_pickle=allow_pickle))
    if not isinstance(payload, dict):
        raise CorruptCheckpoint(f"{store.path} holds a {type(payload).__name__}: it is no checkpoint of pimm")
    return payload


def written_at(store: Store) -> float:
    """When the save was finished, in seconds since 1970."""
    path = store.path if _is_file(store) else store.full(MARKER)
    return float((store.filesystem.get_file_info(path).mtime_ns or 0) / 1e9)


def size_of(store: Store) -> int:
    """Of all its files, in bytes."""
    info = store.filesystem.get_file_info(store.path)
    return int(info.size) if _is_file(store) else sum(store.files().values())


def _is_file(store: Store) -> bool:
    return bool(store.filesystem.get_file_info(store.path).type == pafs.FileType.File)


def _is_ours(store: Store) -> bool:
    """Whether it is a checkpoint or a run of ours: whatever else lies in it is then not looked at."""
    if CheckpointName.parse(store.path.rsplit("/", 1)[-1]) or candidates(store):
        return True
    return store.exists(MARKER) and store.peek(MARKER, 1)[0] == b"{"


def _is_checkpoint(store: Store) -> bool:
    return any(store.exists(name) for name in (METADATA, WEIGHTS, f"{TRAINER}/{METADATA}"))


def _missing(store: Store) -> str | None:
    """The first file that a complete folder would have."""
    whole, split = (METADATA, MARKER), (WEIGHTS, f"{TRAINER}/{METADATA}", f"{TRAINER}/{MARKER}", MARKER)
    needed = whole if store.exists(METADATA) else split
    return next((name for name in needed if not store.exists(name)), None)


def _nested(leaves: dict[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Containers again, of leaves by path. Empty ones were not saved."""
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        inner: Any = root
        for part in path[:-1]:
            inner = inner.setdefault(part, {}) if type(inner) is dict else None
        if type(inner) is not dict or path[-1] in inner or len(path) > _DEEPEST:
            raise CorruptCheckpoint(f"{METADATA} has no place for {short(path)}", file=METADATA)
        inner[path[-1]] = value
    return {key: _listed(value) for key, value in root.items()}


def _listed(value: Any) -> Any:
    """Lists where the paths had numbers."""
    if type(value) is not dict:
        return value
    inner = {key: _listed(item) for key, item in value.items()}
    if not inner or not all(type(key) is int for key in inner):
        return inner
    if sorted(inner) != [*range(len(inner))]:
        raise CorruptCheckpoint(f"{METADATA} has a list without some of its items", file=METADATA)
    return [inner[key] for key in range(len(inner))]
