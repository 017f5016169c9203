"""What a lease file says, and how it is read and replaced on each kind of storage."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass

from pimm_ray.checkpoint.store import LocalStore, Store
from pimm_ray.errors import StorageError

NAME = ".lease"
VISIBLE_WITHIN = 10.0
"""Seconds within which a storage must show what was written to it."""
_SETTLE = 0.3
_LIMIT = 4096
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


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
    def here(*, owner: str, term: int, since: float, every: float) -> Holder:
        """This process, alive now."""
        pid = os.getpid()
        return Holder(
            owner=owner,
            term=term,
            host=host(),
            pid=pid,
            started=process(pid)[1],
            since=since,
            beat=time.time(),
            every=every,
        )

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
        return (self.host, self.pid, self.started) == (host(), os.getpid(), process(os.getpid())[1])

    @property
    def alive(self) -> bool | None:
        """Whether its process lives; None when that cannot be seen from here."""
        if self.host != host():
            return None
        try:
            state, started = process(self.pid)
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


class File:
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
        deadline = time.monotonic() + VISIBLE_WITHIN
        while time.monotonic() < deadline:
            time.sleep(_SETTLE)
            if (found := self.read()) != seen:
                return found == data
        raise StorageError(
            f"{self.store.full(NAME)} is not to be seen {VISIBLE_WITHIN:g} s after it was written: nobody can hold "
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


class LocalFile(File):
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
def host() -> str:
    """This machine as far as process ids go: equal in two processes exactly when each can see if the other lives."""
    name = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}/{name}"
    except OSError:
        return f"{secrets.token_hex(8)}/{name}"  # equal to no other


def process(pid: int) -> tuple[str, int]:
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
