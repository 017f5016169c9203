"""What the manager knows of the world around it, and the world without Ray."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

from pimm_ray.checkpoint.find import CheckpointInfo, candidates
from pimm_ray.checkpoint.layout import CheckpointName
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.errors import PimmRayError, RunInUse, StorageError
from pimm_ray.runtime.lease import Lease, Pass
from pimm_ray.runtime.ranks import Ranks
from pimm_ray.runtime.sigterm import Sigterm

logger = logging.getLogger(__name__)

_TRIAL = ".trial-"
_TRIAL_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Notice:
    """All or a part of this job is about to be stopped. The same on every rank."""

    what: str
    """Who goes, for the log."""
    deadline: float | None
    """When, in UNIX seconds. None: as soon as the job has saved; it ends itself."""


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

    _lease: Lease | Pass | None = None
    """On rank 0, from `claim()` on."""

    def claim(self, size: int = 0) -> None:
        """Make this job the only one that writes into the run folder, and prove that it can. Every rank calls it.

        Args:
            size: bytes that a checkpoint has at least.

        Raises:
            RunInUse: another live job writes there.
            StorageError: a rank cannot write there, or there is no room for one checkpoint.
        """
        while not isinstance(
            name := self.exchange("resume: claim the run folder", None, lambda _: self._enter(size)), str
        ):
            time.sleep(name)
        trial = self.store.child(name)
        try:
            self.each("resume: trial write", lambda: self._try_to_write(trial))
        finally:
            if self.rank == 0:
                try:
                    trial.remove()
                except OSError as error:  # the next start tries again
                    logger.warning("cannot delete %s: %s", trial.path, error)

    def check_claim(self, attempt: int) -> None:
        """Rank 0, before a commit of this attempt: another job may have taken over while this one was thought dead.

        Raises:
            RunInUse: it has.
        """
        if self._lease is None:
            return
        self._lease.check()
        for name in candidates(self.store)[:1]:
            found = CheckpointName.parse(name)
            if found is not None and found.attempt > attempt:
                raise RunInUse(
                    f"another job took over {self.store.path}: it made {name} while this one is at attempt {attempt}. "
                    "This one must stop; the other one goes on",
                    path=self.store.path,
                )

    def release(self) -> None:
        """Give the run folder free at once. Every rank calls it, at the end."""
        if self._lease is not None:
            self._lease.release()

    def _make_lease(self) -> Lease | Pass:
        return Lease(self.store)

    def _enter(self, size: int) -> str | float:
        """Rank 0: the name of a new folder for the trial, or how many seconds to wait before asking again."""
        if self._lease is None:
            self._lease = self._make_lease()
            weakref.finalize(self, self._lease.release)  # also at the end of the interpreter
        try:
            self.store.make()
            if pause := self._lease.poll():
                return pause
            for name in self.store.folders():
                if name.startswith(_TRIAL):  # of a start that was killed
                    self.store.child(name).remove()
            trial = f"{_TRIAL}{secrets.token_hex(4)}"
            self.store.child(trial).make()
        except OSError as error:
            raise self._unwritable(error) from error
        if isinstance(self.store, LocalStore):
            disk = os.statvfs(self.store.real(""))
            free = disk.f_bavail * disk.f_frsize
            if disk.f_blocks and free < size:
                raise StorageError(
                    f"{self.store.path} has no room for one checkpoint: {free} bytes are free and the model alone has "
                    f"{size}. Delete something there, or use another storage"
                )
        return trial

    def _try_to_write(self, trial: Store) -> None:
        try:
            trial.write(f"{self.rank:05}", [os.urandom(_TRIAL_BYTES)])
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StorageError:
        if isinstance(error.__cause__ or error, FileNotFoundError):
            why = "what rank 0 has just made there is not to be found: is the storage shared by all nodes?"
        else:
            why = (
                f"{error}. Look whether it is a folder or bucket, at its permissions, free space and quota, or use "
                "another storage"
            )
        found = StorageError(f"rank {self.rank} cannot write into the run folder {self.store.path}: {why}")
        found.rank = self.rank
        return found

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

    def follow(self, progress: Any) -> None:
        """From now on, `progress.step` says how far the loop is. Every rank calls it."""

    def listen(self) -> None:
        """From now on, notices count. Every rank calls it."""

    def deafen(self) -> None:
        """From now on, they do not. Every rank calls it."""

    def pending(self) -> bool | None:
        """Whether there is a notice; None: rank 0, which asks after each step, cannot know it alone."""
        return False

    def notice(self) -> Notice | None:
        """The notice that there is. Every rank calls it."""
        return None


class LocalRuntime(Runtime):
    """Plain `python` (one rank) or `torchrun` (torch.distributed is initialised)."""

    def __init__(self, storage: Any, *, timeout: float):
        super().__init__(timeout=timeout)
        self.store = open_store(storage)
        self._sigterm = Sigterm()
        weakref.finalize(self, self._sigterm.restore)

    def listen(self) -> None:
        self._sigterm.install()

    def deafen(self) -> None:
        self._sigterm.restore()

    def pending(self) -> bool | None:
        return self._sigterm.seen or (None if self.world_size > 1 else False)

    def notice(self) -> Notice | None:
        told = [rank for rank, seen in enumerate(self.gather("notice", self._sigterm.seen)) if seen]
        return Notice(what=f"SIGTERM ranks={','.join(map(str, told))}", deadline=None) if told else None


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
