"""Any plug pulled at any moment: a sample of benchmarks/crash_matrix.py, and that its list of moments is whole."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

from benchmarks import crash_matrix
from benchmarks.crash_matrix import at_random, crash, points, spread, traced


@functools.cache
def twin_of(world):
    return crash_matrix.undisturbed(world)


@pytest.mark.parametrize("world, sample", [(1, 28), (2, 24)])
def test_killed_at_any_change_of_a_save_the_run_comes_back_and_ends_as_if_nothing_had_been(world, sample):
    twin = twin_of(world)
    found = [crash(kill, change, twin) for kill, change in spread(list(points(twin)), sample)]
    assert [point for point in found if point.verdict not in ("newest", "previous")] == []
    saves = [point.verdict for point in found if point.kill.section == "save 4" and point.kill.rank == 0]
    assert saves == sorted(saves, reverse=True) and len(set(saves)) == 2, "first the old one, from a change on the new"


@pytest.mark.parametrize("world, kills", [(1, 6), (2, 3)])
def test_killed_at_random_times_a_run_that_saves_all_the_time_ends_as_if_nothing_had_been(world, kills):
    counted = at_random(world, kills)
    assert counted.pop("kills") == kills
    counted.pop("inside a save")
    assert counted.keys() == {"equal"}


@pytest.mark.parametrize("section", ["save 2", "save 4"])
@pytest.mark.parametrize("world", [1, 2])
def test_data_are_on_the_disk_before_the_marker_and_the_marker_before_anything_is_deleted(world, section):
    changes = sorted(
        (change for rank in twin_of(world) for change in rank["changes"] if change.section == section),
        key=lambda change: change.at,
    )
    done = [(change.kind, change.path) for change in changes]
    first, last = done.index, lambda event: len(done) - 1 - done[::-1].index(event)
    (marker,) = (path for kind, path in done if kind == "rename")
    folder, renamed = marker.removesuffix("/.complete"), first(("rename", marker))
    written, temporary = [path for kind, path in done if kind == "create"], f"{marker}.tmp"
    assert len(written) == len(set(written)) == 4 + 3 * (world - 1) + (world > 1) + 1 and temporary == written[-1]
    for path in written:
        synced = first(("fsync", path))
        assert last(("write", path)) < synced < renamed
        assert path == temporary or synced < first(("create", temporary))
        assert path == temporary or any(
            synced < at < renamed for at, event in enumerate(done) if event == ("fsync", path.rpartition("/")[0])
        )
    made = {path for kind, path in done if kind == "mkdir"} - {".", ".."}
    assert made == {folder, *(f"{folder}/{name}" for name in ("weights", "trainer.dcp", "ranks"))}
    assert all(first(("mkdir", path)) < last(("fsync", path)) for path in made)
    assert {event for event in done[renamed + 1 : renamed + 3]} == {("fsync", folder), ("fsync", ".")}
    deleted = [(at, path) for at, (kind, path) in enumerate(done) if kind in ("unlink", "rmdir")]
    assert bool(deleted) == (section == "save 4")
    if deleted:
        assert deleted[0][0] > renamed + 2 and deleted[0][1].endswith("/.complete")
        assert not any(folder in path for _, path in deleted) and deleted[-1][1] == deleted[0][1].rpartition("/")[0]


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace on this machine")
def test_the_kernel_sees_no_change_of_the_run_folder_that_was_not_announced(tmp_path):
    probe = subprocess.run(["strace", "-o", str(tmp_path / "probe"), "true"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.decode()[-200:]}")
    announced, called = traced(tmp_path)
    assert called == announced
    twin = [change for change in twin_of(1)[0]["changes"] if change.section in ("start", "save 2", "save 4")]
    listed = [(change.kind, change.path) for change in twin if not change.path.startswith("..")]
    assert sorted(change[1:] for change in announced[: len(listed)]) == sorted(listed), "the moments of the matrix"
