"""Sharded optimizers and those in backward do what the plain one does, with state elsewhere."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import operator
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dataparallel import DataParallel, DistributedDataParallel, ShardedOptimizer, comm, virtual
from dataparallel.devices import current_stream, memory_allocated, use_stream, wait_stream
from dataparallel.optim.in_backward import InBackwardOptimizers, TorchsOptimizers
from dataparallel.replicas.values import steps_of
from tests.cluster import Cluster
from tests.models import placed
from tests.optimizer_cases import ADAMW, FIRST, THEN, Kind, Twins, apply_torchs, assert_same, build

SGD: Any = torch.optim.SGD
OURS = pytest.mark.parametrize("kind", ["sharded", "in backward"])
VIRTUAL = [f"virtual:{i}" for i in range(4)]
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}

# --- the same as the plain optimizer -------------------------------------------------------------

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {**MOMENTUM, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (ADAMW, {"lr": 0.01, "weight_decay": 0.5}),
    (ADAMW, {"lr": 0.01, "foreach": True, "maximize": True}),
    (ADAMW, {"lr": 0.01, "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.in_pairs
@pytest.mark.parametrize("kind", ["sharded", "in backward", "torch's in backward"])
@pytest.mark.parametrize(
    ("optimizer_class", "arguments"), CASES, ids=[f"{c.__name__}-{k}" for c, k in CASES]
)
def test_steps_equal_those_of_the_plain_optimizer(
    slots: list[str], kind: Kind, optimizer_class: type[Optimizer], arguments: dict[str, Any]
) -> None:
    twins = Twins(kind, slots, optimizer_class, **arguments)
    twins.assert_equal()
    twins.step()
    # The buckets are planned anew, in another order.
    for buckets, without in ((FIRST, [1, 4]), (THEN, []), (THEN, [5, 0]), (FIRST, range(6))):
        twins.step(buckets, without)
    if kind != "torch's in backward":
        assert set(twins.ours.param_groups[0]) == set(twins.plain.param_groups[0])
        assert twins.ours.defaults.items() >= twins.plain.defaults.items()


@OURS
def test_groups_are_kept_and_added_and_scheduled(slots: list[str], kind: Kind) -> None:
    def groups(module: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(module[0].named_parameters())},
            {"params": module[2].named_parameters(), "lr": 0.5, "weight_decay": 0.0},
        ]

    twins = Twins(kind, slots, groups=groups, lr=0.01)
    twins.step(without=[4, 5])
    schedulers = []
    for module, optimizer in twins.both():
        optimizer.add_param_group({"params": module[4].named_parameters(), "lr": 0.2})
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    twins.step()
    for scheduler in schedulers:
        scheduler.step()
    twins.step(THEN)
    assert twins.ours.param_groups[0]["lr"] == 0.005


@OURS
def test_hooks_of_an_optimizer_run_as_those_of_the_plain_one(slots: list[str], kind: Kind) -> None:
    """Those of a step run once for the sharded optimizer, and once for each bucket in backward."""
    twins = Twins(kind, slots)
    seen: list[Any] = []

    def note(when: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, *_: Any) -> None:
            assert optimizer is twins.ours
            members = optimizer.param_groups[0]["params"]
            seen.append((when, sum(p.grad is not None for p in members)))

        return hook

    def halve(optimizer: Optimizer, *_: Any) -> None:
        """A hook of all optimizers may change the gradients."""
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.grad = None if p.grad is None else p.grad / 2

    twins.ours.register_step_pre_hook(note("before"))
    twins.ours.register_step_post_hook(note("after"))
    twins.set_gradients()
    with contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(halve).remove)
        twins.plain.step()
        stack.callback(register_optimizer_step_post_hook(note("any")).remove)
        twins.take()
    twins.assert_equal()
    # The step in backward frees the gradients.
    expected = [(6, 6)] if kind == "sharded" else [(len(bucket), 0) for bucket in FIRST]
    assert seen == [
        pair for had, has in expected for pair in (("before", had), ("after", has), ("any", has))
    ]
    seen.clear()
    handles = [
        twins.ours.register_state_dict_pre_hook(seen.append),
        twins.ours.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1}),
        twins.ours.register_load_state_dict_pre_hook(lambda given, _: seen.append(type(given))),
        twins.ours.register_load_state_dict_post_hook(lambda given: seen.append(type(given))),
    ]
    state = twins.ours.state_dict()
    assert state.pop("extra") == 1
    twins.ours.load_state_dict(state)
    # The class itself loads it for the sharded one.
    loads = ADAMW if kind == "sharded" else InBackwardOptimizers
    assert seen == [twins.ours, loads, loads]
    for handle in handles:
        handle.remove()
    twins.step()


@pytest.mark.in_pairs
@OURS
@pytest.mark.parametrize("optimizer_class", [ADAMW, torch.optim.Adagrad, SGD])
def test_checkpoints_go_to_and_fro(slots: list[str], kind: Kind, optimizer_class: Any) -> None:
    arguments: dict[str, Any] = {"momentum": 0.9} if optimizer_class is SGD else {}
    twins = Twins(kind, slots, optimizer_class, lr=0.1, **arguments)
    twins.step()
    file = io.BytesIO()
    torch.save(twins.ours.state_dict(), file)
    file.seek(0)
    # From four devices to the plain optimizer and to two devices, from plain to four.
    fewer = Twins(kind, slots[:2], optimizer_class, lr=0.7, **arguments)
    for module in (fewer.bare, fewer.module):
        module.load_state_dict(twins.module.state_dict())
    saved = torch.load(file, weights_only=True)
    fewer.plain.load_state_dict(copy.deepcopy(saved))
    fewer.ours.load_state_dict(saved)
    fewer.step()
    for module, optimizer in twins.both():
        module.load_state_dict(fewer.bare.state_dict())
        optimizer.load_state_dict(copy.deepcopy(fewer.plain.state_dict()))
    assert twins.ours.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="doesn't match the size"):
        twins.ours.load_state_dict(optimizer_class([nn.Parameter(torch.ones(2))]).state_dict())
    twins.step(THEN)
    for p in twins.module.parameters() if kind == "sharded" else ():
        tensors = [t for name, t in twins.ours.state[p].items() if name != "step"]
        assert {t.device for t in tensors} == {twins.ours.device_of(p)}


@pytest.mark.in_pairs
@OURS
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent_and_go_on(
    slots: list[str], kind: Kind, duplicate: Callable[[Any], Any]
) -> None:
    twins = Twins(kind, slots, fused=True)
    twins.step()
    # A copy has neither hooks, which cannot be pickled, nor what a scheduler has put around step().
    twins.ours.register_step_pre_hook(lambda *_: None)
    if kind == "sharded":
        for optimizer in (twins.ours, twins.plain):
            torch.optim.lr_scheduler.StepLR(optimizer, 100)
    other = Twins(kind, slots)
    # Together, so that the copied optimizer has the parameters of the copied module.
    other.module, other.ours = duplicate((twins.module, twins.ours))
    other.bare, other.plain = copy.deepcopy((twins.bare, twins.plain))
    for each in (other, twins, other):
        each.step(THEN)


class DataOptimizer(torch.optim.SGD):
    """Writes through ``.data``, which bumps no version counter; refuses what is not finite."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not p.grad.isfinite().all():
                    raise ArithmeticError("not finite")
                p.data.add_(0 if p.grad is None else p.grad)


@OURS
def test_a_step_counts_as_a_change_of_the_parameters(slots: list[str], kind: Kind) -> None:
    twins = Twins(kind, slots, DataOptimizer)
    parameters, x = list(twins.module.parameters()), torch.randn(8, 5, device=slots[0])
    for _ in range(2):
        torch.testing.assert_close(twins.model(x), twins.bare(x))
        before = steps_of(parameters)
        twins.step()
        assert all(map(operator.ne, steps_of(parameters), before))


@OURS
def test_a_failed_step_and_the_one_after_it(slots: list[str], kind: Kind) -> None:
    """The updates before it have finished, those behind it have not begun."""
    twins = Twins(kind, slots, DataOptimizer)
    twins.set_gradients()
    parameters = list(twins.module.parameters())
    bad: Any = parameters[-1 if kind == "sharded" else 2]
    bad.grad.fill_(torch.inf)
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(ArithmeticError, match="not finite"):
        twins.take()
    changed = [not torch.equal(p, old) for p, old in zip(parameters, before, strict=True)]
    if kind == "sharded":
        order = [slots.index(str(twins.ours.device_of(p))) for p in parameters]
        others = [i for i, place in enumerate(order) if place != order[-1]]
        assert all(changed[i] == (order[i] < order[-1]) for i in others)
    else:
        assert changed[0] is False and changed[4:] == [True, True]
    # It goes on with what the parameters are now.
    twins.bare.load_state_dict(twins.module.state_dict())
    twins.step()


class SumOfAll(Optimizer):
    """Nobody knows whether it looks at one parameter at a time."""


def test_optimizers_that_cannot_step_in_parts_are_refused(slots: list[str]) -> None:
    model = DataParallel(placed(build, slots[0], torch.float), slots)
    parameters = list(model.parameters())
    made: list[Callable[..., Any]] = [
        lambda kind, **arguments: ShardedOptimizer(kind, model, **arguments),
        lambda kind, **arguments: InBackwardOptimizers(kind, parameters, **arguments),
    ]
    for make in made:
        for kind in (torch.optim.LBFGS, SumOfAll):
            match = rf"{kind.__name__}\.step cannot be done in parts: .* such as torch\.opt"
            with pytest.raises(ValueError, match=match):
                make(kind)
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            make(ADAMW, lr=-1)
    with pytest.raises(AttributeError, match="no attribute 'device_ids'"):
        ShardedOptimizer(ADAMW, model.module)
    optimizer = ShardedOptimizer(ADAMW, model)
    with pytest.raises(KeyError, match="tensor"):
        optimizer.device_of(torch.ones(3))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": parameters})
    optimizer.step()
    # The step of an ordinary loop.
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'parameters'"):
        InBackwardOptimizers(ADAMW, parameters).step()  # type: ignore[call-arg]


# --- sharded: which shard, and what is copied ----------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (VIRTUAL[:2] * 2, {"virtual:0": 1, "virtual:1": 5}),
        (["cpu", "virtual:0", "cpu"], {"cpu": 1, "virtual:0": 5}),
        (VIRTUAL[:3], {"virtual:0": 1, "virtual:1": 1, "virtual:2": 4}),
    ],
)
def test_state_is_on_the_devices_in_equal_parts(slots: list[str], expected: dict[str, int]) -> None:
    """One matrix has most of the elements; a device has one shard however often it is named."""
    twins = Twins("sharded", slots)
    twins.step()
    parameters, place = list(twins.module.parameters()), twins.ours.device_of
    assert Counter(str(place(p)) for p in parameters) == expected
    assert all(twins.ours.state[p]["exp_avg"].device == place(p) for p in parameters)
    added = [nn.Parameter(torch.ones(n, device=slots[0])) for n in (3000, 10)]
    twins.ours.add_param_group({"params": added})
    assert str(place(added[0])) != slots[0]


def test_few_copies_are_made_and_none_is_kept() -> None:
    twins, other = Twins("sharded", VIRTUAL[:3], SGD, lr=0.1), torch.device("virtual:1")
    # Free the memory of earlier tests.
    gc.collect()
    before = memory_allocated(other)
    twins.step()
    # Between steps other devices hold nothing but state.
    assert memory_allocated(other) == before
    twins.set_gradients()
    with mock.patch.object(comm, "broadcast_coalesced", wraps=comm.broadcast_coalesced) as sent:
        twins.take()
        # Per shard on another device: its values and gradients together, its new values together.
        assert sent.call_count == 2 * 2
        twins.ours.zero_grad()
        twins.take()
        assert sent.call_count == 2 * 2
        sent.reset_mock()
        for p in twins.module.parameters():
            p.requires_grad_(p.dim() == 1)
        twins.module(torch.randn(3, 5, device="virtual:0")).sum().backward()
        optimizer = ShardedOptimizer(ADAMW, DataParallel(twins.module, VIRTUAL[:2]))
        optimizer.step()
    # A frozen one counts as without state; others send a value, its gradient, and the value back.
    assert sum(t.numel() for call in sent.call_args_list for t in call.args[0]) == 3 * 48
    assert optimizer.device_of(twins.module[0].bias) != optimizer.device_of(twins.module[2].bias)


def test_streams_that_defer() -> None:
    twins = Twins("sharded", VIRTUAL)
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual.strict_mode())
        # Everything of the caller is on side streams, on which the shards have to follow.
        for slot in VIRTUAL:
            stream = torch.Stream(slot)
            wait_stream(stream, current_stream(torch.device(slot)))
            stack.enter_context(use_stream(stream))
        for _ in range(3):
            twins.step()


class Spread(nn.Module):
    """Is on several devices by itself, so that a wrapper of it names none."""

    device_ids = None

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9 + i, 5, device=d) for i, d in enumerate(places))


def test_a_module_that_is_spread_over_devices() -> None:
    twins, places = Twins("sharded"), ["virtual:1", "virtual:2", "virtual:1"]
    twins.module = Spread(places)
    twins.bare = copy.deepcopy(twins.module)
    twins.plain, twins.ours = ADAMW(twins.bare.parameters()), ShardedOptimizer(ADAMW, twins.module)
    twins.step()
    twins.step()
    # Some of the parameters have their state on the other device than they are on.
    own = [str(p.device) for p in twins.module.parameters()]
    found = [str(twins.ours.device_of(p)) for p in twins.module.parameters()]
    assert set(found) == set(places) and found != own


def test_learning_rates_that_are_tensors() -> None:
    lr = torch.tensor(0.1)
    twins = Twins("sharded", VIRTUAL[:3], lr=lr, foreach=False)
    twins.step()
    lr.mul_(0.5)
    twins.step()
    assert twins.ours.param_groups[0]["lr"] is lr


def test_sparse_gradients(slots: list[str]) -> None:
    def tables() -> nn.Module:
        return nn.ModuleList(nn.Embedding(9 + i, 3, sparse=True) for i in range(3))

    twins = Twins("sharded", slots, torch.optim.SparseAdam, build=tables, lr=0.1)
    for _ in range(3):
        for p, q in twins.pairs():
            rows = torch.randint(9, (5,), device=slots[0])
            values = torch.randn_like(p[:5])
            for each in (p, q):
                each.grad = None
                (nn.functional.embedding(rows, each, sparse=True) * values).sum().backward()
        twins.plain.step()
        twins.take()
    twins.assert_equal()


# --- sharded: what users do to an optimizer ------------------------------------------------------


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


@pytest.mark.parametrize(
    "change", [change_shape, change_dtype, forget, change_groups, replace_a_parameter]
)
def test_changes_between_steps(slots: list[str], change: Callable[..., None]) -> None:
    twins = Twins("sharded", slots, SGD, lr=0.1)
    twins.step()
    for module, optimizer in twins.both():
        change(module, optimizer)
    twins.step()
    twins.step()


def test_parameters_that_move_to_another_device() -> None:
    twins = Twins("sharded", VIRTUAL[:3])
    for place in ("virtual:1", "virtual:3"):
        twins.step()
        for p, q in twins.pairs():
            p.grad = q.grad = None
            p.data, q.data = p.data.to(place), q.data.to(place)
        # Its state comes along in this way only.
        twins.plain.load_state_dict(twins.plain.state_dict())
        twins.step()


def test_closures_are_called_once_with_gradients_enabled(slots: list[str]) -> None:
    twins, x = Twins("sharded", slots), torch.randn(3, 5, device=slots[0])
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


@pytest.mark.in_pairs
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(slots: list[str], fused: bool, unscale: bool) -> None:
    twins = Twins("sharded", slots, fused=fused)
    device = slots[0].split(":")[0]
    scalers = [torch.amp.GradScaler(device, 8.0, growth_interval=2) for _ in range(2)]
    # The scaler asks for this.
    unscales = "_step_supports_amp_scaling"
    for duplicate in (twins.ours, copy.deepcopy(twins.ours)):
        assert getattr(duplicate, unscales, False) == getattr(twins.plain, unscales, False)
    for number in range(5):
        twins.set_gradients(float("inf") if number == 2 else 8.0)
        for scaler, optimizer in zip(scalers, (twins.plain, twins.ours), strict=True):
            scaler.scale(torch.ones((), device=slots[0]))
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert_same(*[scaler.state_dict() for scaler in scalers])
        twins.assert_equal()


# --- in backward ---------------------------------------------------------------------------------


def test_a_step_in_backward_is_one_of_its_parameters_alone() -> None:
    seen: list[int] = []
    alive: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    class Seen(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            alive.add(self)
            seen.append(sum(len(group["params"]) for group in self.param_groups))

    twins = Twins("in backward", optimizer_class=Seen)
    for buckets in (FIRST, THEN):
        seen.clear()
        twins.step(buckets)
        assert seen == [6, *map(len, buckets)]
    # Nothing is kept for a bucket.
    gc.collect()
    assert list(alive) == [twins.plain]
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    kinds: tuple[Kind, ...] = ("in backward", "torch's in backward")
    for kind in kinds:
        twins = Twins(kind)
        twins.set_gradients()
        first, second, third, *_ = twins.module.parameters()
        twins.ours.step([other, first, second])
        assert first.grad is second.grad is None and other.grad is not None is not third.grad
    assert torch.equal(other, torch.ones(2))


def test_buckets_that_are_stepped_at_the_same_time() -> None:
    class Slow(torch.optim.Adam):
        barrier: ClassVar[Any] = None

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if self.barrier is not None:
                self.barrier.wait(20)
            super().step()

    twins = Twins("in backward", optimizer_class=Slow)
    parameters = list(twins.module.parameters())
    for _ in range(3):
        twins.set_gradients()
        twins.plain.step()
        Slow.barrier = threading.Barrier(3)
        threads = [
            threading.Thread(target=twins.ours.step, args=([parameters[i] for i in bucket],))
            for bucket in FIRST
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        Slow.barrier = None
    twins.assert_equal()


def test_torchs_optimizers_no_longer_step_by_themselves() -> None:
    """A parameter may have several."""
    module = build()
    assert not TorchsOptimizers(module.parameters()).found
    bare, classes = copy.deepcopy(module), (SGD, ADAMW)
    for optimizer_class in classes:
        apply_torchs(optimizer_class, module.parameters(), {"lr": 0.1})
    plain = [optimizer_class(bare.parameters(), lr=0.1) for optimizer_class in classes]
    optimizers = TorchsOptimizers(module.parameters())
    x = torch.randn(3, 5)
    for each in (module, bare):
        each(x).sum().backward()
    assert_same(*[[p.detach() for p in each.parameters()] for each in (module, bare)])
    optimizers.step(list(module.parameters()))
    for optimizer in plain:
        optimizer.step()
    assert_same(*[[p.detach() for p in each.parameters()] for each in (module, bare)])
    # Their owner sees what was done.
    parameter: Any = module[0].weight  # type: ignore[index]
    assert parameter._in_backward_optimizers[1].state[parameter]["step"] == 1


# --- in the loop of DistributedDataParallel ------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["in backward", "torch's in backward", "torch's, behind it"])
def test_the_wrapper_steps_with_all_that_is_in_grad(kind: str, replicas: int) -> None:
    module = build()
    bare = copy.deepcopy(module)
    if kind == "torch's in backward":
        apply_torchs(SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, ["cpu"] * replicas, bucket_cap_mb=0.0005)
    if kind == "in backward":
        model.step_in_backward(SGD, lr=0.1)
    if kind == "torch's, behind it":
        apply_torchs(SGD, module.parameters(), {"lr": 0.1})
        # As torch, the wrapper looks in its first forward.
        model.module(torch.randn(4, 5))
        with torch.no_grad():
            model(torch.randn(4, 5))
    with pytest.raises(RuntimeError, match="are stepped in backward already"):
        model.step_in_backward(SGD, lr=0.1)
    plain = SGD(bare.parameters(), lr=0.1)
    refused = pytest.raises(RuntimeError, match=r"within no_sync\(\), but every backward is a step")
    with model.no_sync(), refused:
        model(torch.randn(4, 5)).sum().backward()
    for _ in range(3):
        x, y = torch.randn(4, 5), torch.randn(4, 5)
        for each in (module, bare):
            each(y).sum().backward()
        for each in (model, bare):
            each(x).sum().backward()
        plain.step()
        plain.zero_grad()
        for p, q in zip(module.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            assert p.grad is None
    model.close()


def test_two_kinds_of_steps_in_backward_are_refused() -> None:
    model = DistributedDataParallel(build(), ["cpu", "cpu"])
    model.step_in_backward(SGD, lr=0.1)
    apply_torchs(SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="are stepped in backward already"):
        model(torch.randn(4, 5))


def trained(
    slots: Sequence[str], kind: str, rank: int, view: bool = False, hooked: bool = False
) -> list[Tensor]:
    """Parameters after some steps, taken by an optimizer of some kind."""
    module = placed(build, slots[0], torch.float)
    if kind == "torch's in backward" and not hooked:
        apply_torchs(SGD, module.parameters(), MOMENTUM)
    model = DistributedDataParallel(
        module, list(slots), bucket_cap_mb=0.0005, gradient_as_bucket_view=view
    )
    if kind == "torch's in backward" and hooked:
        apply_torchs(SGD, module.parameters(), MOMENTUM)
    optimizer: Optimizer | None = None
    if kind == "in backward":
        model.step_in_backward(SGD, **MOMENTUM)
    elif kind == "sharded":
        optimizer = ShardedOptimizer(SGD, model, **MOMENTUM)
    elif kind == "plain":
        optimizer = SGD(model.parameters(), **MOMENTUM)
    if hooked:
        next(module.parameters()).register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    torch.manual_seed(rank)
    x, y = torch.randn(11, 5, device=slots[0]), torch.randn(11, 2, device=slots[0])
    for step in range(5):
        loss = nn.functional.mse_loss(model(x), y) if step % 2 else model.loss(nn.MSELoss(), x, y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert len(model.reducer.buckets.plan) > 2
    model.check_replicas()
    model.close()
    return [p.detach().cpu() for p in module.parameters()]


def compare(
    rank: int, world_size: int, slots: list[str], options: Sequence[tuple[bool, bool]]
) -> list[Tensor]:
    for view, hooked in options:
        expected = trained(slots, "plain", rank, view, hooked)
        for kind in ("sharded", "in backward", "torch's in backward"):
            if world_size > 1 or not (view and kind == "torch's in backward"):
                assert_same(trained(slots, kind, rank, view, hooked), expected)
    return expected


def test_training_in_one_process(slots: list[str]) -> None:
    compare(0, 1, slots, [(False, False), (False, True), (True, False), (True, True)])


@pytest.mark.parametrize("place", ["cpu", "virtual:{}"])
def test_training_in_two_processes(cluster: Cluster, place: str) -> None:
    slots, options = [place.format(i) for i in range(2)], [(False, False), (True, False)]
    first, second = cluster.run(compare, 2, slots, options, virtual=place != "cpu")
    assert_same(first, second)
