"""Who takes part when collectives are measured, and with what: plain records and pure functions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dataparallel.tools.bench.contestants import Contestant, Task

OPERATIONS = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single")
FORMS = ("local", "process", "hybrid")
#: Processes of ours in the hybrid form.
HYBRID_PROCESSES = 2
SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"

_ELEMENT = 4
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: Repetitions of a small size beyond which more say nothing new.
_ENOUGH = 200


@dataclass(frozen=True, kw_only=True)
class CollectivesTask(Task):
    """Collectives of float32 tensors of several sizes.

    The kind of the task says who the members are: ``"ours"``: the replicas of one process, or of
    several; ``"ddp"``: processes with one member each; ``"bare"``: threads that copy and add memory
    and know nothing of each other.

    Attributes:
        sizes: Bytes of each member's input.
        forms: What is compared: some of ``"local"``, ``"process"`` and ``"hybrid"``.
        operations: Those of the process-group form.
    """

    subject: ClassVar[str] = "collectives"

    sizes: tuple[int, ...]
    forms: tuple[str, ...] = FORMS[:2]
    operations: tuple[str, ...] = OPERATIONS[:1]


def plan_members(task: CollectivesTask, devices: Sequence[str]) -> tuple[Contestant, ...]:
    """Who is measured, in the order of a round.

    Args:
        task: What all have in common; the place in the contestant is filled in.
        devices: One per replica of a process.

    Returns:
        By name, as far as the forms need them: ``"local"``: replicas; ``"processes"``: as many
        processes; ``"memory"``: as many threads; ``"hybrid"``: replicas of several processes;
        ``"hybrid peers"``: as many processes.

    Raises:
        ValueError: There are fewer than two members, a size is too small to be divided, or
            processes cannot share the devices.
    """
    _check(task, devices)
    found = []
    alone = [form for form in task.forms if form != "hybrid"]
    if "local" in task.forms:
        found.append(_replicas(task, devices, "local", 1))
    if alone:
        found.append(_processes(replace(task, forms=tuple(alone)), devices, "processes"))
    if "local" in task.forms:
        memory = replace(task, kind="bare", devices=tuple(devices), replicas=len(devices))
        found.append(Contestant("memory", "memory", (memory,)))
    if "hybrid" in task.forms:
        found.append(_replicas(task, devices, "hybrid", HYBRID_PROCESSES))
        peers = replace(task, forms=("hybrid",))
        found.append(_processes(peers, list(devices) * HYBRID_PROCESSES, "hybrid peers"))
    return tuple(found)


def _check(task: CollectivesTask, devices: Sequence[str]) -> None:
    if len(devices) < 2:
        raise ValueError(
            f"a collective needs two members or more, but got --devices {','.join(devices)}"
        )
    most = len(devices) * (HYBRID_PROCESSES if "hybrid" in task.forms else 1)
    for size in task.sizes:
        if not elements(size, most):
            raise ValueError(
                f"{size} bytes are too few for {most} members, which need at least "
                f"{_ELEMENT * most}"
            )
    own = [name for name in devices if name != "cpu" and not name.startswith("virtual")]
    if own and "hybrid" in task.forms:
        raise ValueError(
            f"the hybrid form would give {HYBRID_PROCESSES} processes the same devices "
            f"{', '.join(devices)}; only the CPU can be shared so"
        )


def _replicas(
    task: CollectivesTask, devices: Sequence[str], name: str, processes: int
) -> Contestant:
    tasks = [
        replace(
            task,
            kind="ours",
            devices=tuple(devices),
            replicas=len(devices) * processes,
            rank=rank,
            world_size=processes,
            meeting_point=f"{task.meeting_point}-{name}",
        )
        for rank in range(processes)
    ]
    return Contestant(name, f"replicas {processes}x{len(devices)}", tuple(tasks))


def _processes(task: CollectivesTask, devices: Sequence[str], name: str) -> Contestant:
    # Processes have no collectives on virtual devices; those are host memory all the same.
    homes = ["cpu" if each.startswith("virtual") else each for each in devices]
    tasks = [
        replace(
            task,
            kind="ddp",
            devices=(home,),
            replicas=len(homes),
            rank=rank,
            world_size=len(homes),
            meeting_point=f"{task.meeting_point}-{name}",
        )
        for rank, home in enumerate(homes)
    ]
    return Contestant(name, f"{len(homes)} processes", tuple(tasks))


def phase(form: str, operation: str, size: int) -> str:
    """The key under which the seconds of a measurement are kept.

    Args:
        form: ``"local"``, ``"hybrid"``, ``"gloo"``, ``"ours"``, ``"torch"`` or ``"memory"``.
        operation: Name of a collective; ``"copy"`` or ``"sum"`` of memory.
        size: Bytes.
    """
    return f"{form} {operation} {size}"


def elements(size: int, members: int) -> int:
    """How many numbers a member's input has: what fits into ``size``, in equal parts for all."""
    return size // _ELEMENT // members * members


def moved(size: int, members: int) -> int:
    """The bytes that an all_reduce cannot avoid: each input is read, each result written."""
    return 2 * members * elements(size, members) * _ELEMENT


def repetitions(size: int, sizes: Sequence[int], steps: int) -> int:
    """How often a size is repeated in a turn.

    Example::

        repetitions(2**10, [2**10, 2**20], 3)   # 200
        repetitions(2**20, [2**10, 2**20], 3)   # 3

    Args:
        size: Of this one.
        sizes: Of all.
        steps: Repetitions of the largest. Smaller ones take as much time together, up to a number
            that is enough.
    """
    return max(steps, min(_ENOUGH, steps * (max(sizes) // size)))


def sizes(text: str) -> list[int]:
    """Convert a list such as ``1KiB,64MiB`` from the command line; a bare number means bytes."""
    found = []
    for word in text.split(","):
        parts = re.fullmatch(r"([1-9]\d*)\s*(B|KiB|MiB|GiB)?", word.strip())
        if not parts:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no size; say for example 1KiB,64KiB,16MiB, or a number of bytes"
            )
        found.append(int(parts[1]) * _UNITS[parts[2] or "B"])
    return sorted(set(found))


def size_name(size: int) -> str:
    """A number of bytes in the largest unit in which it is a whole number."""
    unit = max((name for name in _UNITS if size % _UNITS[name] == 0), key=lambda name: _UNITS[name])
    return f"{size // _UNITS[unit]} {unit}"
