"""How an epoch is cut into windows, a window into ranks' shares, and a share into micro-batches. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tail = Literal["drop", "even", "carry"]


def near_equal(start: int, count: int, part: int, parts: int) -> tuple[int, int]:
    """Part number `part` of `parts` contiguous pieces of [start, start + count), whose sizes differ by at most 1."""
    size, rest = divmod(count, parts)
    low = start + part * size + min(part, rest)
    return low, low + size + (part < rest)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of one epoch from position `start` on. `length` and `batch` in samples over all ranks.

    `tail`: "drop" leaves out what does not fill a window; "even" delivers it as a shorter one; "carry" completes it
    from the next epoch, except in the run's `final` epoch, which ends as "even".
    """

    length: int
    start: int
    batch: int
    tail: Tail
    final: bool = False

    @property
    def count(self) -> int:
        left = max(0, self.length - self.start)
        return left // self.batch if self.tail == "drop" else -(-left // self.batch)

    def span(self, number: int) -> tuple[int, int]:
        """First position and samples of a window. With "carry" it may reach past `length`, into the next epoch."""
        first = self.start + number * self.batch
        wraps = self.tail == "carry" and not self.final
        return first, self.batch if wraps else min(self.batch, self.length - first)

    def after(self, number: int) -> tuple[int, int]:
        """Where the data stand when window `number` is used up: epochs gone on by (0 or 1), and the position."""
        if number + 1 < self.count:
            return 0, self.span(number + 1)[0]
        first, size = self.span(number)
        return 1, max(0, first + size - self.length) if self.tail == "carry" else 0


def micro_batches(size: int, world: int, limit: int | None) -> int:
    """How many micro-batches every rank cuts its share of a window of `size` samples into, none above `limit`."""
    share = -(-size // world)
    return 1 if limit is None else -(-share // limit)
