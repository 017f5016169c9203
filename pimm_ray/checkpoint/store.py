"""A folder on any pyarrow filesystem: durable writes with digests, ranged reads, one atomic publication."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import xxhash

from pimm_ray.checkpoint.layout import BLOCK, FileEntry
from pimm_ray.errors import PimmRayError, StorageError


class Store:
    """The folder `path` of `filesystem`. All other paths are relative to it, with `/` between parts.

    Works by open, write, list and delete alone, so it fits object stores; `LocalStore` adds what only a POSIX
    filesystem has (fsync, rename, hard links).
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str):
        self.filesystem, self.path = filesystem, path.rstrip("/") or "/"

    def __repr__(self) -> str:
        return f"{self.filesystem.type_name}:{self.path}"

    def child(self, name: str) -> Store:
        return type(self)(self.filesystem, self.full(name))

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
        with self._reporting("look at", name):
            info = self.filesystem.get_file_info(self.full(name) if name else self.path)
        return bool(info.type != pafs.FileType.NotFound)

    def read(self, name: str, *, limit: int | None = None) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
            StorageError: it is larger than `limit` bytes, or reading failed.
        """
        with self._reporting("read", name), self.filesystem.open_input_file(self.full(name)) as file:
            if limit is not None and file.size() > limit:
                raise StorageError(f"{self.full(name)} has {file.size()} bytes, more than the {limit} it may have")
            return bytes(file.read())

    def read_into(self, name: str, ranges: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes that start at its offset.

        Raises:
            StorageError: the file ends too early, or reading failed.
        """
        with self._reporting("read", name), self.filesystem.open_input_file(self.full(name)) as file:
            for offset, buffer in ranges:
                file.seek(offset)
                _fill(buffer, file.readinto, self.full(name))

    def digests(self, name: str, block: int, first: int, count: int) -> list[str]:
        """xxh3 digests of `count` blocks of `block` bytes, from block number `first`; shorter where the file ends."""
        found = []
        with self._reporting("read", name), self.filesystem.open_input_file(self.full(name)) as file:
            file.seek(first * block)
            for _ in range(count):
                data = file.read(block)
                if not data:
                    break
                found.append(xxhash.xxh3_64_hexdigest(data))
        return found

    def make(self, *folders: str) -> None:
        """Create this folder and the named ones in it."""
        for folder in folders or ("",):
            with self._reporting("create", folder):
                self.filesystem.create_dir(self.full(folder) if folder else self.path, recursive=True)

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> FileEntry:
        """Write a new file; when this returns its bytes are as durable as the storage can make them."""
        digest = _Digest()
        with self._reporting("write", name), self.filesystem.open_output_stream(self.full(name)) as stream:
            for chunk in chunks:
                digest.update(chunk)
                stream.write(chunk)
        return digest.entry(name)

    def publish(self, name: str, data: bytes) -> None:
        """Make a small file appear whole or not at all."""
        self.write(name, [data])

    def sync(self) -> None:
        """Make durable that the folders inside hold the files they hold; object stores have no such state."""

    def remove(self) -> None:
        """Delete this folder and all in it."""
        with self._reporting("delete", ""):
            self.filesystem.delete_dir(self.path)

    def delete_file(self, name: str) -> None:
        with self._reporting("delete", name):
            self.filesystem.delete_file(self.full(name))

    def copy_file(self, name: str, to: Store) -> None:
        """Copy one file under the same name to another folder of the same filesystem (by hard link where it can)."""
        with self._reporting("copy", name):
            self.filesystem.copy_file(self.full(name), to.full(name))

    def _list(self, *, recursive: bool) -> list[Any]:
        with self._reporting("list", ""):
            selector = pafs.FileSelector(self.path, recursive=recursive, allow_not_found=True)
            return list(self.filesystem.get_file_info(selector))

    @contextmanager
    def _reporting(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except (PimmRayError, FileNotFoundError):
            raise
        except (OSError, ValueError) as error:
            where = self.full(name) if name else self.path
            raise StorageError(f"cannot {verb} {where}: {error}") from error


class LocalStore(Store):
    """A folder on this machine or on a mounted filesystem."""

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> FileEntry:
        digest = _Digest()
        with self._reporting("write", name):
            descriptor = os.open(self.real(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
                    digest.update(view)
                    while len(view):
                        view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return digest.entry(name)

    def publish(self, name: str, data: bytes) -> None:
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        self.write(temporary, [data])
        with self._reporting("publish", name):
            os.replace(self.real(temporary), self.real(name))
            _sync_folder(self.real(""))
            _sync_folder(os.path.dirname(self.real("")))

    def sync(self) -> None:
        with self._reporting("sync", ""):
            for folder, _, _ in os.walk(self.real("")):
                _sync_folder(folder)

    def copy_file(self, name: str, to: Store) -> None:
        assert isinstance(to, LocalStore)
        try:
            os.link(self.real(name), to.real(name))
        except OSError:
            super().copy_file(name, to)

    def real(self, name: str) -> str:
        """The path for the operating system."""
        base = self.filesystem
        path = self.full(name) if name else self.path
        while isinstance(base, pafs.SubTreeFileSystem):
            path = os.path.join(base.base_path, path.lstrip("/"))
            base = base.base_fs
        return path


def open_store(source: Any, filesystem: pafs.FileSystem | None = None) -> Store:
    """The folder that a path, a URI (`s3://...`, `file://...`) or an object with `.path` and `.filesystem`, such as a
    `ray.train.Checkpoint`, points to. Nothing is read yet.

    Raises:
        TypeError: `source` is none of these.
        StorageError: the URI is not understood.
    """
    if isinstance(source, Store):
        return source
    if filesystem is None and hasattr(source, "filesystem") and hasattr(source, "path"):
        source, filesystem = source.path, source.filesystem
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"{source!r} is not a path, a URI or a ray.train.Checkpoint")
    path = os.fspath(source)
    if filesystem is None:
        if "://" in path:
            try:
                filesystem, path = pafs.FileSystem.from_uri(path)
            except (OSError, ValueError) as error:
                raise StorageError(f"cannot open {path}: {error}") from error
        else:
            filesystem, path = pafs.LocalFileSystem(), str(Path(path).expanduser().absolute())
    base = filesystem
    while isinstance(base, pafs.SubTreeFileSystem):
        base = base.base_fs
    return (LocalStore if isinstance(base, pafs.LocalFileSystem) else Store)(filesystem, path)


class _Digest:
    """xxh3 of a stream, one value a block."""

    def __init__(self) -> None:
        self._size, self._hash, self._room, self._done = 0, xxhash.xxh3_64(), BLOCK, list[str]()

    def update(self, chunk: memoryview | bytes) -> None:
        view = memoryview(chunk)
        self._size += len(view)
        while len(view):
            self._hash.update(view[: self._room])
            taken = min(len(view), self._room)
            self._room, view = self._room - taken, view[taken:]
            if not self._room:
                self._close()

    def entry(self, name: str) -> FileEntry:
        if self._room < BLOCK:
            self._close()
        return FileEntry(name, self._size, tuple(self._done), BLOCK)

    def _close(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash, self._room = xxhash.xxh3_64(), BLOCK


def _fill(buffer: memoryview, readinto: Any, path: str) -> None:
    while len(buffer):
        count = readinto(buffer)
        if not count:
            raise StorageError(f"{path} ends {len(buffer)} bytes too early")
        buffer = buffer[count:]


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts cannot fsync a folder
            raise
    finally:
        os.close(descriptor)
