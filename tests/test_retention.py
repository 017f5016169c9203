"""Which checkpoints stay in a run, in real saves; nothing is counted or deleted that is not ours."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors.torch import save_file
from torch import nn

from pimm_ray import CheckpointManager, KeepPolicy, SavePolicy, find_checkpoint, load_weights, verify_checkpoint
from pimm_ray.checkpoint.store import LocalStore
from pimm_ray.errors import RunInUse, WeightsError
from tests.elastic_jobs import Job, copy_as, flip_byte, folders, newest_step, said, steps_kept
from tests.ranks import die, run_ranks, try_ranks


def every_step(keep, n=1, **more):
    return {"save": SavePolicy(every_steps=n, at_end=False), "keep": keep, **more}


def by_epoch(scores):
    """Saves each step with the score that `scores` has for it; None: without any."""

    def save(manager, done):
        score = scores.get(manager.state.global_step, math.inf)
        manager.save(metrics={} if score is None else {"score": score})

    return save


def age(root, *, reverse=False):
    """Give folders and files equal times, or times against their age."""
    for i, name in enumerate(folders(root)):
        for path in [root / name, *(root / name).rglob("*")]:
            os.utime(path, (1e9 - i * 1000 * reverse,) * 2)


@pytest.mark.parametrize("reverse", [False, True], ids=["equal times", "reversed times"])
def test_the_last_two_stay_whatever_the_clock_of_the_files_says(tmp_path, reverse):
    def confuse(manager, done):
        age(tmp_path, reverse=reverse)

    Job(tmp_path, epochs=3, samples=10, options=every_step(KeepPolicy(last=2), 5), on_step=confuse).alone()
    assert steps_kept(tmp_path) == [10, 15]
    age(tmp_path, reverse=reverse)
    assert newest_step(tmp_path) == 15
    Job(tmp_path, epochs=4, samples=10, options=every_step(KeepPolicy(last=2), 5)).alone()
    assert steps_kept(tmp_path) == [15, 20]


def test_the_default_keeps_three(tmp_path):
    Job(tmp_path, steps=6, options={"save": SavePolicy(every_steps=1)}).alone()
    assert len(folders(tmp_path)) == 3


@pytest.mark.parametrize("mode, best", [("min", 3), ("max", 2)])
def test_the_best_by_a_metric_and_the_latest_both_stay_and_resume_takes_the_latest(tmp_path, mode, best):
    scores = by_epoch({1: math.nan, 2: 0.9, 3: 0.5, 4: None, 5: 0.7, 6: math.nan})
    options = every_step(KeepPolicy(last=1, best=1, metric="score", mode=mode), 100)
    job = Job(tmp_path, options=options, on_step=scores)
    story = job.but(steps=6, save=False).alone()
    assert steps_kept(tmp_path) == [best, 6]
    assert story.state.best_metric_value == {"min": 0.5, "max": 0.9}[mode]
    assert said(story.lines, "ranks last among the best: its score is nan") == 2
    assert said(story.lines, "ranks last among the best: its score is missing") == 1
    assert find_checkpoint(tmp_path).step == 6
    again = job.but(steps=1, save=False).alone()
    assert again.plan.step == 6 and again.restored["state"].best_metric_value == story.state.best_metric_value
    assert steps_kept(tmp_path) == ([7] if mode == "max" else [best, 7]), "inf is the best score for max"


def test_scores_of_earlier_attempts_still_count(tmp_path):
    options = every_step(KeepPolicy(last=1, best=2, metric="score"), 100)
    for steps, scores in ((2, {1: 3.0, 2: 1.0}), (2, {3: 2.0, 4: 5.0}), (2, {5: 4.0, 6: 6.0})):
        Job(tmp_path, steps=steps, save=False, options=options, on_step=by_epoch(scores)).alone()
    assert steps_kept(tmp_path) == [2, 3, 6]


def test_scores_are_averaged_over_ranks_before_they_are_compared(tmp_path):
    def program(rank):
        def save(manager, done):
            manager.save(metrics={"score": [[1.0, 9.0], [4.0, 4.0], [8.0, 8.0]][done - 1][rank]})

        options = every_step(KeepPolicy(last=1, best=1, metric="score"), 100)
        return Job(tmp_path, steps=3, save=False, options=options, on_step=save)(rank).state.best_metric_value

    assert run_ranks(2, program) == [4.0, 4.0]
    assert steps_kept(tmp_path) == [2, 3]


def test_every_nth_stays_for_good(tmp_path):
    Job(tmp_path, options=every_step(KeepPolicy(last=1, every_steps=6), 2)).alone()
    assert steps_kept(tmp_path) == [6, 12, 18, 20]


def test_earlier_attempts_count_by_age_and_not_by_step(tmp_path):
    Job(tmp_path, steps=5).alone()
    copy_as(tmp_path / folders(tmp_path)[0], "checkpoint_00001000-0001-abcd")
    flip_byte(tmp_path / "checkpoint_00001000-0001-abcd/state.json")  # this is why the run went back to step 5
    options = every_step(KeepPolicy(last=2), 5)
    story = Job(tmp_path, options=options).alone()
    assert story.plan.step == 5
    assert folders(tmp_path)[0] == "checkpoint_00001000-0001-abcd", "damaged, and left where it is"
    assert steps_kept(tmp_path) == [1000, 15, 20]
    again = Job(tmp_path, epochs=2, steps=5, save=False, options=options)
    again.alone()
    assert steps_kept(tmp_path) == [1000, 20, 25], "the note in it holds in later attempts, which never look that far"
    (tmp_path / "checkpoint_00001000-0001-abcd/.damaged").unlink()
    again.alone()
    assert steps_kept(tmp_path) == [25, 30], "without its note it is an old checkpoint like others"


def test_foreign_folders_and_files_are_neither_counted_nor_deleted(tmp_path):
    Job(tmp_path, steps=1).alone()
    first = tmp_path / folders(tmp_path)[0]
    foreign = ["best", "journal", "kept", "checkpoint_000007", "checkpoint-500", "checkpoint_00000900-0009", "1000.tmp"]
    for name in foreign:
        shutil.copytree(first, tmp_path / name)
    (tmp_path / "checkpoint_00009999-0009-abcd").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    Job(tmp_path, options=every_step(KeepPolicy(last=2), 5)).alone()
    assert steps_kept(tmp_path) == [15, 20]
    left = {path.name for path in tmp_path.iterdir()} - set(folders(tmp_path))
    assert left == {*foreign, "checkpoint_00009999-0009-abcd", "notes.txt"}
    assert all(verify_checkpoint(tmp_path / name) == [] for name in foreign)


@pytest.mark.parametrize("step", [0, 9])
def test_a_checkpoint_of_another_release_is_left_alone(tmp_path, step):
    Job(tmp_path, steps=1).alone()
    other = copy_as(tmp_path / folders(tmp_path)[0], f"checkpoint_{step:08}-0001-abcd")
    document = json.loads((other / ".complete").read_text())
    (other / ".complete").write_text(json.dumps({**document, "version": 99}))
    story = Job(tmp_path, options=every_step(KeepPolicy(last=1))).alone()
    assert story.plan.step == 1 and said(story.lines, "passed over", "version 99") == (step == 9)
    assert steps_kept(tmp_path) == [step, 20]


def test_leftovers_of_killed_saves_go_once_a_newer_complete_one_exists(tmp_path):
    Job(tmp_path, steps=2).alone()
    good = tmp_path / folders(tmp_path)[0]
    older, newer, empty = (f"checkpoint_0000000{step}-0001-abcd" for step in (1, 4, 6))
    for name in (older, newer):
        (copy_as(good, name) / ".complete").unlink()
    (tmp_path / empty).mkdir()
    seen = []
    job = Job(tmp_path, options=every_step(KeepPolicy(last=3)), on_step=lambda *_: seen.append(set(folders(tmp_path))))
    assert job.but(steps=0).alone().plan.step == 2
    assert {older, newer, empty} < set(folders(tmp_path)), "resume deletes nothing"
    job.but(steps=2).alone()
    assert len(seen[0]) == 2 and not seen[0] & {older, newer, empty}


def test_an_unfinished_save_of_a_run_that_took_over_is_left_to_it(tmp_path):
    taken_over = tmp_path / "checkpoint_00000003-0002-abcd"

    def another_run_starts(manager, done):
        taken_over.mkdir(exist_ok=True)

    with pytest.raises(RunInUse, match=f"another job took over .*{taken_over.name}"):
        Job(tmp_path, options=every_step(KeepPolicy(last=1)), on_step=another_run_starts).alone()
    assert taken_over.exists() and len(folders(tmp_path)) == 2


def test_a_checkpoint_that_another_run_puts_there_meanwhile_is_neither_counted_nor_deleted_and_is_said(tmp_path):
    Job(tmp_path / "other", steps=1).alone()
    (other,) = folders(tmp_path / "other")
    run = tmp_path / "run"
    run.mkdir()

    def interfere(manager, done):
        if done == 7:
            shutil.copytree(tmp_path / "other" / other, run / other)
            copy_as(run / other, "checkpoint_00001000-0001-abcd")
        age(run, reverse=True)

    story = Job(run, epochs=3, samples=10, options=every_step(KeepPolicy(last=2), 5), on_step=interfere).alone()
    assert steps_kept(run) == [1, 10, 15, 1000]
    for name in (other, "checkpoint_00001000-0001-abcd"):
        assert said(story.lines, name, "another job writes into this run folder") == 1


def test_damaged_checkpoints_stay_where_they_are_during_the_run_that_passed_them_over(tmp_path):
    Job(tmp_path, steps=4, save=False, options=every_step(KeepPolicy(last=9), 2)).alone()
    damaged = tmp_path / folders(tmp_path)[-1]
    flip_byte(damaged / "ranks/00000.safetensors")
    story = Job(tmp_path, options=every_step(KeepPolicy(last=1))).alone()
    assert story.plan.step == 2 and damaged.exists()
    assert steps_kept(tmp_path) == [4, 20]
    assert verify_checkpoint(damaged)[0].kind == "digest"


def test_killed_in_the_middle_of_a_deletion_what_is_left_is_no_checkpoint_and_goes_later(tmp_path):
    Job(tmp_path, steps=1).alone()
    (old,) = folders(tmp_path)

    def doomed(rank):
        whole = LocalStore.remove

        def remove(store):
            if not store.path.endswith(old):
                return whole(store)
            (tmp_path / old / "state.json").unlink()
            die()

        LocalStore.remove = remove
        Job(tmp_path, steps=1, options={"keep": KeepPolicy(last=1)})(rank)

    assert try_ranks(1, doomed, group=False)[0].killed
    assert steps_kept(tmp_path) == [1, 2] and newest_step(tmp_path) == 2
    assert (tmp_path / old / "weights/model.safetensors").exists() and not (tmp_path / old / ".complete").exists()
    Job(tmp_path, steps=1, options={"keep": KeepPolicy(last=3)}).alone()
    assert steps_kept(tmp_path) == [2, 3]


# Killed between file operations

OPERATIONS = ("make", "write", "publish", "delete_file", "remove")


def count_down(patch, operations):
    """Die at the operation of this number: before it, counted over all kinds; also between marker's bytes and name."""
    left = [operations]

    def counted(owner, name):
        original = getattr(owner, name)

        def operation(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                die()
            return original(*args, **kwargs)

        patch.setattr(owner, name, operation)

    for name in OPERATIONS:
        counted(LocalStore, name)
    counted(os, "replace")
    return left


def test_killed_before_any_file_operation_of_a_save_one_complete_checkpoint_is_left(tmp_path):
    Job(tmp_path / "base", steps=1).alone()

    def doomed(rank, root, operations):
        with pytest.MonkeyPatch.context() as patch:
            left = count_down(patch, operations)
            Job(root, steps=1, options={"keep": KeepPolicy(last=1)})(rank)
            return operations - left[0]

    (whole,) = run_ranks(1, doomed, shutil.copytree(tmp_path / "base", tmp_path / "whole"), 10**6, group=False)
    assert whole >= 9 and steps_kept(tmp_path / "whole") == [2]
    found = []
    for operations in range(whole):
        root = shutil.copytree(tmp_path / "base", tmp_path / str(operations))
        (outcome,) = try_ranks(1, doomed, root, operations, group=False)
        assert outcome.killed
        found.append(newest_step(root))
        Job(root, steps=1, options={"keep": KeepPolicy(last=1)}).alone()
        assert len(folders(root)) == 1 and newest_step(root) == found[-1] + 1, "what was left does not stand in the way"
    assert found == sorted(found) and set(found) == {1, 2}, "first the old one, from the marker on the new one"


def test_a_checkpoint_that_is_only_linked_into_the_run_is_resumed_from_and_never_deleted(tmp_path):
    run, archive = tmp_path / "run", tmp_path / "archive"
    Job(archive, steps=1, options=every_step(KeepPolicy(last=1))).alone()
    (name,) = folders(archive)
    run.mkdir()
    (run / name).symlink_to(archive / name)
    again = Job(run, steps=1, options=every_step(KeepPolicy(last=1))).alone()
    assert again.plan.source == name
    assert steps_kept(run) == [2]
    assert verify_checkpoint(archive / name) == []


# The weights of the best, apart


def made_of(step: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
    return model


def scored(rank: int, folder: Path, scores: list[float], first: int = 1) -> None:
    """A save a step with that score, of weights that are all the step's number."""
    model = made_of(0)
    manager = CheckpointManager(
        model=model, storage=folder, keep=KeepPolicy(last=1, metric="score", mode="max", export_best=True)
    )
    manager.resume()
    for step, score in enumerate(scores, start=first):
        model.load_state_dict(made_of(step).state_dict())
        manager.step()
        manager.save(metrics={"score": score})


def best_step(folder: Path) -> int:
    """Of the only weights left in `best`, loaded as the stock library loads them."""
    (left,) = (folder / "best").iterdir()
    model = made_of(0)
    load_torch_model(model, left)
    step = int(model[0].bias[0])
    assert left.name.startswith(f"step_{step:08}-")
    assert all(map(torch.equal, model.state_dict().values(), made_of(step).state_dict().values()))
    return step


@pytest.mark.parametrize("world", [1, 2])
def test_the_weights_of_the_best_save_outlive_its_checkpoint(tmp_path, world):
    run_ranks(world, scored, tmp_path, [1.0, 3.0, 2.0, math.nan])
    assert steps_kept(tmp_path) == [4] and best_step(tmp_path) == 2
    assert load_weights(made_of(0), tmp_path / "best", strict=True).share == 1
    run_ranks(world, scored, tmp_path, [2.5], 5)
    assert best_step(tmp_path) == 2, "a later attempt knows the score to beat"
    run_ranks(world, scored, tmp_path, [7.0], 6)
    assert steps_kept(tmp_path) == [6] and best_step(tmp_path) == 6


def test_the_best_shares_its_bytes_with_the_checkpoint(tmp_path):
    scored(0, tmp_path, [1.0])
    (exported,), (kept,) = tmp_path.glob("best/*/model.safetensors"), tmp_path.glob("*/weights/model.safetensors")
    assert os.path.samefile(exported, kept)


def test_a_best_that_cannot_be_left_costs_no_save(tmp_path, caplog):
    (tmp_path / "best").write_text("in the way")
    scored(0, tmp_path, [1.0, 2.0])
    assert steps_kept(tmp_path) == [2]
    assert sum("could not leave the weights of" in line for line in caplog.messages) == 2


def test_parts_without_their_index_are_no_weights(tmp_path):
    save_file({"0.bias": torch.zeros(3)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightsError, match=r"it holds model-00001-of-00002\.safetensors"):
        load_weights(made_of(0), tmp_path)
