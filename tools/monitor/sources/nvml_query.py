"""The one way in which NVML is asked."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

from dataparallel.tools.monitor.sources.nvml_errors import (
    FUNCTION_NOT_FOUND,
    LASTING,
    LOST,
    NOT_SUPPORTED,
    UNINITIALIZED,
    DeviceLost,
    Uninitialized,
)
from dataparallel.tools.monitor.sources.nvml_library import Library

#: What NVML gives for "not available", where it gives no error.
_SENTINELS = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


@dataclass(frozen=True)
class Handle:
    """A device as NVML knows it.

    Attributes:
        key: What it is called where its answers are remembered: its UUID.
        pointer: What NVML wants to be given.
    """

    key: str
    pointer: Any


def number(value: float) -> float | None:
    """A number of NVML's; None if it stands for "not available"."""
    if value in _SENTINELS or not math.isfinite(value):
        return None
    return value


class Query:
    """Asks NVML, and knows three sorts of failures: not available, lost, and shut down.

    What a device does not support is asked once and then remembered.

    Example::

        query = Query(library)
        milliwatts = query("nvmlDeviceGetPowerUsage", handle)   # None: not available

    Args:
        library: The library, opened.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._absent: dict[tuple[Any, ...], int] = {}
        self._last: dict[str, int] = {}

    @property
    def module(self) -> Any:
        """The module ``pynvml``, for its structures and constants."""
        return self._library.open()

    def __call__(self, function: str, *args: Any, of: str = "", **options: Any) -> Any:
        """The answer to one question.

        Args:
            function: A function of ``pynvml``.
            args: What it is given; a :class:`Handle` stands for its pointer.
            of: Under which name an error is remembered. Default: that of the first argument, if it
                is a handle.
            options: What it is given by name.

        Returns:
            What the function returns; None if it is not available.

        Raises:
            DeviceLost: The device does not answer any more.
            Uninitialized: The library was shut down by somebody else.
            NvmlUnavailable: There is no library any more.
        """
        if args and isinstance(args[0], Handle):
            of = of or args[0].key
            args = (args[0].pointer, *args[1:])
        key = (of, function, *(arg for arg in args if type(arg) is int), *options)
        if key in self._absent:
            return None
        code = self._ask(function, args, options)
        if not isinstance(code, _Code):
            return number(code) if isinstance(code, (int, float)) else code
        if code.value == UNINITIALIZED:
            raise Uninitialized(function)
        if code.value in LOST:
            raise DeviceLost(code.value)
        if code.value in LASTING:
            self._absent[key] = code.value
        if code.value:
            self._last[of] = code.value
        return None

    def _ask(self, function: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The answer, or an error's code."""
        module = self._library.open()
        call = getattr(module, function, None)
        if call is None:
            # nvidia-ml-py is older than the function.
            return _Code(FUNCTION_NOT_FOUND)
        try:
            return call(*args, **options)
        except module.NVMLError as error:
            return _Code(int(error.value))
        except getattr(module, "NVMLLibraryMismatchError", module.NVMLError):
            # The driver is older than the newest form of the function; this is no NVMLError.
            return _Code(FUNCTION_NOT_FOUND)
        except (TypeError, ValueError, ctypes.ArgumentError):
            # nvidia-ml-py does not know an argument yet, or cannot read what it got.
            return _Code(NOT_SUPPORTED)

    def last_error(self, of: str) -> int | None:
        """The code with which something of a device failed last; None if nothing has."""
        return self._last.get(of)

    def reasons(self, of: str, *functions: str) -> set[int]:
        """With which codes functions of a device (default: all) are remembered as not available."""
        return {
            code
            for key, code in self._absent.items()
            if key[0] == of and (not functions or key[1] in functions)
        }

    def forget(self, of: str | None = None) -> None:
        """Ask again what was not supported: of one device, or of all."""
        self._absent = {
            key: code for key, code in self._absent.items() if of is not None and key[0] != of
        }
        for name in [*self._last] if of is None else [of]:
            self._last.pop(name, None)


@dataclass(frozen=True)
class _Code:
    """An error's code, told apart from an answer."""

    value: int
