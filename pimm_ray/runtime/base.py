"""What the manager knows of the world around it, and the world without Ray."""

from __future__ import annotations

import logging
import sys
from typing import Any

from pimm_ray.checkpoint.find import CheckpointInfo
from pimm_ray.checkpoint.store import Store, open_store
from pimm_ray.errors import PimmRayError
from pimm_ray.runtime.ranks import Ranks


class Runtime(Ranks):
    """Ranks, the run folder, and whoever wants to hear of checkpoints. Made by every rank."""

    store: Store
    """The run folder; the same on every rank."""
    given_checkpoint: Any = None
    """What the user asked to resume from when the run has nothing of its own: path, URI or ray.train.Checkpoint."""
    report_spacing: float = 0.0
    """Seconds between two reports so that none waits for the one before; 0 where reports go nowhere."""
    retains: bool = False
    """Whether somebody else deletes old checkpoints. Then a folder that `known` names is theirs to delete."""

    def claim(self) -> None:
        """Make this job the only one that writes into the run folder, and prove that it can. Every rank calls it."""

    def check_claim(self) -> None:
        """Rank 0, before a commit: another job may have taken over while this one was thought dead."""

    def release(self) -> None:
        """Give the run folder free at once. Every rank calls it, at the end."""

    def known(self) -> set[str]:
        """Names of the checkpoint folders that have been reported and are still held. Rank 0 calls it."""
        return set()

    def report(self, metrics: dict[str, Any], checkpoint: CheckpointInfo | None) -> None:
        """Tell of plain-number metrics and of a committed checkpoint. Every rank calls it, with the same checkpoint."""

    def save_wanted(self) -> bool:
        """Whether somebody outside waits for a save. Rank 0 asks after each step."""
        return False

    def hold(self) -> None:
        """Rank 0, with the save that was wanted complete: let whoever waits for it go on."""

    def settle(self) -> None:
        """Wait until all that was reported is on record. Every rank calls it."""


class LocalRuntime(Runtime):
    """Plain `python` (one rank) or `torchrun` (torch.distributed is initialised)."""

    def __init__(self, storage: Any, *, timeout: float):
        super().__init__(timeout=timeout)
        self.store = open_store(storage)


def make_runtime(storage: Any, *, timeout: float) -> Runtime:
    """The runtime this process is in: a Ray Train worker, or the local one on `storage`. Every rank calls it.

    Raises:
        PimmRayError: outside Ray and no storage given, or storage given inside Ray.
    """
    show_messages()
    if "ray.train" in sys.modules:
        from pimm_ray.runtime.worker import RayRuntime, in_train_worker

        if in_train_worker():
            if storage is not None:
                raise PimmRayError(
                    "storage= has no place in a Ray worker: Ray's RunConfig(storage_path=..., name=...) says where "
                    "checkpoints go; remove storage="
                )
            return RayRuntime(timeout=timeout)
    if storage is None:
        raise PimmRayError('outside Ray Train, give the run folder: CheckpointManager(..., storage="runs/demo")')
    return LocalRuntime(storage, timeout=timeout)


def show_messages() -> None:
    """Print this package's one-line messages to stderr when nobody has set up logging in this process."""
    package = logging.getLogger("pimm_ray")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # Falls silent when the user sets up logging later: no line comes twice.
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    package.addHandler(handler)
    package.setLevel(logging.INFO)
