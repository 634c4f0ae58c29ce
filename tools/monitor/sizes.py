"""Sizes and durations on the command line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

_SIZES = {
    f"{letter}{i}{b}": (1024 if i else 1000) ** power
    for power, letter in enumerate(("", *"kmgt"))
    for i in ("", "i")
    for b in ("", "b")
}
_DURATIONS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)")


def size(text: str) -> int:
    """Convert a size such as ``100MB``, ``1GiB`` or ``5000`` to bytes."""
    return int(_quantity(text, _SIZES, "size such as 100MB or 1GiB"))


def duration(text: str) -> float:
    """Convert a duration such as ``90``, ``90s``, ``10min``, ``2h`` or ``1d`` to seconds."""
    return _quantity(text, _DURATIONS, "duration such as 90, 10min or 2h")


def _quantity(text: str, units: Mapping[str, int], what: str) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    factor = units.get(match[2]) if match else None
    value = float(match[1]) * factor if match and factor else math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
    return value
