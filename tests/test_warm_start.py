"""A run begins with given weights only when there is nothing to resume, and remembers which they were."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from pimm_ray import CheckpointManager, ResumePlan, WarmStart, errors
from tests.ranks import run_ranks, try_ranks


def net(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for entry in model.state_dict().values():
            entry.fill_(value)
    return model


def saved(path: Path, value: float) -> Path:
    torch.save(net(value).state_dict(), path)
    return path


def start(folder: Path, warm_start: WarmStart | None, value: float = 1.0, **settings: Any) -> tuple[Any, ResumePlan]:
    model = net(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = CheckpointManager(model=model, optimizer=optimizer, storage=str(folder / "run"), **settings)
    plan = manager.resume(warm_start=warm_start)
    return (manager, model), plan


def holds(model: nn.Module, value: float) -> bool:
    return all(bool((entry == value).all()) for entry in model.state_dict().values())


def test_a_fresh_run_begins_with_the_weights_and_its_checkpoints_say_whose(tmp_path):
    (manager, model), plan = start(tmp_path, WarmStart(saved(tmp_path / "w.pth", 7)))
    assert holds(model, 7) and plan.step == 0 and "w.pth" in plan.explain()
    info = manager.save()
    document = json.loads((Path(info.path) / "state.json").read_text())
    assert document["warm_start"] == {"source": str(tmp_path / "w.pth"), "commit": None}


def test_a_run_with_a_checkpoint_does_not_even_look_at_them_and_still_says_whose_they_were(tmp_path, caplog):
    (manager, _), _ = start(tmp_path, WarmStart(saved(tmp_path / "w.pth", 7)))
    manager.save()
    manager.finish()
    with caplog.at_level(logging.INFO, "pimm_ray"):
        (manager, model), plan = start(tmp_path, WarmStart("hf://no/such@revision/w.pth"))
    assert holds(model, 7) and plan.source != "fresh"
    assert "warm_start=hf://no/such@revision/w.pth is not used: there is a checkpoint to resume" in caplog.text
    manager.step()
    document = json.loads((Path(manager.save().path) / "state.json").read_text())
    assert document["warm_start"] == {"source": str(tmp_path / "w.pth"), "commit": None}


@pytest.mark.parametrize("unset", [None, WarmStart(None), WarmStart("")])
def test_a_setting_that_is_not_set_loads_nothing(unset, tmp_path):
    (_, model), plan = start(tmp_path, unset)
    assert holds(model, 1) and plan.source == "fresh"


def test_a_value_that_leads_nowhere_is_an_error_and_never_random_weights(tmp_path):
    with pytest.raises(errors.CheckpointNotFound, match=r"no weights at .*nothing\.pth"):
        start(tmp_path, WarmStart(tmp_path / "nothing.pth"))


def test_a_plain_string_is_told_to_be_wrapped(tmp_path):
    with pytest.raises(TypeError, match=r"use WarmStart\('w.pth'\)"):
        start(tmp_path, "w.pth")


def test_the_newest_checkpoint_of_another_run_and_rules_do_too(tmp_path):
    (manager, model), _ = start(tmp_path / "other", None, value=3)
    manager.save()
    manager.finish()
    (_, model), plan = start(tmp_path, WarmStart(tmp_path / "other" / "run", strict=True))
    assert holds(model, 3) and "checkpoint_00000000-0001" in plan.explain()


def test_an_average_of_the_model_begins_with_the_weights_too(tmp_path):
    model = net(1)
    ema = AveragedModel(model)
    manager = CheckpointManager(model=model, ema=ema, storage=str(tmp_path / "run"))
    manager.resume(warm_start=WarmStart(saved(tmp_path / "w.pth", 7)))
    assert holds(ema.module, 7) and int(ema.n_averaged) == 0


def on_ranks(rank: int, folder: Path, name: str) -> bool:
    model = DistributedDataParallel(net(1))
    manager = CheckpointManager(model=model, storage=str(folder / "run"))
    manager.resume(warm_start=WarmStart(folder / name.format(rank=rank)))
    return holds(model, 7)


def test_every_rank_loads_them(tmp_path):
    saved(tmp_path / "w.pth", 7)
    assert run_ranks(2, on_ranks, tmp_path, "w.pth") == [True, True]


def test_what_one_rank_cannot_load_stops_all_with_its_error(tmp_path):
    saved(tmp_path / "w0.pth", 7)
    ends = try_ranks(2, on_ranks, tmp_path, "w{rank}.pth")
    assert [end.kind for end in ends] == ["CheckpointNotFound"] * 2
    assert all("w1.pth" in end.error for end in ends)


def test_a_checkpoint_on_the_hub_is_refused_with_what_to_do_instead(tmp_path):
    manager = CheckpointManager(model=net(1), storage=str(tmp_path / "run"))
    with pytest.raises(errors.StorageError, match=r"the Hugging Face Hub holds weights only.*WarmStart"):
        manager.resume(checkpoint="hf://org/model")
