"""The facts that a run tells those who watch it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dataparallel import torch_internals
from dataparallel.monitor.module_spans import parameters_of
from dataparallel.monitor.readings.cgroup import usable_cpus
from dataparallel.monitor.record import StepRecord
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.processes import default_group
from dataparallel.threads.timeline import Phase, Timeline


@dataclass(frozen=True)
class RunInfo:
    """The facts that stay the same while a run goes on.

    Attributes:
        model: Name of the class of the module, or of the optimizer.
        wrapper: In what the module is wrapped: a class of this package; ``"DDP"``, ``"FSDP"``,
            ``"fully_shard"`` or ``"torch.compile"`` of torch's; ``"module"`` if in nothing,
            ``"optimizer"`` if the monitor got one.
        devices: The device of each replica.
        uuids: The identity of each of them; None if it has none.
        world_size: How many processes there are.
        local_world_size: How many of them are on this machine.
        num_parameters: Number of elements of all parameters.
        num_buckets: How many buckets gradients are reduced in; 0 if there are none.
        bucket_bytes: Size of the largest bucket.
        num_threads: With how many threads torch computes an operator on the CPU.
        num_cpus: How many processors its processes on this machine may use; a quota may be a part
            of one.
        wait_policy: The value of ``OMP_WAIT_POLICY``; empty if it is not set.
        is_hooked: True if the module is no wrapper of this package, and hooks watch it.
        faster_option: The option of its optimizer that would make the step faster; empty if there
            is none.
    """

    model: str
    wrapper: str
    devices: tuple[str, ...]
    uuids: tuple[str | None, ...]
    world_size: int = 1
    local_world_size: int = 1
    num_parameters: int = 0
    num_buckets: int = 0
    bucket_bytes: int = 0
    num_threads: int = 1
    num_cpus: float = 1.0
    wait_policy: str = ""
    is_hooked: bool = False
    faster_option: str = ""

    @property
    def hides_waiting(self) -> bool:
        """True if the waiting for other processes is a part of the forward and the backward."""
        return self.is_hooked and self.world_size > 1


@dataclass(frozen=True)
class RunState:
    """A run at one moment.

    Attributes:
        job: The name that all ranks of a job share, and no other job has.
        rank: Its rank among the processes.
        host: Name of the machine.
        pid: Its process.
        number: The number of the monitor among those of its process, from 0.
        time: The moment, in seconds since 1970.
        started: When watching began, likewise.
        num_steps: How many steps there were.
        num_samples: How many samples they had, in this process.
        info: The facts that do not change.
        now: Per replica the phase in which it is, and for how many seconds already.
        totals: Per replica and phase the seconds of all steps so far.
        memory: Per replica, the bytes that torch's tensors occupy on its device; 0 on the CPU.
        last: The last step that has ended; None if there is none.
        monitor_seconds: Processor seconds that watching itself has taken in this process.
        host_bound: Per replica the seconds of all steps so far in which its device waited for the
            host to issue work; see :class:`ReplicaStep`.
        memory_peak: Per replica, the most bytes that tensors have occupied; 0 on the CPU.
        memory_total: Per replica, the bytes that its device has; 0 on the CPU.
        memory_retries: Per replica, how often the allocator had to give back its cache and try
            again since watching began.
    """

    job: str
    rank: int
    host: str
    pid: int
    number: int
    time: float
    started: float
    num_steps: int
    num_samples: int
    info: RunInfo
    now: tuple[tuple[Phase, float], ...]
    totals: tuple[Mapping[Phase, float], ...]
    memory: tuple[int, ...]
    last: StepRecord | None
    monitor_seconds: float = 0.0
    host_bound: tuple[float, ...] = ()
    memory_peak: tuple[int, ...] = ()
    memory_total: tuple[int, ...] = ()
    memory_retries: tuple[int, ...] = ()

    @property
    def monitor_share(self) -> float:
        """The share of a processor that watching has taken since it began."""
        return self.monitor_seconds / max(1e-9, self.time - self.started)

    @property
    def order(self) -> tuple[str, int, int, int]:
        """Runs are shown in this order."""
        return self.job, self.rank, self.pid, self.number

    @property
    def identity(self) -> tuple[str, int, int]:
        """Return the identity that no other run has; a process may have several."""
        return self.host, self.pid, self.number

    def to_json(self) -> dict[str, Any]:
        """Return the state as values for ``json``; see :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RunState:
        """Return the state that :meth:`to_json` has described."""
        try:
            info = data["info"]
            lists = {name: tuple(info[name]) for name in ("devices", "uuids")}
            numbers = ("memory", "memory_peak", "memory_total", "memory_retries", "host_bound")
            return RunState(
                **{
                    **data,
                    **{name: tuple(data[name]) for name in numbers},
                    "info": RunInfo(**{**info, **lists}),
                    "now": tuple((phase, float(since)) for phase, since in data["now"]),
                    "totals": tuple(dict(one) for one in data["totals"]),
                    "last": None if data["last"] is None else StepRecord.from_json(data["last"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no state of a run: {error!r} in {data!r:.200}") from error


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


def device_uuid(device: torch.device) -> str | None:
    """Return the identity of an accelerator in every process and tool; None if it has none."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
