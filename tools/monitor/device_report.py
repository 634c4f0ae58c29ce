"""What a recording tells of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.tools.monitor.energy import energy_used
from dataparallel.tools.monitor.reading import DeviceReading, Sample


@dataclass(frozen=True)
class DeviceReport:
    """One device in a whole recording; what is None was not available.

    Attributes:
        device: Name under which torch knows it.
        name: What the vendor calls it.
        uuid: Its identity.
        parent: For a MIG instance, the device of which it is a part.
        num_readings: In how many samples it is.
        utilization_mean: Ratio.
        utilization_peak: Likewise.
        memory_peak: Bytes in use.
        memory_total: Bytes that there are.
        temperature_peak: Degrees Celsius.
        power_mean: Watts.
        energy: Joules, over the whole recording.
        energy_source: ``"counter"`` or ``"power"``.
        throttled: Share of the readings in which it was slowed down.
        throttle_reasons: Share of the readings by reason, the most frequent first.
        failed: In how many samples it could not be read.
        error: Why not, the last time.
        is_lost: Whether it could not be read, or was missing, at the end.
    """

    device: str
    name: str
    uuid: str | None
    parent: str | None
    num_readings: int
    utilization_mean: float | None
    utilization_peak: float | None
    memory_peak: float | None
    memory_total: float | None
    temperature_peak: float | None
    power_mean: float | None
    energy: float | None
    energy_source: str | None
    throttled: float
    throttle_reasons: Mapping[str, float]
    failed: int
    error: str | None
    is_lost: bool


def report_devices(samples: Sequence[Sample], times: Sequence[float]) -> tuple[DeviceReport, ...]:
    """Sum up each device, in the order in which they come.

    Args:
        samples: The oldest first.
        times: When each was taken, in seconds.
    """
    rows: dict[str, list[DeviceReading | None]] = {}
    for place, sample in enumerate(samples):
        for reading in sample.devices:
            row = rows.setdefault(reading.device, [None] * len(samples))
            row[place] = reading
    return tuple(_report(row, times) for row in rows.values())


def column(row: Sequence[DeviceReading | None], metric: str) -> list[float | None]:
    """A metric of one device at each sample; None where it is not available.

    Args:
        row: Its readings; None where it is missing.
        metric: One of :mod:`dataparallel.tools.monitor.metrics`.
    """
    return [None if reading is None else reading.value(metric) for reading in row]


def slowed_devices(devices: Sequence[DeviceReport], least: float = 0.1) -> dict[str, str]:
    """By the name of a device, why it is slowed down, for those that are often.

    Args:
        devices: All of them.
        least: The share of the time that is often.
    """
    return {device.device: reasons_text(device) for device in devices if device.throttled >= least}


def reasons_text(device: DeviceReport) -> str:
    """Why a device is slowed down and how often, in words."""
    return ", ".join(
        f"{reason} in {100 * share:.0f} % of the time"
        for reason, share in device.throttle_reasons.items()
    )


def _report(row: Sequence[DeviceReading | None], times: Sequence[float]) -> DeviceReport:
    known = [reading for reading in row if reading is not None]
    good = [reading for reading in known if reading.error is None]
    last = (good or known)[-1]
    errors = [reading.error for reading in known if reading.error is not None]
    reasons: dict[str, int] = {}
    for reading in good:
        for reason in reading.throttle:
            reasons[reason] = reasons.get(reason, 0) + 1
    number = max(1, len(good))
    energy = energy_used(times, column(row, "energy"), column(row, "power"))
    load = _known(row, "utilization")
    power = _known(row, "power")
    return DeviceReport(
        device=last.device,
        name=last.name,
        uuid=last.uuid,
        parent=last.parent,
        num_readings=len(known),
        utilization_mean=sum(load) / len(load) if load else None,
        utilization_peak=max(load, default=None),
        memory_peak=max(_known(row, "memory_used"), default=None),
        memory_total=max(_known(row, "memory_total"), default=None),
        temperature_peak=max(_known(row, "temperature"), default=None),
        power_mean=sum(power) / len(power) if power else None,
        energy=None if energy is None else energy.joules,
        energy_source=None if energy is None else energy.source,
        throttled=sum(bool(reading.throttle) for reading in good) / number,
        throttle_reasons={
            reason: count / number
            for reason, count in sorted(reasons.items(), key=lambda one: -one[1])
        },
        failed=len(errors),
        error=errors[-1] if errors else None,
        is_lost=row[-1] is None or row[-1].error is not None,
    )


def _known(row: Sequence[DeviceReading | None], metric: str) -> list[float]:
    return [value for value in column(row, metric) if value is not None]
