"""What becomes of a damaged checkpoint: detected, loaded with wrong values, or harmless; pimm_ray beside its peers.

    python benchmarks/damage_matrix.py        a Markdown table; about 90 seconds on 2 cores

Two ranks train a small job and save at steps 4 and 7; then each file of the newer checkpoint is damaged in each way,
one damage at a time. The same weights, moments, averages and torch streams are stored by the peers, a file a rank:
stock `torch.distributed.checkpoint` (its own files), `safetensors.torch.save_file` and `torch.save` (loaded with
`weights_only=True`). A peer has *detected* a damage when loading raises, or when the names or shapes that it gives back
are not those of the model; it is *silent* when any value differs then, and *harmless* when none does. pimm_ray has
detected it when `verify_checkpoint` names a problem, `find_checkpoint` passes over the checkpoint, and a resume goes
on from the older one, with its exact state; anything less fails the run. Linux only (fork).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pimm_ray import find_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.folder import read_document, read_manifest, read_rank, read_snapshot
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.store import open_store
from tests.golden.make import NEWER, OLDER, load, save
from tests.ranks import run_ranks

Files = dict[str, bytes]
"""A folder: contents by relative path."""
State = dict[str, torch.Tensor]

FLIPS, WIDTH = 200, 512
DETECTED, SILENT, HARMLESS = "detected", "silent", "harmless"
FOREIGN = "foreign file added"
"""The only damage that does none."""


def damages(newer: Files, older: Files, flips: int, chance: random.Random) -> Iterator[tuple[str, str, Files]]:
    """Every damage of a saved folder, one at a time: its kind, what was struck, and the folder that is left."""

    def strike(kind: str, name: str, data: bytes | None) -> tuple[str, str, Files]:
        left = {**newer, name: data} if data is not None else {k: v for k, v in newer.items() if k != name}
        return kind, name, left  # type: ignore[return-value]

    for name, data in newer.items():
        yield strike("cut by one byte", name, data[:-1])
        yield strike("cut to half", name, data[: len(data) // 2])
        yield strike("emptied", name, b"")
        yield strike("removed", name, None)
        yield strike("zeros of its size", name, bytes(len(data)))
        yield strike("16 bytes appended", name, data + bytes(16))
        if name in older and older[name] != data:
            yield strike("the older step's file", name, older[name])
        for bit in chance.sample(range(8 * len(data)), min(flips, 8 * len(data))):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            kind, _, left = strike("one bit flipped", name, bytes(flipped))
            yield kind, f"{name} bit {bit}", left
        yield strike(FOREIGN, f"{name}.bak", data)
    for one, other in itertools.combinations(newer, 2):
        same_kind = Path(one).parent == Path(other).parent and Path(one).suffix == Path(other).suffix
        kind = "swapped with another rank's" if same_kind else "swapped with a file of another kind"
        yield kind, f"{one} and {other}", {**newer, one: newer[other], other: newer[one]}


def content(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def put(folder: Path, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class Ours:
    """A run folder with an older and a newer checkpoint."""

    name = "pimm_ray"

    def __init__(self, run: Path, older: Path, newer: Path, width: int):
        self.run, self.folder, self.width = run, run / newer.name, width
        self.newer, self.older, self.old_folder = content(newer), content(older), run / older.name
        put(self.old_folder, self.older)
        self.old = load(0, self.run, width=width)
        put(self.folder, self.newer)
        self.new = load(0, self.run, width=width)
        assert (self.old["facts"]["step"], self.new["facts"]["step"]) == (OLDER, NEWER)

    def outcome(self, files: Files) -> str:
        put(self.run / self.old_folder.name, self.older)
        put(self.folder, files)
        problems, found = verify_checkpoint(self.folder), find_checkpoint(self.run)
        loaded = load(0, self.run, width=self.width)
        if not problems and loaded == self.new and found is not None and found.name == self.folder.name:
            return HARMLESS
        if problems and loaded == self.old and found is not None and found.name == self.old_folder.name:
            return DETECTED
        return SILENT


class Peer:
    """A format that stores what each of two ranks gives it in one folder."""

    name: str

    def __init__(self, folder: Path, older: list[State], newer: list[State]):
        self.folder, self.state = folder, newer
        self.older, self.newer = (self._saved(state) for state in (older, newer))

    def _saved(self, ranks: list[State]) -> Files:
        put(self.folder, {})
        self.folder.mkdir(parents=True)
        run_ranks(2, lambda rank: self.save(ranks[rank], rank))
        return content(self.folder)

    def outcome(self, files: Files) -> str:
        put(self.folder, files)
        try:
            found = [self.load(rank) for rank in range(2)]
        except (Exception, CheckpointException):  # DCP's own is no Exception
            return DETECTED
        pairs = []
        for expected, state in zip(self.state, found, strict=True):
            if expected.keys() != state.keys():
                return DETECTED
            pairs += [(value, state[key]) for key, value in expected.items()]
        if any(expected.shape != value.shape for expected, value in pairs):
            return DETECTED
        same = all(raw(expected) == raw(value.to(expected.dtype)) for expected, value in pairs)
        return HARMLESS if same else SILENT

    def save(self, state: State, rank: int) -> None:
        raise NotImplementedError

    def load(self, rank: int) -> State:
        raise NotImplementedError


class StockDCP(Peer):
    name = "torch DCP"

    def save(self, state: State, rank: int) -> None:
        dcp.save(dict(state), checkpoint_id=self.folder)

    def load(self, rank: int) -> State:
        state = {key: torch.zeros_like(value) for key, value in self.state[rank].items()}
        dcp.load(state, checkpoint_id=self.folder, no_dist=True)
        return state


class Safetensors(Peer):
    name = "safetensors"

    def save(self, state: State, rank: int) -> None:
        save_file({stem(key): value for key, value in state.items()}, self.folder / f"rank-{rank}.safetensors")

    def load(self, rank: int) -> State:
        return named(load_file(self.folder / f"rank-{rank}.safetensors"), rank)


class TorchSave(Peer):
    name = "torch.save"

    def save(self, state: State, rank: int) -> None:
        torch.save({stem(key): value for key, value in state.items()}, self.folder / f"rank-{rank}.pt")

    def load(self, rank: int) -> State:
        return named(torch.load(self.folder / f"rank-{rank}.pt", weights_only=True), rank)


def stem(key: str) -> str:
    return key.partition(":")[2]


def named(state: State, rank: int) -> State:
    return {f"{rank}:{key}": value for key, value in state.items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_of(checkpoint: Path) -> list[State]:
    """The tensors of one of our checkpoints, as two ranks of any other format would share them."""
    store = open_store(checkpoint)
    reader = Reader(store, read_manifest(store))
    snapshot = read_snapshot(reader, read_document(reader))
    whole = [*sorted(snapshot.weights.items()), *sorted(snapshot.trainer.items())]
    ranks = []
    for rank in range(2):
        mine = {key: value.clone() for key, value in whole[rank::2]}
        ranks.append(named({**mine, "stream": read_rank(reader, rank)["rng"]["torch"].clone()}, rank))
    return ranks


def two_saves(run: Path, width: int) -> tuple[Path, Path]:
    older, newer = run_ranks(2, save, run, (OLDER, NEWER), width)[0]
    return older["path"], newer["path"]


def matrix(subject: Any, flips: int, seed: int = 0) -> dict[str, Counter[str]]:
    """How often each kind of damage had which outcome."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, _, files in damages(subject.newer, subject.older, flips, random.Random(seed)):
        counts[kind][subject.outcome(files)] += 1
    return counts


def cell(counts: Counter[str]) -> str:
    total = counts.total()
    found = [name for name in (DETECTED, SILENT, HARMLESS) if counts[name]]
    if len(found) == 1:
        return f"{found[0]}: all {total:,}"
    return ", ".join(f"{name}: {counts[name]:,} ({100 * counts[name] / total:.1f} %)" for name in found) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=FLIPS, help="flipped bits a file")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model's middle layer")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        older, newer = two_saves(root / "made", options.width)
        states = state_of(older), state_of(newer)
        subjects = [Ours(root / "run", older, newer, options.width)]
        subjects += [kind(root / kind.name, *states) for kind in (StockDCP, Safetensors, TorchSave)]
        columns = {subject.name: matrix(subject, options.flips) for subject in subjects}
        sizes = {s.name: f"{s.name} ({len(s.newer)} files, {sum(map(len, s.newer.values())):,} B)" for s in subjects}
    kinds = list(columns["pimm_ray"])
    print(f"| damage | {' | '.join(sizes.values())} |\n|---|{'---|' * len(sizes)}")
    for kind in kinds:
        print(f"| {kind} | {' | '.join(cell(column[kind]) for column in columns.values())} |")
    harmful = [sum((column[kind] for kind in kinds if kind != FOREIGN), Counter()) for column in columns.values()]
    print(f"| **all but the foreign files** | {' | '.join(cell(counts) for counts in harmful)} |")
    print(f"\n{time.monotonic() - begin:.0f} s")
    ours = columns["pimm_ray"]
    good = all(set(counts) == {HARMLESS if kind == FOREIGN else DETECTED} for kind, counts in ours.items())
    return 0 if good else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
