"""Python state to JSON plus tensors, and back exactly. Nothing here can run code from a checkpoint."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pimm_ray.checkpoint.documents import short
from pimm_ray.errors import CorruptCheckpoint, UnstorableState

_TAG = "$"
_MAX_DEPTH = 80
"""Each level costs up to 6 frames of Python's 1,000 on the way back; what is stored must be readable again."""
_MAX_BITS = 4096
"""Python refuses to print or parse decimal integers that are much longer; hexadecimal ones have no limit."""
_ARRAY_KINDS = "biufcSUmM"
_DTYPE = re.compile(rf"[<>|=][{_ARRAY_KINDS}]\d{{1,9}}(\[\d{{0,9}}[A-Za-z]{{1,7}}\])?")


def encode(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON. Tensors are put into `tensors` under their leaf path and referred to from there.

    Stores None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict with any of these as keys,
    OrderedDict, Counter, torch.Size, numpy arrays and scalars, and dense torch tensors.

    Raises:
        UnstorableState: any other type; the message names the leaf, `key` being the path of `value` itself.
    """
    return _encode(value, key, tensors, 0)


def decode(document: Any, tensors: Mapping[str, torch.Tensor], key: str = "value", *, file: str = "") -> Any:
    """The value that `encode` was given. `key` and `file` are for messages.

    Raises:
        CorruptCheckpoint: the document is not one that `encode` makes, or names a tensor that is not there.
    """
    try:
        return _decode(document, tensors, 0)
    except (KeyError, TypeError, ValueError, OverflowError, SystemError, RecursionError) as error:
        what = f"{file}: {key} cannot be decoded: {type(error).__name__}: {short(str(error))}"
        raise CorruptCheckpoint(what, file=file) from None


def tensor_reference(key: str) -> dict[str, str]:
    return {_TAG: "tensor", "key": key}


def _encode(value: Any, key: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        top = key[:80]
        raise UnstorableState(f"{top}...: nested more than {_MAX_DEPTH} deep, or it contains itself", key=top)

    def inner(item: Any, name: Any) -> Any:
        return _encode(item, f"{key}.{name}", tensors, depth + 1)

    def items(values: Any) -> list[Any]:
        return [inner(item, i) for i, item in enumerate(values)]

    def pairs(mapping: Mapping[Any, Any]) -> list[Any]:
        return [[inner(k, "key"), inner(v, k)] for k, v in mapping.items()]

    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= _MAX_BITS else _tagged("int", hex(value))
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", str(value))
    if kind is list:
        return items(value)
    if kind is dict:
        if all(type(name) is str and name != _TAG for name in value):
            return {name: inner(item, name) for name, item in value.items()}
        return _tagged("dict", pairs(value))
    if kind is OrderedDict:
        return _tagged("OrderedDict", pairs(value))
    if kind is Counter:
        return _tagged("Counter", pairs(value))
    if kind is tuple:
        return _tagged("tuple", items(value))
    if kind is torch.Size:
        return _tagged("Size", list(value))
    if kind in (set, frozenset):
        return _tagged(kind.__name__, sorted(items(value), key=repr))
    if kind is bytes:
        return _tagged("bytes", _text(value))
    if kind is complex:
        return _tagged("complex", [inner(value.real, "real"), inner(value.imag, "imag")])
    if isinstance(value, np.generic | np.ndarray):
        if value.dtype.kind in _ARRAY_KINDS and isinstance(value, np.generic) | (kind is np.ndarray):
            return {
                **_tagged("scalar" if isinstance(value, np.generic) else "array", _text(value.tobytes())),
                "dtype": value.dtype.str,
                "shape": list(value.shape),
            }
        raise UnstorableState(f"{key}: numpy {kind.__name__} of {value.dtype} cannot be stored without pickle", key=key)
    if kind in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise UnstorableState(f"{key}: only dense tensors with data can be stored, not {value.layout}", key=key)
        name = key
        while name in tensors:
            name += "+"
        tensors[name] = value.detach()
        return tensor_reference(name)
    raise UnstorableState(
        f"{key}: {kind.__name__} cannot be stored without pickle; keep plain data there (numbers, strings, lists, "
        "dicts, arrays, tensors), or give its owner a state_dict() of plain data",
        key=key,
    )


def _decode(document: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")

    def inner(item: Any) -> Any:
        return _decode(item, tensors, depth + 1)

    if isinstance(document, list):
        return [inner(item) for item in document]
    if not isinstance(document, dict):
        return document
    if _TAG not in document:
        return {name: inner(item) for name, item in document.items()}
    kind = document[_TAG]
    if kind == "tensor":
        return tensors[document["key"]]
    stored = document["v"]
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[stored]
    if kind == "int":
        return int(stored, 16)
    if kind == "bytes":
        return base64.b64decode(stored, validate=True)
    if kind in ("array", "scalar"):
        return _decode_array(kind, document)
    if type(stored) is not list:
        raise TypeError(f"{kind} of a {type(stored).__name__}")
    if kind in ("dict", "OrderedDict", "Counter"):
        plain = {inner(name): inner(item) for name, item in stored}
        return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[kind](plain)
    value = [inner(item) for item in stored]
    if kind == "complex":
        real, imaginary = value
        return complex(float(real), float(imaginary))
    if kind == "Size" and any(type(size) is not int or size < 0 for size in value):
        raise ValueError("torch.Size of something else than sizes")
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}[kind](value)


def _decode_array(kind: str, document: dict[str, Any]) -> Any:
    name, shape, data = document["dtype"], document["shape"], base64.b64decode(document["v"], validate=True)
    dtype = np.dtype(name) if type(name) is str and _DTYPE.fullmatch(name) else None
    if dtype is None or any(type(size) is not int or size < 0 for size in shape) or (kind == "scalar" and shape):
        raise ValueError(f"{kind} of dtype {short(name)} and shape {short(shape)}")
    # Equal sizes: else a line of text would stand for gigabytes. An item of no bytes has some when it is copied.
    if (len(data) < dtype.itemsize) if kind == "scalar" else (math.prod(shape) * (dtype.itemsize or 1) != len(data)):
        raise ValueError(f"{len(data)} bytes for shape {short(shape)} of {name}")
    array: Any = np.ndarray(shape, dtype, data)
    return array[()] if kind == "scalar" else array.copy()


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TAG: kind, "v": value}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
