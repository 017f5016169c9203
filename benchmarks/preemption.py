"""What listening for notices of preemption costs a training loop, outside Ray: seconds a step, and of each part.

python benchmarks/preemption.py        a Markdown table; 2 gloo ranks, or --ranks N, on this machine; 20 seconds
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

STEPS = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=measure, args=(rank, ranks, folder, results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        rows = results.get(timeout=120)
        for process in processes:
            process.join()
    print("| | microseconds, median | mean |\n|---|---|---|")
    for name, median, mean in rows:
        print(f"| {name} | {median:.0f} | {mean:.0f} |")


def measure(rank: int, ranks: int, folder: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from pimm_ray import CheckpointManager, SavePolicy

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)

    def manager(name: str, **save: Any) -> CheckpointManager:
        made = CheckpointManager(
            model=torch.nn.Linear(2, 1), storage=f"{folder}/{name}", save=SavePolicy(at_end=False, **save)
        )
        made.resume()
        return made

    off, on, often = manager("off", on_preemption=False), manager("on"), manager("often", poll_every_seconds=1e-6)
    rows = [
        row(name, call)
        for name, call in (
            ("all-reduce of one number", lambda: dist.all_reduce(torch.zeros(1))),
            ("step(), on_preemption=False", off.step),
            ("step(), on_preemption=True", on.step),
            ("poll()", on.poll),
            ("step() with the ranks asked at every other one", often.step),
        )
    ]
    for each in (off, on, often):
        each.finish()
    if rank == 0:
        results.put(rows)


def row(name: str, call: Callable[[], Any]) -> tuple[str, float, float]:
    """Each call follows a barrier, so that waiting for other ranks' work is not counted."""
    import torch.distributed as dist

    took = []
    for _ in range(STEPS):
        dist.barrier()
        started = time.perf_counter()
        call()
        took.append(1e6 * (time.perf_counter() - started))
    return name, statistics.median(took), statistics.mean(took)


if __name__ == "__main__":
    main()
