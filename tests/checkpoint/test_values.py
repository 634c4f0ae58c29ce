"""Values of any kind come back as they were, and what cannot be saved is named."""

from __future__ import annotations

import collections
import math
import pathlib
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from dataparallel import checkpoint

VALUES: list[Any] = [
    *(None, True, 0, -(2**63), 2**200, 1.5, -0.0, 5e-324, math.nan, -math.inf, "ä\0"),
    *((), (1, (2, [3])), [], {}, {"a": None}, {3: 1, None: 2, (1, 2): 3, 1.5: 4, True: 5}),
    *({"$": "tensor", "name": "x"}, {"$": 1}, {1, 2, "x"}, frozenset({(1, 2)}), b"a\0\xff"),
    *(1 - 2j, torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda:1")),
    *(collections.OrderedDict(b=1, a=2), collections.Counter({5: 2, 1: 1})),
    *(numpy.float64(0.1), numpy.int8(-3), numpy.array(5), numpy.arange(6.0).reshape(2, 3).T),
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
    # Names that collide in a file.
    {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)},
]


def bits(tensor: Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    numbers: list[int] = plain.contiguous().reshape(-1).view(torch.uint8).tolist()
    return numbers


def assert_same(got: Any, expected: Any, path: str = "") -> None:
    assert type(got) is type(expected), path
    if isinstance(expected, Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), path
        assert bits(got) == bits(expected), path
    elif isinstance(expected, numpy.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), path
        assert got.tobytes() == expected.tobytes(), path
    elif isinstance(expected, dict):
        # In the order in which they were.
        assert list(map(repr, got)) == list(map(repr, expected)), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), path
        for i, (left, right) in enumerate(zip(got, expected, strict=True)):
            assert_same(left, right, f"{path}.{i}")
    elif isinstance(expected, float):
        assert repr(got) == repr(expected), path
    else:
        assert got == expected, path


def test_values_come_back(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, step=1, user=VALUES)
    assert_same(checkpoint.load(tmp_path).user, VALUES)


def test_one_tensor_is_saved_once_and_is_one_again(tmp_path: pathlib.Path) -> None:
    weight = torch.randn(5000)
    checkpoint.save(tmp_path, step=1, user={"a": weight, "b": [weight], "c": weight.clone()})
    got = checkpoint.load(tmp_path).user
    assert got["a"] is got["b"][0] and got["a"] is not got["c"]
    assert 2 <= checkpoint.generations(tmp_path)[0].bytes / weight.nbytes < 3


class Own(dict):  # type: ignore[type-arg]
    """A dict that may do anything."""


def nested_tensor(layout: torch.layout) -> Tensor:
    parts = [torch.ones(1), torch.ones(2)]
    return torch.nested.nested_tensor(parts, layout=layout)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_saved_is_named(asynchronous: bool, tmp_path: pathlib.Path) -> None:
    refused: list[tuple[Any, str]] = [
        ({"deep": [1, {"er": object()}]}, r"user\.deep\.1\.er is a builtins\.object"),
        ({"d": Own()}, r"user\.d is a .*Own"),
        ({"f": lambda: 1}, r"user\.f is a builtins\.function"),
        ({"a": numpy.array(["x"])}, r"user\.a is a numpy\.ndarray"),
        ({"d": collections.defaultdict(int)}, r"user\.d is a collections\.defaultdict"),
        ({(object(),): 1}, r"user\.0\.0\.0 is a builtins\.object"),
        ({"t": torch.empty(2, device="meta")}, r"user\.t is a Tensor that is not dense or"),
        ({"s": torch.eye(2).to_sparse()}, r"user\.s is a Tensor that is not dense"),
        ({"n": nested_tensor(torch.strided)}, r"user\.n is a Tensor that is not dense"),
        ({"n": nested_tensor(torch.jagged)}, r"user\.n is a NestedTensor that is not"),
        (endless(), "recursion"),
    ]
    for value, message in refused:
        with pytest.raises((TypeError, RecursionError), match=message):
            checkpoint.save(tmp_path, step=1, user=value, asynchronous=asynchronous)
    # Not a second time.
    checkpoint.save(tmp_path, step=2, asynchronous=asynchronous).wait(30)
