"""What TorchTrainer decides in the driver, before Ray is started."""

import asyncio
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import ray
import ray.train
from ray.train import Checkpoint, CheckpointConfig, Result, RunConfig, ScalingConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager as RayManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from torch import nn

from pimm_ray import CheckpointManager, KeepPolicy, TorchTrainer, open_checkpoint
from pimm_ray.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    PimmRayError,
    RunInUse,
    StorageError,
)
from pimm_ray.runtime import ray_private

SNAPSHOT = "checkpoint_manager_snapshot.json"


def loop(config):
    pass


def checkpoints(folder, *scores):
    """A run folder with one complete checkpoint for each score, at steps 1, 2, ...; their paths, oldest first."""
    keep = KeepPolicy(last=len(scores) + 10)
    manager = CheckpointManager(model=nn.Linear(2, 1), keep=keep, storage=folder)
    manager.resume()
    paths = []
    for score in scores:
        manager.step(score=score)
        paths.append(Path(manager.save().path))
    return paths


def trainer(folder, *, train_loop=loop, name="run", checkpoint_config=None, **arguments):
    run_config = RunConfig(name=name, storage_path=str(folder), checkpoint_config=checkpoint_config)
    return TorchTrainer(train_loop, run_config=run_config, **arguments)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "pimm_ray")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("pimm_ray.runtime")]


def test_ray_still_offers_all_private_names_that_are_used():
    assert ray_private.check() == []


def test_a_driver_that_is_refused_leaves_everything_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SNAPSHOT).write_text("torn")
    script = (
        "import sys; from pimm_ray.runtime.base import make_runtime\n"
        "runtime = make_runtime(sys.argv[1], timeout=9); runtime.claim(); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", script, tmp_path / "run"], cwd=root, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        with pytest.raises(RunInUse, match=f"process {other.pid} on "):
            trainer(tmp_path).fit()
        assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert not ray.is_initialized()


def test_a_path_that_does_not_exist_fails_before_any_worker_starts(tmp_path):
    with pytest.raises(CheckpointNotFound, match="no such folder"):
        trainer(tmp_path, resume_from_checkpoint=tmp_path / "nowhere")


def test_a_folder_without_a_marker_fails_before_any_worker_starts(tmp_path):
    [path] = checkpoints(tmp_path / "other", 1.0)
    (path / ".complete").unlink()
    with pytest.raises(IncompleteCheckpoint, match="its save never finished"):
        trainer(tmp_path, resume_from_checkpoint=path)


def test_a_run_folder_in_place_of_a_checkpoint_fails_and_names_its_newest(tmp_path):
    paths = checkpoints(tmp_path / "other", 1.0, 2.0)
    with pytest.raises(IncompleteCheckpoint, match=paths[-1].name):
        trainer(tmp_path, resume_from_checkpoint=str(tmp_path / "other"))


def test_a_checkpoint_with_a_cut_file_fails_before_any_worker_starts(tmp_path):
    [path] = checkpoints(tmp_path / "other", 1.0)
    os.truncate(path / "state.json", 10)
    with pytest.raises(CorruptCheckpoint, match=r"state\.json: size") as caught:
        trainer(tmp_path, resume_from_checkpoint=path)
    assert caught.value.file == "state.json" and caught.value.found == 10


def test_the_hub_is_refused_because_it_holds_weights_only(tmp_path):
    with pytest.raises(PimmRayError, match="the Hub holds weights only"):
        trainer(tmp_path, resume_from_checkpoint="hf://someone/something")


def test_something_that_is_no_checkpoint_at_all_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="not a path, a URI or a"):
        trainer(tmp_path, resume_from_checkpoint=3)


def test_local_mode_refuses_a_checkpoint_instead_of_losing_it(tmp_path):
    [path] = checkpoints(tmp_path / "other", 1.0)
    with pytest.raises(PimmRayError, match="needs workers"):
        trainer(tmp_path, scaling_config=ScalingConfig(num_workers=0), resume_from_checkpoint=path)


@pytest.mark.parametrize("kind", ["relative path", "relative Checkpoint", "absolute Checkpoint", "URI"])
def test_every_kind_of_source_is_taken_and_reaches_the_workers_independent_of_their_folder(
    tmp_path, monkeypatch, said, kind
):
    [path] = checkpoints(tmp_path / "other", 1.0)
    monkeypatch.chdir(tmp_path)
    source = {
        "relative path": f"other/{path.name}",
        "relative Checkpoint": Checkpoint.from_directory(f"other/{path.name}"),
        "absolute Checkpoint": Checkpoint.from_directory(path),
        "URI": f"file://{path}",
    }[kind]
    given = trainer(tmp_path, resume_from_checkpoint=source).train_loop_per_worker._given
    monkeypatch.chdir("/")
    assert getattr(given, "path", given) in (str(path), f"file://{path}")
    assert said()[-1].startswith(f"start: checkpoint={path} step=1 (resume_from_checkpoint; no checkpoint in ")


def test_the_runs_own_checkpoint_goes_before_the_given_one_and_a_loud_line_says_so(tmp_path, said, caplog):
    own, [given] = checkpoints(tmp_path / "run", 1.0, 2.0), checkpoints(tmp_path / "other", 1.0)
    trainer(tmp_path, resume_from_checkpoint=given)
    assert caplog.records[-1].levelno == logging.WARNING
    assert f"start: checkpoint={own[-1]} (newest of this run, not yet verified) passed_over={given} " in said()[-1]


def test_a_bad_argument_that_is_not_needed_is_a_warning_and_still_goes_to_the_workers(tmp_path, said):
    checkpoints(tmp_path / "run", 1.0)
    made = trainer(tmp_path, resume_from_checkpoint=tmp_path / "nowhere")
    assert "cannot be used (no checkpoint at" in said()[-2] and "passed_over=" in said()[-1]
    assert made.train_loop_per_worker._given == str(tmp_path / "nowhere"), (
        "it must fail there if it is needed after all"
    )


def test_a_fresh_start_is_said_too(tmp_path, said):
    trainer(tmp_path)
    assert said()[-1] == f"start: fresh (no checkpoint in {tmp_path}/run)"


def test_a_run_without_a_name_warns_and_says_what_to_write(tmp_path):
    with pytest.warns(UserWarning, match=r'RunConfig\(name="my-run"') as caught:
        TorchTrainer(loop, run_config=RunConfig(storage_path=str(tmp_path)))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer(tmp_path)


def test_without_a_checkpoint_config_the_newest_three_stay_and_it_is_said(tmp_path, said):
    mine = RunConfig(name="run", storage_path=str(tmp_path))
    made = TorchTrainer(loop, run_config=mine)
    assert made.run_config.checkpoint_config == CheckpointConfig(num_to_keep=KeepPolicy().last)
    assert made.train_run_context.run_config is made.run_config
    assert mine.checkpoint_config == CheckpointConfig(), "the user's own object was changed"
    assert said()[0].startswith("keep: last=3 ")


def test_a_checkpoint_config_of_the_user_holds(tmp_path, said):
    config = CheckpointConfig(num_to_keep=7, checkpoint_score_attribute="loss")
    assert trainer(tmp_path, checkpoint_config=config).run_config.checkpoint_config == config
    assert not any(line.startswith("keep:") for line in said())


def test_a_relative_storage_path_is_relative_to_the_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trainer("runs").run_config.storage_path == str(tmp_path / "runs")


def test_a_storage_that_cannot_be_opened_is_a_clear_error():
    with pytest.raises(StorageError, match="cannot open nonsense://x"):
        trainer("nonsense://x")


def test_metadata_and_restore_keep_rays_own_answer(tmp_path):
    with pytest.raises(DeprecationWarning):
        trainer(tmp_path, metadata={})
    with pytest.raises(DeprecationWarning):
        TorchTrainer.restore(str(tmp_path))


def test_a_loop_with_two_parameters_gets_rays_usual_error_in_the_driver(tmp_path):
    with pytest.raises(ValueError, match="should take in 0 or 1 required arguments, but it accepts 2"):
        trainer(tmp_path, train_loop=lambda config, more: None).fit()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("given", "got"),
    [(lambda: "none", "none"), (lambda config: config["x"], 3), (lambda config=None: config, None)],
)
def test_a_loop_is_called_with_as_many_arguments_as_ray_would_give_it(tmp_path, given, got):
    made = trainer(tmp_path, train_loop=given, train_loop_config={"x": 3})
    assert made._get_train_func()() == got


def test_with_v2_switched_off_the_constructor_says_what_to_do():
    code = "from pimm_ray import TorchTrainer\nTorchTrainer(print)"
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "0", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("pimm_ray.errors.PimmRayError: ") and "switched off here: unset RAY_TRAIN_V2_ENABLED" in last


# Ray's list of checkpoints in the run folder. Its controller's own class writes and reads it here.


def ray_manager(folder, config=None):
    return RayManager(config or CheckpointConfig(), StorageContext(str(folder.parent), folder.name))


def ray_hears_of(folder, paths, config=None):
    """What the controller does with reports of these checkpoints; its list, worst first."""

    async def report():
        manager = ray_manager(folder, config)
        for path in paths:
            metrics = {"score": open_checkpoint(path).metrics["score"]}
            checkpoint = Checkpoint.from_directory(path)
            manager.register_checkpoint(_TrainingReport(checkpoint=checkpoint, metrics=metrics, validation=False))
        return [Path(checkpoint_result.checkpoint.path) for checkpoint_result in manager.best_checkpoint_results]

    return asyncio.run(report())


def mend(folder, config=None):
    """What fit() does before it starts Ray."""
    made = trainer(folder.parent, train_loop=lambda a, b: None, name=folder.name, checkpoint_config=config)
    with pytest.raises(ValueError, match="0 or 1 required arguments"):
        made.fit()
    return [Path(checkpoint.path) for checkpoint, _ in Result.from_path(str(folder)).best_checkpoints]


def asides(folder):
    return list(folder.glob(f"{SNAPSHOT}.aside-*"))


def test_a_good_list_is_left_as_it_is(tmp_path, said):
    paths = checkpoints(tmp_path / "run", 1.0, 2.0)
    ray_hears_of(tmp_path / "run", paths)
    before = (tmp_path / "run" / SNAPSHOT).read_bytes()
    assert mend(tmp_path / "run") == paths
    assert (tmp_path / "run" / SNAPSHOT).read_bytes() == before and not asides(tmp_path / "run")


def torn(folder, paths):
    os.truncate(folder / SNAPSHOT, 40)
    return paths, "it is torn"


def of_another_ray(folder, paths):
    document = json.loads((folder / SNAPSHOT).read_text())
    del document["current_report_index"]
    (folder / SNAPSHOT).write_text(json.dumps({**document, "ray_version": "2.11.0"}))
    return paths, "it was written by Ray 2.11.0, and this Ray"


def naming_a_folder_deleted_by_hand(folder, paths):
    shutil.rmtree(paths[0])
    return paths[1:], f"it names checkpoint folders that are gone: {paths[0].name}"


def inconsistent(folder, paths):
    document = json.loads((folder / SNAPSHOT).read_text())
    document["latest_checkpoint_result"]["checkpoint_dir_name"] = "elsewhere"
    (folder / SNAPSHOT).write_text(json.dumps(document))
    return paths, "Ray refuses it ('elsewhere')"


@pytest.mark.parametrize("damage", [torn, of_another_ray, naming_a_folder_deleted_by_hand, inconsistent])
def test_a_list_that_ray_would_die_of_is_moved_aside_and_written_anew(tmp_path, said, damage):
    folder = tmp_path / "run"
    paths = checkpoints(folder, 1.0, 3.0, 2.0)
    ray_hears_of(folder, paths)
    left, reason = damage(folder, paths)
    bad = (folder / SNAPSHOT).read_bytes()
    with pytest.raises(Exception):  # noqa: B017  this is what the controller would die of
        ray_manager(folder)
    assert mend(folder) == left
    assert [path.read_bytes() for path in asides(folder)] == [bad]
    assert f"could not be used because {reason}" in said()[-1] and asides(folder)[0].name in said()[-1]
    assert ray_manager(folder).latest_checkpoint_result.checkpoint.path == str(left[-1])


def test_after_mending_ray_deletes_in_the_order_that_it_would_have(tmp_path):
    folder, config = tmp_path / "run", CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    paths = checkpoints(folder, 5.0, math.nan, 9.0, 1.0)
    ray_hears_of(folder, paths)
    torn(folder, paths)
    assert mend(folder, config) == [paths[1], paths[3], paths[0], paths[2]]
    [newest] = checkpoints(folder, 7.0)
    assert ray_hears_of(folder, [newest], config) == [newest, paths[2]]
    assert sorted(folder.glob("checkpoint_0*")) == [paths[2], newest]


def test_a_nan_score_in_a_list_that_is_mended_does_not_kill_ray_either(tmp_path):
    folder, config = tmp_path / "run", CheckpointConfig(checkpoint_score_attribute="score")
    paths = checkpoints(folder, 3.0, math.nan, 2.0)
    ray_hears_of(folder, paths, config)
    shutil.rmtree(paths[0])
    assert mend(folder, config) == paths[1:]
    [newest] = checkpoints(folder, 1.0)
    assert ray_hears_of(folder, [newest], config) == [paths[1], newest, paths[2]]


def test_metrics_that_only_ray_knew_survive_the_mending(tmp_path):
    folder = tmp_path / "run"
    paths = checkpoints(folder, 1.0, 2.0)
    ray_hears_of(folder, paths)
    document = json.loads((folder / SNAPSHOT).read_text())
    document["checkpoint_results"][1]["metrics"]["validated"] = 0.5
    (folder / SNAPSHOT).write_text(json.dumps(document))
    shutil.rmtree(paths[0])
    mend(folder)
    assert Result.from_path(str(folder)).best_checkpoints[0][1] == {"score": 2.0, "validated": 0.5}


def test_checkpoints_in_a_format_of_the_users_stay_known_to_ray(tmp_path):
    folder = tmp_path / "run"
    paths = [path.rename(folder / f"mine_{i}") for i, path in enumerate(checkpoints(folder, 1.0, 2.0, 3.0))]
    ray_hears_of(folder, paths)
    shutil.rmtree(paths[0])
    assert mend(folder) == paths[1:]


def test_checkpoints_in_a_folder_without_a_list_are_made_known_to_ray(tmp_path):
    folder = tmp_path / "run"
    paths = checkpoints(folder, 1.0, 2.0)
    (paths[0] / ".complete").unlink()
    assert mend(folder) == paths[1:]
    assert not asides(folder)


def test_a_list_that_this_ray_would_not_take_is_not_written(tmp_path, said, monkeypatch):
    folder = tmp_path / "run"
    paths = checkpoints(folder, 1.0)
    ray_hears_of(folder, paths)
    torn(folder, paths)

    def refuse(*arguments, **more):
        raise RuntimeError("another format")

    monkeypatch.setattr(Result, "from_path", refuse)
    made = trainer(tmp_path, train_loop=lambda a, b: None)
    with pytest.raises(ValueError, match="0 or 1 required arguments"):
        made.fit()
    assert asides(folder) and not (folder / SNAPSHOT).exists()
    assert said()[-1].endswith(asides(folder)[0].name)


def test_a_nan_score_that_ray_stored_as_null_does_not_kill_it_after_a_restart(tmp_path):
    folder, config = tmp_path / "run", CheckpointConfig(checkpoint_score_attribute="score")
    paths = checkpoints(folder, math.nan, 2.0, 1.0)
    ray_hears_of(folder, paths[:2], config)
    with pytest.raises(TypeError):
        ray_hears_of(folder, paths[2:], config)
    mend(folder, config)
    assert ray_hears_of(folder, paths[2:], config) == [paths[0], paths[2], paths[1]]
