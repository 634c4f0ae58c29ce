"""Which backends and accelerators a process can have, found out before the others are met."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import constants

from dataparallel.devices import accelerators, is_accelerator


def default_backend() -> str:
    """Gloo, and the backend of the accelerators of this machine if there is one."""
    there = accelerators()
    known: dict[str, str] = dist.Backend.default_device_backend_map
    if not there or there[0].type not in known:
        return "gloo"
    return f"cpu:gloo,{there[0].type}:{known[there[0].type]}"


def check_backend(backend: str | None) -> str:
    """A backend as torch writes it.

    Args:
        backend: As a user writes it; None for the default.

    Raises:
        TypeError: It is no text.
        ValueError: Torch does not have it.
    """
    if backend is None:
        return default_backend()
    if not isinstance(backend, str):
        raise TypeError(f"backend is a str, but got {backend!r} of type {type(backend).__name__}")
    written = str(dist.Backend(backend))
    if written != dist.Backend.UNDEFINED and not dist.is_backend_available(written):
        there = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
        there = [name for name in there if name not in (dist.Backend.UNDEFINED, dist.Backend.FAKE)]
        raise ValueError(
            f"backend {backend!r} is not in this build of torch ({torch.__version__}), which has "
            f"{', '.join(there)}; pass one of these, or install a build that has it"
        )
    return written


def default_timeout(backend: str) -> float:
    """Seconds that a collective may take if nobody says anything else, as in torch."""
    of_nccl = constants.default_pg_nccl_timeout if backend == dist.Backend.NCCL else None
    return (of_nccl or constants.default_pg_timeout).total_seconds()


def check_device(device_id: torch.device | int | None) -> None:
    """Raise a ValueError if this process can't have an accelerator.

    Args:
        device_id: What the user passed; None for no accelerator in particular.
    """
    if device_id is None:
        return
    there = accelerators()
    if isinstance(device_id, torch.device):
        if not is_accelerator(device_id):
            return
        is_there = device_id in there
    else:
        is_there = device_id in range(len(there))
    if not is_there:
        have = f"{len(there)} of type {there[0].type}" if there else "none"
        raise ValueError(
            f"device_id is {device_id}, but of accelerators there is {have} here; pass one with "
            "its index, from 0 on, or leave device_id out"
        )
