"""Orders beside the samplers users have: first batch at any position, peak memory, samples a second, restore.

    python benchmarks/order.py

Each case runs in its own process, so its peak memory is its own. Rank 3 of 8, 256 samples a batch and rank, delivered
as lists of Python integers, as a DataLoader takes them. "from start" asks for the first batch of the epoch, "from
middle" and "from 99 %" continue there. MosaicML Streaming and Grain take part when they are installed. Linux
only (/proc).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pimm_ray.elastic.order import make_order

WORLD, RANK, BATCH = 8, 3, 256
STEP = WORLD * BATCH
STEPS_AHEAD = 32
RATE_SECONDS = 1.0
RESTORE_LENGTH, RESTORE_POSITION = 10**7, 5 * 10**6
FIRST_BATCH_LIMIT, MEMORY_LIMIT, RATE_LIMIT, RESTORE_LIMIT = 0.050, 20.0, 2e6, 20.0

REMARK = 9  # the column of a table that holds text

Batches = Iterator[list[int]]
Case = Callable[[int, int], Batches]


class Positions:
    """A data set whose sample at an index is the index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def ours(name: str, steps_ahead: int = STEPS_AHEAD, **parameters: Any) -> Case:
    def batches(length: int, position: int) -> Batches:
        order = make_order(name, length=length, seed=0, epoch=0, **parameters)
        mine = RANK * BATCH + np.arange(BATCH)
        ahead = 1
        while position + ahead * STEP <= length:
            yield from order(position + STEP * np.arange(ahead)[:, None] + mine).tolist()
            position += ahead * STEP
            ahead = min(2 * ahead, steps_ahead)

    return batches


def weighted(length: int, position: int) -> Batches:
    return ours("weighted", weights=np.arange(1, length + 1))(length, position)


def cut(indices: Iterator[int]) -> Batches:
    while batch := list(itertools.islice(indices, BATCH)):
        yield batch


def torch_distributed(length: int, position: int) -> Batches:
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(Positions(length), WORLD, RANK)  # type: ignore[arg-type]
    return cut(itertools.islice(iter(sampler), position // WORLD, None))


def torchdata_distributed(length: int, position: int) -> Batches:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Positions(length), WORLD, RANK)
    sampler.load_state_dict({"yielded": position // WORLD})
    return cut(iter(sampler))


def mosaicml_partition(length: int, position: int) -> Batches:
    # The package imports transformers and every cloud's client; its partition needs numpy only.
    package = importlib.util.find_spec("streaming")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("streaming")
    file = Path(package.submodule_search_locations[0]) / "base/partition/orig.py"
    spec = importlib.util.spec_from_file_location("streaming_partition", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    partition = module.get_partitions_orig(length, 1, 1, WORLD, 1, BATCH, drop_first=position)
    return iter(partition[0, RANK, 0].tolist())


def grain_index(length: int, position: int) -> Batches:
    import grain.python as grain

    shard = grain.ShardOptions(shard_index=RANK, shard_count=WORLD)
    sampler = grain.IndexSampler(length, shard_options=shard, shuffle=True, num_epochs=1, seed=0)
    first = position // WORLD
    return cut(sampler[index * WORLD + RANK].record_key for index in range(first, length // WORLD))


CASES: dict[str, tuple[Case, tuple[int, ...], str]] = {
    "shuffle": (ours("shuffle"), (10**7, 10**9, 10**12), ""),
    "block": (ours("block"), (10**7, 10**9, 10**12), ""),
    "sequential": (ours("sequential"), (10**12,), ""),
    "weighted": (weighted, (10**6,), "a table of 16 bytes a sample, made once a run"),
    "shuffle, a call a batch": (ours("shuffle", 1), (10**12,), ""),
    "torch DistributedSampler": (torch_distributed, (10**7,), "1e9 needs a list of 36 GB"),
    "torchdata StatefulDistributedSampler": (torchdata_distributed, (10**7,), "1e9 needs a list of 36 GB"),
    "MosaicML Streaming partition": (
        mosaicml_partition,
        (10**7,),
        "all batches made first, not shuffled; 1e9 needs arrays of 8 GB",
    ),
    "Grain IndexSampler": (grain_index, (10**7, 10**9, 10**12), ""),
}


def memory(field: str) -> float:
    """Peak (VmHWM) or present (VmRSS) resident memory of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1000


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure_batches(name: str, length: int) -> dict[str, Any]:
    case = CASES[name][0]
    next(case(STEP, 0))  # imports, and memory that numpy and torch take once
    reset_peak()
    before = memory("VmRSS")
    first = []
    for share in (0.0, 0.5, 0.99):
        started = time.perf_counter()
        batches = case(length, int(length * share) // STEP * STEP)
        if len(next(batches)) != BATCH:
            raise RuntimeError(f"{name} gave a batch of another size")
        first.append(time.perf_counter() - started)
        del batches
    peak = memory("VmHWM") - before
    batches = case(length, 0)
    next(batches)
    delivered, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < RATE_SECONDS and (batch := next(batches, None)):
        delivered += len(batch)
    return {"first": first, "peak": peak, "rate": delivered / elapsed}


def loader_ours() -> Any:
    from torch.utils.data import DataLoader

    class Resumed:
        def __iter__(self) -> Batches:
            order = make_order("shuffle", length=RESTORE_LENGTH, seed=0, epoch=0)
            for position in range(RESTORE_POSITION // BATCH * BATCH, RESTORE_LENGTH, BATCH):
                yield order(np.arange(position, min(position + BATCH, RESTORE_LENGTH))).tolist()

    return DataLoader(Positions(RESTORE_LENGTH), batch_sampler=Resumed(), collate_fn=list)  # type: ignore[arg-type]


def loader_torchdata(sampler: str) -> Any:
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data: Any = Positions(RESTORE_LENGTH)
    samplers: dict[str, Any] = {
        "shuffle=True": None,
        "DistributedSampler": DistributedSampler(data, 1, 0),
        "StatefulDistributedSampler": StatefulDistributedSampler(data, 1, 0),
    }
    chosen = samplers[sampler]
    return StatefulDataLoader(data, batch_size=BATCH, collate_fn=list, sampler=chosen, shuffle=chosen is None)


RESTORES: dict[str, Callable[[], Any]] = {
    "shuffle in a DataLoader": loader_ours,
    "StatefulDataLoader, shuffle=True": partial(loader_torchdata, "shuffle=True"),
    "StatefulDataLoader, StatefulDistributedSampler": partial(loader_torchdata, "StatefulDistributedSampler"),
    "StatefulDataLoader, DistributedSampler": partial(loader_torchdata, "DistributedSampler"),
}


def measure_restore(name: str, state_file: Path | None) -> dict[str, Any]:
    """Seconds from the making of a loader to its first batch; with a state file: of one that must load that state."""
    import torch

    RESTORES[name]()
    reset_peak()
    before = memory("VmRSS")
    started = time.perf_counter()
    loader = RESTORES[name]()
    if state_file is not None:
        state = torch.load(state_file, weights_only=True)
        loader.load_state_dict(state["loader"])
    batch = next(iter(loader))
    seconds = time.perf_counter() - started
    if state_file is not None and batch != state["next"]:
        raise RuntimeError(f"{name} did not restore its position")
    return {"seconds": seconds, "peak": memory("VmHWM") - before}


def save_position(name: str, state_file: Path) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    loader = RESTORES[name]()
    batches = iter(loader)
    for _ in itertools.islice(batches, RESTORE_POSITION // BATCH):
        pass
    torch.save({"loader": loader.state_dict(), "next": next(batches)}, state_file)
    return {}


def in_own_process(*arguments: str) -> dict[str, Any] | str:
    """Run this file with these arguments; its result, or why there is none."""
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1]
        return "not installed" if error.startswith("ModuleNotFoundError") else error
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    for row in rows:
        numbers = map(str.rjust, row[1:REMARK], widths[1:])
        print("  ".join([row[0].ljust(widths[0]), *numbers, *row[REMARK:]]).rstrip())
    print()


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def compare_batches() -> dict[str, bool]:
    print("First batch of a rank, peak memory, samples a second and rank; x = as a multiple of shuffle's at 1e7\n")
    rows: list[tuple[str, ...]] = [("order", "samples", "start", "middle", "99 %", "x", "peak", "a second", "x")]
    reference: dict[str, Any] = {}
    orders = []
    for name, (_, lengths, remark) in CASES.items():
        for length in lengths:
            result = in_own_process("--case", name, "--length", str(length))
            if isinstance(result, str):
                rows.append((name, f"{length:.0e}", result))
                continue
            reference = reference or result
            if name in ("shuffle", "block"):
                orders.append(result)
            slower = max(result["first"]) / max(reference["first"])
            row = [
                name,
                f"{length:.0e}",
                *map(milliseconds, result["first"]),
                f"{slower:.1f}",
                f"{result['peak']:.1f} MB",
            ]
            row += [f"{result['rate'] / 1e6:.2f} M", f"{result['rate'] / reference['rate']:.3f}", remark]
            rows.append(tuple(row))
    table(rows)
    return {
        f"first batch < {FIRST_BATCH_LIMIT * 1000:.0f} ms": all(max(o["first"]) < FIRST_BATCH_LIMIT for o in orders),
        f"peak < {MEMORY_LIMIT:.0f} MB": all(o["peak"] < MEMORY_LIMIT for o in orders),
        f">= {RATE_LIMIT / 1e6:.0f} M samples/s a rank": all(o["rate"] >= RATE_LIMIT for o in orders),
    }


def compare_restores() -> dict[str, bool]:
    print(
        f"Restore at position {RESTORE_POSITION:.0e} of {RESTORE_LENGTH:.0e}: 0 workers, one rank, batches of {BATCH}\n"
    )
    rows: list[tuple[str, ...]] = [("loader", "first batch", "x", "peak")]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for name in RESTORES:
            arguments = ["--state", str(Path(folder) / "state.pt")] if name.startswith("Stateful") else []
            saved = in_own_process("--save", name, *arguments) if arguments else {}
            result = saved if isinstance(saved, str) else in_own_process("--restore", name, *arguments)
            if isinstance(result, str):
                rows.append((name, result))
                continue
            seconds.append(result["seconds"])
            ratio = seconds[-1] / seconds[0]
            rows.append((name, milliseconds(seconds[-1]), f"{ratio:.0f}", f"{result['peak']:.1f} MB"))
    table(rows)
    faster = len(seconds) > 1 and min(seconds[1:]) >= RESTORE_LIMIT * seconds[0]
    return {f"restore >= {RESTORE_LIMIT:.0f} times faster": faster}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--restore", help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(measure_batches(asked.case, asked.length)))
    elif asked.save:
        print(json.dumps(save_position(asked.save, asked.state)))
    elif asked.restore:
        print(json.dumps(measure_restore(asked.restore, asked.state)))
    else:
        goals = {**compare_batches(), **compare_restores()}
        print("; ".join(f"{goal}: {'met' if reached else 'MISSED'}" for goal, reached in goals.items()))


if __name__ == "__main__":
    main()
