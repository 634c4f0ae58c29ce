"""Replicas that are recorded in graphs train as those that are not, bit for bit, or say why not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import virtual
from dataparallel.devices import parse_device

by_places = pytest.mark.parametrize(
    "places",
    [["virtual:0"], ["virtual:0", "virtual:0"], ["virtual:0", "virtual:1"]],
    ids=["one", "shared", "two"],
)


class Net(nn.Module):
    """Batch norm, an unused parameter, arguments by name, and outputs of several kinds."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.scale = 1.5
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, shift: float = 0.0, more: Tensor | None = None) -> Any:
        self.calls.add_(1)
        hidden = torch.relu(self.norm(self.first(x))) * self.scale + shift
        if more is not None:
            hidden = hidden + more
        return {
            "logits": self.last(hidden),
            "hidden": hidden,
            "seen": [hidden.argmax(1), hidden.detach() * 2, self.calls.expand(len(x)) + 0],
            "scale": self.scale,
        }


def make_net(device: torch.device) -> Net:
    torch.manual_seed(1)
    return Net().to(device)


class Pair:
    """A wrapper that records, and one that does not, which are trained alike."""

    def __init__(self, places: list[Any], **options: Any) -> None:
        self.device = parse_device(places[0])
        self.nets = [make_net(self.device) for _ in range(2)]
        self.models = [
            dp.DistributedDataParallel(net, places, capture=captures, **options)
            for net, captures in zip(self.nets, (True, False), strict=True)
        ]
        self.optimizers = [torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in self.nets]
        self.generator = torch.Generator().manual_seed(2)

    def batch(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device)

    def each(self, do: Callable[[Any, Any], Any]) -> None:
        """Do the same with both, whose results and states must be the same bits."""
        got, expected = map(do, self.models, self.optimizers)
        # Libraries of GPUs may choose other kernels for other memory.
        close = (
            {"rtol": 1e-4, "atol": 1e-4} if self.device.type == "cuda" else {"rtol": 0, "atol": 0}
        )
        torch.testing.assert_close(got, expected, **close)
        for one, other in zip(*(n.state_dict().values() for n in self.nets), strict=True):
            torch.testing.assert_close(one, other, **close)
        for mine, theirs in zip(*(n.parameters() for n in self.nets), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            torch.testing.assert_close(mine.grad, theirs.grad, **close)


def step(model: Any, optimizer: Any, x: Tensor, **named: Any) -> list[Tensor]:
    optimizer.zero_grad()
    output = model(x, **named)
    loss = output["logits"].pow(2).mean() + 0.1 * output["logits"].sum()
    # The gradient of the other output is not always there.
    (loss + output["hidden"].sum() if int(x[0, 0] > 0) else loss).backward()
    optimizer.step()
    assert [one.requires_grad for one in output["seen"]] == [False] * 3
    return [output["logits"], *output["seen"]]


def backward(model: Any, _: Any, x: Tensor) -> None:
    model(x)["logits"].sum().backward()


def repeat(pair: Pair, **named: Any) -> None:
    for _ in range(4):
        x = pair.batch(8, 6)
        pair.each(functools.partial(step, x=x, **named))


def accumulate(pair: Pair) -> None:
    for _ in range(4):
        # Only every second backward is followed by a step.
        for some in (pair.batch(8, 6), pair.batch(8, 6)):
            pair.each(functools.partial(backward, x=some))
        pair.each(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad())[1])


def behind_an_encoder(pair: Pair) -> None:
    """The gradients of the inputs stay as they are in later steps."""
    batches = [pair.batch(8, 6) for _ in range(4)]

    def run(model: Any, _: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for x in batches:
            leaf, own = x.clone().requires_grad_(), x.clone().requires_grad_()
            for given in (leaf, own * 2):
                model(given)["logits"].pow(2).sum().backward()
            found += torch.autograd.grad(model(leaf)["hidden"].sum(), [leaf])
            found += [one.grad for one in (leaf, own) if one.grad is not None]
        return found

    pair.each(run)


def criterion(output: Any, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"], wanted)


def with_loss(pair: Pair) -> None:
    for _ in range(4):
        x, y = pair.batch(8, 6), torch.arange(8, device=pair.device) % 3

        def run(model: Any, optimizer: Any, x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = model.loss(criterion, x, y, weight="samples")
            loss.backward()
            optimizer.step()
            result: Tensor = loss.detach()
            return result

        pair.each(run)


def between(pair: Pair) -> None:
    """Two forwards before their backwards, and evaluation between two steps."""
    for _ in range(3):
        x, y = pair.batch(8, 6), pair.batch(8, 6)

        def run(model: Any, _: Any, x: Tensor = x, y: Tensor = y) -> list[Tensor]:
            one, other = model(x)["logits"], model(y)["logits"]
            one.pow(2).sum().backward()
            other.pow(3).sum().backward()
            model.eval()
            with torch.no_grad():
                seen = [model(x)["logits"], *model(x)["seen"]]
            model.train()
            return [one, other, *seen]

        pair.each(run)


def changes(pair: Pair) -> None:
    """Change the module and its arguments between steps."""
    repeat(pair)
    repeat(pair, shift=0.5)
    x = pair.batch(4, 6)
    for _ in range(3):
        pair.each(lambda model, optimizer: step(model, optimizer, x))
    for net in pair.nets:
        net.scale = 3.0
    repeat(pair)
    for net in pair.nets:
        net.first.weight.requires_grad_(False)
    repeat(pair)
    for net in pair.nets:
        net.last.weight.data = net.last.weight.data * 2
    repeat(pair)
    for net in pair.nets:
        net.norm.load_state_dict(copy.deepcopy(nn.BatchNorm1d(8).state_dict()))
    repeat(pair)
    for _ in range(3):

        def run(model: Any, optimizer: Any) -> list[Tensor]:
            # Its memory of converted weights ends with it.
            with torch.autocast(pair.device.type, torch.bfloat16):
                model(x)
                return step(model, optimizer, x)

        pair.each(run)
    for net in pair.nets:
        net.calls = net.calls.float()
    repeat(pair)


CASES: dict[str, tuple[Callable[[Pair], object], dict[str, Any]]] = {
    "steps": (repeat, {}),
    "mean of buffers": (repeat, {"buffers": "mean"}),
    "accumulation": (accumulate, {}),
    "behind an encoder": (behind_an_encoder, {}),
    "loss": (with_loss, {}),
    "forwards between": (between, {}),
    "changes": (changes, {}),
}


def check(places: list[Any], case: str) -> None:
    run, options = CASES[case]
    run(Pair(places, **options))


@by_places
@pytest.mark.parametrize("case", CASES)
def test_trains_as_without_graphs(places: list[str], case: str) -> None:
    check(places, case)


@by_places
def test_the_host_queues_no_operators_of_the_module(places: list[str]) -> None:
    counts = []
    for captures in (True, False):
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(20))).to("virtual:0")
        model = dp.DistributedDataParallel(net, places, capture=captures)
        x = torch.ones(4, 6, device="virtual:0")
        # In the first steps the host waits for a look at the parameters.
        for _ in range(10):
            model(x).sum().backward()
        before = virtual.counters()
        output = model(x)
        between = virtual.counters()
        output.sum().backward()
        counts.append(between["kernels"] - before["kernels"])
        assert virtual.counters()["host_waits"] == before["host_waits"]
    # A copy of the inputs and one of the outputs takes the place of them.
    assert counts[0] <= counts[1] - 18 * len(places)


def test_draws_anew_in_each_replay() -> None:
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).to("virtual:0")
    model = dp.DistributedDataParallel(net, ["virtual:0"], capture=True)
    x = torch.ones(3, 4, device="virtual:0")
    seen = [model(x).detach() == 0 for _ in range(4)]
    assert not torch.equal(seen[2], seen[3])
    # A value that was dropped in forward has no gradient.
    output = model(x)
    output.sum().backward()
    torch.testing.assert_close(
        net[0].bias.grad, 2 * (output != 0).sum(0).to(output), rtol=1e-6, atol=0
    )


class Odd(nn.Module):
    """Does one of the things that a graph does not repeat."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what, self.seen = nn.Linear(6, 6), what, 0.0
        if what == "loose":
            self.table = torch.ones(6, device="virtual:0")
        if what == "hook":
            self.layer.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Any:
        if self.what == "reads":
            self.layer.weight.sum().item()
        if self.what == "keeps":
            self.last = x * 2
        if self.what == "writes":
            x.add_(1)
        output = self.layer(x)
        return output.to_sparse() if self.what == "sparse" else output


REFUSALS = {
    "reads": "replica 0 on virtual:0 cannot be recorded: operation not permitted",
    "writes": "cannot be recorded: the forward writes an input in place",
    "keeps": "the module holds tensors in plain attributes",
    "loose": "the module holds tensors in plain attributes",
    "hook": "'layer' has hooks, which a graph does not call",
    "sparse": "cannot be recorded: operation not permitted",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refuses_what_a_graph_does_not_repeat(what: str) -> None:
    net = Odd(what).to("virtual:0")
    model = dp.DistributedDataParallel(net, ["virtual:0"], capture=True)
    x = torch.ones(2, 6, device="virtual:0")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSALS[what]):
            for _ in range(2):
                model(x)
    if what in ("reads", "writes", "sparse"):
        # The next call after the one that was to be recorded works as usual.
        model(x)
    net.what = ""
    if what == "hook":
        net.layer._forward_hooks.clear()
    for name in ("table", "last"):
        vars(net).pop(name, None)
    expected = net(x)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)


def test_errors_where_a_graph_would_be_wrong(caplog: pytest.LogCaptureFixture) -> None:
    on_virtual: dict[str, Any] = {"device_ids": ["virtual:0"], "capture": True}
    with pytest.raises(ValueError, match="records graphs of CUDA, which cpu does not have"):
        dp.DistributedDataParallel(nn.Linear(6, 3), ["cpu"] * 2, capture=True)
    norms: list[tuple[nn.Module, Any]] = [(nn.Linear(6, 3), "sync"), (nn.SyncBatchNorm(3), "mean")]
    for module, buffers in norms:
        with pytest.raises(ValueError, match="capture=True goes neither with buffers='sync' or"):
            dp.DistributedDataParallel(module, **on_virtual, buffers=buffers)
    net = nn.Linear(6, 3).to("virtual:0")
    model = dp.DistributedDataParallel(net, **on_virtual)
    x = torch.ones(2, 6, device="virtual:0")
    for _ in range(2):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through the same forward"):
        loss.backward()
    loss = model(x).pow(2).sum()
    with torch.no_grad():
        net.weight.mul_(2)
    with pytest.raises(RuntimeError, match="parameters were modified by an inplace operation"):
        loss.backward()
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    torch.testing.assert_close(net.weight.grad, torch.full_like(net.weight, 2.0))
    for number in range(20):
        for _ in range(2):
            model(torch.ones(number + 3, 6, device="virtual:0"))
    assert [record.message for record in caplog.records if "kinds of" in record.message] == [
        "capture=True: the wrapper is called with more than 16 kinds of arguments, and runs all "
        "others without graphs; pad batches to few shapes, and pass numbers that change as tensors"
    ]
    torch.testing.assert_close(model(x), net(x))


def test_a_module_that_counts_its_calls_runs_without_graphs() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input) * self.calls

    net = Counting(6, 3).to("virtual:0")
    model = dp.DistributedDataParallel(net, ["virtual:0"], capture=True)
    x = torch.ones(2, 6, device="virtual:0")
    for number in range(1, 30):
        torch.testing.assert_close(model(x), nn.functional.linear(x, net.weight, net.bias) * number)


def test_refuses_gradients_that_a_graph_would_leave_out() -> None:
    outside = torch.ones(6, device="virtual:0", requires_grad=True)

    class Closure(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input * outside)

    model = dp.DistributedDataParallel(Closure(6, 3).to("virtual:0"), ["virtual:0"], capture=True)
    x = torch.ones(2, 6, device="virtual:0")
    model(x).sum().backward()
    assert outside.grad is not None
    with pytest.raises(RuntimeError, match=r"uses a tensor of shape \(6,\) that requires grad"):
        model(x)


@torch.no_grad()
def test_forwards_on_several_streams_and_in_graphs_of_the_caller() -> None:
    net = nn.Linear(6, 3).to("virtual:0")
    model = dp.DistributedDataParallel(net, ["virtual:0"], capture=True)
    batches = [torch.full((2, 6), float(i), device="virtual:0") for i in range(3)]
    expected = [net(batch) for batch in batches]
    for _ in range(2):
        model(batches[0])
    streams = [torch.Stream("virtual:0") for _ in batches]
    outputs = []
    for stream, batch in zip(streams, batches, strict=True):
        with stream:
            outputs.append(model(batch))
    streams[-1].synchronize()
    # The later ones waited for the memory that all use.
    assert list(map(virtual.pending, streams)) == [0] * 3
    torch.testing.assert_close(outputs, expected)
    on_device: Any = torch.get_device_module("virtual:0")
    graph, given = on_device.VirtualGraph(), torch.zeros(3, 6, device="virtual:0")
    # After one call it would be recorded.
    model(given)
    with on_device.graph(graph):
        output = model(given)
    given.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(output[:2], expected[2])
