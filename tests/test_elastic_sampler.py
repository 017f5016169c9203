"""A torchdata StatefulDataLoader over ElasticLoader's batch_sampler: its batches, the global position."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from pimm_ray import CheckpointManager, ElasticLoader, SavePolicy, errors
from tests.ranks import die, run_ranks, try_ranks

SAMPLES = 53


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


def steps(rank, storage, workers, stop=None):
    """Samples of this rank by step, and the next draw of the global stream."""
    torch.manual_seed(7 + rank)
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    elastic = ElasticLoader(Numbers(), 8, micro_batch_size=3, tail="even")
    loader = StatefulDataLoader(elastic.dataset, batch_sampler=elastic.batch_sampler, num_workers=workers)
    manager = CheckpointManager(
        model=model, loader=loader, storage=storage, save=SavePolicy(every_steps=2, timeout_seconds=20)
    )
    plan = manager.resume()
    seen: dict[int, list[int]] = {}
    for _ in manager.epochs(2):
        for batch in manager.batches():
            seen.setdefault(manager.state.global_step, []).extend(batch.tolist()[: elastic.real])
            torch.rand(1)
            if elastic.step_done:
                manager.step()
                if manager.state.global_step == stop:
                    die()
    manager.finish()
    assert manager.state.samples_seen == 2 * SAMPLES
    assert dist.get_world_size() == elastic.world_size
    return seen, plan.cursor, torch.rand(3)


def by_step(outcomes):
    joined: dict[int, list[int]] = {}
    for seen, _, _ in outcomes:
        for step, samples in seen.items():
            joined.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in joined.items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_its_position_is_kept_on_another_number_of_ranks(tmp_path, workers):
    whole = by_step(run_ranks(2, steps, tmp_path / "whole", workers))
    try_ranks(2, steps, tmp_path / "broken", workers, 3)
    try_ranks(1, steps, tmp_path / "broken", 0, 5)
    outcomes = run_ranks(3, steps, tmp_path / "broken", workers)
    assert {cursor for _, cursor, _ in outcomes} == {"kept"}
    rest = by_step(outcomes)
    assert min(rest) == 4 and rest == {step: whole[step] for step in rest}


def test_on_the_same_ranks_it_goes_on_as_its_twin_with_the_twins_random_stream(tmp_path):
    whole = run_ranks(2, steps, tmp_path / "whole", 0)
    try_ranks(2, steps, tmp_path / "broken", 0, 5)
    outcomes = run_ranks(2, steps, tmp_path / "broken", 0)
    for (seen, _, draws), (twin_seen, _, twin_draws) in zip(outcomes, whole, strict=True):
        assert seen == {step: twin_seen[step] for step in seen}
        assert torch.equal(draws, twin_draws)


def test_a_step_in_the_middle_of_a_window_is_refused(tmp_path):
    elastic = ElasticLoader(Numbers(), 8, micro_batch_size=3)
    manager = CheckpointManager(model=torch.nn.Linear(1, 1), loader=elastic, storage=tmp_path)
    manager.resume()
    next(iter(manager.batches()))
    with pytest.raises(errors.PimmRayError, match="in the middle of a window"):
        manager.step()
    assert manager.state.global_step == 0
