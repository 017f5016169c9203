"""Real Ray, real processes. Each job runs in processes of its own; the tests read what it left."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pimm_ray import find_checkpoint, verify_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # on a busy machine each start of Ray takes a minute

JOBS = Path(__file__).parent / "ray_jobs"
LIMIT = 400


def launch(job, *arguments, log, **environment):
    path = os.pathsep.join([str(JOBS.parent.parent), str(JOBS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, JOBS / job, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "RAY_DEDUP_LOGS": "0", **environment},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )


def wait(process, log):
    try:
        code = process.wait(LIMIT)
    finally:
        process.kill()
    assert code == 0, tail(log)


def tail(log):
    return "\n".join([line for line in log.read_text().splitlines() if "PlacementGroupCleaner" not in line][-80:])


def notes(path, **wanted):
    """Events of the workers with these fields, in the order they came."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]


class Job:
    def __init__(self, root):
        self.root, self.log = root, root / "log"

    @property
    def results(self):
        return json.loads((self.root / "results.json").read_text())


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("resume"))
    wait(launch("resume_job.py", job.root, log=job.log), job.log)
    return job


def starts(job, name):
    return [(line["step"], line["rank"]) for line in notes(job.root / f"{name}.notes", event="start")]


def steps(job, name, rank=0):
    return [line["step"] for line in notes(job.root / f"{name}.notes", event="step", rank=rank)]


def test_b01_a_resumed_run_does_only_the_steps_that_are_left(resumed):
    assert sorted(starts(resumed, "b01")) == [(10, 0), (10, 1)]
    assert steps(resumed, "b01") == [11, 12, 13, 14, 15]
    assert f"checkpoint={resumed.root}/runs/stock/{resumed.results['ten']} step=10" in resumed.log.read_text()


def test_stock_get_checkpoint_shows_what_the_run_starts_from(resumed):
    shown = {line["shown"] for line in notes(resumed.root / "b01.notes", event="start")}
    assert shown == {f"{resumed.root}/runs/stock/{resumed.results['ten']}"}


def test_the_manager_works_under_rays_own_trainer(resumed):
    assert sorted(starts(resumed, "stock")) == [(0, 0), (0, 1)]
    assert steps(resumed, "stock") == list(range(1, 11))
    assert "resume source=fresh" in resumed.log.read_text()


@pytest.mark.parametrize(("run", "step"), [("stock", 10), ("b01", 15), ("b06", 20)])
def test_the_result_points_to_our_folders_on_the_path_that_the_user_gave(resumed, run, step):
    result, folder = resumed.results[run], f"{resumed.root}/runs/{run}"
    newest = find_checkpoint(folder)
    assert (newest.path, newest.step) == (result["checkpoint"], step)
    assert result["checkpoint"] == result["best"][-1]
    assert all(path.startswith(f"{folder}/checkpoint_") and not verify_checkpoint(path) for path in result["best"])


def test_metrics_given_as_tensors_reach_the_result_as_numbers(resumed):
    metrics = resumed.results["stock"]["metrics"]
    assert metrics["score"] == 10.0 and metrics["kind"] == "tiny" and 0 < metrics["loss"] < 10


def test_b06_a_retry_starts_from_the_runs_newest_checkpoint_not_from_the_given_one(resumed):
    assert sorted(starts(resumed, "b06")) == [(5, 0), (5, 1), (15, 0), (15, 1)]
    assert steps(resumed, "b06", rank=1) == [*range(6, 18), *range(16, 21)]


def test_b06_the_starting_checkpoint_is_untouched(resumed):
    five = resumed.root / "runs" / "stock" / resumed.results["five"]
    assert verify_checkpoint(five) == []
    made = (five / ".complete").stat().st_mtime
    assert max(file.stat().st_mtime for file in five.rglob("*")) <= made + 0.01


def test_b34_rank_0_alone_feeds_the_tracker_and_a_retry_goes_on_with_its_run(resumed):
    calls = notes(resumed.root / "b06.notes", event="tracker")
    assert {call["rank"] for call in calls} == {0}
    assert [call["step"] for call in calls if call["call"] == "start"] == [5, 15]
    assert len({call["id"] for call in calls}) == 1
    [logged] = [[call["step"] for call in calls if call["call"] == "log"]]
    assert logged[:10] == list(range(6, 16)) and logged[-5:] == list(range(16, 21))


def test_b29_a_rank_that_skips_a_report_is_named_instead_of_hanging(resumed):
    [missing] = notes(resumed.root / "stock.notes", event="missing")
    assert missing["ranks"] == [1] and "rank 1 did not come within 1.5 s" in missing["text"]


def test_b29_ranks_that_report_different_checkpoints_are_told_so(resumed):
    texts = [line["text"] for line in notes(resumed.root / "stock.notes", event="disagree")]
    assert texts == [f"the ranks report different checkpoints: None, {resumed.results['ten']}"] * 2


@pytest.fixture(scope="module")
def relaunched(tmp_path_factory):
    """A driver is killed after step 12, then the same command runs on: its folder as it is (a), its folder without the
    oldest checkpoint (b), and without any complete one (c)."""
    job = Job(tmp_path_factory.mktemp("relaunch"))
    poll = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    driver = launch("relaunch_job.py", job.root, "a", log=job.root / "crash.log", **poll)
    snapshot, until = job.root / "a" / "checkpoint_manager_snapshot.json", time.monotonic() + LIMIT / 2
    try:
        while not (notes(job.root / "a.notes", event="step", step=12) and snapshot.exists()):
            assert driver.poll() is None and time.monotonic() < until, tail(job.root / "crash.log")
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.wait()
    [worker] = notes(job.root / "a.notes", event="start")
    while Path(f"/proc/{worker['pid']}").exists():  # it outlives its driver by some seconds
        assert time.monotonic() < until
        time.sleep(0.1)
    job.before = {path.name: path.stat().st_mtime for path in (job.root / "a").glob("checkpoint_0*")}
    job.known = json.loads(snapshot.read_text())["checkpoint_results"]
    for name in "bc":
        shutil.copytree(job.root / "a", job.root / name, copy_function=shutil.copy2)
    shutil.rmtree(job.root / "b" / min(job.before))
    for marker in (job.root / "c").glob("*/.complete"):
        marker.unlink()
    (job.root / "released").touch()
    wait(launch("relaunch_job.py", job.root, "a", "b", "c", log=job.log, **poll), job.log)
    return job


def test_b07_the_crash_left_two_complete_checkpoints_and_a_list_that_names_the_oldest(relaunched):
    assert [int(name[11:19]) for name in sorted(relaunched.before)] == [5, 10]
    assert relaunched.known[0]["checkpoint_dir_name"] == min(relaunched.before)
    assert relaunched.known[0]["metrics"]["score"] is None, "Ray now keeps NaN: restore_lost_scores is not needed"


@pytest.mark.parametrize("run", ["a", "b"])
def test_b07_the_same_command_continues_from_the_newest_complete_checkpoint(relaunched, run):
    newest = f"{relaunched.root}/{run}/{max(relaunched.before)}"
    start = notes(relaunched.root / f"{run}.notes", event="start")[-1]
    assert (start["step"], start["shown"]) == (10, newest)
    assert f"start: checkpoint={newest} (newest of this run, not yet verified)" in relaunched.log.read_text()
    again = [line for line in notes(relaunched.root / f"{run}.notes", event="step") if line["step"] in (11, 12)]
    first = [line for line in notes(relaunched.root / "a.notes", event="step") if line["step"] in (11, 12)][:2]
    assert [line["ids"] for line in again[-2:]] == [line["ids"] for line in first], "another order of samples"


def test_b07_a_folder_deleted_by_hand_is_said_and_does_not_stop_the_run(relaunched):
    lines = [line for line in relaunched.log.read_text().splitlines() if "moved aside" in line]
    assert len(lines) == 1 and min(relaunched.before) in lines[0] and f"{relaunched.root}/b " in lines[0]
    assert len(list((relaunched.root / "b").glob("checkpoint_manager_snapshot.json.aside-*"))) == 1


def test_b07_without_a_complete_checkpoint_the_run_starts_fresh_and_says_so(relaunched):
    start = notes(relaunched.root / "c.notes", event="start")[-1]
    assert (start["step"], start["shown"]) == (0, None)
    assert (
        f"start: fresh (nothing usable among 2 checkpoint folder(s) in {relaunched.root}/c)"
        in relaunched.log.read_text()
    )


@pytest.mark.parametrize(("run", "attempt"), [("a", 2), ("b", 2), ("c", 2)])
def test_b07_new_checkpoints_go_on_from_the_old_ones_and_overwrite_none(relaunched, run, attempt):
    newest = find_checkpoint(relaunched.root / run)
    assert (newest.step, newest.attempt) == (20, attempt)
    assert newest.path == relaunched.results[run]["checkpoint"]
    for path in (relaunched.root / run).glob("checkpoint_0*"):
        if path.name in relaunched.before:
            assert [file for file in path.rglob("*") if file.stat().st_mtime > relaunched.before[path.name] + 5] == []


@pytest.mark.parametrize("run", ["a", "b"])
def test_b32_a_nan_score_from_before_the_crash_does_not_break_the_ranking(relaunched, run):
    best = relaunched.results[run]["best"]
    assert [score for _, score in best] == [15.0, 20.0]
    assert all(verify_checkpoint(path) == [] for path, _ in best)
