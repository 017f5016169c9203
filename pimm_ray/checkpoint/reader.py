"""Reading a checkpoint so that the digests are made of the very bytes that are used, in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import xxhash

from pimm_ray.checkpoint.layout import MARKER, FileEntry, Manifest
from pimm_ray.checkpoint.store import Fill, Store, in_threads
from pimm_ray.errors import CorruptCheckpoint, PimmRayError, StorageError

Part = tuple[int, memoryview]
"""An offset in a file and the buffer for the bytes from there on."""
Block = tuple[FileEntry, int, list[Part]]
"""A file, the number of one of its blocks, and what of it is wanted."""


class Reader:
    """The files that a manifest names, compared with it block by block as they are read.

    What `read` and `read_into` give is proven: the digest was made of the buffers that they gave. So is, from then on,
    what `peek` gave before. A block of which one byte is wanted is read whole; `rest` reads those that nobody wanted.
    """

    def __init__(self, store: Store, manifest: Manifest):
        self.store, self.manifest = store, manifest
        self._entries = {entry.path: entry for entry in manifest.files}
        self._heads: dict[str, bytes] = {}
        self._proven: set[tuple[str, int]] = set()

    def full(self, name: str) -> str:
        return self.store.full(name)

    def peek(self, name: str, count: int) -> tuple[bytes, int]:
        """The first `count` bytes, fewer where the file is shorter, and its size. Not yet proven."""
        entry, held = self._entry(name), self._heads.get(name, b"")
        if len(held) < min(count, entry.bytes):
            with _naming(self.full(name), entry):
                held = self._heads[name] = self.store.peek(name, min(count, entry.bytes))[0]
        return held[:count], entry.bytes

    def read(self, name: str, *, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        size = self._entry(name).bytes
        if size > limit:
            raise StorageError(f"{self.full(name)} has {size} bytes, more than the {limit} it may have")
        data = bytearray(size)
        self.read_into(name, [(0, memoryview(data))])
        return bytes(data)

    def read_into(self, name: str, ranges: Iterable[Part]) -> None:
        """Fill each buffer with the bytes that start at its offset.

        Raises:
            CorruptCheckpoint: the bytes are not those that were saved.
            StorageError: reading failed.
        """
        entry = self._entry(name)
        blocks: dict[int, list[Part]] = {}
        for offset, buffer in sorted(ranges, key=lambda part: part[0]):
            while len(buffer):
                number = offset // entry.block
                piece = buffer[: (number + 1) * entry.block - offset]
                blocks.setdefault(number, []).append((offset, piece))
                offset, buffer = offset + len(piece), buffer[len(piece) :]
        if max(blocks, default=0) >= max(1, len(entry.xxh3)):
            raise CorruptCheckpoint(f"{self.full(name)} points beyond its end", file=name)
        errors = self._read([(entry, number, parts) for number, parts in blocks.items()])
        self._heads.pop(name, None)
        if errors:
            raise errors[0]

    def rest(self, *, part: int = 0, parts: int = 1) -> list[PimmRayError]:
        """Read what was not read yet, of part number `part` of `parts` near-equal parts of all; what is wrong with it,
        one error a file."""
        every = [(entry, number) for entry in self.manifest.files for number in range(len(entry.xxh3))]
        mine = every[part * len(every) // parts : (part + 1) * len(every) // parts]
        return self._read([(entry, number, []) for entry, number in mine if (entry.path, number) not in self._proven])

    def _entry(self, name: str) -> FileEntry:
        if name not in self._entries:
            raise CorruptCheckpoint(f"{self.full(MARKER)} names no {name}", file=MARKER)
        return self._entries[name]

    def _read(self, blocks: Sequence[Block]) -> list[PimmRayError]:
        found = [error for errors in in_threads(self._read_some, blocks) for error in errors]
        first = {error.file: error for error in reversed(found)}  # type: ignore[attr-defined]
        return [first[path] for path in self._entries if path in first]

    def _read_some(self, blocks: Sequence[Block]) -> list[PimmRayError]:
        errors: list[PimmRayError] = []
        scratch = memoryview(bytearray(self.store.run))
        for entry, group in itertools.groupby(blocks, key=lambda block: block[0]):
            ahead = memoryview(self._heads.get(entry.path, b""))
            opened: Any = self.store.reader(entry.path) if len(ahead) < entry.bytes else nullcontext()
            try:
                with _naming(self.full(entry.path), entry), opened as fill:
                    for _, number, parts in group:
                        self._read_block(fill, ahead, entry, number, parts, scratch)
            except (CorruptCheckpoint, StorageError) as error:
                errors.append(error)
        return errors

    def _read_block(
        self, fill: Fill, ahead: memoryview, entry: FileEntry, number: int, parts: list[Part], scratch: memoryview
    ) -> None:
        digest, end = xxhash.xxh3_64(), number * entry.block
        for buffers in self._runs(entry, number, parts, scratch):
            left = _take(ahead[end:], buffers)
            end += sum(map(len, buffers))
            if left:
                fill(end - sum(map(len, left)), left)
            for buffer in buffers:
                digest.update(buffer)
        if digest.hexdigest() != entry.xxh3[number]:
            raise CorruptCheckpoint(
                f"{self.full(entry.path)} is damaged: block {number} has another digest than when it was saved",
                file=entry.path,
                kind="digest",
                expected=entry.xxh3[number],
                found=digest.hexdigest(),
            )
        self._proven.add((entry.path, number))

    def _runs(
        self, entry: FileEntry, number: int, parts: list[Part], scratch: memoryview
    ) -> Iterator[list[memoryview]]:
        """The buffers of one block in order, a run of them at a time: scratch for bytes that nobody wants."""
        position, stop = number * entry.block, min((number + 1) * entry.block, entry.bytes)
        run: list[memoryview] = []
        room = len(scratch)
        for offset, wanted in [*parts, (stop, scratch[:0])]:
            if not position <= offset <= stop - len(wanted):
                raise CorruptCheckpoint(
                    f"{self.full(entry.path)}: tensors overlap or lie beyond its end", file=entry.path
                )
            gap = offset - position
            position = offset + len(wanted)
            while gap or wanted:
                piece = scratch[-room:][:gap] if gap else wanted[:room]
                gap, wanted = (gap - len(piece), wanted) if gap else (0, wanted[len(piece) :])
                run.append(piece)
                room -= len(piece)
                if not room:
                    yield run
                    run, room = [], len(scratch)
        if run:
            yield run


def _take(ahead: memoryview, buffers: list[memoryview]) -> list[memoryview]:
    """Copy what is known already into the first of the buffers; what of them is left to fill."""
    for number, buffer in enumerate(buffers):
        known = ahead[: len(buffer)]
        buffer[: len(known)] = known
        if len(known) < len(buffer):
            return [buffer[len(known) :], *buffers[number + 1 :]]
        ahead = ahead[len(known) :]
    return []


@contextmanager
def _naming(path: str, entry: FileEntry) -> Iterator[None]:
    """Say in an error which file it is about."""
    try:
        yield
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing", file=entry.path, kind="missing", expected=entry.bytes) from None
    except StorageError as error:
        error.file = entry.path
        raise
