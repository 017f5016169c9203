"""What a resumed run keeps: a pure decision from the saved and the present shape of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pimm_ray.elastic.windows import micro_batches
from pimm_ray.errors import DataChanged, WorldSizeError

ELASTIC = "elastic:"
"""How the `order_id` of a loader begins whose position serves any number of ranks."""

UNTOLD = "untold"
"""The `order_id` in a checkpoint of another program: it has the position of a `StatefulDataLoader`, but does not tell
of which data in which order. What it does not tell is taken to be as it is now."""

RESTART_STRIDE = 2**20
"""What a restarted epoch adds to the number that its sampler sees, for each restart."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a data position depends on. Sizes in samples; None where a loader cannot say.

    `global_batch` is the samples over all ranks of one step of an `ElasticLoader`, and of one micro-batch of another
    loader; `micro_batch` those of one rank. `order_id` says which loader and sampler give the order; None when the
    loader cannot tell or restore its position. `share`, with batch="per_rank", is what a step has for each rank; whole
    batches differ from it by rounding, which must not add up over several changes of the number of workers.
    """

    world_size: int
    loader_workers: int = 0
    global_batch: int | None = None
    micro_batch: int | None = None
    dataset_size: int | None = None
    order_id: str | None = None
    seed: int = 0
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the next batch comes from: `samples` consumed of `epoch`, over all ranks, by finished steps; `window` is
    how many steps that were."""

    epoch: int = 0
    samples: int = 0
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class ElasticPolicy:
    """What to do when a run comes back changed.

    Args:
        cursor: "auto" keeps the data position where that is exact and drops it otherwise; "drop" always restarts the
            epoch; "fail" raises instead of dropping.
        batch: of an `ElasticLoader`, when the number of workers changes: "global" keeps the global batch; "per_rank"
            keeps each rank's share, so that a step has more or fewer samples, and moves the schedule to the same
            fraction of its horizon.
        lr_scale: with batch="per_rank", what the learning rate does: "none", or follow the global batch "linear" or by
            its "sqrt".
        rng: "restore" continues each rank's random streams (new ranks get derived ones); "reseed" derives all anew.
        schedule: after a dropped position, replayed steps run past a scheduler's horizon: "hold" keeps its last
            learning rate, "extend" moves the horizon.
    """

    cursor: Literal["auto", "drop", "fail"] = "auto"
    batch: Literal["global", "per_rank"] = "global"
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    rng: Literal["restore", "reseed"] = "restore"
    schedule: Literal["hold", "extend"] = "hold"

    def __post_init__(self) -> None:
        allowed = {
            "cursor": ("auto", "drop", "fail"),
            "batch": ("global", "per_rank"),
            "lr_scale": ("none", "linear", "sqrt"),
            "rng": ("restore", "reseed"),
            "schedule": ("hold", "extend"),
        }
        if self.lr_scale != "none" and self.batch != "per_rank":
            raise ValueError(f"ElasticPolicy(lr_scale={self.lr_scale!r}) needs batch='per_rank': else no batch changes")
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"ElasticPolicy({name}={getattr(self, name)!r}): use one of {', '.join(values)}")


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """What a resume did. `cursor`: "start" (an epoch's first batch), "kept" or "dropped"; `samples_repeated` are the
    samples over all ranks that come a second time; `global_batch` in samples, when it had to change, and `lr_factor`
    what the learning rate was multiplied by; `exact`: whether the run is now the one that was never interrupted.
    """

    source: str = "fresh"
    step: int = 0
    epoch: int = 0
    cursor: Literal["start", "kept", "dropped"] = "start"
    reason: str = ""
    samples_repeated: int = 0
    rng: str = "untouched"
    accumulate: int | None = None
    global_batch: int | None = None
    lr_factor: float = 1.0
    schedule: str = "kept"
    exact: bool = False
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        """The plan in one line of key=value."""
        parts = [f"source={self.source}", f"step={self.step}", f"epoch={self.epoch}", f"cursor={self.cursor}"]
        if self.reason:
            parts.append(f'reason="{self.reason}"')
        if self.cursor == "dropped":
            parts.append(f"samples_repeated={self.samples_repeated}")
        parts += [f"rng={self.rng}", f"schedule={self.schedule}", f"exact={'yes' if self.exact else 'no'}"]
        if self.accumulate is not None:
            parts.append(f"accumulate={self.accumulate}")
        if self.global_batch is not None:
            parts.append(f"global_batch={self.global_batch} lr_factor={self.lr_factor:g}")
        parts += [f'note="{note}"' for note in self.notes]
        return " ".join(" ".join(parts).splitlines())


def plan_resume(saved: RunShape, now: RunShape, policy: ElasticPolicy, position: Position) -> ResumePlan:
    """Decide what a resumed run keeps. Pure; anyone may call it.

    Args:
        saved: the shape of the run that saved the checkpoint.
        now: the shape of this run.
        policy: the user's choice.
        position: where the checkpoint stands.

    Raises:
        WorldSizeError: `cursor="fail"` and the number of workers changed in mid-epoch.
        DataChanged: `cursor="fail"` and something else about the data changed in mid-epoch.

    Example:
        >>> plan_resume(RunShape(world_size=4, order_id="x"), RunShape(world_size=2, order_id="x"), ElasticPolicy(),
        ...             Position(epoch=1, samples=80, window=10)).cursor
        'dropped'
    """
    elastic = all((shape.order_id or "").startswith(ELASTIC) for shape in (saved, now))
    words = _ELASTIC_WORDS if elastic else _WORDS
    told, untold = saved, saved.order_id in (None, UNTOLD)
    if untold:
        saved = _completed(saved, now)
    changes = _changes(saved, now, words)
    reason = "; ".join(changes)
    global_batch, lr_factor, notes = None, 1.0, list[str]()
    share = share_of(saved)
    if elastic and policy.batch == "per_rank" and share and saved.global_batch:
        batch = min(max(1, round(share * now.world_size)), now.dataset_size or saved.global_batch)
        if not batch == saved.global_batch == now.global_batch:
            global_batch = batch
            lr_factor = (batch / saved.global_batch) ** {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[policy.lr_scale]
            given = "" if batch != saved.global_batch else f", not the {now.global_batch} that the loader was given"
            notes.append(f"global batch {saved.global_batch} -> {batch} (batch='per_rank'){given}")
        now = replace(now, global_batch=batch)
    elif saved.global_batch != now.global_batch and None not in (saved.global_batch, now.global_batch):
        notes.append(
            f"global batch {saved.global_batch} -> {now.global_batch} samples"
            + ("" if elastic else " (batch size x workers)")
            + ": set the batch size or accumulation so that it stays, or scale the learning rate"
        )
    cursor: Literal["start", "kept", "dropped"]
    # Batches of a kind that nobody can count make no samples, but a window that is over.
    counted = elastic or position.window == 0 or None in (told.order_id, now.order_id)
    if position.samples == 0 and counted:
        cursor = "start"
    elif policy.cursor == "drop":
        cursor, reason = "dropped", "; ".join([*changes, "ElasticPolicy(cursor='drop')"])
    elif untold and (now.order_id or "").startswith(ELASTIC):
        cursor, reason = "dropped", _NO_POSITION
    elif changes or now.order_id is None:
        cursor, reason = "dropped", reason or "the loader cannot restore its position within an epoch"
    elif told.order_id is None:
        cursor, reason = "dropped", _NO_POSITION
    else:
        cursor = "kept"
    if cursor == "dropped" and policy.cursor == "fail":
        kind = WorldSizeError if "world_size" in words and saved.world_size != now.world_size else DataChanged
        raise kind(
            f"cannot keep the data position ({reason}) and ElasticPolicy(cursor='fail') forbids to drop it: resume as "
            "the run was saved, or allow cursor='auto'"
        )
    if told.order_id == UNTOLD and cursor != "dropped":
        notes.append("data and order are not told by the checkpoint: taken to be those of now")
    others = _changes(saved, now, _WORDS) if elastic else []
    if others and cursor != "dropped":
        notes.append(f"{'; '.join(others)}: the same samples in each step, equal to rounding")
    new_ranks = range(saved.world_size, now.world_size)
    if policy.rng == "reseed":
        rng = "reseeded"
    elif new_ranks:
        rng = f"restored,new-ranks-{new_ranks[0]}-to-{new_ranks[-1]}-derived"
    else:
        rng = "restored"
    return ResumePlan(
        epoch=position.epoch,
        cursor=cursor,
        reason=reason,
        samples_repeated=position.samples if cursor == "dropped" else 0,
        rng=rng,
        schedule=policy.schedule if cursor == "dropped" else "kept",
        accumulate=_accumulate(now.global_batch, now) if elastic else None,
        global_batch=global_batch,
        lr_factor=lr_factor,
        exact=not changes and not _changes(told, now, _ALL_WORDS) and cursor != "dropped" and policy.rng == "restore",
        notes=tuple(notes),
    )


_NO_POSITION = "the checkpoint holds no position of this loader"


def _completed(saved: RunShape, now: RunShape) -> RunShape:
    """With the values of now where a loader, or another program, told nothing."""
    untold = {name: getattr(now, name) for name in _ALL_WORDS if getattr(saved, name) in (None, UNTOLD)}
    return replace(saved, **untold)


def share_of(shape: RunShape) -> float | None:
    """Samples of a step for each rank, as batch="per_rank" keeps it."""
    if shape.share is not None or shape.global_batch is None:
        return shape.share
    return shape.global_batch / shape.world_size


_ELASTIC_WORDS = {"dataset_size": "dataset length", "order_id": "order", "seed": "seed"}
_WORDS = {
    "world_size": "workers",
    "loader_workers": "loader workers",
    "micro_batch": "batch size",
    "dataset_size": "dataset length",
    "order_id": "order",
}
_ALL_WORDS = {**_WORDS, "global_batch": "global batch"}


def _accumulate(batch: int | None, now: RunShape) -> int | None:
    """Micro-batches of a step on each rank."""
    return None if batch is None else micro_batches(batch, now.world_size, now.micro_batch)


def _changes(saved: RunShape, now: RunShape, words: dict[str, str]) -> list[str]:
    return [
        f"{word} {before} -> {after}"
        for name, word in words.items()
        if (before := getattr(saved, name)) != (after := getattr(now, name))
    ]
