"""JSON as the standard has it: what others read otherwise, or not at all, is refused."""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any, NoReturn

# What Python itself converts since 3.10.7; longer numbers take quadratic time.
_MAX_DIGITS = 4300

# Looks at the beginning alone: what it shows may be as large as a file allows.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 78


def encode(value: Any) -> bytes:
    """The JSON text of a value, in UTF-8.

    Args:
        value: Of dictionaries with string keys, lists, strings, booleans, numbers and None.

    Returns:
        The text, without blanks.

    Raises:
        ValueError: There is a NaN or an infinity, or a structure that holds itself.
        TypeError: There is something else that JSON does not have.
    """
    _refuse_other_keys(value)
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.encode("ascii")


def decode(text: bytes | bytearray | memoryview) -> Any:
    """The value of a JSON text that may come from anybody.

    Args:
        text: In UTF-8.

    Returns:
        The value.

    Raises:
        ValueError: It is not JSON, says a key twice, has numbers that are not finite or of
            thousands of digits, or is nested too deeply.
    """
    try:
        return json.loads(
            str(text, "utf-8"),
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(value: Any) -> str:
    """A value for a message: short, and in one line whatever it is."""
    text = _SHORT.repr(value).encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {shown(name)} is there twice")
            seen.add(name)
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, more than {_MAX_DIGITS}")
    return int(text)


def _refuse_other_keys(value: Any) -> None:
    """``json`` would turn the keys 1, True and None into strings without a word."""
    pending = [value]
    # A structure that holds itself is found by the encoder: here each is looked at once.
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        if isinstance(item, dict):
            seen.add(id(item))
            for key in item:
                if not isinstance(key, str):
                    raise TypeError(f"the key {shown(key)} is not a string")
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            seen.add(id(item))
            pending.extend(item)
        elif isinstance(item, int) and item.bit_length() > 3.32 * _MAX_DIGITS:
            raise ValueError(f"a number has more than {_MAX_DIGITS} digits; write it as a string")
