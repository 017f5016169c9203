"""Nodes of a real cluster that go with notice. One job; the tests read what it left."""

import json

import pytest

from tests.test_ray_run import launch, notes, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

EVENTS = ["in mid-epoch", "in evaluation"]


class Run:
    def __init__(self, root):
        self.notes = notes(root / "run.notes", rank=0)
        self.events = {event["event"]: event for event in json.loads((root / "results.json").read_text())}
        self.log = (root / "log").read_text()

    def around(self, event):
        """The drain of a node, rank 0's steps from then until the deadline, and the start of the next group."""
        drain = self.events[event]
        start = next(line for line in self.notes if line["event"] == "start" and line["time"] > drain["deadline"])
        steps = [line for line in self.notes if line["event"] == "step" and line["time"] < drain["deadline"]]
        return drain, [line for line in steps if line["time"] > drain["at"]], steps[-1], start


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("preemption")
    log = root / "log"
    wait(launch("preempt_job.py", root, log=log, GLOO_SOCKET_IFNAME="lo"), log)
    return Run(root)


@pytest.mark.parametrize("event", EVENTS)
def test_b35_a_drained_node_costs_no_step(run, event):
    _, _, last, start = run.around(event)
    assert start["step"] == last["step"]


def test_after_the_notice_training_goes_on_until_shortly_before_the_deadline(run):
    drain, steps, last, _ = run.around("in mid-epoch")
    assert len(steps) > 15 and last["time"] > drain["deadline"] - 5


def test_each_notice_is_said_once_and_each_wait(run):
    assert run.log.count("preemption: notice nodes=") == run.log.count("preemption: waiting for the restart") == 2
    assert run.log.count("ranks=1 deadline=in ") == run.log.count("ranks=0 deadline=in ") == 1


def test_b35_a_notice_is_not_charged_as_a_failure_and_an_error_of_the_users_is(run):
    assert len([line for line in run.notes if line["event"] == "start"]) == 3
    assert run.log.count("Source: preemption") == 2 and run.log.count("Source: worker group") == 1
    assert "Error count: 1 (max allowed: 0)" in run.log and "a bug of the user's" in run.events["end"]["error"]
