"""One process saves `Objects` as several ranks would, and reads the folder back."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pimm_ray.checkpoint.folder import Share, prepare, read_document, read_rank, read_snapshot
from pimm_ray.checkpoint.layout import Manifest
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.state import Objects, Snapshot, collect
from pimm_ray.checkpoint.store import open_store
from pimm_ray.elastic import rng
from pimm_ray.elastic.plan import Position, RunShape
from pimm_ray.progress import TrainState

_ID = "0123456789abcdef"
OF_A_RANK = {"epoch_rng": None, "loader": None, "batches": 0}
"""What a rank stores of its own, beside its streams and shape."""
HEAD = {
    "step": 0, "epoch": 0, "position": asdict(Position()), "trainer": asdict(TrainState()), "generation": 0, "drops": 0,
    "replayed": 0, "schedule_lag": 0, "seed": 0,
    "loggers": {}, "warm_start": None,
}  # fmt: skip


def through_disk(objects: Objects, folder: Path, *, world: int = 2) -> Snapshot:
    """The state of `objects` as a later process finds it: no tensor of it is a live one."""
    return write_and_read(objects, folder, world=world)[0]


def write_and_read(
    objects: Objects, folder: Path, *, world: int = 1, own: dict[str, Any] | None = None
) -> tuple[Snapshot, Any]:
    """Also what rank 0 stored of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    store, entries, snapshot = open_store(folder), [], collect(objects)
    shape = asdict(RunShape(world_size=world))
    prepare(store)
    for rank in range(world):
        share = Share(snapshot, (own or {"rng": rng.capture()}) | OF_A_RANK | {"shape": shape}, rank=rank, world=world)
        entries += share.write(store, _ID)
        if rank == 0:
            entries += share.write_state(store, _ID, HEAD | {"shape": shape})
    manifest = Manifest(
        id=_ID, parent=None, step=0, epoch=0, attempt=1, world_size=world, created=0.0, reason="", files=tuple(entries)
    )
    reader = Reader(store, manifest)
    return read_snapshot(reader, read_document(reader)), read_rank(reader, 0)
