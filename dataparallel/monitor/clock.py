"""The time of a device's events on the host's clock, without waiting for the device.

Note [A device's clock]
~~~~~~~~~~~~~~~~~~~~~~~
Two events of one device tell how long it took from one to the other, not when that was. An event
happens no earlier than it is recorded, and at once where the device has nothing else to do. So the
host's time minus the device's time, as each event is recorded, is at most the distance between the
two clocks, and the greatest of these differences comes closest to it: the idea of the minimum
filter with which NTP treats delays (RFC 5905, section 10).

``elapsed_time`` is in milliseconds in single precision, and would be coarse after an hour. So times
are added up from event to event.
"""

from __future__ import annotations

import torch


class DeviceClock:
    """Tells when events of one device happened. See Note [A device's clock].

    Example::

        clock = DeviceClock()
        clock.host_time(event, recorded)      # nanoseconds of time.perf_counter_ns

    Events are given in the order in which they were recorded, each after it has happened.
    """

    def __init__(self) -> None:
        self._anchor: torch.Event | None = None
        #: The device's time at the anchor, in nanoseconds.
        self._at = 0
        self._distance: int | None = None

    def host_time(self, event: torch.Event, recorded: int) -> int:
        """When an event happened.

        Args:
            event: The event; it has happened.
            recorded: When it was recorded, in nanoseconds of the host's clock.

        Returns:
            Nanoseconds of the host's clock, not before ``recorded``.
        """
        if self._anchor is not None:
            self._at += int(self._anchor.elapsed_time(event) * 1e6)
        self._anchor = event
        distance = recorded - self._at
        if self._distance is None or distance > self._distance:
            self._distance = distance
        return self._at + self._distance
