"""Attributes that a forward leaves: results with a history, states, and values only kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, grads, wrap
from tests.models import WRAPPERS, assert_all_close


def made(device: str, function: Callable[..., Tensor]) -> Any:
    """A module of whose attributes mypy knows nothing."""
    return Net(device, function)


# --- results, as with the bare module on the whole batch -------------------------------------


def _mean(net: Any, x: Tensor) -> Tensor:
    """An auxiliary loss of a submodule in a list, and one of a layer without other use."""
    gate = net.layers[1]
    gate.aux = gate(x).square().mean()
    net.aux = net.layers[2](x).sin().mean() + gate.aux
    output: Tensor = net.layers[0](x) * net.scale
    return output


def _samples(net: Any, x: Tensor) -> Tensor:
    """Tensors with the samples, some in containers, one of them twice, one the output itself."""
    hidden = net.layers[0](x)
    net.hidden, net.pair = hidden, (hidden, {"sin": hidden.sin(), "count": 3})
    net.layers[1].parts = [net.layers[1](hidden), [hidden.square(), None]]
    net.output = hidden * net.scale
    output: Tensor = net.output
    return output


def _input(net: Any, x: Tensor) -> Tensor:
    net.given = x
    output: Tensor = net.layers[0](x.detach())
    return output


def _checkpointed(net: Any, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        net.aux = net.layers[1](x).square().mean()
        output: Tensor = net.layers[0](x).sin()
        return output

    output: Tensor = checkpoint(part, x, use_reentrant=False)
    return output


def _detached(net: Any, x: Tensor) -> Tensor:
    """The output has no history."""
    net.aux = net.layers[1](x).square().mean()
    with torch.no_grad():
        output: Tensor = net.layers[0](x)
    return output


def _of_mean(model: Any, net: Any, x: Tensor) -> Any:
    output = model(x)
    assert net.aux.dim() == 0
    return output.square().mean() + net.aux + 2 * net.layers[1].aux


def _of_samples(model: Any, net: Any, x: Tensor) -> Any:
    output = model(x)
    parts = net.layers[1].parts
    assert parts[1][1] is None and net.pair[1]["count"] == 3 and net.hidden is net.pair[0]
    assert type(net.pair) is tuple and len(net.output) == len(x)
    products = output * net.hidden * net.pair[1]["sin"] * parts[0] * parts[1][0] * net.output
    return products.sum()


def _twice(model: Any, net: Any, x: Tensor) -> Any:
    """The results of the first forward are used after the second."""
    outputs, aux = [], []
    for factor in (1, 2):
        outputs.append(model(x * factor))
        aux.append(net.aux + net.layers[1].aux)
    return (outputs[0] * outputs[1]).mean() + aux[0] * 3 + aux[1]


def _earlier(model: Any, net: Any, x: Tensor) -> Any:
    """A backward of its own, after that of a later forward."""
    model(x)
    first = net.aux
    (model(x * 2).sum() + net.aux).backward()
    return first * 3


def _of_the_aux(model: Any, net: Any, x: Tensor) -> Any:
    output = model(x)
    return net.aux * output.detach().mean()


def _with_loss(model: Any, net: Any, x: Tensor) -> Any:
    criterion = nn.MSELoss()
    loss = criterion(net(x), x * 2) if model is net else model.loss(criterion, x, x * 2)
    return loss + net.aux


def _of_the_input(model: Any, net: Any, x: Tensor) -> Any:
    output = model(x)
    return (output + net.given.square()).mean()


#: The module's forward, and the loss of what it has left.
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "means": (_mean, _of_mean),
    "samples": (_samples, _of_samples),
    "two forwards": (_mean, _twice),
    "an earlier forward": (_mean, _earlier),
    "its input": (_input, _of_the_input),
    "in a checkpoint": (_checkpointed, _of_the_aux),
    "no other output": (_detached, _of_the_aux),
    "beside model.loss": (_mean, _with_loss),
}


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 3])
def test_results_are_those_of_the_bare_module(
    slots: list[str], wrapper: Any, name: str, count: int
) -> None:
    function, loss_of = CASES[name]
    bare, net = made(slots[0], function), made(slots[0], function)
    options = {} if wrapper is dp.DataParallel else {"nonfinite": "raise"}
    model = wrapper(net, slots[:count], scalars="mean", **options)
    for step in range(3):
        found = []
        for module, inner in ((bare, bare), (model, net)):
            x = batch(slots[0], step, grad=True)
            loss = loss_of(module, inner, x)
            loss.backward()
            found.append([loss, x.grad, *grads(inner)])
        assert_all_close(found[1], found[0])
    model.close()


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("name", ["means", "samples", "beside model.loss"])
def test_gradients_that_are_returned_and_those_of_gradients(
    slots: list[str], wrapper: Any, name: str
) -> None:
    function, loss_of = CASES[name]
    bare, net = made(slots[0], function), made(slots[0], function)
    model, found = wrapper(net, slots[:2], scalars="mean"), []
    for module, inner in ((bare, bare), (model, net)):
        x = batch(slots[0], grad=True)
        wanted = [x, inner.layers[0].weight, inner.layers[1].weight]
        first = torch.autograd.grad(loss_of(module, inner, x), wanted, create_graph=True)
        sum([g.square().sum() for g in first], torch.zeros((), device=slots[0])).backward()
        found.append([*first, x.grad, *grads(inner)])
    assert_all_close(found[1], found[0])


@WRAPPERS
@pytest.mark.parametrize("scalars", ["stack", "sum", "mean", len])
def test_0_d_results_are_put_together_as_0_d_outputs(wrapper: Any, scalars: Any) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.aux = net.layers[0](x).mean()
        output: Tensor = net.aux * 1
        return output

    net = made("cpu", forward)
    model = wrapper(net, ["cpu"] * 3, scalars=scalars)
    for inputs in (batch(), batch(size=2), batch(size=1)):
        output = model(inputs)
        torch.testing.assert_close(net.aux, output)
        net.zero_grad()
        output.sum().backward(retain_graph=True)
        expected = grads(net)
        net.zero_grad()
        net.aux.sum().backward()
        assert_all_close(grads(net), expected)


def test_the_module_has_its_result_where_replica_0_is(slots: list[str]) -> None:
    """The caller's choices for outputs do not concern it."""
    net = made(slots[0], _samples)
    options: list[dict[str, Any]] = [{"output_device": "each"}, {"output_device": -1}]
    for each in (*options, {"out_dims": None}):
        dp.DataParallel(net, slots[:2], **each)(batch(slots[0]))
        assert net.hidden.shape == (7, 6) and str(net.hidden.device) == slots[0]


@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_a_buffer_that_is_a_result(buffers: Any) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.aux = net.layers[1](x).square().mean()
        output: Tensor = net.layers[0](x)
        return output

    bare, net = made("cpu", forward), made("cpu", forward)
    for each in (bare, net):
        each.register_buffer("aux", torch.zeros((), dtype=torch.float64))
    model = dp.DistributedDataParallel(net, ["cpu"] * 2, scalars="mean", buffers=buffers)
    for module, inner in ((bare, bare), (model, net)):
        (module(batch()).sum() + inner.aux).backward()
    assert_all_close(grads(net), grads(bare))
    assert "aux" in dict(net.named_buffers())


# --- several processes ------------------------------------------------------------------------


def _processes(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> Any:
    """Gradients after two steps, in which ranks have other numbers of samples."""
    found = []
    for count, given in ((0, {}), (replicas, {"scalars": "mean", **options})):
        net = made("cpu", _mean)
        model = wrap(net, count, **given)
        for step in range(2):
            x = batch(seed=10 * step + rank, size=5 + rank, grad=True)
            (_of_mean(model, net, x) + _twice(model, net, x)).backward()
            found.append([x.grad, *grads(net)])
    assert_all_close([*found[2], *found[3]], [*found[0], *found[1]])


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("replicas", [1, 2])
def test_processes_train_as_with_torch(
    cluster: Cluster, replicas: int, options: dict[str, Any]
) -> None:
    cluster.run(_processes, 2, replicas, options)


# --- containers that the module has -----------------------------------------------------------


def _appended(net: Any, x: Tensor) -> Tensor:
    """Losses in a list and in a dict that two layers share, and a number."""
    net.losses.append(net.layers[1](x).square().mean())
    hidden: Tensor = net.layers[0](x)
    net.layers[0].shared["hidden"] = hidden.sin()
    net.layers[1].shared["last"] = net.layers[1].shared["hidden"].mean()
    net.counts.append(len(x))
    if "once" in net.names:
        net.names.remove("once")
        hidden = hidden * 2
    return hidden


def _with_containers(device: str) -> Any:
    net = made(device, _appended)
    net.losses, net.counts, net.names = [], [], {"once", "ever"}
    net.layers[0].shared = net.layers[1].shared = {"count": 0}
    return net


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("clears", [True, False])
def test_containers_that_a_forward_changes(
    slots: list[str], wrapper: Any, count: int, clears: bool
) -> None:
    bare, net = _with_containers(slots[0]), _with_containers(slots[0])
    containers = net.losses, net.counts, net.names, net.layers[0].shared
    options = {} if wrapper is dp.DataParallel else {"nonfinite": "raise"}
    model = wrapper(net, slots[:count], scalars="mean", **options)
    for step in range(3):
        found = []
        for module, inner in ((bare, bare), (model, net)):
            output = module(batch(slots[0], step, size=6))
            shared = inner.layers[1].shared
            loss = (output * shared["hidden"]).sum() + inner.losses[-1] + shared["last"]
            loss.backward()
            found.append([loss, *grads(inner)])
        assert_all_close(found[1], found[0])
        assert net.counts == [6 // count] * (step + 1) and net.names == {"ever"}
        assert len(net.losses) == (1 if clears else step + 1) and shared["count"] == step
        for inner in (bare, net):
            if clears:
                inner.losses.clear()
            inner.layers[0].shared["count"] += 1
    after = net.losses, net.counts, net.names, net.layers[1].shared
    assert all(a is b for a, b in zip(after, containers, strict=True))


@WRAPPERS
def test_a_forward_that_failed_has_changed_no_container(slots: list[str], wrapper: Any) -> None:
    net = _with_containers(slots[0])
    model = wrapper(net, slots[:2])
    function = net.function

    def fail(net: Any, x: Tensor) -> Tensor:
        raise ValueError(len(function(net, x)))

    net.function = fail
    with pytest.raises(ValueError, match="4"):
        model(batch(slots[0]))
    assert not net.losses and not net.counts and len(net.names) == 2


# --- what cannot be put together --------------------------------------------------------------


def _of_no_sample(net: Any, x: Tensor) -> Tensor:
    """One result that depends on the chunk, and one that each replica has alike."""
    output: Tensor = net.layers[0](x)
    net.layers[1].center = output.mean(0)
    net.layers[1].turned = net.layers[1].weight.t() * net.scale
    return output


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("count", [2, 3])
def test_a_result_without_samples_is_an_error_if_somebody_uses_it(
    slots: list[str], wrapper: Any, count: int
) -> None:
    net = made(slots[0], _of_no_sample)
    model = wrapper(net, slots[:count])
    for step in range(2):
        x = batch(slots[0], step, size=8)
        output = model(x)
        # To look at it is no mistake.
        torch.testing.assert_close(net.layers[1].center, output[: -(-8 // count)].mean(0))
        match = r"'layers\.1\.center', a tensor of shape \(6,\).*Return it from forward, or .*0-d"
        with pytest.raises(RuntimeError, match=match):
            (output.sum() + net.layers[1].center.sum()).backward(retain_graph=True)
        net.zero_grad()
        output.sum().backward()
        torch.testing.assert_close(net.layers[0].bias.grad, torch.full_like(x[0], 8))


@WRAPPERS
def test_a_result_that_replicas_leave_differently_is_an_error_if_somebody_uses_it(
    slots: list[str], wrapper: Any
) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        output: Tensor = net.layers[0](x)
        replica = dp.current_replica()
        assert replica is not None
        net.parts = [output.mean()] * (1 + (replica.index == 0))
        return output

    net = made(slots[0], forward)
    output = wrapper(net, slots[:2])(batch(slots[0]))
    with pytest.raises(RuntimeError, match=r"'parts', a tensor of shape .*the other replicas have"):
        (output.sum() + net.parts[0]).backward()


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("count", [1, 3])
def test_a_result_that_all_replicas_have_alike(slots: list[str], wrapper: Any, count: int) -> None:
    """A weight that was computed from parameters, as older forms of weight norm do."""
    bare, net = made(slots[0], _of_no_sample), made(slots[0], _of_no_sample)
    options = {} if wrapper is dp.DataParallel else {"nonfinite": "raise"}
    model = wrapper(net, slots[:count], **options)
    for step in range(2):
        found = []
        for module, inner in ((bare, bare), (model, net)):
            loss = module(batch(slots[0], step)).sum() + inner.layers[1].turned.square().sum()
            loss.backward()
            found.append([loss, *grads(inner)])
        assert_all_close(found[1], found[0])


# --- what has no history ----------------------------------------------------------------------


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "keeps" in record.getMessage()]
    caplog.clear()
    return found


KEPT: dict[str, Callable[[Any, Tensor, Tensor], object]] = {
    "a state": lambda net, x, y: setattr(net.layers[1], "kept", y.detach()),
    "in a list": lambda net, x, y: setattr(net.layers[1], "kept", [1, y.detach()]),
    "a statistic": lambda net, x, y: setattr(net.layers[1], "kept", y.detach().mean(0)),
    "a leaf": lambda net, x, y: setattr(net.layers[1], "kept", x.detach().requires_grad_()),
}


def _keeping(
    slots: list[str], wrapper: Any, keep: Callable[[Any, Tensor, Tensor], object]
) -> tuple[Any, Any]:
    def forward(net: Any, x: Tensor) -> Tensor:
        output: Tensor = net.layers[0](x)
        keep(net, x, output)
        return output

    net = made(slots[0], forward)
    return net, wrapper(net, slots[:2])


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("grad", [True, False])
def test_what_differs_between_replicas_is_warned_of_once(
    slots: list[str], wrapper: Any, kind: str, grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, model = _keeping(slots, wrapper, KEPT[kind])
    with torch.set_grad_enabled(grad):
        for step in range(3):
            model(batch(slots[0], step))
    (message,) = _warnings(caplog)
    assert "the module keeps replica 0's part of 'layers.1.kept'" in message
    assert "pass it as an argument; in_dims and out_dims" in message
    kept = net.layers[1].kept
    kept = kept[1] if kind == "in a list" else kept
    assert len(kept) == (6 if kind == "a statistic" else 4) and kept.grad_fn is None


SILENT: dict[str, Callable[[Any, Tensor, Tensor], object]] = {
    "a table": lambda net, x, y: setattr(net, "table", torch.arange(len(x) + 9).to(x.device)),
    "from parameters": lambda net, x, y: setattr(net, "weight", net.layers[0].weight.detach() * 2),
    "a parameter": lambda net, x, y: setattr(net, "weights", [net.scale, net.layers[0].weight]),
    "numbers": lambda net, x, y: setattr(net, "count", len(x)),
    "a result": lambda net, x, y: setattr(net, "result", y),
}


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("kind", SILENT)
def test_what_is_the_same_in_all_replicas_is_not_warned_of(
    slots: list[str], wrapper: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, model = _keeping(slots, wrapper, SILENT[kind])
    for step in range(3):
        model(batch(slots[0], step, size=8)).sum().backward()
    assert not _warnings(caplog)
    if kind == "a parameter":
        assert net.weights == [net.scale, net.layers[0].weight]


@WRAPPERS
def test_results_are_put_together_in_evaluation_too(
    wrapper: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a forward with gradients has shown which they are."""
    bare, net = made("cpu", _mean), made("cpu", _mean)
    model = wrapper(net, ["cpu"] * 3, scalars="mean")
    with torch.inference_mode():
        bare(batch())
        model(batch())
    assert len(_warnings(caplog)) == 2
    model(batch(seed=1)).sum().backward()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            bare(batch(seed=2))
            model(batch(seed=2))
        torch.testing.assert_close(net.aux, bare.aux)
        assert not net.aux.requires_grad
    assert not _warnings(caplog)


@WRAPPERS
def test_a_result_of_an_earlier_forward_that_is_kept_on(slots: list[str], wrapper: Any) -> None:
    """It is the caller's already."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.before = net.aux
        net.aux = net.layers[1](x).square().mean()
        output: Tensor = net.layers[0](x)
        return output

    net = made(slots[0], forward)
    net.aux = None
    model = wrapper(net, slots[:2], scalars="mean")
    model(batch(slots[0]))
    first = net.aux
    model(batch(slots[0], 1))
    assert net.before is first
    (net.before + net.aux).backward()
    bare = made(slots[0], forward)
    bare.aux = None
    bare(batch(slots[0]))
    bare(batch(slots[0], 1))
    (bare.before + bare.aux).backward()
    assert_all_close(grads(net), grads(bare))
