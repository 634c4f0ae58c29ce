"""Counts how often the host waits for a device in a step: the wrapper, and the bare module."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import dataparallel as dp
from dataparallel import devices, virtual

#: Calls before the counting, in which buckets are arranged and kernels loaded; and counted ones.
WARM_UP, COUNTED = 3, 5

#: What torch says in the mode in which it warns of what waits.
_WARNING = "called a synchronizing"

#: The functions of CUDA's that wait, of which the mode does not know all.
_WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")

_HERE = pathlib.Path(__file__).parents[3]

Call = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], object]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """One training step."""
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Four batches to one step."""
    optimizer.zero_grad()
    quiet: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if isinstance(model, dp.DistributedDataParallel):
        quiet = model.no_sync()
    with quiet:
        for _ in range(3):
            model(x).pow(2).mean().backward()
    model(x).pow(2).mean().backward()
    optimizer.step()


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """A forward without gradients."""
    model.eval()
    with torch.no_grad():
        model(x)


def check_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """A step that is left out if a gradient is not finite, as one would write it."""
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if torch.stack([grad.isfinite().all() for grad in grads]).all():
        optimizer.step()


@dataclass(frozen=True)
class Mode:
    """A way to train: what is counted of ours, and of the bare module if that is another call."""

    call: Call
    options: dict[str, Any] = field(default_factory=dict)
    peer: Call | None = None
    batch_norm: bool = False


MODES = {
    "training step": Mode(step),
    "4 batches, 3 of them in no_sync": Mode(accumulate),
    "evaluation": Mode(evaluate),
    "gradient_as_bucket_view": Mode(step, {"gradient_as_bucket_view": True}),
    'nonfinite="skip"': Mode(step, {"nonfinite": "skip"}, check_and_step),
    **{
        f'batch norm, buffers="{policy}"': Mode(step, {"buffers": policy}, batch_norm=True)
        for policy in ("replica0", "mean", "sync")
    },
    "batch norm, evaluation": Mode(evaluate, batch_norm=True),
}


@dataclass(frozen=True)
class Row:
    """One mode on some devices: waits in a call of ours and of the bare module, by who counts.

    ``places`` are the lines in which ours waits, as far as they are known.
    """

    devices: tuple[str, ...]
    mode: str
    ours: dict[str, float]
    bare: dict[str, float]
    places: tuple[str, ...]


def count(names: tuple[str, ...], mode: str) -> Row:
    """Count the waits of one mode on devices, the first of which is an accelerator."""
    what = MODES[mode]
    slots = devices.parse_devices(names)
    net, bare = (_net(what.batch_norm).to(slots[0]) for _ in range(2))
    model = dp.DistributedDataParallel(net, slots, **what.options)
    x = torch.randn(32, 64, device=slots[0])
    ours, places = counted(_repeated(model, what.call, x), slots[0])
    model.close()
    theirs, _ = counted(_repeated(bare, what.peer or what.call, x), slots[0])
    return Row(names, mode, ours, theirs, places)


def _net(batch_norm: bool) -> nn.Module:
    torch.manual_seed(0)
    second = nn.BatchNorm1d(64) if batch_norm else nn.LayerNorm(64)
    return nn.Sequential(nn.Linear(64, 64), second, nn.ReLU(), nn.Linear(64, 3))


def _repeated(model: nn.Module, call: Call, x: torch.Tensor) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def repeat(times: int) -> None:
        for _ in range(times):
            call(model, optimizer, x)

    return repeat


def counted(
    repeat: Callable[[int], None], device: torch.device
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Waits in a call, by who has counted them, and the lines that most of them are in."""
    repeat(WARM_UP)
    devices.synchronize(device)
    if device.type == "virtual":
        before = virtual.counters()["host_waits"]
        repeat(COUNTED)
        waits = virtual.counters()["host_waits"] - before
        return {"waits": waits / COUNTED}, ()
    warned = _warned(repeat)
    called = _called(repeat)
    found = {"warned": warned.total() / COUNTED}
    found |= {name: called[name] / COUNTED for name in _WAITING}
    return found, tuple(place for place, _ in warned.most_common(3))


def _warned(repeat: Callable[[int], None]) -> Counter[str]:
    """Where torch has warned, and how often."""
    found: Counter[str] = Counter()

    def note(message: object, category: object, filename: str, line: int, *more: object) -> None:
        if _WARNING in str(message):
            place = pathlib.Path(filename)
            inside = place.is_relative_to(_HERE)
            found[f"{place.relative_to(_HERE) if inside else place.name}:{line}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            repeat(COUNTED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _called(repeat: Callable[[int], None]) -> Counter[str]:
    """Which functions of CUDA's that wait were called, by all threads."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    # Of one cycle it makes no difference whether events are kept; torch 2.11 warns where not.
    with profile(activities=activities, acc_events=True) as profiled:
        with record_function("counted"):
            repeat(COUNTED)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type.name == "CPU"]
    (span,) = [event.time_range for event in events if event.name == "counted"]
    return Counter(
        event.name for event in events if span.start <= event.time_range.start <= span.end
    )


def main() -> None:
    """Write a row for each mode on each set of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", action="append", required=True, help="of one set")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    rows = []
    for names in arguments.devices:
        for mode in MODES:
            print(f"{names}: {mode}", file=sys.stderr, flush=True)
            rows.append(asdict(count(tuple(names.split(",")), mode)))
            # What comes after may fail.
            pathlib.Path(arguments.output).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
