"""Which checkpoint is found, what is passed over and said, and what a wrong one named by the user does."""

import itertools
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from pimm_ray import SavePolicy, errors, find_checkpoint, open_checkpoint, resuming, verify_checkpoint
from pimm_ray.checkpoint.store import LocalStore
from tests.elastic_jobs import Job, change_marker, copy_as, flip_byte, folders, listening, newest_step, said, steps_kept
from tests.ranks import die, try_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one rank with a complete checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("trained")
    Job(folder, steps=5).alone()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def only(run):
    (name,) = folders(run)
    return run / name


def everything(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name != ".lease")


class Lives(LocalStore):
    """As the folder of a run that makes a newer checkpoint, and then deletes the older, whenever it has been listed."""

    def folders(self):
        names = super().folders()
        copy_as(only(Path(self.path)), f"checkpoint_{10 + Lives.listed:08}-0001-aaaa")
        shutil.rmtree(Path(self.path, *names))
        Lives.listed += 1
        return names if Lives.listed < 3 else super().folders()


@pytest.mark.parametrize("verified", [True, False])
def test_a_run_that_deletes_while_one_looks_is_listed_again(run, monkeypatch, verified):
    monkeypatch.setattr(Lives, "listed", 0, raising=False)
    found = find_checkpoint(Lives(LocalFileSystem(), str(run)), verified=verified)
    assert found.name == "checkpoint_00000012-0001-aaaa"


def test_a_half_written_newest_is_passed_over_with_one_line_each_and_nothing_is_deleted(run):
    good = only(run)
    no_marker = copy_as(good, "checkpoint_00000010-0001-aaaa")
    (no_marker / ".complete").unlink()
    staged = copy_as(good, "checkpoint_00000015-0001-bbbb")
    (staged / ".complete").rename(staged / ".complete.12ab34cd.tmp")
    (run / "checkpoint_00000020-0001-cccc").mkdir()
    (run / "checkpoint_00000025-0001-dddd").write_text("a plain file")
    torn = copy_as(good, "checkpoint_00000030-0001-eeee")
    (torn / ".complete").write_bytes((torn / ".complete").read_bytes()[:-20])
    short = copy_as(good, "checkpoint_00000035-0001-ffff")
    (short / "state.json").write_bytes((short / "state.json").read_bytes()[:-1])
    before = everything(run)
    for find in (lambda: find_checkpoint(run), lambda: find_checkpoint(run, verified=False)):
        with listening() as lines:
            assert find().step == 5
        for step in (10, 15, 20, 30, 35):
            assert said(lines, f"passed over {run}/checkpoint_{step:08}") == 1
        assert len(lines) == 5
    story = Job(run, steps=0).alone()
    assert story.plan.step == 5 and story.plan.source == good.name
    assert said(story.lines, "passed over") == 5
    notes = [f"{folder.name}/.damaged" for folder in (torn, short)]
    assert everything(run) == sorted([*before, *notes])


def test_newest_goes_by_number_and_other_names_are_ignored(run):
    good = only(run)
    for name in ("checkpoint_900-0001-aaaa", "checkpoint_1000-0001-bbbb", "checkpoint_0900000-0001-cccc"):
        copy_as(good, name)
    big = "checkpoint_2000000-0001"
    odd = (big, f"{big}-abcd.tmp", f"x{big}-abcd", f"{big}-ABCD", f"{big}-abcde", "checkpoint_2000000")
    for name in ("1000-old", "best", "1000.tmp", *odd):
        shutil.copytree(good, run / name)
    with listening() as lines:
        assert newest_step(run) == 900_000
    assert lines == []
    shutil.rmtree(run / "checkpoint_0900000-0001-cccc")
    assert newest_step(run) == 1000
    copy_as(good, "checkpoint_00000006-0002-dddd")
    assert newest_step(run) == 6, "a later attempt is newer than any step of an earlier one"
    copy_as(good, "checkpoint_00000001-10000-eeee")
    assert newest_step(run) == 1


def test_of_several_saves_at_one_step_the_last_is_the_newest(tmp_path):
    def save_again(manager, done):
        for _ in range(6):
            last.append(manager.save().name)

    last = []
    Job(tmp_path, steps=2, save=False, on_step=save_again).alone()
    assert find_checkpoint(tmp_path).name == last[-1]
    assert Job(tmp_path, steps=0).alone().plan.source == last[-1]
    assert last == sorted(last) and folders(tmp_path) == last[-3:]


def test_a_moved_run_folder_works_and_nothing_points_back(run, tmp_path):
    name = only(run).name
    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    shutil.move(run, moved)
    assert find_checkpoint(moved).path == str(moved / name)
    assert Job(moved, steps=1).alone().plan.step == 5
    assert steps_kept(moved) == [5, 6] and not run.exists()


def test_an_empty_or_absent_run_folder_holds_nothing(tmp_path):
    with listening() as lines:
        assert find_checkpoint(tmp_path) is None
        assert find_checkpoint(tmp_path / "absent") is None
    assert lines == [] and not (tmp_path / "absent").exists()


def test_a_run_with_nothing_usable_starts_fresh_and_says_so(run):
    flip_byte(only(run) / "state.json")
    story = Job(run, steps=2).alone()
    assert (story.plan.source, story.plan.step) == ("fresh", 0)
    assert said(story.lines, "passed over") == said(story.lines, "found nothing usable") == 1
    assert steps_kept(run) == [5, 2] and newest_step(run) == 2


def test_checkpoints_open_verify_and_are_found_without_a_process_group(run):
    assert not dist.is_initialized()
    path = only(run)
    for source in (path, str(path), f"file://{path}", open_checkpoint(path)):
        info = open_checkpoint(source)
        assert (info.step, info.epoch, info.attempt, info.world_size, info.name) == (5, 0, 1, 1, path.name)
        assert (
            info.bytes
            == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            - (path / ".complete").stat().st_size
        )
        assert verify_checkpoint(source) == []
    assert find_checkpoint(run) == find_checkpoint(str(run)) == find_checkpoint(f"file://{run}")


def test_a_path_inside_another_filesystem_may_begin_with_a_slash(run):
    node = SubTreeFileSystem(str(run.parent), LocalFileSystem())
    for path in ("run", "/run", "/run/"):
        folder = SimpleNamespace(filesystem=node, path=path)
        assert find_checkpoint(folder).step == 5
        assert verify_checkpoint(SimpleNamespace(filesystem=node, path=f"{path}/{only(run).name}")) == []


def test_verifying_names_the_file_and_what_was_expected_and_found(run):
    path = only(run)
    weights = path / "weights/model.safetensors"
    size = weights.stat().st_size

    flip_byte(weights, size // 2)
    (problem,) = verify_checkpoint(path)
    assert (problem.file, problem.kind) == ("weights/model.safetensors", "digest")
    assert problem.expected != problem.found and len(problem.expected) == len(problem.found) == 16
    assert verify_checkpoint(path, deep=False) == []
    flip_byte(weights, size // 2)
    assert verify_checkpoint(path) == []

    with weights.open("ab") as file:
        file.write(b"x")
    (path / "ranks/00000.safetensors").unlink()
    rank, longer = sorted(verify_checkpoint(path, deep=False), key=lambda problem: problem.file)
    assert (longer.file, longer.kind, longer.expected, longer.found) == (
        "weights/model.safetensors", "size", size, size + 1,
    )  # fmt: skip
    assert (rank.file, rank.kind, rank.found) == ("ranks/00000.safetensors", "missing", None)
    for problem in (rank, longer):
        for part in (problem.file, problem.kind, problem.expected):
            assert str(part) in str(problem)

    (path / ".complete").unlink()
    (problem,) = verify_checkpoint(path)
    assert (problem.file, problem.kind) == (".complete", "incomplete") and "never finished" in str(problem)
    (problem,) = verify_checkpoint(run / "absent")
    assert (problem.file, problem.kind) == (".complete", "incomplete") and "no such folder" in str(problem)


def test_files_of_two_checkpoints_are_not_taken_for_one(run, tmp_path):
    Job(tmp_path / "other", steps=5).alone()
    path, other = only(run), only(tmp_path / "other")
    document = (path / ".complete").read_text()
    shutil.copytree(other, path, dirs_exist_ok=True)
    (path / ".complete").write_text(document)
    assert verify_checkpoint(path)
    wanted = open_checkpoint(path).id
    shutil.copy(other / ".complete", path)
    change_marker(path, id=wanted)
    (problem,) = verify_checkpoint(path)
    assert (problem.file, problem.kind) == ("state.json", "identity")
    assert (problem.expected, problem.found) == (open_checkpoint(path).id, open_checkpoint(other).id)


# A checkpoint that the user names


@pytest.mark.parametrize("where", ["run/typo", "nowhere/checkpoint_00000005-0001-aaaa"])
def test_a_named_checkpoint_that_does_not_exist_is_an_error(run, tmp_path, where):
    with pytest.raises(errors.CheckpointNotFound, match="no such folder") as caught:
        Job(tmp_path / "new", checkpoint=tmp_path / where).alone()
    assert isinstance(caught.value, FileNotFoundError) and where in str(caught.value)
    assert everything(tmp_path / "new") == []


def test_a_named_folder_without_a_marker_is_an_error(run, tmp_path):
    (only(run) / ".complete").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"\.complete"):
        Job(tmp_path / "new", checkpoint=only(run)).alone()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"\.complete"):
        open_checkpoint(only(run))


def test_a_run_folder_named_in_place_of_a_checkpoint_is_explained(run, tmp_path):
    with pytest.raises(errors.IncompleteCheckpoint, match=f"run folder.* such as {only(run).name}"):
        Job(tmp_path / "new", checkpoint=run).alone()


def test_the_run_s_own_newest_beats_the_named_one_with_one_line(run, tmp_path):
    own = tmp_path / "own"
    fresh = Job(own, steps=2, checkpoint=only(run)).alone()
    assert (fresh.plan.step, fresh.plan.source) == (5, str(only(run))) and fresh.plan.cursor == "kept"
    again = Job(own, steps=1, checkpoint=only(run)).alone()
    assert (again.plan.step, again.plan.source) == (7, folders(own)[0])
    assert said(again.lines, f"{only(run)} is not used: this run has one of its own") == 1
    assert said(fresh.lines, "is not used") == 0
    unreadable = Job(own, steps=0, checkpoint=tmp_path / "typo").alone()
    assert unreadable.plan.step == 8
    assert steps_kept(run) == [5], "the checkpoint it started from is untouched"


@pytest.mark.parametrize("file", ["state.json", "ranks/00000.safetensors"])
def test_a_damaged_named_checkpoint_is_an_error_on_all_ranks(run, tmp_path, file):
    flip_byte(only(run) / file)

    def resume(rank):
        with pytest.raises(errors.CorruptCheckpoint) as caught:
            Job(tmp_path / "new", checkpoint=only(run))(rank)
        error = caught.value
        return str(error).partition("the checkpoint")[2], error.file, error.expected, error.found

    outcomes = try_ranks(2, resume)
    first, second = (outcome.value for outcome in outcomes)
    assert first == second and file in first[0]
    assert first[1] == file and first[2] != first[3] and len(first[2]) == 16


def test_a_named_checkpoint_serves_a_run_whose_own_ones_are_all_damaged(run, tmp_path):
    own = tmp_path / "own"
    Job(own, steps=1).alone()
    flip_byte(only(own) / "state.json")
    story = Job(own, steps=1, checkpoint=only(run)).alone()
    assert story.plan.step == 5 and said(story.lines, "passed over", "state.json: digest") == 1
    assert newest_step(own) == 6 and folders(own)[-1].startswith("checkpoint_00000006-0002")


def test_storage_that_not_all_ranks_share_is_an_error_and_not_a_fresh_start(run, tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "VISIBLE_WITHIN", 0.2)

    def resume(rank):
        node = SubTreeFileSystem(str([run.parent, tmp_path / "another disk"][rank]), LocalFileSystem())
        Job(SimpleNamespace(filesystem=node, path="run"))(rank)

    outcomes = try_ranks(2, resume)
    assert [outcome.kind for outcome in outcomes] == ["StorageError"] * 2
    assert all("rank 1 cannot write" in outcome.error and "shared" in outcome.error for outcome in outcomes)


# A step back


@pytest.mark.parametrize("victim", ["state.json", "ranks/00001.safetensors", "trainer.dcp/shard-*", "weights/model-*"])
def test_a_damaged_newest_is_passed_over_by_all_ranks_and_never_comes_back(tmp_path, victim):
    for steps in (2, 2):
        Job(tmp_path, steps=steps).on(2)
    file = max((tmp_path / folders(tmp_path)[-1]).glob(victim))
    flip_byte(file)
    back = Job(tmp_path, steps=1).on(2)
    assert [story.plan.step for story in back] == [2, 2]
    assert back[0].restored["state"] == back[1].restored["state"]
    lines = [line for story in back for line in story.lines]
    assert said(lines, "passed over checkpoint_00000004-0002", file.name, "digest") == said(lines, "passed over") == 1
    assert said(lines, "nothing usable") == 0
    assert steps_kept(tmp_path) == [2, 4, 3]
    assert newest_step(tmp_path) == 3
    flip_byte(file)  # it can be read again
    assert newest_step(tmp_path) == 3
    further = Job(tmp_path, steps=1).on(2)
    assert [story.plan.step for story in further] == [3, 3]
    assert newest_step(tmp_path) == 4 and folders(tmp_path)[-1].startswith("checkpoint_00000004-0004")


@pytest.mark.parametrize(
    "key, damaged", [("id", "0" * 32), ("step", 9), ("attempt", 1), ("epoch", 7), ("world_size", 3)]
)
def test_a_marker_that_says_what_its_files_do_not_is_passed_over(tmp_path, key, damaged):
    for steps in (2, 2):
        Job(tmp_path, steps=steps).on(2)
    newest = tmp_path / folders(tmp_path)[-1]
    change_marker(newest, **{key: damaged})
    assert [problem.kind for problem in verify_checkpoint(newest)] == ["identity"]
    assert newest_step(tmp_path) == 2
    back = Job(tmp_path, steps=1).on(3)
    assert [story.plan.step for story in back] == [2, 2, 2]
    lines = [line for story in back for line in story.lines]
    assert said(lines, "passed over checkpoint_00000004-0002", "identity") == 1


# Killed in a save


def die_soon(milliseconds):
    timer = threading.Timer(milliseconds / 1000, die)
    timer.daemon = True
    timer.start()


@pytest.mark.parametrize("world, kills", [(1, 20), (2, 8)])
def test_killed_at_a_random_moment_of_a_save_the_latest_is_complete_and_loads(tmp_path, world, kills):
    chance = random.Random(world)
    moments = [chance.uniform(0, 60) for _ in range(kills)]
    Job(tmp_path, steps=1).on(world)
    newest = open_checkpoint(tmp_path / folders(tmp_path)[-1])
    left_behind = 0
    for victim, moment in zip(itertools.cycle(range(world)), moments, strict=False):

        def doomed(rank, victim=victim, moment=moment):
            def start_the_clock(manager, done):
                if done == 1 and rank == victim:
                    die_soon(moment)

            options = {"save": SavePolicy(every_steps=1, timeout_seconds=5)}
            Job(tmp_path, epochs=500, on_step=start_the_clock, options=options)(rank)

        outcomes = try_ranks(world, doomed)
        assert outcomes.pop(victim).killed
        assert all(outcome.kind in ("RankMissing", "RuntimeError") for outcome in outcomes)
        found = find_checkpoint(tmp_path)
        assert found is not None and found.step >= newest.step
        left_behind += sum(not (tmp_path / name / ".complete").exists() for name in folders(tmp_path))
        newest = found
    assert left_behind, "no kill fell into a save"
    stories = Job(tmp_path, steps=1).on(world)
    assert {story.plan.step for story in stories} == {newest.step}
    assert newest.step > 1
