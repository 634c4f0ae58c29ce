"""The wrapper as its users see it."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, data_parallel
from tests.models import Shared, assert_all_close, grads_of, twins


def net(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)


# --- names, attributes, state ----------------------------------------------------------------


def test_it_is_a_torch_data_parallel_without_a_prefix(slots: list[str]) -> None:
    inner = net(slots[0])
    model = DataParallel(inner, slots)
    assert isinstance(model, torch.nn.DataParallel)
    assert model.module is inner
    assert model.device_ids == [torch.device(slot) for slot in slots]
    assert list(model.state_dict()) == list(inner.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in inner.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in inner.named_buffers()]
    assert all(a is b for a, b in zip(model.parameters(), inner.parameters(), strict=True))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_state_is_loaded_with_and_without_a_prefix(prefix: str) -> None:
    source, model = net("cpu"), DataParallel(net("cpu"), ["cpu", "cpu"])
    state = {prefix + name: value for name, value in source.state_dict().items()}
    model.load_state_dict(state)
    assert_all_close(model.parameters(), source.parameters())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({prefix + "0.weight": source[0].weight})


def test_torch_data_parallel_and_ours_exchange_checkpoints() -> None:
    theirs = torch.nn.DataParallel(net("cpu"))
    theirs.module.append(nn.BatchNorm1d(2))
    ours = DataParallel(copy.deepcopy(theirs.module), ["cpu", "cpu"])
    ours.load_state_dict(theirs.state_dict())
    assert_all_close(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("prefix", ["model.", "model.module."])
def test_as_a_part_of_a_bigger_module(prefix: str) -> None:
    class Bigger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = DataParallel(net("cpu"), ["cpu", "cpu"])

    source, bigger = net("cpu"), Bigger()
    assert list(bigger.state_dict()) == ["model." + name for name in source.state_dict()]
    bigger.load_state_dict({prefix + name: value for name, value in source.state_dict().items()})
    assert_all_close(bigger.model.parameters(), source.parameters())


def test_attributes_of_the_module_are_found() -> None:
    inner = net("cpu")
    inner.config = {"width": 4}  # type: ignore[assignment]
    model = DataParallel(inner, ["cpu", "cpu"])
    assert model.config is inner.config
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = model.missing


def test_functional_call_on_the_wrapper_is_refused() -> None:
    model = DataParallel(net("cpu"), ["cpu", "cpu"])
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"can't be used with nn\.DataParallel"):
        torch.func.functional_call(model, parameters, torch.randn(2, 3))
    output = torch.func.functional_call(model.module, parameters, torch.randn(2, 3))
    assert output.shape == (2, 2)


def test_functional_call_on_a_module_around_the_wrapper() -> None:
    """Parameters that are replaced for a call are used, or refused; the next call is right."""
    x = torch.randn(4, 3)
    for wrapper in (DataParallel, DistributedDataParallel):
        for count in (1, 2):
            bare = net("cpu")
            outer = nn.Sequential(wrapper(bare, ["cpu"] * count))
            for trained in (False, True, False):
                given = {
                    name: torch.full_like(p, 0.5).requires_grad_(trained)
                    for name, p in outer.named_parameters()
                }
                own = {n.removeprefix("0.module."): t.detach() for n, t in given.items()}
                own = {n: t.requires_grad_(trained) for n, t in own.items()}
                if wrapper is DistributedDataParallel and count == 2:
                    with pytest.raises(
                        RuntimeError, match=r"functional_call has .*\.module of the"
                    ):
                        torch.func.functional_call(outer, given, x)
                else:
                    output = torch.func.functional_call(outer, given, x)
                    expected = torch.func.functional_call(bare, own, x)
                    torch.testing.assert_close(output, expected)
                    if trained:
                        output.sum().backward()
                        expected.sum().backward()
                        assert_all_close(
                            [t.grad for t in given.values()], [t.grad for t in own.values()]
                        )
                torch.testing.assert_close(outer(x), bare(x))


# --- copies, pickles, life -------------------------------------------------------------------


def test_deepcopy_and_pickle(slots: list[str]) -> None:
    model = DataParallel(net(slots[0]), slots[:2], output_device=slots[0], scalars="mean")
    x = torch.randn(5, 3, device=slots[0])
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected)
        assert other.scalars == "mean"
        assert next(other.parameters()) is not next(model.parameters())


def test_averaged_model(slots: list[str]) -> None:
    model = DataParallel(net(slots[0]), slots[:2])
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    x = torch.randn(5, 3, device=slots[0])
    torch.testing.assert_close(average(x), model(x))


def test_whole_wrapper_through_torch_save() -> None:
    model = DataParallel(net("cpu"), ["cpu", "cpu"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(4, 3)
    torch.testing.assert_close(loaded(x), model(x))


def test_close_ends_the_threads_and_the_wrapper_still_works() -> None:
    before = set(threading.enumerate())
    model = DataParallel(net("cpu"), ["cpu"] * 3)
    x = torch.randn(6, 3)
    expected = model(x)
    assert len(set(threading.enumerate()) - before) == 3
    model.close()
    assert set(threading.enumerate()) <= before
    torch.testing.assert_close(model(x), expected)
    model.close()


# --- devices ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator_one_cpu_replica_and_a_hint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "dataparallel"):
        model = DataParallel(nn.Linear(2, 2))
    assert model.device_ids == [torch.device("cpu")]
    assert 'device_ids=["cpu", "cpu"]' in caplog.text


def test_by_default_every_accelerator_is_used() -> None:
    model = DataParallel(net("virtual:0"))
    assert model.device_ids == [torch.device("virtual", i) for i in range(4)]
    assert model(torch.randn(8, 3)).device == torch.device("virtual:0")


def test_outputs_go_where_they_are_wanted(slots: list[str]) -> None:
    x = torch.randn(8, 3)
    for wanted, found in (("cpu", "cpu"), (-1, "cpu"), (slots[-1], slots[-1])):
        model = DataParallel(net(slots[0]), slots, wanted)
        assert model(x).device == torch.device(found)
    each = DataParallel(net(slots[0]), slots, "each")(x)
    assert [output.device for output in each] == [torch.device(slot) for slot in slots]
    single = DataParallel(net(slots[0]), slots[:1], "cpu")
    assert single(x.to(slots[0])).device.type == "cpu"


def test_an_accelerator_and_the_cpu_together() -> None:
    bare, inner = twins(lambda: Shared([0, 1]), "virtual:0")
    model = DataParallel(inner, ["virtual:0", "cpu"])
    x = torch.randn(6, 4, dtype=torch.double, device="virtual:0")
    for module in (bare, model):
        module(x).pow(2).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))


def test_several_replicas_on_one_accelerator() -> None:
    bare, inner = twins(lambda: Shared([0, 1]), "virtual:1")
    model = DataParallel(inner, ["virtual:1"] * 3)
    x = torch.randn(7, 4, dtype=torch.double)
    for module in (bare, model):
        module(x.to("virtual:1")).pow(2).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))


@pytest.mark.parametrize(
    ("devices", "error", "match"),
    [
        (["cuda:7"], ValueError, r"'cuda:7' does not exist.*virtual:0, .*cpu"),
        ([0, 9, "virtual:8"], ValueError, r"device 9 does not exist; .*virtual:0, .*cpu"),
        ([], ValueError, "device_ids is empty"),
        ("cpu", TypeError, r"write \['cpu'\]"),
        ([1.5], TypeError, "a device is an int, a str or a torch.device, but got 1.5"),
        (["meta", "meta"], ValueError, "'meta' is not a device"),
        (["abacus"], ValueError, "'abacus' is not a device"),
    ],
)
def test_devices_that_do_not_exist(devices: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DataParallel(nn.Linear(2, 2), devices)


def test_a_module_in_the_wrong_place_is_listed_and_works_once_moved() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].to("virtual:1")
    model = DataParallel(module, ["virtual:0", "virtual:1"])
    with pytest.raises(
        ValueError,
        match=r"must be on virtual:0.*'0.weight' is on virtual:1.*"
        r"'1.weight' is on cpu.*module.to\('virtual:0'\)",
    ):
        model(torch.randn(4, 2))
    module.to("virtual:0")
    assert model(torch.randn(4, 2)).shape == (4, 2)


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("num_devices", [1, 2, None])
def test_a_module_on_the_cpu_is_moved_to_the_first_device(
    wrapper: Any, num_devices: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """In place, so an optimizer that was made before trains it, as it does the bare module."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
        return net.eval(), torch.optim.Adam(net.parameters(), 0.1)

    net, optimizer = build()
    bare, its_optimizer = build()
    devices = None if num_devices is None else ["virtual:1", "virtual:2"][:num_devices]
    with caplog.at_level(logging.INFO, "dataparallel"):
        model = wrapper(net, devices)
    first = "virtual:0" if devices is None else "virtual:1"
    text = f"the module was on cpu and is on {first} now, the first of its devices"
    assert caplog.messages == [text]
    assert {str(t.device) for t in (*net.parameters(), *net.buffers())} == {first}
    for _ in range(3):
        x, y = torch.randn(6, 3), torch.randn(6, 2)
        model.loss(nn.MSELoss(), x, y).backward()
        nn.functional.mse_loss(bare(x), y).backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    for moved, parameter in zip(net.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(moved.cpu(), parameter)


def test_what_cannot_be_moved_in_place_is_an_error() -> None:
    net = nn.Linear(2, 2)
    watched = weakref.ref(net.weight)
    with pytest.raises(RuntimeError, match="swap"):
        DataParallel(net, ["virtual:0", "virtual:1"])
    del watched
    assert DataParallel(net.to("virtual:0"))(torch.randn(4, 2)).shape == (4, 2)


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_a_message_about_many_tensors_is_short(wrapper: Any) -> None:
    layers = [nn.Linear(2, 2) for _ in range(200)]
    net = nn.Sequential(*layers).to("virtual:1")
    with pytest.raises(ValueError, match=r"'0\.weight' is .*; and 397 more; ") as caught:
        wrapper(net, ["virtual:0", "virtual:1"])(torch.randn(4, 2))
    assert len(str(caught.value)) < 300
    assert "'1.weight'" in str(caught.value) and "'1.bias'" not in str(caught.value)


# --- the functional form ---------------------------------------------------------------------


def test_data_parallel_function(slots: list[str]) -> None:
    bare, inner = twins(lambda: Shared([0]), slots[0])
    x = torch.randn(6, 4, dtype=torch.double, device=slots[0])
    before = threading.active_count()
    output = data_parallel(inner, x, slots)
    output.sum().backward()
    bare(x).sum().backward()
    torch.testing.assert_close(output, bare(x))
    assert_all_close(grads_of(inner), grads_of(bare))
    assert threading.active_count() == before


def test_data_parallel_function_leaves_the_module_where_it_is() -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="must be on virtual:0"):
        data_parallel(module, torch.randn(2, 3), ["virtual:0"])
    assert module.weight.device.type == "cpu"


def test_parameters_of_which_one_chunk_alone_uses_views_have_gradients_of_their_own() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(3))
            self.second = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.first + self.second)

    wrappers: list[Any] = [DataParallel, DistributedDataParallel]
    for wrapper in wrappers:
        module = Adds()
        model = wrapper(module, ["cpu"] * 2)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        for parameter in module.parameters():
            assert parameter.grad is not None and parameter.grad.tolist() == [2, 2, 2]
