"""The states of all random generators that a training draws from.

Replicas need none of their own: each call seeds theirs from the caller's CPU generator and the
index of the replica, see Note [Random numbers in replicas] in
``dataparallel/threads/random.py``. So the caller's generators, and those of the accelerators,
are all there is to save.

Note [Random numbers with other processes and devices]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process that was there when the state was saved gets what it had, by its rank. One that was not is
seeded from the CPU state of the first process and its own rank, so that what it draws is another
sequence than all others', and the same one at every load. An accelerator that was not there, or was
one of another type, is seeded in the same way from its position among the devices.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel import devices as _devices
from dataparallel.threads.random import default_generator, mixed_seed

_log = logging.getLogger("dataparallel")

# What generators say of states that are none.
_ODD = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError)


def capture(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, as they are now.

    Args:
        devices: Those of the replicas; each accelerator's own generator is one of them.

    Raises:
        TypeError: NumPy has another kind of generator than its own.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "cpu": torch.default_generator.get_state(),
        "devices": [
            {"type": device.type, "state": generator.get_state()}
            for device, generator in _accelerator_generators(devices)
        ],
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found = numpy.random.get_state()
        if not isinstance(found, tuple):
            raise TypeError(
                f"NumPy's generator is a {found['bit_generator']} (numpy.random.set_bit_generator) "
                "in the place of MT19937, and its state cannot be saved; pass rng=False, or leave "
                "the generator as it was"
            )
        kind, keys, *rest = found
        state["numpy"] = (kind, torch.from_numpy(keys.copy()), *rest)
    return state


def problem(state: Any) -> str | None:
    """Why a state cannot be restored; None if it can. Nothing is changed."""
    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(state["cpu"])
        for entry in state["devices"]:
            if entry["state"].dtype != torch.uint8 or not isinstance(entry["type"], str):
                return "the state of an accelerator is no state of a generator"
        numpy = _numpy() if "numpy" in state else None
        if numpy is not None:
            numpy.random.RandomState().set_state(_for_numpy(state["numpy"]))
    except _ODD as error:
        return f"it holds no states of random generators: {error!r:.200}"
    return None


def restore(state: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Put all generators into the states that they had.

    Args:
        state: From :func:`capture`, for which :func:`problem` is None.
        devices: Those of the replicas now; see Note [Random numbers with other processes and
            devices].
    """
    random.setstate(state["python"])
    torch.default_generator.set_state(state["cpu"])
    saved = state["devices"]
    for index, (device, generator) in enumerate(_accelerator_generators(devices)):
        if index < len(saved) and saved[index]["type"] == device.type:
            generator.set_state(saved[index]["state"])
        else:
            generator.manual_seed(mixed_seed(_number_of(state), index))
    numpy = _numpy() if "numpy" in state else None
    if numpy is not None:
        numpy.random.set_state(_for_numpy(state["numpy"]))


def derive(state: dict[str, Any], rank: int, devices: Sequence[torch.device]) -> None:
    """Seed all generators of a process for which no state was saved.

    Args:
        state: That of the first process.
        rank: Of this process.
        devices: Those of its replicas.
    """
    seed = mixed_seed(_number_of(state), rank)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for index, (_, generator) in enumerate(_accelerator_generators(devices)):
        generator.manual_seed(mixed_seed(seed, index + 1))
    numpy = _numpy() if "numpy" in state else None
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _accelerator_generators(
    devices: Sequence[torch.device],
) -> list[tuple[torch.device, torch.Generator]]:
    found = []
    for device in dict.fromkeys(devices):
        generator = default_generator(device)
        if _devices.is_accelerator(device) and generator is not None:
            found.append((device, generator))
    return found


def _number_of(state: dict[str, Any]) -> int:
    data = bytes(state["cpu"].tolist())
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        _log.warning("the checkpoint has a state of NumPy's generator, but NumPy is not installed")
        return None


def _for_numpy(state: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, keys, *rest = state
    return (kind, keys.numpy(), *rest)
