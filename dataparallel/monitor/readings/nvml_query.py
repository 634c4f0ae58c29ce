"""NVIDIA's management library: opened, asked in one way, and shut down again; its error codes."""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable
from importlib import metadata
from typing import Any

from dataparallel.errors import install_command

#: Codes that decide what happens next. They are part of NVML's binary interface.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
LIBRARY_TOO_OLD = 25
UNKNOWN = 999

#: The device does not answer any more, whatever it is asked.
LOST = frozenset({15, 16, 28})

_LOAD = "load the driver with: sudo modprobe nvidia; see why it did not load with: sudo dmesg"
_RESTART = "restart the machine, or this container, so that driver and library fit each other again"
_ALLOW = "run as root, or have the administrator allow it (in a container: --gpus all)"
_RESET = "look at `sudo dmesg | grep -i xid`, then reset it: sudo nvidia-smi --gpu-reset, or reboot"
_INSTALL = "install NVIDIA's driver (in a container: start it with --gpus all)"
_UPDATE = "install a newer NVIDIA driver"
_AGAIN = "it is tried again every half minute"

#: Code: what it means, and what to do.
MEANINGS: dict[int, tuple[str, str]] = {
    UNINITIALIZED: ("the NVIDIA library was shut down", _AGAIN),
    INVALID_ARGUMENT: ("the driver does not know this question", _UPDATE),
    NOT_SUPPORTED: ("the device cannot tell this", "nothing can be done about it"),
    NO_PERMISSION: ("not permitted", _ALLOW),
    NOT_FOUND: ("the device is not there any more", _RESET),
    8: ("the device's power cables are not plugged in", "plug them in and reboot"),
    9: ("NVIDIA's driver is not loaded", _LOAD),
    TIMEOUT: ("the driver did not answer in time", "it is asked again at the next sample"),
    11: ("the device has a problem with interrupts", "reboot, then look at: sudo dmesg"),
    LIBRARY_NOT_FOUND: ("libnvidia-ml.so.1 was not found", _INSTALL),
    FUNCTION_NOT_FOUND: ("the driver is too old for this", _UPDATE),
    14: ("the device's information memory is damaged", "have the device replaced"),
    15: ("the device is lost, it has fallen off the bus", _RESET),
    16: ("the device needs a reset", _RESET),
    17: ("the operating system has blocked the driver", "look at: sudo dmesg"),
    18: ("the driver that is loaded and its library are of different versions", _RESTART),
    20: ("there is not enough memory for the question", "free some memory of the host"),
    LIBRARY_TOO_OLD: ("the driver is too old for this", _UPDATE),
    28: ("the device is not there any more", _RESET),
    UNKNOWN: ("the driver fails for a reason that it does not tell", "look at: sudo dmesg"),
}

#: Number of an error that a device reports by itself (XID): what it is. Those of programs come
#: first; NVIDIA documents all.
XIDS: dict[int, str] = {
    13: "a kernel of a program failed",
    31: "a program used memory that is not its own",
    43: "a program was stopped after an error of its own",
    45: "a program was stopped, often after another error",
    48: "the memory has an error that cannot be corrected",
    63: "a row of the memory is being replaced",
    64: "a row of the memory could not be replaced",
    74: "NVLink has failed",
    79: "the device has fallen off the bus",
    94: "the memory has an error that cannot be corrected, in one program's part",
    95: "the memory has an error that cannot be corrected, which may concern all programs",
    119: "the processor that controls the device does not answer",
}


def explain(code: int) -> str:
    """Explain an error code (``nvmlReturn_t``) and its remedy, in one line."""
    unknown = (f"the NVIDIA library fails with error {code}", "look at: sudo dmesg")
    return "; ".join(MEANINGS.get(code, unknown))


class NvmlUnavailable(Exception):
    """Nothing can be read from NVIDIA; the text says why and what to do."""


class DeviceLost(Exception):
    """A device does not answer any more."""

    def __init__(self, code: int) -> None:
        super().__init__(explain(code))


# --- who has brought the module --------------------------------------------------------------

#: The distributions that have ever brought a module ``pynvml``; only the first is maintained.
_OWNERS = ("nvidia-ml-py", "pynvml", "nvidia-ml-py3")
_REPAIR = "pip uninstall -y pynvml nvidia-ml-py3 nvidia-ml-py && pip install nvidia-ml-py"


def package_problem(
    distribution: Callable[[str], Any] = metadata.distribution,
) -> tuple[str, str] | None:
    """Return the fault of the installed ``pynvml``, and the command that repairs it.

    Three distributions install a module of that name over each other; with the wrong one, lists of
    processes can hold nonsense.
    """
    owners = []
    for name in _OWNERS:
        try:
            files = distribution(name).files or ()
        except metadata.PackageNotFoundError:
            continue
        if any(file.as_posix() in ("pynvml.py", "pynvml/__init__.py") for file in files):
            owners.append(name)
    if len(owners) > 1:
        return f"{' and '.join(owners)} have overwritten each other's module pynvml", _REPAIR
    if owners and owners != [_OWNERS[0]]:
        return f"the module pynvml comes from {owners[0]}, which is not maintained", _REPAIR
    return None


# --- questions ---------------------------------------------------------------------------------

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
        errors: By function, the code with which it has failed since somebody cleared this.
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
        missing = f"the package nvidia-ml-py is not installed; {install_command('monitor')}"
        raise NvmlUnavailable(missing if error.name == "pynvml" else _damaged(error)) from error
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
