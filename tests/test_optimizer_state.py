"""Optimizer state goes by parameter name, bit for bit, and nothing ever runs in the optimizer to get it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from pimm_ray.checkpoint.state import Objects, apply, collect
from pimm_ray.errors import StateMismatch, UnstorableState
from tests.disk import through_disk


class Net(nn.Module):
    def __init__(self, names=("first", "second", "last")):
        super().__init__()
        torch.manual_seed(0)
        weights = {"first": (4, 4), "second": (4, 4), "last": (4, 2)}
        for name in names:
            setattr(self, name, nn.Linear(*weights[name], bias=False))

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int, *, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for i in range(start, start + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).to(dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def flat(state) -> list:
    """Everything in an optimizer's state_dict, tensors as (dtype, values)."""
    if isinstance(state, dict):
        return [(key, flat(value)) for key, value in state.items()]
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return [str(state.dtype), state.tolist()] if isinstance(state, torch.Tensor) else [state]


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "AdamW capturable": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"),
    "Muon": lambda p: optim.Muon(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_optimizer_goes_on_as_if_it_had_never_stopped(tmp_path, kind, steps):
    model, resumed = Net(), Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, steps)
    before = flat(optimizer.state_dict())
    snapshot = through_disk(Objects(model=model, optimizers=[optimizer]), tmp_path / "c", world=3)
    assert flat(optimizer.state_dict()) == before, "collecting changed the optimizer"

    again = OPTIMIZERS[kind](resumed.parameters())
    assert apply(Objects(model=resumed, optimizers=[again]), snapshot) == []
    assert flat(again.state_dict()) == before
    for one, other in ((model, optimizer), (resumed, again)):
        train(one, other, 3, start=steps)
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))
    assert flat(again.state_dict()) == flat(optimizer.state_dict())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_a_fresh_optimizer_replaces_what_a_used_one_has(tmp_path, kind):
    fresh, used = Net(), Net()
    snapshot = through_disk(Objects(model=fresh, optimizers=[OPTIMIZERS[kind](fresh.parameters())]), tmp_path / "c")
    optimizer, twin = (OPTIMIZERS[kind](model.parameters()) for model in (used, fresh))
    train(used, optimizer, 2)
    apply(Objects(model=used, optimizers=[optimizer]), snapshot)
    train(used, optimizer, 2), train(fresh, twin, 2)
    assert all(map(torch.equal, used.parameters(), fresh.parameters()))


def test_no_hook_of_the_optimizer_runs_and_no_gradient_is_touched_by_a_save(tmp_path):
    model = Net()
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    ran = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    collect(Objects(model=model, optimizers=[optimizer]))
    assert ran == [] and len(optimizer.state) == 0
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gradients, strict=True))


def test_float32_moments_of_bfloat16_weights_stay_float32(tmp_path):
    def job():
        model = Net().bfloat16()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, 1)
        for state in optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].float() / 3, state["exp_avg_sq"].float() / 3
        return model, optimizer

    model, optimizer = job()
    snapshot = through_disk(Objects(model=model, optimizers=[optimizer]), tmp_path / "c")
    resumed, again = job()
    for state in again.state.values():
        state["exp_avg"].zero_()
    apply(Objects(model=resumed, optimizers=[again]), snapshot)
    assert {str(state["exp_avg"].dtype) for state in again.state.values()} == {"torch.float32"}
    assert flat(again.state_dict()) == flat(optimizer.state_dict())


def moved(**settings):
    model = Net()
    return model, optim.AdamW(model.parameters(), **settings)


def test_a_learning_rate_that_is_a_tensor_now_stays_that_tensor_and_a_number_stays_a_number(tmp_path):
    def restored(saved, now):
        model, optimizer = moved(lr=saved)
        snapshot = through_disk(Objects(model=model, optimizers=[optimizer]), tmp_path / "c")
        model, optimizer = moved(lr=now)
        apply(Objects(model=model, optimizers=[optimizer]), snapshot)
        return optimizer.param_groups[0]["lr"]

    live = torch.tensor(0.5)
    assert restored(0.25, live) is live and live.item() == 0.25
    assert restored(torch.tensor(0.125), live) is live and live.item() == 0.125
    assert restored(torch.tensor(0.25), 0.5) == 0.25
    assert type(restored(torch.tensor(0.25), 0.5)) is float


def test_how_the_present_optimizer_computes_holds_over_what_was_saved(tmp_path):
    model, optimizer = moved(foreach=True)
    snapshot = through_disk(Objects(model=model, optimizers=[optimizer]), tmp_path / "c")
    model, optimizer = moved(fused=True)
    assert apply(Objects(model=model, optimizers=[optimizer]), snapshot) == []
    group = optimizer.param_groups[0]
    assert (group["foreach"], group["fused"]) == (None, True)
    train(model, optimizer, 1)


def test_a_setting_that_differs_now_is_said_and_the_saved_one_holds(tmp_path):
    model, optimizer = moved(lr=0.1, weight_decay=0.3)
    snapshot = through_disk(Objects(model=model, optimizers=[optimizer]), tmp_path / "c")
    model, optimizer = moved(lr=0.2, weight_decay=0.4)
    notes = apply(Objects(model=model, optimizers=[optimizer]), snapshot)
    assert notes == [
        "optimizer.0 group 0: the saved lr=0.1 holds, not lr=0.2",
        "optimizer.0 group 0: the saved weight_decay=0.3 holds, not weight_decay=0.4",
    ]
    assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_a_learning_rate_that_a_schedule_moves_is_not_called_different(tmp_path):
    def job():
        model, optimizer = moved(lr=0.1)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return Objects(model=model, optimizers=[optimizer], schedulers=[schedule])

    saved, now = job(), job()
    train(saved.model, saved.optimizers[0], 1)
    saved.schedulers[0].step()
    assert apply(now, through_disk(saved, tmp_path / "c")) == []
    assert now.optimizers[0].param_groups[0]["lr"] == 0.05


def grouped(*groups, order=("first", "second", "last"), **more) -> Objects:
    """Groups are (names of layers, settings)."""
    model = Net(order)
    made = [{"params": [getattr(model, name).weight for name in names], **own} for names, own in groups]
    return Objects(model=model, optimizers=[optim.SGD(made, lr=0.1, **{"momentum": 0.9, **more})])


def momenta(objects: Objects) -> dict[str, list]:
    state = objects.optimizers[0].state
    return {
        name: state[parameter]["momentum_buffer"].tolist()
        for name, parameter in objects.model.named_parameters()
        if parameter in state
    }


def rates(optimizer: optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def lrs(objects: Objects) -> list[float]:
    return rates(objects.optimizers[0])


def test_an_empty_group_in_the_middle_keeps_its_own_settings(tmp_path):
    def job(lr):
        groups = (["first"], {"lr": lr}), ([], {"lr": 2 * lr}), (["second", "last"], {"lr": 3 * lr})
        return grouped(*groups)

    saved, now = job(0.125), job(0.5)
    train(saved.model, saved.optimizers[0], 2)
    apply(now, through_disk(saved, tmp_path / "c"))
    assert lrs(now) == [0.125, 0.25, 0.375] and momenta(now) == momenta(saved)
    for objects in (saved, now):
        train(objects.model, objects.optimizers[0], 1, start=2)
    assert all(map(torch.equal, now.model.parameters(), saved.model.parameters()))


def test_momenta_follow_names_when_layers_of_one_shape_are_declared_and_grouped_in_another_order(tmp_path):
    saved = grouped((["first"], {"lr": 0.125}), (["second", "last"], {"lr": 0.25}))
    train(saved.model, saved.optimizers[0], 2)
    now = grouped((["last", "second"], {}), (["first"], {}), order=("second", "last", "first"))
    apply(now, through_disk(saved, tmp_path / "c"))
    assert lrs(now) == [0.25, 0.125]
    assert momenta(now) == momenta(saved)
    assert momenta(saved)["first.weight"] != momenta(saved)["second.weight"]


def test_a_parameter_frozen_in_between_keeps_its_moments(tmp_path):
    saved = grouped((["first", "second", "last"], {}))
    train(saved.model, saved.optimizers[0], 1)
    saved.model.second.weight.requires_grad_(False)
    saved.model.second.weight.grad = None
    kept = momenta(saved)["second.weight"]
    train(saved.model, saved.optimizers[0], 1)
    now = grouped((["first", "second", "last"], {}))
    assert apply(now, through_disk(saved, tmp_path / "c")) == []
    assert momenta(now)["second.weight"] == kept and momenta(now) == momenta(saved)
    train(now.model, now.optimizers[0], 1)


def test_a_parameter_that_joins_the_optimizer_starts_fresh_and_one_that_leaves_it_is_said(tmp_path):
    few, all_of_them = grouped((["first", "last"], {})), grouped((["first", "second", "last"], {}))
    train(few.model, few.optimizers[0], 1), train(all_of_them.model, all_of_them.optimizers[0], 1)

    now = grouped((["first", "second", "last"], {}))
    notes = apply(now, through_disk(few, tmp_path / "c"))
    assert notes == ["optimizer.0: no saved state for second.weight: starts fresh"]
    assert momenta(now) == momenta(few)
    train(now.model, now.optimizers[0], 1)

    now = grouped((["first", "last"], {}))
    notes = apply(now, through_disk(all_of_them, tmp_path / "d"))
    assert notes == ["optimizer.0: saved state of second.weight is not used: not optimized now"]
    assert momenta(now).keys() == {"first.weight", "last.weight"}


def test_a_parameter_that_leaves_an_optimizer_without_state_is_said_too(tmp_path):
    saved, now = (grouped(*[([name], {}) for name in names], momentum=0) for names in (("first", "last"), ("first",)))
    train(saved.model, saved.optimizers[0], 1)
    notes = apply(now, through_disk(saved, tmp_path / "c"))
    assert notes == ["optimizer.0: saved state of last.weight is not used: not optimized now"]


def test_one_more_group_than_saved_starts_fresh_with_its_own_settings(tmp_path):
    saved = grouped((["first"], {"lr": 0.125}), (["second"], {"lr": 0.25}))
    train(saved.model, saved.optimizers[0], 1)
    now = grouped((["first"], {}), (["last"], {"lr": 0.75}), (["second"], {}))
    notes = apply(now, through_disk(saved, tmp_path / "c"))
    assert "optimizer.0: no saved state for last.weight: starts fresh" in notes
    assert lrs(now) == [0.125, 0.75, 0.25] and momenta(now) == momenta(saved)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=1),
                lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
            ],
            milestones=[2],
        ),
        lambda optimizer: lr_scheduler.CyclicLR(
            optimizer, rates(optimizer), [2 * lr for lr in rates(optimizer)], step_size_up=4, cycle_momentum=False
        ),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_schedule_goes_on_with_each_group_s_own_rates_when_groups_are_reordered_or_added(tmp_path, schedule, fresh):
    saved = grouped((["first"], {"lr": 0.125}), (["second"], {"lr": 0.25}))
    now = grouped((["second"], {"lr": 0.25}), *[(["last"], {"lr": 0.5})][:fresh], (["first"], {"lr": 0.125}))
    for objects in (saved, now):
        objects.schedulers.append(schedule(objects.optimizers[0]))

    def go_on(objects):
        objects.optimizers[0].step()
        objects.schedulers[0].step()

    train(saved.model, saved.optimizers[0], 1)
    go_on(saved)
    apply(now, through_disk(saved, tmp_path / "c"))
    for _ in range(4):
        go_on(saved), go_on(now)
        first, second = lrs(saved)
        assert [lrs(now)[0], lrs(now)[-1]] == pytest.approx([second, first])
        assert not fresh or lrs(now)[1] == pytest.approx(4 * first)
    assert now.schedulers[0].get_last_lr() == lrs(now)


def test_two_saved_groups_in_one_is_an_error_and_nothing_has_changed(tmp_path):
    saved = grouped((["first"], {"lr": 0.125}), (["second", "last"], {"lr": 0.25}))
    train(saved.model, saved.optimizers[0], 1)
    snapshot = through_disk(saved, tmp_path / "c")
    now = grouped((["first", "second", "last"], {}))
    before = copy.deepcopy(now.model.state_dict())
    with pytest.raises(StateMismatch, match=r"optimizer\.0: group 0 holds parameters of 2 saved groups \(0, 1\)"):
        apply(now, snapshot)
    assert all(torch.equal(before[name], value) for name, value in now.model.state_dict().items())
    assert momenta(now) == {} and lrs(now) == [0.1]


def test_a_parameter_that_is_not_in_the_model_is_named_at_the_save_and_at_the_resume(tmp_path):
    objects = grouped((["first", "second", "last"], {}))
    snapshot = through_disk(objects, tmp_path / "c")
    objects.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(3, 7))]})
    told = r"optimizer\.0\.group\.1: parameter 0 \(shape \(3, 7\)\) is not in `model`"
    with pytest.raises(UnstorableState, match=told) as caught:
        collect(objects)
    assert caught.value.key == "optimizer.0.group.1"
    before = copy.deepcopy(objects.model.state_dict())
    with torch.no_grad():
        for parameter in objects.model.parameters():
            parameter.add_(1)
    with pytest.raises(UnstorableState, match=told):
        apply(objects, snapshot)
    assert not any(torch.equal(before[name], value) for name, value in objects.model.state_dict().items())


def test_a_state_that_needs_pickle_is_named_by_parameter_and_leaf():
    objects = grouped((["first", "second", "last"], {}))
    objects.optimizers[0].state[objects.model.second.weight]["hook"] = print
    with pytest.raises(UnstorableState) as caught:
        collect(objects)
    assert caught.value.key == "optimizer.0.second.weight.hook"
    objects.optimizers[0].state.clear()
    objects.optimizers[0].param_groups[0]["decide"] = print
    with pytest.raises(UnstorableState) as caught:
        collect(objects)
    assert caught.value.key == "optimizer.0.group.0.decide"


def test_two_optimizers_and_named_parameters_each_get_their_own_state_back(tmp_path):
    def job():
        model = Net()
        named = list(model.named_parameters())
        return Objects(model=model, optimizers=[optim.Adam(named[:1]), optim.SGD(named[1:], lr=0.1, momentum=0.5)])

    saved, now = job(), job()
    for optimizer in saved.optimizers:
        train(saved.model, optimizer, 2)
    snapshot = through_disk(saved, tmp_path / "c")
    assert {key.split(".")[1] for key in snapshot.trainer} == {"0", "1"}
    assert apply(now, snapshot) == []
    for old, new in zip(saved.optimizers, now.optimizers, strict=True):
        assert flat(new.state_dict()) == flat(old.state_dict())


class Global(optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def test_state_of_the_optimizer_that_belongs_to_no_parameter_is_restored(tmp_path):
    model, again = Net(), Net()
    optimizer, fresh = Global(model.parameters(), lr=0.1, momentum=0.9), Global(again.parameters(), lr=0.1)
    train(model, optimizer, 3)
    apply(
        Objects(model=again, optimizers=[fresh]),
        through_disk(Objects(model=model, optimizers=[optimizer]), tmp_path / "c"),
    )
    assert fresh.state["calls"] == 3
