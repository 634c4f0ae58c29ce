"""scatter, gather, parallel_apply and comm, called as one calls torch's."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import comm, gather, parallel_apply, scatter, scatter_kwargs


def random(*shape: int, device: str = "cpu", grad: bool = True) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float64, requires_grad=grad)


# --- scatter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu", [True, False])
def test_scatter(slots: list[str], on_cpu: bool) -> None:
    x = random(4, 4, device="cpu" if on_cpu else slots[0])
    parts = scatter(x, slots[:2])
    assert [part.device for part in parts] == [torch.device(slot) for slot in slots[:2]]
    torch.testing.assert_close([part.cpu() for part in parts], [x[:2].cpu(), x[2:].cpu()])
    parts[0].backward(torch.full_like(parts[0], 2))
    expected = torch.tensor([2.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected[:, None].expand(4, 4).to(x.device))


def test_scatter_is_twice_differentiable(slots: list[str]) -> None:
    x = random(4, 3)

    def function(y: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.cpu() for part in scatter(y, slots[:2]))

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_scatter_dim_and_containers(slots: list[str]) -> None:
    point = namedtuple("point", ["x", "y"])
    x = random(2, 6)
    found: Any = scatter({"a": [x, 3, "text"], "b": point(x, None)}, slots[:2], dim=1)
    for i, part in enumerate(found):
        assert part["a"][1:] == [3, "text"]
        assert type(part["b"]) is point
        assert part["b"].y is None
        wanted = x[:, 3 * i : 3 * i + 3]
        torch.testing.assert_close(part["a"][0].cpu(), wanted)
        torch.testing.assert_close(part["b"].x.cpu(), wanted)


def test_scatter_kwargs(slots: list[str]) -> None:
    x, y = random(4, 2), random(4, 2)
    args, kwargs = scatter_kwargs((x,), {"y": y, "flag": True}, slots[:2])
    assert len(args) == len(kwargs) == 2
    for i in range(2):
        torch.testing.assert_close(args[i][0].cpu(), x[2 * i : 2 * i + 2])
        torch.testing.assert_close(kwargs[i]["y"].cpu(), y[2 * i : 2 * i + 2])
        assert kwargs[i]["flag"] is True


@pytest.mark.parametrize(("inputs", "kwargs"), [((1,), None), ((), {"y": 1})])
def test_scatter_kwargs_fills_the_shorter_side(slots: list[str], inputs: Any, kwargs: Any) -> None:
    x = random(4, 2)
    if kwargs is None:
        args, keywords = scatter_kwargs((x,), kwargs, slots[:2])
        assert list(keywords) == [{}, {}]
        assert len(args) == 2
    else:
        args, keywords = scatter_kwargs(inputs, {"y": x}, slots[:2])
        assert [tuple(each) for each in args] == [(), ()]
        assert len(keywords) == 2


# --- gather ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4), ()])
@pytest.mark.parametrize("to_cpu", [True, False])
def test_gather(slots: list[str], to_cpu: bool, shape: tuple[int, ...]) -> None:
    inputs = tuple(random(*shape, device=slot) for slot in slots[:2])
    target = -1 if to_cpu else slots[0]
    result = gather(inputs, target)
    assert result.device == torch.device("cpu" if to_cpu else slots[0])
    assert result.shape == ((4, 4) if shape else (2,))
    halves = [value.cpu() for value in inputs]
    torch.testing.assert_close(result.cpu(), torch.cat(halves) if shape else torch.stack(halves))
    grad = torch.randn_like(result)
    result.backward(grad)
    for value, part in zip(inputs, grad.chunk(2), strict=True):
        torch.testing.assert_close(value.grad, part.reshape(shape).to(value.device))


@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_gather_is_twice_differentiable(slots: list[str], shape: tuple[int, ...]) -> None:
    inputs = (random(*shape), random(*shape))

    def function(*values: Tensor) -> Tensor:
        placed = [value.to(slot) for value, slot in zip(values, slots, strict=False)]
        result: Tensor = gather(placed, -1)
        return result

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_gather_different_len_dicts(slots: list[str]) -> None:
    first = {"a": random(1, 2, device=slots[0])}
    second = {"b": random(1, 2, device=slots[1]), "a": random(1, 2, device=slots[1])}
    with pytest.raises(ValueError, match="b"):
        gather((first, second), target_device=slots[0])


def test_gather_containers(slots: list[str]) -> None:
    point = namedtuple("point", ["x", "y"])
    outputs = [
        point(random(2, 3, device=slot), [None, {"z": random(1, device=slot)}]) for slot in slots
    ]
    found = gather(outputs, slots[0])
    assert type(found) is point
    torch.testing.assert_close(found.x.cpu(), torch.cat([output.x.cpu() for output in outputs]))
    assert found.y[0] is None
    assert found.y[1]["z"].shape == (4,)


def test_gather_dim(slots: list[str]) -> None:
    values = [random(2, 3, device=slot) for slot in slots]
    found = gather(values, slots[0], dim=1)
    torch.testing.assert_close(found.cpu(), torch.cat([value.cpu() for value in values], 1))


# --- parallel_apply --------------------------------------------------------------------------


@pytest.mark.parametrize("as_tuple", [True, False])
@pytest.mark.parametrize("casting", [True, False])
def test_parallel_apply(slots: list[str], as_tuple: bool, casting: bool) -> None:
    modules = [nn.Linear(10, 5).to(slot) for slot in slots[:2]]
    values = [torch.randn(2, 10, device=slot) for slot in slots[:2]]
    inputs: list[Any] = [(value,) for value in values] if as_tuple else list(values)
    kind = torch.device(slots[0]).type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=casting):
        expected = [module(value) for module, value in zip(modules, values, strict=True)]
        outputs = parallel_apply(modules, inputs, None)
    assert outputs[0].dtype is (torch.bfloat16 if casting else torch.float32)
    torch.testing.assert_close(outputs, expected)


def test_parallel_apply_keywords_and_devices(slots: list[str]) -> None:
    def scale(x: Tensor, *, by: float) -> Tensor:
        return x * by

    values = [random(2, device=slot) for slot in slots[:2]]
    out = parallel_apply([scale, scale], values, [{"by": 2.0}, {"by": 3.0}], devices=slots[:2])
    torch.testing.assert_close(out, [values[0] * 2, values[1] * 3])


@pytest.mark.parametrize("inputs", [(None, None), ((), ())])
def test_parallel_apply_passes_exception(slots: list[str], inputs: Any) -> None:
    class Broken(nn.Module):
        def forward(self, *args: Any) -> Any:
            nothing: dict[str, Any] = {}
            return nothing["wonderful"]

    net = Broken()
    with pytest.raises(KeyError, match=r"(?s)wonderful.*in replica 0 on device") as caught:
        parallel_apply((net, net), inputs, devices=slots[:2])
    assert "forward" in [entry.name for entry in caught.traceback]
    assert parallel_apply((lambda: 1, lambda: 2), ((), ())) == [1, 2]


def test_parallel_apply_lengths() -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        parallel_apply([abs, abs], [(1,)])


# --- comm ------------------------------------------------------------------------------------


def test_broadcast(slots: list[str]) -> None:
    x = random(3, 2, device=slots[0], grad=False)
    copies = comm.broadcast(x, slots)
    assert [copy.device for copy in copies] == [torch.device(slot) for slot in slots]
    for copy in copies:
        torch.testing.assert_close(copy.cpu(), x.cpu())


def test_broadcast_coalesced_and_reduce_add_coalesced(slots: list[str]) -> None:
    tensors = [
        random(5, device=slots[0], grad=False),
        torch.arange(4, device=slots[0]),
        torch.empty(0, device=slots[0]),
        torch.randn(2, 3, 4, 5, device=slots[0]).to(memory_format=torch.channels_last),
    ]
    columns = comm.broadcast_coalesced(tensors, slots, buffer_size=64)
    for column in columns:
        torch.testing.assert_close([t.cpu() for t in column], [t.cpu() for t in tensors])
    sums = comm.reduce_add_coalesced(columns, destination=slots[0], buffer_size=64)
    torch.testing.assert_close([t.cpu() for t in sums], [t.cpu() * 4 for t in tensors])


def test_reduce_add(slots: list[str]) -> None:
    values = [random(3, 4, device=slot, grad=False) for slot in slots]
    total = comm.reduce_add(values, destination=slots[1])
    assert total.device == torch.device(slots[1])
    torch.testing.assert_close(total.cpu(), sum(value.cpu() for value in values))


@pytest.mark.parametrize("sizes", [None, (1, 3, 0, 2)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_comm_scatter_and_gather(slots: list[str], dim: int, sizes: Any) -> None:
    x = random(6, 6, grad=False)
    parts = comm.scatter(x, slots, chunk_sizes=sizes, dim=dim)
    wanted = x.chunk(4, dim) if sizes is None else torch.split(x, sizes, dim)
    torch.testing.assert_close([part.cpu() for part in parts], list(wanted))
    torch.testing.assert_close(comm.gather(parts, dim, "cpu"), x)


def test_memory_format_survives_scatter_and_gather(slots: list[str]) -> None:
    x = torch.randn(8, 3, 4, 4, device=slots[0]).to(memory_format=torch.channels_last)
    parts = comm.scatter(x, slots)
    for part in parts:
        assert part.is_contiguous(memory_format=torch.channels_last)
    whole = comm.gather(parts, destination=slots[0])
    assert whole.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(whole, x)
