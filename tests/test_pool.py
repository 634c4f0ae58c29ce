"""A pool of devices: each item gets what the bare module computes, whichever device is free."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dataparallel as dp
from dataparallel import virtual
from dataparallel.virtual import device_module
from tests.models import assert_all_close

WIDTH = 12


class Net(nn.Module):
    """Layers, a buffer, and a second way to call it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))) * scale  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> dict[str, Any]:
        return {"code": self.first(x), "names": [f"{value:.4f}" for value in x[:, 0].tolist()]}


@pytest.fixture
def net() -> Net:
    net = Net()
    # Statistics that are not those of a new layer.
    net(torch.randn(64, WIDTH))
    return net.eval()


def batches(count: int, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


def outputs(net: nn.Module, items: list[Tensor]) -> list[Tensor]:
    """Return the outputs of the bare module."""
    device = next(net.parameters()).device
    with torch.no_grad():
        return [net(item.to(device)).cpu() for item in items]


class Samples(Dataset[Tensor]):
    """A dataset as many are: with a length, and without an end of its own."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % len(self.rows)]


# --- many items ------------------------------------------------------------------------------


def as_list(items: list[Tensor]) -> Any:
    return items


def as_generator(items: list[Tensor]) -> Any:
    return (item for item in items)


def as_tuples(items: list[Tensor]) -> Any:
    return [(item,) for item in items]


def as_dicts(items: list[Tensor]) -> Any:
    return [{"x": item, "scale": 1.0} for item in items]


def as_loader(items: list[Tensor]) -> Any:
    return DataLoader(TensorDataset(torch.cat(items)), batch_size=3)


@pytest.mark.parametrize("given", [as_list, as_generator, as_tuples, as_dicts, as_loader])
def test_each_item_gets_its_output_in_order(
    net: Net, slots: list[str], given: Callable[[list[Tensor]], Any]
) -> None:
    items = batches(20)
    want = outputs(net, items)
    with dp.Pool(net, slots) as pool:
        found = list(pool.map(given(items)))
        assert {one.device.type for one in found} == {"cpu"}
        assert_all_close(found, want)
        assert_all_close(pool.predict(given(items)), torch.cat(want))


def test_samples_are_joined_as_a_loader_does_and_taken_apart(net: Net, slots: list[str]) -> None:
    rows = torch.cat(batches(7))
    want = outputs(net, [rows])[0]
    with dp.Pool(net, slots) as pool:
        found = list(pool.map(Samples(rows), batch_size=4))
        assert_all_close(found, [*want])
        assert_all_close(pool.predict(Samples(rows), batch_size=4), want)
        codes = list(pool.method("encode").map([(row,) for row in rows], batch_size=4))
    assert [code["names"] for code in codes] == [f"{row[0]:.4f}" for row in rows]
    assert_all_close(
        [code["code"] for code in codes], [*net.first(rows.to(codes_device(net))).cpu()]
    )


def codes_device(net: nn.Module) -> torch.device:
    return next(net.parameters()).device


def test_results_as_they_come(slots: list[str]) -> None:
    gate = threading.Event()

    def wait_for_first(item: int) -> int:
        if item == 0:
            assert gate.wait(60)
        return item

    with dp.Pool(wait_for_first, slots[:2]) as pool:
        results = pool.map(range(6), ordered=False)
        found = [next(results) for _ in range(5)]
        gate.set()
        assert next(results) == 0
        assert sorted(found) == [1, 2, 3, 4, 5]
        assert list(results) == []


def test_a_device_that_is_busy_takes_less() -> None:
    gate, devices = threading.Event(), list[str]()

    def work(item: int, device: torch.device) -> int:
        devices.append(str(device))
        if item == 0:
            assert gate.wait(60)
        elif item == 5:
            gate.set()
        return item

    with dp.Pool(work, ["virtual:0", "virtual:1"]) as pool:
        assert list(pool.map(range(6))) == list(range(6))
    (slow,) = {devices[0], devices[1]} & {
        device for device in devices if devices.count(device) == 1
    }
    assert devices.count(slow) == 1


def test_only_so_many_items_are_pulled() -> None:
    pulled = []

    def items() -> Iterator[int]:
        for i in range(100):
            pulled.append(i)
            yield i

    with dp.Pool(abs, ["cpu", "cpu"]) as pool:
        results = pool.map(items(), max_ahead=5)
        for taken in range(20):
            assert next(results) == taken
            assert len(pulled) <= taken + 1 + 5
        results.close()
        assert list(results) == []
        # The pool itself goes on.
        assert list(pool.map([-1])) == [1]


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with dp.Pool(abs, ["cpu"]) as pool:
        assert list(pool.map([1, -2, 3], progress=True)) == [1, 2, 3]
    shown = capsys.readouterr()
    assert "3/3" in shown.err or "100%" in shown.out


def test_no_items(net: Net) -> None:
    with dp.Pool(net, ["cpu", "cpu"]) as pool:
        assert list(pool.map([])) == []
        assert pool.predict([]) is None
        assert pool.run(abs, []) == []


def test_an_error_of_the_iterable_comes_in_its_turn(slots: list[str]) -> None:
    def items() -> Iterator[Tensor]:
        for i in range(6):
            yield torch.tensor(float(i))
        raise KeyError("no more")

    def taken(results: Iterator[Any]) -> list[float]:
        found: list[float] = []
        with pytest.raises(KeyError, match="no more"):
            found.extend(float(result) for result in iter(lambda: next(results), None))
        assert list(results) == []
        return found

    with dp.Pool(lambda x: x * 2, slots) as pool:
        assert taken(pool.map(items())) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        assert sorted(taken(pool.map(items(), ordered=False))) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        # The batch that it has broken off is one, too.
        assert taken(pool.map(items(), batch_size=4)) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_an_iterable_goes_on_after_its_error() -> None:
    class Flaky:
        number = 0

        def __iter__(self) -> Flaky:
            return self

        def __next__(self) -> int:
            self.number += 1
            if self.number == 9:
                raise StopIteration
            if self.number == 3:
                raise KeyError("three")
            return self.number

    with dp.Pool(abs, ["cpu", "cpu"]) as pool:
        results = pool.map(Flaky())
        assert [next(results), next(results)] == [1, 2]
        with pytest.raises(KeyError, match="three"):
            next(results)
        assert list(results) == [4, 5, 6, 7, 8]


def test_a_loader_of_texts_gives_lists_of_them() -> None:
    with dp.Pool(lambda batch: type(batch), ["cpu"]) as pool:
        assert list(pool.map(DataLoader(["a", "b"], batch_size=2))) == [list]  # type: ignore[arg-type]
        pairs = DataLoader(TensorDataset(torch.zeros(2), torch.zeros(2)))
        assert list(pool.map(pairs)) == [tuple, tuple]


class Stream(IterableDataset[Tensor]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(5.0))


def test_progress_needs_no_length(capsys: pytest.CaptureFixture[str]) -> None:
    with dp.Pool(torch.sum, ["cpu"]) as pool:
        found = list(pool.map(DataLoader(Stream(), batch_size=2), progress=True))
    assert found == [1, 5, 4]
    assert capsys.readouterr() != ("", "")


@pytest.mark.parametrize("call", ["map", "predict"])
def test_samples_along_another_dim_need_a_function_that_joins_them(call: str) -> None:
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    with dp.Pool(lambda x: x, ["cpu"], dim=1) as pool:
        with pytest.raises(ValueError, match="pass a collate_fn that makes batches along that dim"):
            getattr(pool, call)(rows, batch_size=2)
        found = list(pool.map(rows, 2, collate_fn=lambda some: torch.stack(some, 1)))
    assert_all_close(found, rows)


# --- what an item sees -----------------------------------------------------------------------


def test_a_function_sees_its_device_and_the_settings_of_the_caller(slots: list[str]) -> None:
    def look(item: int, device: torch.device) -> tuple[Any, ...]:
        current = torch.accelerator.current_device_index() if device.type == "virtual" else None
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return item, str(device), device.index == current, *modes

    with dp.Pool(look, slots) as pool, torch.autocast("cpu", torch.bfloat16):
        found = list(pool.map(range(8)))
    assert [one[0] for one in found] == list(range(8))
    assert {one[1] for one in found} <= set(slots)
    assert {one[2:] for one in found} == {(True, True, True)}


def test_random_numbers_belong_to_the_item_whichever_device_takes_it(slots: list[str]) -> None:
    def draw(item: int, device: torch.device) -> Tensor:
        return torch.cat([torch.rand(2), torch.rand(2, device=device).cpu()])

    def numbers(where: list[str], *, ordered: bool = True) -> list[Tensor]:
        torch.manual_seed(7)
        with dp.Pool(draw, where) as pool:
            return list(pool.map(range(12), ordered=ordered))

    whole = numbers(slots)
    assert_all_close(numbers(slots[:1]), whole)
    assert_all_close(numbers(slots[:3]), whole)
    assert len({tuple(one.tolist()) for one in whole}) == 12


def test_requests_draw_again_after_the_same_seed() -> None:
    with dp.Pool(lambda item: torch.rand(1).item(), ["cpu", "cpu"]) as pool:
        found = []
        for _ in range(2):
            torch.manual_seed(7)
            found.append([pool.submit(0).result() for _ in range(3)])
    assert found[0] == found[1]
    assert len({*found[0]}) == 3


def test_dropout_draws_by_item(
    net: Net, slots: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.Dropout(0.5)
    found = []
    for where in (slots[:1], slots):
        torch.manual_seed(3)
        with dp.Pool(layer, where) as pool:
            found.append(pool.predict(batches(9)))
    assert_all_close(found[0], found[1])
    assert "training mode" in caplog.text


def test_caller_grad_mode_on_demand() -> None:
    with dp.Pool(lambda item: torch.is_grad_enabled(), ["cpu", "cpu"], inference=False) as pool:
        assert pool.submit(0).result() is True
        with torch.no_grad():
            assert pool.submit(0).result() is False


def test_gradients_of_items_come_back_and_those_of_parameters_are_refused(
    net: Net, slots: list[str]
) -> None:
    item = batches(1)[0].requires_grad_()
    net.to(slots[0])
    with dp.Pool(net, slots, inference=False) as pool:
        with pytest.raises(RuntimeError, match=r"gradients of the parameters 'first\.weight'"):
            pool.submit(item)
        with torch.no_grad():
            assert not pool.submit(item).result().requires_grad
        net.requires_grad_(False)
        (found,) = torch.autograd.grad(pool.submit(item).result().square().sum(), item)
    (want,) = torch.autograd.grad(net(item.to(slots[0])).square().sum(), item)
    assert_all_close(found, want)


def test_transforms_are_refused(net: Net) -> None:
    with dp.Pool(net, ["cpu", "cpu"]) as pool:
        with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
            torch.func.vmap(lambda x: pool.submit(x).result())(torch.randn(2, 3, WIDTH))
        assert pool.submit(batches(1)[0]).result().shape == (3, 5)


# --- the module ------------------------------------------------------------------------------


def test_memory_is_shared_or_copied_once() -> None:
    net = nn.Linear(256, 256).eval()
    device_module.reset_peak_memory_stats("virtual:1")
    before = [device_module.memory_allocated(f"virtual:{i}") for i in range(2)]
    size = sum(p.nbytes for p in net.parameters())
    with dp.Pool(net, ["virtual:0", "virtual:0", "virtual:1", "virtual:1"]) as pool:
        for _ in range(3):
            list(pool.map(torch.zeros(8, 4, 256)))
        used = [device_module.memory_allocated(f"virtual:{i}") - before[i] for i in range(2)]
    assert size <= used[0] < 1.5 * size
    assert size <= used[1] < 1.5 * size


def change_in_place(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.mul_(2)


def change_by_an_optimizer(net: Net) -> None:
    net(torch.randn(4, WIDTH, device=net.first.weight.device)).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()


def replace_a_layer(net: Net) -> None:
    net.last = nn.Linear(WIDTH, 5).to(net.first.weight.device)


def replace_a_parameter(net: Net) -> None:
    net.last.bias = nn.Parameter(torch.ones_like(net.last.bias))


def change_a_buffer(net: Net) -> None:
    assert net.norm.running_mean is not None
    net.norm.running_mean.add_(1)


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        change_by_an_optimizer,
        replace_a_layer,
        replace_a_parameter,
        change_a_buffer,
    ],
)
def test_clones_follow_the_module(
    net: Net, slots: list[str], change: Callable[[Net], None]
) -> None:
    items = batches(9)
    with dp.Pool(net, slots) as pool:
        before = pool.predict(items)
        change(net)
        want = torch.cat(outputs(net, items))
        assert not torch.allclose(before, want)
        assert_all_close(pool.predict(items), want)


class Counting(nn.Linear):
    """A layer that counts its calls, and keeps its last output."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.kept = super().forward(x)
        return self.kept * self.num_calls


def test_assignments_to_attributes_are_dropped(slots: list[str]) -> None:
    net = Counting().eval()
    with dp.Pool(net, slots) as pool:
        for _ in range(3):
            # One item each time, so that no replica has a second one.
            assert_all_close(
                pool.predict(batches(1)), nn.Linear.forward(net, batches(1)[0].to(slots[0])).cpu()
            )
    assert net.num_calls == 0 and not hasattr(net, "kept")


def test_several_modules_on_one_pool(net: Net, slots: list[str]) -> None:
    other = nn.Linear(5, 2).eval()
    items = batches(6)
    want = [other.cpu()(one) for one in outputs(net, items)]
    with dp.Pool(net, slots) as pool:
        heads = dp.Pool(other, pool)
        assert heads.device_ids == pool.device_ids
        assert_all_close(list(heads.map(pool.map(items))), want)
        heads.close()
        assert pool.submit(items[0]).result().shape == (3, 5)


def quantized(net: nn.Module) -> Any:
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, torch.qint8)


def exported(net: nn.Module) -> Any:
    rows = torch.export.Dim("rows", min=2)
    return torch.export.export(
        net, (torch.randn(3, WIDTH),), dynamic_shapes={"x": {0: rows}}
    ).module()


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


def compiled_function(net: nn.Module) -> Any:
    return torch.compile(lambda x: net(x), backend="eager")


def scripted(net: nn.Module) -> Any:
    return torch.jit.trace(net, (torch.randn(3, WIDTH),)).forward


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("form", [quantized, exported, compiled, compiled_function, scripted])
def test_other_forms_of_modules(form: Callable[[nn.Module], Any]) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5)).eval()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    target = form(Named().eval())
    items = batches(8)
    with torch.no_grad():
        want = [target(item) for item in items]
    with dp.Pool(target, ["cpu", "cpu"]) as pool:
        assert_all_close(list(pool.map(items)), want)


@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        (nn.Linear, TypeError, r"pass Linear\(\.\.\.\)"),
        (3, TypeError, "takes a module or a function, but got 3"),
        (nn.LazyLinear(3), ValueError, "uninitialized"),
    ],
)
def test_wrong_targets(target: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        dp.Pool(target, ["cpu", "cpu"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"max_wait": -1.0}, "max_wait must be at least 0"),
        ({"output_device": "virtual:9"}, "does not exist"),
    ],
)
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dp.Pool(abs, ["cpu"], **options)


def test_wrong_calls(net: Net) -> None:
    with dp.Pool(net, ["cpu"]) as pool:
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            pool.map([], batch_size=0)
        with pytest.raises(ValueError, match="on_error must be 'raise' or 'return'"):
            pool.map([], on_error="rise")  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match="no attribute 'decode'"):
            pool.method("decode")
    with dp.Pool(abs, ["cpu"]) as pool, pytest.raises(TypeError, match="only modules have methods"):
        pool.method("encode")
    with dp.Pool(device_ids=["cpu"]) as pool, pytest.raises(TypeError, match=r"give run\(\) one"):
        pool.submit(1).result()


class Waiting(nn.Linear):
    """A layer that waits while it computes a 7."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.gates = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        entered, left = self.gates
        if float(x[0, 0]) == 7:
            entered.set()
            assert left.wait(60)
        return super().forward(x)


def test_a_call_after_a_change_waits_for_items_on_their_way(slots: list[str]) -> None:
    net = Waiting().to(slots[0]).eval()
    item = torch.ones(1, 2)
    with dp.Pool(net, slots) as pool:
        slow = pool.submit(torch.full((1, 2), 7.0))
        assert net.gates[0].wait(60)
        before = pool.submit(item).result()
        with torch.no_grad():
            net.weight.mul_(3)
        threading.Timer(0.2, net.gates[1].set).start()
        found = [pool.submit(item).result() for _ in range(4)]
        assert slow.done()
    assert_all_close(found, outputs(net, [item]) * 4)
    assert not torch.allclose(before, found[0])


# --- wrappers --------------------------------------------------------------------------------


def data_parallel(net: nn.Module, slots: list[str]) -> Any:
    return dp.DataParallel(net, slots)


def distributed(net: nn.Module, slots: list[str]) -> Any:
    return dp.DistributedDataParallel(net, slots)


def spread(net: nn.Module, slots: list[str]) -> Any:
    return dp.DistributedDataParallel(net, slots, originals="spread")


@pytest.mark.parametrize("wrap", [data_parallel, distributed, spread])
def test_a_wrapper_evaluates_on_its_replicas_between_steps(
    wrap: Callable[[nn.Module, list[str]], Any],
) -> None:
    slots = [f"virtual:{i}" for i in range(3)]
    bare, net = (nn.Sequential(nn.Linear(WIDTH, 300), nn.Linear(300, 5)) for _ in range(2))
    net.load_state_dict(bare.state_dict())
    model = wrap(net, slots)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (bare, model)]
    items, x = batches(7), torch.randn(12, WIDTH)
    for _ in range(3):
        for one, optimizer in zip((bare, model), optimizers, strict=True):
            one.train()
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
            one.eval()
        allocated = [device_module.memory_allocated(one) for one in slots]
        with model.pool() as pool:
            assert_all_close(pool.predict(items), torch.cat(outputs(bare, items)))
        after = [device_module.memory_allocated(one) for one in slots]
        if wrap is not data_parallel:
            # No copies of the parameters beside those of the replicas.
            assert all(b - a < 1000 for a, b in zip(allocated, after, strict=True))


def test_a_pool_of_a_wrapper_is_on_its_devices(net: Net) -> None:
    model = dp.DataParallel(net, ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"pass the wrapper's \.module for others"):
        dp.Pool(model, ["cpu"])


# --- errors ----------------------------------------------------------------------------------


def fail_at_3(item: int) -> int:
    if item == 3:
        raise ValueError("three is wrong")
    return item


def test_an_error_names_item_and_device_and_loses_no_other(slots: list[str]) -> None:
    with dp.Pool(fail_at_3, slots) as pool:
        results = pool.map(range(6))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(
            ValueError, match=rf"three is wrong\nin item 3 on device {slots[0][:4]}"
        ):
            next(results)
        assert list(results) == [4, 5]
        found = list(pool.map(range(6), on_error="return"))
        assert [one for one in found if not isinstance(one, ValueError)] == [0, 1, 2, 4, 5]
        assert isinstance(found[3], ValueError)
        with pytest.raises(ValueError, match="three is wrong") as caught:
            pool.run(fail_at_3, range(6))
        assert "5 of 6 items have succeeded" in str(getattr(caught.value, "__notes__", ""))
        assert pool.submit(4).result() == 4


def test_no_item_and_no_result_is_lost_among_many_failures(slots: list[str]) -> None:
    def fail_often(item: Tensor) -> Tensor:
        numbers = [int(number) for number in item]
        if any(number % 3 == 0 for number in numbers):
            raise RuntimeError(f"{numbers} fail")
        if any(number % 7 == 0 for number in numbers):
            raise torch.OutOfMemoryError("out of memory")
        return item * 2

    items = [torch.full((1,), float(i)) for i in range(2400)]
    fails = [i % 3 == 0 or i % 7 == 0 for i in range(2400)]
    assert sum(fails) > 1000
    for options, given in (({}, items), ({"max_batch": 16, "max_wait": 0.0}, items)):
        with dp.Pool(fail_often, slots, **options) as pool:  # type: ignore[arg-type]
            found = list(pool.map(given, on_error="return"))
            some = [pool.submit(item) for item in given[:200]]
            concurrent.futures.wait(some)
        assert [isinstance(one, Exception) for one in found] == fails
        assert [one.exception() is not None for one in some] == fails[:200]
        good = [
            (one, item) for one, item in zip(found, items, strict=True) if isinstance(one, Tensor)
        ]
        assert all(torch.equal(one, item * 2) for one, item in good)


def test_a_bad_sample_does_not_lose_its_batch(slots: list[str]) -> None:
    def refuse_negative(x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x.sqrt()

    rows = torch.arange(10.0)
    rows[4] = -1
    with dp.Pool(refuse_negative, slots) as pool:
        found = list(pool.map(rows, batch_size=5, on_error="return"))
    assert isinstance(found[4], ValueError)
    assert "in item 4 on device" in str(found[4])
    assert_all_close(found[:4] + found[5:], [*rows[:4].sqrt(), *rows[5:].sqrt()])


class Hungry(nn.Module):
    """Needs memory by the square of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        big = x.new_zeros(len(x), len(x), 4096)
        return x * 2 + big[:, 0, 0, None]


@pytest.mark.parametrize("joined", ["an item", "samples"])
def test_out_of_memory_halves_the_batch(joined: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = torch.randn(64, 3)
    with dp.Pool(Hungry().eval(), ["virtual:0", "virtual:1"]) as pool:
        for index in range(2):
            free = device_module.memory_allocated(f"virtual:{index}") + 20 * 2**20
            virtual.set_memory_limit(index, free)
        try:
            if joined == "an item":
                found = list(pool.map([rows] * 4))
                assert_all_close(found, [rows * 2] * 4)
            else:
                found = list(pool.map(rows, batch_size=64))
                assert_all_close(found, [*(rows * 2)])
        finally:
            for index in range(2):
                virtual.set_memory_limit(index, None)
    text = caplog.text
    assert "had no memory for a batch of 64 samples, and gets at most 32" in text
    # Each device fails once with each size.
    assert all(text.count(f"batch of {n} samples") <= 2 for n in (64, 32))


def test_out_of_memory_for_one_sample_is_the_error(net: Net) -> None:
    def fail(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("too little")

    with dp.Pool(fail, ["cpu", "cpu"]) as pool:
        with pytest.raises(torch.OutOfMemoryError, match="too little"):
            next(pool.map([torch.zeros(1, 3)]))
        with pytest.raises(torch.OutOfMemoryError, match="too little"):
            next(pool.map(["text"]))


def test_an_item_that_was_changed_is_not_tried_again() -> None:
    def double(x: Tensor) -> Tensor:
        x.mul_(2)
        if len(x) > 2:
            raise torch.OutOfMemoryError("too little")
        return x

    def double_all(some: list[Tensor]) -> list[Tensor]:
        return [double(x) for x in some]

    with dp.Pool(double, ["cpu"]) as pool:
        with pytest.raises(torch.OutOfMemoryError, match="too little\nin item 0 on device cpu"):
            pool.submit(torch.ones(4)).result()
        rows = [torch.ones(1), torch.ones(3)]
        with pytest.raises(torch.OutOfMemoryError, match="too little\nin items 0 to 1"):
            next(dp.Pool(double_all, pool).map(rows, 2, collate_fn=list))


def test_a_mean_is_not_put_together_from_parts() -> None:
    def mean(x: Tensor) -> Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("too little")
        return x.mean()

    with dp.Pool(mean, ["cpu"]) as pool, pytest.raises(RuntimeError, match="without dimensions"):
        next(pool.map([torch.zeros(4)]))


def test_an_item_cannot_wait_for_its_own_pool() -> None:
    with (
        dp.Pool(lambda item: list(pool.map([item])), ["cpu"]) as pool,
        pytest.raises(RuntimeError, match="waits for other items of the same pool"),
    ):
        next(pool.map([1]))


def test_an_item_cannot_wait_for_a_request_to_its_own_pool() -> None:
    with dp.Pool(lambda item: item and pool.submit(0).result(), ["cpu"]) as pool:
        with pytest.raises(RuntimeError, match="waits for other items of the same pool"):
            pool.submit(1).result(60)
        with pytest.raises(RuntimeError, match="waits for other items of the same pool"):
            next(dp.Pool(lambda item: pool.submit(0).exception(), pool).map([1]))


def test_stop_iteration_of_an_item_ends_no_loop() -> None:
    def fail(item: int) -> int:
        return next(iter(range(item)))

    async def ask() -> Any:
        return await asyncio.wait_for(pool(0), 60)

    with dp.Pool(fail, ["cpu", "cpu"]) as pool:
        found = list(pool.map([1, 0, 1], on_error="return"))
        assert (found[0], found[2]) == (0, 0)
        assert isinstance(found[1].__cause__, StopIteration)
        with pytest.raises(RuntimeError, match="item 1 raised StopIteration"):
            list(pool.map([1, 0, 1]))
        with pytest.raises(RuntimeError, match="item 0 raised StopIteration"):
            asyncio.run(ask())


def test_an_item_that_exits_takes_no_other_with_it() -> None:
    def leave_at_3(x: Tensor) -> Tensor:
        if 3 in x.tolist():
            sys.exit(3)
        return x

    with dp.Pool(leave_at_3, ["cpu"], max_batch=4, max_wait=60) as pool:
        errors = [one.exception(60) for one in [pool.submit(torch.tensor([i])) for i in range(4)]]
    assert errors[:3] == [None] * 3
    assert isinstance(errors[3], SystemExit)
    assert "in item 3 on device cpu" in str(getattr(errors[3], "__notes__", ""))


def test_a_training_is_not_divided() -> None:
    seen = []

    def train(rates: Tensor) -> None:
        seen.append(len(rates))
        raise torch.OutOfMemoryError("too little")

    with (
        dp.Pool(device_ids=["cpu"]) as pool,
        pytest.raises(torch.OutOfMemoryError, match="too little"),
    ):
        pool.run(train, [torch.zeros(2)])
    assert seen == [2]


def test_an_item_that_cannot_be_joined_is_an_error_in_its_turn() -> None:
    items = [torch.ones(1, 2), [torch.ones(2), torch.ones(2)], torch.ones(1, 2)]
    with dp.Pool(torch.clone, ["cpu"], max_batch=2, max_wait=0.0) as pool:
        found = list(pool.map(items, on_error="return"))
        with pytest.raises(ValueError, match="nothing tells whether it has one entry per sample"):
            pool.submit(items[1])
    assert_all_close(found[::2], items[::2])
    assert isinstance(found[1], ValueError)


# --- requests --------------------------------------------------------------------------------


def test_requests_are_joined_and_taken_apart(net: Net, slots: list[str]) -> None:
    sizes = []
    net.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    items = [item[: 1 + i % 3] for i, item in enumerate(batches(40))]
    want = outputs(net, items)
    sizes.clear()
    with dp.Pool(net, slots, max_batch=8, max_wait=60) as pool:
        futures = [pool.submit(item) for item in items]
        # Closing lets nobody wait for others.
        pool.close()
        assert_all_close([future.result() for future in futures], want)
    assert sum(sizes) == sum(map(len, items))
    assert max(sizes) <= 8 and len(sizes) < 15


def test_only_what_is_alike_is_joined(net: Net) -> None:
    seen = []

    def look(batch: dict[str, Any]) -> Tensor:
        seen.append(
            (
                batch["x"].shape[0],
                batch["x"].shape[1],
                batch["scale"],
                torch.is_autocast_enabled("cpu"),
            )
        )
        return batch["x"] * batch["scale"]  # type: ignore[no-any-return]

    with dp.Pool(look, ["cpu"], max_batch=100, max_wait=60) as pool:

        def send(width: int, scale: int) -> Any:
            return pool.submit({"x": torch.ones(2, width), "scale": scale})

        futures = [send(3, 1), send(4, 1), send(3, 2), send(3, 1), send(4, 1)]
        with torch.autocast("cpu"):
            futures.append(send(3, 1))
        pool.close()
        found = [future.result() for future in futures]
    assert sorted(seen) == [(2, 3, 1, True), (2, 3, 2, False), (4, 3, 1, False), (4, 4, 1, False)]
    assert [tuple(one.shape) for one in found] == [(2, 3), (2, 4), (2, 3), (2, 3), (2, 4), (2, 3)]


class Tagged(Tensor):
    """A tensor of another type."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_of_other_types_are_not_joined() -> None:
    def values(x: Tensor) -> tuple[type, list[Any]]:
        return type(x), x.dequantize().tolist()

    def scaled(value: float, scale: float) -> Tensor:
        return torch.quantize_per_tensor(torch.tensor([[value]]), scale, 0, torch.quint8)

    items = [torch.ones(1, 1), torch.ones(1, 1).as_subclass(Tagged)]
    items += [scaled(1.0, 0.5), scaled(100.0, 1.0)]
    with dp.Pool(values, ["cpu"], max_batch=2, max_wait=0.2, out_dims=None) as pool:
        futures = [pool.submit(item) for item in items]
        found = [future.result() for future in futures]
    assert found == [(Tensor, [[1.0]]), (Tagged, [[1.0]]), (Tensor, [[1.0]]), (Tensor, [[100.0]])]


class Word(str):
    """A text that is told when another one is compared with it."""

    told: Callable[[], object]

    def __new__(cls, text: str, told: Callable[[], object]) -> Word:
        word = super().__new__(cls, text)
        word.told = told
        return word

    def __eq__(self, other: object) -> bool:
        self.told()
        return super().__eq__(other)

    __hash__ = str.__hash__


def twice(batch: dict[str, Any]) -> Tensor:
    return batch["x"] * 2  # type: ignore[no-any-return]


def test_a_long_line_is_not_looked_through_for_each_batch() -> None:
    compared, gate = [], threading.Event()
    with dp.Pool(lambda item: gate.wait(60), ["cpu"]) as first:
        pool = dp.Pool(twice, first, max_batch=4, max_wait=0.0)
        first.submit(0)
        futures = [
            pool.submit(
                {"x": torch.ones(1), "word": Word(str(i % 100), lambda: compared.append(1))}
            )
            for i in range(400)
        ]
        gate.set()
        assert sum(future.result().sum() for future in futures) == 800
    assert len(compared) < 10 * 400


def test_results_that_are_collected_while_a_thread_looks_for_work() -> None:
    def item() -> dict[str, Any]:
        return {"x": torch.ones(1), "word": Word("same", gc.collect)}

    with dp.Pool(twice, ["cpu"], max_batch=2, max_wait=60) as pool:
        # Only the collector finds them.
        cycle: list[Any] = [pool.map([item()] * 9, max_ahead=3)]
        cycle.append(cycle)
        next(cycle[0])
        del cycle
        futures = [pool.submit(item()) for _ in range(4)]
        for future in futures:
            assert future.result(60) == 2


def test_requests_stay_that_were_joined_with_some_that_are_given_up() -> None:
    compared, gate = threading.Event(), threading.Event()

    def item() -> dict[str, Any]:
        return {"x": torch.ones(1), "word": Word("same", compared.set)}

    def items() -> Iterator[Any]:
        yield {"x": torch.tensor(1.0), "word": "alone"}
        yield item()
        gate.set()

    def work(batch: dict[str, Any]) -> Tensor:
        assert gate.wait(60)
        return twice(batch)

    with dp.Pool(work, ["cpu"], max_batch=3, max_wait=60) as pool:
        results = pool.map(items(), max_ahead=3)
        assert next(results) == 2
        future = pool.submit(item())
        assert compared.wait(60)
        results.close()
        others = [pool.submit(item()) for _ in range(2)]
        assert [one.result(60) for one in (future, *others)] == [2] * 3


def test_texts_are_joined_where_in_dims_tells() -> None:
    def shout(texts: list[str]) -> list[str]:
        return [f"{text}!{len(texts)}" for text in texts]

    with dp.Pool(shout, ["cpu"], max_batch=4, max_wait=60, in_dims={0: "samples"}) as pool:
        futures = [pool.submit(texts) for texts in (["a"], ["b", "c"], ["d"])]
        assert [one.result() for one in futures] == [["a!4"], ["b!4", "c!4"], ["d!4"]]


@pytest.mark.parametrize("output", [lambda x: x.mean(), lambda x: {"loss": 0.5}, lambda x: x[:1]])
def test_what_belongs_to_the_whole_batch_is_refused(output: Callable[[Tensor], Any]) -> None:
    with dp.Pool(output, ["cpu"], max_batch=2, max_wait=60) as pool:
        futures = [pool.submit(torch.zeros(1, 3)) for _ in range(2)]
        for future in futures:
            with pytest.raises(ValueError, match="nobody knows what belongs to which item"):
                future.result()


def test_requests_that_need_gradients_have_graphs_of_their_own() -> None:
    with dp.Pool(torch.exp, ["cpu"], max_batch=2, max_wait=0.2, inference=False) as pool:
        items = [torch.zeros(1, requires_grad=True) for _ in range(2)]
        for future in [pool.submit(item) for item in items]:
            future.result().sum().backward()
    assert [item.grad for item in items] == [1, 1]


def test_an_error_of_a_joined_output_names_its_items() -> None:
    with dp.Pool(torch.mean, ["cpu"], max_batch=2, max_wait=60) as pool:
        futures = [pool.submit(torch.zeros(1, 3)) for _ in range(2)]
        with pytest.raises(ValueError, match="in items 0 to 1 on device cpu"):
            futures[1].result()


def test_out_dims_tells_what_each_gets() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.T, torch.ones(7)

    with dp.Pool(both, ["cpu"], max_batch=3, max_wait=60, out_dims=(1, None)) as pool:
        one, two = (pool.submit(torch.full((n, 4), float(n))) for n in (1, 2))
        assert [tuple(part.shape) for part in one.result()] == [(4, 1), (7,)]
        assert_all_close(two.result()[0], torch.full((4, 2), 2.0))


def test_asyncio_waits_for_items(net: Net, slots: list[str]) -> None:
    items = batches(10)

    async def ask() -> list[Tensor]:
        found: list[Tensor] = await asyncio.gather(*(pool(item) for item in items))
        return found

    with dp.Pool(net, slots, max_batch=6) as pool:
        assert_all_close(asyncio.run(ask()), outputs(net, items))


def test_a_request_can_be_given_up() -> None:
    gate, seen = threading.Event(), list[int]()

    def work(item: int) -> None:
        seen.append(item)
        assert gate.wait(60)

    with dp.Pool(work, ["cpu"]) as pool:
        first = pool.submit(0)
        while not seen:
            time.sleep(0.01)
        second, third = pool.submit(1), pool.submit(2)
        assert second.cancel() and not first.cancel()
        gate.set()
        third.result()
    assert seen == [0, 2]


def test_several_threads_submit(net: Net, slots: list[str]) -> None:
    items = batches(12)
    want = outputs(net, items)
    with (
        dp.Pool(net, slots, max_batch=4) as pool,
        concurrent.futures.ThreadPoolExecutor(6) as callers,
    ):
        found = list(callers.map(lambda i: pool.submit(items[i % 12]).result(), range(120)))
    assert_all_close(found, want * 10)


# --- trainings -------------------------------------------------------------------------------


def test_trainings_side_by_side_equal_trainings_alone(slots: list[str]) -> None:
    def train(rate: float, device: torch.device) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)).to(
            device
        )
        optimizer = torch.optim.SGD(net.parameters(), rate)
        losses = []
        for _ in range(5):
            loss = net(torch.ones(4, WIDTH, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    rates = [0.1, 0.03, 0.01, 0.003, 0.001]
    with dp.Pool(device_ids=slots) as pool:
        found = pool.run(train, rates)
    with dp.Pool(device_ids=slots[:1]) as pool:
        assert found == pool.run(train, rates)
    assert len({tuple(one) for one in found}) == 5


# --- streams ---------------------------------------------------------------------------------


def test_inputs_on_devices_and_on_streams_of_the_caller(net: Net) -> None:
    net.to("virtual:0")
    items = batches(8)
    want = outputs(net, items)
    devices = ["virtual:0", "virtual:1", "virtual:2"]
    # A stream that the devices of the pool do not know.
    with dp.Pool(net, devices, output_device=None) as pool, torch.Stream("virtual:0"):
        moved = [item.to("virtual:0", non_blocking=True) * 1 for item in items]
        found = [one.cpu() for one in pool.map(moved)]
    assert_all_close(found, want)


def test_items_are_made_on_the_stream_on_which_they_are_pulled() -> None:
    with virtual.strict_mode():
        net = nn.Linear(WIDTH, WIDTH).to("virtual:0").eval()
        items = batches(8)
        want = outputs(net, items)
        with dp.Pool(net, ["virtual:0", "virtual:1"]) as pool:
            results = pool.map(item.to("virtual:0", non_blocking=True) * 1 for item in items)
            with torch.Stream("virtual:0"):
                found = list(results)
    assert_all_close(found, want)


def test_the_host_waits_once_for_each_item() -> None:
    net = nn.Linear(WIDTH, 3).eval()
    with dp.Pool(net, ["virtual:0", "virtual:1"]) as pool:
        list(pool.map(batches(4)))
        virtual.reset_counters()
        assert len(list(pool.map(batches(20)))) == 20
        counts = virtual.counters()
    assert counts["copies_device_to_host"] == 20, counts


class Gated(nn.Linear):
    """A layer whose forward waits for the host."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        assert self.gate.wait(60)
        return super().forward(x)


def test_copies_of_other_items_go_beside_the_computation() -> None:
    net = Gated().eval()
    with dp.Pool(net, ["virtual:0"]) as pool:
        net.gate.set()
        pool.submit(batches(1)[0].pin_memory()).result()
        net.gate.clear()
        with virtual.record_trace() as trace:
            # All of them are there when the first one is computed.
            futures = [pool.submit(item.pin_memory()) for item in batches(4)]
            net.gate.set()
            concurrent.futures.wait(futures)
    kinds = {"copy", "kernel", "host_wait"}
    found = [
        "in"
        if one.source == -1 and one.kind == "copy"
        else "out"
        if one.kind == "copy"
        else one.kind
        for one in trace
        if one.kind in kinds
    ]
    # The next item is under way before the host waits for the one before.
    each = ["in", "kernel", "out"]
    assert found == each + 3 * [*each, "host_wait"] + ["host_wait"]
    streams = {one.kind + str(one.source): one.stream for one in trace if one.kind in kinds}
    assert len({streams["copy-1"], streams["copy0"], streams["kernel-1"]}) == 3


# --- life ------------------------------------------------------------------------------------


def pool_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("dataparallel-pool")]


def test_threads_end_with_the_pool(net: Net) -> None:
    before = pool_threads()
    with dp.Pool(net, ["cpu"] * 3) as pool:
        list(pool.map(batches(5)))
        assert len(pool_threads()) == len(before) + 3
    assert pool_threads() == before
    pool.close()
    with pytest.raises(RuntimeError, match="the pool is closed"):
        pool.submit(batches(1)[0])
    with pytest.raises(RuntimeError, match="the pool is closed"):
        next(pool.map(batches(1)))


def test_items_may_close_their_pool() -> None:
    barrier = threading.Barrier(2)

    def close(item: int) -> int:
        barrier.wait(60)
        pool.close()
        return item

    before = pool_threads()
    with dp.Pool(close, ["cpu", "cpu"]) as pool:
        assert [future.result(60) for future in [pool.submit(i) for i in range(2)]] == [0, 1]
    assert pool_threads() == before


def test_a_pool_that_is_closed_keeps_results_on_their_way() -> None:
    with dp.Pool(abs, ["cpu"]) as pool:
        results = pool.map(range(6), max_ahead=3, on_error="return")
        found = [next(results)]
        pool.close()
        found += results
    count = sum(isinstance(one, int) for one in found)
    assert found[:count] == list(range(count))
    assert len(found) == 6
    assert all("the pool is closed" in str(error) for error in found[count:])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with dp.Pool(abs, ["cpu"]) as pool, pytest.raises(TypeError, match="make another one"):
        copied(pool)


def test_a_pool_that_nobody_has_ends(net: Net) -> None:
    before = pool_threads()
    future = dp.Pool(net, ["cpu"] * 2).submit(batches(1)[0])
    gc.collect()
    assert future.result().shape == (3, 5)
    deadline = time.monotonic() + 60
    while pool_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool_threads() == before


def test_an_error_in_the_block_gives_up_what_is_left() -> None:
    gate, seen = threading.Event(), list[int]()

    def work(item: int) -> None:
        seen.append(item)
        assert gate.wait(60)

    futures = []
    with pytest.raises(KeyError, match="mine"), dp.Pool(work, ["cpu"]) as pool:
        futures = [pool.submit(i) for i in range(4)]
        while not seen:
            time.sleep(0.01)
        threading.Timer(0.1, gate.set).start()
        raise KeyError("mine")
    assert [future.cancelled() for future in futures] == [False, True, True, True]


def test_nothing_is_kept(net: Net) -> None:
    kept = []

    class Item:
        """Something that a weak reference can watch."""

    def work(item: Item) -> Item:
        kept.append(weakref.ref(item))
        return Item()

    with dp.Pool(work, ["cpu", "cpu"]) as pool:
        for index, result in enumerate(pool.map(Item() for _ in range(10_000))):
            kept.append(weakref.ref(result))
            if index % 1000 == 999:
                del result
                alive = sum(ref() is not None for ref in kept)
                assert alive < 40, alive
                kept.clear()
    del pool, work
    gc.collect()


INTERRUPTED = """
    import os, signal, threading, time
    import dataparallel as dp

    began = threading.Event()

    def work(item):
        began.set()
        end = time.monotonic() + 300
        while time.monotonic() < end:
            time.sleep(0.001)

    def interrupt():
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    pool = dp.Pool(device_ids=["cpu", "cpu"])
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted")
    # The threads are free again.
    print(pool.run(abs, [-1, -2, -3]))
    pool.close()
"""


@pytest.mark.parametrize(
    "call",
    [
        "pool.run(work, range(9))",
        "list(dp.Pool(work, pool).map(range(9)))",
        "with dp.Pool(work, ['cpu']) as other: other.submit(0).result()",
    ],
)
def test_ctrl_c_ends_items(call: str) -> None:
    program = textwrap.dedent(INTERRUPTED).format(call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.splitlines() == ["interrupted", "[1, 2, 3]"], done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    with dp.Pool(abs, ["cpu", "cpu"]) as pool:
        assert list(pool.map([-1, -2])) == [1, 2]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if list(pool.map([-3])) == [3] else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert list(pool.map([-4])) == [4]


def test_pool_repr_names_target_and_devices(net: Net) -> None:
    with dp.Pool(net, ["cpu", "cpu"]) as pool:
        assert repr(pool) == "Pool(Net, device_ids=[cpu, cpu])"
        assert repr(pool.method("encode")) == "Pool(Net.encode, device_ids=[cpu, cpu])"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dataparallel")
