"""`pimm-ray convert`: from pimm's format to ours and back, so that each side's own loader goes on exactly."""

import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pimm_ray import CheckpointManager, ElasticLoader, cli, errors, find_checkpoint, verify_checkpoint
from pimm_ray.checkpoint.store import LocalStore
from tests.jobs import Numbers, identical
from tests.pimm_fixtures import BATCH, EPOCHS, SAMPLES, Parts, Pimm, go_on_as_pimm_does, save_flat, save_split
from tests.ranks import die, run_ranks, try_ranks
from tests.test_pimm_resume import BOUNDARY, LENGTH, MIDDLE, SAVERS, Ours, resumed, saved

ROOT = Path(__file__).parent.parent


def convert(*words):
    assert cli.main(["convert", *map(str, words)]) == 0


def refused(capsys, *words):
    """The one line on stderr."""
    assert cli.main(["convert", *map(str, words)]) == 1
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "Warning" not in line and not line.startswith(" ")]
    assert not out and line.startswith("pimm-ray: ")
    return line


def ours_job(rank, storage, at, settings):
    """A run of ours that saves after step `at` and goes on: the steps after it."""
    job = Ours(storage, None, **settings)
    seen = []
    for _ in job.manager.epochs(EPOCHS):
        for batch in job.manager.batches():
            step = job.learn(batch)
            job.manager.step()
            if job.manager.state.global_step > at:
                seen.append(step)
            if job.manager.state.global_step == at:
                job.manager.save()
    return seen


def ours(tmp_path, at, world=1, **settings):
    seen = run_ranks(world, ours_job, str(tmp_path / "ours"), at, settings, group=world > 1)
    return find_checkpoint(tmp_path / "ours").path, seen


def held(path):
    """All that a checkpoint of ours holds."""
    adopted = cli._read(cli.open_store(path))
    snapshot = dataclasses.asdict(adopted.snapshot)
    return {"head": adopted.head, "ranks": adopted.ranks, **{k: v for k, v in snapshot.items() if k != "parameters"}}


def exactly(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(exactly(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(exactly, a, b))
    return identical(a, b)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SAVERS)
def test_a_converted_checkpoint_of_pimm_resumes_as_the_original_does(tmp_path, name, world):
    at = LENGTH // world + 2
    path, expected = saved(tmp_path, at, name, world)
    convert(path, tmp_path / "run")
    info = find_checkpoint(tmp_path / "run")
    assert (info.step, info.world_size, info.reason) == (at, world, "convert") and verify_checkpoint(info.path) == []
    for twin, (plan, _, seen) in zip(expected, resumed(tmp_path, info.path, world), strict=True):
        assert plan.cursor == "kept" and seen == twin


@pytest.mark.parametrize("at", [MIDDLE, BOUNDARY])
def test_pimms_own_loader_goes_on_from_what_we_write_bit_for_bit(tmp_path, at):
    path, expected = ours(tmp_path, at)
    convert(path, tmp_path / "exp" / "model" / "last")
    assert go_on_as_pimm_does(tmp_path / "exp" / "model" / "last", Pimm(0, seed=9)) == expected[0]


def pimm_goes_on(rank, path):
    return go_on_as_pimm_does(path, Pimm(0, seed=9))


def test_pimms_own_loader_goes_on_with_two_ranks(tmp_path):
    path, expected = ours(tmp_path, LENGTH // 2 + 2, world=2)
    convert(path, tmp_path / "last")
    assert run_ranks(2, pimm_goes_on, str(tmp_path / "last")) == expected


def test_what_we_write_has_every_key_of_pimms_payload_and_the_files_that_mark_it_complete(tmp_path):
    path, _ = ours(tmp_path, MIDDLE)
    convert(path, tmp_path / "last")
    theirs, _ = saved(tmp_path / "theirs", MIDDLE)
    keys = [
        {k for k in pickle.loads((folder / "trainer.dcp" / ".metadata").read_bytes()).state_dict_metadata}
        for folder in (tmp_path / "last", theirs)
    ]
    assert {key for key in keys[1] - keys[0]} == set()
    assert {key for key in keys[0] - keys[1] if not key.startswith("pimm_ray.")} <= {
        "dataloader.state._pimm_distributed_state", "dataloader.state.world_size", "dataloader.state.states.0.format",
        "dataloader.state.states.0.state", "logger.wandb.entity", "logger.wandb.project", "logger.wandb.next_step",
        "logger.wandb.step_metric",
    }  # fmt: skip
    for folder in (tmp_path / "last", tmp_path / "last" / "trainer.dcp"):
        assert (folder / ".complete").read_text().strip() == "ok"
    assert torch.load(tmp_path / "last" / "weights.pth", weights_only=True).keys() == {"state_dict"}
    assert {file.name for file in tmp_path.iterdir()} == {"ours", "theirs", "last"}


@pytest.mark.parametrize("at", [MIDDLE, BOUNDARY])
@pytest.mark.parametrize("world, workers", [(1, 0), (1, 2), (2, 0)])
def test_a_round_trip_through_pimms_format_is_exact(tmp_path, world, workers, at):
    path, _ = ours(tmp_path, at // world, world, workers=workers)
    convert(path, tmp_path / "last")
    convert(tmp_path / "last", tmp_path / "back")
    before, after = held(path), held(find_checkpoint(tmp_path / "back").path)
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key == "document":
            value, after[key] = ({**part, "versions": None} for part in (value, after[key]))
        assert exactly(value, after[key]), key


def test_the_position_of_our_own_loader_survives_the_round_trip_and_pimm_restarts_the_epoch(tmp_path, capsys):
    parts = Parts()
    loader = ElasticLoader(Numbers(SAMPLES, augment=False), BATCH)

    def manager(storage):
        return CheckpointManager(
            model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, scaler=parts.scaler, loader=loader,
            storage=storage, extra={"note": [1]},
        )  # fmt: skip

    first = manager(tmp_path / "ours")
    first.resume()
    for _ in first.epochs(1):
        for batch in first.batches():
            parts.learn(batch)
            first.step()
            if first.state.global_step == 2:
                path = first.save().path
    convert(path, tmp_path / "last")
    err = capsys.readouterr().err
    assert "extra: left out" in err and "restarts epoch 0" in err
    payload = cli.pimm.read_payload(cli.open_store(tmp_path / "last"))
    assert payload["trainer"]["iter_in_epoch"] == 0 and payload["trainer"]["global_step"] == 2
    assert payload["trainer"]["best_metric_value"] == -float("inf")
    plain = CheckpointManager(
        model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, scaler=parts.scaler, loader=loader,
        storage=tmp_path / "run",
    )  # fmt: skip
    plan = plain.resume(checkpoint=tmp_path / "last")
    assert plan.cursor == "kept" and plan.exact and loader.position == (0, 2 * BATCH)


def test_the_oldest_layout_needs_the_iterations_of_an_epoch_and_the_names_of_what_it_numbers(tmp_path, capsys):
    class OneGroup(Pimm):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=EPOCHS * LENGTH)

    file = tmp_path / "model_last.pth"
    OneGroup(MIDDLE, save_flat(file)).train(2)
    assert "--iterations-per-epoch" in refused(capsys, file, tmp_path / "run")
    convert(file, tmp_path / "run", "--iterations-per-epoch", LENGTH)
    info = find_checkpoint(tmp_path / "run")
    assert (info.step, info.epoch) == (MIDDLE, 1)
    assert "epoch 1 restarts" in capsys.readouterr().err
    document = json.loads((Path(info.path) / "state.json").read_text())
    assert list(document["optimizers"][0]["state"]) == ["0.weight", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert document["loggers"]["wandb"]["run_id"] == "old7" and document["loggers"]["wandb"]["step"] == 41
    parts = OneGroup(0)
    manager = CheckpointManager(
        model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, scaler=parts.scaler,
        loader=parts.loader, storage=tmp_path / "other",
    )  # fmt: skip
    assert manager.resume(checkpoint=info.path).cursor == "dropped" and manager.state.global_step == MIDDLE
    save_flat(file)(two := Pimm(0))
    assert two.optimizer.state == {} and "numbers the parameters" in refused(
        capsys, file, tmp_path / "no", "--iterations-per-epoch", LENGTH
    )


def test_the_run_of_the_tracker_goes_along(tmp_path):
    path, _ = saved(tmp_path, MIDDLE)
    convert(path, tmp_path / "run")
    document = json.loads((Path(find_checkpoint(tmp_path / "run").path) / "state.json").read_text())
    wandb = document["loggers"]["wandb"]
    assert wandb["run_id"] == "abc123" and wandb["name"] == "first" and wandb["job_type"] == "train"
    convert(path, tmp_path / "again", "--to", "pimm")
    assert cli.pimm.read_payload(cli.open_store(tmp_path / "again"))["logger"]["wandb"]["run_id"] == "abc123"


def test_a_schedule_with_numbers_for_keys_keeps_them(tmp_path):
    class Milestones(Pimm):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 9])
            self.scheduler.total_steps = None

    save_split(tmp_path / "last")(job := Milestones(0))
    assert job.iteration == 0
    payload = cli.pimm.read_payload(cli.open_store(tmp_path / "last"))
    adopted = cli.adopt(payload, "x", cli.Present())
    assert json.dumps(adopted.snapshot.document["schedulers"][0]["state"]["milestones"]).count('"v": [[4, 1], [9, 1]]')


def test_nothing_is_overwritten_and_every_error_is_one_line(tmp_path, capsys):
    path, _ = saved(tmp_path, MIDDLE)
    (tmp_path / "there").mkdir()
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    for dest in (tmp_path / "there", path, path / "weights.pth"):
        for to in ("pimm", "pimm_ray"):
            assert "is there already" in refused(capsys, path, dest, "--to", to)
    assert "CheckpointNotFound" in refused(capsys, tmp_path / "nowhere", tmp_path / "x")
    assert "named for step 7" in refused(capsys, path, tmp_path / "checkpoint_00000007-0001-0000")
    (path / ".complete").rename(tmp_path / "marker")
    assert "IncompleteCheckpoint" in refused(capsys, path, tmp_path / "x")
    (tmp_path / "marker").rename(path / ".complete")
    assert before == {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    with pytest.raises(SystemExit, match="2"):
        cli.main(["convert", "x"])
    capsys.readouterr()
    name = tmp_path / f"checkpoint_{MIDDLE:08}-0003-00ff"
    convert(path, name)
    assert capsys.readouterr().out.strip() == str(name) and verify_checkpoint(name) == []


class Plant:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_pickle_is_run_only_where_the_user_says_so(tmp_path, capsys):
    path, _ = saved(tmp_path, MIDDLE)
    sentinel = tmp_path / "sentinel"
    weights = torch.load(path / "weights.pth")
    torch.save({**weights, "more": Plant(sentinel)}, path / "weights.pth")
    said = refused(capsys, path, tmp_path / "run")
    assert "posix.system" in said and "--allow-pickle" in said and not sentinel.exists()
    convert(path, tmp_path / "run", "--allow-pickle")
    assert sentinel.exists()


def test_a_damaged_checkpoint_is_not_converted(tmp_path, capsys):
    path, _ = ours(tmp_path, MIDDLE)
    file = Path(path) / "weights" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "CorruptCheckpoint" in refused(capsys, path, tmp_path / "last")
    assert not (tmp_path / "last").exists()


@pytest.mark.parametrize("to", ["pimm", "pimm_ray"])
def test_what_fails_half_way_leaves_nothing_behind(tmp_path, monkeypatch, capsys, to):
    path, _ = saved(tmp_path, MIDDLE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "publish", full)
    assert "No space left" in refused(capsys, path, tmp_path / "x", "--to", to)
    assert {file.name for file in tmp_path.iterdir()} == {"last"}


def test_the_command_is_there_and_speaks_of_itself():
    words = [sys.executable, "-m", "pimm_ray.cli", "convert", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--allow-pickle" in done.stdout and "SOURCE" in done.stdout


def convert_until(rank, moment, words):
    """Killed just before the call of this number that makes, syncs or renames something."""
    count = itertools.count()

    def counted(call):
        def wrapped(*arguments, **settings):
            if next(count) == moment:
                die()
            return call(*arguments, **settings)

        return wrapped

    for name in ("mkdir", "fsync", "rename", "replace"):
        setattr(os, name, counted(getattr(os, name)))
    convert(*words)


@pytest.mark.parametrize("to", ["pimm", "pimm_ray"])
def test_killed_at_any_moment_it_never_looks_complete(tmp_path, to):
    path, _ = saved(tmp_path, MIDDLE)
    for moment in itertools.count():
        dest = tmp_path / f"cut{moment}"
        (outcome,) = try_ranks(1, convert_until, moment, (path, dest, "--to", to), group=False)
        if not outcome.killed:
            assert outcome.error is None, outcome.error
            break
        if to == "pimm_ray":
            found = find_checkpoint(dest)
            assert found is None or verify_checkpoint(found.path) == []
        elif dest.exists():
            Ours(tmp_path / f"run{moment}", dest)
    assert moment > 5


def test_two_optimizers_have_no_place_in_pimms_format(tmp_path, capsys):
    model = torch.nn.Linear(2, 2)
    manager = CheckpointManager(
        model=model, optimizer=[torch.optim.SGD([p]) for p in model.parameters()], storage=tmp_path / "ours"
    )
    manager.resume()
    manager.save()
    assert "2 optimizers" in refused(capsys, tmp_path / "ours", tmp_path / "last")
    assert issubclass(errors.StateMismatch, errors.PimmRayError) and not (tmp_path / "last").exists()
