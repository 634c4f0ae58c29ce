"""Arguments and outputs that are no containers: shared where that is right, refused where not."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.models import assert_all_close, grads_of, twins


class Layer:
    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class Cache:
    """Keys and values of each layer, which a forward adds to, as libraries have them."""

    def __init__(self, given: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self.layers = [Layer(*pair) for pair in given]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(layer.keys, layer.values) for layer in self.layers])

    def add(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if number == len(self.layers):
            self.layers.append(Layer(keys, values))
        else:
            layer = self.layers[number]
            layer.keys = torch.cat([layer.keys, keys], 1)
            layer.values = torch.cat([layer.values, values], 1)
        return self.layers[number].keys, self.layers[number].values


class Attention(nn.Module):
    """Two layers that look at all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(4, 8) for _ in range(2)])

    def forward(self, x: Tensor, cache: Any = None, use_cache: bool = True, **_: Any) -> Any:
        cache = Cache() if cache is None else cache
        for number, projection in enumerate(self.projections):
            keys, values = cache.add(number, *projection(x).chunk(2, dim=-1))
            x = x + (x @ keys.transpose(1, 2)).softmax(-1) @ values
        return {"x": x, "cache": cache} if use_cache else {"x": x}


WRAPPERS = [dp.DataParallel, dp.DistributedDataParallel]
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


def tokens(seed: int = 0, length: int = 3, size: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, length, 4, generator=generator, dtype=torch.double)


@wrappers
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_cache_that_is_returned_comes_once_per_replica(wrapper: Any, count: int) -> None:
    bare, inner = twins(Attention, "cpu")
    model = wrapper(inner, ["cpu"] * count)
    got, expected = model(tokens()), bare(tokens())
    caches = got["cache"] if count > 1 else [got["cache"]]
    assert [type(cache) for cache in caches] == [Cache] * count
    for theirs, *mine in zip(expected["cache"], *caches, strict=True):
        assert_all_close([torch.cat(parts) for parts in zip(*mine, strict=True)], theirs)
    got["x"].pow(2).sum().backward()
    expected["x"].pow(2).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))


def _filled(x: Tensor) -> Cache:
    return Cache([(x, x)])


#: Arguments that several replicas cannot have, and what the error says.
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "cache": (_filled, r"cache'\] is a Cache, .*\(5, 1, 4\).*use_cache=False.*Replicate"),
    "nested": (
        lambda x: types.SimpleNamespace(rows={"a": [Layer(x, x)]}),
        r"is a SimpleNamespace, .*register_pytree_node",
    ),
    "empty": (lambda x: Cache(), r"cache'\] is a Cache, .* written tensors into it"),
    "in a list": (lambda x: [_filled(x)], r"cache'\]\[0\] is a Cache"),
}


@wrappers
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_shared_wrongly_is_refused(wrapper: Any, name: str) -> None:
    bare, inner = twins(Attention, "cpu")
    model = wrapper(inner, ["cpu", "cpu"])
    x, calls = tokens(0, 1), list[Any]()
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
    caches = [Cache(), Cache()]
    for module, cache in zip((model, bare), caches, strict=True):
        module(x[:1], cache=cache)
    for mine, theirs in zip(*caches, strict=True):
        assert len(mine) == 2
        assert_all_close(mine, theirs)


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


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "box": Kept,
    "set": lambda x: {x, x + 1},
    "distribution": lambda x: torch.distributions.Normal(x, 1.0),
    "one of two": lambda x: Kept(x) if x.shape[0] == 3 else None,
}


@wrappers
@pytest.mark.parametrize("name", RETURNED)
def test_other_objects_that_are_returned_come_once_per_replica(wrapper: Any, name: str) -> None:
    make = RETURNED[name]
    x, net = torch.randn(5, 4), Gives(make)
    got = wrapper(net, ["cpu", "cpu"])(x)
    torch.testing.assert_close(got["x"], net.linear(x))
    assert [type(one) for one in got["more"]] == [type(make(x[:3])), type(make(x[3:]))]
    assert type(wrapper(net, ["cpu"])(x)["more"]) is type(make(x))
