"""What users do to an optimizer, they do to a sharded one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataparallel import ShardedOptimizer
from tests.optimizer_cases import (
    ADAMW,
    Twins,
    assert_same,
)

# --- what users do to an optimizer ---------------------------------------------------------------


def test_groups_names_and_added_groups(slots: list[str]) -> None:
    twins = Twins(slots)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        first, second, _ = (module[i] for i in (0, 2, 4))  # type: ignore[index]
        return [
            {"params": list(first.named_parameters())},
            {"params": second.named_parameters(), "lr": 0.5, "weight_decay": 0.0},
        ]

    twins.plain = ADAMW(groups(twins.bare), lr=0.01)
    twins.sharded = ShardedOptimizer(ADAMW, twins.model, params=groups(twins.module), lr=0.01)
    twins.steps(2)
    twins.assert_equal()
    for optimizer, module in ((twins.plain, twins.bare), (twins.sharded, twins.module)):
        last: Any = module[4]  # type: ignore[index]
        optimizer.add_param_group({"params": last.named_parameters(), "lr": 0.2})
    twins.steps(2)
    twins.assert_equal()
    with pytest.raises(ValueError, match="more than one parameter group"):
        twins.sharded.add_param_group({"params": list(twins.module.named_parameters())})
    twins.steps(1)
    twins.assert_equal()


def test_groups_changed_by_hand(slots: list[str]) -> None:
    """Options, members and state are read at each step."""
    twins = Twins(slots)
    twins.steps(1)
    for optimizer, module in ((twins.plain, twins.bare), (twins.sharded, twins.module)):
        layer: Any = module[4]  # type: ignore[index]
        new = nn.Parameter(torch.ones_like(layer.bias))
        optimizer.param_groups[0]["params"][-1] = new
        optimizer.state[new] = optimizer.state.pop(layer.bias)
        layer.bias = new
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [], "lr": 0.5})
        optimizer.param_groups[1]["params"] = [optimizer.param_groups[0]["params"].pop(0)]
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    for p in twins.module.parameters():
        # A parameter that took the place of another may have another device.
        state, device = twins.sharded.state[p], twins.sharded.device_of(p)
        state.update({k: v.to(device) for k, v in state.items() if k != "step"})
    twins.steps(2)
    twins.assert_equal()
    twins.sharded.state.clear()
    twins.plain.state.clear()
    twins.steps(1)
    twins.assert_equal()


def test_closures_are_called_once_with_gradients_enabled(slots: list[str]) -> None:
    twins = Twins(slots)
    x = torch.randn(3, 5, device=slots[0])
    losses = []
    for module, optimizer in ((twins.bare, twins.plain), (twins.module, twins.sharded)):
        closure = mock.Mock(side_effect=lambda m=module: backward_of(m(x).square().sum()))
        losses.append(optimizer.step(closure))
        closure.assert_called_once_with()
    assert_same(*losses)
    twins.assert_equal()


def backward_of(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def test_hooks_are_called_once_with_the_sharded_optimizer(slots: list[str]) -> None:
    optimizer = Twins(slots).sharded
    seen = mock.Mock(return_value=None)
    optimizer.register_step_pre_hook(lambda *given: seen("before", given[0]))
    optimizer.register_step_post_hook(lambda *given: seen("after", given[0]))
    handle = register_optimizer_step_post_hook(lambda *given: seen("any", given[0]))
    try:
        optimizer.step()
    finally:
        handle.remove()
    expected = [mock.call(when, optimizer) for when in ("before", "after", "any")]
    assert seen.call_args_list == expected
    seen.reset_mock()
    optimizer.register_state_dict_pre_hook(lambda given: seen("save", given))
    optimizer.register_state_dict_post_hook(lambda given, state: {**state, "extra": 1})
    # The class itself loads it.
    optimizer.register_load_state_dict_pre_hook(lambda given, state: seen("load", type(given)))
    optimizer.register_load_state_dict_post_hook(lambda given: seen("loaded", type(given)))
    state = optimizer.state_dict()
    assert state.pop("extra") == 1
    optimizer.load_state_dict(state)
    expected = [mock.call("save", optimizer), mock.call("load", ADAMW), mock.call("loaded", ADAMW)]
    assert seen.call_args_list == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(slots: list[str], fused: bool, unscale: bool) -> None:
    twins = Twins(slots, fused=fused)
    device = slots[0].split(":")[0]
    scalers = [torch.amp.GradScaler(device, 8.0, growth_interval=2) for _ in range(2)]
    pairs = list(zip(scalers, (twins.plain, twins.sharded), strict=True))
    # What the scaler asks for.
    unscales = "_step_supports_amp_scaling"
    for duplicate in (twins.sharded, copy.deepcopy(twins.sharded)):
        assert getattr(duplicate, unscales, False) == getattr(twins.plain, unscales, False)
    for number in range(5):
        twins.set_gradients(float("inf") if number == 2 else 8.0)
        for scaler, optimizer in pairs:
            scaler.scale(torch.ones((), device=slots[0]))
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert_same(*[scaler.state_dict() for scaler in scalers])
        twins.assert_equal()


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [ADAMW, torch.optim.Adagrad, torch.optim.SGD])
def test_checkpoints_go_to_and_fro(slots: list[str], optimizer_class: type[Optimizer]) -> None:
    arguments: dict[str, Any] = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    twins = Twins(slots, optimizer_class, lr=0.1, **arguments)
    twins.steps(2)
    file = io.BytesIO()
    torch.save(twins.sharded.state_dict(), file)
    file.seek(0)
    # From four devices to the plain optimizer and to two devices, from plain to four.
    fewer = Twins(slots[:2], optimizer_class, lr=0.7, **arguments)
    for module in (fewer.bare, fewer.module):
        module.load_state_dict(twins.module.state_dict())
    saved = torch.load(file, weights_only=True)
    fewer.plain.load_state_dict(copy.deepcopy(saved))
    fewer.sharded.load_state_dict(saved)
    fewer.steps(2)
    fewer.assert_equal()
    for p in fewer.module.parameters():
        tensors = [t for name, t in fewer.sharded.state[p].items() if name != "step"]
        assert {t.device for t in tensors} == {fewer.sharded.device_of(p)}
    for module in (twins.bare, twins.module):
        module.load_state_dict(fewer.bare.state_dict())
    for optimizer in (twins.plain, twins.sharded):
        optimizer.load_state_dict(copy.deepcopy(fewer.plain.state_dict()))
    assert twins.sharded.param_groups[0]["lr"] == 0.1
    twins.steps(2)
    twins.assert_equal()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(slots: list[str]) -> None:
    twins = Twins(slots)
    twins.steps(1)
    other = ADAMW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="doesn't match the size"):
        twins.sharded.load_state_dict(other.state_dict())
    twins.steps(1)
    twins.assert_equal()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent_and_go_on(
    slots: list[str], duplicate: Callable[[Any], Any]
) -> None:
    twins = Twins(slots, fused=True)
    twins.steps(2)
    torch.optim.lr_scheduler.StepLR(twins.sharded, 100)
    torch.optim.lr_scheduler.StepLR(twins.plain, 100)
    other = Twins(slots)
    # Together, so that the copied optimizer has the parameters of the copied module.
    other.module, other.sharded = duplicate((twins.module, twins.sharded))
    other.bare, other.plain = copy.deepcopy((twins.bare, twins.plain))
    other.steps(2)
    other.assert_equal()
    twins.steps(1)
    twins.assert_equal()
