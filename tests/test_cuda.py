"""What only a GPU can show; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pimm_ray import CheckpointManager, ElasticLoader
from pimm_ray.elastic import rng

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def test_the_cuda_stream_goes_on_where_it_was_captured():
    torch.cuda.manual_seed(3)
    torch.rand(2, device="cuda")
    state = rng.capture()
    draws = torch.rand(5, device="cuda")
    rng.restore(state)
    assert torch.equal(torch.rand(5, device="cuda"), draws)


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}], ids=["plain", "fused", "capturable"])
def test_a_resumed_optimizer_on_the_gpu_steps_as_its_twin(tmp_path, settings):
    def job():
        torch.manual_seed(0)
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
        manager = CheckpointManager(model=model, optimizer=optimizer, storage=tmp_path)
        manager.resume()
        return model, optimizer, manager

    def train(model, optimizer, steps):
        for _ in range(steps):
            model(torch.rand(3, 4, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, manager = job()
    train(model, optimizer, 3)
    manager.save()
    train(model, optimizer, 2)
    resumed, its_optimizer, _ = job()
    train(resumed, its_optimizer, 2)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_batches_are_moved_to_the_gpu_and_counted_when_handed_over():
    loader = ElasticLoader(Numbers(), 8, num_workers=2, pin_memory=True, device="cuda")
    loader.commits_by_itself = False
    for number, batch in enumerate(loader, start=1):
        assert batch.is_cuda
        assert loader.position == (0, 8 * (number - 1))
        loader.commit()
    assert loader.position == (1, 0)


def test_the_ranks_agree_on_gloo_beside_nccl(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).cuda())
        manager = CheckpointManager(model=model, storage=tmp_path / "run")
        manager.resume()
        assert manager.save().world_size == 1
    finally:
        dist.destroy_process_group()
