"""Backward across worker processes, beside torch.distributed.autograd."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from benchmarks import common
from benchmarks.common import compare
from dataparallel import distributed_autograd as ours
from dataparallel import torch_internals
from dataparallel.tools.arguments import Parser, count
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.harness import Contestant, Outcome, Task, team_of

#: Seconds that one call, and the end of all workers, may take.
_TIMEOUT = 120.0
#: The factor of a call: exact in float32, and 64 of them stay within its range.
_FACTOR = 1.125


# --- the command -------------------------------------------------------------------------------


def build_parser() -> Parser:
    """Return the options."""
    parser = common.new_parser(
        "autograd",
        "Backward across worker processes, beside torch.distributed.autograd.",
        [
            "",
            "--rounds 3 --steps 2",
            "--workers 2 --calls 1 64 --kib 64",
            "--transport uv --bar 1.2 --json results.json",
        ],
    )
    add = parser.add_argument
    add("--workers", type=count, nargs="+", default=[2, 4], metavar="N",
        help="numbers of worker processes, each at least 2; the first worker calls the others in "
        "turn; default: 2 4")  # fmt: skip
    add("--calls", type=count, nargs="+", default=[1, 4, 16, 64], metavar="N",
        help="lengths of the chains of calls with tiny tensors; default: 1 4 16 64")  # fmt: skip
    add("--kib", type=count, default=1024, metavar="N",
        help="of the tensors of one more chain of 4 calls; default: 1024")  # fmt: skip
    add("--transport", choices=("default", "uv"), default="default",
        help="of torch's RPC: what it chooses itself (default; within a machine shared memory, "
        "for which every worker keeps a core busy), or uv: TCP")  # fmt: skip
    common.add_bar(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if min(arguments.workers) < 2:
        raise ValueError(f"--workers needs 2 or more, but got {min(arguments.workers)}")
    plans = {f"{number} workers": _plan(number, arguments) for number in arguments.workers}
    return runner.run(arguments, plans, lambda measured: _conclude(measured, arguments))


def _plan(workers: int, arguments: argparse.Namespace) -> list[Contestant]:
    chains = tuple(_chains(arguments))
    task = AutogradTask("ours", (), chains=chains, transport=arguments.transport)
    return [team_of(task, "ours", [[]] * workers, "workers", f"{workers} workers")]


def _chains(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    return [*((calls, 4) for calls in arguments.calls), (4, arguments.kib * 256)]


def _conclude(
    measured: Mapping[str, Sequence[Outcome]], arguments: argparse.Namespace
) -> runner.Report:
    lines = [
        compare(
            f"{workers}: {part}",
            name_of(*chain),
            {form: outcome.seconds[f"{form} {part} {name_of(*chain)}"] for form in ENGINES},
            common.error_of([outcome], name_of(*chain)) == 0.0,
        )
        for workers, (outcome,) in measured.items()
        for part in ("backward", "call")
        for chain in _chains(arguments)
    ]
    notes = [
        "ours and torch's in turn in the same processes",
        "call: one call of the forward; calls have 16 bytes, where nothing else is said",
    ]
    title = "backward across workers, and one call of the forward"
    return common.report(title, lines, arguments, notes)


def name_of(calls: int, numbers: int) -> str:
    """Return the name of a chain of calls with this many numbers each."""
    kib = numbers // 256
    return f"{calls} x {kib} KiB" if kib else f"{calls} calls"


# --- a worker process --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AutogradTask(Task):
    """Chains, each a number of calls and of the numbers that each call sends."""

    chains: tuple[tuple[int, int], ...]
    transport: str

    def begin(self) -> Caller:
        """Make the object that measures, in the worker process."""
        return Caller(self)


@dataclass(frozen=True)
class Engine:
    """The functions of one of the two, by the same names for both."""

    context: Callable[[], Any]
    rpc_sync: Callable[..., Any]
    backward: Callable[..., None]
    get_gradients: Callable[[int], dict[Tensor, Tensor]]


# Its stubs do not export all of its functions.
_theirs: Any = torch.distributed.autograd
ENGINES = {
    "ours": Engine(ours.context, ours.rpc_sync, ours.backward, ours.get_gradients),
    # Between processes that the benchmark has started.
    "torch": Engine(_theirs.context, torch_rpc.rpc_sync, _theirs.backward, _theirs.get_gradients),
}


class Caller:
    """One of the workers; the first one measures, and the others serve its calls meanwhile."""

    def __init__(self, task: AutogradTask) -> None:
        self.task = task
        self.wrong: dict[str, float] = {}
        torch.set_num_threads(1)
        options: dict[str, Any] = {}
        if task.transport != "default":
            options = torch_internals.rpc_transport(task.transport)
        # Between processes that the benchmark has started.
        torch_rpc.init_rpc(  # type: ignore[no-untyped-call]
            f"worker{task.rank}",
            rank=task.rank,
            world_size=task.world_size,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{task.meeting_point}", rpc_timeout=_TIMEOUT, **options
            ),
        )
        # Loads the extension, which may have to be compiled, before anybody waits for a call.
        ours.debug_info()

    def check(self, steps: int) -> dict[str, Any]:
        """Call each chain some times."""
        self.run(steps)
        return {"errors": self.wrong}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Return the seconds of each repetition, by engine, part and chain; check every gradient.

        The processes that serve have none.
        """
        seconds: dict[str, list[float]] = {}
        longest = max(calls for calls, _ in self.task.chains)
        for calls, numbers in self.task.chains if self.task.rank == 0 else ():
            chain = name_of(calls, numbers)
            forms = list(ENGINES)
            for _ in range(common.repetitions(calls, longest, steps)):
                for form in forms:
                    call, backward, right = run_once(ENGINES[form], calls, numbers, self._others())
                    seconds.setdefault(f"{form} call {chain}", []).append(call)
                    seconds.setdefault(f"{form} backward {chain}", []).append(backward)
                    self.wrong[chain] = max(self.wrong.get(chain, 0.0), float(not right))
                # Nobody is always second.
                forms.reverse()
        return seconds

    def _others(self) -> list[str]:
        return [f"worker{rank}" for rank in range(1, self.task.world_size)]

    def finish(self) -> dict[str, Any]:
        """Tell whether a gradient was wrong, and leave."""
        torch_rpc.shutdown(graceful=True, timeout=_TIMEOUT)
        return {"errors": self.wrong}


def run_once(
    engine: Engine, calls: int, numbers: int, others: list[str]
) -> tuple[float, float, bool]:
    """Seconds of a call and of the backward, and whether the only gradient is right."""
    x = torch.ones(numbers, requires_grad=True)
    # All elements differ, so that none can stand for another.
    weights = torch.arange(1.0, numbers + 1.0)
    with engine.context() as context_id:
        begin = time.perf_counter()
        y = x
        for index in range(calls):
            y = engine.rpc_sync(others[index % len(others)], torch.mul, (y, _FACTOR))
        middle = time.perf_counter()
        # The gradient of a sum would travel as one number that stands for all.
        loss = torch.dot(y, weights)
        start = time.perf_counter()
        engine.backward(context_id, [loss])
        end = time.perf_counter()
        gradients = engine.get_gradients(context_id)
    # The messages that end a context must not become a part of the other's time.
    for other in others:
        # Between processes that the benchmark has started.
        torch_rpc.rpc_sync(other, int)
    expected = weights * _FACTOR**calls
    found = gradients.get(x)
    right = len(gradients) == 1 and found is not None and torch.allclose(found, expected)
    return (middle - begin) / calls, end - start, right


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
