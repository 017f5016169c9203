"""A run of two workers on a cluster of small nodes, none of whose failures is forgiven (max_failures=0). The node of
rank 1 is drained in mid-epoch, then the node of rank 0 during an evaluation; each is killed at its deadline. Then the
loop raises an error of its own. Usage: preempt_job.py FOLDER [DEADLINE_SECONDS]"""

import json
import os
import sys
import threading
import time

import ray
import ray.train
import torch
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import prepare_model
from tiny import Numbers, note
from torch import nn

from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy, TorchTrainer

root, deadline_seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
notes, events = f"{root}/run.notes", []
cluster = Cluster()
addresses = iter(range(2, 20))
nodes = {}


def loop(config):
    context = ray.train.get_context()
    rank, node = context.get_world_rank(), ray.get_runtime_context().get_node_id()
    loader = ElasticLoader(Numbers(6_000_000), global_batch_size=6)
    model = prepare_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = CheckpointManager(
        model=model, optimizer=optimizer, loader=loader, save=SavePolicy(timeout_seconds=60, at_end=False)
    )
    manager.resume()
    note(config, rank, event="start", step=manager.state.global_step, time=time.time(), node=node)
    for _ in manager.epochs(1):
        for _, x in manager.batches():
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
            time.sleep(0.1)
            note(config, rank, event="step", step=manager.state.global_step + 1, time=time.time())
            manager.step()
            now = torch.tensor([os.path.exists(f"{config['root']}/{what}") for what in ("evaluate", "stop")])
            torch.distributed.all_reduce(now, torch.distributed.ReduceOp.MAX)
            if now[1]:
                raise ValueError("a bug of the user's")
            if now[0]:
                note(config, rank, event="evaluation", step=manager.state.global_step, time=time.time())
                for _ in range(600):
                    time.sleep(0.1)
                    manager.poll()


def add(num_cpus=1):
    address, memory = f"127.0.0.{next(addresses)}", 100 * 2**20
    node = cluster.add_node(num_cpus=num_cpus, node_ip_address=address, object_store_memory=memory)
    nodes[node.node_id] = node


def seen(**wanted):
    lines = [json.loads(line) for line in open(notes)] if os.path.exists(notes) else []
    return [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]


def wait(what, found):
    limit = time.time() + 120 + deadline_seconds
    while not found():
        if time.time() > limit:
            raise TimeoutError(what)
        time.sleep(0.1)


def drain(event, rank):
    node_id = seen(event="start", rank=rank)[-1]["node"]
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    at = time.time()
    deadline = at + deadline_seconds
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    client.drain_node(node_id, reason, "rehearsal", int(deadline * 1000))
    time.sleep(max(0.0, deadline - time.time()))
    cluster.remove_node(nodes.pop(node_id), allow_graceful=False)
    wait("a restart", lambda: any(line["time"] > deadline for line in seen(event="start", rank=0)))
    events.append({"event": event, "at": at, "deadline": deadline})


add(num_cpus=0)
for _ in range(4):
    add()
ray.init(address=cluster.address)
trainer = TorchTrainer(
    loop,
    train_loop_config={"notes": notes, "root": root},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run", storage_path=root, failure_config=FailureConfig(max_failures=0)),
)


def fit():
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        events.append({"event": "end", "error": str(error)})


training = threading.Thread(target=fit)
training.start()
try:
    wait("30 steps", lambda: len(seen(event="step", rank=0)) >= 30)
    drain("in mid-epoch", rank=1)
    steps = len(seen(event="step", rank=0))
    wait("20 steps more", lambda: len(seen(event="step", rank=0)) >= steps + 20)
    open(f"{root}/evaluate", "w").close()
    wait("an evaluation", lambda: seen(event="evaluation", rank=0))
    os.remove(f"{root}/evaluate")
    drain("in evaluation", rank=0)
finally:
    open(f"{root}/stop", "w").close()
    training.join()
    with open(f"{root}/results.json", "w") as file:
        json.dump(events, file)
    ray.shutdown()
    cluster.shutdown()
