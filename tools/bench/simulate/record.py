"""Traces of training steps on virtual devices in dry mode, and their times on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataparallel import DataParallel, DistributedDataParallel, virtual
from dataparallel.reducer.options import OriginalsKind
from dataparallel.tools.bench.simulate.machine import SimulatedMachine
from dataparallel.tools.bench.simulate.player import Instruction
from dataparallel.virtual import TraceEntry

#: The steps before the trace begins: the first ones see which parameters arrive when.
_WARM_UP = 3
#: The steps of a trace: one step may leave something that the next one hides.
STEPS = 3
#: The beginning of the marks of gradients.
GRADIENT = "gradient "
#: The kinds of entries that have to do with memory alone.
OF_MEMORY = ("allocate", "use", "free")


@dataclass(frozen=True)
class Model:
    """A stack of transformer layers.

    Attributes:
        layers: How many; each has 12 parameters.
        width: The features of a layer, a multiple of 4.
        tokens: The length of a sequence.
        samples: The sequences per device.
    """

    layers: int
    width: int
    tokens: int = 64
    samples: int = 4

    @classmethod
    def of_size(cls, parameters: int, layers: int) -> Model:
        """Return the model with about so many parameters."""
        width = max(4, round((parameters / (12 * layers)) ** 0.5 / 4) * 4)
        return cls(layers, width)

    def build(self, device: str) -> nn.Module:
        """Make the module on a device."""
        with torch.device(device):
            layers = [
                nn.TransformerEncoderLayer(
                    self.width, 4, 4 * self.width, batch_first=True, dropout=0.0
                )
                for _ in range(self.layers)
            ]
        return nn.Sequential(*layers)


@dataclass(frozen=True)
class StepTrace:
    """The trace of some steps.

    Attributes:
        entries: The trace. Marks are ``"step"``, ``"forward"``, ``"backward"``, ``"optimizer"``,
            and ``"gradient I"`` where the bare module has the gradient of parameter I.
        sizes: The bytes of each parameter.
        held: By device the bytes that were in use before.
    """

    entries: Sequence[TraceEntry]
    sizes: Sequence[int]
    held: Sequence[int]


#: By name on the command line.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}


def record(model: Model, devices: int, wrapper: str, optimizer_name: str = "sgd") -> StepTrace:
    """Record steps of ``"bare"`` on one device, or of ours.

    Ours are ``"ddp"``, ``"spread"`` with originals on all devices, ``"captured"``, and ``"dp"``.

    Raises:
        ValueError: More devices are wanted than there are virtual ones.
    """
    if not virtual.is_enabled():
        virtual.enable(max(devices, 8))
    if virtual.device_count() < devices:
        raise ValueError(
            f"{devices} devices are wanted, and {virtual.device_count()} virtual ones are enabled"
        )
    with virtual.dry_mode(), virtual.check_races(False):
        module = model.build("virtual:0")
        slots = [f"virtual:{i}" for i in range(devices)]
        trained = _wrap(module, slots, wrapper)
        make: Any = OPTIMIZERS[optimizer_name]
        optimizer = make(module.parameters(), lr=1e-3)
        samples = model.samples * (1 if wrapper == "bare" else devices)
        batch = torch.empty(samples, model.tokens, model.width, device="virtual:0")
        traces: list[virtual.Trace] = []

        def mark(name: str) -> None:
            for trace in traces:
                trace.mark(name)

        if wrapper == "bare":
            for i, parameter in enumerate(module.parameters()):
                register: Any = parameter.register_post_accumulate_grad_hook
                register(lambda _, i=i: mark(f"{GRADIENT}{i}"))
        for _ in range(_WARM_UP):
            _step(trained, optimizer, batch, mark)
        held = [torch.accelerator.memory_allocated(slot) for slot in slots]
        with virtual.record_trace() as trace:
            traces.append(trace)
            for _ in range(STEPS):
                _step(trained, optimizer, batch, mark)
            mark("step")
        sizes = [parameter.nbytes for parameter in module.parameters()]
        return StepTrace(list(trace), sizes, held)


def _wrap(module: nn.Module, slots: Sequence[str], wrapper: str) -> Any:
    if wrapper == "bare":
        return module
    if wrapper == "dp":
        return DataParallel(module, slots)
    originals: OriginalsKind = "spread" if wrapper == "spread" else "home"
    captured = wrapper == "captured"
    return DistributedDataParallel(module, slots, originals=originals, capture=captured)


def _step(trained: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor, mark: Any) -> None:
    mark("step")
    optimizer.zero_grad()
    mark("forward")
    loss = trained(batch).square().mean()
    mark("backward")
    loss.backward()
    mark("optimizer")
    optimizer.step()


# --- times ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """The times of kernels and of the host on a machine.

    Products of matrices take ``scale`` times as long as the roofline says, by phase. So forward and
    backward of the bare module take the times that were asked for.
    """

    machine: SimulatedMachine
    scale: dict[str, float]

    @classmethod
    def of(cls, machine: SimulatedMachine, bare: StepTrace, wanted: dict[str, float]) -> Timing:
        """Find the scale with which the phases of the bare module take the wanted seconds.

        Raises:
            ValueError: The kernels that are limited by memory take longer.
        """
        scale = {}
        for phase, seconds in wanted.items():
            timing = cls(machine, {})
            kernels = [
                (entry.flops > 0, timing.kernel(entry, phase))
                for own, entry in phases(bare.entries)
                if own == phase and entry.kind == "kernel"
            ]
            products = sum(each for is_product, each in kernels if is_product) / STEPS
            rest = sum(each for is_product, each in kernels if not is_product) / STEPS
            if seconds <= rest:
                raise ValueError(
                    f"the {phase} pass cannot take {seconds * 1e3:g} ms on {machine.name}: its "
                    f"kernels that are limited by memory take {rest * 1e3:.3g} ms by the roofline"
                )
            scale[phase] = (seconds - rest) / products
        return cls(machine, scale)

    def kernel(self, entry: TraceEntry, phase: str) -> float:
        """Return the seconds of a kernel."""
        seconds = self.machine.kernel_seconds(entry.read + entry.written, entry.flops)
        return seconds * (self.scale.get(phase, 1.0) if entry.flops else 1.0)

    def host(self, entry: TraceEntry, phase: str) -> float:
        """Return the seconds that the host takes for an entry."""
        machine = self.machine
        costs = {
            "kernel": machine.launch_backward if phase == "backward" else machine.launch,
            "copy": machine.launch_copy,
            "record": machine.launch_event,
            "wait": machine.launch_event,
            "replay": machine.launch_graph,
        }
        return 0.0 if entry.replayed else costs.get(entry.kind, 0.0)

    def tasks(self, entries: Sequence[TraceEntry]) -> list[Instruction]:
        """Return the tasks of a trace for a player."""
        return [self.task(entry, phase) for phase, entry in phases(entries)]

    def task(self, entry: TraceEntry, phase: str) -> Instruction:
        """Return the task of one entry."""
        return Instruction(
            entry.kind,
            entry.name,
            entry.device,
            entry.stream,
            self.kernel(entry, phase) if entry.kind == "kernel" else 0.0,
            entry.written if entry.kind in OF_MEMORY else entry.read,
            entry.source,
            entry.destination,
            entry.id,
            self.host(entry, phase),
            entry.thread,
        )


def phases(entries: Sequence[TraceEntry]) -> Iterator[tuple[str, TraceEntry]]:
    """Yield each entry with the phase that it is in."""
    phase = ""
    for entry in entries:
        if entry.kind == "mark" and not entry.name.startswith(GRADIENT):
            phase = entry.name
        yield phase, entry
