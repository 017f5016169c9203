"""State goes to JSON plus tensors and comes back exactly, or is refused by name."""

from __future__ import annotations

import enum
import json
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pimm_ray.checkpoint.codec import decode, encode
from pimm_ray.checkpoint.shards import _DTYPES
from pimm_ray.errors import CorruptCheckpoint, UnstorableState

quick = settings(max_examples=80, deadline=None, database=None)


def there_and_back(value: Any) -> Any:
    """Through strict JSON text, as it is on disk."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "it", tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


keys = st.one_of(
    st.text(max_size=5), st.just("$"), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False),
    st.binary(max_size=3), st.tuples(st.integers(), st.text(max_size=2)), st.frozensets(st.integers(), max_size=2),
)  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=6),
    st.binary(max_size=6), st.sets(st.one_of(st.integers(), st.text(max_size=2)), max_size=3),
    st.frozensets(st.tuples(st.integers(), st.booleans()), max_size=3),
    st.integers(-(2**63), 2**63 - 1).map(np.int64), st.floats().map(np.float64),
    st.lists(st.floats(width=32), max_size=3).map(lambda v: np.array(v, np.float32)),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.lists(st.integers(0, 9), max_size=4).map(torch.Size), st.text("ab", max_size=5).map(Counter),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.lists(st.tuples(keys, inner), max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


@quick
@given(trees)
@example({"$": 1, "v": [2]})
@example({"$": "tensor", "key": "nothing"})
@example({1: "int", "1": "text", 1.5: 0, None: 0, (): 0, b"1": 0})
@example([{"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}])
def test_any_plain_tree_comes_back_exactly(tree):
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "number",
    [0, -1, 2**63, -(2**64) - 1, 10**4000, 10**9000, math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1 + 0.2,
     complex(-0.0, math.nan), complex(math.inf, -0.0), True, False],
    ids=lambda number: f"{type(number).__name__}{str(number)[:8] if not isinstance(number, int) else ''}",
)  # fmt: skip
def test_each_number_keeps_its_type_and_its_bits(number):
    assert same(there_and_back(number), number)
    assert same(there_and_back({"deep": [(number,)]}), {"deep": [(number,)]})


@pytest.mark.parametrize("text", ["", "a\0b", "ünï", "\U0001f600", "$", '"\\\n', "\ud800"], ids=ascii)
def test_each_string_comes_back_as_value_and_as_key(text):
    assert same(there_and_back({text: text, 0: text}), {text: text, 0: text})


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (1, 4, 3)], ids=str)
def test_a_tensor_of_every_dtype_and_shape_is_handed_over_as_it_is(dtype, shape):
    tensor = torch.randint(0, 100, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = (tensor % 2 if dtype == torch.bool else tensor).view(dtype).reshape(shape)
    assert same(there_and_back([tensor])[0], tensor)


def test_a_parameter_comes_back_as_a_tensor_without_gradient():
    back = there_and_back(torch.nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor and not back.requires_grad


def test_tensors_are_referred_to_under_their_leaf_path_and_not_copied():
    tensors: dict[str, torch.Tensor] = {}
    live = torch.zeros(3)
    encode({"a": [live, {2: live}], "b": 1}, "top", tensors)
    assert list(tensors) == ["top.a.0", "top.a.1.2"]
    assert tensors["top.a.0"].data_ptr() == live.data_ptr()


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "<i2", ">i4", "u8", "e", "f4", ">f8", "g", "F", "D", "S3", "U2", "M8[ns]", "m8[D]"]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_a_numpy_array_of_every_plain_dtype_comes_back_exactly_and_writable(dtype, shape):
    raw = np.arange(math.prod(shape) * np.dtype(dtype).itemsize, dtype=np.uint8) % 2
    array = np.ndarray(shape, dtype, raw.tobytes()).copy()
    back = there_and_back(array)
    assert same(back, array)
    assert back.flags.writeable and back.flags.owndata
    if shape:
        assert same(there_and_back(np.asfortranarray(array)), array)
        assert same(there_and_back(array[..., ::-1]), array[..., ::-1].copy())


@pytest.mark.parametrize(
    "scalar",
    [np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16("nan"), np.float32("-0.0"), np.longdouble("0.1"),
     np.complex64(1 + 2j), np.str_("héllo"), np.str_(""), np.bytes_(b"ab"), np.bytes_(b""),
     np.datetime64("2026-01-02"), np.timedelta64(3, "s")],
    ids=lambda scalar: f"{type(scalar).__name__}-{scalar}",
)  # fmt: skip
def test_a_numpy_scalar_stays_a_numpy_scalar(scalar):
    assert same(there_and_back(scalar), scalar)


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 2


class Name(str):
    pass


class Points(np.ndarray):
    pass


class Marked(torch.Tensor):
    pass


REFUSED = {
    "Colour": Colour.RED,
    "Level": Level.HIGH,
    "Name": Name("x"),
    "Random": random.Random(0),
    "function": lambda: 0,
    "type": int,
    "P": namedtuple("P", "x y")(1, 2),
    "Fraction": Fraction(1, 3),
    "defaultdict": defaultdict(list),
    "deque": deque([1]),
    "range": range(3),
    "bytearray": bytearray(b"x"),
    "Generator": np.random.default_rng(0),
    "object": object(),
    "void": np.zeros(1, [("a", "i4"), ("b", "f8")])[0],
    "ndarray of object": np.array([1, None], object),
    "ndarray of [('a', '<i4')]": np.zeros(2, [("a", "<i4")]),
    "Points": np.zeros(2).view(Points),
    "MaskedArray": np.ma.masked_array([1, 2], [True, False]),
    "Marked": torch.zeros(2).as_subclass(Marked),
    "torch.sparse_coo": torch.eye(2).to_sparse(),
    "dense tensors": torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_need_pickle_is_refused_with_the_path_of_the_leaf(kind):
    tree = {"dataset": [0, {"state": (1, REFUSED[kind])}]}
    with pytest.raises(UnstorableState) as caught:
        encode(tree, "loader", {})
    assert caught.value.key == "loader.dataset.1.state.1"
    assert str(caught.value).startswith("loader.dataset.1.state.1: ") and kind in str(caught.value)


@pytest.mark.parametrize("key", [Colour.RED, Level.HIGH, Name("x"), Fraction(1, 2)], ids=repr)
def test_a_key_that_would_need_pickle_is_refused_too(key):
    with pytest.raises(UnstorableState, match=r"^extra\.counts\.key: "):
        encode({"counts": {key: 1}}, "extra", {})


def itself_in(make):
    outer = make(None)
    inner = make(outer)
    (outer.append if isinstance(outer, list) else lambda v: outer.__setitem__(0, v))(inner)
    return outer


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: {0: v}, lambda v: {"k": [v]}], ids=["list", "int", "str"])
def test_a_structure_that_contains_itself_is_refused_however_deep_the_stack_already_is(make):
    def deeper(frames):
        return encode(itself_in(make), "extra.graph", {}) if not frames else deeper(frames - 1)

    with pytest.raises(UnstorableState, match="contains itself") as caught:
        deeper(sys.getrecursionlimit() // 3)
    assert caught.value.key.startswith("extra.graph") and len(str(caught.value)) < 300


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: {0: v}, lambda v: OrderedDict(k=(v,))])
def test_whatever_depth_is_stored_is_also_read_back_with_less_stack_than_it_was_stored_with(make):
    value, deepest = 0, None
    for _ in range(300):
        value = make(value)
        try:
            encode(value, "it", {})
        except UnstorableState:
            break
        deepest = value

    def deeper(frames):
        return there_and_back(deepest) if not frames else deeper(frames - 1)

    assert same(deeper(sys.getrecursionlimit() // 4), deepest)


@pytest.mark.parametrize(
    "document",
    [{"$": "pickle", "v": "gASVAAAA"}, {"$": "tensor", "key": "missing"}, {"$": "tensor"}, {"$": ["unhashable"]},
     {"$": "array", "v": "", "dtype": "O", "shape": [0]}, {"$": "array", "v": "", "dtype": "V8", "shape": [0]},
     {"$": "array", "v": "AAAA", "dtype": "<i4", "shape": [9]}, {"$": "scalar", "v": "!", "dtype": "nope", "shape": []},
     {"$": "float", "v": "os.system"}, {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[[], 1]]},
     {"$": "set", "v": [[1]]}, {"$": "complex", "v": ["a", 1]}, {"$": "int", "v": "os"}, {"$": "bytes", "v": 3},
     {"$": "Size", "v": ["x"]}],
    ids=json.dumps,
)  # fmt: skip
def test_a_document_that_we_never_write_is_corrupt_and_runs_nothing(document):
    with pytest.raises(CorruptCheckpoint):
        decode({"a": [document]}, {})
