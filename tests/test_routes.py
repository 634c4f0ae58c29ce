"""Bytes per link, bits and races of sums and broadcasts between several devices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, comm, devices, virtual
from dataparallel.comm import routes
from dataparallel.virtual import device_module

DEVICES = [f"virtual:{i}" for i in range(4)]
MIB = 2**20


def ports() -> tuple[Counter[int], Counter[int]]:
    """Return the bytes that each device has sent, and those that it has received."""
    sent, received = Counter[int](), Counter[int]()
    for (source, destination), num_bytes in virtual.routes().items():
        sent[source] += num_bytes
        received[destination] += num_bytes
    return sent, received


def net(width: int) -> nn.Module:
    """Parameters of many sizes, a frozen one, one of another type, and one with gaps."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    layers[1].bias.requires_grad_(False)
    layers.register_parameter("wide", nn.Parameter(torch.zeros(5, 6).t()))
    layers.register_parameter("gaps", nn.Parameter(torch.zeros(4, 6)[:, ::2]))
    layers.register_parameter("small", nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)))
    return layers


# --- bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_each_port_carries_as_much_as_the_others(wrapper: Any, num_devices: int) -> None:
    module = nn.Sequential(*[nn.Linear(700, 700) for _ in range(12)]).to(DEVICES[0])
    size = sum(parameter.nbytes for parameter in module.parameters())
    model = wrapper(module, DEVICES[:num_devices])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(num_devices, 700, device=DEVICES[0])
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        virtual.reset_counters()
    model(x).sum().backward()
    sent, received = ports()
    # A star sends and receives (num_devices - 1) times as much at the home, and nowhere else.
    assert sent[0] == pytest.approx(min(2, num_devices - 1) * size, rel=0.01)
    assert received[0] == pytest.approx(size, rel=0.01)
    for device in range(1, num_devices):
        assert sent[device] <= 2.1 * size and received[device] <= 2.2 * size
    assert virtual.counters()["copies_device_to_device"] < 40 * num_devices


def trace_backward(wrapper: Any, num_devices: int) -> virtual.Trace:
    """Trace the backward of twelve layers in several buckets."""
    module = nn.Sequential(*[nn.Linear(700, 700) for _ in range(12)]).to(DEVICES[0])
    model = wrapper(module, DEVICES[:num_devices])
    x = torch.randn(num_devices, 700, device=DEVICES[0])
    # In the first ten steps times are measured, too.
    for _ in range(12):
        model(x).sum().backward()
    loss = model(x).sum()
    with virtual.record_trace() as trace:
        loss.backward()
    # Memory that is recorded on another stream is not free before the device has come so far.
    assert not [each for each in trace if each.kind == "use" and each.stream]
    return trace


@pytest.mark.parametrize("num_devices", [2, 4])
def test_no_backward_waits_for_a_sum_and_no_sum_for_a_whole_backward(num_devices: int) -> None:
    trace = trace_backward(DistributedDataParallel, num_devices)
    for device in range(num_devices):
        computing = [each for each in trace if (each.device, each.stream) == (device, 0)]
        names = [each.name or each.kind for each in computing]
        products = [i for i, name in enumerate(names) if name == "aten::mm"]
        # The last layer, whose input needs no gradient, has one product.
        assert len(products) == 2 * 12 - 1
        between = computing[products[0] : products[-1]]
        assert "wait" not in [each.kind for each in between]
        # Copies of a bucket wait for what its own replica has done, not for what it did since.
        marks = [each for each in between if each.kind == "record"]
        assert len(marks) >= 3
        assert {each.thread for each in marks} == {computing[products[0]].thread}


@pytest.mark.parametrize("num_devices", [2, 4])
def test_replicas_with_gradient_edges_wait_for_sums_at_the_end(num_devices: int) -> None:
    trace = trace_backward(DataParallel, num_devices)
    for device in range(1, num_devices):
        computing = [each for each in trace if (each.device, each.stream) == (device, 0)]
        names = [each.name or each.kind for each in computing]
        names = names[names.index("aten::mm") :]
        assert names.count("aten::mm") == 2 * 12 - 1 and names.count("aten::cat") >= 3
        # The pack for the last sum comes before the first wait.
        assert "aten::cat" not in names[names.index("wait") :]


def test_a_broadcast_is_sent_on_from_device_to_device() -> None:
    x = torch.randn(3 * MIB // 4, device=DEVICES[0])
    virtual.reset_counters()
    comm.broadcast(x, DEVICES)
    sent, received = ports()
    assert sent == dict.fromkeys((0, 1, 2), 3 * MIB)
    assert received == dict.fromkeys((1, 2, 3), 3 * MIB)


def test_terms_go_to_owners() -> None:
    terms = [torch.randn(3 * MIB // 4, device=device) for device in DEVICES]
    virtual.reset_counters()
    comm.reduce_add(terms, DEVICES[2])
    assert set(virtual.routes().values()) == {MIB}
    sent, received = ports()
    assert sent == {0: 3 * MIB, 1: 3 * MIB, 3: 3 * MIB, 2: 3 * MIB}
    assert received == dict.fromkeys(range(4), 3 * MIB)


def test_small_tensors_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_gone_through", defaultdict(Counter))
    for _ in range(6):
        comm.broadcast(torch.ones(2, device=DEVICES[0]), DEVICES)
    virtual.reset_counters()
    for _ in range(6):
        comm.reduce_add([torch.ones(4, device=device) for device in DEVICES])
    _, received = ports()
    assert set(received.values()) == {96}


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("home", DEVICES)
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [3, 1, 1, 0, 3], [1, 2]])
def test_sums_have_the_bits_of_replica_order(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, home: str, slots: Sequence[int]
) -> None:
    monkeypatch.setattr(routes, "MIN_PIECE_BYTES", 512)
    sizes = [(33, 5), (1,), (0, 3), (2000,)]
    rows = [[torch.randn(size).to(dtype) * 3**i for size in sizes] for i in range(len(slots))]
    given = [
        [term.to(DEVICES[slot]) for term in row] for slot, row in zip(slots, rows, strict=True)
    ]
    with virtual.strict_mode(), virtual.check_races():
        sums = comm.reduce_add_coalesced(given, home)
        # Afterwards they are the caller's to change.
        for row in given:
            torch._foreach_mul_(row, 2)
    for i, total in enumerate(sums):
        expected = rows[0][i].to(torch.float32 if dtype == torch.bfloat16 else dtype)
        for row in rows[1:]:
            expected = expected + row[i]
        assert total.device == torch.device(home)
        assert torch.equal(total.cpu(), expected.to(dtype))
    assert all(
        torch.equal(term.cpu(), old * 2)
        for row, before in zip(given, rows, strict=True)
        for term, old in zip(row, before, strict=True)
    )


@pytest.mark.parametrize("home", DEVICES)
def test_a_large_term_may_be_changed_after_its_sum(home: str) -> None:
    terms = [torch.randn(3 * MIB // 4, device=device) for device in DEVICES[1:]]
    expected = terms[0].cpu() + terms[1].cpu() + terms[2].cpu()
    with virtual.strict_mode(), virtual.check_races():
        total = comm.reduce_add(terms, home)
        for term in terms:
            term.zero_()
    assert torch.equal(total.cpu(), expected)


@pytest.mark.parametrize("size", [0, 1, 5000, 5 * MIB // 4])
def test_copies_may_be_changed_and_so_may_the_source(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(routes, "MIN_PIECE_BYTES", 512)
    x = torch.randn(size, device=DEVICES[1])
    expected = x.cpu()
    with virtual.strict_mode(), virtual.check_races():
        copies = comm.broadcast(x, [*DEVICES, DEVICES[0]])
        x.zero_()
        for copy in copies[2:4]:
            copy.add_(1)
    for i, copy in enumerate(copies):
        assert copy.device == torch.device([*DEVICES, DEVICES[0]][i])
        assert torch.equal(copy.cpu(), (x.cpu() if i == 1 else expected + (i in (2, 3))))


def train(build: Callable[[nn.Module], nn.Module], width: int) -> list[Tensor]:
    module = net(width).to(DEVICES[0])
    model = build(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, width, device=DEVICES[0])
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in module.parameters()]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("width", [8, 300])
def test_training_equals_that_of_the_bare_module(
    monkeypatch: pytest.MonkeyPatch, wrapper: Any, width: int, seed: int | None
) -> None:
    monkeypatch.setattr(routes, "MIN_PIECE_BYTES", 1024)
    bare = train(lambda module: module, width)
    virtual.set_schedule(seed)
    try:
        with virtual.strict_mode(), virtual.check_races():
            ours = train(lambda module: wrapper(module, DEVICES), width)
    finally:
        virtual.set_schedule(None)
    for one, other in zip(ours, bare, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class OwnEvent(torch.Event):
    """An event as ``torch.cuda.Event``: the part of it that a ``torch.Stream`` sees stays empty."""

    def __new__(cls) -> OwnEvent:
        return super().__new__(cls, "virtual")

    def record(self, stream: torch.Stream | None = None) -> None:
        self._inner = torch.Event("virtual")
        self._inner.record(stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._inner.wait(stream)


class OwnStream(torch.Stream):
    """A stream as ``torch.cuda.Stream``, which records events of its own class."""

    def record_event(self, event: Any = None) -> Any:
        event = OwnEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_routes_wait_for_streams_whose_events_are_of_another_class(
    monkeypatch: pytest.MonkeyPatch, wrapper: Any, num_devices: int
) -> None:
    # A `torch.Stream` that is told to wait for an event of torch.cuda's does not, and says nothing.
    real = device_module.current_stream

    def current_stream(device: Any = None) -> torch.Stream:
        it: Any = real(device)
        names = ("stream_id", "device_index", "device_type")
        own: torch.Stream = OwnStream(**{name: getattr(it, name) for name in names})
        return own

    monkeypatch.setattr(device_module, "current_stream", current_stream)
    assert type(devices.current_stream(torch.device(DEVICES[1]))) is OwnStream
    bare = train(lambda module: module, 300)
    with virtual.strict_mode(), virtual.check_races():
        ours = train(lambda module: wrapper(module, DEVICES[:num_devices]), 300)
    for one, other in zip(ours, bare, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_lazy_conjugates_travel_as_they_are() -> None:
    x = torch.randn(2, 3, dtype=torch.complex64, device=DEVICES[1])
    # The memory of a tensor on the way would be overwritten sooner or later.
    for _ in range(300):
        for copy in comm.broadcast(x.conj(), DEVICES):
            assert torch.equal(copy.cpu(), x.cpu().conj())
    total = comm.reduce_add([x.to(device).conj() for device in DEVICES])
    assert torch.equal(total.cpu(), x.cpu().conj() * 4)


class Views(nn.Module):
    """Two large parameters of which views are added, so that the engine gives both one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(2, 3 * MIB)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first.view(-1) + self.second.view(-1)).view(2, -1)[:, :5] * x


@pytest.mark.parametrize("num_devices", [2, 3])
def test_sums_are_not_written_over_a_gradient_that_is_another_one_s(num_devices: int) -> None:
    module, bare = Views().to(DEVICES[0]), Views().to(DEVICES[0])
    model = DistributedDataParallel(module, DEVICES[:num_devices])
    x = torch.randn(6, 2, 5, device=DEVICES[0])
    for _ in range(3):
        for net, forward in ((module, model), (bare, bare)):
            net.zero_grad()
            with virtual.strict_mode(), virtual.check_races():
                (forward(x) * x).sum().backward()
        for ours, expected in zip(module.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("lazy", [torch.conj, lambda x: torch._neg_view(x)])
def test_lazy_gradients_are_summed(lazy: Callable[[Tensor], Tensor]) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2 * MIB, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(self.weight * x).sum(dim=1)

    def make_lazy(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad = lazy(lazy(leaf.grad).resolve_conj().resolve_neg())
        seen.append(leaf.grad.is_conj() or leaf.grad.is_neg())

    seen: list[bool] = []
    module, bare = Lazy().to(DEVICES[0]), Lazy().to(DEVICES[0])
    model = DistributedDataParallel(module, DEVICES[:3])
    x = torch.randn(3, 1, dtype=torch.complex64, device=DEVICES[0])
    model(x).sum().backward()
    for leaves in model._training.leaves.rows:
        # Before the wrapper's own hook, which takes the gradient, and is made anew now.
        leaves[0].register_post_accumulate_grad_hook(make_lazy)
    for _ in range(3):
        for net, forward in ((module, model), (bare, bare)):
            net.zero_grad()
            with virtual.strict_mode(), virtual.check_races():
                forward(x).square().sum().backward()
        torch.testing.assert_close(module.weight.grad, bare.weight.grad)
    assert all(seen)


@pytest.mark.parametrize("places", [DEVICES[1:], [DEVICES[1]] * 2], ids=["hubs", "no hubs"])
def test_sums_wait_for_what_is_still_done_with_their_memory(places: Sequence[str]) -> None:
    terms = [torch.randn(MIB, device=place) for place in places]
    expected = sum(term.cpu() for term in terms)
    with virtual.strict_mode(), virtual.check_races():
        # Work that is queued may still use the memory. No term is here, whose event would be later.
        torch.ones(5, device=DEVICES[0]).add_(1)
        total = comm.reduce_add(terms, DEVICES[0])
        torch.testing.assert_close(total.cpu(), expected)


def test_parameters_are_written_when_a_forward_without_outputs_has_read_them() -> None:
    class Kept(nn.Module):
        """Has outputs that no other device waits for."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(MIB))

        def forward(self, x: Tensor) -> None:
            kept.append(self.weight * x)

    kept: list[Tensor] = []
    module = Kept().to(DEVICES[0])
    model = DistributedDataParallel(module, DEVICES[:3])
    with virtual.strict_mode(), virtual.check_races(), torch.no_grad():
        for _ in range(3):
            model(torch.ones(3, 1))
            module.weight.add_(1)
        assert sorted(x.mean().item() for x in kept) == [1.0] * 3 + [2.0] * 3 + [3.0] * 3


def broadcast(given: Sequence[Tensor]) -> None:
    comm.broadcast(given[0], DEVICES)


@pytest.mark.parametrize("call", [broadcast, comm.reduce_add])
def test_what_has_failed_half_way_reads_nothing_that_is_written_afterwards(
    call: Callable[[Sequence[Tensor]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, left = routes._Route.copy, iter([True] * 2)

    def copy_some(*args: Any, **kwargs: Any) -> None:
        if not next(left, False):
            raise torch.OutOfMemoryError("no memory")
        copy(*args, **kwargs)

    given = [torch.ones(3 * MIB // 4, device=device) for device in DEVICES]
    with virtual.strict_mode(), virtual.check_races():
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="no mem"):
            patch.setattr(routes._Route, "copy", copy_some)
            call(given)
        for tensor in given:
            tensor.mul_(2)
        assert comm.reduce_add(given).cpu().eq(8).all()
