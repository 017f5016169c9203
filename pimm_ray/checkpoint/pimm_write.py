"""A checkpoint of ours written as pimm writes its own, so that pimm's loader takes it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from pimm_ray.checkpoint.codec import encode
from pimm_ray.checkpoint.legacy import dump_pickle, save_dcp, save_file
from pimm_ray.checkpoint.pimm import MARKER, TRAINER, WEIGHTS
from pimm_ray.checkpoint.pimm_read import CURSOR, OURS, SCHEMA, VERSION
from pimm_ray.checkpoint.schema import State
from pimm_ray.checkpoint.state import Snapshot
from pimm_ray.checkpoint.store import open_store
from pimm_ray.errors import StateMismatch

_NO_CURSOR = "pimm.dataloader_state.unsupported.v1"


def write(path: str, head: Mapping[str, Any], snapshot: Snapshot, ranks: list[dict[str, Any]]) -> list[str]:
    """Make the folder `path`, as pimm's `model/last` is; nobody sees it before it is whole. Returns what pimm's format
    has no place for.

    Args:
        path: local, and not there yet.
        head: the entries of `state.json` beside the state itself.
        ranks: what each rank stored of its own.

    Raises:
        StateMismatch: several optimizers or schedulers, where pimm has one.
        OSError: it cannot be written; nothing is left behind.
    """
    state = State(snapshot.document, snapshot.trainer, snapshot.tensors)
    for kind, items in (("optimizers", state.optimizers), ("schedulers", state.schedulers)):
        if len(items) > 1:
            raise StateMismatch(f"the checkpoint has {len(items)} {kind}, and pimm's format has place for one")
    partial = f"{path}.partial-{secrets.token_hex(4)}"
    try:
        os.makedirs(partial)
        weights = {**snapshot.weights, **{name: snapshot.weights[first] for name, first in state.aliases.items()}}
        save_file({"state_dict": {**weights, **state.extra_state}}, f"{partial}/{WEIGHTS}")
        save_dcp(_payload(head, state, ranks), f"{partial}/{TRAINER}")
        for folder in (f"{partial}/{TRAINER}", partial):
            open_store(folder).publish(MARKER, b"ok\n")
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    notes = [f"pimm's format has no place for {name}: left out" for name in ("ema", "extra") if getattr(state, name)]
    if head["position"]["window"] and not _has_cursors(ranks):
        notes.append(f"no position that pimm can use: its run restarts epoch {head['epoch']}")
    return notes


def _payload(head: Mapping[str, Any], state: State, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """All that pimm's payload of version 3 has, without the model."""
    shape, trainer, world = head["shape"], head["trainer"], len(ranks)
    told = _has_cursors(ranks)
    kind = (shape["order_id"] or "DataLoader").partition("/")[0]
    cursors = [
        {"format": CURSOR, "state": dump_pickle(own["loader"])} if told else {"format": _NO_CURSOR, "loader_type": kind}
        for own in ranks
    ]
    optimizer = state.optimizers[0] if state.optimizers else {"state": {}, "groups": [], "class": None, "global": {}}
    scheduler = state.schedulers[0] if state.schedulers else {"state": {}, "class": None}
    best = trainer["best_metric_value"]
    wandb = head["loggers"].get("wandb", {})
    exact = {
        "scheduler": {"state_dict": scheduler["state"], "class": scheduler["class"]},
        "scaler": {"enabled": state.scaler is not None, "state_dict": state.scaler or {}},
    }
    tensors: dict[str, torch.Tensor] = {}
    ours = encode({"head": dict(head), "ranks": ranks, "payload": exact}, OURS, tensors)
    return {
        **exact,
        "schema": SCHEMA,
        "version": VERSION,
        "checkpoint_version": VERSION,
        "optimizer": {
            "state_dict": {"state": {**optimizer["state"], **optimizer["global"]}, "param_groups": optimizer["groups"]},
            "class": optimizer["class"],
            "format": "torch.distributed.checkpoint.state_dict",
        },
        "scheduler": {**exact["scheduler"], "total_steps": scheduler["state"].get("total_steps")},
        "dataloader": {
            "backend": kind,
            # A process that is alone has its state as it is, or in a list of one.
            "state": {
                "_pimm_distributed_state": True,
                "world_size": world,
                "states": cursors,
                **(cursors[0] if world == 1 else {}),
            },
            "world_size": world,
            "batch_size_per_rank": shape["micro_batch"],
            "num_workers": shape["loader_workers"],
            "drop_last": None,
        },
        "rng": {
            "world_size": world,
            "state": {"world_size": world, "states": [_streams(own["rng"]) for own in ranks]},
        },
        "trainer": {
            "epoch": trainer["epoch"],
            "iter_in_epoch": ranks[0]["batches"] if told else 0,
            "global_step": trainer["global_step"],
            "samples_seen": trainer["samples_seen"],
            "best_metric_value": -float("inf") if best is None else best,
        },
        "logger": {
            "backend": "wandb" if wandb else "tensorboard",
            "wandb": {
                "run_id": wandb.get("run_id"),
                "run_name": wandb.get("name"),
                **{key: wandb.get(key) for key in ("entity", "project", "group", "job_type")},
                "resume": "allow" if wandb else None,
                "next_step": wandb.get("step"),
                "step_metric": "train/global_step",
                "step_offset": 0,
                "checkpoint_global_step": trainer["global_step"],
            },
        },
        "distributed": {"world_size": world, "backend": None, "rank_order": list(range(world))},
        OURS: {"document": json.dumps(ours), "tensors": tensors},
    }


def _has_cursors(ranks: list[dict[str, Any]]) -> bool:
    """Whether each rank has a position of a StatefulDataLoader, the only kind that pimm can use."""
    loaders = [own["loader"] for own in ranks]
    return all(isinstance(state, dict) and not str(state.get("kind", "")).startswith(OURS) for state in loaders)


def _streams(state: Mapping[str, Any]) -> dict[str, Any]:
    numpy = state["numpy"]
    return {
        "python": state["python"],
        "numpy": (
            numpy["bit_generator"],
            numpy["state"]["key"],
            numpy["state"]["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ),
        "torch": state["torch"],
        **({} if state["cuda"] is None else {"torch_cuda": [state["cuda"]]}),
    }
