"""The description of the run of this process; whoever reads one needs no torch."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dataparallel import torch_internals
from dataparallel.devices import device_uuid
from dataparallel.monitor.module_spans import parameters_of
from dataparallel.monitor.readings.cgroup import usable_cpus
from dataparallel.monitor.readings.placement import own_labels
from dataparallel.monitor.run import RunInfo
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.processes import default_group
from dataparallel.threads.timeline import Timeline

#: The label of each class of torch's that wraps a module, which is its ``module``.
_WRAPPERS = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "DataParallel": "nn.DataParallel",
}


def describe_run(
    target: nn.Module | Optimizer, timeline: Timeline, faster_option: str = ""
) -> RunInfo:
    """Return the facts about a watched model; its buckets are made anew at times."""
    group, sizes = default_group(), []
    if isinstance(target, DataParallel):
        model, wrapper, group = type(target.module).__name__, type(target).__name__, None
    else:
        model, wrapper = _names(target)
    if isinstance(target, DistributedDataParallel):
        group = target.process_group
        buckets = target.reducer.buckets.all
        sizes = [sum(parameter.nbytes for parameter in one.originals) for one in buckets]
    world_size = 1 if group is None else group.size()
    address = os.environ.get("MASTER_ADDR", "")
    local = os.environ.get("LOCAL_WORLD_SIZE") or (world_size if _is_loopback(address) else 1)
    return RunInfo(
        model=model,
        wrapper=wrapper,
        devices=tuple(str(device) for device in timeline.devices),
        uuids=tuple(device_uuid(device) for device in timeline.devices),
        world_size=world_size,
        local_world_size=int(local),
        num_parameters=sum(p.numel() for p in parameters_of(target)),
        num_buckets=len(sizes),
        bucket_bytes=max(sizes, default=0),
        num_threads=torch.get_num_threads(),
        num_cpus=_num_cpus(int(local)),
        wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
        is_hooked=not isinstance(target, DataParallel),
        faster_option=faster_option,
        labels=own_labels(),
    )


def _names(target: nn.Module | Optimizer) -> tuple[str, str]:
    """Return the names of the innermost module and of its wrapper."""
    if isinstance(target, Optimizer):
        return type(target).__name__, "optimizer"
    found = []
    module: Any = target
    while True:
        inside, label = torch_internals.original_module(module), "torch.compile"
        if inside is None and type(module).__name__ in _WRAPPERS:
            inside, label = getattr(module, "module", None), _WRAPPERS[type(module).__name__]
        if not isinstance(inside, nn.Module):
            break
        found.append(label)
        module = inside
    name = type(module).__name__
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        # Made of the module's own class.
        found.append("fully_shard")
        name = name.removeprefix("FSDP")
    return name, " of ".join(found) or "module"


def _num_cpus(local_world_size: int) -> float:
    """Count the processors that the processes on this machine may use, also in a container."""
    count = usable_cpus()
    if local_world_size > 1:
        # Each of several may be bound to its own; what has started them is not.
        with contextlib.suppress(OSError):
            count = max(count, usable_cpus(os.getppid()))
    return count


def rank_of_process() -> int:
    """Return the rank of this process among those that train together."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def name_of_job() -> str:
    """Return the name that all processes of one training share, and no others have.

    A launcher tells it in the environment; else they are the children of one process.
    """
    host = socket.gethostname()
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return f"{host}:{os.getpid()}"
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return f"{host}:{os.getppid()}"
    # Each machine calls itself so.
    address = host if _is_loopback(address) else address
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    # Without a name torchrun takes "none", or makes up 32 digits.
    is_given = name != "none" and not re.fullmatch(
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name
    )
    return f"{name} at {address}:{port}" if is_given else f"{address}:{port}"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
