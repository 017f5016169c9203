"""What verification costs: the time that digests take of a durable save and of a warm load; pimm_ray beside its peers.

    python benchmarks/verify.py               two Markdown tables; about a minute on 2 idle cores
    python benchmarks/verify.py --small       a tenth of the bytes, in seconds
    python benchmarks/verify.py --folder DIR  on the disk that matters to you

Two states of weights and two moments each: "large", 300 tensors of 4 MB, and "many", 12,000 tensors of 12.5 kB. 1 and
2 ranks save and load them by the functions that `CheckpointManager` uses, as they are and with a digest that does
nothing. A save ends when all is fsynced and marked, a load when all values are in the live tensors; "warm" means that
the files are in the page cache. The peers write one file, from rank 0, fsync it, and every rank loads it: `torch.save`
with `torch.load(weights_only=True)`, and safetensors' `save_file` with `load_file`.

All ways take turns in each round; seconds are medians of the slowest rank. The last column is what the digests
themselves took: processor seconds of the seconds of a save; and processor seconds in all threads for each one of the
rest of a load (where other cores are idle it adds less time than that). Linux only (fork).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pimm_ray.checkpoint.folder import Share, commit, prepare, read_manifest, read_snapshot
from pimm_ray.checkpoint.layout import Manifest
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.state import Snapshot
from pimm_ray.checkpoint.store import open_store
from tests.ranks import run_ranks

SIZES = {"large": (100, 2**20), "many": (4000, 3125)}
"""Weights, and elements of each; two moments of each come on top."""
SAVE_LIMIT, LOAD_LIMIT = 0.10, 0.60
_xxh3 = xxhash.xxh3_64


class Timed:
    """The digest, with a clock of the processor time that it takes."""

    seconds = 0.0

    def __init__(self) -> None:
        self._digest = _xxh3()

    def update(self, data: Any) -> None:
        start = time.thread_time()
        self._digest.update(data)
        Timed.seconds += time.thread_time() - start

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class Nothing:
    """Takes bytes and looks at none."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 16


class Ours:
    """A way to save and load: a checkpoint folder, with the digests that `digest` makes."""

    def __init__(self, folder: Path, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], digest: Any):
        self._store, self._digest, self._tensors = open_store(folder), digest, {**weights, **moments}
        self._snapshot = Snapshot(weights, frozenset(weights), moments, {}, {})

    def save(self) -> None:
        xxhash.xxh3_64, rank, world = self._digest, dist.get_rank(), dist.get_world_size()
        if rank == 0:
            prepare(self._store)
        dist.barrier()
        share = Share(self._snapshot, {}, rank=rank, world=world)
        entries = share.write(self._store, "x") + (share.write_state(self._store, "x", {}) if rank == 0 else [])
        every: list[Any] = [None] * world
        dist.all_gather_object(every, entries)
        if rank == 0:
            facts: dict[str, Any] = {"step": 1, "epoch": 0, "attempt": 1, "world_size": world, "created": time.time()}
            files = tuple(entry for part in every for entry in part)
            commit(self._store, Manifest(id="x", parent=None, reason="user", files=files, **facts))

    def load(self) -> None:
        xxhash.xxh3_64 = self._digest
        reader = Reader(self._store, read_manifest(self._store))
        snapshot = read_snapshot(reader, {})
        assert reader.rest(part=dist.get_rank(), parts=dist.get_world_size()) == []
        take(self._tensors, {**snapshot.weights, **snapshot.trainer})


class Peer:
    """A way to save and load: one file, written by rank 0."""

    def __init__(
        self, folder: Path, tensors: dict[str, torch.Tensor], save: Callable[..., Any], load: Callable[..., Any]
    ):
        self._folder, self._tensors, self._save, self._load = folder, tensors, save, load

    def save(self) -> None:
        if dist.get_rank() == 0:
            self._folder.mkdir()
            self._save(self._tensors, self._folder / "state")
            with open(self._folder / "state", "rb") as file:
                os.fsync(file.fileno())

    def load(self) -> None:
        take(self._tensors, self._load(self._folder / "state"))


def take(live: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    assert live.keys() == loaded.keys()
    for key, tensor in live.items():
        tensor.copy_(loaded[key])


def measure(rank: int, folder: Path, count: int, elements: int, rounds: int) -> dict[str, list[list[float]]]:
    """By way, for each round: seconds of the save and the digests' share of it, then the same of the load."""
    weights = {f"layer.{i:05}.weight": torch.randn(elements) for i in range(count)}
    moments = {f"optimizer.0.{key}.{leaf}": torch.randn(elements) for key in weights for leaf in ("m", "v")}
    tensors = {**weights, **moments}
    ways: dict[str, Any] = {
        "digests": Ours(folder / "digests", weights, moments, Timed),
        "none": Ours(folder / "none", weights, moments, Nothing),
        "torch": Peer(folder / "torch", tensors, torch.save, lambda path: torch.load(path, weights_only=True)),
        "safetensors": Peer(folder / "safetensors", tensors, save_file, load_file),
    }
    results = defaultdict(list)
    for number in range(rounds):
        for name in [*ways][number % 4 :] + [*ways][: number % 4]:
            took: list[float] = []
            for work in (ways[name].save, ways[name].load):
                dist.barrier()
                Timed.seconds, start, busy = 0.0, time.perf_counter(), time.process_time()
                work()
                seconds, busy = time.perf_counter() - start, time.process_time() - busy
                took += [seconds, Timed.seconds / (busy - Timed.seconds if took else seconds)]
                dist.barrier()
            results[name].append(took)
            if rank == 0:
                shutil.rmtree(folder / name)
    return dict(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tenth of the bytes")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument("--folder", type=Path, help="where to write (the system's folder for temporary files)")
    options = parser.parse_args()
    begin, rows = time.monotonic(), []
    for size, (count, elements) in SIZES.items():
        count //= 10 if options.small else 1
        for world in (1, 2):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                by_rank = run_ranks(world, measure, Path(folder), count, elements, options.rounds, timeout=600)
            found = {}
            for name in by_rank[0]:
                same_round = zip(*(rank[name] for rank in by_rank), strict=True)
                slowest = [[max(part) for part in zip(*ranks, strict=True)] for ranks in same_round]
                found[name] = [statistics.median(part) for part in zip(*slowest, strict=True)]
            rows.append((f"{size}: {3 * count:,} tensors, {12e-6 * count * elements:,.0f} MB, ranks: {world}", found))
    met = True
    for title, at, limit in (("durable save", 0, SAVE_LIMIT), ("warm load", 2, LOAD_LIMIT)):
        print(f"| {title}, s | pimm_ray | without digests | torch | safetensors | digests, target < {limit:.0%} |")
        print("|---|---|---|---|---|---|")
        for label, found in rows:
            cells, share = " | ".join(f"{found[name][at]:.3f}" for name in found), found["digests"][at + 1]
            met = met and share < limit
            print(f"| {label} | {cells} | {share:.1%}{'' if share < limit else ' MISSED'} |")
        print()
    print(f"{time.monotonic() - begin:.0f} s")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
