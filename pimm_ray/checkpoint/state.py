"""What a training job is made of: collected by name from live objects, and put back into them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pimm_ray.checkpoint.codec import encode
from pimm_ray.checkpoint.documents import short
from pimm_ray.checkpoint.names import bare_names, parameter_names, some
from pimm_ray.checkpoint.optimizers import apply_optimizer, collect_optimizer, match_groups
from pimm_ray.checkpoint.schedules import load_by_group
from pimm_ray.checkpoint.schema import State, alike
from pimm_ray.errors import PimmRayError, StateMismatch, UnstorableState


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The live objects of one training job. `extra` values have state_dict/load_state_dict or are dicts or lists."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    ema: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model is a {type(self.model).__name__}: give one nn.Module (nn.ModuleDict joins several)")
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise TypeError(f"{type(optimizer).__name__} is no optimizer: give one, or a list of them")


@dataclass(frozen=True)
class Snapshot:
    """The state of `Objects`. Tensors alias the live ones: use it before the next step, or copy."""

    weights: dict[str, torch.Tensor]
    parameters: frozenset[str]
    """Names in `weights` that are the same on every rank; the rest are buffers, for which rank 0 speaks."""
    trainer: dict[str, torch.Tensor]
    """Optimizer and EMA tensors by `optimizer.<i>.<parameter>.<leaf>` and `ema.<name>`."""
    document: dict[str, Any]
    """The JSON part."""
    tensors: dict[str, torch.Tensor]
    """Tensors that `document` refers to, small and rank 0's."""
    averaged_buffers: frozenset[str] = frozenset()
    """Names in `trainer` that are buffers of the EMA module: they differ between ranks, and rank 0 speaks for them."""


def collect(objects: Objects) -> Snapshot:
    """Who calls it: every rank. Nothing is copied and nothing runs in the optimizer.

    Raises:
        UnstorableState: a leaf cannot be stored without pickle; the message names it.
    """
    names = bare_names(objects.model)
    weights, extra_state, aliases = {}, {}, {}
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[Any, str] = {}
    for key, value in objects.model.state_dict().items():
        name = names[key]
        if not isinstance(value, torch.Tensor):
            extra_state[name] = encode(value, f"model.{name}", tensors)
            continue
        _require_data(value, f"model.{name}")
        first = owners.setdefault(_identity(value, name), name)
        if first != name:
            aliases[name] = first
            continue
        weights[name] = value.detach()
    trainer: dict[str, torch.Tensor] = {}
    by_id = parameter_names(objects.model)
    document = {
        "model": {"aliases": aliases, "extra_state": extra_state},
        "optimizers": [
            collect_optimizer(optimizer, f"optimizer.{i}", by_id, trainer)
            for i, optimizer in enumerate(objects.optimizers)
        ],
        "schedulers": [
            {"class": type(scheduler).__name__, "state": encode(scheduler.state_dict(), f"scheduler.{i}", tensors)}
            for i, scheduler in enumerate(objects.schedulers)
        ],
        "scaler": encode(_scaler_state(objects.scaler), "scaler", tensors),
        "ema": None if objects.ema is None else encode(_ema_state(objects.ema), "ema", trainer),
        "extra": {name: encode(_extra_state(value), f"extra.{name}", tensors) for name, value in objects.extra.items()},
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__},
    }
    parameters = frozenset(weights) & frozenset(by_id.values())
    return Snapshot(weights, parameters, trainer, document, tensors, _averaged_buffers(objects.ema, trainer))


def apply(objects: Objects, snapshot: Snapshot) -> list[str]:
    """Put a stored state into live objects. Who calls it: every rank. Returns notes about what was not taken as it was.

    All checks come before the first change.

    Raises:
        StateMismatch: the state does not fit; nothing was changed.
    """
    saved = State(snapshot.document, snapshot.trainer, snapshot.tensors)
    notes = _check(objects, snapshot, saved)
    names = bare_names(objects.model)
    live = objects.model.state_dict()
    with torch.no_grad():
        for key, target in live.items():
            if isinstance(target, torch.Tensor):
                target.copy_(snapshot.weights[saved.aliases.get(names[key], names[key])])
    # A module whose state_dict() gives copies takes them back in load_state_dict() only.
    if saved.extra_state or _gives_copies(objects.model, live):
        full = {key: saved.extra_state.get(names[key], value) for key, value in live.items()}
        with _restoring("model"):
            objects.model.load_state_dict(full)
    for i, (optimizer, old) in enumerate(zip(objects.optimizers, saved.optimizers, strict=True)):
        with _restoring(f"optimizer.{i}"):
            notes += apply_optimizer(optimizer, i, old, objects.model, bool(objects.schedulers))
    for i, (scheduler, old) in enumerate(zip(objects.schedulers, saved.schedulers, strict=True)):
        load = partial(scheduler.load_state_dict, old["state"])
        with _restoring(f"scheduler.{i}"):
            load_by_group(scheduler, load, partial(_homes, objects, saved))
    if _scaler_state(objects.scaler) is not None and saved.scaler is not None:
        with _restoring("scaler"):
            objects.scaler.load_state_dict(saved.scaler)
    if objects.ema is not None:
        with _restoring("ema"):
            _apply_ema(objects.ema, saved.ema)
    for name, value in objects.extra.items():
        with _restoring(f"extra[{name!r}]"):
            _apply_extra(value, saved.extra[name])
    return notes


@contextmanager
def _restoring(what: str) -> Iterator[None]:
    """Whatever an object's own load_state_dict() raises comes out with the name of that object."""
    try:
        yield
    except PimmRayError:
        raise
    except Exception as error:
        raise StateMismatch(
            f"{what} does not take the state that was saved of it: {type(error).__name__}: {error}. The objects before "
            "it are restored by now: make all of them anew before another resume"
        ) from error


def is_extra(value: Any) -> bool:
    """Whether `value` can be restored in place, as the entries of `extra` are."""
    return isinstance(value, dict | list) or (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))


def _require_data(tensor: torch.Tensor, key: str) -> None:
    if is_lazy(tensor):
        raise UnstorableState(f"{key} is not initialised: run one batch through the lazy module first", key=key)
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "a meta tensor, which has no data" if tensor.is_meta else f"of layout {tensor.layout}"
        raise UnstorableState(
            f"{key} is {what}: only dense tensors can be stored; register_buffer(..., persistent=False) leaves it out",
            key=key,
        )


def _is_part_of(scheduler: Any, name: Any) -> bool:
    """Whether a saved value of that name would take the place of a method or of the optimizer."""
    return name == "optimizer" or callable(getattr(scheduler, str(name), None))


def _gives_copies(model: nn.Module, live: Mapping[str, Any]) -> bool:
    again = model.state_dict()
    return any(
        isinstance(value, torch.Tensor) and _identity(value, key) != _identity(again[key], key)
        for key, value in live.items()
    )


def _identity(tensor: torch.Tensor, name: str) -> Any:
    if not tensor.numel():
        return name
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _scaler_state(scaler: Any) -> dict[str, Any] | None:
    """None for no scaler and for a disabled one, which is the same thing."""
    return (scaler.state_dict() or None) if scaler is not None else None


def _extra_state(value: Any) -> Any:
    return value if isinstance(value, dict | list) else value.state_dict()


def _apply_extra(value: Any, saved: Any) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(saved)
    elif isinstance(value, list):
        value[:] = saved
    else:
        value.load_state_dict(saved)


def _ema_state(ema: Any) -> Any:
    if isinstance(ema, nn.Module):
        names = bare_names(ema)
        return {names[key]: value for key, value in ema.state_dict().items()}
    return ema.state_dict()


def _averaged_buffers(ema: Any, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    if not isinstance(ema, nn.Module):
        return frozenset()
    names = bare_names(ema)
    parameters = {f"ema.{names[key]}" for key, _ in ema.named_parameters(remove_duplicate=False)}
    return frozenset(key for key in tensors if key.startswith("ema.") and key not in parameters)


def _apply_ema(ema: Any, saved: dict[str, Any]) -> None:
    if isinstance(ema, nn.Module):
        saved = {key: saved[name] for key, name in bare_names(ema).items()}
    ema.load_state_dict(saved)


def _check(objects: Objects, snapshot: Snapshot, saved: State) -> list[str]:
    missing: list[str] = []
    unexpected: list[str] = []
    shapes: dict[str, Any] = {}
    notes: list[str] = []

    aliases, extra_state = saved.aliases, saved.extra_state
    names = bare_names(objects.model)
    wanted = {names[key]: value for key, value in objects.model.state_dict().items()}
    owners: dict[Any, torch.Tensor] = {}
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor):
            if name not in extra_state:
                missing.append(f"model.{name}")
            continue
        _require_data(value, f"model.{name}")
        stored = snapshot.weights.get(aliases.get(name, name))
        if stored is None:
            missing.append(f"model.{name}")
            continue
        _compare(f"model.{name}", stored, value, shapes)
        first = owners.setdefault(_identity(value, name), stored)
        if first is not stored and not torch.equal(first, stored):
            shapes[f"model.{name}"] = ("a tensor of its own", "tied to another")
    held = {*snapshot.weights, *aliases, *extra_state}
    unexpected += [f"model.{name}" for name in sorted(held - wanted.keys())]

    for kind, present, stored_ones in (
        ("optimizer", objects.optimizers, saved.optimizers),
        ("scheduler", objects.schedulers, saved.schedulers),
    ):
        classes = [type(item).__name__ for item in present]
        before = [item["class"] for item in stored_ones]
        if len(classes) > len(before):
            missing += [f"{kind}.{i} ({classes[i]})" for i in range(len(before), len(classes))]
        unexpected += [f"{kind}.{i} ({before[i]})" for i in range(len(classes), len(before))]
        for i, (old, new) in enumerate(zip(before, classes, strict=False)):
            if old and old != new:  # an older pimm told no class
                shapes[f"{kind}.{i}"] = (old, new)
    for i, (scheduler, old) in enumerate(zip(objects.schedulers, saved.schedulers, strict=False)):
        live, was = scheduler.state_dict(), old["state"]
        if isinstance(live, dict) and isinstance(was, dict):
            shapes |= _unlike(f"scheduler.{i}", live, was)
            unexpected += [f"scheduler.{i}.{key}" for key in was.keys() - live.keys() if _is_part_of(scheduler, key)]
    if objects.ema is not None and saved.ema is None:
        missing.append("ema")
    if objects.ema is None and saved.ema is not None:
        unexpected.append("ema")
    elif isinstance(objects.ema, nn.Module) and isinstance(saved.ema, dict):
        averaged = _ema_state(objects.ema)
        missing += [f"ema.{name}" for name in sorted(averaged.keys() - saved.ema.keys())]
        unexpected += [f"ema.{name}" for name in sorted(map(str, saved.ema.keys() - averaged.keys()))]
        for name, value in averaged.items():
            _compare(f"ema.{name}", saved.ema.get(name), value, shapes)
    missing += [f"extra.{name}" for name in objects.extra if name not in saved.extra]
    for name in sorted(saved.extra.keys() & objects.extra.keys()):
        was, live = saved.extra[name], objects.extra[name]
        if any(isinstance(live, plain) and not isinstance(was, plain) for plain in (dict, list)):
            shapes[f"extra.{name}"] = (type(was).__name__, type(live).__name__)
    for name in sorted(saved.extra.keys() - objects.extra.keys()):
        notes.append(f"extra.{name} of the checkpoint is not used: no such entry in extra= now")
    had, has = saved.scaler is not None, _scaler_state(objects.scaler) is not None
    if has and not had:
        notes.append("the checkpoint has no gradient scaler state: the scaler starts fresh")
    if had and not has:
        notes.append("the checkpoint's gradient scaler state is not used: there is no enabled scaler now")
    for i, (optimizer, old) in enumerate(zip(objects.optimizers, saved.optimizers, strict=False)):
        for n, match in enumerate(match_groups(optimizer, i, old, parameter_names(objects.model))):
            if match is not None:
                settings = {key: value for key, value in optimizer.param_groups[n].items() if key != "params"}
                shapes |= _unlike(f"optimizer.{i}.group.{n}", settings, old["groups"][match])

    if missing or unexpected or shapes:
        said = []
        if missing:
            said.append(f"not in the checkpoint: {some(missing)}")
        if unexpected:
            said.append(f"in the checkpoint but not here: {some(unexpected)}")
        if shapes:
            said.append("saved as / now: " + some([f"{key} {old} / {new}" for key, (old, new) in shapes.items()]))
        raise StateMismatch(
            f"the checkpoint does not fit the objects to be restored: {'; '.join(said)}. Build the same model, "
            "optimizer and scheduler as the run that saved it",
            missing=missing,
            unexpected=unexpected,
            shapes=shapes,
        )
    return notes


def _unlike(key: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Values of which the saved one cannot take the live one's place."""
    return {
        f"{key}.{name}": (short(saved[name]), short(value))
        for name, value in live.items()
        if name in saved and not alike(value, saved[name])
    }


def _compare(key: str, stored: Any, live: Any, shapes: dict[str, Any]) -> None:
    if not isinstance(stored, torch.Tensor) or not isinstance(live, torch.Tensor):
        return
    if (stored.shape, stored.dtype) != (live.shape, live.dtype):
        shapes[key] = (_describe(stored), _describe(live))


def _homes(objects: Objects, saved: State, optimizer: Any) -> list[int | None]:
    """As `match_groups`, for the optimizer of a schedule; nothing for one that is not the manager's."""
    for i, (mine, old) in enumerate(zip(objects.optimizers, saved.optimizers, strict=True)):
        if mine is optimizer:
            return match_groups(mine, i, old, parameter_names(objects.model))
    return []


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
