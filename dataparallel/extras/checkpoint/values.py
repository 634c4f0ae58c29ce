"""State dicts of any depth as JSON and tensors, and back. Never pickle.

JSON has null, booleans, numbers, strings, lists and objects with strings as keys. What else states
are made of is an object with the key ``"$"``, which says what it is. Reading makes nothing but the
types that are listed here: no name in a file leads to code.
"""

from __future__ import annotations

import base64
import collections
import enum
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel.extras.checkpoint import tensor_forms
from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.strict_json import shown

JSON: TypeAlias = Any

_TAG = "$"
_MAX_DEPTH = 60
# Larger integers are written in base 16, which takes linear time to read.
_MAX_PLAIN_INT = 2**63
# So many different keys of one hash are no accident.
_MAX_COLLISIONS = 100
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    **{each.__name__: each for each in (int, float, list, dict, set)},
}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    collections.defaultdict: "default",
}
_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
_OF_TORCH: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
_REMEDY = (
    "a checkpoint holds numbers, strings, lists, tuples, dicts, sets, tensors, arrays, and torch's "
    "own enums; turn it into those, or leave it out"
)


class TensorTable:
    """The tensors that a state has, by names that tell where they are in it.

    Tensors that are one and the same are in it once.

    Attributes:
        tensors: As a file has them, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], JSON] = {}
        # Memory that is free could be that of another tensor.
        self._alive: list[Tensor] = []

    def add(self, tensor: Tensor, path: str) -> JSON:
        """Take up a tensor, and get what stands for it."""
        # First: some may not even be asked where they are.
        why = tensor_forms.refusal(tensor)
        if why is not None:
            raise TypeError(f"{path} {why}")
        key = _identity(tensor)
        if key in self._known:
            return self._known[key]
        plain, told = tensor_forms.to_file(tensor)
        name = path
        while name in self.tensors:
            name += "'"
        self.tensors[name] = plain
        self._alive.append(tensor)
        self._known[key] = {_TAG: "tensor", "name": name, **told}
        return self._known[key]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return (id(tensor),)
    return (
        *(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device),
        *(tensor.is_conj(), tensor.is_neg()),
    )


# --- to JSON -------------------------------------------------------------------------------------


def encode(value: Any, path: str, table: TensorTable) -> JSON:
    """A value as JSON; its tensors are put into a table.

    Example::

        table = TensorTable()
        text = json.dumps(encode(optimizer.state_dict(), "optimizer", table))

    Args:
        value: Of None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset,
            deque, OrderedDict, defaultdict, Counter, torch's Size, dtype, device, layout, memory
            format and enums, tensors, and NumPy's numbers and arrays; to any depth up to 60.
        path: Where the value is, for messages and names.
        table: Gets the tensors.

    Returns:
        What :func:`decode` turns back into an equal value of the same types. (A parameter comes
        back as a tensor.)

    Raises:
        TypeError: There is something else in it; the message says where.
        ValueError: It is nested too deeply, or holds itself.
    """
    return _encode(value, path, table, 0)


def _encode(value: Any, path: str, table: TensorTable, depth: int) -> JSON:
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
    if kind is list:
        return [_encode(v, f"{path}.{i}", table, depth + 1) for i, v in enumerate(value)]
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, table, depth)
    if kind in _SEQUENCES:
        items = [_encode(v, f"{path}.{i}", table, depth + 1) for i, v in enumerate(value)]
        if kind in (set, frozenset):
            # Their order is another one in every process.
            items.sort(key=repr)
        limit = {"limit": value.maxlen} if kind is collections.deque else {}
        return {_TAG: _SEQUENCES[kind], "items": items, **limit}
    if isinstance(value, Tensor):
        return table.add(value, path)
    return _encode_rare(value, path, table)


def _encode_mapping(value: Mapping[Any, Any], path: str, table: TensorTable, depth: int) -> JSON:
    kind = type(value)
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {k: _encode(v, f"{path}.{k}", table, depth + 1) for k, v in value.items()}
    pairs = [
        [
            _encode(key, f"the key {key!r:.80} of {path}", table, depth + 1),
            _encode(entry, f"{path}.{key}", table, depth + 1),
        ]
        for key, entry in value.items()
    ]
    coded = {_TAG: _MAPPINGS[kind], "items": pairs}
    if isinstance(value, collections.defaultdict):
        names = [name for name, made in _FACTORIES.items() if made is value.default_factory]
        if not names:
            raise TypeError(
                f"{path} is a defaultdict that makes its values with {value.default_factory!r}; "
                f"it may be one of {', '.join(_FACTORIES)}; or turn it into a dict"
            )
        coded["factory"] = names[0]
    return coded


def _encode_rare(value: Any, path: str, table: TensorTable) -> JSON:
    kind = type(value)
    if kind is complex:
        parts = [_encode(part, path, table, 0) for part in (value.real, value.imag)]
        return {_TAG: "complex", "value": parts}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "value": base64.b64encode(value).decode("ascii")}
    if kind is torch.device:
        return {_TAG: "device", "value": str(value)}
    if kind in _OF_TORCH:
        return {_TAG: _OF_TORCH[kind], "value": str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum) and _is_of_torch(kind.__module__):
        return {_TAG: "enum", "value": [kind.__module__, kind.__qualname__, value.name]}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.kind not in "biufc":
            raise TypeError(f"{path} is a NumPy value of dtype {value.dtype}; {_REMEDY}")
        array = numpy.array(value, dtype=value.dtype.newbyteorder("="))
        name = "array" if isinstance(value, numpy.ndarray) else "scalar"
        return {_TAG: name, "value": table.add(_tensor_of(array), path)}
    raise TypeError(f"{path} is a {kind.__module__}.{kind.__qualname__}: {value!r:.80}; {_REMEDY}")


def _tensor_of(array: Any) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(f"NumPy's dtype {array.dtype} is none of torch's; convert it") from error


def _is_of_torch(module: object) -> bool:
    return isinstance(module, str) and (module == "torch" or module.startswith("torch."))


# --- from JSON -----------------------------------------------------------------------------------


def decode(coded: JSON, path: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`encode` was given.

    Args:
        coded: From a file, so it may be anything.
        path: Where the value is, for messages.
        tensors: The tensors of the file, by name; the value may have their memory. What was one
            tensor is one tensor again.

    Raises:
        CheckpointError: It is not what :func:`encode` makes; the message says where.
    """
    return _Decoder(tensors).decode(coded, path, 0)


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

    def decode(self, coded: JSON, path: str, depth: int) -> Any:
        if depth > 2 * _MAX_DEPTH:
            raise CheckpointError(f"{path[:200]} is nested too deeply")
        if isinstance(coded, list):
            return [self.decode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(coded)]
        if not isinstance(coded, dict):
            return coded
        if _TAG not in coded:
            return {k: self.decode(v, _within(path, k), depth + 1) for k, v in coded.items()}
        try:
            return self._tagged(coded, path, depth)
        except CheckpointError:
            raise
        except (
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
        ) as error:
            raise CheckpointError(
                f"{path} is said to be a {coded[_TAG]!r:.40}, but is none: {error!r:.200}"
            ) from error

    def _tagged(self, coded: dict[str, Any], path: str, depth: int) -> Any:
        kind = coded[_TAG]
        if kind == "tensor":
            return self._tensor(coded, path)
        if kind in _MAPPINGS.values():
            return self._mapping(coded, path, depth)
        if kind in _SEQUENCES.values():
            made = next(each for each, name in _SEQUENCES.items() if name == kind)
            items = self._items(coded["items"], path, depth)
            if made in (set, frozenset):
                _check_hashes(items)
            return made(items, coded["limit"]) if made is collections.deque else made(items)
        if kind in ("array", "scalar"):
            values = self._tensor(coded["value"], path).numpy()
            return values if kind == "array" else values[()]
        if kind == "complex":
            real, imag = (self.decode(part, path, depth + 1) for part in coded["value"])
            return complex(real, imag)
        if kind in _SIMPLE:
            return _SIMPLE[kind](coded["value"])
        raise CheckpointError(
            f"{path} is a {kind!r:.40}, which this version does not know; load it with the version "
            "that saved it"
        )

    def _tensor(self, coded: JSON, path: str) -> Tensor:
        name = coded["name"]
        if not isinstance(name, str) or name not in self._tensors:
            raise CheckpointError(f"{path} is the tensor {name!r:.200}, which no file has")
        if name not in self._made:
            self._made[name] = tensor_forms.from_file(self._tensors[name], coded, name)
        return self._made[name]

    def _items(self, items: JSON, path: str, depth: int) -> list[Any]:
        if not isinstance(items, list):
            raise TypeError("'items' is not a list")
        return [self.decode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(items)]

    def _mapping(self, coded: dict[str, Any], path: str, depth: int) -> Any:
        pairs = [
            (self.decode(k, f"a key of {path}", depth + 1), (_within(path, k), v))
            for k, v in coded["items"]
        ]
        _check_hashes([key for key, _ in pairs])
        entries = [(key, self.decode(v, where, depth + 1)) for key, (where, v) in pairs]
        kind = coded[_TAG]
        if kind == "default":
            return collections.defaultdict(_FACTORIES[coded["factory"]], entries)
        if kind == "counter":
            return collections.Counter(dict(entries))
        return collections.OrderedDict(entries) if kind == "ordered" else dict(entries)


def _within(path: str, key: JSON) -> str:
    # Short, as it is made for each of what may be a million values.
    return f"{path}.{key[:80]}" if isinstance(key, str) else f"{path}.{shown(key)}"


def _check_hashes(keys: Iterable[Any]) -> None:
    """Refuse keys that were chosen so that to look each up takes as long as there are others."""
    counts = collections.Counter(map(hash, keys))
    if counts and counts.most_common(1)[0][1] > _MAX_COLLISIONS:
        raise ValueError(f"more than {_MAX_COLLISIONS} keys have the same hash")


def _decode_float(text: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]


def _decode_member(kind: type) -> Callable[[str], Any]:
    def decode(name: str) -> Any:
        # Not by getattr, which imports parts of torch that are not there yet.
        found = vars(torch).get(name)
        if not isinstance(found, kind):
            raise ValueError(f"torch has no {kind.__name__} {name!r:.80}")
        return found

    return decode


def _decode_enum(place: list[str]) -> Any:
    """A member of an enum of torch that is imported already: reading a file imports nothing."""
    module, qualname, name = place
    if not _is_of_torch(module) or module not in sys.modules:
        raise ValueError(f"{module!r:.80} is no module of torch that is imported")
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = vars(found).get(part)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise ValueError(f"{module}.{qualname} is no enum")
    return found[name]


_SIMPLE: dict[Any, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": _decode_float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "dtype": tensor_forms.dtype_of_name,
    "device": lambda text: torch.device(text),
    "layout": _decode_member(torch.layout),
    "memory_format": _decode_member(torch.memory_format),
    "enum": _decode_enum,
}
