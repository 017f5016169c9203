"""Two drivers on one run name under real Ray: the second is refused, and admitted when the first was killed."""

import os
import time
from pathlib import Path

import pytest

from pimm_ray import find_checkpoint
from tests.test_ray_run import LIMIT, Job, launch, notes, tail, wait

OWN = {"RAY_ADDRESS": "local"}
"""No Ray that happens to run on this machine is joined by a fit() that should have been refused."""
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("lease"))
    until = time.monotonic() + LIMIT

    def come(name, driver, log, **wanted):
        while not notes(job.root / f"{name}.notes", **wanted):
            assert driver.poll() is None and time.monotonic() < until, tail(log)
            time.sleep(0.02)

    first = launch("lease_job.py", job.root, "first", log=job.root / "first.log", **OWN)
    try:
        come("run", first, job.root / "first.log", event="holds")
        second = launch("lease_job.py", job.root, "second", log=job.log, **OWN)
        come("second", second, job.log, event="refused")
        job.first = first.pid
    finally:
        first.kill()
        first.wait()
    (job.root / "go").touch()
    wait(second, job.log)
    return job


def test_a_second_driver_is_refused_within_seconds_before_anything_is_started(met):
    [refused] = notes(met.root / "second.notes", event="refused")
    assert refused["seconds"] < 10 and refused["ray"] is False
    assert refused["pid"] == met.first and f"process {met.first} on " in refused["text"]


def test_after_the_first_was_killed_the_same_command_passes_at_once_and_goes_on(met):
    lines = met.log.read_text()
    assert f"took over {met.root}/run: its holder (process {met.first} on " in lines and "is dead" in lines
    assert [line["step"] for line in notes(met.root / "run.notes", event="start")] == [0, 10]
    assert [line["step"] for line in notes(met.root / "run.notes", event="end")] == [20]
    assert find_checkpoint(met.root / "run").step == 20
    [done] = notes(met.root / "second.notes", event="done")
    assert done["left"] is False


def test_a_worker_that_outlives_its_driver_commits_nothing_any_more(met):
    fenced = notes(met.root / "run.notes", event="fenced")
    assert len(fenced) == 1 and "another job took over" in fenced[0]["text"]
    assert [name for name in os.listdir(met.root / "run") if name.startswith("checkpoint_00000012")] == []


def test_under_rays_own_trainer_the_worker_holds_it_and_its_successor_passes_at_once(met):
    before, after = notes(met.root / "stock.notes", event="start")
    assert (before["step"], after["step"]) == (0, 10)
    assert before["lease"]["pid"] == before["pid"] and after["lease"]["pid"] == after["pid"]
    assert before["lease"]["owner"] == after["lease"]["owner"] and after["lease"]["term"] > before["lease"]["term"]
    assert not Path(met.root / "stock" / ".lease").exists()
