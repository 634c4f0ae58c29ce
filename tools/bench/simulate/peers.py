"""The peers of ours: torch DDP, nn.DataParallel and the bare module, from the trace of the last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dataparallel.tools.bench.simulate.player import Instruction
from dataparallel.tools.bench.simulate.record import (
    GRADIENT,
    OF_MEMORY,
    StepTrace,
    Timing,
    phases,
)

#: The buckets of torch DDP: the first one, and the others.
_BUCKETS = (2**20, 25 * 2**20)
#: The buffer of torch.nn.parallel.comm.
_BUFFER = 10 * 2**20
#: The number of the stream that NCCL has for itself.
_NCCL = 1
#: Numbers of events that no trace has.
_events = itertools.count(1 << 40)


def bare_tasks(bare: StepTrace, timing: Timing, batches: int) -> list[Instruction]:
    """Return the tasks of the bare module on one device, for so many times the batch."""
    return [
        task._replace(seconds=task.seconds * (batches if phase in ("forward", "backward") else 1))
        for phase, task in _tasks(bare, timing)
        if not task.name.startswith(GRADIENT)
    ]


class _Buckets:
    """The buckets of one process of torch DDP, which NCCL reduces on a stream of its own."""

    def __init__(self, timing: Timing, members: int, tasks: list[Instruction]) -> None:
        self._machine, self._members, self._tasks = timing.machine, members, tasks
        self._held, self._limits = 0, list(_BUCKETS)

    def add(self, size: int) -> None:
        """Divide a gradient and write it to its bucket, which is reduced if it is full."""
        machine = self._machine
        seconds = machine.kernel_seconds(2 * size, 0)
        self._tasks.append(
            Instruction("kernel", "divide", 0, seconds=seconds, host=machine.launch_backward)
        )
        self._held += size
        if self._held >= self._limits[0]:
            self._limits = self._limits[-1:]
            self._reduce()

    def end(self) -> None:
        """Reduce the last bucket, and let the computation wait for all of them."""
        if self._held:
            self._reduce()
        self._wait(_NCCL, 0)
        self._limits = list(_BUCKETS)

    def _reduce(self) -> None:
        machine, size = self._machine, self._held
        self._wait(0, _NCCL)
        seconds = machine.all_reduce_seconds(size, self._members)
        moved = 2 * (self._members - 1) * size // self._members
        task = Instruction("collective", "all-reduce", 0, _NCCL, seconds, size, moved=moved)
        self._tasks.append(task._replace(host=machine.launch_backward))
        self._held = 0

    def _wait(self, first: int, then: int) -> None:
        """Let a stream wait for another one."""
        event, host = next(_events), self._machine.launch_event
        self._tasks.append(Instruction("record", "", 0, first, id=event, host=host))
        self._tasks.append(Instruction("wait", "", 0, then, id=event, host=host))


def ddp_tasks(bare: StepTrace, timing: Timing, members: int) -> list[Instruction]:
    """Return the tasks of one of the processes of torch DDP, which all do the same.

    A gradient is divided and written into its bucket (``gradient_as_bucket_view=True``). A bucket
    that is full is reduced on a stream of NCCL, while backward goes on, and the optimizer waits for
    all of them.
    """
    tasks: list[Instruction] = []
    buckets = _Buckets(timing, members, tasks)
    for phase, task in _tasks(bare, timing):
        if task.kind == "mark" and task.name.startswith(GRADIENT):
            buckets.add(bare.sizes[int(task.name.removeprefix(GRADIENT))])
            continue
        if task.kind == "mark" and phase == "optimizer":
            buckets.end()
        tasks.append(task)
    return tasks


def data_parallel_tasks(bare: StepTrace, timing: Timing, devices: int) -> list[Instruction]:
    """Return the tasks of torch.nn.DataParallel with NCCL, as its source has them.

    Before forward the parameters are packed into buffers of 10 MiB and broadcast on the devices'
    own streams. Threads of one process launch the replicas. After the whole backward the gradients
    are packed likewise, and reduced to the first device, which alone steps.
    """
    machine = timing.machine
    tasks: list[Instruction] = []
    groups = list(_buffers(bare.sizes))

    def meet(name: str, size: int) -> None:
        """Let all devices take part in a collective on their default streams."""
        event, after = [next(_events) for _ in range(devices)], next(_events)
        host = machine.launch_event
        for device in range(1, devices):
            tasks.append(Instruction("record", device=device, id=event[device], host=host))
            tasks.append(Instruction("wait", device=0, id=event[device], host=host))
        seconds = machine.one_way_seconds(size)
        tasks.append(Instruction("collective", name, 0, 0, seconds, size, host=machine.launch))
        tasks.append(Instruction("record", device=0, id=after, host=host))
        tasks.extend(Instruction("wait", device=i, id=after, host=host) for i in range(1, devices))

    def pack(size: int, number: int, device: int) -> None:
        if number > 1:
            seconds = machine.kernel_seconds(2 * size, 0)
            tasks.append(
                Instruction("kernel", "pack", device, seconds=seconds, host=machine.launch)
            )

    for phase, task in _tasks(bare, timing):
        if task.kind in OF_MEMORY or task.name.startswith(GRADIENT):
            continue
        if task.kind == "mark":
            if phase == "optimizer":
                for size, number in groups:
                    for device in range(devices):
                        pack(size, number, device)
                    meet("reduce", size)
            tasks.append(task)
            if phase == "forward":
                for size, number in groups:
                    pack(size, number, 0)
                    meet("broadcast", size)
        elif phase in ("forward", "backward"):
            tasks.extend(
                task._replace(device=i, thread=i, id=task.id * devices + i) for i in range(devices)
            )
        else:
            tasks.append(task)
    return tasks


def _tasks(bare: StepTrace, timing: Timing) -> Iterator[tuple[str, Instruction]]:
    return ((phase, timing.task(entry, phase)) for phase, entry in phases(bare.entries))


def _buffers(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield bytes and number of the parameters of each buffer, as torch fills it."""
    held = number = 0
    for size in sizes:
        if held and held + size > _BUFFER:
            yield held, number
            held = number = 0
        held, number = held + size, number + 1
    if held:
        yield held, number
