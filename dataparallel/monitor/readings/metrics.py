"""The metrics of a device: their names, units and meanings, in one table.

Values are in base units everywhere (ratios from 0 to 1, bytes, seconds, watts, joules, degrees
Celsius, hertz), in recordings and in Prometheus too. Only values for people are converted. ``None``
stands for what is not available, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["ratio", "bytes", "bytes/s", "s", "W", "J", "C", "Hz", "count"]

#: Prometheus's names of the units; a count has its unit in its name.
_SUFFIXES: dict[Unit, str] = {
    "ratio": "ratio",
    "bytes": "bytes",
    "bytes/s": "bytes_per_second",
    "s": "seconds",
    "W": "watts",
    "J": "joules",
    "C": "celsius",
    "Hz": "hertz",
    "count": "",
}


@dataclass(frozen=True)
class Metric:
    """One quantity.

    Attributes:
        name: Its name, as in recordings.
        unit: Its unit.
        meaning: One line for people.
        is_counter: True if it only grows, from a beginning that says nothing.
    """

    name: str
    unit: Unit
    meaning: str
    is_counter: bool = False

    @property
    def name_with_unit(self) -> str:
        """The name in Prometheus, behind a prefix."""
        parts = (self.name, _SUFFIXES[self.unit], "total" if self.is_counter else "")
        return "_".join(filter(None, parts))


#: All metrics of devices, in the order in which they are shown.
METRICS: tuple[Metric, ...] = (
    Metric("utilization", "ratio", "share of time in which a kernel ran"),
    Metric("memory_utilization", "ratio", "share of time in which memory was read or written"),
    *(
        Metric(f"{what}_utilization", "ratio", f"share of time in which the video {what} ran")
        for what in ("encoder", "decoder")
    ),
    Metric("memory_used", "bytes", "memory in use, by all processes"),
    Metric("memory_free", "bytes", "memory that is free"),
    Metric("memory_total", "bytes", "memory that there is"),
    Metric("power", "W", "power drawn"),
    Metric("power_limit", "W", "power at which the device slows down"),
    Metric("energy", "J", "energy used since the driver was loaded", is_counter=True),
    Metric("temperature", "C", "temperature of the chip"),
    Metric("memory_temperature", "C", "temperature of the memory"),
    Metric("sm_clock", "Hz", "clock of the processors"),
    Metric("sm_clock_max", "Hz", "highest clock of the processors"),
    Metric("memory_clock", "Hz", "clock of the memory"),
    Metric("performance_state", "count", "from 0, the fastest, to 15; as nvidia-smi's P0"),
    Metric("pcie_sent", "bytes/s", "sent over PCIe"),
    Metric("pcie_received", "bytes/s", "received over PCIe"),
    Metric("nvlink_sent", "bytes/s", "sent over NVLink"),
    Metric("nvlink_received", "bytes/s", "received over NVLink"),
    *(
        Metric(f"throttled_by_{what}", "s", f"time slowed down by {why}", is_counter=True)
        for what, why in (
            ("power", "the power limit"),
            ("heat", "heat"),
            ("sync_boost", "sync boost with other devices"),
            ("board_limit", "the limit of the board"),
            ("reliability", "the limit of reliability"),
        )
    ),
    Metric("ecc_corrected_errors", "count", "corrected memory errors", is_counter=True),
    Metric("ecc_uncorrected_errors", "count", "uncorrected memory errors", is_counter=True),
    Metric("xid_errors", "count", "errors (XID) told since reading began", is_counter=True),
    Metric("last_xid", "count", "number of the last of these errors"),
    Metric("pcie_replays", "count", "packets that PCIe had to send again", is_counter=True),
    *(
        Metric(
            f"remapped_rows_{sort}", "count", f"rows replaced after {sort} errors", is_counter=True
        )
        for sort in ("correctable", "uncorrectable")
    ),
    Metric("row_remapping_pending", "count", "1: rows are replaced at the next reset"),
    Metric("row_remapping_failed", "count", "1: a row could not be replaced"),
    Metric("fan", "ratio", "speed of the fan"),
    Metric("sm_active", "ratio", "share of processors that were busy"),
    Metric("sm_occupancy", "ratio", "share of warps that were resident"),
    Metric("tensor_active", "ratio", "share of time in which tensor cores were busy"),
    Metric("dram_active", "ratio", "share of the memory's bandwidth in use"),
)

#: Metrics by name.
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
