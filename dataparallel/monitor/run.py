"""What a run tells those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

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
        num_parameters: Number of elements of all parameters.
        num_buckets: How many buckets gradients are reduced in; 0 where there are none.
        bucket_bytes: Size of the largest bucket.
    """

    model: str
    wrapper: str
    devices: tuple[str, ...]
    uuids: tuple[str | None, ...]
    world_size: int = 1
    num_parameters: int = 0
    num_buckets: int = 0
    bucket_bytes: int = 0


@dataclass(frozen=True)
class RunState:
    """A run at one moment.

    Attributes:
        pid: Its process.
        rank: Its rank among the processes.
        time: The moment, in seconds since 1970.
        started: When watching began, likewise.
        num_steps: How many steps there were.
        num_samples: How many samples they had, in this process.
        info: What does not change.
        now: Per replica the phase in which it is, and for how many seconds already.
        totals: Per replica and phase the seconds of all steps so far.
        memory: Per replica, the bytes that torch's tensors occupy on its device; 0 on the CPU.
        last: The last step that has ended; None if there is none.
    """

    pid: int
    rank: int
    time: float
    started: float
    num_steps: int
    num_samples: int
    info: RunInfo
    now: tuple[tuple[Phase, float], ...]
    totals: tuple[Mapping[Phase, float], ...]
    memory: tuple[int, ...]
    last: StepRecord | None

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
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_buckets=len(sizes),
        bucket_bytes=max(sizes, default=0),
    )


def device_uuid(device: torch.device) -> str | None:
    """What identifies an accelerator in every process and tool; None where nothing does."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
