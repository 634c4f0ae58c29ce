"""Quantities in base units as text for people; what is not available is a dash."""

from __future__ import annotations

from dataparallel.monitor.findings import duration, percent

NOT_AVAILABLE = "-"

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(value: float | None) -> str:
    """Bytes, for example ``61.2 GiB``."""
    return NOT_AVAILABLE if value is None else "{} {}".format(*_scaled_bytes(value, value))


def bytes_of_text(value: float | None, whole: float | None) -> str:
    """Return a part of so many bytes, for example ``61.2/80.0 GiB``."""
    if value is None or not whole:
        return bytes_text(value)
    part, unit = _scaled_bytes(value, whole)
    return f"{part}/{_scaled_bytes(whole, whole)[0]} {unit}"


def _scaled_bytes(value: float, scale: float) -> tuple[str, str]:
    step = 0
    while abs(scale) >= 1024 and step < len(_BINARY) - 1:
        scale /= 1024
        step += 1
    return (f"{value / 1024**step:.1f}" if step else f"{value:.0f}"), _BINARY[step]


def count_text(value: float | None) -> str:
    """Return a number, for example ``950``, ``12.3k``, ``1.2M``."""
    if value is None:
        return NOT_AVAILABLE
    for factor, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f}{sign}"
    return f"{value:.0f}"


def watts_of_text(value: float | None, limit: float | None) -> str:
    """Power and its limit, for example ``650/700 W``."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:.0f}/{limit:.0f} W" if limit else f"{value:.0f} W"


def energy_text(joules: float | None) -> str:
    """Return an energy, for example ``4.21 mJ``, ``3.60 MJ``."""
    if joules is None:
        return NOT_AVAILABLE
    for factor, unit in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if joules >= factor:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules * 1e6:.3g} µJ"


def hertz_text(value: float | None) -> str:
    """Return a clock, for example ``1.98 GHz``."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value / 1e9:.2f} GHz" if value >= 1e9 else f"{value / 1e6:.0f} MHz"


def hertz_of_text(value: float | None, highest: float | None) -> str:
    """Return a clock and how high it may go, for example ``1.20/1.98 GHz``."""
    if value is None or not highest or (value >= 1e9) != (highest >= 1e9):
        return hertz_text(value)
    return f"{hertz_text(value).split()[0]}/{hertz_text(highest)}"


def percent_text(ratio: float | None) -> str:
    """Return a ratio, for example ``87 %``."""
    return NOT_AVAILABLE if ratio is None else percent(ratio)


def seconds_text(value: float | None) -> str:
    """Return a duration, for example ``830 µs``, ``12.3 ms``, ``1.24 s``, ``3 min 20 s``."""
    if value is None:
        return NOT_AVAILABLE
    if value < 9.995:
        return duration(value)
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def frequency_text(value: float | None) -> str:
    """Something per second, for example ``0.125``, ``8.10``, ``2074``."""
    if value is None:
        return NOT_AVAILABLE
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"
