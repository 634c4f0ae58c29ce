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
    """The choice of ``--only`` and ``--only-visible``; with a device come its instances."""

    def __init__(self, only: Iterable[str] = (), *, only_visible: bool = False) -> None:
        self._only = tuple(only)
        self._only_visible = only_visible

    def sample(self, whole: Sample) -> Sample:
        """Return the sample, of the wanted devices and of the processes on them."""
        if not self._only and not self._only_visible:
            return whole
        wanted = {one.device for one in whole.devices if self._wants(one)}
        chosen = tuple(o for o in whole.devices if o.device in wanted or o.parent in wanted)
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
