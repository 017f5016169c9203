"""What must come back beside weights and data: schedules, scaler, averages, extras, bests, seeds, the end."""

import json
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pimm_ray import CheckpointManager, KeepPolicy, errors, find_checkpoint
from tests.jobs import Break, Job, assert_continues, attempt, broken, identical, twin
from tests.ranks import run_ranks


def two_groups(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.01}], momentum=0.9)


def warm_up_and_cosine(optimizer):
    def factor(step):
        return (step + 1) / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 35))

    return lr_scheduler.LambdaLR(optimizer, factor)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=40)


def multi_step(optimizer):
    return lr_scheduler.MultiStepLR(optimizer, [2, 8, 21, 30], gamma=0.5)


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[8])


def on_plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1, cooldown=1)


@pytest.mark.parametrize("schedule", [warm_up_and_cosine, one_cycle, multi_step, sequential, on_plateau])
def test_the_learning_rates_of_40_steps_are_those_of_a_run_without_breaks(tmp_path, schedule):
    """B17: breaks after steps 1, 7 and 20."""
    job = Job(samples=40, epochs=4, optimizer=two_groups, schedule=schedule)
    records = broken(tmp_path, job, *(Break(at, save=True) for at in (1, 7, 20)))
    assert_continues(twin(job), records, at=20)
    rates = [step.lr for step in twin(job)[0].steps]
    assert len(rates) == 40 and len(set(rates)) >= 5, "the schedule does something"


class Parts:
    """A small job in this process: model, optimizer and whatever a test adds, restored from `folder`."""

    def __init__(self, folder, *, seed=0, average=False, **others):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if average else None
        others = {"ema": self.average, "storage": folder, **others}
        self.manager = CheckpointManager(model=self.model, optimizer=self.optimizer, **others)
        self.plan = self.manager.resume()

    def backward(self, factor=1.0, scaler=None):
        loss = self.model(torch.randn(5, 3)).square().mean() * factor
        (scaler.scale(loss) if scaler else loss).backward()


def test_a_checkpoint_without_the_schedulers_state_is_an_error(tmp_path):
    Parts(tmp_path).manager.save()
    scheduler = lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1)
    with pytest.raises(errors.StateMismatch, match=r"not in the checkpoint: scheduler\.0 \(StepLR\)"):
        Parts(tmp_path, scheduler=scheduler)


def scaled_steps(parts, scaler, steps):
    """(scale, growth counter) after each step; the first two overflow, so that the scaler skips them."""
    seen = []
    for _ in steps:
        parts.backward(math.inf if parts.manager.state.global_step < 2 else 1.0, scaler)
        scaler.step(parts.optimizer)
        scaler.update()
        parts.optimizer.zero_grad()
        parts.manager.step()
        state = scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"]))
    return seen


def scaler(**others):
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 4, **others})


def test_the_gradient_scaler_goes_on_with_its_scale_and_its_count(tmp_path):
    """B37: two overflows and seven good steps before the save."""
    whole = Parts(tmp_path / "twin", scaler=(one := scaler()))
    expected = scaled_steps(whole, one, range(16))
    first = Parts(tmp_path / "run", scaler=(one := scaler()))
    assert scaled_steps(first, one, range(9)) == expected[:9]
    first.manager.save()
    second = Parts(tmp_path / "run", seed=7, scaler=(one := scaler(init_scale=4.0)))
    assert scaled_steps(second, one, range(9, 16)) == expected[9:]
    assert expected[8][1] not in (0, expected[0][1]) and len({scale for scale, _ in expected}) > 3
    assert identical(dict(second.model.state_dict()), dict(whole.model.state_dict()))


@pytest.mark.parametrize("off", [None, "disabled"])
def test_with_a_scaler_on_one_side_only_it_starts_fresh_and_the_line_says_so(tmp_path, off):
    """B37: from fp32 to fp16 and back."""

    def without():
        return scaler(enabled=False) if off else None

    Parts(tmp_path / "fp32", scaler=without()).manager.save()
    now = scaler()
    plan = Parts(tmp_path / "fp32", scaler=now).plan
    assert now.get_scale() == 1024.0 and "the scaler starts fresh" in plan.explain()

    used = Parts(tmp_path / "fp16", scaler=(one := scaler()))
    scaled_steps(used, one, range(3))
    used.manager.save()
    plan = Parts(tmp_path / "fp16", scaler=without()).plan
    assert "gradient scaler state is not used" in plan.explain()


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_averaged_weights_and_extras_go_on_as_the_twins(tmp_path):
    def steps(folder, seed, *, total, save_at=None):
        counter, history, limits = Counter(), [], {"best": math.inf, "seen": ()}
        extra = {"counter": counter, "history": history, "limits": limits}
        parts = Parts(folder, seed=seed, average=True, extra=extra)
        while parts.manager.state.global_step < total:
            parts.backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            parts.average.update_parameters(parts.model)
            norm = sum(p.norm().item() for p in parts.model.parameters())
            counter.count += 1
            history.append(norm)
            limits.update(best=min(limits["best"], norm), seen=(*limits["seen"], counter.count))
            parts.manager.step()
            if parts.manager.state.global_step == save_at:
                parts.manager.save()
        return dict(parts.model.state_dict()), dict(parts.average.state_dict()), counter.count, history, limits

    expected = steps(tmp_path / "twin", 1, total=7)
    steps(tmp_path / "run", 1, total=5, save_at=4)
    found = steps(tmp_path / "run", 2, total=7)
    assert identical(found, expected)
    assert found[1]["n_averaged"].item() == 7 and found[2] == 7 and len(found[3]) == 7


def test_a_finished_run_does_no_step_more_and_goes_on_when_more_epochs_are_asked(tmp_path):
    def again(job, seed):
        return run_ranks(1, attempt, str(tmp_path), job, 100, None, seed, group=False)

    short, long = Job(samples=20, epochs=2, evaluate=True), Job(samples=20, epochs=3, evaluate=True)
    again(short, 1)
    folders = sorted(path.name for path in tmp_path.iterdir())
    (record,) = again(short, 2)
    assert record.steps == [] and record.state.global_step == 10 and record.state.epoch == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == folders
    assert_continues(twin(long), again(long, 3), at=10)


@pytest.mark.parametrize(("mode", "best"), [("max", 0.9), ("min", 0.2)])
def test_the_best_metric_value_so_far_is_restored(tmp_path, mode, best):
    keep = KeepPolicy(metric="score", mode=mode, best=1)
    parts = Parts(tmp_path, keep=keep)
    for score in (0.5, best, math.nan, 0.4):
        parts.manager.step()
        parts.manager.save(metrics={"score": score})
    again = Parts(tmp_path, keep=keep)
    assert again.manager.state.best_metric_value == best
    again.manager.step()
    again.manager.save(metrics={"score": 0.45})
    assert again.manager.state.best_metric_value == best
    assert Parts(tmp_path, keep=keep).manager.state.best_metric_value == best


def seeded(rank, folder, seed):
    manager = CheckpointManager(model=nn.Linear(1, 1), storage=folder, seed=seed)
    plan = manager.resume()
    manager.save()
    return manager._job.seed, plan.explain()


def test_no_seed_means_one_that_is_drawn_once_for_all_ranks_and_kept(tmp_path):
    (drawn, _), (other, _) = run_ranks(2, seeded, str(tmp_path), None)
    assert drawn == other
    assert {seed for seed, _ in run_ranks(2, seeded, str(tmp_path), None)} == {drawn}
    newest = find_checkpoint(tmp_path)
    assert newest.attempt == 2 and json.loads((tmp_path / newest.name / "state.json").read_text())["seed"] == drawn
    [(elsewhere, _)] = run_ranks(1, seeded, str(tmp_path / "elsewhere"), None, group=False)
    assert elsewhere != drawn
    assert f"seed {drawn} of the checkpoint holds, not 5" in run_ranks(2, seeded, str(tmp_path), 5)[0][1]


@pytest.mark.parametrize("wrong", [{"model": [nn.Linear(1, 1)]}, {"optimizer": {"g": None}}])
def test_objects_of_the_wrong_kind_are_named_at_once(tmp_path, wrong):
    with pytest.raises(TypeError, match="give one"):
        CheckpointManager(**{"model": nn.Linear(1, 1), "storage": tmp_path, **wrong})
