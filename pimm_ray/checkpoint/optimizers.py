"""The state of an optimizer by parameter name, and put back into groups that may have another order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pimm_ray.checkpoint.codec import encode
from pimm_ray.checkpoint.names import parameter_names, some
from pimm_ray.errors import StateMismatch, UnstorableState

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Group settings that say how an optimizer computes, not what: the present ones hold."""


def collect_optimizer(
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


def match_groups(
    optimizer: torch.optim.Optimizer, index: int, saved: dict[str, Any], names: dict[int, str]
) -> list[int | None]:
    """For each present group, the saved group its parameters come from; None for a group of new parameters.

    Raises:
        StateMismatch: it cannot be put back in that way, or not one parameter of now has its moments in the checkpoint.
    """
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
    now = {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
    if saved["state"] and now and now.isdisjoint(saved["state"]):
        raise StateMismatch(
            f"optimizer.{index}: the checkpoint has the moments of {some(sorted(saved['state']))}, and the optimizer "
            f"has none of these but {some(sorted(now))}: it would start without any. Give it the parameters of the run "
            "that saved it",
            missing=[f"optimizer.{index}.{name}" for name in sorted(now)],
            unexpected=[f"optimizer.{index}.{name}" for name in sorted(saved["state"])],
        )
    return matches


def apply_optimizer(
    optimizer: torch.optim.Optimizer,
    index: int,
    saved: dict[str, Any],
    model: nn.Module,
    scheduled: bool,
) -> list[str]:
    names = parameter_names(model)
    matches = match_groups(optimizer, index, saved, names)
    notes: list[str] = []
    before = [dict(group) for group in optimizer.param_groups]
    states: dict[Any, Any] = dict(saved["global"])
    by_parameter: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
    known = {name for group in saved["groups"] for name in group["params"]}
    groups, fresh = [], []
    count = 0
    for group, match in zip(before, matches, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        if match is not None:
            stored = {key: value for key, value in saved["groups"][match].items() if key != "params"}
            settings |= {k: v for k, v in stored.items() if k not in _IMPLEMENTATION}
            notes += _changed_settings(index, match, group, settings, scheduled)
        indices = []
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in saved["state"]:
                state = states[count] = saved["state"][name]
                by_parameter.append((parameter, state))
            elif name not in known:
                fresh.append(name)
            indices.append(count)
            count += 1
        groups.append({**settings, "params": indices})
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    if any(state for _, state in by_parameter) and not any(optimizer.state.get(one) for one, _ in by_parameter):
        raise StateMismatch(
            f"optimizer.{index} ({type(optimizer).__name__}) was given the moments of {len(by_parameter)} parameters "
            "and holds none: its load_state_dict() must keep them"
        )
    for group, old in zip(optimizer.param_groups, before, strict=True):
        _keep_tensor_settings(group, old)
    for parameter, state in by_parameter:
        # torch casts floating-point state to the parameter's dtype: float32 moments of a bfloat16 weight would be lost.
        for leaf, value in state.items():
            live = optimizer.state[parameter].get(leaf)
            if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                optimizer.state[parameter][leaf] = value.to(live.device)
    if fresh:
        notes.append(f"optimizer.{index}: no saved state for {some(fresh)}: starts fresh")
    now = {names[id(parameter)] for group in before for parameter in group["params"]}
    if left := sorted(known - now):
        notes.append(f"optimizer.{index}: saved state of {some(left)} is not used: not optimized now")
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
