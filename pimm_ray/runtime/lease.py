"""One job at a time in a run folder: a small file that its holder renews, and that a dead holder loses."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from pimm_ray.checkpoint.store import LocalStore, Store
from pimm_ray.errors import RunInUse, StorageError

T = TypeVar("T")
logger = logging.getLogger(__name__)

NAME = ".lease"
EVERY = 10.0
"""Seconds from one beat to the next."""
_WATCHED_BEATS = 3
_STALE = 300.0
_SETTLE = 0.3
_VISIBLE_WITHIN = 10.0
_LIMIT = 4096
_GOODBYE = 2.0
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

_lock = threading.Lock()
"""Nothing comes between the look at a lease file and the write that follows, in this process."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What a lease file says. `term` grows with each new holder; `since` and `beat` are seconds since 1970 by the
    holder's clock, `every` the seconds between beats, `started` when its process began, in the kernel's ticks."""

    owner: str
    term: int
    host: str
    pid: int
    started: int
    since: float
    beat: float
    every: float

    @staticmethod
    def parse(data: bytes | None) -> Holder | None:
        """None for a file that is torn or not ours: nobody holds it."""
        try:
            holder = Holder(**json.loads(data or b""))
            whole = all(type(n) is int and 0 < n < 2**63 for n in (holder.term, holder.pid, 1 + holder.started))
            times = all(0 <= t < 1e11 for t in (holder.since, holder.beat)) and 0 < holder.every <= 60
        except (ValueError, TypeError, RecursionError):
            return None
        return holder if whole and times and isinstance(holder.owner, str) and isinstance(holder.host, str) else None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host.rsplit('/', 1)[-1]}, since {since}"

    @property
    def is_this_process(self) -> bool:
        return (self.host, self.pid, self.started) == (_host(), os.getpid(), _process(os.getpid())[1])

    @property
    def alive(self) -> bool | None:
        """Whether its process lives; None when that cannot be seen from here."""
        if self.host != _host():
            return None
        try:
            state, started = _process(self.pid)
        except OSError:  # gone, or hidden from us
            try:
                os.kill(self.pid, 0)
            except (ProcessLookupError, OverflowError):
                return False
            except PermissionError:
                pass
            return None
        # A process id is given out again: the same number with another start is somebody else.
        return state not in "ZX" and started == self.started


class Lease:
    """A hold on a run folder, renewed by a thread of its own, given free by `release()` or the death of the process.

    Args:
        store: the run folder, which must exist when `poll()` is called.
        owner: who holds it, where several processes act for one owner, one after the other. None: this object alone.
    """

    def __init__(self, store: Store, owner: str | None = None):
        self.owner = owner or secrets.token_hex(8)
        self._file = _LocalFile(store) if isinstance(store, LocalStore) else _File(store)
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
        if self._ours(holder):
            return False
        if holder is not None and self._lost(holder):
            raise superseded(self._file.store, holder)
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
        now, pid = time.time(), os.getpid()
        holder = Holder(
            owner=self.owner,
            term=self._term,
            host=_host(),
            pid=pid,
            started=_process(pid)[1],
            since=self._since,
            beat=now,
            every=EVERY,
        )
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
        self.owner, self._file = owner, _File(store)

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


class _File:
    """The lease file of a run folder, on any storage. Nothing is tried again here."""

    def __init__(self, store: Store):
        self.store = store

    def read(self) -> bytes | None:
        try:
            with self.store.filesystem.open_input_file(self.store.full(NAME)) as file:
                return bytes(file.read(_LIMIT))
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        self.store._write(NAME, [data])

    def take(self, data: bytes, seen: bytes | None) -> bool:
        """Replace what was seen there; False when somebody else was quicker.

        Object stores cannot do this in one go. Of two that write at once the last one has it; the other finds out here
        or, at the latest, before its first commit.
        """
        self.write(data)
        deadline = time.monotonic() + _VISIBLE_WITHIN
        while time.monotonic() < deadline:
            time.sleep(_SETTLE)
            if (found := self.read()) != seen:
                return found == data
        raise StorageError(
            f"{self.store.full(NAME)} is not to be seen {_VISIBLE_WITHIN:g} s after it was written: nobody can hold "
            "this run folder. Use a storage that shows what was written to it, or look whether this one is well"
        )

    def delete(self) -> None:
        self.store._delete_file(NAME)

    def age(self, token: str) -> float | None:
        """Seconds since it was written, by the clock of the storage: those of two hosts may differ."""
        probe = f"{NAME}.{token}"
        self.store._write(probe, [b"now"])
        try:
            paths = [self.store.full(NAME), self.store.full(probe)]
            then, now = (info.mtime_ns for info in self.store.filesystem.get_file_info(paths))
        finally:
            with contextlib.suppress(FileNotFoundError):
                self.store._delete_file(probe)
        return None if then is None or now is None else (now - then) / 1e9


class _LocalFile(_File):
    """On a POSIX filesystem: taken by exactly one. Nothing is synced to disk: a lease need not survive a power cut."""

    def __init__(self, store: LocalStore):
        super().__init__(store)
        self._path = store.real(NAME)

    def read(self) -> bytes | None:
        try:
            return self._look(self._path)
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        staged = self._stage(data)
        self.store._event("rename", self._path)
        os.replace(staged, self._path)

    def take(self, data: bytes, seen: bytes | None) -> bool:
        staged = self._stage(data)
        moved = f"{staged}.old"
        try:
            if seen is not None:
                self.store._event("rename", moved)
                os.rename(self._path, moved)
                if self._look(moved) != seen:  # it is the lease of somebody quicker: put it back
                    self._link(moved)
                    return False
            self._link(staged)
        except (FileExistsError, FileNotFoundError):
            return False
        finally:
            self._unlink(staged)
            self._unlink(moved)
        self._sweep()
        return True

    @staticmethod
    def _look(path: str) -> bytes:
        flags = os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in its place must not keep us waiting
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            return file.read(_LIMIT) or b""

    def _stage(self, data: bytes) -> str:
        path = f"{self._path}.{secrets.token_hex(4)}.tmp"
        self.store._event("create", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            self.store._event("write", path)
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
        return path

    def _link(self, path: str) -> None:
        self.store._event("link", self._path)
        try:
            os.link(path, self._path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(path, self._path)  # where there are no hard links, the last one has it

    def _unlink(self, path: str) -> None:
        if os.path.exists(path):
            self.store._event("unlink", path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _sweep(self) -> None:
        """Remove what those left who were killed in the middle. Who lives and finds his gone looks again."""
        folder = os.path.dirname(self._path)
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if name.startswith(f"{NAME}."):
                with contextlib.suppress(FileNotFoundError):
                    holder = Holder.parse(self._look(path))
                    if holder is None or not holder.alive:
                        self._unlink(path)


@functools.cache
def _host() -> str:
    """This machine as far as process ids go: equal in two processes exactly when each can see if the other lives."""
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}/{name}"
    except OSError:
        return f"{secrets.token_hex(8)}/{name}"  # equal to no other


def _process(pid: int) -> tuple[str, int]:
    """State and start of a process, the start in ticks since the machine came up."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the command, may hold spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        if pid == os.getpid():
            return "R", 0
        raise
    return fields[0].decode(), int(fields[19])


def _forget() -> None:
    """In a forked child: the thread that may have locked it is the parent's."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
