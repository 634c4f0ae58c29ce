"""Errors that devices report by themselves (XID)."""

from __future__ import annotations

from typing import Any

from dataparallel.monitor.readings.nvml_errors import TIMEOUT, DeviceLost
from dataparallel.monitor.readings.nvml_query import Query, address

_WAIT, _XID = "nvmlEventSetWait", 0x8
#: The most events to take at once; the rest comes the next time.
_MOST = 256


class XidEvents:
    """A count, from its beginning on, of the errors that devices report by themselves.

    They are kept over :meth:`close`, since a device that reports one is often lost afterwards.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._set: Any = None
        self._keys: dict[int | None, str] = {}
        #: The number of errors, and the last one.
        self._found: dict[str, tuple[int, int]] = {}

    def watch(self, key: str, handle: Any) -> None:
        """Count those of this device too; the key is its identity."""
        if self._set is None:
            self._set = self._query("nvmlEventSetCreate")
        if self._set is None:
            return
        self._query("nvmlDeviceRegisterEvents", handle, _XID, self._set)
        # It returns nothing, as what is not available does.
        if "nvmlDeviceRegisterEvents" not in self._query.errors:
            self._keys[address(handle)] = key
            self._found.setdefault(key, (0, 0))
        self._query.forget()

    def read(self) -> None:
        """Take in what has happened since the last time, without waiting."""
        for _ in range(_MOST if self._keys else 0):
            try:
                event = self._query(_WAIT, self._set, 0)
            except DeviceLost:
                # Whoever reads the device finds out.
                return
            if event is None:
                if self._query.errors[_WAIT] != TIMEOUT:
                    # There may be errors that nobody can see.
                    self._keys, self._found = {}, {}
                return
            key = self._keys.get(address(event.device))
            if key is not None and event.eventType == _XID:
                self._found[key] = (self._found[key][0] + 1, int(event.eventData))

    def values(self, key: str) -> dict[str, float]:
        """Return the number of a device's errors and the last one, if they are known."""
        found = self._found.get(key)
        if found is None:
            return {}
        count, last = found
        return {"xid_errors": float(count), **({"last_xid": float(last)} if count else {})}

    def close(self) -> None:
        """Give back what is held, before NVML is closed. A second call does nothing."""
        one, self._set = self._set, None
        self._keys = {}
        if one is not None:
            self._query("nvmlEventSetFree", one)
