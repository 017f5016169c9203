"""The simulator of benchmarks/spot.py: where each node-second goes."""

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "spot.py"
GAP = 300.0


@pytest.fixture(scope="module")
def spot():
    spec = importlib.util.spec_from_file_location("spot_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def way(spot):
    return replace(spot.OURS, every=100.0, save=1.0, killed=20.0, drained=10.0, added=30.0, decide=5.0, waits=2.0)


class Halfway(random.Random):
    def random(self):
        return 0.5


def test_times_lie_within_the_gap_that_the_trace_names_and_nodes_that_go_are_marked(spot):
    found = spot.stretches([2, 2, 1, 1, 3], GAP, Halfway())
    assert found == [(2, 450.0, True), (1, 600.0, False), (3, 150.0, False)]


def test_every_node_second_is_counted_once(spot, way):
    chance = random.Random(0)
    for _ in range(200):
        counts = [chance.randint(0, 4) for _ in range(chance.randint(2, 30))]
        for each in (way, spot.OURS, spot.RAY, spot.JUST_IN_TIME, spot.FLOOR):
            for notice in (None, 30.0, 120.0, 1000.0):
                seed = chance.randrange(100)
                out = spot.simulate(counts, GAP, each, notice, seed)
                there = sum(n * s for n, s, _ in spot.stretches(counts, GAP, random.Random(seed)))
                assert out.available == pytest.approx(out.useful + out.wasted + out.saving + out.stalled)
                assert min(out.useful, out.wasted, out.saving, out.stalled) >= 0
                assert out.available == pytest.approx(there)


def test_a_calm_job_pays_its_start_and_its_saves(spot, way):
    out = spot.simulate([2] * 11, GAP, way, None)
    assert out.stalled == 2 * 30 and out.wasted == 0
    assert out.saving == 2 * ((3000 - 30) // 101)
    assert out.useful == 2 * (3000 - 30) - out.saving


def test_without_notice_the_work_since_the_last_save_is_lost(spot, way, monkeypatch):
    monkeypatch.setattr(spot.random, "Random", lambda seed: Halfway())
    out = spot.simulate([2, 1, 1], GAP, way, None)
    # 150 s of two nodes: 30 to start, 100 and a save, 19 lost; then 450 s of one: 20 to start.
    assert out.wasted == 2 * 19
    assert out.stalled == 2 * 30 + 20


def test_with_notice_ours_loses_nothing_and_just_in_time_what_came_after_its_save(spot, way, monkeypatch):
    monkeypatch.setattr(spot.random, "Random", lambda seed: Halfway())
    out = spot.simulate([2, 1, 1], GAP, way, notice=40.0)
    assert out.wasted == 0
    assert out.stalled == 2 * (30 + 2) + 10
    out = spot.simulate([2, 1, 1], GAP, replace(way, waits=None), notice=40.0)
    assert out.wasted == 2 * 39
    out = spot.simulate([2, 1, 1], GAP, replace(way, saves_on_notice=False), notice=40.0)
    assert out.wasted == 2 * 19


def test_growing_costs_a_wait_a_restart_and_only_without_a_save_the_work_since_the_last_one(spot, way, monkeypatch):
    monkeypatch.setattr(spot.random, "Random", lambda seed: Halfway())
    out = spot.simulate([1, 2, 2], GAP, way, None)
    assert out.wasted == 0
    assert out.stalled == 30 + 1 * 5 + 2 * 30
    out = spot.simulate([1, 2, 2], GAP, replace(way, saves_before_growing=False), None)
    assert out.wasted == 19 + 5


def test_no_nodes_cost_nothing(spot, way):
    out = spot.simulate([0, 0, 0], GAP, way, None)
    assert (out.available, out.useful, out.stalled) == (0, 0, 0)


def test_the_interval_of_young_and_daly(spot):
    assert spot.young_daly([2, 1, 2, 1], 300.0, save=3.0) == pytest.approx((2 * 3 * 1200 / 2) ** 0.5)
