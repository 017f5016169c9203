"""Schedules keep rates by the number of a parameter group; a resumed optimizer may have its groups in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_BY_GROUP = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "base_momentums", "max_momentums")


def load_by_group(scheduler: Any, load: Callable[[], Any], matches: Callable[[Any], Sequence[int | None]]) -> None:
    """`load` a schedule's state, then give each group what the schedule had for that group.

    `matches(optimizer)` names for each group the saved group that it goes on from; None for a new one, which keeps what
    the schedule was made with.
    """
    before = [_lists(part) for part in _parts(scheduler)]
    load()
    for part, old in zip(_parts(scheduler), before, strict=True):
        homes = matches(getattr(part, "optimizer", None))
        for name, loaded in _lists(part).items():
            now = old.get(name, loaded)
            if len(now) == len(homes) and list(homes) != [*range(len(loaded))]:
                mine = [loaded[home] if home is not None else now[i] for i, home in enumerate(homes)]
                setattr(part, name, mine)


def _parts(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _lists(part: Any) -> dict[str, list[Any]]:
    return {name: value for name in _BY_GROUP if isinstance(value := getattr(part, name, None), list)}
