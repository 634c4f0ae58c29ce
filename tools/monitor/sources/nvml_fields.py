"""Which metric comes from which function of NVML, and in which unit."""

from __future__ import annotations

from dataclasses import dataclass

from dataparallel.tools.monitor.sources.nvml_query import Handle, Query, number

_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_CORRECTED, _UNCORRECTED, _SINCE_LOADED = 0, 1, 0
_CHIP = 0
_MEMORY_V2 = 0x02000028

#: The function that tells the memory.
MEMORY = "nvmlDeviceGetMemoryInfo"


@dataclass(frozen=True)
class Field:
    """A metric that one function tells as one number.

    Attributes:
        metric: Its name, see :mod:`dataparallel.tools.monitor.metrics`.
        function: The function of ``pynvml``.
        args: What it is given beside the device.
        times: What its number is multiplied with to be in base units.
        per: What it is divided by.
        is_fixed: Whether it stays the same, so that it is asked once.
    """

    metric: str
    function: str
    args: tuple[int, ...] = ()
    times: int = 1
    per: int = 1
    is_fixed: bool = False


#: For one metric the functions in the order in which they are tried.
FIELDS: tuple[Field, ...] = (
    Field("power", "nvmlDeviceGetPowerUsage", per=1000),
    Field("power_limit", "nvmlDeviceGetEnforcedPowerLimit", per=1000),
    Field("energy", "nvmlDeviceGetTotalEnergyConsumption", per=1000),
    Field("temperature", "nvmlDeviceGetTemperature", (_CHIP,)),
    # CUDA 14 takes the older one away.
    Field("temperature", "nvmlDeviceGetTemperatureV", (_CHIP,)),
    Field("sm_clock", "nvmlDeviceGetClockInfo", (_CLOCK_SM,), times=1_000_000),
    Field(
        "sm_clock_max", "nvmlDeviceGetMaxClockInfo", (_CLOCK_SM,), times=1_000_000, is_fixed=True
    ),
    Field("memory_clock", "nvmlDeviceGetClockInfo", (_CLOCK_MEMORY,), times=1_000_000),
    Field("ecc_corrected", "nvmlDeviceGetTotalEccErrors", (_CORRECTED, _SINCE_LOADED)),
    Field("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", (_UNCORRECTED, _SINCE_LOADED)),
    Field("fan", "nvmlDeviceGetFanSpeed", per=100),
)


class Fields:
    """Reads what one function tells as one number.

    Attributes:
        fixed: Those that stay the same, once they are known.
    """

    def __init__(self, query: Query, handle: Handle) -> None:
        self._query = query
        self._handle = handle
        self.fixed: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """The values that change, as far as they are available."""
        values: dict[str, float] = {}
        for field in FIELDS:
            if field.metric in values or field.metric in self.fixed:
                continue
            value = self._query(field.function, self._handle, *field.args)
            if value is not None:
                known = self.fixed if field.is_fixed else values
                known[field.metric] = value * field.times / field.per
        return values


def read_utilization(query: Query, handle: Handle) -> dict[str, float]:
    """How busy a device and its memory are."""
    rates = query("nvmlDeviceGetUtilizationRates", handle)
    if rates is None:
        return {}
    found = {"utilization": number(rates.gpu), "memory_utilization": number(rates.memory)}
    return {name: value / 100 for name, value in found.items() if value is not None}


def read_memory(query: Query, handle: Handle) -> dict[str, float]:
    """The memory of a device; as ``nvidia-smi``, without what the driver keeps for itself."""
    memory = query(MEMORY, handle, version=_MEMORY_V2)
    if memory is None:
        memory = query(MEMORY, handle)
    if memory is None:
        return {}
    found = {
        "memory_used": number(memory.used),
        "memory_free": number(memory.free),
        "memory_total": number(memory.total),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


# --- why a device is slowed down -------------------------------------------------------------

_HARDWARE = 0x8
#: That it idles (0x1) and that somebody has set its clocks (0x2) are no slow-down.
_NO_SLOWDOWN = 0x3

#: Bit: why. The generic reason of the hardware is told only where no special one is.
REASONS: dict[int, str] = {
    0x4: "power limit",
    _HARDWARE: "hardware slow-down by heat or power supply",
    0x10: "sync boost with other devices",
    0x20: "too hot for the driver",
    0x40: "too hot for the hardware",
    0x80: "power supply too weak",
    0x100: "clocks of the display",
    0x200: "limit of the board",
    0x400: "limit of reliability",
}


def read_throttle(query: Query, handle: Handle) -> tuple[str, ...]:
    """Why a device is slowed down, in words; empty if it is not, or if that is not told."""
    bits = query("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return throttle_in_words(bits or 0)


def throttle_in_words(bits: int) -> tuple[str, ...]:
    """The reasons that are set in ``nvmlClocksEventReasons``."""
    if bits & (0x40 | 0x80):
        bits &= ~_HARDWARE
    words = [word for bit, word in REASONS.items() if bits & bit]
    unknown = bits & ~_NO_SLOWDOWN & ~sum(REASONS)
    return (*words, *([f"unknown reason {unknown:#x}"] if unknown else []))
