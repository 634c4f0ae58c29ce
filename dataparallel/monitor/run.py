"""What a run tells those who watch it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from dataparallel.monitor.readings.cgroup import quota
from dataparallel.monitor.record import StepRecord
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.threads.timeline import Phase


@dataclass(frozen=True)
class RunInfo:
    """What does not change while a run goes on.

    Attributes:
        model: Name of the wrapped module's class.
        wrapper: Name of the wrapper's class.
        devices: The device of each replica.
        uuids: The identity of each of them; None where it has none.
        world_size: How many processes there are.
        local_world_size: How many of them are on this machine.
        num_parameters: Number of elements of all parameters.
        num_buckets: How many buckets gradients are reduced in; 0 where there are none.
        bucket_bytes: Size of the largest bucket.
        num_threads: With how many threads torch computes an operator on the CPU.
        num_cpus: How many processors the process may use; a quota may be a part of one.
        wait_policy: What ``OMP_WAIT_POLICY`` says; empty where it says nothing.
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


@dataclass(frozen=True)
class RunState:
    """A run at one moment.

    Attributes:
        job: What all ranks of a job have in common, and no other job has.
        rank: Its rank among the processes.
        host: Name of the machine.
        pid: Its process.
        number: Which of the monitors of its process watches it, from 0.
        time: The moment, in seconds since 1970.
        started: When watching began, likewise.
        num_steps: How many steps there were.
        num_samples: How many samples they had, in this process.
        info: What does not change.
        now: Per replica the phase in which it is, and for how many seconds already.
        totals: Per replica and phase the seconds of all steps so far.
        memory: Per replica, the bytes that torch's tensors occupy on its device; 0 on the CPU.
        last: The last step that has ended; None if there is none.
        monitor_seconds: Processor seconds that watching itself has taken in this process.
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

    @property
    def order(self) -> tuple[str, int, int, int]:
        """Runs are shown in this order."""
        return self.job, self.rank, self.pid, self.number

    @property
    def identity(self) -> tuple[str, int, int]:
        """What no other run has; a process may have several."""
        return self.host, self.pid, self.number

    def to_json(self) -> dict[str, Any]:
        """The state as what ``json`` writes; see :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RunState:
        """The state that :meth:`to_json` has described.

        Raises:
            ValueError: It is no description of a state.
        """
        try:
            info = data["info"]
            lists = {name: tuple(info[name]) for name in ("devices", "uuids")}
            return RunState(
                **{
                    **data,
                    "info": RunInfo(**{**info, **lists}),
                    "now": tuple((phase, float(since)) for phase, since in data["now"]),
                    "totals": tuple(dict(one) for one in data["totals"]),
                    "memory": tuple(data["memory"]),
                    "last": None if data["last"] is None else StepRecord.from_json(data["last"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no state of a run: {error!r} in {data!r:.200}") from error


def describe_run(model: DataParallel[Any]) -> RunInfo:
    """All that a monitor asks of a wrapper beside its timeline; buckets are made anew at times."""
    group, sizes = None, []
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
        buckets = model.reducer.buckets.all
        sizes = [sum(parameter.nbytes for parameter in one.originals) for one in buckets]
    return RunInfo(
        model=type(model.module).__name__,
        wrapper=type(model).__name__,
        devices=tuple(str(device) for device in model.device_ids),
        uuids=tuple(device_uuid(device) for device in model.timeline.devices),
        world_size=1 if group is None else group.size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_buckets=len(sizes),
        bucket_bytes=max(sizes, default=0),
        num_threads=torch.get_num_threads(),
        num_cpus=_num_cpus(),
        wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
    )


def _num_cpus() -> float:
    """How many processors this process may use, also in a container."""
    ask = getattr(os, "sched_getaffinity", None)
    count = float(len(ask(0)) if ask is not None else os.cpu_count() or 1)
    limit = quota()
    return count if limit is None else min(count, limit.cpus)


def rank_of_process() -> int:
    """The rank of this process among those that train together."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def name_of_job() -> str:
    """What all processes that train together have in common, and no others have.

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
    return f"{address}:{port}" if name == "none" else f"{name} at {address}:{port}"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def device_uuid(device: torch.device) -> str | None:
    """What identifies an accelerator in every process and tool; None where nothing does."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
