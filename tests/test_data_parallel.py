"""The wrapper as its users see it: devices, copies, life, nesting, and what may be around it."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, data_parallel
from tests.models import WRAPPERS, assert_all_close, twins

CPUS = ["cpu", "cpu"]


class Net(nn.Module):
    """Tells by its ``forward`` which arguments it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.config = {"width": 4}

    def forward(self, ids: Tensor, /, mask: Tensor | None = None, *, scale: float = 1) -> Tensor:
        y: Tensor = self.layers(ids) * scale
        return y if mask is None else y * mask


# --- names and attributes --------------------------------------------------------------------


def test_what_it_shows_of_the_module(slots: list[str]) -> None:
    inner = Net().to(slots[0])
    inner.register_buffer("table", torch.ones(1, device=slots[0]))
    model = DataParallel(inner, slots)
    for names in ("named_parameters", "named_buffers"):
        assert list(dict(getattr(model, names)())) == list(dict(getattr(inner, names)()))
    assert all(a is b for a, b in zip(model.parameters(), inner.parameters(), strict=True))
    assert model.config is inner.config
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = model.missing


@WRAPPERS
def test_a_property_that_fails_says_why(wrapper: Any) -> None:
    """Torch says that the module has no such attribute."""

    class Broken(nn.Linear):
        middle = property(lambda self: self.in_features // 2)
        hidden = property(lambda self: self.config.hidden)

    class Wrapper(wrapper):  # type: ignore[misc]
        own = property(lambda self: self.module.setting)

    model = Wrapper(wrapper(Broken(4, 4), CPUS[:1]), CPUS[:1])
    assert model.middle == 2
    for name, missing in (("hidden", "config"), ("own", "setting")):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"'Broken' object has no attribute '{missing}'"):
            getattr(model, name)


@WRAPPERS
def test_forward_has_the_signature_of_the_modules(wrapper: Any) -> None:
    model, x = wrapper(Net(), CPUS), torch.randn(4, 3)
    again = pickle.loads(pickle.dumps(model.forward))
    for forward in (model.forward, copy.copy(model).forward, copy.deepcopy(model).forward, again):
        assert list(inspect.signature(forward).parameters) == ["ids", "mask", "scale"]
        torch.testing.assert_close(forward(x), model.module(x))
    torch.testing.assert_close(wrapper.forward(model, x), model.module(x))
    # Libraries replace the module's own forward like this.
    model.module.forward = nn.Linear(3, 2).forward
    assert list(inspect.signature(model.forward).parameters) == ["input"]

    class Own(wrapper):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + 1

    own = Own(Net(), CPUS)
    assert list(inspect.signature(own.forward).parameters) == ["x"]
    torch.testing.assert_close(own(x), own.module(x) + 1)


@WRAPPERS
@pytest.mark.parametrize("count", [1, 2])
def test_functional_call_on_a_module_around_the_wrapper(wrapper: Any, count: int) -> None:
    """Parameters that are replaced for a call are used, or refused; the next call is right."""
    bare, x = Net(), torch.randn(4, 3)
    outer = nn.Sequential(wrapper(bare, ["cpu"] * count))
    for trained in (False, True):
        given = {n: torch.full_like(p, 0.5) for n, p in outer.named_parameters()}
        for tensor in given.values():
            tensor.requires_grad_(trained)
        own = {n.removeprefix("0.module."): t for n, t in given.items()}
        if wrapper is DistributedDataParallel and count == 2:
            with pytest.raises(RuntimeError, match=r"functional_call has .*\.module of the"):
                torch.func.functional_call(outer, given, x)
        else:
            calls: tuple[tuple[Any, Any], ...] = (outer, given), (bare, own)
            outputs = [torch.func.functional_call(net, values, x) for net, values in calls]
            torch.testing.assert_close(*outputs)
            if trained:
                grads = [torch.autograd.grad(y.sum(), [*given.values()]) for y in outputs]
                assert_all_close(*grads)
        torch.testing.assert_close(outer(x), bare(x))
    with pytest.raises(RuntimeError, match=r"can't be used with nn\.DataParallel"):
        torch.func.functional_call(outer[0], dict(bare.named_parameters()), x)


# --- copies and life -------------------------------------------------------------------------


def test_copies_compute_the_same_with_parameters_of_their_own(slots: list[str]) -> None:
    model = DataParallel(Net().to(slots[0]), slots[:2], output_device=slots[0], scalars="mean")
    x = torch.randn(5, 3, device=slots[0])
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected)
        assert other.scalars == "mean"
        assert next(other.parameters()) is not next(model.parameters())


def test_close_ends_the_threads_and_the_wrapper_still_works() -> None:
    before = set(threading.enumerate())
    model, x = DataParallel(Net(), ["cpu"] * 3), torch.randn(6, 3)
    expected = model(x)
    assert len(set(threading.enumerate()) - before) == 3
    model.close()
    assert set(threading.enumerate()) <= before
    torch.testing.assert_close(model(x), expected)
    model.close()
    # The function leaves none.
    torch.testing.assert_close(data_parallel(model.module, x, CPUS), expected)
    assert set(threading.enumerate()) <= before


# --- devices ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator_one_cpu_replica_and_a_hint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "dataparallel"):
        model = DataParallel(nn.Linear(2, 2))
    assert model.device_ids == [torch.device("cpu")]
    assert 'device_ids=["cpu", "cpu"]' in caplog.text


def test_outputs_go_where_they_are_wanted(slots: list[str]) -> None:
    x = torch.randn(8, 3)
    for wanted, found in (("cpu", "cpu"), (-1, "cpu"), (slots[-1], slots[-1])):
        model = DataParallel(Net().to(slots[0]), slots, wanted)
        assert model(x).device == torch.device(found)
    each = DataParallel(Net().to(slots[0]), slots, "each")(x)
    assert [output.device for output in each] == [torch.device(slot) for slot in slots]
    single = DataParallel(Net().to(slots[0]), slots[:1], "cpu")
    assert single(x.to(slots[0])).device.type == "cpu"


@WRAPPERS
@pytest.mark.parametrize("num_devices", [1, 2, None])
def test_a_module_on_the_cpu_is_moved_to_the_first_device(
    wrapper: Any, num_devices: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """In place, so an optimizer that was made before trains it, as it does the bare module."""
    bare, net = twins(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "cpu")
    optimizers = [torch.optim.Adam(module.eval().parameters(), 0.1) for module in (net, bare)]
    devices = None if num_devices is None else ["virtual:1", "virtual:2"][:num_devices]
    with caplog.at_level(logging.INFO, "dataparallel"):
        model = wrapper(net, devices)
    first = "virtual:0" if devices is None else "virtual:1"
    text = f"the module was on cpu and is on {first} now, the first of its devices"
    assert caplog.messages == [text]
    assert {str(t.device) for t in (*net.parameters(), *net.buffers())} == {first}
    for x in torch.randn(3, 6, 3, dtype=torch.double):
        for module, optimizer in zip((model, bare), optimizers, strict=True):
            module(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_all_close([p.cpu() for p in net.parameters()], bare.parameters())


@WRAPPERS
def test_a_module_that_stays_in_the_wrong_place_is_told_shortly(wrapper: Any) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(200)]).to("virtual:1")
    devices, x = ["virtual:0", "virtual:1"], torch.randn(4, 2)
    text = r"must be on virtual:0.*'0\.weight' is on virtual:1.*; and 397 more; .*to\('virtual:0'\)"
    with pytest.raises(ValueError, match=text) as caught:
        wrapper(net, devices)(x)
    assert len(str(caught.value)) < 300
    assert "'1.weight'" in str(caught.value) and "'1.bias'" not in str(caught.value)
    assert wrapper(net.to("virtual:0"), devices)(x).shape == (4, 2)
    # A function moves no argument.
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="must be on virtual:0"):
        data_parallel(module, x, ["virtual:0"])


@WRAPPERS
def test_replicas_on_several_devices_refuse_to_be_recorded_in_a_graph(
    wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copies would be as old as the graph; see tests/gpu for what is recorded on one GPU."""
    x = torch.randn(4, 3, device="virtual:0")
    apart = wrapper(nn.Linear(3, 2), ["virtual:0", "virtual:1"])
    together = wrapper(nn.Linear(3, 2), ["virtual:0", "virtual:0"])
    module = torch.get_device_module("virtual")
    with monkeypatch.context() as patched:
        patched.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
        with pytest.raises(RuntimeError, match="cannot record replicas on several devices"):
            apart(x)
        together(x).sum().backward()
    apart(x).sum().backward()
