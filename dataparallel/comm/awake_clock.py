"""Time in which this process was awake."""

from __future__ import annotations

import threading
import time


class AwakeClock:
    """Counts seconds, but not those in which nobody looked at it, since all threads were stopped.

    Example::

        clock = AwakeClock(0.5)
        since = clock.tick()
        while not answered():
            time.sleep(0.1)
            if clock.tick() - since > 5.0:      # not because of Ctrl-Z
                raise TimeoutError

    Args:
        longest: Seconds that count at most between two looks.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._awake = 0.0

    def tick(self) -> float:
        """The seconds so far."""
        with self._lock:
            now = time.monotonic()
            self._awake += min(now - self._last, self._longest)
            self._last = now
            return self._awake
