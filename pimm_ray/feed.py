"""Where batches and random draws come from, and where they stand: a loader's position and the streams, in step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pimm_ray.elastic import rng
from pimm_ray.elastic.cursor import cursor_for
from pimm_ray.elastic.plan import Position
from pimm_ray.progress import Progress

logger = logging.getLogger(__name__)


class Feed:
    """The loader and the random streams of one rank. Progress is counted elsewhere."""

    def __init__(self, loader: Any):
        self.cursor = cursor_for(loader)
        self._kept: Any = None
        """Loader state of a resume in mid-epoch, until the loop asks for the epoch's batches."""
        self._epoch_streams: dict[str, Any] | None = None
        """The streams as they were when this epoch's iterator was made."""
        self._resumed_streams: dict[str, Any] | None = None
        """Where the streams go on from after a resume, until the loop draws."""

    def saved(self, progress: Progress) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        within, cursor = progress.within_epoch, self.cursor
        kept = None if cursor.global_position else self._kept
        return {
            # Between a resume and the first batch neither streams nor loader are where the run goes on from.
            "rng": self._resumed_streams or rng.capture(cursor.generators),
            "epoch_rng": self._epoch_streams if within else None,
            "loader": (kept or cursor.state()) if within or cursor.global_position else None,
            "batches": progress.batches if within else 0,
        }

    def restore_streams(self, own: dict[str, Any]) -> None:
        """Continue the streams of a rank that was there."""
        self._resumed_streams = own["rng"]
        rng.restore(own["rng"], self.cursor.generators)

    def derive_streams(self, other: dict[str, Any], seed: int, rank: int, generation: int) -> None:
        """Start the streams of a rank that is new; its loader's generators go on as those of an `other` rank."""
        rng.derive(seed, rank, generation)
        rng.restore_generators(other["rng"], self.cursor.generators)
        self._resumed_streams = rng.capture(self.cursor.generators)

    def keep_position(self, own: dict[str, Any], parts: list[dict[str, Any]], position: Position) -> None:
        """Go on in mid-epoch. `parts`: of all ranks that saved, for a loader whose position is one of all ranks."""
        if self.cursor.global_position:
            states = [part["loader"] for part in parts]
            self.cursor.loader.load_state_dicts(states)
            self._kept = states if position.window else None
        else:
            self._kept, self._epoch_streams = own["loader"], own["epoch_rng"]

    @property
    def in_mid_epoch(self) -> bool:
        """Whether a resume waits for the loop to ask for the rest of an epoch."""
        return self._kept is not None

    def settle(self) -> None:
        """Put the streams where the checkpoint had them, once, at the last moment before the loop draws from them."""
        if self._resumed_streams is not None:
            rng.restore(self._resumed_streams, self.cursor.generators)
        self._resumed_streams = None

    def begin(self, progress: Progress, seed: int, *, final: bool, say: bool) -> Iterator[tuple[Any, int, bool]]:
        """The batches of the epoch, each with its samples on this rank and whether it is the last. `final`: the epoch
        is the run's last; `say`: warn of an order that could not be changed."""
        cursor, kept = self.cursor, self._kept
        self._kept = None
        if kept is None:
            self.settle()
        elif self._epoch_streams is not None:
            # The iterator is made in the streams that the saved run made it in, because samplers draw their order
            # then; only afterwards do the streams move on to where the save caught them.
            rng.restore(self._epoch_streams, cursor.generators)
        reordered = cursor.set_epoch(progress.epoch, progress.drops, seed, final=final)
        if say and progress.drops and not reordered:
            logger.warning(
                "epoch %d restarts in the same order: its sampler has neither set_epoch() nor a generator",
                progress.epoch,
            )
        if kept is None:
            self._epoch_streams = rng.capture(cursor.generators)
        iterator = cursor.iterate(kept, consumed=progress.batches, begun=progress.epoch > 0)
        self.settle()
        return cursor.hand_out(iterator, progress.batches)

    def commit(self) -> None:
        """A step is finished."""
        self.cursor.commit()
        self._resumed_streams = None

    def end(self, next_epoch: int, seed: int) -> None:
        """The epoch is over, at its end or before it."""
        self._kept = self._epoch_streams = None
        if self.cursor.global_position:
            self.cursor.set_epoch(next_epoch, 0, seed)
