"""What pimm saves, turned into what a checkpoint of ours holds."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pimm_ray.checkpoint.codec import decode, encode
from pimm_ray.checkpoint.documents import is_count, parse_json, short
from pimm_ray.checkpoint.legacy import load_pickle
from pimm_ray.checkpoint.names import some
from pimm_ray.checkpoint.schema import check_head, check_rank
from pimm_ray.checkpoint.state import Snapshot
from pimm_ray.errors import CheckpointVersionError, CorruptCheckpoint, PimmRayError, StateMismatch

SCHEMA = "pimm.trainer_checkpoint"
VERSION = 3
CURSOR = "pimm.torchdata_state.v1"
OURS = "pimm_ray"
"""The key under which we add to a payload of pimm what it has no place for."""
UNTOLD = "untold"
"""The `order_id` of a loader whose position is known, but not its data and order (see `elastic.plan`)."""
_STATE = ("model", "optimizers", "schedulers", "scaler", "ema", "extra", "versions")
_WRAPPERS = ("module.", "_orig_mod.")
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum")
_NOT_LEARNED = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class Present:
    """What older checkpoints do not tell and whoever reads them knows.

    Args:
        world_size: number of ranks.
        iterations: micro-batches of an epoch on each rank.
        global_batch: samples of one micro-batch over all ranks.
        groups: names of the optimizer's parameters, by group.
    """

    world_size: int = 1
    iterations: int | None = None
    global_batch: int | None = None
    groups: list[list[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """A whole checkpoint in our form, in memory.

    Args:
        head: entries of `state.json` beside the state itself.
        ranks: what each rank stored of its own.
        notes: what it could not tell, and what that means.
    """

    head: dict[str, Any]
    snapshot: Snapshot
    ranks: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(document: dict[str, Any], snapshot: Snapshot, ranks: list[dict[str, Any]]) -> Adopted:
        """A checkpoint of ours, with `state.json` taken apart."""
        state = {key: document[key] for key in _STATE if key in document}
        head = {key: value for key, value in document.items() if key not in (*_STATE, "schema", "version", "id")}
        return Adopted(head=head, snapshot=replace(snapshot, document=state), ranks=ranks)

    @property
    def document(self) -> dict[str, Any]:
        return {**self.head, **self.snapshot.document}


def adopt(payload: dict[str, Any], path: str, present: Present, *, allow_pickle: bool = False) -> Adopted:
    """Everything that a resume needs, checked as a checkpoint of ours is.

    Args:
        payload: of `pimm.read_payload`.
        path: for messages.
        allow_pickle: as of `legacy.load_pickle`, for the loader's position.

    Raises:
        CorruptCheckpoint: it is not what pimm saves, or contradicts itself.
        CheckpointVersionError: a newer pimm saved it.
        StateMismatch: it holds weights only, or numbers parameters that nobody can name.
        UnsafeCheckpoint: the loader's position is more than plain data.
        PimmRayError: it is of an older pimm and `present` does not tell the iterations of an epoch.
    """
    version = payload.get("version", VERSION)
    if payload.get("schema", SCHEMA) != SCHEMA or not is_count(version) or version > VERSION:
        raise CheckpointVersionError(
            f"{path} is of schema {short(payload.get('schema'))} and version {short(version)}; this release reads "
            f"{SCHEMA!r} up to version {VERSION}"
        )
    if not {"trainer", "train_state", "epoch"} & payload.keys():
        raise StateMismatch(
            f"{path} holds weights only, nothing to resume from: resume from model/last or model_last.pth, or give it "
            "to resume(warm_start=...)",
            missing=["trainer"],
        )
    try:
        ours = _ours(payload)
        snapshot = _snapshot({**payload, **ours.get("payload", {})}, path, present)
        if ours:
            adopted = Adopted(head=ours["head"], snapshot=snapshot, ranks=ours["ranks"])
        else:
            adopted = _foreign(payload, snapshot, path, present, allow_pickle)
        check_head({"id": "", **adopted.document})
        for own in adopted.ranks:
            check_rank(own, len(adopted.ranks))
    except PimmRayError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{path} is not understood as a checkpoint of pimm: {type(error).__name__}: {short(str(error))}"
        ) from error
    return adopted


def _ours(payload: dict[str, Any]) -> dict[str, Any]:
    """What we added to a checkpoint that went from us to pimm's format: nothing of this is lost on the way."""
    if OURS not in payload:
        return {}
    held = payload[OURS]
    return dict(decode(parse_json(held["document"]), held.get("tensors") or {}, OURS))


def _foreign(payload: dict[str, Any], snapshot: Snapshot, path: str, present: Present, allow_pickle: bool) -> Adopted:
    notes: list[str] = []
    saved = payload.get("train_state") or payload.get("trainer")
    trainer, batch = dict(saved) if saved else {}, None
    if not trainer:
        trainer = _flat(payload, path, present)
        batch = present.global_batch
        notes.append("saved by an older pimm, without random streams, batch size and samples seen")
    loader = payload.get("dataloader") or {}
    streams = _by_rank((payload.get("rng") or {}).get("state") or trainer.get("rng_state") or payload.get("rng_state"))
    world = len(streams) or present.world_size
    epoch, inside = int(trainer["epoch"]), int(trainer.get("iter_in_epoch", trainer.get("iteration", 0)))
    cursors = _by_rank(loader.get("state") or trainer.get("dataloader_state")) if inside else []
    positions = [_position(cursor, path, allow_pickle) for cursor in cursors]
    told = not inside or (len(positions) == world and not any(position is None for position in positions))
    if inside and not told:
        notes.append(f"saved in mid-epoch without a loader position: epoch {epoch} restarts")
    micro = loader.get("batch_size_per_rank") or trainer.get("batch_size_per_rank")
    batch = micro * world if micro else batch
    workers = loader.get("num_workers")
    shape = {
        "world_size": world,
        "loader_workers": _workers(positions) if workers is None else workers,
        "global_batch": batch,
        "micro_batch": micro,
        "dataset_size": None,
        "order_id": UNTOLD if told else None,
        "seed": 0,
        "share": None,
    }
    best = trainer.get("best_metric_value", payload.get("best_metric_value"))
    best = None if best is None or float(best) == -math.inf else float(best)  # -inf: none yet
    counts = {
        "epoch": epoch,
        "iter_in_epoch": inside,
        "global_step": int(trainer["global_step"]),
        "samples_seen": int(trainer.get("samples_seen", 0)),
    }
    head = {
        "step": counts["global_step"],
        "epoch": epoch,
        "position": {"epoch": epoch, "samples": inside * (batch or world), "window": inside},
        "trainer": {**counts, "best_metric_value": best},
        "shape": shape,
        "generation": 0,
        "drops": 0,
        "replayed": 0,
        "schedule_lag": 0,
        "seed": 0,
        "loggers": _loggers(payload),
        "warm_start": None,
    }
    ranks = [
        {
            "rng": _streams(streams[rank], rank) if streams else _fresh_streams(counts["global_step"], rank),
            "epoch_rng": None,
            "loader": positions[rank] if told and inside else None,
            "batches": inside,
            "shape": shape,
        }
        for rank in range(world)
    ]
    return Adopted(head=head, snapshot=snapshot, ranks=ranks, notes=notes)


def _flat(payload: dict[str, Any], path: str, present: Present) -> dict[str, Any]:
    """Counters of the layout before there was `trainer`: there, `epoch` counts from one while `iter` is inside it."""
    if present.iterations is None:
        raise PimmRayError(
            f"{path} is of an older pimm, which did not save its steps: resume with a loader that has a length, or "
            "tell `pimm-ray convert` by --iterations-per-epoch how many iterations an epoch had"
        )
    epoch, done = int(payload["epoch"]), int(payload.get("iter") or 0)
    inside = done if 0 < done < present.iterations else 0
    epoch = max(0, epoch - 1) if inside else epoch
    step = epoch * present.iterations + inside
    seen = step * (present.global_batch or 0)
    return {"epoch": epoch, "iter_in_epoch": inside, "global_step": step, "samples_seen": seen}


def _by_rank(state: Any) -> list[Any]:
    """One a rank: pimm wraps them when there are several."""
    if not state:
        return []
    return list(state["states"]) if "states" in state else [state]


def _position(cursor: Any, path: str, allow_pickle: bool) -> Any:
    """What the loader of one rank said of its position; None when it could say nothing."""
    if not isinstance(cursor, dict) or cursor.get("format") != CURSOR:
        return None
    state = load_pickle(cursor["state"], f"the loader's position in {path}", allow_pickle=allow_pickle)
    tensors: dict[str, torch.Tensor] = {}
    return decode(encode(state, "loader", tensors), tensors)


def _workers(positions: Iterable[Any]) -> int:
    """Of the loader, as its position tells."""
    for position in positions:
        if isinstance(position, dict) and (snapshot := position.get("_snapshot")):
            return int(snapshot["_main_snapshot"]["_num_workers"])
    return 0


def _streams(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    kind, key, at, has_gauss, gauss = state["numpy"]
    cuda = state.get("torch_cuda") or []
    return {
        "python": state["python"],
        "numpy": {
            "bit_generator": kind,
            "state": {"key": np.asarray(key, dtype=np.uint32), "pos": int(at)},
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": state["torch"],
        "cuda": cuda[rank % len(cuda)] if cuda else None,  # of all devices of the rank's node; ranks come node by node
        "generators": {},
    }


def _fresh_streams(step: int, rank: int) -> dict[str, Any]:
    """New ones for a rank of which none were saved."""
    words = np.random.SeedSequence(entropy=step, spawn_key=(rank,)).generate_state(3)
    return {
        "python": random.Random(int(words[0])).getstate(),
        "numpy": np.random.RandomState(words[1]).get_state(legacy=False),
        "torch": torch.Generator().manual_seed(int(words[2])).get_state(),
        "cuda": None,
        "generators": {},
    }


def _loggers(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The run of Weights & Biases to go on with."""
    said = (payload.get("logger") or {}).get("wandb") or {}
    run_id = said.get("run_id") or payload.get("wandb_run_id")
    if not run_id:
        return {}
    sources = [source for source in (said, payload) if isinstance(source, Mapping)]
    steps = [
        source[key] for source in sources for key in ("next_step", "resume_step", "wandb_resume_step") if key in source
    ]
    return {
        "wandb": {
            "run_id": run_id,
            "name": said.get("run_name"),
            **{key: said.get(key) for key in ("entity", "project", "group", "job_type")},
            "step": next((step for step in steps if step is not None), None),
        }
    }


def _snapshot(payload: dict[str, Any], path: str, present: Present) -> Snapshot:
    model = payload.get("model")
    held = model["state_dict"] if isinstance(model, dict) else payload["state_dict"]
    named = {_bare(name): value for name, value in held.items()}
    tensors: dict[str, torch.Tensor] = {}
    trainer: dict[str, torch.Tensor] = {}
    weights = {name: value.detach() for name, value in named.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in named.items() if name not in weights}
    optimizers = _optimizers(payload.get("optimizer"), weights, path, present, trainer)
    learned = {name for optimizer in optimizers for group in optimizer["groups"] for name in group["params"]}
    state, kind = _state_and_class(payload.get("scheduler"))
    scaler = payload.get("scaler") or {}
    scaler = scaler.get("state_dict") if "enabled" in scaler or "state_dict" in scaler else scaler
    document = {
        "model": {
            "aliases": {},
            "extra_state": {name: encode(value, f"model.{name}", tensors) for name, value in others.items()},
        },
        "optimizers": optimizers,
        "schedulers": [{"class": kind, "state": encode(_milestones(state), "scheduler.0", tensors)}] if state else [],
        "scaler": encode(scaler or None, "scaler", tensors),
        "ema": None,
        "extra": {},
        "versions": {},
    }
    return Snapshot(weights, frozenset(weights) & learned, trainer, document, tensors)


def _bare(name: str) -> str:
    """A name without the wrappers in front of it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _state_and_class(held: Any) -> tuple[dict[str, Any] | None, str]:
    """Older checkpoints hold the state as it is, and name no class."""
    if not isinstance(held, dict):
        return None, ""
    if "class" in held or "format" in held or isinstance(held.get("state_dict"), dict):
        return held.get("state_dict"), held.get("class") or ""
    return held or None, ""


def _milestones(state: Any) -> Any:
    """A Distributed Checkpoint makes text of the numbers that are keys, as schedules have them."""
    if isinstance(state, dict):
        found = {key: _milestones(value) for key, value in state.items()}
        if isinstance(found.get("milestones"), dict):
            found["milestones"] = Counter({int(step): times for step, times in found["milestones"].items()})
        return found
    return [_milestones(item) for item in state] if type(state) is list else state


def _optimizers(
    held: Any, weights: Mapping[str, torch.Tensor], path: str, present: Present, tensors: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    state, kind = _state_and_class(held)
    if not state or not state["param_groups"]:
        return []
    groups, states = [dict(group) for group in state["param_groups"]], state.get("state") or {}
    members: list[list[Any]] = [group.pop("params") for group in groups]
    if all(isinstance(member, str) for group in members for member in group):
        named = {_bare(str(name)): leaves for name, leaves in states.items()}
        names = [[_bare(name) for name in group] for group in members]
    else:
        names = _names(members, states, weights, path, present)
        by_number = {
            n: name for ns, group in zip(members, names, strict=True) for n, name in zip(ns, group, strict=True)
        }
        named = {by_number.get(_number(key), str(key)): leaves for key, leaves in states.items()}
    known = {name for group in names for name in group}
    settings = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    document = {
        "class": kind,
        "groups": [
            {**encode(group, f"optimizer.0.group.{i}", tensors), "params": names[i]} for i, group in enumerate(settings)
        ],
        "state": {
            name: encode(dict(leaves), f"optimizer.0.{name}", tensors)
            for name, leaves in named.items()
            if name in known and leaves
        },
        "global": encode(
            {name: value for name, value in named.items() if name not in known}, "optimizer.0.global", tensors
        ),
    }
    return [document]


def _names(
    members: list[list[Any]], states: Any, weights: Mapping[str, torch.Tensor], path: str, present: Present
) -> list[list[str]]:
    """Names of parameters that the state only numbers: those of the live optimizer, whose order is the saved one as
    torch's own load_state_dict() has it, else the order of the weights."""
    names = present.groups
    if names is None:
        learned = [name for name in weights if not name.endswith(_NOT_LEARNED) and weights[name].is_floating_point()]
        names = [learned] if len(members) == 1 else []
    found = [len(group) for group in names]
    if found != [len(group) for group in members]:
        raise StateMismatch(
            f"{path} numbers the parameters of its optimizer, {[len(group) for group in members]} by group, and they "
            f"cannot be named: "
            + (f"there are {found} now" if present.groups else "resume from it in the loop itself"),
            shapes={"optimizer.0": ([len(group) for group in members], found)},
        )
    odd = []
    for numbers, group in zip(members, names, strict=True):
        for number, name in zip(numbers, group, strict=True):
            leaves = states.get(number, states.get(str(number))) or {}
            sizes = {leaves[leaf].shape for leaf in _LIKE_PARAMETER if isinstance(leaves.get(leaf), torch.Tensor)}
            if name in weights and sizes - {weights[name].shape}:
                odd.append(name)
    if odd:
        raise StateMismatch(
            f"{path} numbers the parameters of its optimizer, and the state does not fit those of {some(odd)}: make "
            "the optimizer of the same parameters in the same order as the run that saved it",
            shapes={f"optimizer.0.{name}": "another shape" for name in odd},
        )
    return names


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key
