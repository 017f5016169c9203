"""One job at a time in a run folder: a small file that its holder renews, and that a dead holder loses."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from pimm_ray.checkpoint.store import LocalStore, Store
from pimm_ray.errors import RunInUse
from pimm_ray.runtime.lease_file import NAME, File, Holder, LocalFile

T = TypeVar("T")
logger = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds from one beat to the next."""
_WATCHED_BEATS = 3
_STALE = 300.0
_GOODBYE = 2.0

_lock = threading.Lock()
"""Nothing comes between the look at a lease file and the write that follows, in this process."""


class Lease:
    """A hold on a run folder, renewed by a thread of its own, given free by `release()` or the death of the process.

    Args:
        store: the run folder, which must exist when `poll()` is called.
        owner: who holds it, where several processes act for one owner, one after the other. None: this object alone.
    """

    def __init__(self, store: Store, owner: str | None = None):
        self.owner = owner or secrets.token_hex(8)
        self._file = LocalFile(store) if isinstance(store, LocalStore) else File(store)
        self._term, self._since = 0, 0.0
        self._watched: tuple[bytes, float] | None = None
        self._stop, self._thread, self._pid = threading.Event(), threading.Thread(), 0

    def acquire(self) -> None:
        """Take the lease, waiting where a holder elsewhere may be dead.

        Raises:
            RunInUse: somebody else holds it and lives.
        """
        while pause := self.poll():
            time.sleep(pause)

    def poll(self) -> float:
        """Take the lease and return 0, or return how many seconds to wait before the next look.

        Raises:
            RunInUse: somebody else holds it and lives.
        """
        pause, lost = self._patiently(self._poll)
        if not pause:
            self._start()
            if lost:
                logger.info("took over %s: its holder (%s", self._file.store.path, lost)
        return pause

    def check(self) -> None:
        """Make sure that the lease is still held. A file that was deleted by hand is written anew.

        Raises:
            RunInUse: another job took over.
            StorageError: the storage fails.
        """
        if self._patiently(self._write_if_gone):
            self._start()

    def _patiently(self, work: Callable[[], T]) -> T:
        with _lock:
            return self._file.store._try("hold", NAME, work)

    def _poll(self) -> tuple[float, str]:
        """How long to wait, and who has lost the lease to this one and why."""
        data = self._file.read()
        holder, lost = Holder.parse(data), ""
        if holder is not None and holder.owner != self.owner and not holder.is_this_process:
            alive = holder.alive
            if alive:
                raise self._refusal(holder)
            if alive is None and (pause := self._watch(data or b"", holder)):
                return pause, ""
            lost = f"{holder}) " + ("is dead" if alive is False else "has given no sign of life")
        self._watched, self._since = None, time.time()
        self._term = max(int(1000 * self._since), holder.term + 1 if holder else 0)
        taken = self._file.take(self._record(), data)
        return (0.0, lost) if taken else (0.05, "")  # somebody else was as quick: look who

    def _write_if_gone(self) -> bool:
        holder = self._read()
        if holder is not None and self._ours(holder):
            if not holder.is_this_process and holder.alive:  # this is a forked copy of its holder
                raise self._refusal(holder)
            return False
        if holder is not None and self._lost(holder):
            raise superseded(self._file.store, holder)
        logger.warning(
            "the hold on %s is gone: it was deleted by hand, or the run folder was moved or deleted. What is saved "
            "next goes there all the same", self._file.store.path,
        )  # fmt: skip
        self._file.store.make()
        self._file.write(self._record())
        return True

    def release(self) -> None:
        """Give the lease free; when this returns the next job can have it, unless the storage hangs. Never raises.

        A forked copy has nothing to give.
        """
        if self._pid == os.getpid():
            self._stop.set()
            if self._thread is not threading.current_thread():  # the garbage collector may call from anywhere
                self._thread.join(_GOODBYE)

    def _watch(self, data: bytes, holder: Holder) -> float:
        """Seconds to go on watching a holder whose process cannot be seen; 0 when it must be dead."""
        limit, now = _WATCHED_BEATS * holder.every, time.monotonic()
        if self._watched is None:
            age = self._file.age(self.owner)
            if age is not None and age > _STALE:
                return 0.0
            logger.info("%s is held by %s: watching for %g s if it lives", self._file.store.path, holder, limit)
            self._watched = data, now
        if data != self._watched[0]:
            self._watched = None
            raise self._refusal(holder)
        return max(0.0, min(1.0, limit / 10, limit - (now - self._watched[1])))

    def _refusal(self, holder: Holder) -> RunInUse:
        return RunInUse(
            f"{self._file.store.path} is in use by {holder}. End that process, or give this run another name "
            "or storage. A dead process holds nothing: the same command then passes (on another machine within "
            f"{_WATCHED_BEATS * EVERY:g} s)",
            path=self._file.store.path,
            host=holder.host,
            pid=holder.pid,
        )

    def _record(self) -> bytes:
        holder = Holder.here(owner=self.owner, term=self._term, since=self._since, every=EVERY)
        return json.dumps(asdict(holder)).encode()

    def _read(self) -> Holder | None:
        return Holder.parse(self._file.read())

    def _ours(self, holder: Holder | None) -> bool:
        return holder is not None and (holder.owner, holder.term) == (self.owner, self._term)

    def _lost(self, holder: Holder | None) -> bool:
        # A lower term is the late write of one that was superseded itself.
        return holder is not None and not self._ours(holder) and holder.term >= self._term

    def _start(self) -> None:
        """Begin to renew, also in a forked copy that goes on when the process which held the lease has ended."""
        if self._pid == os.getpid() and self._thread.is_alive() and not self._stop.is_set():
            return
        self._stop, self._pid = threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._renew, args=(self._stop,), name="pimm_ray lease", daemon=True)
        self._thread.start()

    def _renew(self, stop: threading.Event) -> None:
        said = False
        while not stop.wait(EVERY):
            try:
                with _lock:
                    holder = self._read()
                    if self._lost(holder):
                        break
                    self._file.write(self._record())
            except Exception as error:  # training does not depend on one beat
                if not said:
                    logger.warning("cannot renew the hold on %s: %s; still trying", self._file.store.path, error)
                said = True
        else:
            holder = None
            with contextlib.suppress(Exception), _lock:
                if self._ours(self._read()):
                    self._file.delete()
        if holder is not None and not holder.is_this_process:
            logger.error("%s: this run will stop at its next save", superseded(self._file.store, holder))


class Pass:
    """For a process that acts for the holder of a lease, such as a worker for its driver: only looks."""

    def __init__(self, store: Store, owner: str):
        self.owner, self._file = owner, File(store)

    def poll(self) -> float:
        """As `Lease.poll`; the lease is there or was deleted by hand, and its holder renews it."""
        self.check()
        return 0.0

    def check(self) -> None:
        """As `Lease.check`, but writes nothing."""
        holder = Holder.parse(self._file.store._try("look at", NAME, self._file.read))
        if holder is not None and holder.owner != self.owner:
            raise superseded(self._file.store, holder)

    def release(self) -> None:
        """Nothing is held."""


def superseded(store: Store, holder: Holder) -> RunInUse:
    """The error of a run whose folder another one has taken over."""
    who = "another CheckpointManager of this process" if holder.is_this_process else "another job"
    return RunInUse(
        f"{who} took over {store.path}: {holder}. This one must stop; what it has saved is there, and the other one "
        "goes on from it",
        path=store.path,
        host=holder.host,
        pid=holder.pid,
    )


def _forget() -> None:
    """In a forked child: the thread that may have locked it is the parent's."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
