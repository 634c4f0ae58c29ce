"""Values of any kind come back as they were, and what cannot be saved is named."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataparallel.extras.checkpoint.state import Encoder, decode


class File(dict[str, Tensor]):
    """Stands for a file of tensors."""

    get_tensor = dict.__getitem__


def there_and_back(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "user"))
    return decode(json.loads(text), File(encoder.tensors), {})


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
        *(None, True, 0, -(2**63), 2**200, 1.5, -0.0, 5e-324, math.nan, -math.inf, "ä\0"),
        *((), (1, (2, [3])), [], {}, {"a": None}, {3: 1, None: 2, (1, 2): 3, 1.5: 4, True: 5}),
        *({"$": "tensor", "name": "x"}, {"$": 1}, {1, 2, "x"}, frozenset({(1, 2)}), b"a\0\xff"),
        *(1 - 2j, torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda:1")),
        *(collections.OrderedDict(b=1, a=2), collections.Counter({5: 2, 1: 1})),
        *(numpy.float64(0.1), numpy.int8(-3), numpy.array(5), numpy.arange(6.0).reshape(2, 3).T),
    ],
    # Sets have another order in every process, and all have to find the same tests.
    ids=lambda value: "set" if isinstance(value, set) else repr(value),
)
def test_a_value_comes_back(value: Any) -> None:
    assert_same(there_and_back(value), value)


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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=nested)
def test_any_nest_of_values_comes_back(value: Any) -> None:
    assert_same(there_and_back(value), value)


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.randn(2, 3), torch.randn(2, 3).t(), torch.randn(4, 6)[::2, ::3]),
        *(torch.ones(1).expand(4), torch.tensor(2.5), torch.empty(0, 3), torch.randn(3)[1:]),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 2, dtype=torch.complex128).t(),
        torch.randn(5, 1).to(torch.float8_e5m2fnuz),
        torch.tensor(2**64 - 1, dtype=torch.uint64),
        torch.empty(2, 0, dtype=torch.complex128),
        torch.tensor([math.nan, -0.0, math.inf], dtype=torch.bfloat16),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}",
)
def test_a_tensor_comes_back(tensor: Tensor) -> None:
    assert_same(there_and_back([tensor])[0], tensor)


def test_one_tensor_is_saved_once_and_is_one_again() -> None:
    weight, encoder = torch.randn(3), Encoder()
    coded = encoder.encode({"a": weight, "b": [weight], "c": weight.clone()}, "user")
    assert sorted(encoder.tensors) == ["user.a", "user.c"]
    got = decode(coded, File(encoder.tensors), {})
    assert got["a"] is got["b"][0] and got["a"] is not got["c"]
    # In memory of its own.
    got["a"].zero_()
    assert weight.all()


def test_names_that_collide_do_not_mix() -> None:
    value = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}
    assert_same(there_and_back(value), value)


class Own(dict):  # type: ignore[type-arg]
    """A dict that may do anything."""


def nested_tensor(layout: torch.layout) -> Tensor:
    parts = [torch.ones(1), torch.ones(2)]
    return torch.nested.nested_tensor(parts, layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"deep": [1, {"er": object()}]}, r"user\.deep\.1\.er is a builtins\.object"),
        (lambda: {"d": Own()}, r"user\.d is a .*Own"),
        (lambda: {"f": lambda: 1}, r"user\.f is a builtins\.function"),
        (lambda: {"a": numpy.array(["x"])}, r"user\.a is a numpy\.ndarray"),
        (lambda: {"d": collections.defaultdict(int)}, r"user\.d is a collections\.defaultdict"),
        (lambda: {(object(),): 1}, r"user\.0\.0\.0 is a builtins\.object"),
        (lambda: {"t": torch.empty(2, device="meta")}, r"user\.t is a Tensor that is not dense or"),
        (lambda: {"s": torch.eye(2).to_sparse()}, r"user\.s is a Tensor that is not dense"),
        (lambda: {"n": nested_tensor(torch.strided)}, r"user\.n is a Tensor that is not dense"),
        (lambda: {"n": nested_tensor(torch.jagged)}, r"user\.n is a NestedTensor that is not"),
    ],
)
def test_what_cannot_be_saved_is_named(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Encoder().encode(make(), "user")


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(RecursionError, match="recursion"):
        Encoder().encode(value, "user")
