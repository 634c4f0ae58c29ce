"""NVIDIA's management library: opened, asked in one way, and shut down again."""

from __future__ import annotations

import ctypes
import importlib
import math
from typing import Any

from dataparallel.monitor.readings.nvml_errors import (
    FUNCTION_NOT_FOUND,
    LOST,
    NOT_SUPPORTED,
    UNINITIALIZED,
    UNKNOWN,
    DeviceLost,
    NvmlUnavailable,
    explain,
    package_problem,
)

#: The values of NVML for "not available" without an error.
_SENTINELS = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


def number(value: float) -> float | None:
    """Return a number of NVML's; None if it stands for "not available"."""
    return None if value in _SENTINELS or not math.isfinite(value) else value


def address(handle: Any) -> int | None:
    """Return the address of a device in NVML, which tells two handles apart."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class Query:
    """A caller of NVML; it knows three sorts of failures: not available, lost, nothing at all.

    Opening NVML creates no CUDA context. It counts its users, so that other users in this process
    are not disturbed.

    Attributes:
        module: The module ``pynvml``, for its structures and constants; None while it is closed.
        errors: By function, the code with which it has failed since :meth:`forget`.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.errors: dict[str, int] = {}
        self._versions: dict[str, str] = {}

    def open(self) -> None:
        """Initialize the library; raise NvmlUnavailable if package, library or driver fail."""
        module = _pynvml()
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            raise NvmlUnavailable(explain(int(getattr(error, "value", UNKNOWN)))) from error
        self.module = module

    def close(self) -> None:
        """Shut the library down. A second call does nothing."""
        module, self.module = self.module, None
        self._versions = {}
        if module is None:
            return
        try:
            module.nvmlShutdown()
        except module.NVMLError:
            # It was shut down already, or it has no driver any more.
            return

    def forget(self) -> None:
        """Forget the errors so far."""
        self.errors.clear()

    def versions(self) -> dict[str, str]:
        """Return the versions of the driver and of its CUDA, as far as they are known."""
        if not self._versions:
            driver = self("nvmlSystemGetDriverVersion")
            # 12080 stands for 12.8.
            cuda = self("nvmlSystemGetCudaDriverVersion_v2")
            known = {"driver": driver, "CUDA": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}"}
            self._versions = {name: str(told) for name, told in known.items() if told}
        return self._versions

    def __call__(self, function: str, *args: Any, **options: Any) -> Any:
        """Call a function of ``pynvml``; return None if its value is not available.

        Raises:
            DeviceLost: The device does not answer any more.
            NvmlUnavailable: Somebody else has shut the library down.
        """
        # None if nvidia-ml-py is older than the function.
        call = getattr(self.module, function, None)
        code = FUNCTION_NOT_FOUND
        if call is not None:
            try:
                answer = call(*args, **options)
                return number(answer) if isinstance(answer, (int, float)) else answer
            except self.module.NVMLError as error:
                code = int(error.value)
            except getattr(self.module, "NVMLLibraryMismatchError", self.module.NVMLError):
                # The driver is older than the newest form of the function; this is no NVMLError.
                code = FUNCTION_NOT_FOUND
            except (TypeError, ValueError, ctypes.ArgumentError):
                # nvidia-ml-py does not know an argument yet, or cannot read what it got.
                code = NOT_SUPPORTED
        if code == UNINITIALIZED:
            raise NvmlUnavailable(explain(code))
        if code in LOST:
            raise DeviceLost(code)
        self.errors[function] = code
        return None


def _pynvml() -> Any:
    try:
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
    return module


def _damaged(error: Exception) -> str:
    what, remedy = package_problem() or (
        f"the module pynvml does not work: {error}",
        "pip install --force-reinstall nvidia-ml-py",
    )
    return f"{what}; {remedy}"
