"""A driver that dies in a save, and loops that fail in every attempt, under real Ray."""

import shutil
import time
from pathlib import Path

import pytest

from pimm_ray import find_checkpoint, verify_checkpoint
from tests.test_ray_run import LIMIT, Job, launch, notes, tail, wait

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def until(condition, log, seconds=LIMIT):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, tail(log)
        time.sleep(0.02)


def folders(run, step):
    return list(run.glob(f"checkpoint_{step:08}-*"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A driver is killed in the save at step 15, then the same command runs on: its folder as it is, and a copy in
    which the newest complete checkpoint, of step 10, has a flipped bit."""
    job = Job(tmp_path_factory.mktemp("death"))
    run, damaged, log = job.root / "run", job.root / "damaged", job.root / "killed.log"
    driver = launch("death_job.py", job.root, "run", log=log)
    try:
        until(lambda: folders(run, 15) or driver.poll() is not None, log)
    finally:
        driver.kill()
        driver.wait()
    [worker] = notes(job.root / "run.notes", event="start")
    until(lambda: not Path(f"/proc/{worker['pid']}").exists(), log)
    job.before = find_checkpoint(run).step
    [job.half] = folders(run, 15)
    shutil.copytree(run, damaged)
    [newest] = folders(damaged, 10)
    file = newest / "weights" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    wait(launch("death_job.py", job.root, "run", "damaged", log=job.log), job.log)
    return job


def test_a_driver_killed_in_a_save_leaves_the_checkpoint_before_as_the_newest(killed):
    assert killed.before == 10 and not (killed.half / ".complete").exists()


@pytest.mark.parametrize(("run", "step"), [("run", 10), ("damaged", 5)])
def test_the_same_command_goes_on_from_the_newest_good_checkpoint(killed, run, step):
    assert notes(killed.root / f"{run}.notes", event="start")[-1]["step"] == step
    newest = find_checkpoint(killed.root / run)
    assert newest.step == 20 and verify_checkpoint(newest.path) == []


def test_what_was_passed_over_is_named_with_its_damage(killed):
    lines = [line for line in killed.log.read_text().splitlines() if "stepped back over" in line]
    assert "(weights/model.safetensors: digest): 5 steps lost" in lines[0] and "checkpoint_00000010-" in lines[0]
    assert not any(killed.half.name in line for line in lines), "it never counted"


@pytest.fixture(scope="module")
def looped(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("loop"))
    wait(launch("loop_job.py", job.root, log=job.log), job.log)
    return job


def error_of(job, run):
    [error] = notes(job.root / "errors.notes", run=run)
    return error["text"]


def test_b35_a_bug_that_may_fail_for_ever_ends_the_run_at_the_third_time(looped):
    starts = [line["step"] for line in notes(looped.root / "endless.notes", event="start")]
    assert starts == [0, 5, 5, 5], "one of them is the killed worker's, which does not count"
    report = error_of(looped, "endless").splitlines()
    newest = find_checkpoint(looped.root / "endless").path
    assert report[0].startswith("crash loop: 3 failures in a row after step 7 with the same error: ValueError: bad")
    assert report[1].endswith(f"it goes on from the newest checkpoint, {newest} (step 5).")


def test_b35_a_bug_ends_the_run_after_the_allowed_number_and_is_counted_apart(looped):
    assert len(notes(looped.root / "once.notes", event="start")) == 2
    assert "crash loop" not in error_of(looped, "once") and "ValueError: bad sample" in error_of(looped, "once")
    log = looped.log.read_text()
    assert "Error count: 2 (max allowed: 1)" in log and "Source: preemption" not in log
