"""examples/spot.py without its cluster: what it does to the nodes, and how it counts the time."""

import importlib.util
import json
import os
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("matplotlib")
EXAMPLE = Path(__file__).parent.parent / "examples" / "spot.py"


@pytest.fixture(scope="module")
def spot():
    spec = importlib.util.spec_from_file_location("spot_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ):  # it sets some for Ray
        spec.loader.exec_module(module)
    return module


def test_the_shipped_trace_is_one_day_and_names_its_source(spot):
    trace = json.loads(spot.TRACE.read_text())
    assert len(trace["data"]) * trace["metadata"]["gap_seconds"] == 24 * 3600
    assert "NSDI 2024" in trace["metadata"]["source"]


def test_the_nodes_follow_the_trace_and_every_other_one_that_goes_is_drained_first(spot):
    counts = [3, 3, 3, 2, 3, 1, 0, 0, 2, 0, 3]
    events = spot.happenings(counts, slot=4.0, notice=6.0)
    alive = noticed = 0
    reached = [counts[0]]
    for slot in range(1, len(counts)):
        for _, what, _ in [event for event in events if (slot - 1) * 4.0 < event[0] <= slot * 4.0]:
            alive += {"add": 1, "deadline": -1, "kill": -1, "notice": 0}[what]
            noticed += {"notice": 1, "deadline": -1}.get(what, 0)
            assert 0 <= noticed <= alive + counts[0]
        reached.append(counts[0] + alive)
    assert reached == counts
    assert [what for _, what, _ in events if what in ("deadline", "kill")] == ["deadline", "kill"] * 3
    notices = [(at, at + left) for at, what, left in events if what == "notice"]
    assert [deadline for _, deadline in notices] == [at for at, what, _ in events if what == "deadline"]
    assert all(deadline - at <= 6.0 for at, deadline in notices)


def test_each_second_is_counted_once_and_a_lost_step_is_repeated_time(spot, tmp_path):
    def group(start, workers, *steps):
        for rank in range(workers):
            lines = [
                {"step": step, "epoch": 0, "workers": workers, "begin": begin, "end": end, "ids": [10 * step + rank]}
                for step, begin, end in steps
            ]
            (tmp_path / f"{start:.6f}-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    group(100.0, 2, (1, 100, 101), (2, 101.5, 103))
    group(110.0, 1, (2, 110, 112))
    with open(tmp_path / "100.000000-1.jsonl", "a") as file:  # rank 0 was killed in this step
        file.write(json.dumps({"step": 3, "epoch": 0, "workers": 2, "begin": 103, "end": 104, "ids": [1]}) + "\n")
    groups = spot.groups_of(tmp_path)
    steps = spot.that_count(groups)
    assert {number: step["ids"] for number, step in steps.items()} == {1: [10, 11], 2: [20]}
    log = [{"time": 104.0, "what": "kill", "nodes": 0}, {"time": 106.0, "what": "add", "nodes": 1}]
    spent = spot.account(groups, log, first_nodes=1, begin=90.0, end=115.0)
    assert spent == {"useful": 3, "repeated": 1.5, "saving": 0.5, "stalled": 5, "idle": 2, "start and end": 13}
    assert [found["lost"] for found in spot.described(groups, 90.0)] == [1, 0]
