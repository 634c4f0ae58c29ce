"""The promises of torch's DataParallel: any module, with outputs and gradients as it is bare."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, data_parallel, replicate
from tests.models import Calls, compare


def assert_same_step(
    net: nn.Module, slots: list[str], *args: Any, loss: Any = Tensor.abs, **kwargs: Any
) -> None:
    """Outputs and gradients, of the wrapper and of the function."""
    leaves = [*net.parameters(), *(b for b in net.buffers() if b.requires_grad)]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]

    def step(output: Any) -> list[Any]:
        values = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
        total = torch.stack([loss(value).sum().double() for value in values]).sum()
        return [*values, *torch.autograd.grad(total, leaves, allow_unused=True)]

    expected = step(net(*args, **kwargs))
    for output in (
        DataParallel(net, slots)(*args, **kwargs),
        data_parallel(net, args, slots, module_kwargs=kwargs),
    ):
        for got, right in zip(step(output), expected, strict=True):
            if got is None or right is None:
                # A parameter that no replica uses has no gradient, or one that is zero.
                assert not any(grad is not None and grad.any() for grad in (got, right))
            else:
                torch.testing.assert_close(got.to_dense(), right.to_dense())


def recurrent(net: Any, x: Tensor) -> Any:
    net.rnn.flatten_parameters()
    return net.rnn(x)[0]


def packed(net: Any, x: Tensor) -> Any:
    """Pack and unpack within forward, and pad to the length that the whole batch has."""
    lengths = x[:, 0, 0].abs().mul(9).long().clamp(1, x.size(1))
    found = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(net.rnn(found)[0], batch_first=True, total_length=x.size(1))[0]


def containers(net: Any, x: Tensor) -> Any:
    assert len(net.plist) == 2 and list(net.pdict) == ["scale", "shift"]
    return x * net.plist[0] * net.plist[1] * net.pdict["scale"] + net.pdict["shift"]


def replaced_output() -> nn.Module:
    net = nn.Linear(3, 3)
    net.register_forward_hook(lambda module, args, output: output * 2)
    return net


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Calls(recurrent, rnn=nn.LSTM(3, 4, 2, True, True, bidirectional=True)),
    "packed LSTM": lambda: Calls(packed, rnn=nn.LSTM(3, 4, batch_first=True)),
    "complex": lambda: Calls(
        lambda net, x: x * net.turn, turn=nn.Parameter(torch.randn(3, dtype=torch.complex128))
    ),
    "containers": lambda: Calls(
        containers,
        plist=nn.ParameterList([torch.randn(3), torch.randn(3)]),
        pdict=nn.ParameterDict({"scale": torch.randn(3), "shift": torch.randn(3)}),
    ),
    "buffers that train": lambda: Calls(
        lambda net, x: x * net.trained.sin() + net.fixed,
        trained=torch.randn(3, dtype=torch.float64, requires_grad=True),
        fixed=torch.randn(3, dtype=torch.float64),
    ),
    "partly used": lambda: Calls(
        lambda net, x: net.frozen(net.used(x)),
        used=nn.Linear(3, 3),
        frozen=nn.Linear(3, 3).requires_grad_(False),
        unused=nn.Linear(3, 3),
    ),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    # In training it refines a buffer at each call, so no two calls are the same.
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    # The older form, which sets an ordinary attribute from a forward hook.
    "weight_norm by hooks": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
    "checkpoint": lambda: Calls(
        lambda net, x: checkpoint(net.second, net.first(x), use_reentrant=False),
        first=nn.Linear(3, 4),
        second=nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    ),
    "a replaced output": replaced_output,
    "nested wrapper": lambda: nn.Sequential(DataParallel(nn.Linear(3, 3), ["cpu"] * 2), nn.Tanh()),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_modules(slots: list[str], name: str) -> None:
    if name == "nested wrapper" and slots[0] != "cpu":
        slots = ["cpu"] * 2
    net = MODULES[name]()
    net = net if name in ("complex", "buffers that train") else net.double()
    shape = (7, 5, 3) if "LSTM" in name else (9, 3)
    x = torch.randn(*shape, dtype=torch.float64, device=slots[0])
    for buffer_name, buffer in net.named_buffers(recurse=False):
        setattr(net, buffer_name, buffer.detach().to(slots[0]).requires_grad_(buffer.requires_grad))
    assert_same_step(net.to(slots[0]), slots, x)


@pytest.mark.in_pairs
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (3, 2, 1, 0), (2,)])
@pytest.mark.parametrize("samples", [1, 3, 20])
def test_orders_of_devices_and_small_batches(
    slots: list[str], order: tuple[int, ...], samples: int
) -> None:
    devices = [slots[i] for i in order]
    net = nn.Embedding(10, 5, sparse=True).to(devices[0])
    index = torch.randint(10, (samples, 5), device=devices[0])
    assert_same_step(net, devices, index)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_outputs_have_the_dtype_and_the_device_of_the_module(
    slots: list[str], dtype: torch.dtype
) -> None:
    net = nn.Linear(10, 5).to(slots[0], dtype)
    x = torch.randn(20, 10, device=slots[0], dtype=dtype)
    out = DataParallel(net, slots)(x.cpu())
    assert (out.dtype, out.device) == (dtype, torch.device(slots[0]))
    torch.testing.assert_close(out, net(x))


def test_containers_and_keywords_go_through_the_wrapper(slots: list[str]) -> None:
    def many(net: Any, a: Any, b: Tensor, factor: float, *, c: Tensor | None = None) -> Any:
        found = factor * (a["x"][0] * b if c is None else a["x"][0] * b + c) * net.scale
        return [found, (found.sin(), [found.add(1)]), OrderedDict(a=found, b=[found])]

    net = Calls(many, scale=nn.Parameter(torch.ones(()))).to(slots[0])
    x = torch.randn(6, 5, device=slots[0])
    for keywords in ({}, {"c": x.cos()}):
        assert_same_step(net, slots[:2], {"x": (x, [])}, x.sin(), 0.7, **keywords)
    out = DataParallel(net, slots)({"x": (x, [])}, x, factor=1.0)
    kinds = [type(part) for part in (out, out[1], out[1][1], out[2], out[2]["b"])]
    assert kinds == [list, tuple, list, OrderedDict, list]
    assert list(out[2]) == ["a", "b"]


def test_dim(slots: list[str]) -> None:
    """With the batch second, as a recurrent network has it by default."""
    net = Calls(lambda net, x: x.cumsum(0))
    x = torch.randn(3, 7, 2, device=slots[0], dtype=torch.float64)
    torch.testing.assert_close(DataParallel(net, slots, dim=1)(x), x.cumsum(0))
    torch.testing.assert_close(data_parallel(net, x, slots, dim=1), x.cumsum(0))


LAST, FIRST = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize("layouts", [[FIRST] * 4, [LAST, LAST, FIRST, FIRST], [LAST] * 4])
def test_layouts_of_gradients(slots: list[str], layouts: list[torch.memory_format]) -> None:
    net: Any = nn.Sequential(*(nn.Conv2d(3, 3, 2) for _ in layouts)).to(slots[0], torch.float64)
    for layer, layout in zip(net, layouts, strict=True):
        layer.to(memory_format=layout)
    model: Any = DataParallel(deepcopy(net), slots)
    x = torch.randn(9, 3, 6, 6, device=slots[0], dtype=torch.float64)
    for _ in range(2):
        compare(model, net, x)
        for layer, layout in zip(model.module, layouts, strict=True):
            assert layer.weight.is_contiguous(memory_format=layout)
            assert layer.weight.grad.is_contiguous(memory_format=layout)


# --- hooks ---------------------------------------------------------------------------------------


def test_hooks_of_modules_run_once_per_replica(slots: list[str]) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(slots[0])
    calls: list[str] = []
    net[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    net[0].register_forward_hook(lambda *_: calls.append("after"))
    net[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    DataParallel(net, slots)(torch.randn(8, 3, device=slots[0])).sum().backward()
    assert {name: calls.count(name) for name in calls} == {"before": 4, "after": 4, "backward": 4}


# --- its parts -----------------------------------------------------------------------------------


def test_subclasses_override_the_four_steps(slots: list[str]) -> None:
    """torch's DataParallel is customized by overriding its steps, with these arguments."""
    steps: list[str] = []

    class Traced(DataParallel[nn.Linear]):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            steps.append("replicate")
            return super().replicate(module, device_ids)

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            steps.append("scatter")
            return super().scatter(inputs, kwargs, device_ids)

        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            steps.append("parallel_apply")
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs: Any, output_device: Any) -> Any:
            steps.append("gather")
            # An override written for torch makes tensors of its own.
            return torch.cat([output.to(output_device) for output in outputs])

    net, x = nn.Linear(3, 5).to(slots[0]), torch.randn(7, 3, device=slots[0])
    torch.testing.assert_close(Traced(net, slots)(x), net(x))
    assert steps == ["scatter", "replicate", "parallel_apply", "gather"]


@pytest.mark.in_pairs
@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("detach", [False, True])
def test_replicate(slots: list[str], container: Any, detach: bool) -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(slots[0]).eval()
    x = torch.randn(3, 2)
    replicas = replicate(net, container(slots), detach)
    outputs = [replica(x.to(slot)).cpu() for slot, replica in zip(slots, replicas, strict=True)]
    for slot, replica, output in zip(slots, replicas, outputs, strict=True):
        assert type(replica) is nn.Sequential
        assert [name for name, _ in replica.named_buffers()] == [n for n, _ in net.named_buffers()]
        assert {str(t.device) for t in (*replica.parameters(), *replica.buffers())} == {slot}
        torch.testing.assert_close(output, net(x.to(slots[0])).cpu())
        if replica is not replicas[0]:
            assert output.requires_grad is not detach
    if not detach:
        (grad,) = torch.autograd.grad(torch.stack(outputs).sum(), net[0].weight)
        (one,) = torch.autograd.grad(net(x.to(slots[0])).sum(), net[0].weight)
        torch.testing.assert_close(grad, 4 * one)


def test_script_modules_are_refused(slots: list[str]) -> None:
    trace: Any = torch.jit.trace
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        inner = trace(nn.Linear(2, 2), torch.ones(1, 2), check_trace=False)
    with pytest.raises(TypeError, match="'0'"):
        replicate(nn.Sequential(inner).to(slots[0]), slots)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_zero_grad_in_a_replica(slots: list[str]) -> None:
    """torch warns that it has no effect."""

    class Zeroing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.zero_grad()
            return super().forward(x)

    model = DataParallel(Zeroing(3, 2).to(slots[0]), slots)
    with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with"):
        model(torch.randn(6, 3, device=slots[0]))
