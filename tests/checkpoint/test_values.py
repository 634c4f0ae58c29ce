"""Values of any kind come back as they were, and what cannot be saved is named."""

from __future__ import annotations

import collections
import json
import math
import warnings
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataparallel.extras.checkpoint import CheckpointError
from dataparallel.extras.checkpoint.values import TensorTable, decode, encode


def there_and_back(value: Any) -> Any:
    table = TensorTable()
    text = json.dumps(encode(value, "user", table), allow_nan=False)
    return decode(json.loads(text), "user", table.tensors)


def bits(tensor: Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    numbers: list[int] = plain.contiguous().reshape(-1).view(torch.uint8).tolist()
    return numbers


def assert_same(got: Any, expected: Any, path: str = "") -> None:
    assert type(got) is type(expected), path
    if isinstance(expected, Tensor):
        assert (got.dtype, got.shape, bits(got)) == (
            *(expected.dtype, expected.shape, bits(expected)),
        ), path
    elif isinstance(expected, numpy.ndarray):
        assert got.dtype == expected.dtype and got.shape == expected.shape, path
        assert got.tobytes() == expected.tobytes(), path
    elif isinstance(expected, dict):
        # In the order in which they were.
        assert list(got) == list(expected), path
        assert list(map(type, got)) == list(map(type, expected)), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple, collections.deque)):
        assert len(got) == len(expected), path
        for i, (left, right) in enumerate(zip(got, expected, strict=True)):
            assert_same(left, right, f"{path}.{i}")
    elif isinstance(expected, float):
        assert math.copysign(1, got) == math.copysign(1, expected) or math.isnan(expected), path
        assert got == expected or (math.isnan(got) and math.isnan(expected)), path
    else:
        assert got == expected, path


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**63), 2**200, -(2**70), 1.5, -0.0, 5e-324, math.nan, -math.inf, "ä\0"),
        *((), (1, (2, [3])), [], {}, {"a": None}, {3: 1, None: 2, (1, 2): 3, 1.5: 4, True: 5}),
        *({"$": "tensor", "name": "x"}, {"$": 1}, {1, 2, "x"}, frozenset({(1, 2)}), b"a\0\xff"),
        *(bytearray(b"x"), 1 - 2j, complex(math.nan, 1), torch.Size([2, 3]), torch.float8_e4m3fn),
        torch.device("cuda:1"),
        collections.OrderedDict(b=1, a=2),
        collections.Counter({5: 2, 1: 1}),
        collections.deque([1, 2], maxlen=3),
        *(numpy.float64(0.1), numpy.int8(-3), numpy.array(5), numpy.arange(6.0).reshape(2, 3).T),
        numpy.array([1, 2], dtype=">i4").astype("i4"),
    ],
    # Sets have another order in every process, and all have to find the same tests.
    ids=lambda value: "set" if isinstance(value, set) else repr(value),
)
def test_a_value_comes_back(value: Any) -> None:
    got = there_and_back(value)
    if isinstance(value, complex) and math.isnan(value.real):
        assert math.isnan(got.real) and got.imag == value.imag
    else:
        assert_same(got, value)
    if isinstance(value, collections.deque):
        assert got.maxlen == value.maxlen


keys = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.booleans())
leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary()),
    st.sampled_from([torch.int8, torch.float64]),
    st.lists(st.integers(-9, 9), max_size=4).map(torch.tensor),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=nested)
def test_any_nest_of_values_comes_back(value: Any) -> None:
    assert_same(there_and_back(value), value)


def complex_half() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.view_as_complex(torch.randn(3, 2, dtype=torch.float16))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3),
        torch.randn(2, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[::2, ::3],
        torch.ones(1).expand(4),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(2, 2, dtype=torch.complex128).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        complex_half(),
        torch.randn(5).to(torch.float8_e5m2),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        torch.tensor([[True, False]]),
        torch.tensor([math.nan, -0.0, math.inf], dtype=torch.bfloat16),
        torch.randn(3)[1:],
        torch.nn.Parameter(torch.randn(2)).detach(),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}",
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_tensor_comes_back(tensor: Tensor) -> None:
    got = there_and_back([tensor])[0]
    assert_same(got, tensor)
    if tensor.numel() > 1 and tensor.is_contiguous(memory_format=torch.preserve_format):
        assert got.stride() == tensor.stride()


def test_the_order_in_memory_comes_back() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert there_and_back(tensor).stride() == tensor.stride()


def test_one_tensor_is_saved_once_and_is_one_again() -> None:
    weight = torch.randn(3)
    table = TensorTable()
    coded = encode({"a": weight, "b": [weight], "c": weight.clone()}, "user", table)
    assert sorted(table.tensors) == ["user.a", "user.c"]
    got = decode(coded, "user", table.tensors)
    assert got["a"] is got["b"][0] and got["a"] is not got["c"]


def test_names_that_collide_do_not_mix() -> None:
    value = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}
    assert_same(there_and_back(value), value)


class Own(dict):  # type: ignore[type-arg]
    """A dict that may do anything."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"deep": [1, {"er": object()}]}, r"user\.deep\.1\.er is a builtins\.object"),
        ({"d": Own()}, r"user\.d is a .*Own"),
        ({"f": lambda: 1}, r"user\.f is a builtins\.function"),
        ({"t": torch.empty(2, device="meta")}, r"user\.t is on the device 'meta'"),
        ({"s": torch.eye(2).to_sparse()}, r"user\.s has the layout torch\.sparse_coo"),
        ({"a": numpy.array(["x"])}, r"user\.a is a numpy\.ndarray"),
        ({"d": collections.defaultdict(lambda: 1)}, r"user\.d is a collections\.defaultdict"),
        ({(object(),): 1}, r"the key \(<object .* of user\.0 is a builtins\.object"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(value, "user", TensorTable())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)
    with pytest.raises(TypeError, match=r"user\.n is nested; save the tensors"):
        encode({"n": nested}, "user", TensorTable())


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="nested more than 60 deep, or holds itself"):
        encode(value, "user", TensorTable())


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "coded",
    [
        {"$": "os.system", "value": "touch /tmp/x"},
        {"$": ["tuple"], "items": []},
        {"$": "tuple"},
        {"$": "tuple", "items": 5},
        {"$": "tensor", "name": "absent"},
        {"$": "tensor", "name": ["t"]},
        {"$": "tensor", "name": "t", "order": [0, 0]},
        {"$": "tensor", "name": "t", "order": "01"},
        {"$": "tensor", "name": "t", "dtype": "float32", "shape": [2**40]},
        {"$": "tensor", "name": "t", "dtype": "Tensor", "shape": [2]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [[1]]},
        {"$": "counter", "items": 3},
        {"$": "int", "value": "0x"},
        {"$": "float", "value": "one"},
        {"$": "bytes", "value": "*"},
        {"$": "dtype", "value": "load"},
        {"$": "device", "value": "nowhere:7"},
        {"$": "array", "value": {"$": "tuple", "items": []}},
        {"$": "complex", "value": [1]},
        {"$": "size", "items": ["x"]},
        {"$": "set", "items": [[1]]},
        {"$": "deque", "items": [], "limit": "x"},
        deep(5000),
    ],
    ids=lambda coded: "deep" if isinstance(coded, list) else repr(coded)[:60],
)
def test_what_nobody_has_saved_is_refused(coded: Any) -> None:
    with pytest.raises(CheckpointError, match="user is not as it was saved"):
        decode(coded, "user", {"t": torch.zeros(2, 3)})
