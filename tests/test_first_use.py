"""A forward waits for new parameters where it uses them first, and never too late.

In strict mode a value that is used too early is NaN, and the checker of races looks at each use.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DistributedDataParallel, devices, torch_internals, virtual
from dataparallel.replicas import arrivals, values
from tests.models import Calls, assert_all_close

DEVICES = [f"virtual:{i}" for i in range(4)]
#: By device, objects that modules keep outside of themselves.
KEPT: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def _several_flats(monkeypatch: pytest.MonkeyPatch, nothing_compiled: None) -> Iterator[None]:
    """Small modules have many flats, too, and each use of memory is looked at."""
    monkeypatch.setattr(values, "MAX_PIECE_BYTES", 256)
    KEPT.clear()
    with virtual.strict_mode(), virtual.check_races():
        yield
        for index in range(len(DEVICES)):
            torch.accelerator.synchronize(index)


# --- modules -------------------------------------------------------------------------------------


def layers(count: int = 6) -> nn.Sequential:
    pairs = [(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def transformer() -> nn.Module:
    made = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]
    return Calls(lambda own, x: own.stack(x[:, None])[:, 0], stack=nn.Sequential(*made))


def recurrent() -> nn.Module:
    """Its weights are in a list, too."""
    lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
    return Calls(lambda own, x: own.last(own.lstm(x[:, None])[0][:, 0]), lstm=lstm, last=layers(2))


def tied() -> nn.Module:
    made = layers(4)
    made[6].weight = made[0].weight
    return made


class Closing(nn.Module):
    """Has a function that has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(8, 8), layers(3)
        weight = self.rest[4].weight
        self.function = lambda x: x @ weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.rest(self.first(self.function(x)))
        return result


def keeping(keep: Callable[[Tensor], Any], use: Callable[[Any], Tensor]) -> nn.Module:
    """Keep something of the last parameter in the first forward, and use it before all others."""

    def forward(own: Any, x: Tensor) -> Any:
        if x.device not in KEPT:
            KEPT[x.device] = keep(own.rest[4].weight)
        result: Tensor = own.rest(x @ use(KEPT[x.device]))
        return result

    return Calls(forward, rest=layers(3))


def checkpointed(*, reentrant: bool) -> nn.Module:
    def forward(own: Any, x: Tensor) -> Any:
        x = own.first(x)
        if not torch.is_grad_enabled():
            return own.last(own.middle(x))
        return own.last(checkpoint(own.middle, x, use_reentrant=reentrant))

    return Calls(forward, first=layers(2), middle=layers(3), last=layers(2))


def frozen() -> nn.Module:
    made = layers()
    made[2].weight.requires_grad_(False)
    made[4].requires_grad_(False)
    return made


def partly_used() -> nn.Module:
    """A layer takes part if the inputs are large."""

    def forward(own: Any, x: Tensor) -> Any:
        x = own.first(x)
        return own.last(own.middle(x) if own.use else x)

    made: Any = Calls(forward, first=layers(2), middle=layers(2), last=layers(2))
    made.use = True
    return cast(nn.Module, made)


def counting() -> nn.Module:
    """Its clones are new in each forward."""

    def forward(own: Any, x: Tensor) -> Any:
        own.count += 1
        result: Tensor = own.rest(x)
        return result

    made: Any = Calls(forward, rest=layers())
    made.count = 0
    return cast(nn.Module, made)


def by_tables() -> nn.Module:
    """Gets at its parameters in all ways of a dict."""

    def forward(own: Any, x: Tensor) -> Any:
        for index, get in enumerate(READERS):
            weight, bias = get(own.rest[2 * index]._parameters)
            x = nn.functional.linear(x, weight, bias).tanh()
        result: Tensor = own.last(x)
        return result

    return Calls(forward, rest=layers(len(READERS)), last=layers(1))


READERS: list[Callable[[Any], Any]] = [
    lambda table: table.values(),
    lambda table: dict(table).values(),
    lambda table: {**table}.values(),
    lambda table: [value for _, value in table.items()],
    lambda table: (table.get("weight"), table.get("bias", table.get("none"))),
    lambda table: table.copy().values(),
    lambda table: (table | {}).values(),
    lambda table: ({} | table).values(),
    lambda table: copy.copy(table).values(),
    lambda table: [value.detach() for value in copy.deepcopy(table).values()],
    lambda table: (table.setdefault("weight", None), table.setdefault("bias", None)),
    lambda table: (table.setdefault("weight", None), table.setdefault("bias", None)),
]

MODULES: dict[str, Callable[[], nn.Module]] = {
    "layers": layers,
    "transformer": transformer,
    "recurrent": recurrent,
    "tied": tied,
    "closing": Closing,
    "keeping a view": lambda: keeping(lambda w: w.detach().view(8, 8), lambda w: w),
    "keeping a parameter": lambda: keeping(lambda w: w, lambda w: w.detach()),
    "keeping a weak reference": lambda: keeping(weakref.ref, lambda w: w().detach()),
    "checkpointed": lambda: checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: checkpointed(reentrant=True),
    "frozen": frozen,
    "partly used": partly_used,
    "counting": counting,
    "by tables": by_tables,
}


# --- values --------------------------------------------------------------------------------------


class Failure(Exception):
    """The error of a forward that is to fail."""


def fail(module: Any, args: Any) -> None:
    raise Failure


def train(model: Any, module: Any, steps: int = 7, device: str = "cpu") -> list[Tensor]:
    """Steps with evaluation, forwards that fail and small batches between; returns all values."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(2)
    results = []
    for step in range(steps):
        batch = torch.randn(2 if step == 4 else 8, 8, generator=generator, dtype=torch.double)
        x = batch.to(device)
        if hasattr(module, "use"):
            module.use = step % 3 != 1
        if step == 3:
            hook = list(module.modules())[-2].register_forward_pre_hook(fail)
            with pytest.raises(Failure):
                model(x)
            hook.remove()
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        results.append(output.detach().cpu())
        if step in (2, 5):
            model.eval()
            with torch.no_grad():
                results.append(model(x).cpu())
            # Changes of another kind than an optimizer's.
            next(iter(module.parameters())).data.mul_(0.9)
            model.train()
    return [*results, *[parameter.detach().cpu() for parameter in module.parameters()]]


def made(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(1)
    return MODULES[name]().double().to(device)


@pytest.mark.filterwarnings("ignore:.*written through .data")
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("name", MODULES)
def test_training_equals_that_of_the_bare_module(name: str, num_devices: int) -> None:
    bare = made(name)
    expected = train(bare, bare)
    KEPT.clear()
    module = made(name, DEVICES[0])
    model = DistributedDataParallel(module, DEVICES[:num_devices])
    assert_all_close(train(model, module, device=DEVICES[0]), expected)


@pytest.mark.parametrize("slots", [[0, 0, 1, 1], [1, 0, 3, 3]])
def test_replicas_that_share_a_device(slots: list[int]) -> None:
    bare = made("layers")
    expected = train(bare, bare)
    home = DEVICES[slots[0]]
    module = made("layers", home)
    model = DistributedDataParallel(module, [DEVICES[slot] for slot in slots])
    assert_all_close(train(model, module, device=home), expected)


def test_a_forward_that_does_not_wait_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("layers", DEVICES[0])
    model = DistributedDataParallel(module, DEVICES)
    train(model, module, device=DEVICES[0])
    monkeypatch.setattr(arrivals.Gate, "admit", lambda gate, leaf: None)
    with pytest.raises(RuntimeError, match="race on virtual:"):
        train(model, module, device=DEVICES[0])


def test_clones_that_are_made_by_hand_have_their_values() -> None:
    module = made("layers", DEVICES[0])
    model = DistributedDataParallel(module, DEVICES)
    train(model, module, device=DEVICES[0])
    clones = model.replicate(module, DEVICES)
    expected = [parameter.detach().cpu() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for clone in clones[1:]:
        assert_all_close([p.detach().cpu() for p in clone.parameters()], expected)


# --- streams of the module -----------------------------------------------------------------------


def aside(layer: Any, x: Tensor, looked_up: str) -> Tensor:
    """Compute a layer with another stream, which waits for nothing that comes later."""
    current = torch.accelerator.current_stream(x.device)
    side = torch.Stream(x.device)
    side.wait_stream(current)
    if looked_up == "there, and used here":
        with devices.use_stream(side):
            weight, bias = layer.weight, layer.bias
        return nn.functional.linear(x, weight, bias)
    leaves = (layer.weight, layer.bias) if looked_up == "here, and used there" else ()
    with devices.use_stream(side):
        y: Tensor = nn.functional.linear(x, *(leaves or (layer.weight, layer.bias)))
    x.record_stream(side)
    current.wait_stream(side)
    y.record_stream(current)
    return y


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize(
    "looked_up", ["here, and used there", "there, and used here", "there, and used there"]
)
def test_a_module_with_streams_of_its_own(looked_up: str) -> None:
    def forward(own: Any, x: Tensor) -> Any:
        # On the CPU there are no streams. A lookup on another one is seen in any forward.
        has_streams = x.device.type != "cpu"
        if has_streams and looked_up.startswith("there"):
            has_streams = not own.turns.is_early(x.device.index)
        layer = own.rest[10]
        result: Tensor = own.rest(aside(layer, x, looked_up) if has_streams else layer(x))
        return result

    def build() -> nn.Module:
        torch.manual_seed(1)
        return Calls(forward, rest=layers(), turns=Turns()).double()

    bare = build()
    expected = train(bare, bare)
    module = build().to(DEVICES[0])
    model = DistributedDataParallel(module, DEVICES)
    assert_all_close(train(model, module, device=DEVICES[0]), expected)


class Turns:
    """A count of the forwards on each device; all clones share it."""

    def __init__(self) -> None:
        self._numbers = [0] * len(DEVICES)

    def is_early(self, device: int) -> bool:
        self._numbers[device] += 1
        return self._numbers[device] <= 6


# --- waits, counted ------------------------------------------------------------------------------


def waits_of_forward(model: Any, module: nn.Module, device: int) -> list[int]:
    """Return the arrivals for which a device waits before each product of a forward.

    They are the numbers of those on that device, from 0 on; -1 stands for none.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(8, 8, dtype=torch.double, device=DEVICES[0])
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with virtual.record_trace() as trace:
        model(x)
    entries = [entry for entry in trace if entry.device == device]
    arrived = [e.id for e in entries if e.kind == "record" and e.stream]
    found, latest = [], -1
    for entry in entries:
        if entry.kind == "wait" and not entry.stream and entry.id in arrived:
            latest = max(latest, arrived.index(entry.id))
        if entry.name in ("aten::addmm", "aten::mm") and not entry.stream:
            found.append(latest)
    return found


@pytest.mark.parametrize("name", ["layers", "frozen", "counting", "tied"])
def test_a_replica_waits_for_a_flat_before_it_uses_it(name: str) -> None:
    module = made(name, DEVICES[0])
    model = DistributedDataParallel(module, DEVICES)
    # Evaluation comes first, as when a trainer checks whether it works.
    with torch.no_grad():
        model.eval()(torch.randn(8, 8, dtype=torch.double, device=DEVICES[0]))
    model.train()
    waits = waits_of_forward(model, module, device=3)
    assert len(waits) == (4 if name == "tied" else 6)
    assert waits == sorted(waits) and 0 <= waits[0] < waits[-1]
    assert len(set(waits)) >= 3


@pytest.mark.parametrize("name", ["keeping a view", "keeping a weak reference", "closing"])
def test_a_replica_waits_at_the_start_for_what_somebody_keeps(name: str) -> None:
    module = made(name, DEVICES[0])
    waits = waits_of_forward(DistributedDataParallel(module, DEVICES), module, device=3)
    assert waits[0] == max(waits)


def test_a_replica_waits_at_the_start_once_something_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = made("layers", DEVICES[0])
    model = DistributedDataParallel(module, DEVICES)
    assert len(set(waits_of_forward(model, module, device=3))) >= 3
    monkeypatch.setattr(torch_internals, "is_anything_compiled", lambda: True)
    assert len(set(waits_of_forward(model, module, device=3))) == 1
