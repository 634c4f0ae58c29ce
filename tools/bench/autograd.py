"""The `bench autograd` subcommand: backward across worker processes, beside torch's."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dataparallel.tools.arguments import add_command, count
from dataparallel.tools.bench.autograd_summary import (
    AutogradRow,
    all_called,
    count_calls,
    judge_mean,
    judge_worst,
    summarize,
)
from dataparallel.tools.bench.autograd_tasks import (
    CALLS,
    NESTED_CALLS,
    PAYLOAD_CALLS,
    TINY,
    TRANSPORTS,
    AutogradTask,
    Form,
    plan_cases,
    plan_workers,
)
from dataparallel.tools.bench.collectives_tasks import sizes
from dataparallel.tools.bench.output import Tell, environment, progress, teller, write_json
from dataparallel.tools.bench.rounds import Outcome, measure
from dataparallel.tools.bench.train import above_zero
from dataparallel.tools.bench.verdict import Verdict
from dataparallel.tools.extras import needs_extra

if TYPE_CHECKING:
    from rich.console import Console

    from dataparallel.tools.arguments import Subparsers

_WORKERS = (2, 4)
_ROUNDS = 11
_QUICK_ROUNDS, _QUICK_STEPS = 3, 2


def add_to(subjects: Subparsers) -> None:
    """Add the subcommand to `bench`."""
    parser = add_command(
        subjects,
        "autograd",
        summary="Backward across worker processes, beside torch.distributed.autograd.",
        examples=[
            "dataparallel bench autograd",
            "dataparallel bench autograd --bar 1.2 --bar-worst 1.2 --check",
            "dataparallel bench autograd --quick",
            "dataparallel bench autograd --workers 2 --calls 1,64 --sizes 64KiB,1MiB,16MiB",
            "dataparallel bench autograd --transport uv --json results.json",
        ],
        run=_run,
    )
    add = parser.add_argument
    add("--workers", type=_counts, default=list(_WORKERS), metavar="LIST",
        help="numbers of worker processes, each at least 2; the first worker calls the others in "
        f"turn; default: {_words(_WORKERS)}")  # fmt: skip
    add("--calls", type=_counts, default=list(CALLS), metavar="LIST",
        help="lengths of the chains of calls with tiny tensors; "
        f"default: {_words(CALLS)}")  # fmt: skip
    add("--sizes", type=sizes, default=[2**20], metavar="LIST",
        help=f"of the tensors of chains of {PAYLOAD_CALLS} calls, float32; default: "
        "1MiB")  # fmt: skip
    add("--transport", choices=TRANSPORTS, default=TRANSPORTS[0],
        help="of torch's RPC: what it chooses itself (default; within a machine shared memory, "
        "for which every worker keeps a core busy), or uv: TCP")  # fmt: skip
    add("--threads", type=count, default=1, metavar="N",
        help="intra-op threads of each worker; default: 1")  # fmt: skip
    add("--rounds", type=count, default=None, metavar="N",
        help=f"turns of each number of workers; default: {_ROUNDS}")  # fmt: skip
    add("--steps", type=count, default=None, metavar="N",
        help="repetitions of the longest chain per turn; shorter ones get more; default: about "
        "half a second's worth")  # fmt: skip
    add("--quick", action="store_true",
        help=f"{_QUICK_ROUNDS} rounds of {_QUICK_STEPS} steps where these are not given: enough "
        "to see that all works, too little for figures")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")
    bars = parser.add_argument_group(
        "bars", "upper limits of ours / torch's time of backward, shown as met or missed"
    )
    add = bars.add_argument
    add("--bar", type=above_zero, metavar="R",
        help="geometric mean over the cases, for each number of workers")  # fmt: skip
    add("--bar-worst", type=above_zero, metavar="R", help="each case")
    add("--check", action="store_true", help="exit with status 1 if a bar is missed")


def _counts(text: str) -> list[int]:
    return sorted({count(word.strip()) for word in text.split(",")})


def _words(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """All cases with one number of workers."""

    workers: int
    steps: int
    outcome: Outcome
    rows: list[AutogradRow]
    calls: dict[Form, tuple[int, int]]
    mean: Verdict
    worst: Verdict

    @property
    def right(self) -> bool:
        """Whether both forms made the calls that they should, and got the right gradients."""
        return all(row.agrees for row in self.rows) and all_called(self.calls)


def _run(arguments: argparse.Namespace) -> int:
    with needs_extra("tools"):
        from rich.console import Console
    _check(arguments)
    arguments.rounds = arguments.rounds or (_QUICK_ROUNDS if arguments.quick else _ROUNDS)
    arguments.steps = arguments.steps or (_QUICK_STEPS if arguments.quick else None)
    # The tables must not mix with JSON on the standard output.
    console = Console(stderr=arguments.json == "-")
    with progress(console, arguments.rounds * len(arguments.workers)) as tell:
        compared = [_compare(workers, arguments, tell) for workers in arguments.workers]
    if arguments.json != "-":
        _print(compared, arguments, console)
    if arguments.json:
        write_json(arguments.json, _record(compared, arguments))
    right = all(each.right for each in compared)
    missed = any(v.met is False for each in compared for v in (each.mean, each.worst))
    return int(not right or (arguments.check and missed))


def _check(arguments: argparse.Namespace) -> None:
    if arguments.check and not (arguments.bar or arguments.bar_worst):
        raise ValueError("--check needs a bar to check, for example --bar 1.2")
    if min(arguments.workers) < 2:
        raise ValueError(
            f"--workers needs 2 or more, one of which calls the others, but got "
            f"{_words(arguments.workers)}"
        )


def _compare(workers: int, arguments: argparse.Namespace, tell: Tell) -> _Comparison:
    with tempfile.TemporaryDirectory() as folder:
        task = AutogradTask(
            "ours",
            ("cpu",),
            threads=arguments.threads,
            meeting_point=str(pathlib.Path(folder) / "meeting"),
            calls=tuple(arguments.calls),
            sizes=tuple(arguments.sizes),
            transport=arguments.transport,
        )
        contestant = plan_workers(task, workers)
        # One number of workers after the other: those that wait use the cores too.
        on_turn = teller(tell, "autograd")
        (outcome,), steps = measure([contestant], arguments.rounds, arguments.steps, on_turn)
    rows = summarize(plan_cases(task), outcome)
    return _Comparison(
        workers=workers,
        steps=steps,
        outcome=outcome,
        rows=rows,
        calls=count_calls(outcome),
        mean=judge_mean(rows, arguments.bar),
        worst=judge_worst(rows, arguments.bar_worst),
    )


def _print(
    compared: Sequence[_Comparison], arguments: argparse.Namespace, console: Console
) -> None:
    from dataparallel.tools.bench.autograd_report import build_backward, build_calls, build_rates
    from dataparallel.tools.bench.collectives_report import conclusion
    from dataparallel.tools.bench.report import print_notes, print_table

    for each in compared:
        print_table(build_backward(each.rows, f"backward, {each.workers} workers"), console)
        console.print(conclusion(each.mean))
        console.print(conclusion(each.worst, f"largest, {each.worst.case}"))
        console.print()
    large = [row for each in compared for row in each.rows if row.size > TINY]
    print_table(build_rates(large, "gradients carried by a backward of large tensors"), console)
    for each in compared:
        print_table(build_calls(each.rows, f"forward, {each.workers} workers: one call"), console)
    print_notes(_notes(compared, arguments), console)


def _notes(compared: Sequence[_Comparison], arguments: argparse.Namespace) -> Sequence[str]:
    notes = [
        f"medians of {arguments.rounds} rounds; ours and torch's in turn in the same processes",
        f"chain: the first worker calls the others in turn; tensors of {TINY} bytes",
        f"nested: each of {NESTED_CALLS} workers calls the next; {PAYLOAD_CALLS} x: a chain with "
        "large tensors",
        "MiB/s: a gradient crosses twice per call, for the argument and for the result",
        f"✓ every element of every gradient is right; transport: {arguments.transport}",
        f"intra-op threads of each worker: {arguments.threads}",
    ]
    for each in compared:
        made = "; ".join(f"{form} {a} made, {b} served" for form, (a, b) in each.calls.items())
        notes.append(f"calls, {each.workers} workers: {made}")
    return notes


def _record(compared: Sequence[_Comparison], arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("workers", "calls", "sizes", "transport", "threads", "rounds", "quick")
    return {
        "setting": {**environment(), **{name: getattr(arguments, name) for name in names}},
        "comparisons": [
            {
                "workers": each.workers,
                "steps_per_round": each.steps,
                "rows": [{**dataclasses.asdict(row), "agrees": row.agrees} for row in each.rows],
                "calls": {
                    form: {"made": made, "served": served}
                    for form, (made, served) in each.calls.items()
                },
                "mean": {**dataclasses.asdict(each.mean), "met": each.mean.met},
                "worst": {**dataclasses.asdict(each.worst), "met": each.worst.met},
                "right": each.right,
                "seconds": each.outcome.seconds,
            }
            for each in compared
        ],
    }
