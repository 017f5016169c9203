"""What a training job is made of: collected by name from live objects, and put back into them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pimm_ray.checkpoint.codec import decode, encode
from pimm_ray.checkpoint.names import bare_names, parameter_names
from pimm_ray.checkpoint.schedules import load_by_group
from pimm_ray.errors import StateMismatch, UnstorableState

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Group settings that say how an optimizer computes, not what: the present ones hold."""


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
            _collect_optimizer(optimizer, f"optimizer.{i}", by_id, trainer)
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
    notes = _check(objects, snapshot)
    document = snapshot.document
    names = bare_names(objects.model)
    aliases = document["model"]["aliases"]
    extra_state = {n: decode(v, snapshot.tensors) for n, v in document["model"]["extra_state"].items()}
    live = objects.model.state_dict()
    with torch.no_grad():
        for key, target in live.items():
            if isinstance(target, torch.Tensor):
                target.copy_(snapshot.weights[aliases.get(names[key], names[key])])
    # A module whose state_dict() gives copies takes them back in load_state_dict() only.
    if extra_state or _gives_copies(objects.model, live):
        full = {key: extra_state.get(names[key], value) for key, value in live.items()}
        objects.model.load_state_dict(full)
    for i, optimizer in enumerate(objects.optimizers):
        notes += _apply_optimizer(
            optimizer, i, document["optimizers"][i], snapshot.trainer, objects.model, bool(objects.schedulers)
        )
    for scheduler, saved in zip(objects.schedulers, document["schedulers"], strict=True):
        state = decode(saved["state"], snapshot.tensors)
        load_by_group(scheduler, partial(scheduler.load_state_dict, state), partial(_homes, objects, document))
    scaler_state = decode(document["scaler"], snapshot.tensors)
    if _scaler_state(objects.scaler) is not None and scaler_state is not None:
        objects.scaler.load_state_dict(scaler_state)
    if objects.ema is not None:
        _apply_ema(objects.ema, decode(document["ema"], snapshot.trainer))
    for name, value in objects.extra.items():
        _apply_extra(value, decode(document["extra"][name], snapshot.tensors))
    return notes


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


def _collect_optimizer(
    optimizer: torch.optim.Optimizer, prefix: str, names: dict[int, str], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    state, groups = {}, []
    for i, group in enumerate(optimizer.param_groups):
        members = _member_names(group, f"{prefix}.group.{i}", names)
        for name, parameter in zip(members, group["params"], strict=True):
            if optimizer.state.get(parameter):
                state[name] = encode(dict(optimizer.state[parameter]), f"{prefix}.{name}", tensors)
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**encode(settings, f"{prefix}.group.{i}", tensors), "params": members})
    other = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "state": state,
        "global": encode(other, f"{prefix}.global", tensors),
    }


def _member_names(group: Mapping[str, Any], prefix: str, names: Mapping[int, str]) -> list[str]:
    for i, parameter in enumerate(group["params"]):
        if id(parameter) not in names:
            raise UnstorableState(
                f"{prefix}: parameter {i} (shape {tuple(parameter.shape)}) is not in `model`, so it has no name; give "
                "the manager one module that holds every optimized parameter (torch.nn.ModuleDict joins several)",
                key=prefix,
            )
    return [names[id(parameter)] for parameter in group["params"]]


def _check(objects: Objects, snapshot: Snapshot) -> list[str]:
    document = snapshot.document
    missing: list[str] = []
    unexpected: list[str] = []
    shapes: dict[str, Any] = {}
    notes: list[str] = []

    aliases = document["model"]["aliases"]
    names = bare_names(objects.model)
    extra_state = document["model"]["extra_state"]
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

    for kind, present in (("optimizer", objects.optimizers), ("scheduler", objects.schedulers)):
        saved = document[kind + "s"]
        classes = [type(item).__name__ for item in present]
        before = [item["class"] for item in saved]
        if len(classes) > len(before):
            missing += [f"{kind}.{i} ({classes[i]})" for i in range(len(before), len(classes))]
        unexpected += [f"{kind}.{i} ({before[i]})" for i in range(len(classes), len(before))]
        for i, (old, new) in enumerate(zip(before, classes, strict=False)):
            if old != new:
                shapes[f"{kind}.{i}"] = (old, new)
    if objects.ema is not None and document["ema"] is None:
        missing.append("ema")
    if objects.ema is None and document["ema"] is not None:
        unexpected.append("ema")
    elif isinstance(objects.ema, nn.Module) and document["ema"] is not None:
        now = set(bare_names(objects.ema).values())
        missing += [f"ema.{name}" for name in sorted(now - document["ema"].keys())]
        unexpected += [f"ema.{name}" for name in sorted(document["ema"].keys() - now)]
        stored_ema = decode(document["ema"], snapshot.trainer)
        for name, value in _ema_state(objects.ema).items():
            _compare(f"ema.{name}", stored_ema.get(name), value, shapes)
    missing += [f"extra.{name}" for name in objects.extra if name not in document["extra"]]
    for name in sorted(document["extra"].keys() & objects.extra.keys()):
        was, live = decode(document["extra"][name], snapshot.tensors), objects.extra[name]
        if any(isinstance(live, plain) and not isinstance(was, plain) for plain in (dict, list)):
            shapes[f"extra.{name}"] = (type(was).__name__, type(live).__name__)
    for name in sorted(document["extra"].keys() - objects.extra.keys()):
        notes.append(f"extra.{name} of the checkpoint is not used: no such entry in extra= now")
    had, has = document["scaler"] is not None, _scaler_state(objects.scaler) is not None
    if has and not had:
        notes.append("the checkpoint has no gradient scaler state: the scaler starts fresh")
    if had and not has:
        notes.append("the checkpoint's gradient scaler state is not used: there is no enabled scaler now")
    for i, (optimizer, saved) in enumerate(zip(objects.optimizers, document["optimizers"], strict=False)):
        _match_groups(optimizer, i, saved, parameter_names(objects.model))

    if missing or unexpected or shapes:
        said = []
        if missing:
            said.append(f"not in the checkpoint: {_some(missing)}")
        if unexpected:
            said.append(f"in the checkpoint but not here: {_some(unexpected)}")
        if shapes:
            said.append("saved as / now: " + _some([f"{key} {old} / {new}" for key, (old, new) in shapes.items()]))
        raise StateMismatch(
            f"the checkpoint does not fit the objects to be restored: {'; '.join(said)}. Build the same model, "
            "optimizer and scheduler as the run that saved it",
            missing=missing,
            unexpected=unexpected,
            shapes=shapes,
        )
    return notes


def _compare(key: str, stored: Any, live: Any, shapes: dict[str, Any]) -> None:
    if not isinstance(stored, torch.Tensor) or not isinstance(live, torch.Tensor):
        return
    if (stored.shape, stored.dtype) != (live.shape, live.dtype):
        shapes[key] = (_describe(stored), _describe(live))


def _match_groups(
    optimizer: torch.optim.Optimizer, index: int, saved: dict[str, Any], names: dict[int, str]
) -> list[int | None]:
    """For each present group, the saved group its parameters come from; None for a group of new parameters."""
    home = {name: i for i, group in enumerate(saved["groups"]) for name in group["params"]}
    same_layout = len(optimizer.param_groups) == len(saved["groups"])
    matches: list[int | None] = []
    for i, group in enumerate(optimizer.param_groups):
        members = _member_names(group, f"optimizer.{index}.group.{i}", names)
        homes = {home[name] for name in members if name in home}
        if len(homes) > 1:
            raise StateMismatch(
                f"optimizer.{index}: group {i} holds parameters of {len(homes)} saved groups "
                f"({', '.join(map(str, sorted(homes)))}), whose settings differ; keep the groups as they were saved"
            )
        if homes:
            matches.append(homes.pop())
        else:
            empty_twin = same_layout and not members and not saved["groups"][i]["params"]
            matches.append(i if empty_twin else None)
    return matches


def _homes(objects: Objects, document: dict[str, Any], optimizer: Any) -> list[int | None]:
    """As `_match_groups`, for the optimizer of a schedule; nothing for one that is not the manager's."""
    for i, (mine, saved) in enumerate(zip(objects.optimizers, document["optimizers"], strict=False)):
        if mine is optimizer:
            return _match_groups(mine, i, saved, parameter_names(objects.model))
    return []


def _apply_optimizer(
    optimizer: torch.optim.Optimizer,
    index: int,
    saved: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    model: nn.Module,
    scheduled: bool,
) -> list[str]:
    names = parameter_names(model)
    matches = _match_groups(optimizer, index, saved, names)
    notes: list[str] = []
    before = [dict(group) for group in optimizer.param_groups]
    states: dict[Any, Any] = dict(decode(saved["global"], tensors))
    by_parameter: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
    known = {name for group in saved["groups"] for name in group["params"]}
    groups, fresh = [], []
    count = 0
    for group, match in zip(before, matches, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        if match is not None:
            stored = {key: value for key, value in saved["groups"][match].items() if key != "params"}
            settings |= {k: v for k, v in decode(stored, tensors).items() if k not in _IMPLEMENTATION}
            notes += _changed_settings(index, match, group, settings, scheduled)
        indices = []
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in saved["state"]:
                state = decode(saved["state"][name], tensors)
                states[count] = state
                by_parameter.append((parameter, state))
            elif name not in known:
                fresh.append(name)
            indices.append(count)
            count += 1
        groups.append({**settings, "params": indices})
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    for group, old in zip(optimizer.param_groups, before, strict=True):
        _keep_tensor_settings(group, old)
    for parameter, state in by_parameter:
        # torch casts floating-point state to the parameter's dtype: float32 moments of a bfloat16 weight would be lost.
        for leaf, value in state.items():
            live = optimizer.state[parameter].get(leaf)
            if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                optimizer.state[parameter][leaf] = value.to(live.device)
    if fresh:
        notes.append(f"optimizer.{index}: no saved state for {_some(fresh)}: starts fresh")
    now = {names[id(parameter)] for group in before for parameter in group["params"]}
    if left := sorted(known - now):
        notes.append(f"optimizer.{index}: saved state of {_some(left)} is not used: not optimized now")
    return notes


def _keep_tensor_settings(group: dict[str, Any], old: dict[str, Any]) -> None:
    """A setting that is a tensor now (a capturable learning rate) stays that tensor, and a number stays a number."""
    for key, value in old.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            group[key] = value.copy_(torch.as_tensor(group[key]))
        elif isinstance(value, float) and isinstance(group[key], torch.Tensor):
            group[key] = float(group[key].item())


def _changed_settings(
    index: int, match: int, now: dict[str, Any], settings: dict[str, Any], scheduled: bool
) -> list[str]:
    by_scheduler = {"lr", "momentum", "betas", "base_momentum", "max_momentum", "initial_lr", "max_lr", "min_lr"}
    skipped = {"params", *_IMPLEMENTATION, *(by_scheduler if scheduled else ())}
    return [
        f"optimizer.{index} group {match}: the saved {key}={settings[key]} holds, not {key}={now[key]}"
        for key in now
        if key not in skipped and not isinstance(now[key], torch.Tensor) and settings[key] != now[key]
    ]


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
