"""A check of copies between accelerators: another device gets what one has sent.

Direct copies between GPUs may silently change bytes where an IOMMU or PCIe ACS redirects them; CUDA
still offers them. See "Peer-to-Peer Memory Access" in NVIDIA's CUDA Programming Guide.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from dataparallel import devices as _devices
from dataparallel.errors import lines

#: From a device to another one.
Pair: TypeAlias = tuple[torch.device, torch.device]

#: Set to 0, it keeps wrappers from checking copies.
SWITCH = "DATAPARALLEL_CHECK_COPIES"

REMEDY = (
    "Often the machine's IOMMU or PCIe ACS redirects direct copies. Turn the IOMMU off in the BIOS "
    "or with the kernel's option intel_iommu=off or amd_iommu=off. Turn ACS off there or "
    "with setpci (see 'PCI Access Control Services' in NVIDIA's page on NCCL's troubles). In a "
    "virtual machine ask the provider. Until `dataparallel doctor` finds no fault, start one "
    "process per GPU with torchrun and NCCL_P2P_DISABLE=1, which copies through the host"
)

_NUM_BYTES = 2**20
_sound: set[Pair] = set()
_checking = threading.Lock()


class Fault(NamedTuple):
    """The difference between what one device has sent and what another has got."""

    pair: Pair
    num_bytes: int
    #: In words of 4 bytes: how many differ, which is the first, its value there and here.
    num_wrong: int
    first: int
    sent: int
    received: int

    def __str__(self) -> str:
        source, destination = self.pair
        return (
            f"{source} -> {destination}: {self.num_wrong:,} of {self.num_bytes // 4:,} words of 4 "
            f"bytes differ; word {self.first:,} left as {self.sent & 0xFFFFFFFF:#010x} and came as "
            f"{self.received & 0xFFFFFFFF:#010x}"
        )


def pairs_of(devices: Iterable[torch.device]) -> list[Pair]:
    """Return all ordered pairs of different accelerators."""
    distinct = [device for device in dict.fromkeys(devices) if _devices.is_accelerator(device)]
    return [(one, other) for one in distinct for other in distinct if one != other]


def find_faults(pairs: Sequence[Pair], num_bytes: int, *, at_once: bool) -> list[Fault]:
    """Copy a pattern of each pair's own between its devices, and compare.

    Args:
        pairs: The sources and destinations.
        num_bytes: The size of each copy, a multiple of 4.
        at_once: True if all copies may run at the same time; else one follows the other.
    """
    faults: list[Fault] = []
    begun = []
    for number, (source, destination) in enumerate(pairs):
        streams = [
            torch.Stream(device) if at_once else _devices.copy_stream(device)
            for device in (source, destination)
        ]
        with _devices.use_streams(filter(None, streams)):
            sent = _pattern(source, num_bytes, number)
            received = torch.zeros_like(sent, device=destination)
            received.copy_(sent, non_blocking=True)
            begun.append((streams, sent, received, _pattern(destination, num_bytes, number)))
        if not at_once:
            _compare(pairs[number], begun.pop(), faults)
    for pair, copy in zip(pairs, begun, strict=False):
        _compare(pair, copy, faults)
    return faults


def _pattern(device: torch.device, num_bytes: int, number: int) -> torch.Tensor:
    """Return words that differ from each other, and from those of other numbers."""
    words = torch.arange(1, num_bytes // 4 + 1, dtype=torch.int32, device=device)
    return words.mul_(2654435761 - 2**32).add_(number * 40503)


def _compare(
    pair: Pair,
    copy: tuple[Sequence[_devices.Stream], torch.Tensor, torch.Tensor, torch.Tensor],
    faults: list[Fault],
) -> None:
    streams, _, received, expected = copy
    with _devices.use_streams(filter(None, streams)):
        wrong = received != expected
        count = int(wrong.sum())
        if count:
            first = int(wrong.to(torch.uint8).argmax())
            values = int(expected[first]), int(received[first])
            faults.append(Fault(pair, received.nbytes, count, first, *values))


def check_copies(devices: Iterable[torch.device]) -> None:
    """Check copies between some devices, of each pair once in the life of the process.

    Raises:
        RuntimeError: A copy has changed bytes.
    """
    if os.environ.get(SWITCH) == "0":
        return
    pairs = [pair for pair in pairs_of(devices) if pair not in _sound]
    if not any(map(_devices.has_hardware_links, devices_of(pairs))):
        return
    with _checking:
        faults = find_faults(pairs, _NUM_BYTES, at_once=False)
    if faults:
        raise RuntimeError(
            "copies between devices do not arrive as they leave, so training would be silently "
            f"wrong:{lines(map(str, faults))}\n{REMEDY}. {SWITCH}=0 leaves this check out."
        )
    _sound.update(pairs)


def devices_of(pairs: Iterable[Pair]) -> set[torch.device]:
    """Return the devices of some pairs."""
    return {device for pair in pairs for device in pair}
