"""Bytes per port, copies and staging of a step on 2, 4 and 8 devices, counted in dry mode."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import nn

from dataparallel import DataParallel, DistributedDataParallel, virtual
from dataparallel.tools.bench.simulate.record import Model
from tests.cluster import Cluster
from tests.free_threading import LATER

NUM_DEVICES = (2, 4, 8)
WRAPPERS = ("DistributedDataParallel", "captured", "DataParallel")
#: Numbers of parameters. Pieces of the larger model are as large as they get.
SMALL, LARGE = 10**8, 10**9
#: Steps that are counted, by the number of parameters: hubs take turns, so one step is not even.
STEPS = {SMALL: 7, LARGE: 1}
#: The most MiB that streams for copies hold at a time on a device, as far as the host has come.
MOST_STAGING = 215


class Counts(NamedTuple):
    """The counts of a step of a wrapper.

    Attributes:
        sent: The bytes that leave each device, in multiples of the parameters'; a mean.
        received: The same of those that come.
        backward: The copies between devices in a backward, without those of gradients of chunks.
        sums: How many of them come home.
        forward: The copies in a forward, without those of chunks and outputs.
        broadcasts: How many of them leave the home.
        staging: The most MiB on a device of streams for copies.
    """

    sent: list[float]
    received: list[float]
    backward: int
    sums: int
    forward: int
    broadcasts: int
    staging: float


Counted: TypeAlias = dict[tuple[str, int, int], Counts]


def count(wrapper: str, num_devices: int, num_parameters: int) -> Counts:
    """Count steps of a stack of transformer layers on virtual devices in dry mode."""
    places, steps = [f"virtual:{i}" for i in range(num_devices)], STEPS[num_parameters]
    sent, received = Counter[int](), Counter[int]()
    with virtual.dry_mode(), virtual.check_races(False):
        net = Model.of_size(num_parameters, 6)
        # A batch that is small beside the parameters.
        net = Model(net.layers, net.width, tokens=1, samples=1)
        module = net.build(places[0])
        size = sum(parameter.nbytes for parameter in module.parameters())
        model = wrap(wrapper, module, places)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = torch.empty(num_devices, 1, net.width, device=places[0])
        # The first steps see the order of the gradients; captured ones are recorded.
        for step in range(3 + steps):
            if step == 3:
                virtual.reset_counters()
            optimizer.zero_grad()
            with virtual.record_trace() as forward:
                loss = model(x).square().mean()
            with virtual.record_trace() as backward:
                loss.backward()
            optimizer.step()
        for (source, destination), num_bytes in virtual.routes().items():
            sent[source] += num_bytes
            received[destination] += num_bytes
    chunks = num_devices - 1
    there, back = copies(forward), copies(backward)
    return Counts(
        [sent[i] / steps / size for i in range(num_devices)],
        [received[i] / steps / size for i in range(num_devices)],
        len(back) - chunks,
        sum(entry.destination == 0 for entry in back),
        len(there) - 2 * chunks,
        sum(entry.source == 0 for entry in there) - chunks,
        staging([*forward, *backward]),
    )


def wrap(wrapper: str, module: nn.Module, places: list[str]) -> Any:
    if wrapper == "DataParallel":
        return DataParallel(module, places)
    return DistributedDataParallel(module, places, capture=wrapper == "captured")


def copies(trace: Iterable[virtual.TraceEntry]) -> list[virtual.TraceEntry]:
    """Return the copies between devices."""
    return [
        each for each in trace if each.kind == "copy" and min(each.source, each.destination) >= 0
    ]


def staging(trace: Iterable[virtual.TraceEntry]) -> float:
    """Return the most MiB of streams for copies that a device holds at a time.

    A block of such a stream, which nothing else uses, is free for its next operation.
    """
    blocks, held, most = dict[tuple[int, int], int](), Counter[int](), 0
    for entry in trace:
        place = entry.device, entry.id
        if entry.kind == "allocate" and entry.stream:
            blocks[place] = entry.written
            held[entry.device] += entry.written
            most = max(most, held[entry.device])
        elif entry.kind == "free":
            held[entry.device] -= blocks.pop(place, 0)
    return most / 2**20


def count_all(rank: int, world_size: int) -> Counted:
    """Count all cases, in a process with eight devices."""
    virtual.enable(max(NUM_DEVICES))
    cases = [(name, n, SMALL) for name in WRAPPERS for n in NUM_DEVICES]
    cases += [(WRAPPERS[0], n, LARGE) for n in NUM_DEVICES]
    return {case: count(*case) for case in cases}


@pytest.fixture(scope="module")
def counted() -> Counted:
    with contextlib.closing(Cluster()) as cluster:
        found: Counted
        (found,) = cluster.run(count_all, 1, init_group=False)
    return found


#: As far as hubs may be ahead of each other: by a piece, the terms of which come from all others.
UNEVEN = 0.03
EACH = pytest.mark.parametrize("name", WRAPPERS)
ON = pytest.mark.parametrize("num_devices", NUM_DEVICES)


@EACH
@ON
def test_no_port_carries_the_parameters_more_than_twice(
    counted: Counted, name: str, num_devices: int
) -> None:
    counts = counted[name, num_devices, SMALL]
    others = [*counts.sent[1:], *counts.received[1:]]
    home = max(counts.sent[0], counts.received[0])
    # A star would send and receive (num_devices - 1) times as much at the home.
    assert max(home, *others) <= min(2, num_devices - 1) + UNEVEN
    assert home <= 1.15 * max(others)


@EACH
@ON
def test_a_piece_is_copied_less_than_twice_per_device(
    counted: Counted, name: str, num_devices: int
) -> None:
    """The terms of a piece go to its hub and the sum goes home, and values go to all others."""
    counts, others = counted[name, num_devices, SMALL], num_devices - 1
    # The home of two devices adds up itself.
    assert counts.backward == counts.sums * (num_devices if others > 1 else 1)
    assert counts.forward == counts.broadcasts * others
    # Some pieces per hub are even shares; each further one costs the host its copies.
    assert max(counts.sums, counts.broadcasts) <= max(16 * others, 40)


@ON
@pytest.mark.parametrize(
    ("name", "size"), [(WRAPPERS[0], SMALL), (WRAPPERS[1], SMALL), (WRAPPERS[0], LARGE)]
)
def test_staging_memory_is_bounded(
    counted: Counted, name: str, size: int, num_devices: int
) -> None:
    assert counted[name, num_devices, size].staging <= MOST_STAGING * (1 + LATER)
