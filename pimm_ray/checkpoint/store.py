"""A folder on any pyarrow filesystem: durable writes with digests, ranged reads, one atomic publication."""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pyarrow.fs as pafs

from pimm_ray.checkpoint.digest import Digest
from pimm_ray.checkpoint.layout import BLOCK, FileEntry
from pimm_ray.checkpoint.own_files import is_own, own_files, require_own
from pimm_ray.checkpoint.passing import may_pass
from pimm_ray.checkpoint.places import locate
from pimm_ray.errors import PimmRayError, StorageError

T = TypeVar("T")
U = TypeVar("U")
Fill = Callable[[int, list[memoryview]], None]
logger = logging.getLogger(__name__)

PAUSES = (0.1, 0.4, 1.5)
"""Seconds to wait before each further try of an operation that may pass the next time."""
_THREADS = 4
_BUFFERS = 1024
"""How many buffers one system call fills."""


class Store:
    """The folder `path` of `filesystem`. All other paths are relative to it, with `/` between parts.

    Works by open, write, list and delete alone, so it fits object stores; `LocalStore` adds what only a POSIX
    filesystem has (fsync, rename, hard links). What fails in passing is tried again, up to `len(PAUSES)` times.
    """

    run = BLOCK
    """Bytes that are best read at once."""

    def __init__(self, filesystem: pafs.FileSystem, path: str):
        self.filesystem, self.path = filesystem, path.rstrip("/") or "/"

    def __repr__(self) -> str:
        return f"{self.filesystem.type_name}:{self.path}"

    def child(self, name: str) -> Store:
        return self.at(self.full(name))

    def at(self, path: str) -> Store:
        """Another folder of the same filesystem."""
        other = copy.copy(self)
        other.path = path
        return other

    def full(self, name: str) -> str:
        return f"{self.path}/{name}"

    def folders(self) -> list[str]:
        """Names of the folders directly inside; empty when this folder does not exist."""
        return [info.base_name for info in self._list(recursive=False) if info.type == pafs.FileType.Directory]

    def files(self) -> dict[str, int]:
        """Size in bytes of every file inside, by relative path; empty when this folder does not exist."""
        # Some filesystems put a slash in front of the paths that they list.
        base = self.path.strip("/")
        found = [info for info in self._list(recursive=True) if info.type == pafs.FileType.File]
        return {info.path.strip("/")[len(base) :].lstrip("/"): info.size for info in found}

    def exists(self, name: str = "") -> bool:
        path = self.full(name) if name else self.path
        info = self._try("look at", name, lambda: self.filesystem.get_file_info(path))
        return bool(info.type != pafs.FileType.NotFound)

    def read(self, name: str, *, limit: int | None = None) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it is larger than `limit` bytes, or reading failed.
        """

        def read() -> bytes:
            with self._input(name) as file:
                if limit is not None and file.size() > limit:
                    raise StorageError(f"{self.full(name)} has {file.size()} bytes, more than the {limit} it may have")
                return bytes(file.read())

        return self._try("read", name, read)

    def size(self, name: str) -> int | None:
        """Bytes of one file, asked for by name: a listing may lag behind. None when there is none."""
        info = self._try("look at", name, lambda: self.filesystem.get_file_info(self.full(name)))
        return info.size if info.type == pafs.FileType.File else None

    def peek(self, name: str, count: int) -> tuple[bytes, int]:
        """The first `count` bytes of a file, fewer where it is shorter, and its size in bytes."""

        def read() -> tuple[bytes, int]:
            with self._input(name) as file:
                size = file.size()
                return bytes(file.read(min(count, size))), size

        return self._try("read", name, read)

    def read_into(self, name: str, ranges: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes that start at its offset. Neighbours come by one request of up to `BLOCK`
        bytes, several at once.

        Raises:
            StorageError: the file ends too early, or reading failed.
        """
        runs: list[tuple[int, list[memoryview]]] = []
        end = room = -1
        for offset, buffer in sorted(ranges, key=lambda item: item[0]):
            while len(buffer):
                if offset != end or not room:
                    runs.append((offset, []))
                    room = BLOCK
                piece = buffer[:room]
                runs[-1][1].append(piece)
                end = offset = offset + len(piece)
                room, buffer = room - len(piece), buffer[len(piece) :]

        def read(mine: Sequence[tuple[int, list[memoryview]]]) -> None:
            with self.reader(name) as fill:
                for run in mine:
                    fill(*run)

        in_threads(read, runs)

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[Fill]:
        """A file opened to be read in pieces: what comes is called with an offset and the buffers to fill from there
        on, one after another. For one thread."""
        with self._try("read", name, lambda: self._open(name)) as file:
            yield lambda offset, buffers: self._try("read", name, lambda: self._fill(name, file, offset, buffers))

    def make(self, *folders: str) -> None:
        """Create this folder and the named ones in it."""
        for folder in folders or ("",):
            path = self.full(folder) if folder else self.path
            self._await("create", folder, lambda path=path: self._make(path))  # type: ignore[misc]

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> FileEntry:
        """Write a new file; when this returns its bytes are as durable as the storage can make them.

        `chunks` is iterated again when a try has failed, so it must not be an iterator.
        """
        return self._await("write", name, lambda: self._write(name, chunks))

    def publish(self, name: str, data: bytes) -> None:
        """Make a small file appear whole or not at all."""
        self.write(name, [data])

    def sync(self) -> None:
        """Make durable that the folders inside hold the files they hold; object stores have no such state."""

    def is_link(self) -> bool:
        """Whether this folder is a link to one that may belong to others."""
        return False

    def remove(self) -> None:
        """Delete this folder and all in it; of a link, the link."""
        self._try("delete", "", self._remove)

    def delete_file(self, name: str) -> None:
        self._try("delete", name, lambda: self._delete_file(name))

    def copy_file(self, name: str, to: Store) -> None:
        """Copy one file under the same name to another folder of the same filesystem (by hard link where it can)."""
        self._try("copy", name, lambda: self._copy_file(name, to))

    def _input(self, name: str) -> Any:
        return self.filesystem.open_input_file(self.full(name))

    def _open(self, name: str) -> Any:
        return self._input(name)

    def _fill(self, name: str, file: Any, offset: int, buffers: list[memoryview]) -> None:
        wanted = sum(map(len, buffers))
        data = memoryview(file.read_at(wanted, offset))
        if len(data) < wanted:
            raise StorageError(f"{self.full(name)} ends {wanted - len(data)} bytes too early")
        for buffer in buffers:
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]

    def _make(self, path: str) -> None:
        self._event("mkdir", path)
        self.filesystem.create_dir(path, recursive=True)

    def _write(self, name: str, chunks: Iterable[memoryview | bytes]) -> FileEntry:
        digest, path = Digest(), self.full(name)
        self._event("create", path)
        with self.filesystem.open_output_stream(path) as stream:
            for chunk in chunks:
                digest.update(chunk)
                self._event("write", path)
                stream.write(chunk)
            self._event("close", path)
        return digest.entry(name)

    def _remove(self) -> None:
        self._event("rmdir", self.path)
        self.filesystem.delete_dir(self.path)

    def _delete_file(self, name: str) -> None:
        self._event("unlink", self.full(name))
        self.filesystem.delete_file(self.full(name))

    def _copy_file(self, name: str, to: Store) -> None:
        self._event("copy", to.full(name))
        self.filesystem.copy_file(self.full(name), to.full(name))

    def _list(self, *, recursive: bool) -> list[Any]:
        selector = pafs.FileSelector(self.path, recursive=recursive, allow_not_found=True)
        return self._try("list", "", lambda: list(self.filesystem.get_file_info(selector)))

    def _event(self, kind: str, path: str) -> None:
        """Called before each single change of the storage: where `pimm_ray.testing` fails, waits or kills."""

    def _try(self, verb: str, name: str, action: Callable[[], T]) -> T:
        """Run `action`, again where its error may pass, and say what could not be done where it does not."""
        where = self.full(name) if name else self.path
        for number, pause in enumerate((*PAUSES, None), start=1):
            try:
                return action()
            except (PimmRayError, FileNotFoundError):
                raise
            except (OSError, ValueError) as error:
                if pause is None or not may_pass(error):
                    tried = f" (tried {number} times)" if number > 1 else ""
                    raise StorageError(f"cannot {verb} {where}: {error}{tried}") from error
                logger.warning("cannot %s %s: %s; trying again in %g s", verb, where, error, pause)
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _await(self, verb: str, name: str, action: Callable[[], T]) -> T:
        """As `_try`, for what needs a folder or file that is there: a machine may see late what another one made."""
        where = self.full(name) if name else self.path
        for pause in (*PAUSES, None):
            try:
                return self._try(verb, name, action)
            except FileNotFoundError as error:
                if pause is None:
                    raise StorageError(f"cannot {verb} {where}: {error} (waited {sum(PAUSES):g} s for it)") from error
                logger.warning("cannot %s %s: %s; trying again in %g s", verb, where, error, pause)
                time.sleep(pause)
        raise AssertionError("unreachable")


class LocalStore(Store):
    """A folder on this machine or on a mounted filesystem. Each change is one system call, announced as an event.

    Of what others may have put there, links that lead out of the folder, pipes and devices are no files of it.
    """

    run = 2**20
    """Few enough to be still in the processor's cache when their digest is made."""

    def size(self, name: str) -> int | None:
        return super().size(name) if is_own(self.real(""), self.real(name)) else None

    def publish(self, name: str, data: bytes) -> None:
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        self.write(temporary, [data])
        try:
            self._try("publish", name, lambda: self._rename(temporary, name))
        except FileNotFoundError:
            # A network mount may send a rename twice, and the second hears that its source is gone.
            if self.read(name) != data:
                raise
        self._try("sync", "", lambda: self._sync_folder(self.real("")))
        self._try("sync", "", lambda: self._sync_folder(os.path.dirname(self.real(""))))

    def sync(self) -> None:
        for folder, _, _ in os.walk(self.real("")):
            self._try("sync", "", lambda folder=folder: self._sync_folder(folder))  # type: ignore[misc]

    def real(self, name: str) -> str:
        """The path for the operating system."""
        base = self.filesystem
        path = self.full(name) if name else self.path
        while isinstance(base, pafs.SubTreeFileSystem):
            path = os.path.join(base.base_path, path.lstrip("/"))
            base = base.base_fs
        return path

    def _input(self, name: str) -> Any:
        require_own(self.real(""), self.real(name))
        return super()._input(name)

    def _open(self, name: str) -> Any:
        require_own(self.real(""), self.real(name))
        return open(self.real(name), "rb", buffering=0)

    def _fill(self, name: str, file: Any, offset: int, buffers: list[memoryview]) -> None:
        left, first = list(buffers), 0
        while first < len(left):
            count = os.preadv(file.fileno(), left[first : first + _BUFFERS], offset)
            if not count:
                raise StorageError(f"{self.full(name)} ends {sum(map(len, left[first:]))} bytes too early")
            offset += count
            while first < len(left) and count >= len(left[first]):
                count, first = count - len(left[first]), first + 1
            if count:
                left[first] = left[first][count:]

    def _list(self, *, recursive: bool) -> list[Any]:
        return self._try("list", "", lambda: self._own_folders() + (self._own_files() if recursive else []))

    def _own_files(self) -> list[Any]:
        found = own_files(self.real(""))
        return [pafs.FileInfo(self.full(name), pafs.FileType.File, size=size) for name, size in found.items()]

    def _own_folders(self) -> list[Any]:
        """Not by pyarrow, which fails on a name that is not UTF-8: nobody here made it."""
        try:
            names = [entry.name for entry in os.scandir(self.real("")) if entry.is_dir()]
        except FileNotFoundError:
            return []
        named = [name for name in names if name.encode(errors="ignore").decode() == name]
        return [pafs.FileInfo(self.full(name), pafs.FileType.Directory) for name in named]

    def _make(self, path: str) -> None:
        real = LocalStore(self.filesystem, path).real("")
        missing = [real]
        while not os.path.isdir(missing[-1]) and (parent := os.path.dirname(missing[-1])) != missing[-1]:
            missing.append(parent)
        for folder in reversed(missing[:-1]):
            self._event("mkdir", folder)
            try:
                os.mkdir(folder)
            except FileExistsError:
                # Of another rank, perhaps, and not to be seen here yet. Only a file in its place is an error.
                if os.path.lexists(folder) and not os.path.isdir(folder):
                    raise
            self._sync_folder(os.path.dirname(folder))

    def _write(self, name: str, chunks: Iterable[memoryview | bytes]) -> FileEntry:
        digest, path = Digest(), self.real(name)
        self._event("create", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
                digest.update(view)
                while len(view):
                    self._event("write", path)
                    view = view[os.write(descriptor, view) :]
            self._event("fsync", path)
            os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return digest.entry(name)

    def _rename(self, old: str, new: str) -> None:
        self._event("rename", self.real(new))
        os.replace(self.real(old), self.real(new))

    def is_link(self) -> bool:
        return os.path.islink(self.real(""))

    def _remove(self) -> None:
        if self.is_link():
            self._event("unlink", self.real(""))
            os.unlink(self.real(""))
            return
        for folder, folders, files in os.walk(self.real(""), topdown=False):
            for name in files:
                self._event("unlink", os.path.join(folder, name))
                os.unlink(os.path.join(folder, name))
            for name in folders:
                path = os.path.join(folder, name)
                self._event("rmdir", path)
                os.unlink(path) if os.path.islink(path) else os.rmdir(path)
        self._event("rmdir", self.real(""))
        os.rmdir(self.real(""))

    def _delete_file(self, name: str) -> None:
        self._event("unlink", self.real(name))
        os.unlink(self.real(name))

    def _copy_file(self, name: str, to: Store) -> None:
        assert isinstance(to, LocalStore)
        self._event("link", to.real(name))
        try:
            os.link(self.real(name), to.real(name))
        except OSError:
            super()._copy_file(name, to)

    def _sync_folder(self, path: str) -> None:
        self._event("fsync", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts cannot fsync a folder
                raise
        finally:
            os.close(descriptor)


def in_threads(work: Callable[[Sequence[T]], U], items: Sequence[T]) -> list[U]:
    """Deal `items` to a few threads; what `work` gives for the part of each."""
    parts = [items[number::_THREADS] for number in range(min(_THREADS, len(items)))]
    if len(parts) < 2:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(work, parts))


def open_store(source: Any, filesystem: Any = None) -> Store:
    """The folder that a path, a URI (`s3://...`, `file://...`) or an object with `.path` and `.filesystem` (of pyarrow
    or fsspec), such as a `ray.train.Checkpoint`, points to. Nothing is read yet.

    Raises:
        TypeError: `source` is none of these.
        StorageError: the URI is not understood.
    """
    if isinstance(source, Store):
        return source
    filesystem, path = locate(source, filesystem)
    base = filesystem
    while isinstance(base, pafs.SubTreeFileSystem):
        base = base.base_fs
    return (LocalStore if isinstance(base, pafs.LocalFileSystem) else Store)(filesystem, path)
