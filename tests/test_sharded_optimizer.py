"""A sharded optimizer does what the plain one does; its state is elsewhere."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataparallel import DataParallel, ShardedOptimizer, comm, virtual
from dataparallel.devices import current_stream, memory_allocated, use_stream, wait_stream
from tests.models import placed
from tests.optimizer_cases import ADAMW, CASES, assert_same, build

SGD = torch.optim.SGD


class Twins:
    """A bare module with a plain optimizer, and an equal one with a sharded optimizer."""

    def __init__(
        self,
        slots: Sequence[str],
        optimizer_class: type[Optimizer] = ADAMW,
        build: Callable[[], nn.Module] = build,
        **arguments: Any,
    ) -> None:
        self.bare: Any = placed(build, slots[0], torch.float)
        self.module: Any = copy.deepcopy(self.bare)
        self.model = DataParallel(self.module, list(slots))
        self.plain: Any = optimizer_class(self.bare.parameters(), **arguments)
        self.sharded = ShardedOptimizer(optimizer_class, self.model, **arguments)

    def both(self) -> list[tuple[Any, Any]]:
        return [(self.bare, self.plain), (self.module, self.sharded)]

    def set_gradients(self, scale: float = 1.0) -> None:
        for p, q in self.pairs():
            p.grad = torch.randn_like(p) * scale
            q.grad = p.grad.clone()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.set_gradients()
            self.plain.step()
            self.sharded.step()
        self.assert_equal()

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.bare.parameters(), self.module.parameters(), strict=True)

    def assert_equal(self) -> None:
        assert_same([p for p, _ in self.pairs()], [q for _, q in self.pairs()])
        assert_same(self.plain.state_dict(), self.sharded.state_dict())

    def places(self) -> list[str]:
        return [str(self.sharded.device_of(p)) for p in self.module.parameters()]


# --- which shard ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (["virtual:0", "virtual:1"] * 2, {"virtual:0": 1, "virtual:1": 5}),
        (["cpu", "virtual:0", "cpu"], {"cpu": 1, "virtual:0": 5}),
        (["virtual:0", "virtual:1", "virtual:2"], {"virtual:0": 1, "virtual:1": 1, "virtual:2": 4}),
    ],
)
def test_state_is_on_the_devices_in_equal_parts(slots: list[str], expected: dict[str, int]) -> None:
    """One matrix has most of the elements; a device has one shard however often it is named."""
    twins = Twins(slots)
    twins.steps(1)
    assert Counter(twins.places()) == expected
    for p in twins.module.parameters():
        assert twins.sharded.state[p]["exp_avg"].device == twins.sharded.device_of(p)
    added = [nn.Parameter(torch.ones(n, device=slots[0])) for n in (3000, 10)]
    twins.sharded.add_param_group({"params": added})
    assert str(twins.sharded.device_of(added[0])) != slots[0]


def test_frozen_parameters_are_not_copied_and_count_as_without_state() -> None:
    twins = Twins(["virtual:0", "virtual:1"])
    for p in twins.module.parameters():
        p.requires_grad_(p.dim() == 1)
    twins.module(torch.randn(3, 5, device="virtual:0")).sum().backward()
    with mock.patch.object(comm, "broadcast_coalesced", wraps=comm.broadcast_coalesced) as sent:
        optimizer = ShardedOptimizer(ADAMW, twins.model)
        optimizer.step()
    # A value, its gradient, and the value back.
    assert sum(t.numel() for call in sent.call_args_list for t in call.args[0]) == 3 * 48
    assert optimizer.device_of(twins.module[0].bias) != optimizer.device_of(twins.module[2].bias)


def test_gradients_are_moved_and_values_written_in_few_copies() -> None:
    twins = Twins(["virtual:0", "virtual:1", "virtual:2"], SGD, lr=0.1)
    other = torch.device("virtual:1")
    # What earlier tests have left.
    gc.collect()
    before = memory_allocated(other)
    twins.steps(1)
    # Between steps other devices hold nothing but state.
    assert memory_allocated(other) == before
    twins.set_gradients()
    with mock.patch.object(comm, "broadcast_coalesced", wraps=comm.broadcast_coalesced) as sent:
        twins.sharded.step()
        # Per shard on another device: its values and gradients together, its new values together.
        assert sent.call_count == 2 * 2
        twins.sharded.zero_grad()
        twins.sharded.step()
        assert sent.call_count == 2 * 2


# --- the same as the plain optimizer -------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer_class", "arguments"), CASES, ids=[f"{c.__name__}-{k}" for c, k in CASES]
)
def test_steps_equal_those_of_the_plain_optimizer(
    slots: list[str], optimizer_class: type[Optimizer], arguments: dict[str, Any]
) -> None:
    twins = Twins(slots, optimizer_class, **arguments)
    twins.assert_equal()
    twins.steps(4)
    assert set(twins.sharded.param_groups[0]) == set(twins.plain.param_groups[0])
    assert twins.sharded.defaults.items() >= twins.plain.defaults.items()


@pytest.mark.parametrize("optimizer_class", [ADAMW, SGD])
@pytest.mark.parametrize("places", [["cpu"], ["virtual:2"], ["virtual:1", "cpu"]])
def test_other_devices(places: list[str], optimizer_class: type[Optimizer]) -> None:
    Twins(places, optimizer_class, lr=0.1, foreach=False).steps(3)


def test_learning_rates_that_are_tensors() -> None:
    lr = torch.tensor(0.1)
    twins = Twins(["virtual:0", "virtual:1", "virtual:2"], lr=lr, foreach=False)
    twins.steps(2)
    lr.mul_(0.5)
    twins.steps(2)
    assert twins.sharded.param_groups[0]["lr"] is lr


def test_parameters_without_gradient_are_skipped(slots: list[str]) -> None:
    twins = Twins(slots, weight_decay=0.5)
    for number in range(4):
        twins.set_gradients()
        for i, (p, q) in enumerate(twins.pairs()):
            if (i + number) % 3 == 0:
                p.grad = q.grad = None
        twins.plain.step()
        twins.sharded.step()
    twins.assert_equal()
    twins.sharded.zero_grad()
    assert all(p.grad is None for p in twins.module.parameters())
    twins.sharded.step()
    twins.assert_equal()


def test_sparse_gradients(slots: list[str]) -> None:
    def tables() -> nn.Module:
        return nn.ModuleList(nn.Embedding(9 + i, 3, sparse=True) for i in range(3))

    twins = Twins(slots, torch.optim.SparseAdam, tables, lr=0.1)
    for _ in range(3):
        for p, q in twins.pairs():
            rows = torch.randint(9, (5,), device=slots[0])
            values = torch.randn_like(p[:5])
            for each in (p, q):
                each.grad = None
                (nn.functional.embedding(rows, each, sparse=True) * values).sum().backward()
        twins.plain.step()
        twins.sharded.step()
    twins.assert_equal()


# --- changes between steps -----------------------------------------------------------------------


def load(module: Any, optimizer: Any) -> None:
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})


def write_one_element(module: Any, optimizer: Any) -> None:
    module[4].bias.data[1] += 1e-3


def replace_storage(module: Any, optimizer: Any) -> None:
    for p in module.parameters():
        p.data = p.data.flip(0).clone()


def change_shape(module: Any, optimizer: Any) -> None:
    module[0].weight.data = torch.ones_like(module[0].weight)[:5]


def change_dtype(module: Any, optimizer: Any) -> None:
    module.double()


def forget(module: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def change_groups(module: Any, optimizer: Any) -> None:
    first = optimizer.param_groups[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).to(module[0].weight))]})
    optimizer.param_groups.append({**first, "params": [first["params"].pop(0)], "lr": 0.5})
    first["weight_decay"] = 0.5


def replace_a_parameter(module: Any, optimizer: Any) -> None:
    new = nn.Parameter(torch.ones_like(module[4].bias))
    optimizer.param_groups[0]["params"][-1] = new
    module[4].bias = new


CHANGES = [
    load,
    write_one_element,
    replace_storage,
    change_shape,
    change_dtype,
    forget,
    change_groups,
    replace_a_parameter,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", [0, 2])
def test_changes_between_steps_are_carried_in(
    slots: list[str], change: Callable[..., None], before: int
) -> None:
    twins = Twins(slots, SGD, lr=0.1)
    twins.steps(before)
    for module, optimizer in twins.both():
        change(module, optimizer)
    twins.steps(2)


def test_parameters_that_move_to_another_device() -> None:
    twins = Twins(["virtual:0", "virtual:1", "virtual:2"])
    for place in ("virtual:1", "virtual:3"):
        twins.steps(1)
        for p, q in twins.pairs():
            p.grad = q.grad = None
            p.data, q.data = p.data.to(place), q.data.to(place)
        # Its state comes along in this way only.
        twins.plain.load_state_dict(twins.plain.state_dict())
        twins.steps(2)


class Spread(nn.Module):
    """Is on several devices by itself, so that a wrapper of it names none."""

    device_ids = None

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9 + i, 5, device=d) for i, d in enumerate(places))


def test_a_module_that_is_spread_over_devices() -> None:
    twins = Twins(["virtual:0"])
    places = ["virtual:1", "virtual:2", "virtual:1"]
    twins.module = Spread(places)
    twins.bare = copy.deepcopy(twins.module)
    twins.plain = ADAMW(twins.bare.parameters())
    twins.sharded = ShardedOptimizer(ADAMW, twins.module)
    twins.steps(3)
    # Some of the parameters have their state on the other device than they are on.
    own = [str(p.device) for p in twins.module.parameters()]
    assert set(twins.places()) == set(places) and twins.places() != own


class DataOptimizer(SGD):
    """Writes through ``.data``, which bumps no version counter; refuses what is not finite."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not p.grad.isfinite().all():
                    raise ArithmeticError("not finite")
                p.data.add_(p.grad)


def test_a_step_counts_as_a_change_of_the_parameters(slots: list[str]) -> None:
    twins = Twins(slots, DataOptimizer)
    x = torch.randn(8, 5, device=slots[0])
    for _ in range(3):
        torch.testing.assert_close(twins.model(x), twins.bare(x))
        twins.steps(1)


def test_streams_that_defer() -> None:
    slots = [f"virtual:{i}" for i in range(4)]
    twins = Twins(slots)
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual.strict_mode())
        # Everything of the caller is on side streams, on which the shards have to follow.
        for slot in slots:
            stream = torch.Stream(slot)
            wait_stream(stream, current_stream(torch.device(slot)))
            stack.enter_context(use_stream(stream))
        twins.steps(3)


def test_a_failed_shard_and_the_step_after_it(slots: list[str]) -> None:
    twins = Twins(slots, DataOptimizer)
    for _, q in twins.pairs():
        q.grad = torch.ones_like(q)
    last = list(twins.module.parameters())[-1]
    assert last.grad is not None
    last.grad.fill_(torch.inf)
    before = [p.detach().clone() for p in twins.module.parameters()]
    places = [slots.index(place) for place in twins.places()]
    with pytest.raises(ArithmeticError, match="not finite"):
        twins.sharded.step()
    for p, old, place in zip(twins.module.parameters(), before, places, strict=True):
        # The shards before it have finished, those behind it have not begun.
        if place != places[-1] or place:
            assert torch.equal(p, old + 1 if place < places[-1] else old)
    # It goes on with what the parameters are now.
    twins.bare.load_state_dict(twins.module.state_dict())
    twins.steps(2)


class SumOfAll(Optimizer):
    """Nobody knows whether it looks at one parameter at a time."""


def test_what_cannot_be_sharded_is_refused(slots: list[str]) -> None:
    model = DataParallel(placed(build, slots[0], torch.float), slots)
    for optimizer_class in (torch.optim.LBFGS, SumOfAll):
        match = rf"{optimizer_class.__name__}\.step cannot be done in parts: .* such as torch\.opt"
        with pytest.raises(ValueError, match=match):
            ShardedOptimizer(optimizer_class, model)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        ShardedOptimizer(ADAMW, model, lr=-1)
    with pytest.raises(AttributeError, match="no attribute 'device_ids'"):
        ShardedOptimizer(ADAMW, model.module)
    optimizer = ShardedOptimizer(ADAMW, model)
    with pytest.raises(KeyError, match="tensor"):
        optimizer.device_of(torch.ones(3))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": list(model.parameters())})
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(ADAMW([nn.Parameter(torch.ones(2))]).state_dict())
    optimizer.step()


# --- what users do to an optimizer ---------------------------------------------------------------


def test_groups_and_names(slots: list[str]) -> None:
    twins = Twins(slots)

    def groups(module: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(module[0].named_parameters())},
            {"params": module[2].named_parameters(), "lr": 0.5, "weight_decay": 0.0},
        ]

    twins.plain = ADAMW(groups(twins.bare), lr=0.01)
    twins.sharded = ShardedOptimizer(ADAMW, twins.model, params=groups(twins.module), lr=0.01)
    twins.steps(2)
    for module, optimizer in twins.both():
        optimizer.add_param_group({"params": module[4].named_parameters(), "lr": 0.2})
    twins.steps(2)


def test_closures_are_called_once_with_gradients_enabled(slots: list[str]) -> None:
    twins = Twins(slots)
    x = torch.randn(3, 5, device=slots[0])
    losses = []

    def evaluate(module: nn.Module) -> Tensor:
        loss: Tensor = module(x).square().sum()
        loss.backward()
        return loss.detach()

    for module, optimizer in twins.both():
        closure = mock.Mock(side_effect=lambda m=module: evaluate(m))
        losses.append(optimizer.step(closure))
        closure.assert_called_once_with()
    assert_same(*losses)
    twins.assert_equal()


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


@pytest.mark.parametrize("optimizer_class", [ADAMW, torch.optim.Adagrad, SGD])
def test_checkpoints_go_to_and_fro(slots: list[str], optimizer_class: type[Optimizer]) -> None:
    arguments: dict[str, Any] = {"momentum": 0.9} if optimizer_class is SGD else {}
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
    for p in fewer.module.parameters():
        tensors = [t for name, t in fewer.sharded.state[p].items() if name != "step"]
        assert {t.device for t in tensors} == {fewer.sharded.device_of(p)}
    for module, optimizer in twins.both():
        module.load_state_dict(fewer.bare.state_dict())
        optimizer.load_state_dict(copy.deepcopy(fewer.plain.state_dict()))
    assert twins.sharded.param_groups[0]["lr"] == 0.1
    twins.steps(2)


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
    twins.steps(1)
