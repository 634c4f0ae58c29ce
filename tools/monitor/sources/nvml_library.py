"""NVIDIA's management library: opened late and under a lock, and shut down again."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.sources.nvml_errors import (
    UNKNOWN,
    NvmlUnavailable,
    explain,
    package_problem,
)

#: Seconds after which a library that could not be opened is tried again.
_RETRY = 10.0


class Library:
    """The module ``pynvml``, initialized when it is first needed.

    Opening NVML creates no CUDA context. It counts who has opened it, so that others in this
    process who use it too are not disturbed.

    Example::

        library = Library()
        module = library.open()
        print(module.nvmlSystemGetDriverVersion())
        library.close()

    Args:
        clock: Tells seconds, for the time between two tries. Default: ``time.monotonic``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._module: Any = None
        self._process = 0
        self._failure: NvmlUnavailable | None = None
        self._failed_at = 0.0

    def open(self) -> Any:
        """The initialized module.

        Raises:
            NvmlUnavailable: The package, the library or the driver is missing or does not work.
        """
        with self._lock:
            if self._module is not None and self._process == os.getpid():
                return self._module
            if self._failure is not None and self._clock() < self._failed_at + _RETRY:
                raise self._failure
            try:
                module = _initialized()
            except NvmlUnavailable as error:
                self._failure, self._failed_at = error, self._clock()
                raise
            self._failure = None
            self._module, self._process = module, os.getpid()
            return module

    def reopen(self) -> None:
        """Shut it down and open it again, as after a device was lost.

        Raises:
            NvmlUnavailable: It cannot be opened any more.
        """
        with self._lock:
            self.close()
            self.open()

    def close(self) -> None:
        """Shut it down. A second call does nothing; after it, :meth:`open` opens it again."""
        with self._lock:
            module, self._module = self._module, None
            if module is None or self._process != os.getpid():
                return
            try:
                module.nvmlShutdown()
            except module.NVMLError:
                # It was shut down already, or it has no driver any more.
                return


def _initialized() -> Any:
    try:
        with needs_extra("monitor"):
            module = importlib.import_module("pynvml")
    except ImportError as error:
        if error.name == "pynvml":
            why = 'the package nvidia-ml-py is not installed; pip install "dataparallel[monitor]"'
        else:
            why = _damaged(error)
        raise NvmlUnavailable(why) from error
    except (SyntaxError, AttributeError) as error:
        raise NvmlUnavailable(_damaged(error)) from error
    if not hasattr(module, "nvmlInit") or not hasattr(module, "NVMLError"):
        raise NvmlUnavailable(_damaged(AttributeError("it has no nvmlInit")))
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        code = int(getattr(error, "value", UNKNOWN))
        raise NvmlUnavailable(explain(code), code) from error
    return module


def _damaged(error: Exception) -> str:
    what, remedy = package_problem() or (
        f"the module pynvml does not work: {error}",
        "pip install --force-reinstall nvidia-ml-py",
    )
    return f"{what}; {remedy}"
