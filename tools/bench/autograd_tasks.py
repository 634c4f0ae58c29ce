"""Which calls between workers are measured, and who takes part: plain records, pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dataparallel.tools.bench.collectives_tasks import size_name
from dataparallel.tools.bench.contestants import Contestant, Task

Form = Literal["ours", "torch"]
Part = Literal["forward", "backward"]
Transport = Literal["default", "uv"]

FORMS: tuple[Form, ...] = ("ours", "torch")
PARTS: tuple[Part, ...] = ("forward", "backward")
TRANSPORTS: tuple[Transport, ...] = ("default", "uv")
CALLS = (1, 4, 16, 64)
#: Bytes of the tensors where the time of a call is what counts.
TINY = 16
#: Calls of a chain whose tensors are large.
PAYLOAD_CALLS = 4
#: Calls of the case in which each worker calls the next from within a call.
NESTED_CALLS = 3

_ELEMENT = 4
#: Repetitions of a short case beyond which more say nothing new.
_ENOUGH = 50


@dataclass(frozen=True, kw_only=True)
class AutogradTask(Task):
    """One worker among several that call each other; rank 0 directs and measures.

    Attributes:
        calls: Lengths of the chains of tiny tensors.
        sizes: Bytes of the tensors of the other chains.
        transport: Of torch's RPC: what it chooses itself, or ``"uv"``: TCP.
    """

    subject: ClassVar[str] = "autograd"

    calls: tuple[int, ...] = CALLS
    sizes: tuple[int, ...] = (2**20,)
    transport: Transport = "default"


@dataclass(frozen=True)
class Case:
    """A chain of calls, each of which multiplies what the last one returned.

    Attributes:
        name: Key in the results, and what is shown.
        calls: How many there are.
        size: Bytes of the tensor, float32.
        nested: Whether each worker calls the next; else the first calls all in turn.
    """

    name: str
    calls: int
    size: int
    nested: bool = False

    @property
    def elements(self) -> int:
        """How many numbers the tensor has."""
        return max(1, self.size // _ELEMENT)

    @property
    def carried(self) -> int:
        """Bytes of gradients that a backward carries: of each call's argument and result."""
        return 2 * self.calls * self.elements * _ELEMENT


def plan_cases(task: AutogradTask) -> list[Case]:
    """What is measured: chains of tiny tensors, a nested one, and chains of large tensors.

    Args:
        task: Of any of the workers.
    """
    chains = [Case(f"chain of {calls}", calls, TINY) for calls in task.calls]
    nested = Case(f"nested, {NESTED_CALLS}", NESTED_CALLS, TINY, nested=True)
    large = [
        Case(f"{PAYLOAD_CALLS} x {size_name(size)}", PAYLOAD_CALLS, size) for size in task.sizes
    ]
    return [*chains, nested, *large]


def route(case: Case, workers: int) -> list[int]:
    """The ranks that are called, in this order.

    Example::

        route(Case("chain of 4", 4, 16), 4)                # [1, 2, 3, 1]
        route(Case("nested, 3", 3, 16, nested=True), 2)    # [1, 0, 1]: back to the caller

    Args:
        case: Whose calls.
        workers: How many there are, rank 0 among them.
    """
    if case.nested:
        return [(1 + index) % workers for index in range(case.calls)]
    return [1 + index % (workers - 1) for index in range(case.calls)]


def plan_workers(task: AutogradTask, workers: int) -> Contestant:
    """The workers that call each other, as one contestant.

    Args:
        task: What all have in common; the place in the contestant is filled in.
        workers: How many.
    """
    tasks = tuple(
        replace(
            task,
            rank=rank,
            world_size=workers,
            meeting_point=f"{task.meeting_point}-{workers}",
        )
        for rank in range(workers)
    )
    return Contestant(f"{workers} workers", f"{workers} workers", tasks)


def phase(form: Form, part: Part, case: str) -> str:
    """The key under which the seconds of a measurement are kept.

    Args:
        form: Whose.
        part: Of what.
        case: Name of the case.
    """
    return f"{form} {part} {case}"


def repetitions(case: Case, cases: Sequence[Case], steps: int) -> int:
    """How often a case is repeated in a turn.

    Args:
        case: Which one.
        cases: All of them.
        steps: Repetitions of the longest chain. Shorter ones get more, up to a number that is
            enough.
    """
    longest = max(each.calls for each in cases)
    return max(steps, min(_ENOUGH, steps * (longest // case.calls)))
