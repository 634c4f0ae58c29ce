"""Backward across worker processes, beside torch.distributed.autograd."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc as torch_rpc

from benchmarks import common
from dataparallel import distributed_autograd, torch_internals
from dataparallel.tools.arguments import count, counts
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.harness import Task, team_of

#: Seconds that one call, and the end of all workers, may take.
_TIMEOUT = 120.0
#: The factor of a call: exact in float32, and 64 of them stay within its range.
_FACTOR = 1.125


def build_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = common.new_parser(
        "autograd",
        "Backward across worker processes, beside torch.distributed.autograd.",
        ["", "--workers 4 --calls 1,64 --kib 64", "--transport uv --json results.json"],
    )
    add = parser.add_argument
    add("--workers", type=count, default=2, metavar="N",
        help="worker processes; the first one calls the others in turn; default: 2")  # fmt: skip
    add("--calls", type=counts, default=[1, 4, 16, 64], metavar="LIST",
        help="lengths of the chains of calls with tiny tensors; default: 1,4,16,64")  # fmt: skip
    add("--kib", type=count, default=1024, metavar="N",
        help="of the tensors of one more chain of 4 calls; default: 1024")  # fmt: skip
    add("--transport", choices=("default", "uv"), default="default",
        help="of torch's RPC: what it chooses itself (default; within a machine shared memory, "
        "for which every worker keeps a core busy), or uv: TCP")  # fmt: skip
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if arguments.workers < 2:
        raise ValueError(f"--workers needs 2 or more, but got {arguments.workers}")
    chains = (*((calls, 4) for calls in arguments.calls), (4, arguments.kib * 256))
    task = AutogradTask("ours", (), chains=chains, transport=arguments.transport)
    plans = {"calls": [team_of(task, "ours", [[]] * arguments.workers, "workers", "workers")]}
    title = f"backward across {arguments.workers} workers, and one call of the forward"
    notes = ["calls have 16 bytes, where nothing else is said"]

    def conclude(measured: runner.Measured) -> runner.Report:
        lines = sorted(common.lines_of(measured["calls"]), key=lambda line: line.section)
        return common.report(title, lines, arguments, notes)

    return runner.run(arguments, plans, conclude)


@dataclass(frozen=True, kw_only=True)
class AutogradTask(Task):
    """Chains, each a number of calls and of the numbers that each call sends."""

    chains: tuple[tuple[int, int], ...]
    transport: str

    def begin(self) -> Caller:
        """Make the object that measures, in the worker process."""
        return Caller(self)


class Caller:
    """One of the workers; the first one measures, and the others serve its calls meanwhile."""

    def __init__(self, task: AutogradTask) -> None:
        self.task = task
        self.others = [f"worker{rank}" for rank in range(1, task.world_size)]
        self.wrong: set[tuple[str, str]] = set()
        torch.set_num_threads(1)
        chosen = task.transport != "default"
        # Between processes that the benchmark has started.
        torch_rpc.init_rpc(  # type: ignore[no-untyped-call]
            f"worker{task.rank}",
            rank=task.rank,
            world_size=task.world_size,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{task.meeting_point}",
                rpc_timeout=_TIMEOUT,
                **(torch_internals.rpc_transport(task.transport) if chosen else {}),
            ),
        )
        # Loads the extension, which may have to be compiled, before anybody waits for a call.
        distributed_autograd.debug_info()

    def check(self, steps: int) -> dict[str, Any]:
        """Call each chain some times."""
        self.run(steps)
        return {"wrong": sorted(self.wrong)}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Return the seconds of each repetition; the processes that serve have none."""
        seconds: dict[str, list[float]] = {}
        longest = max(calls for calls, _ in self.task.chains)
        theirs: Any = torch.distributed.autograd
        engines: list[tuple[str, Any, Any]] = [
            ("ours", distributed_autograd, distributed_autograd.rpc_sync),
            ("torch", theirs, torch_rpc.rpc_sync),
        ]
        for calls, numbers in self.task.chains if self.task.rank == 0 else ():
            name = f"4 x {numbers // 256} KiB" if numbers > 4 else f"{calls} calls"
            for _ in range(common.repetitions(calls, longest, steps)):
                for who, engine, rpc_sync in engines:
                    took = self._once(name, calls, numbers, engine, rpc_sync)
                    for part, each in zip(("backward", "call"), took, strict=True):
                        seconds.setdefault(common.phase(who, part, name), []).append(each)
                # Nobody is always second.
                engines.reverse()
        return seconds

    def _once(
        self, name: str, calls: int, numbers: int, engine: Any, rpc_sync: Any
    ) -> tuple[float, float]:
        """Return the seconds of the backward and of a call; note a gradient that is wrong."""
        x = torch.ones(numbers, requires_grad=True)
        # All elements differ, so that none can stand for another.
        weights = torch.arange(1.0, numbers + 1.0)
        with engine.context() as context_id:
            begin = time.perf_counter()
            y = x
            for index in range(calls):
                y = rpc_sync(self.others[index % len(self.others)], torch.mul, (y, _FACTOR))
            middle = time.perf_counter()
            # The gradient of a sum would travel as one number that stands for all.
            loss = torch.dot(y, weights)
            start = time.perf_counter()
            engine.backward(context_id, [loss])
            end = time.perf_counter()
            gradients = engine.get_gradients(context_id)
        # The messages that end a context must not become a part of the other's time.
        for other in self.others:
            torch_rpc.rpc_sync(other, int)
        if len(gradients) != 1 or not torch.allclose(gradients[x], weights * _FACTOR**calls):
            self.wrong |= {("backward", name), ("call", name)}
        return end - start, (middle - begin) / calls

    def finish(self) -> dict[str, Any]:
        """Tell whether a gradient was wrong, and leave."""
        torch_rpc.shutdown(graceful=True, timeout=_TIMEOUT)
        return {"wrong": sorted(self.wrong)}


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
