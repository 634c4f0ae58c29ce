"""The C++ backend of the virtual devices: compiled, loaded and registered once per process."""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch.utils import backend_registration

from dataparallel import torch_internals

if TYPE_CHECKING:
    from dataparallel.kernels.native import NativeExtension
    from dataparallel.virtual.interface import Extension

_NAME = "virtual"
_DEVICES_VARIABLE = "DATAPARALLEL_VIRTUAL_DEVICES"
_STRICT_VARIABLE = "DATAPARALLEL_VIRTUAL_STRICT"
_RACES_VARIABLE = "DATAPARALLEL_VIRTUAL_RACES"
_SCHEDULE_VARIABLE = "DATAPARALLEL_VIRTUAL_SCHEDULE"
_MAX_DEVICES = 64

_lock = threading.Lock()


_loaded: Extension | None = None


def loaded() -> Extension | None:
    """Return the extension, or None before the devices were enabled."""
    return _loaded


def required() -> Extension:
    """Return the extension; raise a RuntimeError before the devices were enabled."""
    if _loaded is None:
        raise RuntimeError(
            "virtual devices are not enabled: call dataparallel.virtual.enable() first, "
            "or set DATAPARALLEL_VIRTUAL_DEVICES"
        )
    return _loaded


def native_extension() -> NativeExtension:
    """Return the compiled part; imported late, for those only who enable the devices."""
    from dataparallel.kernels.native import NativeExtension

    return NativeExtension(
        name="dataparallel_virtual_backend",
        label="the virtual device",
        prefix="virtual",
        sources=Path(__file__).parent / "csrc",
        # These need the headers that the others do not.
        first_unit=frozenset({"autocast", "bindings", "hooks", "places"}),
    )


def is_enabled() -> bool:
    """Tell whether this process has virtual devices.

    Example::

        if not dataparallel.virtual.is_enabled():
            dataparallel.virtual.enable(4)

    Returns:
        True after ``enable``.
    """
    return _loaded is not None


def device_count() -> int:
    """Return the number of virtual devices.

    Example::

        devices = [f"virtual:{i}" for i in range(dataparallel.virtual.device_count())]

    Returns:
        The number that ``enable`` got; 0 before that call.
    """
    return 0 if _loaded is None else _loaded.device_count()


def enable(
    n: int = 4,
    *,
    strict: bool | None = None,
    races: bool | None = None,
    schedule: int | None = None,
) -> None:
    """Add ``n`` virtual devices, ``virtual:0`` to ``virtual:{n-1}``, to this process.

    The first call on a machine compiles the backend, which takes about 20 seconds. Later processes
    load it from a cache. A second call with the same number does nothing.

    Example::

        dataparallel.virtual.enable(2)
        x = torch.ones(3, device="virtual:1")

    Args:
        n: How many devices, 1 to 64. Default: 4.
        strict: True if default streams defer work as side streams do, see ``strict_mode``. Default:
            the environment variable ``DATAPARALLEL_VIRTUAL_STRICT`` (0 or 1), else no.
        races: True if races are errors, see ``check_races``. Default: the environment variable
            ``DATAPARALLEL_VIRTUAL_RACES`` (0 or 1), else as ``strict``.
        schedule: Seed of the order in which streams run, see ``set_schedule``. Default: the
            environment variable ``DATAPARALLEL_VIRTUAL_SCHEDULE``, else none.

    Raises:
        TypeError: ``n`` or ``schedule`` is not an int.
        ValueError: ``n`` or ``schedule`` is out of range, or an environment variable is not what it
            must be: 0 or 1, or a seed.
        RuntimeError: Another number of devices is enabled already, a backward has run in the
            process before, another package has registered an accelerator of its own, or the backend
            cannot be compiled.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"the number of virtual devices must be an int, got {n!r}")
    if not 1 <= n <= _MAX_DEVICES:
        raise ValueError(f"the number of virtual devices must be 1 to {_MAX_DEVICES}, got {n}")
    with _lock:
        if _loaded is None:
            _register(n)
            strict = _flag(_STRICT_VARIABLE) if strict is None else strict
            races = _flag(_RACES_VARIABLE) if races is None else races
            schedule = _seed() if schedule is None else schedule
        elif _loaded.device_count() != n:
            raise RuntimeError(
                f"{_loaded.device_count()} virtual devices are enabled already, and a process "
                f"cannot change their number to {n}: start another process"
            )
        if strict is not None:
            required().set_strict(bool(strict))
        if races is not None:
            required().set_checks_races(bool(races))
        if schedule is not None:
            set_schedule(schedule)


def set_schedule(seed: int | None) -> None:
    """Let streams run in an order that a seed chooses among those that the program allows.

    Each seed lets other streams run ahead of others, and further; they always run behind what they
    wait for. So a wait that is missing gives wrong results under some seeds. In strict mode that
    holds for default streams, too. A program of one thread runs in the same order again.

    Example::

        for seed in range(20):
            dataparallel.virtual.set_schedule(seed)
            with dataparallel.virtual.strict_mode(), dataparallel.virtual.check_races(False):
                train_step()
        dataparallel.virtual.set_schedule(None)

    Args:
        seed: At least 0. None: streams run when somebody waits for them, which is so at the start.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        TypeError: ``seed`` is neither an int nor None.
        ValueError: ``seed`` is negative, or has more than 64 bits.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"the seed of a schedule is an int or None, got {seed!r}")
    if seed is not None and not 0 <= seed < 1 << 64:
        raise ValueError(f"the seed of a schedule must be at least 0 and below 2**64, got {seed}")
    required().set_schedule(seed)


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


def _flag(variable: str) -> bool | None:
    text = os.environ.get(variable, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, got {text!r}")
    return text == "1" if text else None


def _seed() -> int | None:
    text = os.environ.get(_SCHEDULE_VARIABLE, "").strip()
    if text and (not text.isdecimal() or int(text) >= 1 << 64):
        raise ValueError(
            f"{_SCHEDULE_VARIABLE} must be a number of at least 0 and below 2**64, got {text!r}"
        )
    return int(text) if text else None


def _register(n: int) -> None:
    global _loaded
    other = torch_internals.privateuse1_name()
    if other != "privateuseone":
        raise RuntimeError(
            f"the accelerator backend {other!r} is registered already: "
            "torch can have one backend from outside in a process"
        )
    for variable in (_STRICT_VARIABLE, _RACES_VARIABLE):
        _flag(variable)  # Complain before anything is registered.
    _seed()
    from dataparallel.virtual import device_module

    extension = cast("Extension", native_extension().load())
    if extension.autograd_has_started():
        raise RuntimeError(
            "virtual devices must be enabled before the first backward of the process, which "
            "starts autograd's threads for the devices that there are: call "
            "dataparallel.virtual.enable() earlier, or set DATAPARALLEL_VIRTUAL_DEVICES"
        )
    extension.initialize(n)
    device_module.use(extension)
    backend_registration.rename_privateuse1_backend(_NAME)
    torch_internals.register_device_module(_NAME, device_module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch_internals.keep_parameters_between(_NAME)
    _loaded = extension
    atexit.register(_let_engine_threads_finish)
    atexit.register(extension.raise_late)  # Python prints it.


def _let_engine_threads_finish() -> None:
    # A thread of the autograd engine drops what a finished backward held of Python's, and needs the
    # interpreter lock for it. One that asks while the interpreter ends takes the process down.
    time.sleep(0.01)
