"""How many workers the nodes of a cluster hold, and which nodes not to count on. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

Resources = Mapping[str, float]
Answer = Literal["yes", "dead", "silent"]
"""What a node's last worker said: it answers; its process is gone; nothing came within the time it was given."""


def fitting(nodes: Iterable[Resources], need: Resources) -> int:
    """How many workers fit, each whole on one node. Not for workers that need nothing."""
    wanted = {name: amount for name, amount in need.items() if amount > 0}
    return sum(
        math.floor(min(node.get(name, 0.0) / amount for name, amount in wanted.items()) + 1e-9) for node in nodes
    )


def possible_workers(
    need: Resources, reserved: Mapping[str, Resources], free: Mapping[str, Resources], gone: set[str], most: int
) -> int:
    """How many workers can start now.

    Args:
        need: of one worker.
        reserved: by node: what the cluster keeps for this run.
        free: by node: what nobody uses. It stands in for what is reserved on nodes that are gone.
        gone: nodes that are lost or about to be.
        most: the largest number wanted.
    """
    if not any(need.values()):
        return most
    kept = fitting((amounts for node, amounts in reserved.items() if node not in gone), need)
    lost = fitting((amounts for node, amounts in reserved.items() if node in gone), need)
    spare = fitting((amounts for node, amounts in free.items() if node not in gone and node not in reserved), need)
    return min(most, kept + min(lost, spare))


def unresponsive(answers: Mapping[str, set[Answer]], refused: set[str]) -> set[str]:
    """Nodes that seem lost although the cluster still lists them.

    A worker whose process died says nothing of its node: others of that process's kind die of a bug or of memory. A
    node that refuses connections is lost, unless a refusing node's worker answers: then a firewall refuses.

    Args:
        answers: by node, of the workers that ran there.
        refused: nodes whose Ray takes no connection.
    """
    silent = {node for node, said in answers.items() if "silent" in said and "yes" not in said}
    answering = {node for node, said in answers.items() if "yes" in said}
    return silent if refused & answering else silent | refused


class Commits:
    """Notices when Ray puts a checkpoint on record: at the poll at which the last rank hands in that report."""

    def __init__(self, ranks: int):
        self._handed_in = [0] * ranks
        self._with_checkpoint: set[int] = set()

    def add(self, reports: Mapping[int, bool]) -> bool:
        """Take one poll: by rank that handed in a report, whether it has a checkpoint. True when one was committed."""
        for rank, has_checkpoint in reports.items():
            if has_checkpoint:
                self._with_checkpoint.add(self._handed_in[rank])
            self._handed_in[rank] += 1
        done = {number for number in self._with_checkpoint if number < min(self._handed_in)}
        self._with_checkpoint -= done
        return bool(done)
