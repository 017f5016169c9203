"""What a node that is killed, added or taken away with notice costs a run, by phase: Ray's trainer and ours.

    python benchmarks/downtime.py          a Markdown table; --json FILE: each phase of each event, too

A real Ray cluster on 127.0.0.x: a head without CPUs and three nodes of one CPU. The same loop (a small model under DDP,
CheckpointManager, a save every 40 steps, 0.25 s a step) runs on 1 to 3 workers, first under Ray's own TorchTrainer,
then under pimm_ray's, both with their own defaults. While it runs, one node is killed without notice, one is added, one
is drained with a deadline of 15 s and killed at it, and one is frozen (SIGSTOP), which the cluster itself notices after
a minute unless its `health_check_*` settings say otherwise. The stall is the time from the last step before to the
first step after; lost are the steps that were done twice: a node is killed in the middle between two saves, while Ray
adds one at a moment of its own, between 0 and 40 steps after a save. About 12 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

SAVE_EVERY, STEP_SECONDS, DEADLINE_SECONDS, LIMIT = 40, 0.25, 15.0, 240
PHASES = {  # of a restart, in order, each with the words of Ray's log, or the event of the loop, that end it
    "decide": "Attempting to start training worker group",
    "reserve": "Placement group ready",
    "start": "worker actors created",
    "import": "Train context initialized",
    "process group": "after_worker_group_start callbacks completed",
    "launch": "loop",
    "build": "built",
    "load": "resumed",
    "first batch": "step",
}


def loop(config: dict[str, Any]) -> None:
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy

    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    note(config, rank, event="loop", world=world)
    data = torch.utils.data.TensorDataset(torch.randn(100_000, 32))
    loader = ElasticLoader(data, global_batch_size=12, seed=0)
    model = prepare_model(torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = CheckpointManager(
        model=model, optimizer=optimizer, loader=loader, save=SavePolicy(every_steps=SAVE_EVERY, timeout_seconds=60)
    )
    note(config, rank, event="built", world=world)
    manager.resume()
    note(config, rank, event="resumed", step=manager.state.global_step, world=world)
    for _ in manager.epochs(1):
        for (x,) in manager.batches():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(STEP_SECONDS)
            note(config, rank, event="step", step=manager.state.global_step + 1, world=world)
            manager.step()
            stop = torch.tensor([os.path.exists(config["stop"])])
            torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)
            if stop.item():
                return


def note(config: dict[str, Any], rank: int, **what: Any) -> None:
    if rank == 0:
        with open(config["notes"], "a") as file:
            file.write(json.dumps({"time": time.time(), **what}) + "\n")


class Rehearsal:
    """One run of the loop, and what is done to its cluster meanwhile."""

    def __init__(self, folder: Path):
        from ray.cluster_utils import Cluster

        self.notes, self.stop = folder / "notes", folder / "stop"
        self._next = 2
        self.cluster = Cluster()
        self.add(num_cpus=0)
        self.nodes = [self.add() for _ in range(3)]
        self.events: list[dict[str, Any]] = []
        self.frozen: list[int] = []

    def add(self, num_cpus: int = 1) -> Any:
        address, self._next = f"127.0.0.{self._next}", self._next + 1
        memory = 100 * 2**20
        return self.cluster.add_node(num_cpus=num_cpus, node_ip_address=address, object_store_memory=memory)

    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []

    def wait(self, what: str, found: Callable[[dict[str, Any]], bool]) -> None:
        limit = time.time() + LIMIT
        while not any(found(line) for line in self.seen()):
            if time.time() > limit:
                raise TimeoutError(what)
            time.sleep(0.1)

    def stage(self, event: str, before: int, after: int) -> None:
        """Do something to a node in the middle between two saves of a group that has run for a while."""
        self.wait(f"{before} workers before a node is {event}", lambda line: line.get("world") == before)
        settled = time.time() + 22
        self.wait(
            "a step between two saves",
            lambda line: line["time"] > settled and line.get("step", 0) % SAVE_EVERY == SAVE_EVERY // 2,
        )
        at = time.time()
        if event == "killed":
            self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)
        elif event == "drained":
            self.drain(self.nodes.pop(0))
        elif event == "frozen":
            self.freeze(self.nodes.pop())
        else:
            self.nodes.append(self.add())
            at = time.time()
        self.wait(
            f"{after} workers after a node was {event}",
            lambda line: line["event"] == "step" and line["world"] == after and line["time"] > at,
        )
        self.events.append({"event": event, "at": at})

    def freeze(self, node: Any) -> None:
        raylet = node.all_processes["raylet"][0].process.pid
        children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
        self.frozen = [raylet, *map(int, children)]
        for pid in self.frozen:
            os.kill(pid, signal.SIGSTOP)

    def drain(self, node: Any) -> None:
        import ray
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = time.time() + DEADLINE_SECONDS
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        client.drain_node(node.node_id, reason, "rehearsal", int(deadline * 1000))
        time.sleep(max(0.0, deadline - time.time()))
        self.cluster.remove_node(node, allow_graceful=False)


def rehearse(side: str, folder: Path) -> list[dict[str, Any]]:
    import ray
    import ray.train.torch

    import pimm_ray

    rehearsal = Rehearsal(folder)
    ray.init(address=rehearsal.cluster.address, log_to_driver=True)
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    trainer = {"Ray": ray.train.torch.TorchTrainer, "ours": pimm_ray.TorchTrainer}[side]
    run = trainer(
        loop,
        train_loop_config={"notes": str(rehearsal.notes), "stop": str(rehearsal.stop)},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3)),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(folder), failure_config=ray.train.FailureConfig(max_failures=10)
        ),
    )
    training = threading.Thread(target=run.fit)
    training.start()
    try:
        for event, before, after in (("killed", 3, 2), ("added", 2, 3), ("drained", 3, 2), ("frozen", 2, 1)):
            rehearsal.stage(event, before, after)
    finally:
        rehearsal.stop.touch()
        training.join()
    lines = [*rehearsal.seen(), *log_lines(Path(session))]
    for pid in rehearsal.frozen:
        os.kill(pid, signal.SIGKILL)
    ray.shutdown()
    rehearsal.cluster.shutdown()
    return [measured(event, lines) for event in rehearsal.events]


def log_lines(session: Path) -> list[dict[str, Any]]:
    """The lines of the controller's log that end a phase."""
    found = []
    for file in (session / "logs" / "train").glob("ray-train-sys-controller*"):
        for line in file.read_text().splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            for words in PHASES.values():
                if words in said.get("message", ""):
                    at = datetime.strptime(said["asctime"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    found.append({"time": at, "event": words})
    return found


def measured(event: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    lines = sorted(lines, key=lambda line: line["time"])
    resumed = next(line for line in lines if line["event"] == "resumed" and line["time"] > event["at"])
    steps = [line for line in lines if line["event"] == "step"]
    last = [line for line in steps if line["time"] < resumed["time"]][-1]
    first = next(line for line in steps if line["time"] > resumed["time"])
    phases, before = {}, last["time"]
    for phase, words in PHASES.items():
        if phase == "first batch":
            at = first["time"]
        else:
            upto = resumed["time"] + (phase == "load")
            at = [line["time"] for line in lines if line["event"] == words and line["time"] <= upto][-1]
        phases[phase], before = round(max(0.0, at - before), 2), max(at, before)
    return {
        "event": event["event"],
        "stall": round(first["time"] - last["time"], 1),
        "lost": last["step"] - resumed["step"],
        "noticed": round(last["time"] - event["at"], 1),
        "phases": phases,
    }


def table(sides: dict[str, list[dict[str, Any]]]) -> str:
    rows = [f"| node | trainer | stall, s | steps lost | {' | '.join(PHASES)} |", "|" + "---|" * (4 + len(PHASES))]
    for index in range(len(next(iter(sides.values())))):
        for side, events in sides.items():
            row = events[index]
            phases = " | ".join(f"{row['phases'][phase]:.1f}" for phase in PHASES)
            rows.append(f"| {row['event']} | {side} | {row['stall']} | {row['lost']} | {phases} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--side", choices=["Ray", "ours"], help="one side only, its numbers as JSON on the last line")
    options = parser.parse_args()
    if options.side:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(rehearse(options.side, Path(folder))))
        return
    sides = {}
    for side in ("Ray", "ours"):
        command = [sys.executable, __file__, "--side", side]
        sides[side] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    print(table(sides))
    if options.json:
        options.json.write_text(json.dumps(sides, indent=1))


if __name__ == "__main__":
    main()
