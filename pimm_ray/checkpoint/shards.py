"""Safetensors files written by many ranks: who writes what, the bytes, and reading them back into whole tensors.

`trainer.dcp/` follows PyTorch Distributed Checkpoint's distributed safetensors layout (header key `DCP_SHARDING_INFO`),
so `torch.distributed.checkpoint.HuggingFaceStorageReader` loads it; `weights/` follows Hugging Face's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from pimm_ray.checkpoint.documents import MAX_NAME, by_name, is_count, is_text, parse_json, require, short
from pimm_ray.checkpoint.layout import FileEntry
from pimm_ray.checkpoint.store import Store
from pimm_ray.errors import CorruptCheckpoint, UnstorableState

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000
_SHARDING = "DCP_SHARDING_INFO"
_FIRST_READ = 2**16
"""Bytes read at once of each file: on object storage a request costs more than these."""
_MAX_DIMENSIONS = 64
_MAX_CUTS = 8
"""Dimensions along which one tensor may be cut; 2 to that power corners of each piece are counted."""


class Spec(NamedTuple):
    """What decides who writes a tensor: equal on every rank."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def axis(self) -> int:
        """The first dimension along which a piece is one run of bytes; -1 when the tensor is indivisible."""
        return next((axis for axis, size in enumerate(self.shape) if size > 1), -1)


class Piece(NamedTuple):
    """Rows `start` to `stop` of a tensor along `axis`; all of it when `axis` is -1."""

    spec: Spec
    axis: int
    start: int
    stop: int

    @property
    def offsets(self) -> list[int]:
        return [self.start if axis == self.axis else 0 for axis in range(len(self.spec.shape))]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.axis < 0 else tensor.narrow(self.axis, self.start, self.stop - self.start)


def spec_of(key: str, tensor: torch.Tensor) -> Spec:
    if tensor.dtype not in _NAMES:
        raise UnstorableState(f"{key}: safetensors cannot store {tensor.dtype}; convert it before saving", key=key)
    if len(key) > MAX_NAME:
        raise UnstorableState(f"a name has {len(key)} characters and may have {MAX_NAME}: {short(key)}", key=key)
    return Spec(key, tuple(tensor.shape), tensor.dtype)


def split_rows(specs: Iterable[Spec], world: int, *, first: Iterable[Spec] = ()) -> list[list[Piece]]:
    """Cut tensors into `world` shares of near-equal bytes; any rank computes the same shares without asking.

    The tensors are laid end to end and cut at multiples of the mean, each cut moved to the nearest whole row, so no
    share has more than the mean plus one row. Those of `first` all go to share 0, uncut.
    """
    ordered = sorted(specs)
    shares: list[list[Piece]] = [[] for _ in range(world)]
    shares[0] += [Piece(spec, -1, 0, 1) for spec in sorted(first)]
    position = sum(piece.spec.bytes for piece in shares[0])
    total = position + sum(spec.bytes for spec in ordered)
    for spec in ordered:
        if not spec.bytes:
            shares[0].append(Piece(spec, -1, 0, 1))
            continue
        rows = spec.shape[spec.axis] if spec.axis >= 0 else 1
        row = spec.bytes // rows
        low = max(0, position * world // total - 1)
        high = min(world - 1, (position + spec.bytes) * world // total + 1)
        bounds = [rank * total // world - position for rank in range(low, high + 2)]
        cuts = [min(rows, max(0, (bound + row // 2) // row)) for bound in bounds]
        for rank, (start, stop) in enumerate(itertools.pairwise(cuts), start=low):
            if start < stop:
                whole = (start, stop) == (0, rows)
                shares[rank].append(Piece(spec, -1, 0, 1) if whole else Piece(spec, spec.axis, start, stop))
        position += spec.bytes
    return shares


def split_whole(specs: Iterable[Spec], world: int, *, first: Iterable[Spec] = ()) -> list[list[Piece]]:
    """Deal whole tensors to `world` shares, the largest first to the lightest share: none has more than the mean plus
    the largest tensor. Those of `first` all go to share 0.
    """
    shares: list[list[Piece]] = [[] for _ in range(world)]
    loads = [0] * world
    for spec in first:
        shares[0].append(Piece(spec, -1, 0, 1))
        loads[0] += spec.bytes
    for spec in sorted(specs, key=lambda spec: (-spec.bytes, spec.key)):
        rank = loads.index(min(loads))
        shares[rank].append(Piece(spec, -1, 0, 1))
        loads[rank] += spec.bytes
    return shares


def write_shard(
    store: Store,
    name: str,
    pieces: Sequence[Piece],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    distributed: bool = False,
) -> FileEntry:
    """Write one safetensors file, tensor by tensor. `distributed` adds where each piece lies in its whole tensor."""
    pieces = sorted(pieces, key=lambda piece: (-piece.spec.dtype.itemsize, piece.spec.key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    if distributed:
        offsets = {piece.spec.key: {"saved_offsets": piece.offsets} for piece in pieces}
        header["__metadata__"][_SHARDING] = json.dumps(offsets)
    end = 0
    for piece in pieces:
        begin, end = end, end + _piece_shape_bytes(piece)
        header[piece.spec.key] = {
            "dtype": _NAMES[piece.spec.dtype],
            "shape": _piece_shape(piece),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise UnstorableState(
            f"the header of {name} would have {len(text)} bytes and may have {_MAX_HEADER}: too many tensors, or a "
            "loader's state with long lists or arrays; keep these as tensors"
        )

    class Chunks(Iterable[memoryview | bytes]):
        def __iter__(self) -> Iterator[memoryview | bytes]:
            yield len(text).to_bytes(8, "little") + text
            for piece in pieces:
                yield raw_bytes(piece.of(tensors[piece.spec.key]))

    return store.write(name, Chunks())


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; a view where the tensor is contiguous and on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Slot:
    """Where a piece of a tensor lies in a file."""

    file: str
    begin: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder: its dtype, whole shape and pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]


class Source(Protocol):
    """What files can be read from: a `Store`, or a `Reader`, which compares digests too."""

    def full(self, name: str) -> str: ...

    def peek(self, name: str, count: int) -> tuple[bytes, int]: ...

    def read_into(self, name: str, ranges: Iterable[tuple[int, memoryview]]) -> None: ...


class ShardIndex:
    """The tensors of a set of safetensors files, read on demand."""

    def __init__(self, store: Source, names: Iterable[str]):
        self.store = store
        self.metadata: dict[str, dict[str, str]] = {}
        slots: dict[str, list[Slot]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name in names:
            try:
                self.metadata[name], found = _read_header(store, name)
            except ValueError as error:
                raise CorruptCheckpoint(f"{store.full(name)}: bad safetensors header: {error}", file=name) from None
            for key, dtype, slot in found:
                if dtypes.setdefault(key, dtype) != dtype:
                    raise CorruptCheckpoint(f"{store.full(name)}: {short(key)} has another dtype elsewhere", file=name)
                slots.setdefault(key, []).append(slot)
        self.tensors = {key: self._join(key, dtypes[key], found) for key, found in slots.items()}

    def load(self, keys: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU, by key; all of them when no keys are given."""
        wanted = list(self.tensors if keys is None else keys)
        found = {}
        reads: dict[str, list[tuple[int, memoryview]]] = {}
        joins: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key in wanted:
            stored = self.tensors[key]
            whole = found[key] = torch.empty(stored.shape, dtype=stored.dtype)
            for slot in stored.slots:
                part = whole
                cuts = zip(slot.offsets, slot.shape, strict=True) if slot.shape != stored.shape else ()
                for axis, (offset, size) in enumerate(cuts):
                    part = part.narrow(axis, offset, size)
                if not part.is_contiguous():
                    joins.append((part, part := torch.empty(slot.shape, dtype=stored.dtype)))
                if part.numel():
                    view = part.reshape(-1).view(torch.uint8).numpy().data
                    reads.setdefault(slot.file, []).append((slot.begin, view))
        for file, ranges in reads.items():
            self.store.read_into(file, ranges)
        for target, part in joins:
            target.copy_(part)
        return found

    def _join(self, key: str, dtype: torch.dtype, slots: list[Slot]) -> Stored:
        try:
            if len({len(slot.shape) for slot in slots}) > 1:
                raise ValueError
            shape = tuple(
                max(slot.offsets[axis] + slot.shape[axis] for slot in slots) for axis in range(len(slots[0].shape))
            )
            if not is_possible(shape, dtype) or not fill_exactly(shape, slots):
                raise ValueError
        except ValueError:
            raise CorruptCheckpoint(
                f"{self.store}: the pieces of {short(key)} do not make up a tensor", file=slots[0].file
            ) from None
        return Stored(dtype, shape, tuple(slots))


def is_possible(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether torch can make such a tensor, if there is memory; of an empty one it multiplies the other sizes too."""
    return len(shape) <= _MAX_DIMENSIONS and math.prod(max(size, 1) for size in shape) * dtype.itemsize < 2**63


def _are_counts(value: Any) -> bool:
    return type(value) is list and all(map(is_count, value))


def _is_entry(value: Any) -> bool:
    """Whether this is what a header says of one tensor."""
    return (
        type(value) is dict
        and type(value.get("dtype")) is str
        and value["dtype"] in _DTYPES
        and _are_counts(value.get("shape"))
        and _are_counts(value.get("data_offsets"))
        and len(value["data_offsets"]) == 2
    )


def fill_exactly(shape: tuple[int, ...], slots: list[Slot]) -> bool:
    """Whether the pieces cover the whole, and each place of it once.

    Give each corner of a box the sign of the parity of its upper sides: boxes add up to one box exactly when the signs
    at each place add up to those of that box's corners. That needs no comparison of pieces with each other.
    """
    if len(slots) == 1:
        return slots[0].shape == shape
    cut = [axis for axis, size in enumerate(shape) if any(slot.shape[axis] != size for slot in slots)]
    if not cut or len(cut) > _MAX_CUTS:
        return not cut and len(slots) == 1
    signs: Counter[tuple[int, ...]] = Counter()
    whole = Slot("", 0, shape, (0,) * len(shape))
    for box, weight in [(whole, -1), *((slot, 1) for slot in slots)]:
        for upper in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(box.offsets[axis] + up * box.shape[axis] for axis, up in zip(cut, upper, strict=True))
            signs[corner] += weight * (-1) ** sum(upper)
    return not any(signs.values())


def _read_header(store: Source, name: str) -> tuple[dict[str, str], list[tuple[str, torch.dtype, Slot]]]:
    """Raises ValueError unless the header describes the file, byte by byte: what it names can then be allocated."""
    start, total = store.peek(name, _FIRST_READ)
    size = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= size <= min(_MAX_HEADER, total - 8):
        raise ValueError(f"{size} bytes of header in a file of {total}")
    if len(start) < 8 + size:
        start, total = store.peek(name, 8 + size)
    header = parse_json(start[8 : 8 + size])
    require(header, {})
    metadata = header.pop("__metadata__", {})
    require(metadata, by_name(is_text), "__metadata__")
    places = parse_json(metadata[_SHARDING]) if _SHARDING in metadata else None
    found, ends = [], [(0, 0)]
    for key, entry in header.items():
        if len(key) > MAX_NAME:
            raise ValueError(f"a name of {len(key)} characters")
        if not _is_entry(entry):
            raise ValueError(f"{short(key)} is {short(entry)}")
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        offsets = (0,) * len(shape)
        if places is not None:
            require(places, {key: {"saved_offsets": _are_counts}}, _SHARDING)
            offsets = tuple(places[key]["saved_offsets"])
        size_fits = is_possible(shape, dtype) and end - begin == math.prod(shape) * dtype.itemsize
        if not size_fits or len(offsets) != len(shape):
            raise ValueError(f"{short(key)} contradicts itself")
        ends.append((begin, end))
        found.append((key, dtype, Slot(name, 8 + size + begin, shape, offsets)))
    ends.sort()
    if ends[-1][1] != total - 8 - size or any(a[1] != b[0] for a, b in itertools.pairwise(ends)):
        raise ValueError("its tensors overlap, leave a hole, or do not end where the file ends")
    return metadata, found


def _piece_shape(piece: Piece) -> list[int]:
    shape = list(piece.spec.shape)
    if piece.axis >= 0:
        shape[piece.axis] = piece.stop - piece.start
    return shape


def _piece_shape_bytes(piece: Piece) -> int:
    return math.prod(_piece_shape(piece)) * piece.spec.dtype.itemsize
