"""Torch's names of devices: CUDA_VISIBLE_DEVICES, without a context of CUDA.

NVML lists all devices, in the order of the bus. Torch sees those that CUDA_VISIBLE_DEVICES names,
in its order. Numbers in it count in the order of CUDA, which is by speed unless CUDA_DEVICE_ORDER
is PCI_BUS_ID. With devices of one kind the two orders are the same. This file finds the names that
a program would use if it were started with this environment. A run that is attached tells the
identities of its devices, and then nothing has to be found.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class DeviceIdentity:
    """The identity of a device, which tells it from others."""

    #: Its UUID, or another name if that cannot be read.
    key: str
    #: Its kind.
    name: str
    #: The UUIDs of its MIG instances.
    instances: tuple[str, ...] = ()


@dataclass(frozen=True)
class Names:
    """Torch's names of the devices.

    Attributes:
        by_key: Identity of a device or an instance: its name; those that torch does not see are
            left out.
        notes: Doubts about the names.
    """

    by_key: Mapping[str, str]
    notes: tuple[str, ...] = ()


def visible_devices(environment: Mapping[str, str], devices: Sequence[DeviceIdentity]) -> Names:
    """Name each device as a program with this environment would.

    The devices are in NVML's order. The list ends at the first entry that names no device, and is
    empty if it names one twice, as it is for CUDA.
    """
    text = environment.get(_VISIBLE)
    if text is None:
        return _all(environment, devices)
    text = text.strip()
    if text.startswith(("GPU-", "MIG-")):
        keys = _by_identity(text, devices)
        counts_by_order = False
    else:
        keys = [_first_instance(device) for device in _by_number(text, devices)]
        counts_by_order = bool(keys)
    return Names(_numbered(keys), _notes(environment, devices) if counts_by_order else ())


def named_by_run(devices: Sequence[str], uuids: Sequence[str | None]) -> dict[str, str]:
    """Return a run's names of its devices, by identity without its prefix.

    Torch tells the identity of an instance with the prefix of a device.
    """
    pairs = zip(devices, uuids, strict=False)
    return {bare(uuid): device for device, uuid in pairs if uuid is not None}


def bare(uuid: str) -> str:
    """Return an identity without its prefix."""
    return re.sub(r"^(GPU|MIG)-", "", uuid)


def _all(environment: Mapping[str, str], devices: Sequence[DeviceIdentity]) -> Names:
    divided = [device for device in devices if device.instances]
    if divided:
        # CUDA takes only the first instance, unless it is told which.
        note = (
            f"without {_VISIBLE} a program sees one MIG instance only; name the one that is "
            f"wanted: {_VISIBLE}={divided[0].instances[0]}"
        )
        return Names(_numbered([divided[0].instances[0]]), (note,))
    return Names(_numbered([device.key for device in devices]), _notes(environment, devices))


def _numbered(keys: Sequence[str]) -> dict[str, str]:
    if len(set(keys)) < len(keys):
        return {}
    return {key: f"cuda:{index}" for index, key in enumerate(keys)}


def _notes(environment: Mapping[str, str], devices: Sequence[DeviceIdentity]) -> tuple[str, ...]:
    if len({device.name for device in devices}) < 2 or environment.get(_ORDER) == "PCI_BUS_ID":
        return ()
    return (
        "the devices are of different kinds, and CUDA counts the fastest first: the numbers shown "
        f"may differ from torch's; export {_ORDER}=PCI_BUS_ID, for the training too",
    )


def _first_instance(device: DeviceIdentity) -> str:
    return device.instances[0] if device.instances else device.key


def _by_number(text: str, devices: Sequence[DeviceIdentity]) -> list[DeviceIdentity]:
    """Return the devices up to the first entry that is no number, or no device's."""
    numbers: list[int] = []
    for entry in text.split(","):
        # CUDA reads as far as there are digits: "1gpu" is 1.
        match = re.match(r"\s*\+?(\d+)", entry)
        if match is None:
            break
        numbers.append(int(match[1]))
    if len(set(numbers)) < len(numbers):
        return []
    known = itertools.takewhile(lambda number: number < len(devices), numbers)
    return [devices[number] for number in known]


def _by_identity(text: str, devices: Sequence[DeviceIdentity]) -> list[str]:
    """Return the devices whose identity begins like the entries, up to the first misfit."""
    keys = [key for device in devices for key in (device.key, *device.instances)]
    found: list[str] = []
    for entry in text.split(","):
        fitting = [key for key in keys if key.startswith(entry)] if len(entry) > 4 else []
        if not entry.startswith(text[:4]) or len(fitting) != 1:
            break
        found += fitting
    return found
