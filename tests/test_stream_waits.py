"""Every wait between streams is needed: without any one of them the numbers are wrong.

The virtual devices defer work in strict mode for as long as they may and poison freed memory. So a
wait that is left out shows. A training step is run with each place in the code that orders streams
disabled in turn.
"""

from __future__ import annotations

import gc
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel, comm, devices, virtual

Site = tuple[str, str, int]

DEVICES = [f"virtual:{i}" for i in range(3)]
ORDERING = ("wait_stream", "record_stream")
# Needed if leaves have another stream than the backward, and buckets are sent from the device. With
# virtual devices the host sends them, and waits for them in any case. Recorded replicas, and the
# forwards, backwards and items of callers on other streams, have tests of their own.
NOT_SHOWN = ("round.py", "capture.py", "functions.py", "values.py", "context.py")


@contextmanager
def without(left_out: Site | None, seen: set[Site]) -> Iterator[None]:
    """Notes where streams are ordered, and leaves out what one line orders."""

    def spy(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            frame = sys._getframe(1)
            site = name, pathlib.Path(frame.f_code.co_filename).name, frame.f_lineno
            seen.add(site)
            if site != left_out:
                real(*args)

        return call

    with ExitStack() as stack:
        for name in ORDERING:
            real = getattr(devices, name)
            stack.enter_context(mock.patch.object(devices, name, spy(name, real)))
        yield


def train() -> list[Tensor]:
    """Two steps over three devices; returns outputs, gradients and parameters on the host."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICES[0])
    model = DataParallel(module, DEVICES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Tensor] = []
    for _ in range(2):
        x = torch.randn(9, 4, device=DEVICES[0]) * 2
        pinned = torch.randn(9, 4).pin_memory()
        optimizer.zero_grad()
        output = model(x) + model(pinned)
        (output * output).mean().backward()
        optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results += [output.detach().cpu(), *[grad.cpu() for grad in grads]]
    model.close()
    return [*results, *[p.detach().cpu() for p in model.parameters()]]


def exchange() -> list[Tensor]:
    """Results of comm on memory that is freed, and written again, as soon as it may be."""
    results: list[Tensor] = []
    for _ in range(3):
        made = torch.ones(1000, device=DEVICES[0]) * 3
        copies = comm.broadcast(made, DEVICES)
        del made
        reused = [torch.zeros(1000, device=device) for device in DEVICES]
        sums = [copy + 1 for copy in copies]
        del copies
        comm.broadcast(torch.full((1000,), 7.0, device=DEVICES[0]), DEVICES)
        results += [tensor.cpu() for tensor in (*sums, *reused)]
    return results


def gather_while_another_device_is_read() -> list[Tensor]:
    """A part is where the result is, and the host reads from a device of another part first."""
    parts = [torch.zeros(1000, device=device) + i for i, device in enumerate(DEVICES)]
    whole = comm.gather(parts, destination=DEVICES[0])
    return [parts[1].cpu(), whole.cpu()]


def copy_to_the_host() -> list[Tensor]:
    """The host uses what it has got at once."""
    parts = [torch.zeros(1000, device=device) + i for i, device in enumerate(DEVICES)]
    (copy,) = comm.broadcast(parts[1], ["cpu"])
    return [copy * 2, comm.gather(parts, destination="cpu") * 2]


class Held(nn.Linear):
    """A layer whose forward waits for the host, if it has been told to."""

    gates: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.gates and len(x) == 1:
            entered, left = self.gates
            entered.set()
            left.wait(60)
        return super().forward(x)


def serve() -> list[Tensor]:
    """Items of two callers on streams of their own, right after the module has changed."""
    torch.manual_seed(0)
    net = Held(4, 3).to(DEVICES[0]).eval()
    results: list[Tensor] = []
    with dataparallel.Pool(net, DEVICES[:2]) as pool:
        for _ in range(2):
            results += pool.map([torch.full((5, 4), float(i)).pin_memory() for i in range(6)])
            with torch.no_grad():
                # All, so that nobody compares values, for which the host would wait.
                for parameter in net.parameters():
                    parameter.mul_(2)
            net.gates = entered, left = threading.Event(), threading.Event()
            first = pool.submit(torch.ones(1, 4))
            entered.wait(60)
            with torch.Stream(DEVICES[0]), torch.Stream(DEVICES[1]):
                second = pool.submit(torch.ones(2, 4))
            results.append(second.result())
            left.set()
            results.append(first.result())
            net.gates = ()
        rows = [torch.full((5, 4), float(i)) for i in range(4)]
        # Items are made on the stream on which they are pulled.
        later = pool.map(row.to(DEVICES[0], non_blocking=True) * 2 for row in rows)
        with torch.Stream(DEVICES[0]):
            results += later
    return results


SCENARIOS = (train, exchange, gather_while_another_device_is_read, copy_to_the_host, serve)


def run(left_out: Site | None, seen: set[Site]) -> list[Tensor]:
    """Return the results of the scenarios in strict mode."""
    with without(left_out, seen), virtual.strict_mode():
        return [tensor for scenario in SCENARIOS for tensor in scenario()]


def forget() -> None:
    """Let nothing that is left of a run that went wrong race with what comes later."""
    with virtual.check_races(False):
        gc.collect()


def test_each_wait_is_needed() -> None:
    found: set[Site] = set()
    expected = run(None, found)
    for one, other in zip(expected, [t for s in SCENARIOS for t in s()], strict=True):
        assert torch.equal(one, other), "strict mode changes no result"
    found = {site for site in found if site[1] not in NOT_SHOWN}
    unneeded = []
    for site in sorted(found):
        forget()
        try:
            results = run(site, set())
        except RuntimeError:
            continue
        if all(map(torch.equal, results, expected)):
            unneeded.append(site)
    forget()
    assert not unneeded, f"nothing went wrong without {unneeded}"
    # A wait that no scenario reaches would be one that no test needs.
    root = pathlib.Path(dataparallel.__file__).parent
    written = {
        (name, path.name, number)
        for path in root.rglob("*.py")
        if path.name not in ("devices.py", *NOT_SHOWN) and "virtual" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for name in ORDERING
        if f"devices.{name}(" in line
    }
    assert written == found
