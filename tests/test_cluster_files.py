"""cluster.yaml and examples/rayjob.yaml say what they promise, and EC2's notice becomes a drain that Ray knows."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WATCHER = ROOT / "examples" / "drain_on_interruption.sh"


@pytest.fixture
def cluster():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def workers(cluster):
    return {name: kind for name, kind in cluster["available_node_types"].items() if name != cluster["head_node_type"]}


def is_spot(kind):
    return kind["node_config"].get("InstanceMarketOptions", {}).get("MarketType") == "spot"


def test_the_cluster_file_fits_the_schema_that_ray_ships(cluster):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))
    cluster["available_node_types"]["gpu_spot"]["priorty"] = 1
    with pytest.raises(Exception, match="priorty"):
        validate_config(prepare_config(cluster))


def test_the_head_is_on_demand_and_takes_no_training(cluster):
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert not is_spot(head) and head["resources"] == {"CPU": 0, "GPU": 0}


def test_spot_in_several_zones_comes_before_on_demand_of_the_same_size(cluster):
    spot = [kind for kind in workers(cluster).values() if is_spot(kind)]
    steady = [kind for kind in workers(cluster).values() if not is_spot(kind)]
    assert spot and steady and len(cluster["provider"]["availability_zone"].split(",")) > 1
    assert min(kind["priority"] for kind in spot) > max(kind["priority"] for kind in steady)
    assert len({json.dumps(kind["resources"]) for kind in spot + steady}) == 1
    assert cluster["provider"]["cache_stopped_nodes"] is False, "a stopped spot node cannot be started at will"


def test_every_line_to_be_changed_says_so_and_no_path_is_of_this_machine(cluster):
    text = (ROOT / "cluster.yaml").read_text()
    assert text.count("CHANGE") >= 6 and str(ROOT) not in text
    assert all((ROOT / local).exists() for local in cluster["file_mounts"].values())
    assert any(WATCHER.name in line for line in cluster["worker_start_ray_commands"])


def test_the_kuberay_job_has_the_same_properties():
    job = yaml.safe_load((ROOT / "examples" / "rayjob.yaml").read_text())
    spec, groups = job["spec"]["rayClusterSpec"], job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert job["kind"] == "RayJob" and job["spec"]["backoffLimit"] > 0
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    kinds = {group["template"]["spec"]["nodeSelector"]["karpenter.sh/capacity-type"] for group in groups}
    assert kinds == {"spot", "on-demand"} and groups[0]["groupName"] == "gpu-spot"
    for group in groups:
        pod = group["template"]["spec"]
        drain = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
        deadline = int(drain.split("--deadline-remaining-seconds ")[1].split(";")[0])
        assert "ray drain-node" in drain and deadline < pod["terminationGracePeriodSeconds"]


class Metadata(BaseHTTPRequestHandler):
    """What an EC2 instance can ask about itself: a token first, then the notice, from the third time on."""

    asked = 0
    seconds = 100

    def do_PUT(self):
        self.answer(200 if self.path == "/latest/api/token" else 404, "a-token")

    def do_GET(self):
        known = self.path == "/latest/meta-data/spot/instance-action"
        if self.headers["X-aws-ec2-metadata-token"] != "a-token":
            return self.answer(401)
        type(self).asked += 1
        at = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=self.seconds)
        notice = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.answer(200 if known and self.asked > 2 else 404, json.dumps(notice))

    def answer(self, status, text=""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class Training:
    def go_on(self):
        pass


@pytest.mark.ray
def test_the_notice_of_ec2_becomes_a_drain_with_its_deadline():
    import ray
    from ray.cluster_utils import Cluster

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = {"node_ip_address": "127.0.0.11", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=here | {"num_cpus": 0})
    try:
        node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.12")
        ray.init(address=cluster.address)
        worker = ray.remote(num_cpus=1)(Training).remote()  # a node without work would leave at once
        ray.get(worker.go_on.remote())
        environment = {
            **os.environ,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{server.server_port}/",
            "POLL_SECONDS": "0.1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = ["bash", str(WATCHER), "--address", cluster.address, "--node-id", node.node_id]
        watcher = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True)
        assert watcher.returncode == 0, watcher.stderr
        draining = ray._private.state.state.get_draining_nodes()
        left = draining[node.node_id] / 1000 - datetime.datetime.now().timestamp()
        assert list(draining) == [node.node_id] and 60 < left <= 101
    finally:
        ray.shutdown()
        cluster.shutdown()
        server.shutdown()
