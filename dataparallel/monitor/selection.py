"""The choice of devices to look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from dataparallel.errors import listed
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.sample import Sample

#: The shortest prefix of an identity that a user may give; a shorter one would fit all devices.
_SHORTEST_IDENTITY = 5


class Selection:
    """The choice that leaves out devices that nobody wants to see, and the processes on them.

    Example::

        Selection(["0", "cuda:2"]).devices(monitor.devices())

    Args:
        only: Numbers of ``nvidia-smi`` ("0", "0:1" for the second MIG instance of it), names
            ("cuda:1", "cpu"), or how identities begin ("GPU-5f3a", "MIG-9b"). With a device come
            its instances. Default: all devices.
        only_visible: True to leave out devices that CUDA_VISIBLE_DEVICES hides. Default: no.
    """

    def __init__(self, only: Iterable[str | int] = (), *, only_visible: bool = False) -> None:
        self._only = tuple(map(str, only))
        self._only_visible = only_visible

    def devices(self, found: Sequence[DeviceReading]) -> list[DeviceReading]:
        """Return the wanted devices, in the same order."""
        wanted = {one.device for one in found if self._wants(one)}
        return [one for one in found if one.device in wanted or one.parent in wanted]

    def sample(self, whole: Sample) -> Sample:
        """Return the sample, of these devices."""
        if not self._only and not self._only_visible:
            return whole
        chosen = tuple(self.devices(whole.devices))
        names = {one.device for one in chosen}
        return dataclasses.replace(
            whole,
            devices=chosen,
            processes=tuple(one for one in whole.processes if one.device in names),
        )

    def check(self, found: Sequence[DeviceReading]) -> None:
        """Refuse what fits no device.

        Raises:
            ValueError: There is no such device; the message lists those that there are.
        """
        for entry in self._only:
            if not any(_fits(entry, one) for one in found):
                known = [
                    one.device if one.index is None else f"{one.index} ({one.device})"
                    for one in found
                ]
                raise ValueError(
                    f"there is no device {entry!r}; there are: {listed(known) or 'none'}"
                )

    def _wants(self, device: DeviceReading) -> bool:
        if self._only_visible and device.device.startswith("nvml:"):
            return False
        return not self._only or any(_fits(entry, device) for entry in self._only)


def _fits(entry: str, device: DeviceReading) -> bool:
    identity = device.uuid or ""
    is_long = len(entry) >= _SHORTEST_IDENTITY
    return entry in (device.device, device.index) or (is_long and identity.startswith(entry))
