"""Counting: where a run stands, in epochs, steps and samples. Pure; one a rank."""

from __future__ import annotations

from dataclasses import dataclass

from pimm_ray.elastic.plan import Position


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where the run stands. `samples_seen` counts over all ranks and epochs, repeats included."""

    epoch: int = 0
    iter_in_epoch: int = 0
    global_step: int = 0
    samples_seen: int = 0
    best_metric_value: float | None = None


@dataclass(kw_only=True)
class Progress:
    """Batches are handed over one by one and count only when their window's step is finished."""

    epoch: int = 0
    window: int = 0
    """Finished steps of this epoch."""
    step: int = 0
    batches: int = 0
    """Micro-batches of this epoch in finished steps, this rank."""
    best: float | None = None
    drops: int = 0
    """How often this epoch was restarted because its position was dropped."""
    handed_last: bool = False
    open_batches: int = 0
    open_samples: int = 0
    epoch_samples: int = 0
    """Samples of this epoch over all ranks, as of the last save; `own_epoch_samples` are this rank's since then."""
    total_samples: int = 0
    own_epoch_samples: int = 0
    own_total_samples: int = 0

    def hand_over(self, samples: int, *, last: bool) -> None:
        self.open_batches += 1
        self.open_samples += samples
        self.handed_last = last

    def commit(self) -> None:
        """A step is finished: the batches handed over since the one before are used up."""
        self.step += 1
        self.window += 1
        self.batches += self.open_batches
        self.own_epoch_samples += self.open_samples
        self.own_total_samples += self.open_samples
        self.open_batches = self.open_samples = 0

    def end_epoch(self) -> None:
        self.epoch += 1
        self.window = self.batches = self.drops = 0
        self.epoch_samples = self.own_epoch_samples = 0
        self.open_batches = self.open_samples = 0
        self.handed_last = False

    def absorb(self, epoch_samples: int, total_samples: int) -> None:
        """Take over the sums over all ranks of what each counted since the last save."""
        self.epoch_samples += epoch_samples
        self.total_samples += total_samples
        self.own_epoch_samples = self.own_total_samples = 0

    @property
    def at_last_batch(self) -> bool:
        """Whether a finished step has used the epoch's last batch."""
        return self.handed_last and not self.open_batches

    @property
    def idle(self) -> bool:
        """Whether this epoch has handed out no batch at all."""
        return not self.batches and not self.open_batches

    @property
    def within_epoch(self) -> bool:
        return self.window > 0 and not self.at_last_batch

    def position(self, epoch_samples: int) -> Position:
        """Of the next batch, `epoch_samples` being what all ranks used since the last save."""
        if self.within_epoch:
            return Position(epoch=self.epoch, samples=self.epoch_samples + epoch_samples, window=self.window)
        return Position(epoch=self.epoch + self.at_last_batch)

    def state(self, new_samples: int) -> TrainState:
        """`new_samples` being what all ranks used since the last save."""
        return TrainState(
            epoch=self.epoch + self.at_last_batch,
            iter_in_epoch=self.window if self.within_epoch else 0,
            global_step=self.step,
            samples_seen=self.total_samples + new_samples,
            best_metric_value=self.best,
        )
