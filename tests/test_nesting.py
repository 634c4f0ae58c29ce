"""The wrapper inside itself, in several threads at once, and overridden in parts."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, current_replica, data_parallel
from tests.models import Shared, assert_all_close, grads_of, twins


def test_a_wrapper_within_a_wrapper(slots: list[str]) -> None:
    inner = nn.Linear(4, 4).double().to(slots[0])
    bare = nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 2).double().to(slots[0]))
    reference = copy.deepcopy(bare)
    nested = nn.Sequential(DataParallel(bare[0], slots[:1]), bare[1], bare[2])
    model = DataParallel(nested, slots[:3])
    x = torch.randn(9, 4, dtype=torch.double, device=slots[0])
    if torch.device(slots[0]).type == "cpu":
        bare[0] = DataParallel(inner, ["cpu", "cpu"])
        model = DataParallel(bare, slots[:3])
        model(x).pow(2).sum().backward()
        reference(x).pow(2).sum().backward()
        assert_all_close(grads_of(model), grads_of(reference))
    else:
        with pytest.raises(ValueError, match="must be on virtual:0"):
            model(x)


def test_the_function_inside_a_replica() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.seen: list[tuple[int, int]] = []

        def forward(self, x: Tensor) -> Tensor:
            outer = current_replica()
            output: Tensor = data_parallel(self.layer, x, ["cpu", "cpu"])
            assert current_replica() == outer
            return output

    module = Inside()
    x = torch.randn(8, 3, dtype=torch.double)
    torch.testing.assert_close(DataParallel(module, ["cpu"] * 2)(x), module.layer(x))


def test_several_threads_share_one_wrapper(slots: list[str]) -> None:
    bare, inner = twins(lambda: Shared([0, 1]), slots[0])
    model = DataParallel(inner, slots[:3])
    x = torch.randn(9, 4, dtype=torch.double, device=slots[0])
    expected = bare(x)
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            barrier.wait(30)
            for _ in range(10):
                torch.testing.assert_close(model(x), expected)
                with torch.no_grad():
                    torch.testing.assert_close(model(x), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]


def test_a_subclass_may_scatter_and_gather_in_its_own_way(slots: list[str]) -> None:
    class Uneven(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            (x,) = inputs
            chunks = [x[:1].to(device_ids[0]), x[1:].to(device_ids[1])]
            return [(chunk,) for chunk in chunks], [kwargs] * 2

        def gather(self, outputs: Any, output_device: Any) -> Any:
            return torch.cat([output.to(output_device) for output in outputs]).flip(0)

    bare, inner = twins(lambda: Shared([0, 1]), slots[0])
    model = Uneven(inner, slots[:2], buffers="mean")
    x = torch.randn(7, 4, dtype=torch.double, device=slots[0])
    torch.testing.assert_close(model(x), bare(x).flip(0))
    model(x).sum().backward()
    bare(x).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))


def test_several_forwards_before_one_backward(slots: list[str]) -> None:
    bare, inner = twins(lambda: Shared([0, 1, 0]), slots[0])
    model = DataParallel(inner, slots)
    inputs = torch.randn(3, 7, 4, dtype=torch.double, device=slots[0])
    for module in (bare, model):
        torch.stack([module(x).pow(2).sum() for x in inputs]).prod().backward()
    assert_all_close(grads_of(model), grads_of(bare))


def test_backward_in_parts_and_twice(slots: list[str]) -> None:
    bare, inner = twins(lambda: Shared([0, 1]), slots[0])
    model = DataParallel(inner, slots)
    x = torch.randn(7, 4, dtype=torch.double, device=slots[0])
    for module in (bare, model):
        output = module(x)
        output[:3].sum().backward(retain_graph=True)
        output.pow(2).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))


def test_a_parameter_that_only_some_replicas_use(slots: list[str]) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(4, 4)
            self.sometimes = nn.Linear(4, 4)
            self.never = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.always(x)
            return torch.where(x[:, :1] > 0, self.sometimes(y), y) if (x[:, 0] > 0).any() else y

    bare, inner = twins(Branches, slots[0])
    model = DataParallel(inner, slots)
    x = torch.randn(8, 4, dtype=torch.double, device=slots[0]).abs()
    x[2:6, 0] *= -1
    for module in (bare, model):
        module(x).pow(2).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))
    assert dict(inner.named_parameters())["never.weight"].grad is None


def test_the_sum_over_replicas_does_not_depend_on_timing(slots: list[str]) -> None:
    _, inner = twins(lambda: Shared([0, 1, 2, 0]), slots[0], torch.float32)
    model = DataParallel(inner, slots)
    x = torch.randn(16, 4, device=slots[0])
    first: list[Tensor | None] = []
    for _ in range(30):
        model.zero_grad()
        model(x).pow(2).sum().backward()
        grads = [None if g is None else g.clone() for g in grads_of(inner)]
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(grads, first, strict=True) if a is not None)  # type: ignore[arg-type]
