"""The header of a safetensors file: names, types, shapes and places of its tensors.

Note [Why the format is written here]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A safetensors file is the length of the header in eight bytes, the header in JSON, and the bytes of
the tensors one after the other. So little is quicker written than called: bytes go to the file, to
the hash and into tensors without a copy, a hostile header is refused for a reason of ours, and
nothing must be installed. The files are read by the package ``safetensors`` as any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dataparallel.extras.checkpoint import strict_json
from dataparallel.extras.checkpoint.strict_json import shown

# Text of JSON takes twenty times as much memory once it is read: no more than that of a
# hostile file. The package safetensors allows three times as much.
MAX_HEADER = 32 << 20
# Beyond this, sizes in bytes do not fit torch's integers.
_MAX_SIZE = 2**62
_MAX_DIMENSIONS = 1024
# The start of the data, so that all of it is aligned when it is mapped into memory.
_ALIGNMENT = 8

_OWN_KEY = "dataparallel"
_METADATA = "__metadata__"


def _available(names: Mapping[str, str]) -> dict[torch.dtype, str]:
    found = {getattr(torch, name, None): code for name, code in names.items()}
    return {dtype: code for dtype, code in found.items() if dtype is not None}


CODES = _available(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
    }
)
_DTYPES = {code: dtype for dtype, code in CODES.items()}

# Types that the format does not have are stored as bytes; a note of ours says what they are.
_AS_BYTES = _available(dict.fromkeys(("complex128", "complex32", "float4_e2m1fn_x2"), "U8"))
_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in _AS_BYTES}


@dataclass(frozen=True)
class Place:
    """Where a tensor is in a file, in bytes from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says of its tensors, in the order of their bytes, and the metadata."""

    places: tuple[Place, ...]
    metadata: Any

    @property
    def data_bytes(self) -> int:
        """How many bytes follow the header."""
        return self.places[-1].end if self.places else 0


def supports(dtype: torch.dtype) -> bool:
    """Whether tensors of a type can be saved."""
    return dtype in CODES or dtype in _AS_BYTES


def plan(tensors: Mapping[str, torch.Tensor], metadata: Any) -> Header:
    """Where each tensor goes in the file.

    Args:
        tensors: By name; of a type that :func:`supports` knows.
        metadata: What JSON can hold.

    Returns:
        The header.
    """
    # The widest first, so that each begins at a multiple of its own size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    places, end = [], 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        places.append(Place(name, tensor.dtype, tuple(tensor.shape), begin, end))
    return Header(tuple(places), metadata)


def encode(header: Header) -> bytes:
    """The bytes with which the file begins.

    Args:
        header: As :func:`plan` made it.

    Returns:
        The length, the JSON text, and blanks up to a multiple of eight bytes.

    Raises:
        ValueError: The header is longer than other readers take, or the metadata is not JSON.
        TypeError: The metadata holds something that JSON does not have.
    """
    notes = {"metadata": header.metadata, "dtypes": _notes(header.places)}
    fields: dict[str, Any] = {
        _METADATA: {"format": "pt", _OWN_KEY: strict_json.encode(notes).decode("ascii")}
    }
    for place in header.places:
        shape = list(place.shape)
        if place.dtype in _AS_BYTES:
            shape = [place.end - place.begin]
        code = CODES.get(place.dtype, "U8")
        fields[place.name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [place.begin, place.end],
        }
    text = strict_json.encode(fields)
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"the names, shapes and metadata take {len(text):,} bytes, and {MAX_HEADER:,} are "
            "allowed; save fewer or larger tensors, or a part of them under another name"
        )
    return len(text).to_bytes(8, "little") + text


def header_length(start: bytes, file_bytes: int) -> int:
    """The length of the JSON text, from the first eight bytes of a file.

    Args:
        start: The bytes.
        file_bytes: The size of the whole file.

    Returns:
        The length in bytes.

    Raises:
        ValueError: The file is too short for what it says.
    """
    if len(start) < 8:
        raise ValueError(f"the file has {file_bytes} bytes and no header")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER or length > file_bytes - 8:
        raise ValueError(
            f"the header is said to have {length:,} bytes, the file has {file_bytes:,} and "
            f"{MAX_HEADER:,} are allowed"
        )
    return length


def decode(text: bytes | bytearray | memoryview, data_bytes: int) -> Header:
    """Read the JSON text of a header, that may come from anybody.

    Args:
        text: As many bytes as :func:`header_length` said.
        data_bytes: How many bytes follow in the file.

    Returns:
        The header; its tensors take all of these bytes, in order and without overlap.

    Raises:
        ValueError: The text is anything else.
    """
    fields = strict_json.decode(text)
    if not isinstance(fields, dict):
        raise ValueError("the header is not an object")
    metadata, notes = _read_metadata(fields.pop(_METADATA, {}))
    places = sorted(
        (_read_place(name, field, notes.pop(name, None)) for name, field in fields.items()),
        key=lambda place: (place.begin, place.end),
    )
    if notes:
        raise ValueError(f"there is a note for {shown(next(iter(notes)))}, and no such tensor")
    end = 0
    for place in places:
        if place.begin != end:
            kind = "overlap" if place.begin < end else "have a hole between them"
            raise ValueError(f"the tensors before and at {shown(place.name)} {kind}")
        end = place.end
    if end != data_bytes:
        raise ValueError(f"the tensors take {end:,} bytes, and {data_bytes:,} follow the header")
    return Header(tuple(places), metadata)


def _notes(places: tuple[Place, ...]) -> dict[str, Any]:
    return {
        place.name: [str(place.dtype).removeprefix("torch."), list(place.shape)]
        for place in places
        if place.dtype in _AS_BYTES
    }


def _read_metadata(field: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(field, dict) or not all(isinstance(v, str) for v in field.values()):
        raise ValueError("the metadata is not an object of strings")
    if _OWN_KEY not in field:
        return None, {}
    own = strict_json.decode(field[_OWN_KEY].encode("utf-8", "surrogatepass"))
    if not isinstance(own, dict) or own.keys() != {"metadata", "dtypes"}:
        raise ValueError("the metadata is not as it was written")
    if not isinstance(own["dtypes"], dict):
        raise ValueError("the notes on types are not an object")
    return own["metadata"], own["dtypes"]


def _read_place(name: str, field: Any, note: Any) -> Place:
    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {shown(name)} has not the fields of a tensor")
    code = field["dtype"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"the type of {shown(name)} is {shown(code)}, which is not known here")
    dtype, shape = _DTYPES[code], _whole_numbers(name, "shape", field["shape"])
    offsets = _whole_numbers(name, "data_offsets", field["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"the offsets of {shown(name)} are {shown(list(offsets))}")
    size = offsets[1] - offsets[0]
    _check_size(name, shape, dtype.itemsize, size)
    if note is not None:
        dtype, shape = _read_note(name, code, note)
        _check_size(name, shape, dtype.itemsize, size)
    return Place(name, dtype, shape, *offsets)


def _read_note(name: str, code: str, note: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if not isinstance(note, list) or len(note) != 2 or not isinstance(note[0], str):
        raise ValueError(f"the note on the type of {shown(name)} is {shown(note)}")
    if code != "U8" or note[0] not in _NAMED:
        raise ValueError(f"{shown(name)} is said to hold {shown(note[0])} as {code}")
    return _NAMED[note[0]], _whole_numbers(name, "shape", note[1])


def _whole_numbers(name: str, what: str, value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in value)
    ):
        raise ValueError(f"{what} of {shown(name)} is {shown(value)}")
    return tuple(value)


def _check_size(name: str, shape: tuple[int, ...], itemsize: int, size: int) -> None:
    # Strides are products of all dimensions but those of no elements, and must fit as well.
    extent = math.prod(max(n, 1) for n in shape) * itemsize
    if extent > _MAX_SIZE or math.prod(shape) * itemsize != size:
        raise ValueError(
            f"{shown(name)} of shape {shown(list(shape))} takes {size:,} bytes in the file"
        )
