"""Sizes and durations on the command line."""

from __future__ import annotations

import argparse
import math
import re

_SIZES = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}
_DURATIONS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")


def size(text: str) -> int:
    """Convert a size such as ``100MB``, ``1GiB`` or ``5000`` to bytes."""
    match = _QUANTITY.fullmatch(text.strip().lower())
    factor = _SIZES.get(match[2].removesuffix("b")) if match else None
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 100MB or 1GiB")
    return int(float(match[1]) * factor)


def duration(text: str) -> float:
    """Convert a duration such as ``90``, ``90s``, ``10min``, ``2h`` or ``1d`` to seconds."""
    match = _QUANTITY.fullmatch(text.strip().lower())
    factor = _DURATIONS.get(match[2]) if match else None
    seconds = float(match[1]) * factor if match and factor else math.nan
    if not math.isfinite(seconds):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90, 10min or 2h")
    return seconds
