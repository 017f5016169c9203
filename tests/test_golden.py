"""The committed checkpoint of this format version is still read, bit for bit, and none of its damaged forms is."""

import json
import shutil
from pathlib import Path

import pytest

from pimm_ray import find_checkpoint, open_checkpoint, verify_checkpoint
from pimm_ray.checkpoint import layout
from tests.golden.make import EXPECTED, committed, load
from tests.ranks import run_ranks

expected = json.loads(EXPECTED.read_text())


@pytest.fixture
def run(tmp_path):
    """A run folder that holds the committed checkpoint."""
    shutil.copytree(committed(), tmp_path / "run" / committed().name)
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_it_is_of_this_version_whole_and_has_every_kind_of_file():
    assert json.loads((committed() / layout.MARKER).read_text())["version"] == layout.VERSION
    assert {name: len(data) for name, data in content(committed()).items()} == expected["files"], "was it made anew?"
    kinds = {layout.STATE, layout.STATE_TENSORS, layout.MARKER, layout.WEIGHTS_INDEX}
    kinds |= {place(i) for i in (0, 1) for place in (layout.rank_file, layout.trainer_file)}
    assert set(expected["files"]) == kinds | {layout.weights_file(i, 2) for i in (0, 1)}
    assert verify_checkpoint(committed()) == []
    info = open_checkpoint(committed())
    assert (info.step, info.epoch, info.attempt, info.world_size, info.reason) == (7, 1, 1, 2, "golden")
    assert info.metrics["score"] == 0.25 and info.metrics["worst"] != info.metrics["worst"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fresh_objects_on_any_number_of_ranks_become_what_was_saved(run, world):
    before = content(run / committed().name)
    ranks = run_ranks(world, load, run, group=world > 1)
    for rank, loaded in enumerate(ranks):
        assert loaded["source"] == committed().name
        assert loaded["facts"] == expected["facts"]
        assert loaded["draws"] == expected["draws"][rank], "a rank that is new draws from a stream of its own"
    assert sorted(index for loaded in ranks for index in loaded["next"]) == expected["next"]
    assert content(run / committed().name) == before


def test_it_is_taken_as_a_named_checkpoint_too_from_where_it_lies(tmp_path):
    before = content(committed())
    assert load(0, tmp_path, committed())["facts"] == expected["facts"]
    assert content(committed()) == before


def test_what_is_expected_is_not_what_fresh_objects_are_anyway(tmp_path):
    loaded = load(0, tmp_path)
    assert loaded["source"] == "fresh"
    for name in ("weights", "ema"):
        fresh, saved = loaded["facts"][name], expected["facts"][name]
        assert not [key for key in saved if fresh[key] == saved[key] and "num_batches" not in key]
    assert loaded["draws"] != expected["draws"][0]


def missing(data: bytes) -> None:
    return None


def cut(data: bytes) -> bytes:
    return data[:-1]


def emptied(data: bytes) -> bytes:
    return b""


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize("damage", [missing, cut, emptied, flipped])
@pytest.mark.parametrize("name", expected["files"])
def test_with_one_damaged_file_it_is_not_used(run, name, damage):
    file = run / committed().name / name
    damaged = damage(file.read_bytes())
    file.unlink()
    if damaged is not None:
        file.write_bytes(damaged)
    assert [problem.file for problem in verify_checkpoint(run / committed().name)] == [name]
    assert find_checkpoint(run) is None
    assert load(0, run)["source"] == "fresh"
