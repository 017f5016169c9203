"""What a training job is made of is collected by bare name, stored, and put back whole or not at all."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint.state import Objects, apply, collect
from pimm_ray.elastic import rng, schedule
from pimm_ray.errors import StateMismatch, UnstorableState
from tests.disk import through_disk, write_and_read
from tests.ranks import run_ranks


class Net(nn.Module):
    """With a real submodule called `module`, a block that may be compiled, and one block under two names."""

    def __init__(self, *, compiled: bool = False, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        wrap = torch.compile if compiled else (lambda block: block)
        self.module = nn.Linear(4, 4)
        self.block = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        self.again = self.twice = wrap(nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 2)


BARE = {
    "module.weight", "module.bias", "block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias",
    "block.1.running_mean", "block.1.running_var", "block.1.num_batches_tracked", "again.weight", "head.weight",
    "head.bias",
}  # fmt: skip
FORMS = {
    "plain": Net,
    "ddp": lambda **k: DistributedDataParallel(Net(**k)),
    "compiled": lambda **k: torch.compile(Net(**k)),
    "ddp of compiled": lambda **k: DistributedDataParallel(torch.compile(Net(**k))),
    "compiled of ddp": lambda **k: torch.compile(DistributedDataParallel(Net(**k))),
    "inner block compiled": lambda **k: Net(compiled=True, **k),
    "ddp of inner block compiled": lambda **k: DistributedDataParallel(Net(compiled=True, **k)),
    "data parallel": lambda **k: nn.DataParallel(Net(**k)),
}


def with_moments(form: str, seed: int) -> Objects:
    model = FORMS[form](seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(seed + 100)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return Objects(model=model, optimizers=[optimizer])


def values(objects: Objects) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights and momenta in the model's own order, whatever their names."""
    momenta = [objects.optimizers[0].state[p]["momentum_buffer"] for p in objects.model.parameters()]
    return list(objects.model.state_dict().values()), momenta


def every_form_into_every_form(rank, folder):
    for saved_as in FORMS:
        saved = with_moments(saved_as, seed=1)
        snapshot = through_disk(saved, folder)
        assert set(snapshot.weights) == BARE, saved_as
        moments = {f"optimizer.0.{name}.momentum_buffer" for name, _ in Net().named_parameters()}
        assert set(snapshot.trainer) == moments, saved_as
        assert snapshot.document["model"]["aliases"] == {"twice.weight": "again.weight"}
        for loaded_as in FORMS:
            loaded = with_moments(loaded_as, seed=2)
            assert apply(loaded, snapshot) == []
            for found, expected in zip(values(loaded), values(saved), strict=True):
                assert all(map(torch.equal, found, expected)), f"{saved_as} into {loaded_as}"


def test_each_wrapping_of_a_model_loads_into_each_other_and_the_saved_names_are_bare(tmp_path):
    run_ranks(1, every_form_into_every_form, tmp_path / "checkpoint")


def test_two_entries_that_would_get_one_bare_name_are_an_error():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    model._orig_mod = nn.Linear(1, 1)
    with pytest.raises(UnstorableState, match="one name"):
        collect(Objects(model=model))


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.conv = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)
        self.mix = nn.Parameter(torch.randn(3, 4).t())
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("nothing_either", torch.zeros(0, 3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        hidden = self.embedding(tokens) @ (self.mix @ self.mix.t())
        return self.head(self.conv(hidden[..., None, None])[..., 0, 0]) * self.scale


def test_tied_strided_empty_and_scalar_tensors_are_saved_and_the_tie_survives(tmp_path):
    saved = Tied()
    with torch.no_grad():
        saved.scale.fill_(3.5)
    snapshot = through_disk(Objects(model=saved), tmp_path / "c")
    assert "head.weight" not in snapshot.weights
    assert snapshot.document["model"]["aliases"] == {"head.weight": "embedding.weight"}
    loaded = Tied()
    assert apply(Objects(model=loaded), snapshot) == []
    assert all(map(torch.equal, loaded.state_dict().values(), saved.state_dict().values()))
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.conv.weight.is_contiguous(memory_format=torch.channels_last) and loaded.mix.stride() == (1, 4)
    for model in (saved, loaded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(6)).square().sum().backward()
        optimizer.step()
    assert torch.equal(loaded.head.weight, saved.head.weight)
    assert loaded.head.weight.data_ptr() == loaded.embedding.weight.data_ptr()


def test_a_tied_model_loads_into_an_untied_one_but_not_two_tensors_into_one(tmp_path):
    tied, untied = Tied(), Tied(tied=False)
    apply(Objects(model=untied), through_disk(Objects(model=tied), tmp_path / "c"))
    assert torch.equal(untied.head.weight, tied.embedding.weight)
    with torch.no_grad():
        untied.head.weight.add_(1)
    before = tied.embedding.weight.clone()
    with pytest.raises(StateMismatch, match=r"model\.head\.weight a tensor of its own / tied to another"):
        apply(Objects(model=tied), through_disk(Objects(model=untied), tmp_path / "c"))
    assert torch.equal(tied.embedding.weight, before)


def test_not_a_numbers_in_tied_weights_are_no_mismatch(tmp_path):
    model = Tied()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    apply(Objects(model=Tied()), through_disk(Objects(model=model), tmp_path / "c"))


class Head(nn.Module):
    def __init__(self, classes: int, bins: int = 5):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, classes)
        self.register_buffer("bins", torch.arange(float(bins)))


def untouched_by(objects: Objects, snapshot, **fields) -> StateMismatch:
    """The error of a load that must fail, after which everything is as it was."""
    before = copy.deepcopy(collect(objects))
    with pytest.raises(StateMismatch) as caught:
        apply(objects, snapshot)
    after = collect(objects)
    assert after.document == before.document
    for old, new in ((before.weights, after.weights), (before.trainer, after.trainer)):
        assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)
    for name, expected in fields.items():
        assert getattr(caught.value, name) == expected
        assert all(key in str(caught.value) for key in expected)
    return caught.value


def stepped(model: nn.Module, **more) -> Objects:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Objects(model=model, optimizers=[optimizer], **more)


def test_a_head_and_a_buffer_of_another_shape_are_an_error_at_resume_with_both_shapes_said(tmp_path):
    snapshot = through_disk(stepped(Head(10)), tmp_path / "c")
    untouched_by(
        stepped(Head(3, bins=4)),
        snapshot,
        missing=[],
        shapes={
            "model.head.weight": ("float32[10, 3]", "float32[3, 3]"),
            "model.head.bias": ("float32[10]", "float32[3]"),
            "model.bins": ("float32[5]", "float32[4]"),
        },
    )


def test_another_dtype_is_an_error_and_not_a_silent_cast(tmp_path):
    snapshot = through_disk(stepped(Head(2)), tmp_path / "c")
    error = untouched_by(stepped(Head(2).half()), snapshot)
    assert error.shapes["model.body.weight"] == ("float32[3, 3]", "float16[3, 3]")


def test_entries_that_only_one_side_has_are_errors_that_name_them(tmp_path):
    saved = stepped(Head(2))
    saved.model.register_buffer("old", torch.zeros(1))
    now = stepped(Head(2))
    now.model.register_buffer("new", torch.zeros(1))
    snapshot = through_disk(saved, tmp_path / "c")
    untouched_by(now, snapshot, missing=["model.new"], unexpected=["model.old"])


@pytest.mark.parametrize("kind", ["plain", "average"])
def test_other_optimizers_schedulers_or_averages_than_saved_are_named_before_anything_changes(tmp_path, kind):
    def adam(model):
        optimizer = torch.optim.Adam(model.parameters())
        return {"optimizers": [optimizer], "schedulers": [torch.optim.lr_scheduler.StepLR(optimizer, 2)]}

    ema = AveragedModel(Head(2)) if kind == "average" else None
    model = Head(2)
    snapshot = through_disk(Objects(model=model, ema=ema, **adam(model)), tmp_path / "c")
    unexpected = ["ema"] if ema is not None else []
    untouched_by(Objects(model=model), snapshot, unexpected=["optimizer.0 (Adam)", "scheduler.0 (StepLR)", *unexpected])
    two = adam(model)
    two["optimizers"].append(torch.optim.SGD(model.parameters(), lr=1))
    untouched_by(Objects(model=model, ema=ema, **two), snapshot, missing=["optimizer.1 (SGD)"])
    other = {**adam(model), "optimizers": [torch.optim.SGD(model.parameters(), lr=1)]}
    untouched_by(Objects(model=model, ema=ema, **other), snapshot, shapes={"optimizer.0": ("Adam", "SGD")})
    if ema is None:
        untouched_by(Objects(model=model, ema=AveragedModel(model), **adam(model)), snapshot, missing=["ema"])


class Shadow:
    """Averages kept by hand."""

    def __init__(self, value: float):
        self.decay, self.shadow = value, {"w": torch.full((2,), value)}

    def state_dict(self):
        return {"decay": self.decay, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.decay, self.shadow = state["decay"], state["shadow"]


def test_an_averaged_module_is_restored_by_bare_name_with_its_counter(tmp_path):
    saved = stepped(Head(2))
    average = AveragedModel(saved.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        average.update_parameters(saved.model)
    objects = Objects(model=saved.model, ema=average)
    snapshot = through_disk(objects, tmp_path / "c")
    assert {"ema.n_averaged", "ema.body.weight"} <= snapshot.trainer.keys()
    fresh = Head(2)
    now = Objects(model=fresh, ema=torch.compile(AveragedModel(fresh)))
    apply(now, snapshot)
    assert all(map(torch.equal, now.ema.state_dict().values(), average.state_dict().values()))
    assert int(now.ema.n_averaged) == 3


def test_an_averaged_module_of_another_shape_is_found_before_the_model_is_changed(tmp_path):
    model = Head(2)
    snapshot = through_disk(Objects(model=model, ema=AveragedModel(Head(7))), tmp_path / "c")
    now = Objects(model=Head(2), ema=AveragedModel(Head(2)))
    error = untouched_by(now, snapshot)
    assert error.shapes == {
        "ema.head.weight": ("float32[7, 3]", "float32[2, 3]"),
        "ema.head.bias": ("float32[7]", "float32[2]"),
    }


def test_averages_that_are_no_module_go_through_their_own_state_dict(tmp_path):
    model = Head(2)
    snapshot = through_disk(Objects(model=model, ema=Shadow(0.5)), tmp_path / "c")
    now = Objects(model=model, ema=Shadow(0.0))
    apply(now, snapshot)
    assert now.ema.decay == 0.5 and torch.equal(now.ema.shadow["w"], torch.full((2,), 0.5))


def test_extra_state_is_restored_in_place_with_counters_that_are_plain_numbers(tmp_path):
    model = Head(2)
    saved = {
        "counters": {"seen": 7, 3: "three", "nested": {"best": float("inf")}},
        "history": [1.5, (2, None), torch.arange(3)],
        "ordered": OrderedDict(b=1, a=2),
        "shadow": Shadow(0.25),
    }
    snapshot = through_disk(Objects(model=model, extra=saved), tmp_path / "c")
    now = {"counters": {"seen": 0, "stale": 1}, "history": [9], "ordered": OrderedDict(), "shadow": Shadow(0.0)}
    held = dict(now)
    assert apply(Objects(model=model, extra=now), snapshot) == []
    assert all(now[name] is held[name] for name in held)
    assert now["counters"] == saved["counters"] and list(now["ordered"]) == ["b", "a"]
    assert now["history"][:2] == saved["history"][:2] and torch.equal(now["history"][2], torch.arange(3))
    assert now["shadow"].decay == 0.25


def test_an_extra_wanted_but_not_saved_is_an_error_and_one_saved_but_not_wanted_is_a_note(tmp_path):
    model = Head(2)
    snapshot = through_disk(Objects(model=model, extra={"old": {"a": 1}, "both": []}), tmp_path / "c")
    untouched_by(Objects(model=model, extra={"new": {}, "both": [1]}), snapshot, missing=["extra.new"])
    notes = apply(Objects(model=model, extra={"both": [1]}), snapshot)
    assert notes == ["extra.old of the checkpoint is not used: no such entry in extra= now"]


@pytest.mark.parametrize(("was", "live"), [({"a": 1}, [2]), ([1], {"b": 2})], ids=["dict to list", "list to dict"])
def test_an_extra_of_another_kind_is_an_error_and_not_a_list_of_keys(tmp_path, was, live):
    snapshot = through_disk(Objects(model=Head(2), extra={"x": was}), tmp_path / "c")
    now = copy.deepcopy(live)
    untouched_by(
        Objects(model=Head(2), extra={"x": now}),
        snapshot,
        shapes={"extra.x": (type(was).__name__, type(live).__name__)},
    )
    assert now == live


def scaler(*, used: bool) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
    if used:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for value in (torch.inf, 1.0, 1.0):
            optimizer.zero_grad()
            made.scale(weight * value).sum().backward()
            made.step(optimizer)
            made.update()
    return made


def test_a_scaler_that_was_never_used_takes_over_scale_and_growth(tmp_path):
    model = Head(2)
    saved = scaler(used=True)
    snapshot = through_disk(Objects(model=model, scaler=saved), tmp_path / "c")
    now = scaler(used=False)
    assert apply(Objects(model=model, scaler=now), snapshot) == []
    assert now.state_dict() == saved.state_dict()
    assert now.get_scale() == 2.0**9 and now.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("absent", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "disabled"])
def test_a_scaler_on_one_side_only_starts_fresh_and_is_said(tmp_path, absent):
    model, fresh = Head(2), scaler(used=False)
    without = through_disk(Objects(model=model, scaler=absent), tmp_path / "c")
    notes = apply(Objects(model=model, scaler=fresh), without)
    assert notes == ["the checkpoint has no gradient scaler state: the scaler starts fresh"]
    assert fresh.get_scale() == 2.0**10
    given = through_disk(Objects(model=model, scaler=scaler(used=True)), tmp_path / "d")
    notes = apply(Objects(model=model, scaler=absent), given)
    assert notes == ["the checkpoint's gradient scaler state is not used: there is no enabled scaler now"]
    assert apply(Objects(model=model, scaler=absent), without) == []


class Counting(nn.Module):
    """Keeps more than tensors in its state_dict."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "log": [torch.tensor(self.calls)]}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_the_extra_state_of_modules_is_restored_under_wrappers_too(tmp_path):
    saved = nn.Sequential(Counting(), Counting())
    saved[0].calls, saved[1].calls = 3, 4
    snapshot = through_disk(Objects(model=torch.compile(saved)), tmp_path / "c")
    now = nn.Sequential(Counting(), Counting())
    apply(Objects(model=now), snapshot)
    assert [part.calls for part in now] == [3, 4]
    assert all(map(torch.equal, now.parameters(), saved.parameters()))


@pytest.mark.parametrize("steps", [0, 3])
def test_schedulers_of_every_kind_are_restored_exactly(tmp_path, steps):
    from torch.optim import lr_scheduler as kinds

    def job():
        model = Head(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made = [
            kinds.LambdaLR(optimizer, lambda epoch: 0.9**epoch), kinds.MultiStepLR(optimizer, [1, 1, 4]),
            kinds.CosineAnnealingLR(optimizer, 5), kinds.CosineAnnealingWarmRestarts(optimizer, 2),
            kinds.OneCycleLR(optimizer, 0.5, total_steps=9), kinds.CyclicLR(optimizer, 0.01, 0.2),
            kinds.SequentialLR(optimizer, [kinds.ConstantLR(optimizer), kinds.StepLR(optimizer, 2)], [2]),
            kinds.ChainedScheduler([kinds.LinearLR(optimizer), kinds.PolynomialLR(optimizer)]),
            kinds.ReduceLROnPlateau(optimizer), torch.optim.swa_utils.SWALR(optimizer, 0.05),
        ]  # fmt: skip
        return Objects(model=model, optimizers=[optimizer], schedulers=made)

    def walk(objects, steps):
        for _ in range(steps):
            objects.optimizers[0].step()
            for one in objects.schedulers:
                one.step(*([1.0] if isinstance(one, kinds.ReduceLROnPlateau) else []))
        return [group["lr"] for group in objects.optimizers[0].param_groups]

    saved, now = job(), job()
    walk(saved, steps)
    assert apply(now, through_disk(saved, tmp_path / "c")) == []
    for old, new in zip(saved.schedulers, now.schedulers, strict=True):
        assert new.state_dict() == old.state_dict(), type(new).__name__
    assert walk(now, 2) == walk(saved, 2)


def test_a_schedule_that_is_held_at_its_end_can_still_be_saved(tmp_path):
    saved = stepped(Head(2))
    held = torch.optim.lr_scheduler.CosineAnnealingLR(saved.optimizers[0], 2)
    schedule.hold(held, say=False)
    saved.optimizers[0].step()
    held.step()
    objects = Objects(model=saved.model, optimizers=saved.optimizers, schedulers=[held])
    snapshot = through_disk(objects, tmp_path / "c")
    now = stepped(Head(2))
    fresh = torch.optim.lr_scheduler.CosineAnnealingLR(now.optimizers[0], 2)
    apply(Objects(model=now.model, optimizers=now.optimizers, schedulers=[fresh]), snapshot)
    assert fresh.last_epoch == 1 and fresh.get_last_lr() == held.get_last_lr()


def draws(generator: torch.Generator) -> list:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.normal(), torch.rand(3).tolist(),
        torch.randn(5).tolist(), torch.rand(2, generator=generator).tolist(),
    ]  # fmt: skip


def test_every_random_stream_continues_exactly_and_is_stored_as_plain_numbers_and_byte_tensors(tmp_path):
    model, generator = Head(2), torch.Generator().manual_seed(5)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.normal(), torch.randn(3)  # each keeps a second value for the next call
    own = {"rng": rng.capture({"loader": generator})}
    _, back = write_and_read(Objects(model=model), tmp_path / "c", own=own)
    expected = draws(generator)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    other = torch.Generator().manual_seed(9)
    rng.restore(back["rng"], {"loader": other})
    assert draws(other) == expected

    with safe_open(tmp_path / "c" / layout.rank_file(0), "pt") as file:
        assert set(file.keys()) == {"rank.rng.torch", "rank.rng.generators.loader"}
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.uint8}
        assert file.metadata()[layout.DOCUMENT_KEY].startswith('{"rng": {"python": {"$": "tuple", "v": [3, {"$": ')


def test_nothing_in_a_folder_is_a_pickle_or_a_zip(tmp_path):
    write_and_read(stepped(Head(2), extra={"x": [np.zeros(2), {1, 2}]}), tmp_path / "c", own={"rng": rng.capture()})
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert not any(path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04", b"PK") for path in files)


class Copied(nn.Module):
    """Its state_dict() holds a copy of the weight, not the weight."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner._register_state_dict_hook(self._copy)

    @staticmethod
    def _copy(module, state, prefix, metadata):
        state[prefix + "weight"] = state[prefix + "weight"].clone()


def test_a_module_whose_state_dict_gives_copies_is_restored_all_the_same(tmp_path):
    saved, now = Copied(), Copied()
    apply(Objects(model=now), through_disk(Objects(model=saved), tmp_path / "c"))
    assert torch.equal(now.inner.weight, saved.inner.weight)


def test_a_model_that_leaves_frozen_parameters_out_of_its_state_dict_is_saved_as_it_says(tmp_path):
    def leave_out(module, state, prefix, metadata):
        for key in [key for key in state if "frozen" in key]:
            del state[key]

    def make():
        model = nn.ModuleDict({"frozen": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        model.register_state_dict_post_hook(leave_out)
        return Objects(model=model, optimizers=[torch.optim.SGD(model["head"].parameters(), lr=0.1)])

    saved, now = make(), make()
    apply(now, through_disk(saved, tmp_path / "c"))
    assert torch.equal(now.model["head"].weight, saved.model["head"].weight)


@pytest.mark.parametrize("kind", ["sparse", "csr", "meta", "lazy"])
def test_a_tensor_without_dense_data_is_refused_by_name(kind):
    model = nn.ModuleDict({"part": nn.LazyLinear(2) if kind == "lazy" else nn.Linear(2, 2)})
    if kind != "lazy":
        eye = torch.eye(3)
        odd = {"sparse": eye.to_sparse, "csr": eye.to_sparse_csr, "meta": lambda: eye.to("meta")}[kind]()
        model["part"].register_buffer("weight_map", odd)
    with pytest.raises(UnstorableState, match=r"^model\.part\.weight"):
        collect(Objects(model=model))
