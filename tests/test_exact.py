"""Same number of workers: the resumed run is the run that was never interrupted, bit for bit."""

import pytest

from tests.jobs import Break, Job, adamw, assert_continues, broken, twin


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_killed_in_mid_epoch_goes_on_as_its_twin(tmp_path, world, workers):
    job = Job(samples=20 * world, workers=workers)
    records = broken(tmp_path, job, Break(8), every=3, world=world)
    assert_continues(twin(job, world), records, at=6)


@pytest.mark.parametrize("world", [3, 4])
def test_ddp_on_three_or_more_ranks_is_exact_after_a_warm_up(tmp_path, world):
    job = Job(samples=20 * world, warmup=True, epochs=2, optimizer=adamw)
    assert_continues(twin(job, world), broken(tmp_path, job, Break(8), every=3, world=world), at=6)
