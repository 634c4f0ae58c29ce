"""Arguments and outputs that are no containers: shared where that is right, refused where not."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.models import assert_all_close, grads_of, twins


class Cache:
    """Keys and values of the steps before, which a forward adds to, as libraries have them."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values

    def add(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.values = values if self.values is None else torch.cat([self.values, values], 1)


class Attention(nn.Linear):
    """Looks at all that came before."""

    def __init__(self) -> None:
        super().__init__(4, 8)

    def forward(self, x: Tensor, cache: Any = None) -> Any:
        cache = Cache() if cache is None else cache
        cache.add(*super().forward(x).chunk(2, dim=-1))
        return {
            "x": x + (x @ cache.keys.transpose(1, 2)).softmax(-1) @ cache.values,
            "cache": cache,
        }


WRAPPERS = [dp.DataParallel, dp.DistributedDataParallel]
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def tokens(length: int = 3) -> Tensor:
    return torch.randn(5, length, 4, dtype=torch.double)


@wrappers
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_cache_that_is_returned_comes_once_per_replica(wrapper: Any, count: int) -> None:
    bare, inner = twins(Attention, "cpu")
    model, x = wrapper(inner, ["cpu"] * count), tokens()
    got, expected = model(x), bare(x)
    caches = got["cache"] if count > 1 else [got["cache"]]
    assert [type(cache) for cache in caches] == [Cache] * count
    for name in Cache.__slots__:
        parts = [getattr(cache, name) for cache in caches]
        torch.testing.assert_close(torch.cat(parts), getattr(expected["cache"], name))
    got["x"].pow(2).sum().backward()
    expected["x"].pow(2).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))


#: Arguments that several replicas cannot have, and what the error says.
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "cache": (
        lambda x: Cache(x, x),
        r"cache'\] is a Cache, .*\(5, 1, 4\).*use_cache=False.*Replicate",
    ),
    "nested": (
        lambda x: types.SimpleNamespace(rows={"a": [Cache(x, x)]}),
        r"is a SimpleNamespace, .*register_pytree_node",
    ),
    "empty": (lambda x: Cache(), r"cache'\] is a Cache, .* written tensors into it"),
    "in a list": (lambda x: [Cache(x, x)], r"cache'\]\[0\] is a Cache"),
}


@wrappers
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_shared_wrongly_is_refused(wrapper: Any, name: str) -> None:
    bare, inner = twins(Attention, "cpu")
    model = wrapper(inner, ["cpu", "cpu"])
    x, calls = tokens(1), list[Any]()
    inner.register_forward_pre_hook(lambda module, args: calls.append(args))
    make, message = REFUSED[name]
    error = RuntimeError if name == "empty" else TypeError
    with pytest.raises(error, match=message):
        model(x, cache=make(x))
    # Otherwise before anything runs.
    assert bool(calls) == (name == "empty")
    with pytest.raises(error, match=message):
        criterion: Any = lambda output, y: (output["x"] - y).pow(2).sum()  # noqa: E731
        model.loss(criterion, {"x": x, "cache": make(x)}, x, weight="samples")
    assert_all_close([model(x)["x"]], [bare(x)["x"]])
    # One replica alone gets it as the bare module would, and writes into it.
    cache = Cache()
    model(x[:1], cache=cache)
    assert cache.keys is not None and cache.keys.shape == (1, 1, 4)


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value


class Color(enum.Enum):
    RED = 1


class Vocabulary:
    def __init__(self) -> None:
        self.words = {f"word {i}": i for i in range(50_000)}
        self.itself = self


class Gives(nn.Module):
    """Returns an output and what it was given beside its input, or what is made of the output."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.make, self.seen = nn.Linear(4, 4), make, list[Any]()

    def forward(self, x: Tensor, *others: Any) -> Any:
        self.seen.append(others)
        output = self.linear(x)
        return {"x": output, "more": self.make(output, *others)}


@wrappers
def test_what_is_harmless_is_shared(wrapper: Any) -> None:
    x, table = torch.randn(5, 4), torch.randn(7, 4)
    others = (
        *("name", 3, 2.5, 1j, None, b"x", True, Color.RED, torch.float32, torch.device("cpu")),
        *(torch.Size([5]), print, tokens, slice(1), object(), range(3), Cache, iter([1])),
        *(types.SimpleNamespace(width=4), Vocabulary(), Kept(table), Kept(nn.Linear(5, 5))),
        *(nn.Linear(5, 5), torch.Generator()),
    )
    # What is marked is shared whatever it holds.
    kept = Kept(x)
    net = Gives(lambda output, *given: given)
    got = wrapper(net, ["cpu", "cpu"])(x, *others, dp.Replicate(kept))
    assert len(net.seen) == 2
    for row in (*net.seen, got["more"]):
        assert all(mine is given for mine, given in zip(row, (*others, kept), strict=True))


@wrappers
@pytest.mark.parametrize(
    "make",
    [
        lambda x: {x, x + 1},
        lambda x: torch.distributions.Normal(x, 1.0),
        lambda x: Kept(x) if x.shape[0] == 3 else None,
    ],
    ids=["set", "distribution", "one of two"],
)
def test_other_objects_that_are_returned_come_once_per_replica(wrapper: Any, make: Any) -> None:
    x, net = torch.randn(5, 4), Gives(make)
    got = wrapper(net, ["cpu", "cpu"])(x)
    torch.testing.assert_close(got["x"], net.linear(x))
    assert [type(one) for one in got["more"]] == [type(make(x[:3])), type(make(x[3:]))]
