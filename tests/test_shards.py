"""Who writes what, and files that safetensors, Hugging Face and PyTorch Distributed Checkpoint read as they stand."""

from __future__ import annotations

import json
import math
import random
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from pimm_ray.checkpoint import layout
from pimm_ray.checkpoint.folder import Share, prepare
from pimm_ray.checkpoint.shards import (
    _DTYPES,
    Piece,
    ShardIndex,
    Slot,
    Spec,
    fill_exactly,
    raw_bytes,
    spec_of,
    split_rows,
    split_whole,
    write_shard,
)
from pimm_ray.checkpoint.state import Snapshot
from pimm_ray.checkpoint.store import open_store
from pimm_ray.errors import CorruptCheckpoint, StorageError, UnstorableState

quick = settings(max_examples=120, deadline=None, database=None)
shapes = st.lists(st.one_of(st.integers(0, 3), st.just(1), st.integers(4, 400)), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
spec_lists = st.lists(st.tuples(shapes, dtypes), max_size=12).map(
    lambda items: [Spec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(items)]
)
worlds = st.one_of(st.integers(1, 5), st.integers(6, 40))
one = [Spec("a", (7, 3), torch.float32)]


def size(piece: Piece) -> int:
    rows = piece.spec.shape[piece.axis] if piece.axis >= 0 else 1
    return piece.spec.bytes // rows * (piece.stop - piece.start) if rows else 0


def load(share: list[Piece]) -> int:
    return sum(map(size, share))


def row(spec: Spec) -> int:
    return spec.bytes // spec.shape[spec.axis] if spec.bytes and spec.axis >= 0 else spec.bytes


def renamed(specs: list[Spec]) -> list[Spec]:
    return [Spec(f"buffer.{spec.key}", spec.shape, spec.dtype) for spec in specs]


@quick
@given(spec_lists, spec_lists.map(renamed), worlds, st.randoms(use_true_random=False))
@example(one, [], 40, random.Random(0))
@example(one, renamed(one), 3, random.Random(0))
@example([Spec("s", (), torch.float32), Spec("z", (0, 4), torch.float32)], [], 3, random.Random(0))
@example([Spec("first", (1, 1, 9, 2), torch.float32)], [], 4, random.Random(0))
def test_rows_are_dealt_so_that_each_byte_has_one_writer_and_no_share_exceeds_the_mean_by_more_than_a_row(
    specs, buffers, world, shuffler
):
    shares = split_rows(specs, world, first=buffers)
    assert len(shares) == world
    assert shares[0][: len(buffers)] == [Piece(spec, -1, 0, 1) for spec in sorted(buffers)]
    held = load(shares[0][: len(buffers)])
    shuffled = shuffler.sample(specs, len(specs)), world
    assert split_rows(*shuffled, first=buffers[::-1]) == shares, "another order of the same tensors"
    mean = (held + sum(spec.bytes for spec in specs)) / world
    assert max(map(load, shares)) <= max(held, mean + max(map(row, specs), default=0) + 1)
    shares[0] = shares[0][len(buffers) :]
    covered: dict[str, list[tuple[int, int]]] = {spec.key: [] for spec in specs}
    for share in shares:
        assert len({piece.spec.key for piece in share}) == len(share), "one file holds a key once"
        for piece in share:
            rows = piece.spec.shape[piece.axis] if piece.axis >= 0 else 1
            assert 0 <= piece.start < piece.stop <= rows
            assert piece.axis in (-1, piece.spec.axis)
            covered[piece.spec.key].append((piece.start, piece.stop) if piece.axis >= 0 else (0, -1))
    for spec in specs:
        parts = sorted(covered[spec.key])
        if parts != [(0, -1)]:
            stops = [0, *(stop for _, stop in parts)]
            assert [start for start, _ in parts] == stops[:-1] and stops[-1] == spec.shape[spec.axis]


@quick
@given(spec_lists, spec_lists.map(renamed), worlds, st.randoms(use_true_random=False))
def test_whole_tensors_are_dealt_once_and_evenly_and_buffers_all_go_to_rank_zero(specs, buffers, world, shuffler):
    shares = split_whole(specs, world, first=buffers)
    assert all(piece == Piece(piece.spec, -1, 0, 1) for share in shares for piece in share)
    assert [piece.spec for piece in shares[0][: len(buffers)]] == buffers
    rest = [piece.spec for share in [shares[0][len(buffers) :], *shares[1:]] for piece in share]
    assert sorted(rest) == sorted(specs)
    held = sum(spec.bytes for spec in buffers)
    mean = (held + sum(spec.bytes for spec in specs)) / world
    assert max(map(load, shares)) <= max(mean + max((spec.bytes for spec in specs), default=0), held)
    assert split_whole(shuffler.sample(specs, len(specs)), world, first=buffers) == shares


def test_a_large_tensor_is_cut_into_near_equal_parts_along_its_first_real_dimension():
    shares = split_rows([Spec("w", (1, 1000, 8), torch.float32), Spec("x", (), torch.float64)], 4)
    assert [sum(map(size, share)) for share in shares] == [8000, 8000, 8000, 8008]
    assert [share[0].offsets for share in shares] == [[0, 0, 0], [0, 250, 0], [0, 500, 0], [0, 750, 0]]


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of any dtype, not-a-numbers included."""
    generator = torch.Generator().manual_seed(math.prod(shape) + dtype.itemsize)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def assert_bits_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert bytes(raw_bytes(found)) == bytes(raw_bytes(expected))


def awkward() -> dict[str, torch.Tensor]:
    wide = torch.randn(6, 10)
    return {
        **{f"dtype.{name}.{len(shape)}": filled(dtype, shape) for name, dtype in _DTYPES.items()
           for shape in [(), (5,), (2, 3)]},
        "empty": torch.zeros(0),
        "empty.middle": torch.zeros(2, 0, 3),
        "transposed": wide.t(),
        "strided": wide[::2, ::3],
        "flipped-ish": wide[:, 1:4],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "name with \"quotes\", ünïcode/slash": torch.ones(1),
    }  # fmt: skip


def test_a_written_file_opens_with_plain_safetensors_and_every_value_is_equal(tmp_path):
    tensors = awkward()
    pieces = [Piece(spec_of(key, tensor), -1, 0, 1) for key, tensor in tensors.items()]
    entry = write_shard(open_store(tmp_path), "model.safetensors", pieces, tensors, {"format": "pt"})
    assert entry.bytes == (tmp_path / "model.safetensors").stat().st_size
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == tensors.keys()
        for key, tensor in tensors.items():
            assert_bits_equal(file.get_tensor(key), tensor)
    ours = ShardIndex(open_store(tmp_path), ["model.safetensors"]).load()
    for key, tensor in tensors.items():
        assert_bits_equal(ours[key], tensor)


def test_each_tensor_starts_aligned_to_its_own_size(tmp_path):
    tensors = awkward()
    write_shard(open_store(tmp_path), "f", [Piece(spec_of(k, t), -1, 0, 1) for k, t in tensors.items()], tensors, {})
    for stored in ShardIndex(open_store(tmp_path), ["f"]).tensors.values():
        assert stored.slots[0].begin % stored.dtype.itemsize == 0


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e5m2fnuz])
def test_a_dtype_that_safetensors_lacks_is_refused_by_name_before_anything_is_written(dtype):
    with pytest.raises(UnstorableState, match=f"^layer.weight: .*{dtype}") as caught:
        spec_of("layer.weight", torch.zeros(2, dtype=dtype))
    assert caught.value.key == "layer.weight"


def trainer_tensors() -> dict[str, torch.Tensor]:
    return {
        "optimizer.0.embedding.exp_avg": torch.randn(31, 7),
        "optimizer.0.embedding.step": torch.tensor(3.0),
        "optimizer.0.row.exp_avg": torch.randn(1, 50, 2),
        "optimizer.0.column.exp_avg": torch.randn(40, 9).t(),
        "optimizer.0.half.exp_avg": torch.randn(17).bfloat16(),
        "optimizer.0.mask": torch.arange(23) % 3 == 0,
        "optimizer.0.counts": torch.arange(11),
        "optimizer.0.wave": torch.randn(5, dtype=torch.complex64),
        "optimizer.0.nothing": torch.zeros(4, 0),
        "ema.image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


def write_world(path, world: int, *, weights=None, trainer=None, parameters=None) -> None:
    """What `world` ranks would write, by one process."""
    held = weights or {}
    snapshot = Snapshot(held, frozenset(parameters if parameters is not None else held), trainer or {}, {}, {})
    store = open_store(path)
    prepare(store)
    for rank in range(world):
        share = Share(snapshot, {}, rank=rank, world=world)
        share.write(store, "an-id")
        if rank == 0:
            share.write_state(store, "an-id", {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_the_trainer_folder_of_any_number_of_writers_loads_with_stock_pytorch_and_with_ours(tmp_path, world):
    tensors = trainer_tensors()
    write_world(tmp_path, world, trainer=tensors)
    folder = tmp_path / layout.TRAINER
    names = sorted(file.name for file in folder.iterdir())
    assert 1 < len(names) <= world or world == len(names) == 1

    target = {key: filled(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    index = ShardIndex(open_store(folder), names)
    ours = index.load()
    assert ours.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert_bits_equal(target[key], tensor)
        assert_bits_equal(ours[key], tensor)
    assert any(len(stored.slots) > 1 for stored in index.tensors.values()) == (world > 1)
    assert_bits_equal(index.load(["optimizer.0.mask"])["optimizer.0.mask"], tensors["optimizer.0.mask"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pieces_cut_along_a_later_dimension_are_joined_too(tmp_path):
    whole = torch.randn(4, 5, 3)
    for number, (start, stop) in enumerate([(0, 2), (2, 5)]):
        piece = Piece(spec_of("w", whole), 1, start, stop)
        write_shard(open_store(tmp_path), f"{number}.safetensors", [piece], {"w": whole}, {}, distributed=True)
    ours = ShardIndex(open_store(tmp_path), ["0.safetensors", "1.safetensors"]).load()
    theirs = {"w": torch.zeros(4, 5, 3)}
    dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(ours["w"], whole) and torch.equal(theirs["w"], whole)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_the_weights_folder_of_any_number_of_writers_is_a_hugging_face_model(tmp_path, world):
    weights = {f"layer.{i}.weight": torch.randn(i + 1, 5) for i in range(6)}
    weights |= {"norm.running_mean": torch.randn(4), "norm.batches": torch.tensor(7)}
    parameters = [name for name in weights if name.startswith("layer")]
    write_world(tmp_path, world, weights=weights, parameters=parameters)
    folder = tmp_path / layout.WEIGHTS
    names = {file.name for file in folder.iterdir()}
    if world == 1:
        assert names == {"model.safetensors"}
        parts = {key: "model.safetensors" for key in weights}
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        parts = index["weight_map"]
        count = len(set(parts.values()))
        assert count == min(world, 7)
        expected = {f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)}
        assert names == {"model.safetensors.index.json", *expected} and set(parts.values()) == expected
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
        buffers = {parts["norm.running_mean"], parts["norm.batches"]}
        assert buffers == {f"model-00001-of-{count:05}.safetensors"}, "rank 0 speaks for the buffers"
    assert parts.keys() == weights.keys()
    for part in set(parts.values()):
        with safe_open(folder / part, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()[layout.ID_KEY] == "an-id"
        held = load_file(folder / part)
        assert set(held) == {key for key, where in parts.items() if where == part}
        for key, tensor in held.items():
            assert_bits_equal(tensor, weights[key])


def test_a_model_without_parameters_still_has_a_weights_file(tmp_path):
    write_world(tmp_path, 3)
    assert load_file(tmp_path / layout.WEIGHTS_SINGLE) == {}
    assert list((tmp_path / layout.TRAINER).iterdir()) == []


def spoil(tmp_path, edit) -> tuple[object, list[str]]:
    """Two files of one tensor, the header of the second changed by `edit`."""
    tensors = {"w": torch.arange(8.0)}
    write_world(tmp_path, 2, trainer=tensors)
    names = [layout.trainer_file(0), layout.trainer_file(1)]
    path = tmp_path / names[1]
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return open_store(tmp_path), names


def sharding(text: str):
    return lambda header: header["__metadata__"].update(DCP_SHARDING_INFO=text)


WRONG_HEADERS = {
    "another dtype than the other part": lambda h: h["w"].update(dtype="I32"),
    "unknown dtype": lambda h: h["w"].update(dtype="F99"),
    "larger shape": lambda h: h["w"].update(shape=[5]),
    "negative shape": lambda h: h["w"].update(shape=[-4]),
    "fewer bytes": lambda h: h["w"].update(data_offsets=[0, 12]),
    "no entry": lambda h: h.update(w=[]),
    "no place": sharding("{}"),
    "no json": sharding("["),
    "a gap between the parts": sharding('{"w": {"saved_offsets": [5]}}'),
    "other dimensions": sharding('{"w": {"saved_offsets": [0, 0]}}'),
    "negative place": sharding('{"w": {"saved_offsets": [-1]}}'),
}


@pytest.mark.parametrize("wrong", WRONG_HEADERS)
def test_a_header_that_does_not_add_up_is_corrupt_and_the_file_is_named(tmp_path, wrong):
    store, names = spoil(tmp_path, WRONG_HEADERS[wrong])
    with pytest.raises(CorruptCheckpoint) as caught:
        ShardIndex(store, names).load()
    assert caught.value.file in names


def test_a_missing_part_is_noticed(tmp_path):
    write_world(tmp_path, 3, trainer={"w": torch.arange(9.0)})
    with pytest.raises(CorruptCheckpoint, match="'w' do not make up"):
        ShardIndex(open_store(tmp_path), [layout.trainer_file(0), layout.trainer_file(2)])


@pytest.mark.parametrize("damage", [lambda d: d[:-4], lambda d: d[:5], lambda d: b"\xff" * 8 + d[8:]])
def test_a_file_cut_short_is_an_error_and_never_read_as_less(tmp_path, damage):
    store, names = spoil(tmp_path, lambda header: None)
    path = tmp_path / names[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises((StorageError, CorruptCheckpoint)):
        ShardIndex(store, names).load()


boxes = st.integers(1, 3).flatmap(
    lambda n: st.lists(st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * n), min_size=1, max_size=6)
)


def cut_up(shape, draw):
    """Boxes that fill a shape exactly."""
    found = [tuple((0, length) for length in shape)]
    for _ in range(draw.randrange(6)):
        box = found.pop(draw.randrange(len(found)))
        axis = draw.randrange(len(shape))
        offset, length = box[axis]
        at = draw.randrange(length + 1)
        parts = [part for part in ((offset, at), (offset + at, length - at)) if part[1]]
        found += [(*box[:axis], part, *box[axis + 1 :]) for part in parts]
    return found


def filled_once(shape, found):
    """What `fill_exactly` says, counted place by place."""
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in found:
        seen[tuple(slice(offset, offset + length) for offset, length in box)] += 1
    return bool((seen == 1).all())


@quick
@given(boxes, st.randoms(use_true_random=False))
def test_pieces_fill_a_tensor_exactly_when_each_place_of_it_is_in_one_of_them(found, draw):
    if draw.random() < 0.5:
        found = cut_up([draw.randrange(1, 5) for _ in range(draw.randrange(1, 4))], draw)
        if draw.random() < 0.3:
            found[draw.randrange(len(found))] = draw.choice(found)
    shape = tuple(max(box[axis][0] + box[axis][1] for box in found) for axis in range(len(found[0])))
    slots = [Slot("", 0, tuple(length for _, length in box), tuple(start for start, _ in box)) for box in found]
    if math.prod(shape):
        assert fill_exactly(shape, slots) == filled_once(shape, found)


def test_ten_thousand_pieces_of_one_tensor_are_compared_at_once():
    slots = [Slot("", 0, (1, 7), (i, 0)) for i in range(10_000)]
    assert fill_exactly((10_000, 7), slots)
    assert not fill_exactly((10_000, 7), [*slots[:-1], slots[0]])


def test_two_pieces_that_overlap_and_leave_a_hole_are_corrupt(tmp_path):
    whole = torch.arange(8.0)
    for number, (start, stop) in enumerate([(0, 4), (2, 6), (4, 8)]):
        piece = Piece(spec_of("w", whole), 0, start, stop)
        write_shard(open_store(tmp_path), f"{number}.safetensors", [piece], {"w": whole}, {}, distributed=True)
    assert ShardIndex(open_store(tmp_path), ["0.safetensors", "2.safetensors"]).load()["w"].tolist() == whole.tolist()
    piece = Piece(spec_of("w", whole), 0, 7, 8)
    write_shard(open_store(tmp_path), "3.safetensors", [piece], {"w": whole}, {}, distributed=True)
    write_shard(
        open_store(tmp_path), "4.safetensors", [Piece(spec_of("w", whole), 0, 6, 7)], {"w": whole}, {}, distributed=True
    )
    for names in (["0", "1", "4"], ["0", "1", "3", "4"], ["0", "1", "3"], ["0", "2", "3"]):
        with pytest.raises(CorruptCheckpoint, match="'w' do not make up"):
            ShardIndex(open_store(tmp_path), [f"{name}.safetensors" for name in names])


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "huge": {"w": entry([2**40], 0, 2**42)},
    "a product that overflows": {"w": entry([2**32, 2**32], 0, 0)},
    "empty and huge": {"w": entry([0, 2**50, 2**50], 0, 0), "v": entry([2], 0, 8)},
    "many dimensions": {"w": entry([2] + [1] * 999, 0, 8)},
    "digits": b'{"w":{"dtype":"F32","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,8]}}',
    "1e400": b'{"w":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}',
    "floats": {"w": entry([2.0], 0, 8)},
    "booleans": {"w": entry([True, 2], 0, 8)},
    "one place for two": {"w": entry([2], 0, 8), "v": entry([2], 0, 8)},
    "overlapping": {"w": entry([1], 0, 4), "v": entry([2], 0, 8)},
    "a hole": {"w": entry([1], 4, 8)},
    "less than the file": {"w": entry([1], 0, 4)},
    "beyond the file": {"w": entry([3], 0, 12)},
    "a key twice": b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"shape":[2]}}',
    "a long name": {"w" * 5000: entry([2], 0, 8)},
    "a list": [],
    "metadata of numbers": {"__metadata__": {"a": 1}, "w": entry([2], 0, 8)},
    "deep": b'{"w":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "another size of dtype": {"w": entry([2], 0, 8, "F64")},
    "a dtype of another kind": {"w": entry([2], 0, 8, ["F32"])},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_asks_for_what_the_file_does_not_hold_is_refused_before_anything_is_made(tmp_path, name):
    raw_file(tmp_path / "f", HOSTILE[name], bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match="bad safetensors header") as caught:
            ShardIndex(open_store(tmp_path), ["f"])
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.file == "f" and len(str(caught.value)) < 1000


@pytest.mark.parametrize("size", [0, 1, 3, 2**26, 2**31, 2**40, 2**64 - 1])
def test_a_header_length_beyond_the_file_allocates_nothing(tmp_path, size):
    (tmp_path / "f").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptCheckpoint, match="of header in a file of 10"):
        ShardIndex(open_store(tmp_path), ["f"])
