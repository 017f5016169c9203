"""Digests of what is being written: xxh3, one value a block."""

from __future__ import annotations

import xxhash

from pimm_ray.checkpoint.layout import BLOCK, FileEntry


class Digest:
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
