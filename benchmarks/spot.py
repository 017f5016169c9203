"""What spot instances cost a run: pimm_ray, Ray Train as its documentation shows it, and Ray's own just-in-time save.

    python benchmarks/spot.py live         runs of all three on real local Ray clusters; a Markdown table; half an hour
    python benchmarks/spot.py simulate --traces FILE...        two weeks of a zone, simulated in seconds

Live, a run of a small model under DDP loses nodes of 127.0.0.x in two scenes, each way in a run of its own:

- notices: 1,600 steps of 0.12 s, a save each 400, 2 workers; four times a node is drained with 15 s of notice and
  killed at the deadline, with a new one at hand: the shape of the experiment that Ray published with its just-in-time
  save (517 wasted steps without it, 91 with it). The notices fall on the steps 260, 580, 900 and 1,220, so that they
  lie evenly between two saves.
- trace: the hours of a real zone of `examples/spot.py`, whose cluster this is: nodes are drained, killed and added as
  it says; 116 steps of 1.5 s of work, which 1 to 3 workers share, a save each 5.

Ray's watcher looks for notices each 0.5 s in all of them, since a notice is 10 to 15 s here, not 120; everything else
is each trainer's own default. A step is wasted that was done again. Goodput is the share of the wall time, from `fit()`
to its end, in which rank 0 was in steps that count.

Simulated is a job that takes all nodes a trace gives: the mean of 8 runs with other moments of change. Costs are those
that `benchmarks/downtime.py` (stalls) and `benchmarks/verify.py` (a save of 1.26 GB) measured here. Goodput is there
the share of the nodes' time in work that counts; every other interval between saves is that of Young and Daly.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

WAYS = ("pimm_ray", "Ray", "Ray, just in time")
NOTICES, NOTICE_SECONDS = (260, 580, 900, 1220), 15.0


@dataclass(frozen=True)
class Scene:
    steps: int
    save_every: int
    step_seconds: float
    shared: bool
    """Whether the workers share a step's work."""
    workers: int | tuple[int, int]
    nodes: int


SCENES = {
    "notices": Scene(1600, 400, 0.12, shared=False, workers=2, nodes=2),
    "trace": Scene(116, 5, 1.5, shared=True, workers=(1, 3), nodes=3),
}


def loop_of_pimm_ray(config: dict[str, Any]) -> None:
    import torch

    from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy

    scene, model, optimizer, log = start(config)
    data = torch.utils.data.TensorDataset(torch.ones(12 * scene.steps, 32))
    manager = CheckpointManager(
        model=model,
        optimizer=optimizer,
        loader=ElasticLoader(data, global_batch_size=12, seed=0),
        save=SavePolicy(every_steps=scene.save_every, timeout_seconds=60),
    )
    manager.resume()
    for _ in manager.epochs(1):
        begin = time.time()
        for (x,) in manager.batches():
            train(scene, model, optimizer, x)
            log.note(manager.state.global_step + 1, begin)
            manager.step()
            begin = time.time()
    manager.finish()


def loop_of_ray(config: dict[str, Any]) -> None:
    import ray.train
    import torch

    scene, model, optimizer, log = start(config)
    rank, first, saved_on_notice = ray.train.get_context().get_world_rank(), 1, False
    bare = getattr(model, "module", model)  # one worker alone has no DDP around it
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1

    def save(step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if rank == 0:
                torch.save(state, Path(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"step": step}, checkpoint=checkpoint)

    for step in range(first, scene.steps + 1):
        begin = time.time()
        train(scene, model, optimizer, torch.ones(6, 32))
        log.note(step, begin)
        if step % scene.save_every == 0:
            save(step)
        if config["way"] == "Ray, just in time" and not saved_on_notice:
            if ray.train.get_preemption_info() is not None:
                save(step)
                saved_on_notice = True


def start(config: dict[str, Any]) -> tuple[Scene, Any, Any, Log]:
    import torch
    from ray.train.torch import prepare_model

    model = prepare_model(torch.nn.Linear(32, 1))
    return SCENES[config["scene"]], model, torch.optim.AdamW(model.parameters()), Log(Path(config["facts"]))


class Log:
    """Each step of this rank, in the form that `examples/spot.py` reads."""

    def __init__(self, folder: Path):
        import torch
        import torch.distributed as dist

        began = torch.tensor(time.time(), dtype=torch.float64)
        dist.broadcast(began, 0)
        self._workers = dist.get_world_size()
        self._file = open(folder / f"{began.item():.6f}-{dist.get_rank()}.jsonl", "w", buffering=1)

    def note(self, step: int, begin: float) -> None:
        fact = {"step": step, "epoch": 0, "workers": self._workers, "begin": begin, "end": time.time(), "ids": []}
        self._file.write(json.dumps(fact) + "\n")


def train(scene: Scene, model: Any, optimizer: Any, x: Any) -> None:
    import torch.distributed as dist

    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    time.sleep(scene.step_seconds / (dist.get_world_size() if scene.shared else 1))


def drain_at_steps(example: Any, zone: Any, facts: Path, training: Future[Any]) -> None:
    """Take a node with notice at each step of `NOTICES`, and give another one at once."""
    give_up = time.monotonic() + example.GIVE_UP_SECONDS
    waiting = list(NOTICES)
    while waiting and not training.done():
        steps = example.that_count(example.groups_of(facts))
        if steps and max(steps) >= waiting[0]:
            del waiting[0]
            zone.happen("add")
            # Not the new one, which no worker runs on: the oldest.
            node = zone.nodes.pop(0)
            deadline = time.time() + NOTICE_SECONDS
            zone.noticed.append((node, deadline))
            example.drain(node, deadline)
            zone.happen("deadline")
        if time.monotonic() > give_up:
            sys.exit(f"the training has not ended within {example.GIVE_UP_SECONDS} s")
        time.sleep(0.2)


def live(name: str, way: str) -> dict[str, Any]:
    example = example_module()
    import ray
    import ray.train.torch
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    import pimm_ray

    scene = SCENES[name]
    with tempfile.TemporaryDirectory() as storage:
        facts = Path(storage, "facts")
        facts.mkdir()
        zone = example.Zone(seed=0, address=2)
        try:
            for _ in range(scene.nodes):
                zone.happen("add")
            zone.log.clear()
            ray.init(zone.cluster.address, _node_ip_address=zone.head.node_ip_address, log_to_driver=False)
            ours = way == "pimm_ray"
            trainer = (pimm_ray.TorchTrainer if ours else ray.train.torch.TorchTrainer)(
                loop_of_pimm_ray if ours else loop_of_ray,
                train_loop_config={"scene": name, "way": way, "facts": str(facts)},
                scaling_config=ScalingConfig(num_workers=scene.workers),
                run_config=RunConfig(name="run", storage_path=storage, failure_config=FailureConfig(max_failures=50)),
            )
            begin = time.time()
            training = ThreadPoolExecutor(1).submit(trainer.fit)
            if name == "notices":
                drain_at_steps(example, zone, facts, training)
            else:
                trace = json.loads(example.TRACE.read_text())["data"]
                counts = example.counts_of(trace, example.START, example.SLOTS, scene.nodes)
                events = example.happenings(counts, example.SLOT_SECONDS, example.NOTICE_SECONDS)
                example.replay(zone, events, facts, training, patient=False)
            training.result()
            end = time.time()
        finally:
            ray.shutdown()
            zone.cluster.shutdown()
        groups = example.groups_of(facts)
    steps = example.that_count(groups)
    if sorted(steps) != list(range(1, scene.steps + 1)):
        sys.exit(f"{way} has made {len(steps)} of {scene.steps} steps")
    spent = example.account(groups, zone.log, scene.nodes, begin, end)
    return {
        "scene": name,
        "way": way,
        "nodes lost": sum(event["what"] in ("deadline", "kill") for event in zone.log),
        "restarts": len(groups) - 1,
        "steps wasted": sum(len(group["steps"]) for group in groups) - len(steps),
        "wall": end - begin,
        "spent": spent,
        "goodput": spent["useful"] / (end - begin),
    }


def example_module() -> Any:
    spec = importlib.util.spec_from_file_location("spot_example", Path(__file__).parents[1] / "examples" / "spot.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def live_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| scene | way | nodes lost | restarts | steps wasted | stalled, s | wall, s | goodput |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        seconds = f"{row['spent']['stalled']:.0f} | {row['wall']:.0f}"
        lost = f"{row['nodes lost']} | {row['restarts']} | {row['steps wasted']}"
        lines.append(f"| {row['scene']} | {row['way']} | {lost} | {seconds} | {row['goodput']:.0%} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Way:
    """What a way of training costs; all in seconds, of all nodes that there are."""

    name: str
    every: float
    """Between two saves."""
    save: float
    killed: float
    """From the last step before to the first step after."""
    drained: float
    added: float
    decide: float
    """From a node's arrival until the workers are stopped for it."""
    saves_on_notice: bool
    waits: float | None
    """Before the deadline, after another save; None: it trains on until the nodes are gone."""
    saves_before_growing: bool


OURS = Way("pimm_ray", 300, 0.55, 8.0, 9.5, 10.3, 2, saves_on_notice=True, waits=3, saves_before_growing=True)
RAY = Way("Ray", 300, 0.65, 74, 76, 11, 30, saves_on_notice=False, waits=None, saves_before_growing=False)
JUST_IN_TIME = replace(RAY, name="Ray, just in time", saves_on_notice=True)
FLOOR = Way("restarts of 6.5 s, saves for nothing", 10, 0, 6.5, 6.5, 6.5, 0, True, 0, True)
"""What it takes here to start the processes once it is decided on which nodes, and nothing else."""


@dataclass
class Outcome:
    """Node-seconds; `available` is the sum of the others."""

    available: float = 0.0
    useful: float = 0.0
    wasted: float = 0.0
    saving: float = 0.0
    stalled: float = 0.0


class Job:
    """A job on as many nodes as there are."""

    def __init__(self, way: Way):
        self.way, self.outcome = way, Outcome()
        self.nodes, self.down, self.since_save, self.unsaved = 0, 0.0, 0.0, 0.0

    def run(self, seconds: float, *, idle: int = 0) -> None:
        """Let time pass; `idle` nodes are there without workers."""
        self.outcome.available += (self.nodes + idle) * seconds
        self.outcome.stalled += idle * seconds
        while seconds > 0:
            if self.down:
                spent = min(seconds, self.down)
                self.down -= spent
                self.outcome.stalled += self.nodes * spent
            elif self.since_save >= self.way.every:
                spent = self.save(limit=seconds)
            else:
                spent = min(seconds, self.way.every - self.since_save)
                self.since_save += spent
                self.unsaved += self.nodes * spent
            seconds -= spent

    def save(self, limit: float) -> float:
        """A save that does not fit has not been made."""
        if limit >= self.way.save:
            self.keep()
        self.outcome.saving += self.nodes * min(limit, self.way.save)
        return min(limit, self.way.save)

    def keep(self) -> None:
        self.outcome.useful += self.unsaved
        self.since_save = self.unsaved = 0.0

    def restart(self, nodes: int, down: float) -> None:
        self.outcome.wasted += self.unsaved
        self.since_save = self.unsaved = 0.0
        self.nodes, self.down = nodes, down if nodes else 0.0


def simulate(counts: list[int], gap: float, way: Way, notice: float | None, seed: int = 0) -> Outcome:
    """A job on a trace's nodes; those that go are announced `notice` seconds before, or not at all."""
    job = Job(way)
    for nodes, seconds, some_go in stretches(counts, gap, random.Random(seed)):
        if nodes > job.nodes:
            if job.nodes:
                decided = min(seconds, way.decide)
                job.run(decided, idle=nodes - job.nodes)
                seconds -= decided
                if way.saves_before_growing:
                    job.keep()
            job.restart(nodes, way.added)
        elif nodes < job.nodes:
            job.restart(nodes, way.killed if notice is None else way.drained)
        ending = min(seconds, notice) if notice is not None and some_go and way.saves_on_notice else 0.0
        job.run(seconds - ending)
        if ending and way.waits is None:
            job.since_save = way.every  # a save is due
            job.run(ending)
        elif ending and way.waits is not None:
            waiting = min(ending, way.waits)
            job.run(ending - waiting)
            job.keep()
            job.down = max(job.down, waiting)
            job.run(waiting)
    job.keep()
    return job.outcome


def stretches(counts: list[int], gap: float, chance: random.Random) -> list[tuple[int, float, bool]]:
    """Number of nodes, for how many seconds, and whether nodes go at the end.

    A trace says in which `gap` seconds a number has changed: when in them is left to chance, or saves would keep time
    with the changes.
    """
    starts = [0, *(index for index in range(1, len(counts)) if counts[index] != counts[index - 1])]
    times = [0.0, *((start - chance.random()) * gap for start in starts[1:]), (len(counts) - 1) * gap]
    following = [counts[start] for start in starts[1:]] + [counts[-1]]
    return [
        (counts[start], until - since, after < counts[start])
        for start, (since, until), after in zip(starts, pairwise(times), following, strict=True)
    ]


def young_daly(counts: list[int], gap: float, save: float) -> float:
    """The best interval between saves where losses come without notice and nothing is known of them but their rate."""
    losses = sum(after < before for before, after in pairwise(counts))
    with_nodes = gap * sum(count > 0 for count in counts)
    return math.sqrt(2 * save * with_nodes / max(1, losses))


def simulated_table(traces: list[Path]) -> str:
    lines = [
        "| zone | way | save each, s | goodput: with notice | without | node-hours wasted: with notice | without |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for path in traces:
        trace = json.loads(path.read_text())
        counts, gap = trace["data"], trace["metadata"]["gap_seconds"]
        best = [replace(way, every=young_daly(counts, gap, way.save)) for way in (OURS, RAY, JUST_IN_TIME)]
        zone = path.stem.split("_")[3] if path.stem.count("_") >= 3 else path.stem
        for way in (FLOOR, OURS, best[0], RAY, best[1], JUST_IN_TIME, best[2]):
            runs = [[simulate(counts, gap, way, notice, seed) for seed in range(8)] for notice in (120.0, None)]
            goodput = " | ".join(f"{sum(o.useful for o in some) / sum(o.available for o in some):.2%}" for some in runs)
            wasted = " | ".join(f"{sum(o.wasted for o in some) / len(some) / 3600:.0f}" for some in runs)
            lines.append(f"| {zone} | {way.name} | {way.every:.0f} | {goodput} | {wasted} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    real = kinds.add_parser("live", help="real runs")
    real.add_argument("--scene", choices=SCENES)
    real.add_argument("--way", choices=WAYS)
    real.add_argument("--json", type=Path, help="one scene and one way in this process; its numbers go to this file")
    simulator = kinds.add_parser("simulate", help="two weeks in seconds")
    simulator.add_argument("--traces", type=Path, nargs="+", required=True, help='{"metadata": ..., "data": [...]}')
    options = parser.parse_args()
    if options.kind == "simulate":
        print(simulated_table(options.traces))
        return
    if options.json:
        options.json.write_text(json.dumps(live(options.scene, options.way)))
        return
    rows = []
    for scene in [options.scene] if options.scene else SCENES:
        for way in [options.way] if options.way else WAYS:
            with tempfile.NamedTemporaryFile(suffix=".json") as numbers:
                command = [sys.executable, __file__, "live", "--scene", scene, "--way", way, "--json", numbers.name]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                rows.append(json.loads(numbers.read()))
            print(live_table(rows), flush=True)


if __name__ == "__main__":
    main()
