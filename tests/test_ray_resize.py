"""An elastic run on a real cluster of small nodes that come and go. One job; the tests read what it left."""

import json

import pytest

from tests.test_ray_run import launch, notes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


class Run:
    def __init__(self, root):
        self.notes = notes(root / "run.notes", rank=0)
        self.events = {event["event"]: event for event in json.loads((root / "results.json").read_text())}
        self.log = (root / "log").read_text()

    def after(self, event):
        """The start of the group after an event, the last step before that start, and the first one after it."""
        starts = [line for line in self.notes if line["event"] == "start" and line["time"] > self.events[event]["at"]]
        steps = [line for line in self.notes if line["event"] == "step"]
        start = starts[0]
        before = [line for line in steps if line["time"] < start["time"]][-1]
        return start, before, next(line for line in steps if line["time"] > start["time"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("resize")
    log = root / "log"
    wait(launch("resize_job.py", root, log=log, GLOO_SOCKET_IFNAME="lo"), log)
    return Run(root)


def test_when_a_process_dies_but_its_node_lives_the_group_stays_as_large(run):
    start, _, _ = run.after("worker killed")
    assert start["world"] == 3


def test_after_a_node_dies_the_rest_goes_on_long_before_ray_notices(run):
    start, before, first = run.after("node killed")
    assert start["world"] == 2 and start["step"] == before["step"] - before["step"] % 20
    # Ray's own policy waits 60 s for a worker on the node that is gone. On a busy machine workers start slowly.
    assert first["time"] - before["time"] < 50
    assert "resize: start workers=2 of at most 3 left_out=" in run.log
    assert "WorkerGroupStartupTimeoutError" not in run.log


def test_while_too_few_nodes_are_left_the_controller_rests(run):
    assert run.events["too few"]["load of controller"] < 0.3
    assert run.after("too few")[0]["time"] > run.events["node back"]["at"]
    assert "resize: waiting for nodes: room for 1 workers of at least 2" in run.log


def test_a_larger_group_starts_where_the_smaller_one_stopped(run):
    start, before, first = run.after("node added")
    assert start["world"] == 3
    assert (start["step"], first["step"]) == (before["step"], before["step"] + 1)
    assert "reason=resize" in run.log


def test_a_frozen_node_is_left_out_before_the_cluster_notices(run):
    start, before, first = run.after("node frozen")
    assert start["world"] == 2 and first["time"] - before["time"] < 55  # Ray takes a minute to notice


def test_no_group_starts_but_for_those_events(run):
    starts = [line["world"] for line in run.notes if line["event"] == "start"]
    assert starts == [3, 3, 2, 2, 3, 2]
