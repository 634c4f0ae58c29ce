"""What a Balancer is told about when to act."""

from __future__ import annotations

import contextlib
import operator
from numbers import Real
from typing import NamedTuple


class Settings(NamedTuple):
    """When chunks change; see :func:`dataparallel.balance`.

    Attributes:
        every: Number of steps, at least 1.
        threshold: A part of a step's time, from 0 to below 1.
        warmup: Number of steps, at least 0.
        window: Number of steps, at least ``every``.
    """

    every: int = 10
    threshold: float = 0.03
    warmup: int = 5
    window: int = 30

    def checked(self) -> Settings:
        """The same with plain numbers.

        Raises:
            TypeError: A number is none, or no whole one.
            ValueError: A number is out of range.
        """
        every, warmup, window = (
            whole_number(name, getattr(self, name)) for name in ("every", "warmup", "window")
        )
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, Real):
            raise TypeError(
                f"threshold is a part of the time, such as 0.03, but got {threshold!r} "
                f"({type(threshold).__name__})"
            )
        faults = []
        if every < 1:
            faults.append(f"every is a number of steps, at least 1, but got {every}")
        # Also false for NaN.
        if not 0 <= threshold < 1:
            faults.append(
                f"threshold is a part of the time, from 0 to below 1, but got {threshold}"
            )
        if warmup < 0:
            faults.append(f"warmup is a number of steps, at least 0, but got {warmup}")
        if window < every:
            faults.append(f"window is at least every, which is {every}, but got {window}")
        if faults:
            raise ValueError("; ".join(faults))
        return Settings(every, float(threshold), warmup, window)


def whole_number(name: str, value: object) -> int:
    """A number that the user has given, as an ``int``.

    Args:
        name: What it is called in the message.
        value: What was given; whole numbers of other libraries are taken, bools are not.

    Raises:
        TypeError: It is no whole number.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    raise TypeError(
        f"{name} is a whole number, but got {value!r:.100} ({type(value).__name__}); give an int"
    )
