"""The forms of `state.json` and of what each rank stores: all that a resume reads is held against them first."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pimm_ray.checkpoint.codec import decode
from pimm_ray.checkpoint.documents import (
    LARGEST,
    Form,
    by_name,
    is_anything,
    is_count,
    is_finite,
    is_number,
    is_positive,
    is_text,
    is_whole,
    optional,
    require,
    short,
)
from pimm_ray.checkpoint.layout import STATE
from pimm_ray.errors import CorruptCheckpoint


def _is_few(value: Any) -> bool:
    """Restarts and resumes; they are multiplied and used as seeds."""
    return is_count(value) and value < 2**31


def _are_parts(value: Any) -> bool:
    """Of shards: number, first sample, and where it ends (-1: where the shard does)."""
    return type(value) is list and all(
        type(part) is list and len(part) == 3 and all(is_whole(at) and -1 <= at <= LARGEST for at in part)
        for part in value
    )


_SHAPE: Form = {
    "world_size": is_positive,
    "loader_workers": is_count,
    "global_batch": optional(is_count),
    "micro_batch": optional(is_count),
    "dataset_size": optional(is_count),
    "order_id": optional(is_text),
    "seed": is_whole,
    "share": optional(lambda value: is_finite(value) and 0 < value < 2**53),
}
_POSITION: Form = {"epoch": is_count, "samples": is_count, "window": is_count}
_HEAD: Form = {
    "id": is_text,
    "step": is_count,
    "epoch": is_count,
    "position": _POSITION,
    "trainer": {"global_step": is_count, "samples_seen": is_count, "best_metric_value": optional(is_number)},
    "shape": _SHAPE,
    "generation": _is_few,
    "drops": _is_few,
    "replayed": is_count,
    "schedule_lag": lambda value: is_whole(value) and is_count(abs(value)),
    "seed": is_whole,
    "loggers": by_name(is_anything),
    "warm_start": optional(by_name(optional(is_text))),
}
_STATE: Form = {
    "model": {"aliases": by_name(is_text), "extra_state": by_name(is_anything)},
    "optimizers": [
        {
            "class": is_text,
            "groups": [{"params": [is_text]}],
            "state": by_name(is_anything),
            "global": is_anything,
        }
    ],
    "schedulers": [{"class": is_text, "state": is_anything}],
    "scaler": is_anything,
    "ema": is_anything,
    "extra": by_name(is_anything),
}
_RANK: Form = {
    "rng": is_anything,
    "epoch_rng": is_anything,
    "loader": is_anything,
    "batches": is_count,
    "shape": _SHAPE,
}
_COUNTS: Form = {"epoch": is_count, "samples": is_count, "restarts": _is_few}
_LOADERS: dict[str, Form] = {
    "pimm_ray.elastic": {"order": is_text, "seed": is_whole, "length": is_count, **_COUNTS},
    "pimm_ray.stream": {
        **_COUNTS,
        "rank": is_count,
        "topology": lambda value: type(value) is list and bool(value) and is_count(value[0]),
        "dealt_at": is_count,
        "turn": is_count,
        "lanes": [lambda lane: type(lane) is list and len(lane) == 2 and is_count(lane[0]) and _are_parts(lane[1])],
        "undealt": _are_parts,
    },
}
"""Positions of our own loaders, by `kind`. Those of others are theirs to check."""


def check_head(document: dict[str, Any]) -> None:
    """What a resume reads of `state.json` beside the state itself. Raises ValueError, naming the key."""
    require(document, _HEAD)
    require(document, _STATE)
    for name, form in (("shape", _SHAPE), ("position", _POSITION)):
        if unknown := document[name].keys() - form:
            raise ValueError(f"{name} has the unknown keys {short(sorted(unknown))}")


def check_rank(own: Any, world_size: int) -> None:
    """What one of `world_size` ranks stored of its own, decoded. Raises ValueError, naming the key."""
    require(own, _RANK)
    if own["shape"].keys() != _SHAPE.keys() or own["shape"]["world_size"] != world_size:
        raise ValueError(f"shape is {short(own['shape'])}, of {world_size} ranks")
    _check_streams(own["rng"], "rng")
    if own["epoch_rng"] is not None:
        _check_streams(own["epoch_rng"], "epoch_rng")
    loader = own["loader"]
    if isinstance(loader, dict) and isinstance(kind := loader.get("kind"), str):
        require(loader, _LOADERS.get(kind, {}), "loader")


class State:
    """The state that a snapshot's document holds, decoded whole before any of it goes into a live object.

    Raises:
        CorruptCheckpoint: it is not what `collect` makes; the message names the key.
    """

    def __init__(
        self, document: dict[str, Any], trainer: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ):
        def value(stored: Any, key: str) -> Any:
            return decode(stored, trainer if key.startswith(("optimizer.", "ema")) else tensors, key, file=STATE)

        def by_key(stored: Any, key: str) -> dict[str, Any]:
            found = value(stored, key)
            if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
                raise CorruptCheckpoint(f"{STATE}: {key} is not a dict by name", file=STATE)
            return found

        def optimizer(saved: dict[str, Any], key: str) -> dict[str, Any]:
            groups = []
            for i, group in enumerate(saved["groups"]):
                settings = {name: item for name, item in group.items() if name != "params"}
                groups.append({**by_key(settings, f"{key}.group.{i}"), "params": group["params"]})
            state = {name: by_key(leaves, f"{key}.{short(name)}") for name, leaves in saved["state"].items()}
            return {**saved, "groups": groups, "state": state, "global": by_key(saved["global"], f"{key}.global")}

        model = document["model"]
        self.aliases: dict[str, str] = model["aliases"]
        self.extra_state = {name: value(item, f"model.{short(name)}") for name, item in model["extra_state"].items()}
        self.optimizers = [optimizer(saved, f"optimizer.{i}") for i, saved in enumerate(document["optimizers"])]
        self.schedulers = [
            {**saved, "state": value(saved["state"], f"scheduler.{i}")}
            for i, saved in enumerate(document["schedulers"])
        ]
        self.scaler = value(document["scaler"], "scaler")
        self.ema = value(document["ema"], "ema")
        self.extra = {name: value(item, f"extra.{short(name)}") for name, item in document["extra"].items()}


def alike(live: Any, saved: Any) -> bool:
    """Whether one may take the place of the other: numbers (or a tensor of one), tensors of one size, or one type."""
    if live is None or saved is None:
        return True
    if isinstance(live, torch.Tensor) or isinstance(saved, torch.Tensor):
        return _is_plain_number(live, saved) or getattr(live, "shape", None) == getattr(saved, "shape", ())
    if is_number(live) or type(live) is bool:
        return is_number(saved) or type(saved) is bool
    if isinstance(live, list | tuple):
        return isinstance(saved, list | tuple)
    return isinstance(saved, type(live))


def _is_plain_number(*values: Any) -> bool:
    return all(
        value.numel() == 1 and not value.is_complex()
        if isinstance(value, torch.Tensor)
        else is_number(value) or type(value) is bool
        for value in values
    )


def _check_streams(state: Any, key: str) -> None:
    """Try a state of random streams on generators that nobody uses."""
    tensor_or_none = optional(lambda value: isinstance(value, torch.Tensor) and value.dtype == torch.uint8)
    require(state, {"python": is_anything, "numpy": is_anything, "cuda": tensor_or_none}, key)
    require(state, {"torch": is_anything, "generators": by_name(tensor_or_none)}, key)
    try:
        random.Random().setstate(state["python"])
        kind = type(np.random.get_bit_generator())  # type: ignore[attr-defined]
        np.random.RandomState(kind()).set_state(state["numpy"])
        if not 0 <= state["numpy"]["state"].get("pos", 0) <= 624:  # numpy would read beyond its 624 numbers
            raise ValueError(f"position {state['numpy']['state']['pos']}")
        torch.Generator().set_state(state["torch"])
    except Exception as error:
        raise ValueError(
            f"{key} is not the state of random streams: {type(error).__name__}: {short(str(error))}"
        ) from None
