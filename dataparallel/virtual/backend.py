"""Registers the virtual devices with torch, once per process."""

from __future__ import annotations

import atexit
import os
import threading
import time

from torch.utils import backend_registration

from dataparallel import torch_internals
from dataparallel.virtual import extension

_NAME = "virtual"
_DEVICES_VARIABLE = "DATAPARALLEL_VIRTUAL_DEVICES"
_STRICT_VARIABLE = "DATAPARALLEL_VIRTUAL_STRICT"
_MAX_DEVICES = 64

_lock = threading.Lock()


def is_enabled() -> bool:
    """Tell whether this process has virtual devices.

    Example::

        if not dataparallel.virtual.is_enabled():
            dataparallel.virtual.enable(4)

    Returns:
        True after ``enable``.
    """
    return extension.loaded() is not None


def device_count() -> int:
    """Return the number of virtual devices.

    Example::

        devices = [f"virtual:{i}" for i in range(dataparallel.virtual.device_count())]

    Returns:
        The number that ``enable`` got; 0 before that call.
    """
    loaded = extension.loaded()
    return 0 if loaded is None else loaded.device_count()


def enable(n: int = 4, *, strict: bool | None = None) -> None:
    """Add ``n`` virtual devices, ``virtual:0`` to ``virtual:{n-1}``, to this process.

    The first call on a machine compiles the backend, which takes about 20 seconds. Later processes
    load it from a cache. A second call with the same number does nothing.

    Example::

        dataparallel.virtual.enable(2)
        x = torch.ones(3, device="virtual:1")

    Args:
        n: How many devices, 1 to 64. Default: 4.
        strict: Whether default streams defer work as side streams do, see ``strict_mode``. Default:
            the environment variable ``DATAPARALLEL_VIRTUAL_STRICT`` (0 or 1), else no.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is out of range, or the environment variable is neither 0 nor 1.
        RuntimeError: Another number of devices is enabled already, another package has registered
            an accelerator of its own, or the backend cannot be compiled.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"the number of virtual devices must be an int, got {n!r}")
    if not 1 <= n <= _MAX_DEVICES:
        raise ValueError(f"the number of virtual devices must be 1 to {_MAX_DEVICES}, got {n}")
    with _lock:
        loaded = extension.loaded()
        if loaded is None:
            loaded = _register(n)
            strict = _strict_from_environment() if strict is None else strict
        elif loaded.device_count() != n:
            raise RuntimeError(
                f"{loaded.device_count()} virtual devices are enabled already, and a process "
                f"cannot change their number to {n}: start another process"
            )
        if strict is not None:
            loaded.set_strict(bool(strict))


def enable_from_environment() -> None:
    """Enable as many devices as ``DATAPARALLEL_VIRTUAL_DEVICES`` says, or none if it is unset.

    ``import dataparallel`` calls this function.

    Example::

        os.environ["DATAPARALLEL_VIRTUAL_DEVICES"] = "4"
        dataparallel.virtual.enable_from_environment()

    Raises:
        ValueError: The variable is not a number from 1 to 64.
        RuntimeError: As for ``enable``.
    """
    text = os.environ.get(_DEVICES_VARIABLE, "").strip()
    if not text:
        return
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_DEVICES:
        raise ValueError(
            f"{_DEVICES_VARIABLE} must be a number from 1 to {_MAX_DEVICES}, got {text!r}"
        )
    enable(int(text))


def _strict_from_environment() -> bool:
    text = os.environ.get(_STRICT_VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{_STRICT_VARIABLE} must be 0 or 1, got {text!r}")
    return text == "1"


def _register(n: int) -> extension.Extension:
    other = torch_internals.privateuse1_name()
    if other != "privateuseone":
        raise RuntimeError(
            f"the accelerator backend {other!r} is registered already: "
            "torch can have one backend from outside in a process"
        )
    _strict_from_environment()  # Complain before anything is registered.
    # Imported late: building is needed by nobody who does not enable the devices.
    from dataparallel.virtual import device_module
    from dataparallel.virtual.build import load

    loaded = load()
    loaded.initialize(n)
    device_module.use_generators(loaded.default_generators())
    backend_registration.rename_privateuse1_backend(_NAME)
    torch_internals.register_device_module(_NAME, device_module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    extension.keep(loaded)
    atexit.register(_let_engine_threads_finish)
    return loaded


def _let_engine_threads_finish() -> None:
    # A thread of the autograd engine drops what a finished backward held of Python's, and needs the
    # interpreter lock for it. One that asks while the interpreter ends takes the process down.
    time.sleep(0.01)
