"""Loading one file of weights into every rank of a node: time and memory, load_weights beside what scripts usually do.

    python benchmarks/weights.py             a Markdown table; about two minutes on 2 cores, 10 GB of memory
    python benchmarks/weights.py --mb 100    a tenth of the bytes, in half a minute

4 ranks, each with a model of its own, load the same 1 GB that lies in the page cache: as safetensors, as a file of
`torch.save`, and as a checkpoint of ours (whose digests are compared on the way). Seconds are until the slowest rank
has all values in its model, as median of the rounds, in which all ways take turns. Memory is what the node needs on top
of the models while it loads, in copies of the file: the largest sum of the ranks' proportional set sizes (a page that
several ranks share is counted once), less that sum before. It is taken in a round of its own. Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pimm_ray import CheckpointManager, load_weights
from tests.ranks import run_ranks

RANKS, WIDTH = 4, 1024
MEMORY_LIMIT, SPEED_LIMIT = 1.3, 2.0


def by_torch(model: nn.Module, path: Path, **arguments: bool) -> None:
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu", **arguments))


WAYS: dict[str, tuple[str, Callable[[nn.Module, Path], object]]] = {
    "torch.load": ("model.pth", by_torch),
    "torch.load(mmap=True)": ("model.pth", lambda model, path: by_torch(model, path, mmap=True)),
    "safetensors' load_file": ("model.safetensors", lambda model, path: model.load_state_dict(load_file(path))),
    "load_weights, safetensors": ("model.safetensors", load_weights),
    "load_weights, .pth": ("model.pth", load_weights),
    "load_weights, a checkpoint of ours": ("run", load_weights),
}


def net(megabytes: int) -> nn.Module:
    layers = max(1, megabytes * 10**6 // (4 * WIDTH * WIDTH))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def write(rank: int, folder: Path, megabytes: int) -> int:
    model = net(megabytes)
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(model.state_dict(), folder / "model.pth")
    manager = CheckpointManager(model=model, storage=folder / "run")
    manager.resume()
    manager.save()
    return sum(parameter.nbytes for parameter in model.parameters())


def load(rank: int, folder: Path, way: str, megabytes: int) -> float:
    """Seconds; of the rank that is one too many: bytes of the others together, at their most and on top."""
    file, work = WAYS[way]
    if rank == RANKS:
        return watch(folder)
    model = net(megabytes)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, int(Path("/proc/self/stat").read_text().split()[0]))
    dist.barrier()
    start = time.perf_counter()
    work(model, folder / file)
    seconds = time.perf_counter() - start
    (folder / f"done-{rank}").touch()
    dist.barrier()
    return seconds


def watch(folder: Path) -> float:
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, 0)
    before = most = resident(pids)
    dist.barrier()
    while len(list(folder.glob("done-*"))) < RANKS:
        most = max(most, resident(pids))
    dist.barrier()
    return most - before


def resident(pids: list[int]) -> int:
    """Bytes of these processes together, shared pages once."""
    lines = [line for pid in pids if pid for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="size of the file (1000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed (3)")
    options = parser.parse_args()
    begin, seconds, memory = time.monotonic(), {way: [] for way in WAYS}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (size,) = run_ranks(1, write, folder, options.mb, timeout=300)
        for number in range(options.rounds + 1):
            for way in WAYS:
                ranks = RANKS + (number == 0)
                took = run_ranks(ranks, load, folder, way, options.mb, timeout=300)
                if number:
                    seconds[way].append(max(took))
                else:
                    memory[way] = took[RANKS] / size
                for file in folder.glob("done-*"):
                    file.unlink()
    base = statistics.median(seconds["torch.load"])
    print(f"| {size / 1e6:,.0f} MB into {RANKS} ranks of a node | seconds | times as fast | memory on top, copies |")
    print("|---|---:|---:|---:|")
    for way in WAYS:
        middle = statistics.median(seconds[way])
        print(f"| {way} | {middle:.2f} | {base / middle:.1f} | {memory[way]:.2f} |")
    ours = "load_weights, safetensors"
    met = memory[ours] < MEMORY_LIMIT and base / statistics.median(seconds[ours]) >= SPEED_LIMIT
    print(f"\n{ours}: {SPEED_LIMIT:g} times as fast, below {MEMORY_LIMIT} copies: {'met' if met else 'MISSED'}")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
