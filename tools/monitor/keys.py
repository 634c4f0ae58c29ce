"""Single keys from a terminal, which is left as it was found."""

from __future__ import annotations

import contextlib
import os
import select
import time
from types import TracebackType
from typing import TextIO


class Keys:
    """Reads keys as they are pressed, without echo and without Enter.

    Where the input is no terminal, or the system has no termios, no key ever comes. Ctrl-C and
    Ctrl-Z still send their signals.

    Example::

        with Keys(sys.stdin) as keys:
            while keys.wait(0.5) != "q":
                ...

    Args:
        stream: Where keys come from.
    """

    def __init__(self, stream: TextIO) -> None:
        self._file = -1
        # Closed, or it is no file at all; a notebook's input is one of these.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.isatty():
                self._file = stream.fileno()
        self._before: list[object] | None = None

    @property
    def active(self) -> bool:
        """Whether keys can come."""
        return self._before is not None

    def enter(self) -> None:
        """Begin to read keys."""
        if self._file < 0 or self._before is not None:
            return
        try:
            import termios
            import tty
        except ModuleNotFoundError:
            return
        self._before = list(termios.tcgetattr(self._file))
        tty.setcbreak(self._file)

    def leave(self) -> None:
        """Give the terminal back as it was. A second call does nothing."""
        before, self._before = self._before, None
        if before is not None:
            import termios

            termios.tcsetattr(self._file, termios.TCSADRAIN, before)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> str:
        """The key that is pressed within so many seconds; empty if none is.

        Of what a special key sends, such as an arrow, it is the whole sequence.
        """
        if not self.active:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return ""
        try:
            pressed = os.read(self._file, 64)
        except OSError:
            pressed = b""
        if not pressed:
            # The terminal is gone: no key comes any more, and each wait would end at once.
            self._file, self._before = -1, None
        text = pressed.decode(errors="replace")
        return text if text.startswith("\x1b") else text[:1]

    def __enter__(self) -> Keys:
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
