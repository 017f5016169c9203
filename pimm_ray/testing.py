"""Faults on purpose, for tests of training jobs: a rank that fails or dies, storage that fails, lags or is slow.

The stores stand in for a run folder wherever one is asked for: `CheckpointManager(storage=FaultyStore("runs/demo"))`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, TypeVar

from pyarrow.fs import FileInfo, FileType

from pimm_ray.checkpoint.layout import CheckpointName, FileEntry
from pimm_ray.checkpoint.store import LocalStore, Store, open_store
from pimm_ray.manager import CheckpointManager

__all__ = ["FailureInjector", "FaultyStore", "SlowStore"]

T = TypeVar("T")
_LOOKS = {"look at": "exists", "read": "read", "list": "list"}
_ONE_PIPE = threading.Lock()
_PASSING = OSError(errno.EIO, "injected")


@dataclass(frozen=True, kw_only=True)
class FailureInjector:
    """SIGKILLs one rank, or raises an error in it, at a chosen moment. Can be pickled, so fits a `train_loop_config`.

    Args:
        rank: whose process it is; None: every rank's.
        step: after this optimizer step, and after the save that was due at it. With `event`: in the save at this step.
        event: before the n-th change that a save makes in checkpoint folders, counted from 1 on this rank; without
            `step`, in the first save. Each folder and file made, write, sync, rename and deletion is one. After event n
            is before event n + 1.
        error: what to raise; None kills the process. An OSError at an event meets what the storage meets: one that may
            pass is tried again.
        once: a file `.injected-...` in the run folder keeps the attempts after this one from failing again.

    Raises:
        ValueError: neither `step` nor `event`, or an `event` below 1.

    Example:
        >>> def train_loop(config):
        ...     manager = CheckpointManager(model=model, loader=loader)
        ...     config["fault"].attach(manager)
        ...     manager.resume()
        >>> fault = FailureInjector(rank=1, step=7)                     # SIGKILL rank 1 after step 7
        >>> fault = FailureInjector(step=10, event=3)                   # rank 0, at event 3 of the save at step 10
        >>> fault = FailureInjector(event=5, error=OSError(28, "disk full"))
        >>> TorchTrainer(train_loop, train_loop_config={"fault": fault}, ...)
    """

    rank: int | None = 0
    step: int | None = None
    event: int | None = None
    error: BaseException | None = None
    once: bool = True

    def __post_init__(self) -> None:
        if self.step is None and self.event is None:
            raise ValueError("FailureInjector needs step= or event= to know when to fail")
        if self.event is not None and self.event < 1:
            raise ValueError(f"FailureInjector(event={self.event}): events are counted from 1")

    def attach(self, manager: CheckpointManager) -> None:
        """Watch this manager. Every rank calls it, once, before `resume()`."""
        runtime = manager._runtime
        if self.rank not in (None, runtime.rank):
            return
        storage, step = runtime.store, manager.step

        def fire() -> None:
            if self.once:
                mark = f".injected-rank{runtime.rank}-step{self.step}-event{self.event}"
                if storage.exists(mark):
                    return
                storage.make()
                storage.write(mark, [])
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), signal.SIGKILL)

        def watched(**metrics: Any) -> None:
            step(**metrics)
            if manager.state.global_step == self.step:
                fire()

        if self.event is None:
            manager.step = watched  # type: ignore[method-assign]
        else:
            runtime.store = _Watched(storage, self, fire)


class _Overlay(Store):
    """A store that does as another one does, of whatever class, except for what the subclass changes. Looking, reading
    and listing are events here, too."""

    def __new__(cls, storage: Any = None, *_: Any, **__: Any) -> Any:
        if storage is None:  # a copy: `Store.child` makes them
            return object.__new__(cls)
        inner = open_store(storage)
        made = copy.copy(inner)
        if not isinstance(inner, cls):
            made.__class__ = type(cls.__name__, (cls, type(inner)), {})
        return made

    def _try(self, verb: str, name: str, action: Callable[[], T]) -> T:
        if verb not in _LOOKS:
            return super()._try(verb, name, action)

        def look() -> T:
            self._event(_LOOKS[verb], self.full(name) if name else self.path)
            return action()

        return super()._try(verb, name, look)


class _Watched(_Overlay):
    """Counts the changes of each save and calls `fire` at the injector's."""

    def __init__(self, storage: Store, injector: FailureInjector, fire: Callable[[], None]):
        watches = [*getattr(storage, "_watches", ()), (injector, fire)]
        self._watches, self._changes = watches, dict[CheckpointName, int]()

    def _event(self, kind: str, path: str) -> None:
        super()._event(kind, path)
        name = next(filter(None, map(CheckpointName.parse, reversed(path.split("/")))), None)
        if name is None or kind in _LOOKS.values():
            return
        if kind in ("mkdir", "create"):
            self._changes.setdefault(name, 0)
        if not self._changes:
            return
        first, current = next(iter(self._changes)), next(reversed(self._changes))  # deletions belong to the save, too
        self._changes[current] += 1
        for injector, fire in self._watches:
            wanted = current == first if injector.step is None else current.step == injector.step
            if wanted and self._changes[current] == injector.event:
                fire()


class FaultyStore(_Overlay):
    """A run folder whose changes fail by plan, and which shows late what other processes have made.

    Args:
        storage: a path, a URI, anything with `.path` and `.filesystem`, or a store.
        fail_first: so many changes fail, then all works.
        fail_from: from this change on (counted from 1) every one fails: the storage is gone.
        kinds: which changes count and fail, of mkdir, create, write, fsync, rename, link, unlink, rmdir, and on object
            stores close and copy; empty: all of these. Also "read", "list" and "exists", which fail when named.
        matching: which paths count and fail, a pattern as of the shell; `*` also matches slashes.
        error: what they fail with. Errors that may pass, such as this default, are tried again by the store.
        late: seconds. A folder new in the run folder is seen so long after this process has first looked for it or for
            a file in it; a file that was looked for in vain, so long after it is found. What this process makes itself
            is seen at once, as is what was there when this store was made.
        retransmits: so many mkdirs and renames are sent twice, as by an NFS client that lost the reply: mkdir then says
            "exists" and rename "no such file" although they have worked. Not on object stores.

    Example:
        >>> storage = FaultyStore("runs/demo", fail_first=2)
        >>> storage = FaultyStore("s3://bucket/runs/demo", fail_from=1, matching="*.safetensors",
        ...                       error=PermissionError(13, "denied"))
        >>> storage = FaultyStore("/nfs/runs/demo", late=2.0 if rank else 0.0, retransmits=1)
        >>> manager = CheckpointManager(model=model, storage=storage)
    """

    def __init__(
        self,
        storage: Any,
        *,
        fail_first: int = 0,
        fail_from: float = math.inf,
        kinds: Collection[str] = (),
        matching: str = "*",
        error: Exception = _PASSING,
        late: float = 0.0,
        retransmits: int = 0,
    ):
        self._fail_first, self._fail_from, self._error = fail_first, fail_from, error
        self._kinds, self._matching, self._retransmits, self._late = kinds, matching, retransmits, 0.0
        self._roots = [self.path.strip("/"), self.real("").strip("/") if isinstance(self, LocalStore) else ""]
        # Both are shared with the copies that `child` makes.
        self._count, self._seen_from = Counter[str](), dict[str, float]()
        if late:
            self._seen_from.update((self._inside(info.path), 0.0) for info in self._list(recursive=True))
            self._late = late

    def _list(self, *, recursive: bool) -> list[Any]:
        return [info for info in super()._list(recursive=recursive) if not self._hides(info.path)]

    def _event(self, kind: str, path: str) -> None:
        super()._event(kind, path)
        if kind not in _LOOKS.values():
            inside = self._inside(path)
            self._seen_from.update({inside: 0.0, inside.split("/")[0]: 0.0})
        if kind == "mkdir" and self._again(kind):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        if (kind in self._kinds if self._kinds else kind not in _LOOKS.values()) and fnmatch(path, self._matching):
            self._count["fail"] += 1
            if not self._fail_first < self._count["fail"] < self._fail_from:
                raise self._error

    def _rename(self, old: str, new: str) -> None:
        super()._rename(old, new)  # type: ignore[misc]  # of LocalStore
        if self._again("rename"):
            super()._rename(old, new)  # type: ignore[misc]

    def _again(self, kind: str) -> bool:
        self._count[kind] += 1
        return isinstance(self, LocalStore) and self._count[kind] <= self._retransmits

    def _try(self, verb: str, name: str, action: Callable[[], T]) -> T:
        path = self.full(name) if name else self.path

        def look() -> Any:
            try:
                found: Any = action()
            except FileNotFoundError:
                self._hides(path, there=False)
                raise
            if verb == "read" and self._hides(path):
                raise FileNotFoundError(errno.ENOENT, "not to be seen yet", path)
            if verb == "look at" and self._hides(path, there=found.type != FileType.NotFound):
                return FileInfo(path, FileType.NotFound)
            return found

        return super()._try(verb, name, look if self._late else action)

    def _hides(self, path: str, *, there: bool = True) -> bool:
        inside, now, due = self._inside(path), time.monotonic(), 0.0
        if not there:
            self._seen_from[inside] = math.inf
        if not there or not inside or not self._late:
            return False
        for key, new in ((inside.split("/")[0], math.inf), (inside, 0.0)):
            if self._seen_from.setdefault(key, new) == math.inf:
                self._seen_from[key] = now + self._late
            due = max(due, self._seen_from[key])
        return now < due

    def _inside(self, path: str) -> str:
        path = path.strip("/")
        return next((path[len(root) + 1 :] for root in self._roots if root and f"{path}/".startswith(f"{root}/")), path)


class SlowStore(_Overlay):
    """A run folder on slow storage.

    Args:
        storage: a path, a URI, anything with `.path` and `.filesystem`, or a store.
        seconds: each change, look and listing waits so long first.
        bytes_per_second: what is written and read passes no faster.

    Example:
        >>> manager = CheckpointManager(model=model, storage=SlowStore("runs/demo", bytes_per_second=50e6))
    """

    def __init__(self, storage: Any, *, seconds: float = 0.0, bytes_per_second: float = math.inf):
        self._seconds, self._rate = seconds, bytes_per_second

    def read(self, name: str, *, limit: int | None = None) -> bytes:
        """As `Store`, at this pace."""
        data = super().read(name, limit=limit)
        time.sleep(len(data) / self._rate)
        return data

    def peek(self, name: str, count: int) -> tuple[bytes, int]:
        """As `Store`, at this pace."""
        data, size = super().peek(name, count)
        time.sleep(len(data) / self._rate)
        return data, size

    def _fill(self, name: str, file: Any, offset: int, buffers: list[memoryview]) -> None:
        super()._fill(name, file, offset, buffers)
        with _ONE_PIPE:
            time.sleep(sum(map(len, buffers)) / self._rate)

    def _event(self, kind: str, path: str) -> None:
        super()._event(kind, path)
        time.sleep(self._seconds)

    def _write(self, name: str, chunks: Iterable[memoryview | bytes]) -> FileEntry:
        entry = super()._write(name, chunks)
        time.sleep(entry.bytes / self._rate)
        return entry
