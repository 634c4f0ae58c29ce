"""Optimizers in backward step by kernels where there are any, and nobody can tell but by time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dataparallel.distributed import DistributedDataParallel
from dataparallel.kernels import backend
from dataparallel.optimizer_in_backward import InBackwardOptimizers
from tests.kernels.fused_cases import exact_roots
from tests.kernels.host_backend import HostBackend
from tests.kernels.virtual_backend import VirtualBackend
from tests.optimizer_cases import FIRST, THEN, BackwardTwins, assert_same, build, ours

CASES: list[tuple[type[Optimizer], dict[str, Any], str]] = [
    (SGD, {"lr": 0.1}, "fused_sgd_f32_f32_1"),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}, "fused_sgd_"),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}, "fused_sgd_f32_f32_2"),
    (Adam, {"lr": 0.01, "weight_decay": 0.1}, "fused_adamw_f32_f32_3"),
    (Adam, {"lr": 0.01, "amsgrad": True, "betas": (0.4, 0.9)}, "fused_adamw_f32_f32_4"),
    (AdamW, {"lr": 0.01, "eps": 1e-3}, "fused_adamw_f32_f32_3"),
    (AdamW, {"amsgrad": True, "maximize": True}, "fused_adamw_f32_f32_4"),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, "fused_adamw_f32_f32_3"),
]
EACH = pytest.mark.parametrize(
    ("optimizer_class", "arguments", "kernel"),
    CASES,
    ids=[f"{c[0].__name__}-{c[1]}" for c in CASES],
)


@pytest.fixture(autouse=True)
def _bits() -> Iterator[None]:
    with exact_roots():
        yield


def steps_of(host: HostBackend) -> list[str]:
    """Which kernels were launched for steps."""
    return [name for name in host.launches if name.startswith("fused_")]


@EACH
def test_steps_equal_torchs(
    host_kernels: HostBackend, optimizer_class: type[Optimizer], arguments: Any, kernel: str
) -> None:
    twins = ours(optimizer_class, **arguments)
    twins.step()
    assert len(steps_of(host_kernels)) == len(FIRST)
    # The number of steps differs within buckets from now on.
    twins.step(without=[1, 4])
    for _ in range(2):
        twins.step(THEN)
    twins.step(FIRST, without=[5, 0])
    twins.assert_equal()
    assert all(name.startswith(kernel) for name in steps_of(host_kernels))


@EACH
def test_checkpoints_go_either_way(
    host_kernels: HostBackend, optimizer_class: type[Optimizer], arguments: Any, kernel: str
) -> None:
    twins = ours(optimizer_class, **arguments)
    twins.step()
    other = ours(optimizer_class, **{**arguments, "lr": 0.7})
    for module in (other.bare, other.module):
        module.load_state_dict(twins.module.state_dict())
    other.plain.load_state_dict(copy.deepcopy(twins.optimizers.state_dict()))
    other.optimizers.load_state_dict(pickle.loads(pickle.dumps(twins.plain.state_dict())))
    host_kernels.launches.clear()
    other.step(THEN)
    other.assert_equal()
    assert len(steps_of(host_kernels)) == len(THEN)


def test_groups_have_their_own_options(host_kernels: HostBackend) -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [
            {"params": named[:3], "weight_decay": 0.3},
            {"params": named[3:], "lr": 0.5, "betas": (0.5, 0.5), "amsgrad": True},
        ]

    twins = BackwardTwins(
        lambda module: InBackwardOptimizers.make(AdamW, groups(module), lr=0.1),
        lambda module: AdamW(groups(module), lr=0.1),
    )
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 0.3], total_steps=5)
        for optimizer in (twins.plain, twins.optimizers)
    ]
    for _ in range(3):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.assert_equal()
    assert {name[-1] for name in steps_of(host_kernels)} == {"3", "4"}


def test_parameters_of_several_dtypes(host_kernels: HostBackend) -> None:
    def mixed(module: nn.Module) -> nn.Module:
        return module.double() if isinstance(module, nn.Linear) else module

    twins = ours(AdamW, lr=0.1)
    for module in (twins.bare, twins.module):
        module[0].apply(mixed)  # type: ignore[index]
    twins.step()
    twins.step()
    twins.assert_equal()
    assert {"fused_adamw_f32_f32_3", "fused_adamw_f64_f64_3"} == set(steps_of(host_kernels))


# --- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, False])
def test_hooks_are_called_once_for_each_bucket(
    host_kernels: HostBackend, foreach: bool | None
) -> None:
    twins = ours(SGD, lr=0.1, foreach=foreach)
    seen = mock.Mock(return_value=None)
    twins.optimizers.register_step_pre_hook(lambda *given: seen("before", given[0]))
    twins.optimizers.register_step_post_hook(lambda *given: seen("after", given[0]))
    parameters = list(twins.module.parameters())
    stepped: list[Any] = []
    handles = [
        register(
            lambda optimizer, *_: stepped.append(
                [p for g in optimizer.param_groups for p in g["params"]]
            )
        )
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    twins.set_gradients()
    for bucket in FIRST:
        twins.optimizers.step([parameters[i] for i in bucket])
    for handle in handles:
        handle.remove()
    assert seen.call_args_list == [
        mock.call(when, twins.optimizers) for _ in FIRST for when in ("before", "after")
    ]
    counts = [len(found) for found in stepped]
    assert counts == [len(bucket) for bucket in FIRST for _ in "ab"]
    assert len(steps_of(host_kernels)) == (len(FIRST) if foreach is None else 0)


def test_a_hook_may_change_gradients(host_kernels: HostBackend) -> None:
    twins = ours(SGD, lr=0.1)

    def halve(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad / 2

    twins.set_gradients()
    parameters = list(twins.module.parameters())
    handle = register_optimizer_step_pre_hook(halve)
    try:
        twins.optimizers.step(parameters)
        twins.plain.step()
    finally:
        handle.remove()
    assert_same([p.detach() for p in parameters], [p.detach() for p in twins.bare.parameters()])
    assert len(steps_of(host_kernels)) == 1


# --- what torch does -----------------------------------------------------------------------------


class Subclass(SGD):
    """Another class, although it does the same."""


@pytest.mark.parametrize(
    ("optimizer_class", "arguments"),
    [
        (Subclass, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1}),
        (SGD, {"lr": torch.tensor(0.1)}),
        (AdamW, {"lr": torch.tensor(0.1), "foreach": False}),
        (AdamW, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}),
        *[
            (optimizer_class, {"lr": 0.1, option: value})
            for optimizer_class in (SGD, Adam, AdamW)
            for option in ("foreach", "fused")
            for value in (True, False)
        ],
    ],
)
def test_torch_steps_what_kernels_do_not(
    host_kernels: HostBackend, optimizer_class: type[Optimizer], arguments: dict[str, Any]
) -> None:
    twins = ours(optimizer_class, **arguments)
    twins.step()
    twins.step(THEN, without=[2])
    twins.assert_equal()
    assert steps_of(host_kernels) == []


def test_torch_steps_what_a_scaler_unscales(host_kernels: HostBackend) -> None:
    twins = ours(AdamW, lr=0.1)
    twins.step()
    host_kernels.launches.clear()
    whole: Any = twins.optimizers._steps.whole()
    whole.grad_scale = whole.found_inf = None
    twins.step()
    assert len(steps_of(host_kernels)) == len(FIRST)
    whole.found_inf = torch.ones(1)
    twins.set_gradients()
    with pytest.raises(AssertionError, match="Expected grad_scale and found_inf to be None"):
        twins.optimizers.step(list(twins.module.parameters()))


def complex_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=torch.complex64))


def test_torch_steps_complex_parameters(host_kernels: HostBackend) -> None:
    p, q = complex_parameter(), complex_parameter()
    optimizers, plain = InBackwardOptimizers.make(AdamW, [p]), AdamW([q])
    p.grad, q.grad = torch.full_like(p, 1j), torch.full_like(q, 1j)
    optimizers.step([p])
    plain.step()
    assert_same([p.detach(), optimizers.state_dict()], [q.detach(), plain.state_dict()])
    assert steps_of(host_kernels) == []


def test_torch_steps_sparse_gradients(host_kernels: HostBackend) -> None:
    p, q = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    optimizers, plain = InBackwardOptimizers.make(SGD, [p], lr=0.1), SGD([q], lr=0.1)
    for parameter in (p, q):
        nn.functional.embedding(torch.tensor([1]), parameter, sparse=True).sum().backward()
    optimizers.step([p])
    plain.step()
    assert_same([p.detach()], [q.detach()])
    assert steps_of(host_kernels) == []


def test_torch_steps_states_that_are_not_as_it_makes_them(host_kernels: HostBackend) -> None:
    twins = ours(SGD, lr=0.1, momentum=0.5)
    twins.step()
    for optimizer in (twins.plain, twins.optimizers):
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].double()
    host_kernels.launches.clear()
    twins.step()
    twins.assert_equal()
    assert steps_of(host_kernels) == []


def test_without_a_backend_nothing_changes() -> None:
    twins = ours(AdamW, lr=0.1)
    with mock.patch("dataparallel.kernel_steps.fused_adamw", side_effect=AssertionError):
        twins.step()
    twins.assert_equal()


# --- in training ---------------------------------------------------------------------------------


def trained(
    make: Callable[..., Any] | None, arguments: dict[str, Any], slots: list[str]
) -> list[torch.Tensor]:
    """Parameters after some steps, in backward or after it."""
    torch.manual_seed(0)
    module = build().to(slots[0])
    model = DistributedDataParallel(module, slots, bucket_cap_mb=0.0005)
    plain: Optimizer | None = None
    if make is None:
        model.step_in_backward(AdamW, **arguments)
    else:
        plain = make(module.parameters(), **arguments)
    for _ in range(4):
        model(torch.randn(10, 5).to(slots[0])).square().sum().backward()
        if plain is not None:
            plain.step()
            plain.zero_grad()
        assert all(p.grad is None for p in module.parameters())
    model.check_replicas()
    assert len(model.reducer.buckets.plan.buckets) > 2
    model.close()
    return [p.detach().cpu() for p in module.parameters()]


@pytest.mark.parametrize("arguments", [{"lr": 0.1}, {"lr": 0.01, "amsgrad": True}])
def test_training_equals_that_with_torchs_optimizer(
    host_kernels: HostBackend, arguments: dict[str, Any]
) -> None:
    expected = trained(AdamW, arguments, ["cpu", "cpu"])
    assert steps_of(host_kernels) == []
    found = trained(None, arguments, ["cpu", "cpu"])
    assert_same(found, expected)
    # More than one for each of four steps: one for each bucket.
    assert len(steps_of(host_kernels)) > 8


def test_training_on_other_devices_than_the_cpu() -> None:
    slots = ["virtual:0", "virtual:1"]
    devices = VirtualBackend()
    with backend.registered([devices]):
        expected = trained(AdamW, {"lr": 0.1}, slots)
        found = trained(None, {"lr": 0.1}, slots)
    # There torch computes with lists of tensors, in a slightly different order.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert any(name.startswith("fused_adamw") for name in devices.launches)


class FailsOnce(HostBackend):
    """Cannot launch the first step."""

    def launch(self, device: torch.device, source: str, kernel: str, *rest: Any) -> None:
        if source.startswith("fused_") and not self.launches:
            self.launches.append("none")
            raise RuntimeError("out of memory")
        super().launch(device, source, kernel, *rest)


@EACH
def test_a_step_that_failed_leaves_nothing(
    optimizer_class: type[Optimizer], arguments: Any, kernel: str
) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(300))]
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    expected = optimizer_class(twins, **arguments)
    with backend.registered([FailsOnce()]):
        optimizers = InBackwardOptimizers.make(optimizer_class, parameters, **arguments)
        for step in range(3):
            gradients = [torch.randn_like(p) for p in parameters]
            for many in (parameters, twins):
                for p, gradient in zip(many, gradients, strict=True):
                    p.grad = gradient.clone()
            if step == 0:
                with pytest.raises(RuntimeError, match="out of memory"):
                    optimizers.step(parameters)
                for p in parameters:
                    p.grad = None
                continue
            optimizers.step(parameters)
            expected.step()
    for p, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p, twin)
    for name, value in expected.state[twins[1]].items():
        torch.testing.assert_close(optimizers.state[parameters[1]][name], value)
