"""A checkpoint is read once and proven as it is read; what is damaged is passed over, noted in place, and counted."""

import itertools
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.fs as pafs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from xxhash import xxh3_64_hexdigest

from pimm_ray import CheckpointManager, errors, find_checkpoint, open_checkpoint, resuming, verify_checkpoint
from pimm_ray.checkpoint import store as storage
from pimm_ray.checkpoint.find import open_manifest
from pimm_ray.checkpoint.layout import (
    DAMAGED,
    MARKER,
    STATE,
    WEIGHTS_INDEX,
    FileEntry,
    Manifest,
    rank_file,
    trainer_file,
    weights_file,
)
from pimm_ray.checkpoint.reader import Reader
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.resuming import choose
from pimm_ray.runtime.base import LocalRuntime
from pimm_ray.testing import FaultyStore
from tests.elastic_jobs import Job, change_marker, flip_byte, folders, listening, newest_step, said, steps_kept
from tests.ranks import run_ranks, try_ranks

FILES = [STATE, WEIGHTS_INDEX, weights_file(0, 2), weights_file(1, 2)]
FILES += [name(rank) for name in (trainer_file, rank_file) for rank in range(3)]
"""What three ranks write of the job's two parameters."""


class Counting(LocalStore):
    """Counts the bytes that are read of each file."""

    def __init__(self, folder):
        super().__init__(pafs.LocalFileSystem(), str(folder))
        self.seen = Counter()

    def read(self, name, *, limit=None):
        data = super().read(name, limit=limit)
        self.seen[name] += len(data)
        return data

    def peek(self, name, count):
        data, size = super().peek(name, count)
        self.seen[name] += len(data)
        return data, size

    def _fill(self, name, file, offset, buffers):
        super()._fill(name, file, offset, buffers)
        self.seen[name] += sum(map(len, buffers))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three ranks with complete checkpoints of steps 2 and 5."""
    folder = tmp_path_factory.mktemp("trained")
    for steps in (2, 3):
        Job(folder, steps=steps).on(3)
    assert {entry.path for entry in open_manifest(open_store(folder / folders(folder)[-1]))[1].files} == set(FILES)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def newest(run):
    return run / folders(run)[-1]


def choice_of(place):
    """What this rank would resume from, and what it said."""
    with listening() as lines:
        choice = choose(LocalRuntime(place, timeout=30), None)
    return choice, lines


def patient(monkeypatch, seconds):
    monkeypatch.setattr(resuming, "VISIBLE_WITHIN", seconds)
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.01))


# One pass


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_reads_what_it_restores_once_and_all_ranks_together_read_everything(run, world):
    def read(rank):
        store = Counting(run)
        choice, _ = choice_of(store)
        assert choice.info.step == 5
        return store.seen

    seen = run_ranks(world, read)
    sizes = {path: (newest(run) / path).stat().st_size for path in FILES}
    needed = {path for path in FILES if not path.startswith("ranks/") and path != WEIGHTS_INDEX}
    for rank, counts in enumerate(seen):
        for path in {*needed, rank_file(rank)}:
            assert counts[path] == sizes[path], (rank, path)
        assert all(counts[path] <= sizes[path] for path in FILES)
        assert counts[MARKER] <= 2 * (newest(run) / MARKER).stat().st_size
    for path in FILES:
        assert any(counts[path] == sizes[path] for counts in seen), path
    assert sum(counts[WEIGHTS_INDEX] > 0 for counts in seen) == 1


def test_what_is_restored_is_read_no_second_time(run):
    store = Counting(run)
    model = nn.Linear(1, 1)
    manager = CheckpointManager(model=model, optimizer=torch.optim.AdamW(model.parameters()), storage=store)
    assert manager.resume().step == 5
    assert store.seen[weights_file(0, 2)] == (newest(run) / weights_file(0, 2)).stat().st_size


BLOCK = 4096
SIZE = 5 * BLOCK + 100


@pytest.fixture
def blocks(tmp_path):
    """A reader of one file of six small blocks, the file, and its bytes."""
    data = random.Random(0).randbytes(SIZE)
    (tmp_path / "x").write_bytes(data)
    entry = FileEntry("x", SIZE, tuple(xxh3_64_hexdigest(data[i : i + BLOCK]) for i in range(0, SIZE, BLOCK)), BLOCK)
    facts = dict.fromkeys(("step", "epoch", "attempt", "world_size", "created"), 0)
    manifest = Manifest(id="", parent=None, reason="", files=(entry,), **facts)
    return lambda: Reader(Counting(tmp_path), manifest), tmp_path / "x", data


@pytest.mark.parametrize("run_of, ahead", [(2**20, 0), (1000, 0), (1000, 1), (1000, 5000), (2**20, 2 * SIZE)])
def test_ranges_are_filled_from_whole_blocks_and_no_byte_is_read_twice(blocks, monkeypatch, run_of, ahead):
    monkeypatch.setattr(LocalStore, "run", run_of)
    reader, _, data = blocks[0](), *blocks[1:]
    if ahead:
        assert reader.peek("x", ahead) == (data[:ahead], SIZE)
    cuts = sorted(random.Random(ahead).sample(range(2 * BLOCK, 4 * BLOCK), 8))
    ranges = [(start, bytearray(stop - start)) for start, stop in itertools.pairwise([*cuts, SIZE - 5, SIZE])][::2]
    reader.read_into("x", [(start, memoryview(buffer)) for start, buffer in reversed(ranges)])
    assert all(buffer == data[start : start + len(buffer)] for start, buffer in ranges)
    touched = {at // BLOCK for start, buffer in ranges for at in range(start, start + len(buffer))}
    expected = sum(min(BLOCK, SIZE - block * BLOCK) for block in touched)
    early = min(ahead, SIZE)
    assert early + expected - BLOCK * len(touched) <= reader.store.seen["x"] <= early + expected
    assert reader.rest() == [] and reader.rest() == []
    assert reader.store.seen["x"] <= SIZE + early


def test_a_file_whose_head_was_looked_at_is_not_read_there_again(blocks):
    reader, _, data = blocks[0](), *blocks[1:]
    reader.peek("x", 1000)
    buffer = bytearray(SIZE)
    reader.read_into("x", [(0, memoryview(buffer))])
    assert buffer == data and reader.store.seen["x"] == SIZE


def test_one_wrong_byte_is_found_when_its_block_is_wanted_and_else_by_the_rest(blocks):
    make, file, _ = blocks
    for damaged in range(6):
        flip_byte(file, damaged * BLOCK + 50)
        for wanted in range(6):
            reader, buffer = make(), memoryview(bytearray(10))
            if wanted == damaged:
                with pytest.raises(errors.CorruptCheckpoint, match=f"block {damaged}") as caught:
                    reader.read_into("x", [(wanted * BLOCK, buffer)])
                assert (caught.value.file, caught.value.kind) == ("x", "digest")
            else:
                reader.read_into("x", [(wanted * BLOCK, buffer)])
            (error,) = reader.rest()
            assert error.expected == reader.manifest.files[0].xxh3[damaged] != error.found
        parts = [len(make().rest(part=part, parts=4)) for part in range(4)]
        assert sum(parts) == 1, "exactly one of four ranks has it in its share"
        flip_byte(file, damaged * BLOCK + 50)


def test_what_was_looked_at_and_what_is_there_later_are_not_taken_for_one(blocks):
    make, file, _ = blocks
    flip_byte(file, 10)
    reader = make()
    reader.peek("x", 20)
    flip_byte(file, 10)
    assert [error.kind for error in reader.rest()] == ["digest"], "the bytes that were parsed were not the right ones"


def test_ranges_that_overlap_or_lie_beyond_the_file_are_errors_of_ours(blocks):
    for ranges in ([(0, 10), (5, 10)], [(SIZE - 5, 10)], [(10 * BLOCK, 1)]):
        with pytest.raises(errors.CorruptCheckpoint):
            blocks[0]().read_into("x", [(start, memoryview(bytearray(size))) for start, size in ranges])


class Requests(Store):
    """A store as of objects, which notes each request for bytes."""

    def _fill(self, name, file, offset, buffers):
        self.asked.append((offset, sum(map(len, buffers))))
        super()._fill(name, file, offset, buffers)


def test_an_object_store_is_asked_for_neighbours_at_once_and_for_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "BLOCK", 1000)
    data = random.Random(0).randbytes(10_000)
    (tmp_path / "x").write_bytes(data)
    store = Requests(pafs.LocalFileSystem(), str(tmp_path))
    store.asked = []
    near = [(100 + 10 * i, memoryview(bytearray(10))) for i in range(250)]
    far = [(9000, memoryview(bytearray(7))), (9008, memoryview(bytearray(1)))]
    store.read_into("x", [*reversed(near), *far])
    assert all(buffer == data[start : start + len(buffer)] for start, buffer in [*near, *far])
    assert sorted(store.asked) == [(100, 1000), (1100, 1000), (2100, 500), (9000, 7), (9008, 1)]


# Damage


@pytest.mark.parametrize("world", [1, 2, 3])
def test_damage_in_any_file_is_found_by_all_ranks_and_named_and_noted(run, world):
    def look(rank):
        said_by_file = {}
        for file in FILES:
            path = newest(run) / file
            for place in (0, 12, -1) if file.endswith(".safetensors") else (-1,):
                if rank == 0:
                    flip_byte(path, place)
                dist.barrier()
                choice, lines = choice_of(run)
                assert choice.info.step == 2 and choice.damaged == {newest(run).name}, file
                dist.barrier()
                if rank == 0:
                    note = json.loads((newest(run) / DAMAGED).read_text())
                    said_by_file[file, place] = lines, note
                    flip_byte(path, place)
                    (newest(run) / DAMAGED).unlink()
                dist.barrier()
        assert choice_of(run)[0].info.step == 5
        return said_by_file

    for (file, _), (lines, note) in run_ranks(world, look)[0].items():
        assert said(lines, f"passed over {newest(run).name}", f"{file}: digest") == 1
        assert said(lines, f"stepped back over {newest(run).name} ({file}: digest): 3 steps lost") == 1
        assert len(lines) == 2
        assert (note["file"], note["kind"]) == (file, "digest") and note["expected"] != note["found"]
        assert len(note["found"]) == 16 and note["when"].endswith("Z")


class Misread(LocalStore):
    """One byte of one file comes wrong from this node's disk or memory."""

    def peek(self, name, count):
        data, size = super().peek(name, count)
        return data[:-1] + bytes([data[-1] ^ (name == trainer_file(0))]), size


def test_what_only_one_rank_reads_wrong_is_found_by_that_rank_and_passed_over_by_all(run):
    def look(rank):
        choice, _ = choice_of(Misread(pafs.LocalFileSystem(), str(run)) if rank == 2 else run)
        return choice.info and choice.info.step, choice.damaged

    assert run_ranks(3, look) == [(None, frozenset(folders(run)))] * 3, "it misreads the older one too"


def test_nothing_is_applied_before_all_ranks_have_proven_their_part(run, tmp_path):
    flip_byte(newest(run) / rank_file(1))

    def resume(rank):
        model = nn.Linear(1, 1)
        before = [parameter.tolist() for parameter in model.parameters()]
        manager = CheckpointManager(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), storage=tmp_path / "new"
        )
        with pytest.raises(errors.CorruptCheckpoint) as caught:
            manager.resume(checkpoint=newest(run), warmup=lambda: pytest.fail("warmed up"))
        assert [parameter.tolist() for parameter in model.parameters()] == before
        return caught.value.file, caught.value.kind

    assert run_ranks(2, resume) == [(rank_file(1), "digest")] * 2


def test_missing_and_cut_files_are_noted_and_the_note_decides_nothing(run):
    path = newest(run)
    (path / rank_file(2)).rename(run / "aside")
    story = Job(run, steps=0).alone()
    assert story.plan.step == 2 and any("3 steps lost" in note for note in story.plan.notes)
    assert "3 steps lost" in story.plan.explain()
    note = json.loads((path / DAMAGED).read_text())
    assert (note["file"], note["kind"], note["found"]) == (rank_file(2), "missing", None)
    (run / "aside").rename(path / rank_file(2))
    assert verify_checkpoint(path) == [] and newest_step(run) == 5, "the digests decide, not the note"
    assert Job(run, steps=0).alone().plan.step == 5
    assert not (path / DAMAGED).exists(), "it did not hold any more"

    (path / DAMAGED).write_text("not even JSON")
    (path / STATE).write_bytes((path / STATE).read_bytes()[:-1])
    assert choice_of(run)[0].info.step == 2
    assert (path / DAMAGED).read_text() == "not even JSON", "the first note stays"


def test_nobody_writes_from_outside(run):
    flip_byte(newest(run) / STATE)
    before = sorted(run.rglob("*"))
    assert newest_step(run) == 2 and verify_checkpoint(newest(run)) and verify_checkpoint(newest(run), deep=False) == []
    assert sorted(run.rglob("*")) == before


def test_what_cannot_be_read_or_was_never_finished_is_not_called_damaged(run, monkeypatch):
    patient(monkeypatch, 0.0)
    path = newest(run)
    faulty = FaultyStore(run, fail_from=1, kinds={"read"}, matching=f"*{path.name}/{STATE}")
    choice, lines = choice_of(faulty)
    assert choice.info.step == 2 and said(lines, "passed over", "state.json: unreadable") == 1
    assert choice.damaged == {path.name}, "retention keeps its hands off it in this attempt"
    assert not (path / DAMAGED).exists()

    marker = (path / MARKER).read_bytes()
    (path / MARKER).unlink()
    choice, lines = choice_of(run)
    assert choice.damaged == frozenset() and choice.notes == () and said(lines, "steps lost") == 0
    assert not (path / DAMAGED).exists()

    change = json.loads(marker)
    (path / MARKER).write_text(json.dumps({**change, "version": 99}))
    assert choice_of(run)[0].damaged == {path.name} and not (path / DAMAGED).exists()
    assert [problem.kind for problem in verify_checkpoint(path)] == ["version"]


@pytest.mark.parametrize("unreadable", ["*.complete", "*/state.json"])
def test_a_run_whose_checkpoints_cannot_be_read_does_not_begin_anew(run, tmp_path, unreadable):
    outage = FaultyStore(run, fail_from=1, kinds={"read"}, matching=unreadable, error=PermissionError(13, "denied"))
    for given in (None, newest(run)):
        with pytest.raises(errors.StorageError, match=r"cannot be read, and none is good: checkpoint_.*denied"):
            Job(outage, checkpoint=given).alone()
    assert choice_of(run)[0].info.step == newest_step(run), "nothing was lost"


def test_a_note_that_cannot_be_written_is_only_said(run):
    flip_byte(newest(run) / STATE)
    faulty = FaultyStore(run, fail_from=1, matching=f"*{DAMAGED}*", error=PermissionError(13, "denied"))
    choice, lines = choice_of(faulty)
    assert choice.info.step == 2 and said(lines, "could not change the note", "denied") == 1


def test_steps_lost_count_from_the_newest_that_was_passed_over(run):
    for folder in folders(run):
        flip_byte(run / folder / STATE)
    story = Job(run, steps=0).alone()
    assert story.plan.source == "fresh"
    (note,) = (note for note in story.plan.notes if "lost" in note)
    assert note.endswith(": 5 steps lost") and all(folder in note for folder in folders(run))


# Halves of two checkpoints


@pytest.mark.parametrize("half", ["weights", "trainer.dcp", "ranks", rank_file(2), STATE])
def test_halves_of_two_steps_never_load_together_whatever_the_digests_say(run, tmp_path, half):
    older, newer = (run / name for name in folders(run))
    if (older / half).is_file():
        shutil.copy(older / half, newer / half)
    else:
        shutil.rmtree(newer / half)
        shutil.copytree(older / half, newer / half)
    files = {entry["path"]: entry for entry in json.loads((newer / MARKER).read_bytes())["files"]}
    files |= {e["path"]: e for e in json.loads((older / MARKER).read_bytes())["files"] if e["path"].startswith(half)}
    change_marker(newer, files=list(files.values()))

    (problem,) = verify_checkpoint(newer)
    assert problem.kind == "identity" and problem.file.startswith(half)
    assert (problem.expected, problem.found) == (open_checkpoint(newer).id, open_checkpoint(older).id)
    assert verify_checkpoint(newer, deep=False) == [] and newest_step(run) == 2
    assert [choice.info.step for choice, _ in run_ranks(1, lambda rank: [choice_of(run)])[0]] == [2]
    assert json.loads((newer / DAMAGED).read_text())["kind"] == "identity"
    with pytest.raises(errors.CorruptCheckpoint, match="identity") as caught:
        Job(tmp_path / "new", steps=0, checkpoint=newer).alone()
    assert caught.value.kind == "identity" and caught.value.file == problem.file


# Late visibility


def test_a_rank_that_sees_the_folder_late_waits_for_it(run, monkeypatch):
    patient(monkeypatch, 5.0)
    late = run.parent / "late"
    late.mkdir()

    def look(rank):
        store = FaultyStore(late, late=0.0 if rank == 0 else 0.5)
        dist.barrier()
        if rank == 0:
            shutil.copytree(newest(run), late / newest(run).name)
        dist.barrier()
        choice, _ = choice_of(store)
        return choice.info.step

    assert run_ranks(2, look) == [5, 5]


def test_a_rank_that_never_sees_a_folder_or_a_file_is_called_blind_and_not_the_checkpoint_damaged(run, monkeypatch):
    patient(monkeypatch, 0.2)
    for hidden in (MARKER, weights_file(1, 2)):

        def look(rank, hidden=hidden):
            gone = FileNotFoundError(2, "not there")
            blind = FaultyStore(run, fail_from=1, kinds={"read"}, matching=f"*{hidden}", error=gone)
            choice_of(blind if rank else run)

        outcomes = try_ranks(2, look)
        assert [outcome.kind for outcome in outcomes] == ["StorageError"] * 2
        assert all("ranks [1] cannot open" in outcome.error for outcome in outcomes)
        assert not (newest(run) / DAMAGED).exists()


class Lagging(LocalStore):
    """Its listings do not show the newest files yet."""

    def files(self):
        return {name: size for name, size in super().files().items() if not name.startswith("ranks/")}


def test_files_that_a_listing_lacks_are_asked_for_by_name(run):
    store = Lagging(pafs.LocalFileSystem(), str(run))
    assert choice_of(store)[0].info.step == 5 == find_checkpoint(store).step
    (newest(run) / rank_file(1)).unlink()
    assert choice_of(store)[0].info.step == 2
    assert [problem.kind for problem in verify_checkpoint(store.child(newest(run).name))] == ["missing"]
    assert steps_kept(run) == [2, 5]
