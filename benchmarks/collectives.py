"""Collectives of replicas and of processes, beside torch's."""

from __future__ import annotations

import argparse
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import common
from benchmarks.common import Line, compare, size_name
from dataparallel import collectives as ours
from dataparallel import devices, torch_internals
from dataparallel.threads.apply import parallel_apply
from dataparallel.tools.arguments import Parser, device_names, names_in
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.harness import Contestant, Outcome, Task, largest, team_of
from dataparallel.tools.bench.seat import Seat

FORMS = ("local", "process", "hybrid")
OPERATIONS = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single")
#: Processes of ours in the hybrid form.
HYBRID_PROCESSES = 2

_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_ELEMENT = 4
# A prime, so that no chunk of the numbers looks like another one.
_PERIOD = 251
#: Seconds that a thread waits for the others before the first repetition.
_TIMEOUT = 120.0


# --- the command -------------------------------------------------------------------------------


def build_parser() -> Parser:
    """Return the options."""
    parser = common.new_parser(
        "collectives",
        "Latency of collectives of replicas and of processes, beside torch's.",
        [
            "",
            "--forms local --bar 0.5",
            "--forms local --devices cpu,cpu,cpu,cpu",
            "--forms hybrid --sizes 64KiB,1MiB",
            "--forms process --operations all_reduce,all_gather_tensor --bar 1.1",
            "--sizes 1KiB,1MiB --rounds 3 --json results.json",
        ],
    )
    add = parser.add_argument
    add("--forms", type=names_in(FORMS), default=list(FORMS[:2]), metavar="LIST",
        help="local: all_reduce of replicas in one process beside torch's in place between "
        "processes, and beside a copy; process: ours beside torch's functional ones in the same "
        f"processes; hybrid: as local, but the replicas of {HYBRID_PROCESSES} processes; default: "
        "local,process")  # fmt: skip
    add("--sizes", type=common.sizes, default=common.sizes(_SIZES), metavar="LIST",
        help="of each member's input, float32; default: 1KiB to 64MiB by factors of 4")  # fmt: skip
    add("--operations", type=names_in(OPERATIONS), default=[OPERATIONS[0]], metavar="LIST",
        help=f"of the process form: {','.join(OPERATIONS)}; default: {OPERATIONS[0]}")  # fmt: skip
    add("--devices", type=device_names, default=["cpu", "cpu"], metavar="LIST",
        help="one device per replica of a process; torch gets one process per replica, on "
        "its device; default: cpu,cpu")  # fmt: skip
    common.add_bar(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    plans = {form: plan_members(form, arguments) for form in arguments.forms}
    return runner.run(arguments, plans, lambda measured: _conclude(measured, arguments))


def _conclude(
    measured: Mapping[str, Sequence[Outcome]], arguments: argparse.Namespace
) -> runner.Report:
    lines = [line for form, own in measured.items() for line in _lines(form, own, arguments)]
    notes = [
        "a call and its wait, of the slowest member; size: float32 input of each member",
        f"local, hybrid: replicas on 1, {HYBRID_PROCESSES} x ({', '.join(arguments.devices)}), "
        "torch: in place between as many processes",
        "copy: as many threads, each of which copies a member's input and knows of no other",
    ]
    return common.report("collectives: ours beside torch's", lines, arguments, notes)


def plan_members(form: str, arguments: argparse.Namespace) -> tuple[Contestant, ...]:
    """Return the contestants, in the order of a round."""
    own = arguments.devices
    processes = HYBRID_PROCESSES if form == "hybrid" else 1
    members = len(own) * processes
    if members < 2:
        raise ValueError(
            f"a collective needs two members or more, but got --devices {','.join(own)}"
        )
    task = CollectivesTask(
        "ours",
        (),
        replicas=members,
        sizes=tuple(arguments.sizes),
        form=form,
        operations=tuple(arguments.operations) if form == "process" else OPERATIONS[:1],
    )
    # Processes have no collectives on virtual devices; those are host memory all the same.
    homes = [["cpu" if each.startswith("virtual") else each] for each in own] * processes
    peers = team_of(task, "ddp", homes, "torch", f"{members} processes")
    if form == "process":
        return (peers,)
    mine = team_of(task, "ours", [own] * processes, "ours", f"replicas {processes}x{len(own)}")
    if form == "hybrid":
        return (mine, peers)
    return (mine, peers, team_of(task, "bare", [own], "copy", "copies"))


def _lines(form: str, outcomes: Sequence[Outcome], arguments: argparse.Namespace) -> list[Line]:
    seconds = {key: own for one in outcomes for key, own in one.seconds.items()}
    lines = []
    operations = arguments.operations if form == "process" else OPERATIONS[:1]
    for operation in operations:
        for size in arguments.sizes:
            keys = [phase(who, operation, size) for who in ("ours", "torch", "copy")]
            found = {key.split()[0]: seconds[key] for key in keys if key in seconds}
            right = not any(common.error_of(outcomes, key) for key in keys if key in seconds)
            lines.append(compare(f"{form}: {operation}", size_name(size), found, right))
    return lines


def phase(who: str, operation: str, size: int) -> str:
    """Return the key under which the seconds of a measurement are kept."""
    return f"{who} {operation} {size}"


def elements(size: int, members: int) -> int:
    """Count the numbers of a member's input, which fit into ``size`` in equal parts for all."""
    return size // _ELEMENT // members * members


# --- a worker process --------------------------------------------------------------------------

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class CollectivesTask(Task):
    """Collectives of float32 tensors, whose sizes are in bytes.

    Its kind names the members: ``"ours"``: the replicas of one process, or of several; ``"ddp"``:
    processes with one member each; ``"bare"``: threads that copy memory.
    """

    sizes: tuple[int, ...]
    form: str
    operations: tuple[str, ...] = OPERATIONS[:1]

    def begin(self) -> Members:
        """Make the object that measures, in the worker process."""
        return Members(self)


class Members:
    """The members that live in one process: a thread for each of its devices."""

    def __init__(self, task: CollectivesTask) -> None:
        self.task = task
        self.seat = Seat(task)
        self.calls = {name: _calls(task, name) for name in task.operations}
        # Zeros stay in the range of numbers, however often they are summed up. They are written, or
        # the system would give all pages the same memory.
        self.zeros = {
            size: [
                torch.empty(elements(size, task.replicas), device=slot).fill_(0.0)
                for slot in self.seat.slots
            ]
            for size in task.sizes
        }

    def check(self, steps: int) -> dict[str, Any]:
        """By phase, the largest error of an element of any member's result."""
        errors: dict[str, list[float]] = {}
        for _ in range(steps):
            for size in self.task.sizes:
                for operation, calls in self.calls.items():
                    for who, call in calls.items():
                        found = self._errors(call, who, operation, size)
                        errors.setdefault(phase(who, operation, size), []).extend(found)
        return {"errors": {key: largest(found) for key, found in errors.items()}}

    def _errors(self, call: Call, who: str, operation: str, size: int) -> list[float]:
        count = elements(size, self.task.replicas)
        first = self.task.rank * len(self.seat.slots)
        places = list(enumerate(self.seat.slots, first))
        inputs = [known_input(count, member).to(slot) for member, slot in places]
        results = self._together([functools.partial(call, x) for x in inputs])
        expected = [
            known_input(count, member)
            if who == "copy"
            else known_result(operation, count, member, self.task.replicas)
            for member, _ in places
        ]
        return list(map(largest_error, results, expected))

    def _together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return parallel_apply(list(calls), [()] * len(calls), devices=self.seat.slots)

    def run(self, steps: int) -> dict[str, list[float]]:
        """By phase, seconds of each call until the result is there, of the slowest member."""
        seconds = {}
        for size, tensors in self.zeros.items():
            times = common.repetitions(size, max(self.task.sizes), steps)
            for operation, calls in self.calls.items():
                self.seat.barrier()
                gate = threading.Barrier(len(tensors))
                found = self._together([
                    functools.partial(take_turns, calls, x, gate, times) for x in tensors
                ])  # fmt: skip
                for who in calls:
                    each = zip(*(own[who] for own in found), strict=True)
                    seconds[phase(who, operation, size)] = [max(members) for members in each]
        return seconds

    def finish(self) -> dict[str, Any]:
        """Check once more, and leave."""
        answer = self.check(1)
        self.seat.leave()
        return answer


def take_turns(
    calls: Mapping[str, Call], tensor: Tensor, gate: threading.Barrier, times: int
) -> dict[str, list[float]]:
    """Seconds of calls in turn, in one of several threads that begin at the same moment."""
    waits = devices.is_accelerator(tensor.device)
    seconds: dict[str, list[float]] = {who: [] for who in calls}
    order = list(calls)
    gate.wait(_TIMEOUT)
    for _ in range(times):
        for who in order:
            begin = time.perf_counter()
            calls[who](tensor)
            if waits:
                devices.synchronize(tensor.device)
            seconds[who].append(time.perf_counter() - begin)
        # No contestant always comes after another one.
        order.reverse()
    return seconds


def _calls(task: CollectivesTask, operation: str) -> dict[str, Call]:
    """Return the calls of this process, by contestant."""
    if task.kind == "ours":
        return {"ours": lambda x: ours.all_reduce(x, "sum", task.form)}
    if task.kind == "bare":
        return {"copy": torch.clone}
    if task.form != "process":
        return {"torch": _reduce_in_place}
    theirs = torch_internals.functional_collectives
    return {"ours": _functional(ours, operation), "torch": _functional(theirs, operation)}


def _functional(module: Any, name: str) -> Call:
    """Return a functional collective and its wait, by the same words for ours and for torch's."""
    function = getattr(module, name)
    group = dist.group.WORLD
    details: dict[str, tuple[Any, ...]] = {
        "all_reduce": ("sum",),
        "all_gather_tensor": (0,),
        "reduce_scatter_tensor": ("sum", 0),
        "all_to_all_single": (None, None),
    }

    def call(tensor: Tensor) -> Tensor:
        result: Tensor = function(tensor, *details[name], group).wait()
        return result

    return call


def _reduce_in_place(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


# --- values whose collectives are known --------------------------------------------------------


def known_input(count: int, member: int) -> Tensor:
    """Make a member's input: whole numbers whose sums float32 holds exactly, different for each."""
    return torch.arange(count).remainder_(_PERIOD).to(torch.float32).mul_(member + 1)


def known_result(operation: str, count: int, member: int, members: int) -> Tensor:
    """Return a member's result when all give their :func:`known_input`, in equal pieces."""
    inputs = (known_input(count, other) for other in range(members))
    if operation == "all_gather_tensor":
        return torch.cat(list(inputs))
    if operation == "all_to_all_single":
        return torch.cat([each.chunk(members)[member] for each in inputs])
    total = known_input(count, 0).mul_(members * (members + 1) // 2)
    return total if operation == "all_reduce" else total.chunk(members)[member]


def largest_error(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element; infinite for another shape, NaN for a NaN."""
    if result.shape != expected.shape:
        return math.inf
    return (result.cpu() - expected).abs().max().item()


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
