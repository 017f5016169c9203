"""Hours of spot instances in four minutes: nodes come and go as they did in a real zone, and the training is exact.

    python examples/spot.py               writes spot.json and spot.png; --quick: half of it, for CI

A real Ray cluster of small nodes on 127.0.0.x follows a recorded trace: how many of 4 spot instances one AWS zone gave,
every 5 minutes (`examples/spot_trace.json` says whose; `--trace FILE` takes any trace of that form), 5 minutes being 4
seconds here. When the count falls, nodes are drained with a notice and killed at its deadline, or killed without one,
in turn; when it rises, nodes are added. `pimm_ray.TorchTrainer` trains on 1 to 3 of them, with `ElasticLoader`, on
scikit-learn's handwritten digits. A step takes 1.5 s on one worker, half of that on two. What Ray says of lost nodes in
between is meant; `--verbose` shows what the workers and the controller say, too.

At the end: what each group of workers did, where the time went, and the proof: every image came exactly once an epoch,
in the same global batches as without any disturbance, and the final weights agree to rounding.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")  # a notice is 10 s here, not 120
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import prepare_model
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy, TorchTrainer, find_checkpoint, open_checkpoint

TRACE = Path(__file__).with_name("spot_trace.json")
START, SLOTS, SLOT_SECONDS, NOTICE_SECONDS = 231, 43, 4.0, 10.0
BATCH, SAVE_EVERY, STEP_SECONDS = 64, 5, 1.5
GIVE_UP_SECONDS = 900


def train_loop(config: dict[str, Any]) -> None:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float64).flatten(1) / 16
    dataset = TensorDataset(images, torch.tensor(data.target), torch.arange(len(images)))
    under_ray = dist.is_initialized()
    rank, workers = (dist.get_rank(), dist.get_world_size()) if under_ray else (0, 1)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10)).double()
    model = prepare_model(network) if under_ray else network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ElasticLoader(dataset, BATCH, tail="even", seed=0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=loader.total_steps(config["epochs"]))
    manager = CheckpointManager(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        save=SavePolicy(every_steps=SAVE_EVERY, timeout_seconds=60),
        storage=config.get("storage"),
    )
    manager.resume()

    group = torch.tensor(time.time(), dtype=torch.float64)  # its start, which all of its ranks write down
    if under_ray:
        dist.broadcast(group, 0)
    with open(Path(config["facts"], f"{group.item():.6f}-{rank}.jsonl"), "w", buffering=1) as facts:
        for epoch in manager.epochs(config["epochs"]):
            begin, ids = time.time(), []
            for x, y, index in manager.batches():
                with loader.sync(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    (loss * loader.weight).backward()
                ids += index.tolist() if loader.real else []
                if not loader.step_done:
                    continue
                time.sleep(config["step_seconds"] / workers)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                # Written before a save can hold this step: a step that is not written was not saved, and comes again.
                where = {"step": manager.state.global_step + 1, "epoch": epoch, "workers": workers}
                facts.write(json.dumps({**where, "begin": begin, "end": time.time(), "ids": ids}) + "\n")
                manager.step(loss=loss)
                begin, ids = time.time(), []
    manager.finish()


def counts_of(trace: list[int], start: int, slots: int, nodes: int) -> list[int]:
    """How many nodes there are in each slot; what the last one gives stays, one at least."""
    counts = [-(-count * nodes // max(trace)) for count in trace[start : start + slots]]
    return [*counts[:-1], max(1, counts[-1])]


def happenings(counts: list[int], slot: float, notice: float) -> list[tuple[float, str, float]]:
    """When, what is done to a node, and for a notice how long that node has left: every other one that goes has one."""
    events, changed, gone = [], 0.0, 0
    for number, (before, now) in enumerate(pairwise(counts), start=1):
        at = number * slot
        events += [(at, "add", 0.0)] * (now - before)
        for _ in range(before - now):
            if gone % 2 == 0:
                noticed = max(changed, at - notice)
                events += [(noticed, "notice", at - noticed), (at, "deadline", 0.0)]
            else:
                events.append((at, "kill", 0.0))
            gone += 1
        changed = at if now != before else changed
    return sorted(events, key=lambda event: event[0])


class Zone:
    """A local cluster whose worker nodes come and go."""

    def __init__(self, seed: int, address: int):
        self._random, self._next = random.Random(seed), address
        self.cluster = Cluster()
        self.head = self._node(0)
        self.nodes: list[Any] = []
        self.noticed: list[tuple[Any, float]] = []
        self.log: list[dict[str, Any]] = []
        self.lost_at = 0.0

    def _node(self, cpus: int) -> Any:
        address, self._next = f"127.0.0.{self._next}", self._next + 1
        return self.cluster.add_node(num_cpus=cpus, node_ip_address=address, object_store_memory=100 * 2**20)

    def happen(self, what: str, seconds_left: float = 0.0) -> None:
        at = time.time()
        if what == "add":
            self.nodes.append(self._node(1))
        elif what == "notice":
            node = self.nodes.pop(self._random.randrange(len(self.nodes)))
            self.noticed.append((node, at + seconds_left))
            drain(node, at + seconds_left)
        elif what == "deadline":
            node, deadline = self.noticed.pop(0)
            time.sleep(max(0.0, deadline - time.time()))
            self.cluster.remove_node(node, allow_graceful=False)
        else:
            self.cluster.remove_node(self.nodes.pop(self._random.randrange(len(self.nodes))), allow_graceful=False)
        if what in ("deadline", "kill"):
            self.lost_at = time.time()
        left = len(self.nodes) + len(self.noticed)
        self.log.append({"time": at, "what": what, "nodes": left})
        print(f"=== {what}: {left} node(s)", flush=True)


def drain(node: Any, deadline: float) -> None:
    """What examples/drain_on_interruption.sh does on a real spot node."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    client.drain_node(node.node_id, reason, "the zone takes the node back", int(deadline * 1000))


def replay(
    zone: Zone, events: list[tuple[float, str, float]], facts: Path, training: Future[Any], *, patient: bool
) -> None:
    """Let everything happen at its time, counted from the first step, for as long as the training lasts.

    With `patient` no node comes before the run has made a step on those that a loss has left.
    """
    give_up = time.monotonic() + GIVE_UP_SECONDS
    start = None
    while not training.done():
        if start is None and has_stepped(facts, since=0.0):
            start = time.monotonic()
        if start and events and time.monotonic() - start >= events[0][0]:
            at, what, seconds_left = events[0]
            if patient and what == "add" and zone.nodes and not has_stepped(facts, since=zone.lost_at):
                start = time.monotonic() - at  # the trace waits
            else:
                del events[0]
                zone.happen(what, seconds_left)
                continue
        if time.monotonic() > give_up:
            sys.exit(f"the training has not ended within {GIVE_UP_SECONDS} s")
        time.sleep(0.1)


def has_stepped(facts: Path, since: float) -> bool:
    """Whether a group of workers that has started since then has made a step."""
    return any(file.stat().st_size and float(file.stem.split("-")[0]) > since for file in facts.iterdir())


def groups_of(facts: Path) -> list[dict[str, Any]]:
    """Each group of workers with its steps; a step's images are those of all its ranks."""
    groups: dict[str, dict[str, Any]] = {}
    for file in sorted(facts.iterdir()):
        start, rank = file.stem.rsplit("-", 1)
        group = groups.setdefault(start, {"start": float(start), "workers": 0, "steps": {}})
        for line in file.read_text().splitlines():
            fact = json.loads(line)
            group["workers"] = fact["workers"]
            step = group["steps"].setdefault(fact["step"], {"epoch": fact["epoch"], "ids": []})
            step["ids"] += fact["ids"]
            if rank == "0":
                step["begin"], step["end"] = fact["begin"], fact["end"]
    # Of the step during which a group was killed, rank 0 may have written nothing.
    for group in groups.values():
        group["steps"] = {number: step for number, step in group["steps"].items() if "begin" in step}
    return [group for group in groups.values() if group["steps"]]


def that_count(groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The steps of the run: one that was lost and done again counts as it was done last."""
    return {number: step for group in groups for number, step in group["steps"].items()}


def account(
    groups: list[dict[str, Any]], log: list[dict[str, Any]], first_nodes: int, begin: float, end: float
) -> dict[str, float]:
    """Where the seconds from `begin` to `end` went, as rank 0 saw them."""
    counted = that_count(groups)
    spent = dict.fromkeys(("useful", "repeated", "saving", "stalled", "idle", "start and end"), 0.0)
    for group in groups:
        for number, step in group["steps"].items():
            kind = "useful" if counted[number] is step else "repeated"
            spent[kind] += step["end"] - step["begin"]
        steps = list(group["steps"].values())
        spent["saving"] += sum(after["begin"] - before["end"] for before, after in pairwise(steps))
    for before, after in pairwise(groups):
        stop, go = list(before["steps"].values())[-1]["end"], next(iter(after["steps"].values()))["begin"]
        changes = [(begin, first_nodes), *((event["time"], event["nodes"]) for event in log), (end, 0)]
        without_nodes = sum(
            max(0.0, min(go, until) - max(stop, since)) for (since, n), (until, _) in pairwise(changes) if n == 0
        )
        spent["idle"] += without_nodes
        spent["stalled"] += go - stop - without_nodes
    spent["start and end"] = end - begin - sum(spent.values())
    return spent


def described(groups: list[dict[str, Any]], begin: float) -> list[dict[str, Any]]:
    found = []
    for index, group in enumerate(groups):
        steps = list(group["steps"].items())
        following = next(iter(groups[index + 1]["steps"])) if index + 1 < len(groups) else steps[-1][0] + 1
        first, last = steps[0][1]["begin"] - begin, steps[-1][1]["end"] - begin
        found.append(
            {
                "workers": group["workers"],
                "first step at": first,
                "last step at": last,
                "stall before": first - (found[-1]["last step at"] if found else 0.0),
                "lost": steps[-1][0] + 1 - following,
                "steps": [(step["end"] - begin, number) for number, step in steps],
            }
        )
    return found


def weights(checkpoint: str) -> dict[str, torch.Tensor]:
    files = Path(checkpoint, "weights").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def picture(facts: dict[str, Any], path: Path) -> None:
    colors = ("C2", "C3", "C4", "C1", "0.6", "0.85")
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(10, 8), height_ratios=(3, 4, 1))
    wall = facts["seconds"]["wall"]
    changes = [[0, facts["nodes at start"]], *([event["at"], event["nodes"]] for event in facts["time line"])]
    changes.append([wall, changes[-1][1]])
    top.step(*zip(*changes, strict=True), where="post", color="0.7", lw=5, label="nodes")
    for index, group in enumerate(facts["groups"]):
        label = "workers that train" if index == 0 else None
        top.hlines(group["workers"], group["first step at"], group["last step at"], color="C0", lw=2, label=label)
    for what, mark in (("notice", "C1v"), ("deadline", "C3x"), ("kill", "C3X"), ("add", "C2^")):
        found = [(event["at"], event["nodes"]) for event in facts["time line"] if event["what"] == what]
        if found:
            top.plot(*zip(*found, strict=True), mark, label=what)
    most = max(nodes for _, nodes in changes)
    top.set(ylabel="nodes and workers", yticks=range(most + 1), ylim=(-0.3, most + 1), xlim=(0, wall))
    top.legend(frameon=False, ncols=6, loc="upper left")
    for group in facts["groups"]:
        middle.plot(*zip(*group["steps"], strict=True), color="C0", lw=1.5)
    saves = facts["saves"]
    middle.plot([s["at"] for s in saves], [s["step"] for s in saves], ".", color="C4", ms=5, label="save")
    middle.set(xlabel="seconds", ylabel="optimizer step", xlim=(0, wall))
    middle.legend(frameon=False, loc="upper left")
    left = 0.0
    for (kind, seconds), color in zip(facts["seconds"]["spent"].items(), colors, strict=True):
        bottom.barh(0, seconds, left=left, color=color, label=f"{kind} {seconds:.0f} s")
        left += seconds
    bottom.set(yticks=(), xlim=(0, wall))
    bottom.legend(frameon=False, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    figure.suptitle(f"Spot nodes of a real zone: goodput {facts['goodput']:.0%} of {wall:.0f} s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def table(facts: dict[str, Any]) -> str:
    rows = ["\n from s   to s  workers  steps      lost  stall before, s"]
    for group in facts["groups"]:
        (_, first), (_, last) = group["steps"][0], group["steps"][-1]
        rows.append(
            f"{group['first step at']:7.1f} {group['last step at']:6.1f}  {group['workers']:7}  "
            f"{f'{first}-{last}':9} {group['lost']:5}  {group['stall before']:15.1f}"
        )
    what = Counter(event["what"] for event in facts["time line"])
    reasons = Counter(save["reason"] for save in facts["saves"])
    spent, wall = facts["seconds"]["spent"], facts["seconds"]["wall"]
    rows += [
        f"\nnodes: {what['deadline']} drained, then killed; {what['kill']} killed without notice; {what['add']} added",
        f"steps: {facts['steps']}, {sum(group['lost'] for group in facts['groups'])} of them done twice",
        f"saves: {len(facts['saves'])} ({', '.join(f'{reason} {n}' for reason, n in sorted(reasons.items()))})",
        "time:  " + ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in spent.items()),
        f"goodput: {spent['useful']:.1f} s of {wall:.1f} s = {facts['goodput']:.0%}",
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer slots and epochs, at the pace of this machine")
    parser.add_argument("--trace", type=Path, default=TRACE, help='{"metadata": {...}, "data": [count, ...]}')
    parser.add_argument("--start", type=int, default=START, help="first slot of the trace")
    parser.add_argument("--slots", type=int, help="how many slots; what the last one gives stays, one node at least")
    parser.add_argument("--slot-seconds", type=float, default=SLOT_SECONDS)
    parser.add_argument("--notice-seconds", type=float, default=NOTICE_SECONDS)
    parser.add_argument("--nodes", type=int, default=3, help="the trace's largest count is this many nodes here")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0, help="chooses the nodes that go")
    parser.add_argument("--address", type=int, default=2, help="the cluster takes 127.0.0.ADDRESS and those after it")
    parser.add_argument("--verbose", action="store_true", help="show what Ray and the workers log")
    parser.add_argument("--out", type=Path, default=Path("spot"), help="OUT.json and OUT.png are written")
    options = parser.parse_args()
    slots, epochs = options.slots or (20 if options.quick else SLOTS), options.epochs or (3 if options.quick else 4)

    trace = json.loads(options.trace.read_text())["data"]
    counts = counts_of(trace, options.start, slots, options.nodes)
    storage = Path(os.environ.get("PIMM_RAY_STORAGE") or tempfile.mkdtemp(prefix="pimm_ray_spot_"))
    calm_facts, facts_folder = storage / "calm.facts", storage / "spot.facts"
    if not options.verbose:
        logging.basicConfig(level=logging.WARNING)
    calm_facts.mkdir(parents=True)
    facts_folder.mkdir()
    train_loop({"epochs": epochs, "step_seconds": 0, "facts": str(calm_facts), "storage": str(storage / "calm")})

    zone = Zone(options.seed, options.address)
    try:
        for _ in range(counts[0]):
            zone.happen("add")
        zone.log.clear()
        ray.init(
            zone.cluster.address,
            _node_ip_address=zone.head.node_ip_address,
            log_to_driver=options.verbose,
            logging_level=logging.WARNING,
        )
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"epochs": epochs, "step_seconds": STEP_SECONDS, "facts": str(facts_folder)},
            scaling_config=ScalingConfig(num_workers=(1, options.nodes), elastic_resize_monitor_interval_s=5),
            run_config=RunConfig(
                name="spot",
                storage_path=str(storage),
                failure_config=FailureConfig(max_failures=50),
                checkpoint_config=CheckpointConfig(num_to_keep=10**6),  # all of them, to be counted below
            ),
        )
        begin = time.time()
        training = ThreadPoolExecutor(1).submit(trainer.fit)
        events = happenings(counts, options.slot_seconds, options.notice_seconds)
        replay(zone, events, facts_folder, training, patient=options.quick)
        result, end = training.result(), time.time()
    finally:
        ray.shutdown()
        zone.cluster.shutdown()

    groups, calm = groups_of(facts_folder), that_count(groups_of(calm_facts))
    steps = that_count(groups)
    spent = account(groups, zone.log, counts[0], begin, end)
    folders = [marker.parent for marker in Path(result.path).glob("checkpoint_*/.complete")]
    saves = sorted((open_checkpoint(folder) for folder in folders), key=lambda save: save.created)
    seen = {epoch: Counter() for epoch in range(epochs)}
    for step in steps.values():
        seen[step["epoch"]].update(step["ids"])
    images = len(load_digits().target)
    same = sum(step in steps and sorted(steps[step]["ids"]) == sorted(calm[step]["ids"]) for step in calm)
    a, b = weights(find_checkpoint(str(storage / "calm")).path), weights(result.checkpoint.path)
    difference = max(float((a[name] - b[name]).abs().max()) for name in a)
    facts = {
        "trace": json.loads(options.trace.read_text())["metadata"],
        "counts": counts,
        "nodes at start": counts[0],
        "time line": [{"at": event["time"] - begin, **event} for event in zone.log],
        "groups": described(groups, begin),
        "saves": [{"at": s.created - begin, "step": s.step, "attempt": s.attempt, "reason": s.reason} for s in saves],
        "steps": len(steps),
        "seconds": {"wall": end - begin, "spent": spent},
        "goodput": spent["useful"] / (end - begin),
        "times each image came, by epoch": {epoch: [seen[epoch][i] for i in range(images)] for epoch in seen},
        "global batches as undisturbed": same,
        "largest difference of a weight": difference,
    }
    options.out.with_suffix(".json").write_text(json.dumps(facts))
    picture(facts, options.out.with_suffix(".png"))
    exact = all(set(epoch.values()) == {1} and len(epoch) == images for epoch in seen.values())
    print(table(facts))
    print(f"\neach of {images} images came exactly once in each of {epochs} epochs: {'yes' if exact else 'NO'}")
    print(f"global batches that are those of the undisturbed run: {same} of {len(calm)}")
    print(f"largest difference of any final weight: {difference:.1e}")
    print(f"{options.out.with_suffix('.json')} {options.out.with_suffix('.png')}; everything else is in {storage}")
    if not exact or same != len(calm) or len(steps) != len(calm) or difference > 1e-12:
        sys.exit("the disturbed run differs from the undisturbed one")
    deaths = sum(event["what"] in ("deadline", "kill") for event in zone.log)
    upscales = sum(after["workers"] > before["workers"] for before, after in pairwise(groups))
    if options.trace == TRACE and (deaths < 3 or not upscales):
        sys.exit(f"the run ended too soon to show anything: {deaths} nodes died, {upscales} times it grew")


if __name__ == "__main__":
    main()
