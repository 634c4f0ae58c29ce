"""parallel_apply against calling the modules one by one."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dataparallel.threads.apply import Replica, apply_replicas, current_replica, parallel_apply
from dataparallel.threads.workers import WorkerPools

CPU = torch.device("cpu")


class AddsScaled(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * y


def test_outputs_equal_those_of_the_modules_in_their_order(slots: list[str]) -> None:
    nets = [nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(slot) for slot in slots]
    inputs = [torch.randn(4, 6).to(slot) for slot in slots]
    outputs = parallel_apply(nets, inputs)
    for net, x, y in zip(nets, inputs, outputs, strict=True):
        assert y.device == x.device
        torch.testing.assert_close(y, net(x))


def test_gradients_equal_those_of_the_modules(slots: list[str]) -> None:
    nets = [nn.Linear(6, 3).to(slot) for slot in slots]
    inputs = [torch.randn(4, 6).to(slot) for slot in slots]
    torch.autograd.backward([y.square().sum() for y in parallel_apply(nets, inputs)])
    grads = [net.weight.grad for net in nets]
    for net, x, grad in zip(nets, inputs, grads, strict=True):
        (expected,) = torch.autograd.grad(net(x).square().sum(), net.weight)
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("container", [tuple, list])
def test_a_tuple_or_list_holds_arguments_and_anything_else_is_the_argument(container: Any) -> None:
    module = AddsScaled()
    x, y = torch.ones(2), torch.full((2,), 3.0)
    outputs = parallel_apply(
        [module, module], [container((x, y)), container((y, x))], [{"scale": 2.0}, {}]
    )
    assert [out.tolist() for out in outputs] == [[7.0, 7.0], [4.0, 4.0]]
    assert parallel_apply([len, len], [{"a": 1}, "text"]) == [1, 4]


def test_keyword_arguments_may_be_none_per_module() -> None:
    outputs = parallel_apply([dict, dict], [(), ()], [{"a": 1}, None])
    assert outputs == [{"a": 1}, {}]


def test_devices_default_to_that_of_the_first_tensor_or_the_cpu(slots: list[str]) -> None:
    def here(*_: Any, **__: Any) -> torch.device:
        replica = current_replica()
        assert replica is not None
        return replica.device

    nested = [{"deep": [1, torch.ones(1).to(slot)]} for slot in slots]
    expected = [torch.device(slot) for slot in slots]
    assert parallel_apply([here] * 4, nested) == expected
    assert parallel_apply([here] * 4, [()] * 4, nested) == expected
    assert parallel_apply([here] * 2, [(), "text"]) == [CPU, CPU]
    assert parallel_apply([here] * 4, [()] * 4, devices=[*slots[:3], None]) == [*expected[:3], CPU]


def test_a_single_module_runs_in_the_calling_thread() -> None:
    def where(_: Any) -> Any:
        return threading.current_thread(), current_replica()

    assert parallel_apply([where], [1]) == [(threading.current_thread(), Replica(0, CPU, 1))]
    assert current_replica() is None


def test_no_module_gives_no_output() -> None:
    assert parallel_apply([], []) == []


@pytest.mark.parametrize("args", [[[1, 2, 3]], [[1, 2], [{}]], [[1, 2], None, ["cpu"] * 4]])
def test_lengths_that_disagree_are_an_error(args: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"argument \d is (longer|shorter) than argument"):
        parallel_apply([int, int], *args)


def test_a_device_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="'nowhere' is not a device"):
        parallel_apply([int, int], ["1", "2"], devices=["cpu", "nowhere"])


def test_an_error_names_the_replica_and_its_device(slots: list[str]) -> None:
    good, bad = nn.Linear(3, 3), nn.Linear(4, 3)
    modules = [good.to(slots[0]), bad.to(slots[1])]
    inputs = [torch.ones(1, 3).to(slot) for slot in slots[:2]]
    where = re.escape(f"in replica 1 on device {slots[1]}")
    with pytest.raises(RuntimeError, match=f"(?s)shapes cannot be multiplied.*{where}"):
        parallel_apply(modules, inputs)
    assert len(parallel_apply(modules[:1] * 2, inputs[:1] * 2)) == 2


def test_an_error_of_a_single_module_names_the_replica_too() -> None:
    with pytest.raises(ZeroDivisionError, match="in replica 0 on device cpu"):
        parallel_apply([lambda _: 1 / 0], [1])
    assert current_replica() is None


# --- current_replica -------------------------------------------------------------------------


def test_current_replica_tells_where_the_code_runs() -> None:
    assert current_replica() is None
    seen = apply_replicas([current_replica] * 3, [CPU] * 3)
    assert seen == [Replica(i, CPU, 3) for i in range(3)]
    assert current_replica() is None


def test_forward_hooks_see_the_replica() -> None:
    seen: list[tuple[str, Replica | None]] = []
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for net in nets:
        net.register_forward_pre_hook(lambda *_: seen.append(("pre", current_replica())))
        net.register_forward_hook(lambda *_: seen.append(("post", current_replica())))
    parallel_apply(nets, [torch.ones(1, 2)] * 2)
    expected = [(when, Replica(i, CPU, 2)) for when in ("post", "pre") for i in range(2)]
    assert sorted(seen, key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("inner_count", [1, 2])
def test_nested_calls_see_the_inner_replica(inner_count: int) -> None:
    def outer() -> Any:
        before = current_replica()
        inner = apply_replicas([current_replica] * inner_count, [CPU] * inner_count)
        return before, inner, current_replica()

    results = apply_replicas([outer] * 2, [CPU] * 2)
    for i, (before, inner, after) in enumerate(results):
        assert before == after == Replica(i, CPU, 2)
        assert inner == [Replica(k, CPU, inner_count) for k in range(inner_count)]


# --- resources -------------------------------------------------------------------------------


def test_repeated_calls_create_no_threads_and_leave_no_cycles() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(2, 4)
    pools = WorkerPools()

    def forward() -> list[torch.Tensor]:
        return apply_replicas([lambda: net(x)] * 2, [CPU] * 2, pools)

    forward()
    threads = set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        for _ in range(200):
            forward()
        # Those of earlier tests may end meanwhile.
        assert set(threading.enumerate()) <= threads
        assert gc.collect() == 0
    finally:
        gc.enable()
        pools.close()


def test_outputs_are_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        outputs = parallel_apply([torch.exp, torch.exp], [torch.ones(3)] * 2)
        references = [weakref.ref(y) for y in outputs]
        del outputs
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_intra_op_threads_are_shared_out_and_restored() -> None:
    whole = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        assert apply_replicas([torch.get_num_threads] * 2, [CPU] * 2) == [3, 2]
        torch.set_num_threads(8)
        assert apply_replicas([torch.get_num_threads] * 3, [CPU] * 3) == [3, 3, 2]
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(whole)


# What torch 2.11 says of its own events; there is one cycle here.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_the_profiler_shows_each_replica() -> None:
    net = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    parallel_apply([net, net], [x, x])
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=options) as profiler:
        parallel_apply([net, net], [x, x])
    names = [event.name for event in profiler.events() or ()]
    assert {"replica 0 on cpu", "replica 1 on cpu"} <= set(names)


def test_work_queued_before_the_call_comes_first_and_after_it_comes_last() -> None:
    devices = [torch.device(f"virtual:{i}") for i in range(2)]
    streams = [torch.Stream(device) for device in devices]
    with streams[0], streams[1]:
        xs = [torch.zeros(8, device=device) for device in devices]
        for x in xs:
            x.add_(1)
        ys = parallel_apply([lambda x: x.mul_(3)] * 2, xs)
        for y in ys:
            y.add_(4)
    for stream in streams:
        stream.synchronize()
    assert [y.cpu().tolist() for y in ys] == [[7.0] * 8] * 2
