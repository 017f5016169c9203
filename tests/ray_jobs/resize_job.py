"""One elastic run of 2 to 3 workers on a cluster of three small nodes, to which this happens in turn: a worker's
process dies; a node dies; another node dies, so that too few are left; two nodes come; one of them freezes. Usage:
resize_job.py FOLDER"""

import functools
import json
import os
import signal
import sys
import threading
import time

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import prepare_model
from tiny import Numbers, note
from torch import nn

from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy, TorchTrainer

SAVE_EVERY = 20

root = sys.argv[1]
notes, events, frozen = f"{root}/run.notes", [], []
cluster = Cluster()
addresses = iter(range(2, 20))


def loop(config):
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    loader = ElasticLoader(Numbers(600_000), global_batch_size=6)
    model = prepare_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    save = SavePolicy(every_steps=SAVE_EVERY, timeout_seconds=60)
    manager = CheckpointManager(model=model, optimizer=optimizer, loader=loader, save=save)
    manager.resume()
    facts = {"world": world, "pid": os.getpid()}
    note(config, rank, event="start", step=manager.state.global_step, time=time.time(), **facts)
    for _ in manager.epochs(1):
        for _, x in manager.batches():
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
            time.sleep(0.2)
            note(config, rank, event="step", step=manager.state.global_step + 1, time=time.time(), **facts)
            manager.step()
            stop = torch.tensor([os.path.exists(config["stop"])])
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop.item():
                return


def add(num_cpus=1):
    address, memory = f"127.0.0.{next(addresses)}", 100 * 2**20
    return cluster.add_node(num_cpus=num_cpus, node_ip_address=address, object_store_memory=memory)


def seen():
    return [json.loads(line) for line in open(notes)] if os.path.exists(notes) else []


def wait_for_step_of(world, after):
    """Until a group of this size has run for a while after that moment, and is in the middle between two saves."""
    limit = time.time() + 120
    while time.time() < limit:
        for line in seen():
            if line["event"] == "step" and line["world"] == world and line["time"] > after:
                if line["step"] % SAVE_EVERY == SAVE_EVERY // 2:
                    return
        time.sleep(0.1)
    raise TimeoutError(f"no step of {world} workers")


def happen(event, do, then):
    at = time.time()
    do()
    wait_for_step_of(then, at)
    events.append({"event": event, "at": at})


def freeze(node):
    raylet = node.all_processes["raylet"][0].process.pid
    with open(f"/proc/{raylet}/task/{raylet}/children") as file:
        frozen.extend([raylet, *map(int, file.read().split())])
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)


def processor_seconds_of_controller():
    """Of one process, over 4 seconds."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if "ray::TrainController" in file.read():
                    break
        except OSError:
            continue
    else:
        raise LookupError("no controller")

    def used():
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(4)
    return used() - before


add(num_cpus=0)
nodes = [add() for _ in range(3)]
ray.init(address=cluster.address)
trainer = TorchTrainer(
    loop,
    train_loop_config={"notes": notes, "stop": f"{root}/stop"},
    scaling_config=ScalingConfig(num_workers=(2, 3), elastic_resize_monitor_interval_s=4),
    run_config=RunConfig(name="run", storage_path=root, failure_config=FailureConfig(max_failures=10)),
)
training = threading.Thread(target=trainer.fit)
training.start()
try:
    wait_for_step_of(3, 0)
    worker = [line["pid"] for line in seen() if line["event"] == "start" and line["rank"] == 1][-1]
    happen("worker killed", functools.partial(os.kill, worker, signal.SIGKILL), then=3)
    happen("node killed", lambda: cluster.remove_node(nodes.pop(), allow_graceful=False), then=2)
    at = time.time()
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    time.sleep(8)
    events.append({"event": "too few", "at": at, "load of controller": processor_seconds_of_controller() / 4})
    happen("node back", lambda: nodes.append(add()), then=2)
    happen("node added", lambda: nodes.append(add()), then=3)
    happen("node frozen", lambda: freeze(nodes.pop()), then=2)
finally:
    open(f"{root}/stop", "w").close()
    training.join()
    with open(f"{root}/results.json", "w") as file:
        json.dump(events, file)
    for pid in frozen:
        os.kill(pid, signal.SIGKILL)
    ray.shutdown()
    cluster.shutdown()
