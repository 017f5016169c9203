"""TorchTrainer takes a checkpoint of pimm, and says before any worker starts when it cannot be used."""

import pytest
from ray.train import RunConfig, ScalingConfig

from pimm_ray import TorchTrainer, errors
from tests.pimm_fixtures import Pimm, save_split


def trainer(tmp_path, given):
    return TorchTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="x", storage_path=str(tmp_path / "runs")),
        resume_from_checkpoint=given,
    )


def test_the_trainer_takes_a_checkpoint_of_pimm_or_its_run(tmp_path, caplog):
    last = tmp_path / "exp" / "model" / "last"
    Pimm(2, save_split(last)).train(1)
    for given in (last, tmp_path / "exp"):
        assert trainer(tmp_path, given).train_loop_per_worker._given == str(given)
        assert f"start: checkpoint={last} of pimm (resume_from_checkpoint; no checkpoint in " in caplog.text
        caplog.clear()


def test_one_that_never_finished_is_refused_before_any_worker_starts(tmp_path):
    last = tmp_path / "last"
    Pimm(2, save_split(last)).train(1)
    (last / ".complete").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"last holds no \.complete"):
        trainer(tmp_path, last)
