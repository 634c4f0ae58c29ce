"""State dicts of any depth as JSON and tensors, and back. Never pickle.

JSON has null, booleans, numbers, strings, lists and objects with strings as keys. What else states
are made of is an object with the key ``"$"``, which says what it is. Reading makes nothing but the
types that are listed here: no name in a file leads to code.
"""

from __future__ import annotations

import base64
import collections
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dataparallel.extras.checkpoint.directory import CheckpointError
from dataparallel.torch_internals import is_wrapper

JSON: TypeAlias = Any

_TAG = "$"
_MAX_DEPTH = 60
# Larger integers are written in base 16: Python refuses to read long ones in base 10.
_MAX_PLAIN_INT = 2**63
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
}
_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
#: Types of tensors that every reader of safetensors knows; others are written as bytes.
_COMMON = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def name_of_dtype(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class TensorTable:
    """The tensors that a state has, by names that tell where they are in it; each once.

    Attributes:
        tensors: As a file has them, by name; contiguous, on their devices.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], JSON] = {}
        # Memory that is free could be that of another tensor.
        self._alive: list[Tensor] = []

    def add(self, tensor: Tensor, path: str) -> JSON:
        """Take up a tensor, and get what stands for it."""
        why = _refusal(tensor)
        if why is not None:
            raise TypeError(f"{path} {why}")
        key = _identity(tensor)
        if key not in self._known:
            name = path
            while name in self.tensors:
                name += "'"
            self.tensors[name], told = _to_file(tensor)
            self._alive.append(tensor)
            self._known[key] = {_TAG: "tensor", "name": name, **told}
        return self._known[key]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return (id(tensor),)
    place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return (*place, tensor.is_conj(), tensor.is_neg())


def _refusal(tensor: Tensor) -> str | None:
    # First those that may not even be asked for their shape.
    if is_lazy(tensor):
        return "has no shape and no values yet; run the module once before it is saved"
    if tensor.is_nested:
        return "is nested; save the tensors that it is made of (unbind())"
    if is_wrapper(tensor):
        return (
            f"is a {type(tensor).__name__}, a tensor made of others; save those, or for a DTensor "
            "full_tensor()"
        )
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; save its indices and its values, or to_dense()"
    if tensor.is_quantized:
        return "is quantized; save int_repr() and its scale"
    if tensor.is_meta:
        return "is on the device 'meta' and has no values; leave it out"
    return None


def _to_file(tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A contiguous tensor of a common type, a view where possible; and what is told beside it."""
    plain, told = tensor.detach().resolve_conj().resolve_neg(), dict[str, Any]()
    if not plain.is_contiguous():
        # What is dense in another order, as with channels last, is written in that order.
        strides = plain.stride()
        order = sorted(range(plain.dim()), key=lambda i: (-strides[i], i))
        if plain.permute(order).is_contiguous():
            told["order"] = order
            plain = plain.permute(order)
    plain = plain.contiguous()
    if plain.dtype not in _COMMON:
        told.update(dtype=name_of_dtype(plain.dtype), shape=list(plain.shape))
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        plain = plain.reshape(-1).view(torch.uint8)
    return plain, told


def _from_file(tensor: Tensor, told: Mapping[str, Any]) -> Tensor:
    if "dtype" in told:
        tensor = tensor.clone().view(_dtype(told["dtype"])).reshape(told["shape"])
    if "order" in told:
        order = told["order"]
        tensor = tensor.permute([order.index(i) for i in range(tensor.dim())])
    return tensor


# --- to JSON -------------------------------------------------------------------------------------


def encode(value: Any, path: str, table: TensorTable, depth: int = 0) -> JSON:
    """A value as JSON; its tensors are put into a table.

    Example::

        table = TensorTable()
        text = json.dumps(encode(optimizer.state_dict(), "optimizer", table))

    Args:
        value: Of None, numbers, str, bytes, lists, tuples, dicts, OrderedDicts, Counters, sets,
            deques, torch's Size, dtypes and devices, tensors, and NumPy's numbers and arrays.
        path: Where the value is, for messages and names.
        table: Gets the tensors.
        depth: How deep the value is in another one, at most 60.

    Returns:
        What :func:`decode` turns back into an equal value of the same types. (A parameter comes
        back as a tensor.)

    Raises:
        TypeError: There is something else in it; the message says where.
        ValueError: It is nested too deeply, or holds itself.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(
            f"{path[:200]} is nested more than {_MAX_DEPTH} deep, or holds itself; make it flatter"
        )
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < _MAX_PLAIN_INT else {_TAG: "int", "value": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if kind is list or kind in _SEQUENCES:
        items = [encode(v, f"{path}.{i}", table, depth + 1) for i, v in enumerate(value)]
        if kind is list:
            return items
        if kind in (set, frozenset):
            # Their order is another one in every process.
            items.sort(key=repr)
        limit = {"limit": value.maxlen} if kind is collections.deque else {}
        return {_TAG: _SEQUENCES[kind], "items": items, **limit}
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {k: encode(v, f"{path}.{k}", table, depth + 1) for k, v in value.items()}
    if kind in _MAPPINGS:
        pairs = [
            [
                encode(key, f"the key {key!r:.80} of {path}", table, depth + 1),
                encode(entry, f"{path}.{key}", table, depth + 1),
            ]
            for key, entry in value.items()
        ]
        return {_TAG: _MAPPINGS[kind], "items": pairs}
    return _encode_rare(value, path, table)


def _encode_rare(value: Any, path: str, table: TensorTable) -> JSON:
    kind = type(value)
    if isinstance(value, Tensor):
        return table.add(value, path)
    if kind is complex:
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "value": base64.b64encode(value).decode("ascii")}
    if kind in (torch.device, torch.dtype):
        return {_TAG: kind.__name__, "value": str(value).removeprefix("torch.")}
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
    if of_numpy and value.dtype.kind in "biufc":
        array = numpy.array(value, dtype=value.dtype.newbyteorder("="))
        name = "array" if isinstance(value, numpy.ndarray) else "scalar"
        return {_TAG: name, "value": table.add(torch.from_numpy(array), path)}
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: {value!r:.80}; a checkpoint holds "
        "numbers, strings, lists, tuples, dicts, sets, tensors and arrays; turn it into those, or "
        "leave it out"
    )


# --- from JSON -----------------------------------------------------------------------------------


def decode(coded: JSON, path: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`encode` was given.

    Args:
        coded: From a file, so it may be anything.
        path: Where the value is, for messages.
        tensors: The tensors of the file, by name; the value may have their memory. What was one
            tensor is one tensor again.

    Raises:
        CheckpointError: It is not what :func:`encode` makes.
    """
    try:
        return _Decoder(tensors).decode(coded)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        reason = repr(error)
    except RuntimeError as error:
        # Of torch; and a RecursionError.
        reason = repr(error)
    raise CheckpointError(f"{path} is not as it was saved: {reason:.300}")


def references(coded: JSON) -> set[str]:
    """The names of the tensors in what :func:`encode` returned, or in anything from a file."""
    names: set[str] = set()
    # Not by recursion: a file may be nested deeper than a stack is.
    pending = [coded]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict) and item.get(_TAG) == "tensor":
            names.add(str(item.get("name")))
        elif isinstance(item, dict):
            pending.extend(item.values())
    return names


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, Tensor] = {}

    def decode(self, coded: JSON) -> Any:
        if isinstance(coded, list):
            return self._items(coded)
        if not isinstance(coded, dict):
            return coded
        if _TAG not in coded:
            return {key: self.decode(value) for key, value in coded.items()}
        kind = coded[_TAG]
        if kind == "tensor":
            return self._tensor(coded)
        if kind in ("array", "scalar"):
            values = self._tensor(coded["value"]).numpy()
            return values if kind == "array" else values[()]
        for mapping, name in _MAPPINGS.items():
            if name == kind:
                entries = [(self.decode(key), self.decode(value)) for key, value in coded["items"]]
                return mapping(dict(entries))
        for sequence, name in _SEQUENCES.items():
            if name == kind:
                limit = [coded["limit"]] if kind == "deque" else []
                return sequence(self._items(coded["items"]), *limit)
        return _SIMPLE[kind](coded["value"])

    def _items(self, items: Iterable[JSON]) -> list[Any]:
        return [self.decode(item) for item in items]

    def _tensor(self, coded: JSON) -> Tensor:
        name = coded["name"]
        if name not in self._made:
            self._made[name] = _from_file(self._tensors[name], coded)
        return self._made[name]


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(
            f"torch {torch.__version__} has no dtype {name!r:.80}; load it with the version of "
            "torch that saved it"
        )
    return _DTYPES[name]


_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "dtype": _dtype,
    "device": lambda text: torch.device(text),
}
