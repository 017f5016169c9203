"""The shards of an ElasticStream: which they are, how long, and Parquet and Arrow files read from any sample on."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pimm_ray.errors import StorageError

_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
_ROWS = 256  # turned into Python values at once


@dataclass(frozen=True)
class Files:
    """`open` for Parquet and Arrow files."""

    columns: Sequence[str] | None

    def __call__(self, path: Any, offset: int) -> Iterator[dict[str, Any]]:
        for rows, read in _blocks(path, self.columns):
            if offset >= rows:
                offset -= rows
                continue
            for batch in read():
                for start in range(offset, batch.num_rows, _ROWS):
                    yield from _rows(batch.slice(start, _ROWS))
                offset = max(0, offset - batch.num_rows)


def _blocks(path: Any, columns: Any = None) -> Iterator[tuple[int, Callable[[], Iterable[Any]]]]:
    """The row groups or record batches of a file: how many rows, and a function that reads them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    filesystem, place = _filesystem(path)
    with filesystem.open_input_file(place) as source:
        magic = source.read_at(6, 0)
        if magic[:4] == b"PAR1":
            parquet = pq.ParquetFile(source)
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                yield rows, partial(parquet.iter_batches, batch_size=1024, row_groups=[group], columns=columns)
        elif magic == b"ARROW1":
            reader = pa.ipc.open_file(source)
            # Arrow has no table of rows: a block that is left out costs its narrowest column.
            widths = [_width(field.type) for field in reader.schema]
            options = pa.ipc.IpcReadOptions(included_fields=[widths.index(min(widths))])
            narrow = pa.ipc.open_file(source, options=options)
            for number in range(reader.num_record_batches):
                yield narrow.get_batch(number).num_rows, partial(_read, reader, number, columns)
        elif magic[:4] == b"\xff\xff\xff\xff":
            # A stream has no index, but leaving out a block of a local, uncompressed one costs nothing.
            for batch in pa.ipc.open_stream(source):
                yield batch.num_rows, partial(_select, batch, columns)
        else:
            raise ValueError("it is neither Parquet nor Arrow: give open=, which reads it")


def _read(reader: Any, number: int, columns: Any) -> list[Any]:
    return _select(reader.get_batch(number), columns)


def _select(batch: Any, columns: Any) -> list[Any]:
    return [batch if columns is None else batch.select(columns)]


def _width(kind: Any) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:
        return 1 << 30


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    def values(column: Any) -> list[Any]:
        kind = column.type
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if listed and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
            sizes = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            flat = column.flatten().to_numpy(zero_copy_only=False).copy()
            rows = np.split(flat, np.cumsum(sizes)[:-1])
            valid = column.is_valid().to_pylist() if column.null_count else itertools.repeat(True)
            return [row if given else None for row, given in zip(rows, valid, strict=False)]
        return column.to_pylist()

    names = batch.schema.names
    for row in zip(*(values(column) for column in batch.columns), strict=True):
        yield dict(zip(names, row, strict=True))


def _filesystem(path: Any) -> tuple[Any, str]:
    import pyarrow.fs as pafs

    path = os.fspath(path)
    return pafs.FileSystem.from_uri(path) if "://" in path else (pafs.LocalFileSystem(use_mmap=True), path)


def _listed(folder: str) -> list[str]:
    import pyarrow.fs as pafs

    filesystem, place = _filesystem(folder)
    try:
        infos = filesystem.get_file_info(pafs.FileSelector(place, recursive=True))
    except OSError as error:
        raise StorageError(f"folder {folder!r} of shards cannot be listed ({error}): give a list of files") from error
    found = sorted(info.path for info in infos if info.is_file and info.path.endswith(_SUFFIXES))
    if not found:
        raise ValueError(f"folder {folder!r} holds no shards ({', '.join(_SUFFIXES)}): give a list of files")
    return [folder.rstrip("/") + path[len(place.rstrip("/")) :] for path in found]


def _rows_in(path: Any) -> int:
    try:
        return sum(rows for rows, _ in _blocks(path))
    except (OSError, ValueError) as error:
        raise StorageError(f"shard {path!r} cannot be read ({error}): mend it or leave it out") from error


def checked_shards(shards: Any, open: Any) -> list[Any]:
    if isinstance(shards, str | os.PathLike):
        if open is not None:
            raise TypeError("ElasticStream(shards=) with open= is a list: give each shard's name")
        shards = _listed(os.fspath(shards))
    shards = list(shards)
    if not shards:
        raise ValueError("ElasticStream has no shards: give at least one")
    for shard in shards:
        if open is None and not isinstance(shard, str | os.PathLike):
            raise TypeError(
                f"shard {shard!r} is not a file: give open=, a function (shard, offset) that returns an iterator of "
                "its samples from number `offset` on"
            )
        if type(shard).__repr__ is object.__repr__:
            raise TypeError(
                f"a shard is a {type(shard).__name__}, which a resumed run would not know again: use names, numbers or "
                "tuples, and make the object in open()"
            )
    seen: set[str] = set()
    for name in names_of(shards):
        if name in seen:
            raise ValueError(f"shard {name} is in the list twice: its samples would come twice; leave one out")
        seen.add(name)
    return shards


def names_of(shards: list[Any]) -> list[str]:
    """What a shard is known by in another run: of a file the path from the files' common folder on."""
    if not all(isinstance(shard, str | os.PathLike) for shard in shards):
        return [repr(shard) for shard in shards]
    paths = [os.fspath(shard) for shard in shards]
    # Not commonpath: it does not know URIs. Of all paths the first and the last in order have least in common.
    first, last, common = min(paths), max(paths), 0
    while (end := first.find("/", common) + 1) and last.startswith(first[:end]):
        common = end
    return [path[common:] for path in paths]


def lengths_of(shards: list[Any], length: Any, *, files: bool) -> list[int] | None:
    if length is None and not files:
        return None
    if length is None:
        with ThreadPoolExecutor(min(16, len(shards))) as threads:
            return list(threads.map(_rows_in, shards))
    found = [length(shard) for shard in shards] if callable(length) else list(length)
    if len(found) != len(shards):
        raise ValueError(f"length= has {len(found)} entries for {len(shards)} shards: give one a shard")
    if any(number is None for number in found):
        return None
    for shard, number in zip(shards, found, strict=True):
        if int(number) != number or number < 0:
            raise ValueError(f"the length of shard {shard!r} is said to be {number!r}: give whole numbers of samples")
    return [int(number) for number in found]


def digest(values: list[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
