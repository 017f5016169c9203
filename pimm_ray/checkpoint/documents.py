"""JSON from outside: read once, no key twice, and held against the form that we write. Pure."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from typing import Any

LARGEST = 2**53
"""Of a count: steps, samples, bytes. Sums and products of a few of them stay far inside 64 bits or a float."""
MAX_NAME = 4096
"""Characters of the name of a tensor or of a path."""

Form = Any
"""What a value must be: a predicate; a dict of forms by key, all of which must be there (others may be); a list of one
form, which each item of a list must have."""


def parse_json(data: bytes | bytearray | str) -> Any:
    """The JSON in `data`. Costs time and memory in proportion to its size, which the caller has bounded.

    Raises:
        ValueError: it is not JSON, nests deeper than Python's recursion limit, has a number of more digits than Python
            reads, or an object with one key twice.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def require(value: Any, form: Form, key: str = "") -> None:
    """Raises ValueError, naming the key, unless `value` has the form."""
    if isinstance(form, dict):
        if type(value) is not dict:
            raise ValueError(f"{key or 'the document'} is {short(value)}, not an object")
        for name, inner in form.items():
            path = f"{key}.{name}" if key else name
            if name not in value:
                raise ValueError(f"{path} is missing")
            require(value[name], inner, path)
    elif isinstance(form, list):
        if type(value) is not list:
            raise ValueError(f"{key} is {short(value)}, not a list")
        for number, item in enumerate(value):
            require(item, form[0], f"{key}.{number}")
    elif not form(value):
        raise ValueError(f"{key} is {short(value)}")


def is_text(value: Any) -> bool:
    return type(value) is str


def is_name(value: Any) -> bool:
    """Short, and of characters that print."""
    return type(value) is str and 0 < len(value) <= 255 and value.isprintable()


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def is_whole(value: Any) -> bool:
    return type(value) is int


def is_number(value: Any) -> bool:
    """NaN and infinities too: a metric may be one."""
    return type(value) is float or (type(value) is int and abs(value) < 2**1000)


def is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def is_anything(value: Any) -> bool:
    return True


def optional(form: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or form(value)


def by_name(form: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A dict whose values all have the form."""
    return lambda value: type(value) is dict and all(type(key) is str and form(item) for key, item in value.items())


def short(value: Any) -> str:
    """A value as a message quotes it, however large it is."""
    return reprlib.repr(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
