"""Records from JSON, which anybody may have written: each value has the type of its annotation."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

#: No number of a machine is larger; sums and products of such are finite.
_LARGEST = 1e18


def record_of(kind: type[T], data: object, what: str) -> T:
    """Return the record that ``json`` has read.

    Raises:
        ValueError: It is none of this kind, of which a message says ``what`` it should be.
    """
    try:
        return cast(T, _reader(cast(Any, kind))(data))
    except ValueError as error:
        raise ValueError(f"this is no {what}: {error} in {data!r:.200}") from error


def clean(text: str) -> str:
    """Text of others in one line, without what steers a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that checks a value of one type, and makes it of JSON's."""
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _reader_of_record(kind)
    if origin in (Union, types.UnionType):
        (read,) = (_reader(part) for part in parts if part is not types.NoneType)
        return lambda data: None if data is None else read(data)
    if origin is Literal:
        return lambda data: data if data in parts and isinstance(data, str) else _refuse(data)
    if origin is Mapping:
        key, value = map(_reader, parts)
        return lambda data: {key(k): value(v) for k, v in _only(dict, data).items()}
    if origin is tuple and parts[-1] is Ellipsis:
        entry = _reader(parts[0])
        return lambda data: tuple(map(entry, _only(list, data)))
    if origin is tuple:
        reads = tuple(map(_reader, parts))
        return lambda data: tuple(
            read(one) for read, one in zip(reads, _only(list, data), strict=True)
        )
    if kind in (int, float):
        return functools.partial(_number, kind)
    # Recordings have few texts, each many times.
    return lambda data: sys.intern(clean(_only(str, data))) if kind is str else _only(kind, data)


def _reader_of_record(kind: Any) -> Callable[[Any], Any]:
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields}

    def read(data: Any) -> Any:
        values = {}
        for name, value in _only(dict, data).items():
            try:
                values[name] = readers.get(name, _refuse)(value)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error
        try:
            return kind(**values)
        except TypeError as error:
            # A field is missing.
            raise ValueError(str(error)) from error

    return read


def _only(kind: type[T], data: object) -> T:
    return data if isinstance(data, kind) else _refuse(data)


def _number(kind: type, data: Any) -> Any:
    # NaN is not below anything, and JSON has whole numbers for what may be a fraction.
    if type(data) in (int, kind) and -_LARGEST < data < _LARGEST:
        return kind(data)
    return _refuse(data)


def _refuse(data: Any) -> Any:
    raise ValueError(f"unexpected {data!r:.40}; it may come from a newer version")
