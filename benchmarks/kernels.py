"""Time of the kernels beside a copy that moves as many bytes, and beside torch's alternatives.

Note [Time of a kernel]
~~~~~~~~~~~~~~~~~~~~~~~
On an accelerator a call only queues work. Before each call a large buffer is zeroed, which leaves
nothing of the call's data in the caches. It is zeroed so often that the host has queued the whole
call before it starts. The time between the events around it is then the device's alone. The host's
time is that of launches, Python included. Each call looks if the device was still busy. Triton's
``do_bench`` does the same without that, and knows no virtual devices.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.text import Text

from benchmarks import common
from benchmarks.common import Line, build_table, compare, size_name
from benchmarks.kernel_cases import (
    DTYPES,
    KERNELS,
    Call,
    KernelCase,
    calls_of,
    moved,
    plan_cases,
)
from dataparallel import devices
from dataparallel.kernels.backend import backend_of
from dataparallel.tools.arguments import Parser, names_in
from dataparallel.tools.bench.harness import Spread, Tell, spread
from dataparallel.tools.bench.runner import Report, met, progress, publish

#: Sizes for devices that memory limits; on the CPU, which runs the references, fewer are enough.
SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
SIZES_ON_CPU = "64KiB,1MiB,16MiB"

#: Most of ours / the copy (0.90 of its bytes per second), for the kernels that only move and add.
#: It counts from a size on at which launches matter little.
COPY_BAR, COPY_FROM = 1 / 0.9, 16 * 2**20
_COPYING = ("reduce_add", "flatten", "unflatten")
#: The variants for which torch has no single operation: these must be faster at every size.
_FASTER = {
    "reduce_add": ("2 inputs", "4 inputs", "8 inputs"),
    "flatten": ("400 tensors",),
    "unflatten": ("400 tensors",),
}

#: Bytes of the buffer that is zeroed before a call; more than any level-2 cache has.
_FLUSH = 256 * 2**20
#: Seconds that a turn should last, and the limits of its calls.
_TURN = 0.005
_FEWEST_CALLS, _MOST_CALLS = 3, 30


def build_parser() -> Parser:
    """Return the options."""
    parser = common.new_parser(
        "kernels",
        "Time of the kernels beside a copy of as many bytes, and beside torch's alternatives.",
        [
            "",
            "--device 0 --check --json results.json",
            "--kernels reduce_add,flatten --sizes 16MiB,256MiB",
            "--device cpu --kernels reduce_add --sizes 64KiB",
            "--dtypes bfloat16 --rounds 3 --steps 20",
        ],
    )
    add = parser.add_argument
    add("--kernels", type=names_in(KERNELS), default=list(KERNELS), metavar="LIST",
        help=f"{','.join(KERNELS)}; default: all")  # fmt: skip
    add("--sizes", type=common.sizes, default=None, metavar="LIST",
        help="of each input of reduce_add, of all tensors of a list; "
        f"default: 64KiB to 256MiB by factors of 4; on the CPU {SIZES_ON_CPU}")  # fmt: skip
    add("--dtypes", type=names_in(list(DTYPES)), default=list(DTYPES), metavar="LIST",
        help=f"of the tensors; default: {','.join(DTYPES)}")  # fmt: skip
    add("--device", default=None, metavar="DEVICE",
        help="for example 0 or cpu; default: the first accelerator, or the CPU")  # fmt: skip
    add("--flush", type=common.sizes, default=[_FLUSH], metavar="SIZE",
        help="of the buffer that is zeroed before each call on an accelerator, to leave nothing in "
        "its caches; default: 256MiB")  # fmt: skip
    add("--check", action="store_true",
        help="exit with status 1 if a bar is missed; only on a device with kernels")  # fmt: skip
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    device = _device(arguments.device)
    backend = backend_of(device)
    if arguments.sizes is None:
        arguments.sizes = common.sizes(SIZES if devices.is_accelerator(device) else SIZES_ON_CPU)
    if arguments.check and backend is None:
        raise ValueError(
            f"--check judges kernels, but {device} has none: torch references run there; name a "
            "device with kernels by --device, or leave --check out"
        )
    cases = plan_cases(arguments.kernels, arguments.dtypes, arguments.sizes)
    with progress(len(cases)) as tell:
        stopwatch = Stopwatch(device, max(arguments.flush))
        rows = [_measure(case, stopwatch, arguments, tell) for case in cases]
    bars = judge(rows) if backend else []
    runs = f"kernels, launched by {type(backend).__name__}" if backend else (
        f"torch reference: no kernels on this device ({device})"
    )  # fmt: skip
    title = f"{runs}\n{device}, torch {torch.__version__}"
    missed = arguments.check and any(bar["missed"] for bar in bars)
    report = Report(
        [build_table([row.line for row in rows], title), *map(bar_line, bars)],
        _notes(rows, arguments),
        {"runs": runs, "rows": rows, "bars": bars},
        not missed and all(row.line.right for row in rows),
    )
    return publish(report, arguments)


def _device(given: str | None) -> torch.device:
    if given is None:
        return devices.parse_devices(None)[0]
    return devices.parse_device(int(given) if given.isdecimal() else given)


def _notes(rows: Sequence[Row], arguments: argparse.Namespace) -> list[str]:
    waited = sum(row.hidden is False for row in rows)
    return [
        f"medians of {arguments.rounds} interleaved rounds; ✓ the results are torch's, to rounding",
        "copy: moves as many bytes; best: the fastest of torch's alternatives, named at the end",
        "GB/s: of what must move: each input read once, each result written once",
        "launch: the host's time per call, of ours and of the best",
        f"the device had to wait for launches, which are in the times: {waited} cases",
    ]


# --- time --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """The results of one turn of a contestant.

    Attributes:
        seconds: The median seconds of a call.
        launch: Seconds of the host per call; None if the host itself computes.
        hidden: True if the device was always still busy when a call was queued; None on the host.
    """

    seconds: float
    launch: float | None = None
    hidden: bool | None = None


class Stopwatch:
    """Times calls on a device, with a buffer to zero before each. See Note [Time of a kernel]."""

    def __init__(self, device: torch.device, flush: int = _FLUSH) -> None:
        self.device = device
        self._queued = devices.is_accelerator(device)
        if self._queued:
            self._buffer = torch.zeros(flush, dtype=torch.uint8, device=device)
            devices.synchronize(device)
            # Measure the time that the device takes for it.
            begin = time.perf_counter()
            self._flush(10)
            devices.synchronize(device)
            self._busy = (time.perf_counter() - begin) / 10

    def _flush(self, times: int) -> None:
        for _ in range(times):
            self._buffer.zero_()

    def turn(self, call: Call, times: int, launch: float = 0.0) -> Turn:
        """Make some calls, each of which is thought to take the host ``launch`` seconds."""
        if not self._queued:
            return Turn(statistics.median(_seconds_of(call) for _ in range(times)))
        # Twice as long as the host needs, since its time varies.
        flushes = 1 + math.ceil(2 * launch / self._busy)
        each = [self._queue(call, flushes) for _ in range(times)]
        seconds, launches, hidden = zip(*each, strict=True)
        return Turn(statistics.median(seconds), statistics.median(launches), all(hidden))

    def _queue(self, call: Call, flushes: int) -> tuple[float, float, bool]:
        self._flush(flushes)
        started = devices.timing_event(self.device)
        launch = _seconds_of(call)
        ended = devices.timing_event(self.device)
        assert started is not None and ended is not None
        hidden = not started.query()
        devices.synchronize(self.device)
        return started.elapsed_time(ended) * 1e-3, launch, hidden


def _seconds_of(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_turns(
    calls: Mapping[str, Call], stopwatch: Stopwatch, rounds: int, times: int | None
) -> dict[str, list[Turn]]:
    """Measure contestants interleaved, A B C A B C ...; the turns of each, in this order."""
    plan: dict[str, tuple[int, float]] = {}
    for who, call in calls.items():
        # To compile, allocate, and make what is kept from then on.
        call()
        first = stopwatch.turn(call, _FEWEST_CALLS)
        takes = max(first.seconds, first.launch or 0.0, 1e-9)
        enough = min(_MOST_CALLS, max(_FEWEST_CALLS, math.ceil(_TURN / takes)))
        plan[who] = (times or enough, first.launch or 0.0)
    turns: dict[str, list[Turn]] = {who: [] for who in calls}
    for _ in range(rounds):
        for who, call in calls.items():
            turns[who].append(stopwatch.turn(call, *plan[who]))
    return turns


# --- conclusions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One call beside a copy that moves as many bytes, and beside torch's alternatives.

    Attributes:
        case: The name of the call.
        line: Ours beside the copy and the best alternative.
        moved: Bytes that it must move.
        best: The name of the fastest alternative.
        alternatives: Seconds of all.
        launch: Seconds of the host per call, of ours, the copy and the best; empty if the host
            itself computes.
        hidden: True if none of these three times contains launches; None if the host itself
            computes.
    """

    case: KernelCase
    line: Line
    moved: int
    best: str
    alternatives: dict[str, Spread]
    launch: dict[str, Spread]
    hidden: bool | None


def _measure(
    case: KernelCase, stopwatch: Stopwatch, arguments: argparse.Namespace, tell: Tell
) -> Row:
    tell(f"{case.name}, {size_name(case.size)}", 1)
    calls, right = calls_of(case, stopwatch.device)
    turns = measure_turns(calls, stopwatch, arguments.rounds, arguments.steps)
    return summarize(case, turns, right)


def summarize(case: KernelCase, turns: Mapping[str, Sequence[Turn]], right: bool) -> Row:
    """Return one line of the results, from the turns of ours, the copy and torch's alternatives."""
    seconds = {who: [turn.seconds for turn in own] for who, own in turns.items()}
    alternatives = {who: spread(own) for who, own in seconds.items() if who not in ("ours", "copy")}
    best = min(alternatives, key=lambda who: alternatives[who].median)
    shown = {"ours": "ours", "copy": "copy", "best": best}
    launch = {
        who: spread([turn.launch for turn in turns[key] if turn.launch is not None])
        for who, key in shown.items()
        if turns[key][0].launch is not None
    }
    rate = moved(case) / statistics.median(seconds["ours"]) * 1e-9
    note = f"{rate:.3g} GB/s, {best}"
    if launch:
        ours, theirs = (launch[who].median * 1e6 for who in ("ours", "best"))
        note += f", launch {ours:.3g} {theirs:.3g} µs"
    of_line = {who: seconds[key] for who, key in shown.items()}
    line = compare(case.name, size_name(case.size), of_line, right, note)
    hidden = [turn.hidden for key in shown.values() for turn in turns[key]]
    all_hidden = None if None in hidden else all(hidden)
    return Row(case, line, moved(case), best, alternatives, launch, all_hidden)


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Two bars, each with its worst case and with those that miss it.

    First ours / copy, of large cases of the kernels that only move and add. Then ours / best of
    torch, of all cases for which torch needs several operations. As fast is not faster.
    """
    copied = [row for row in rows if row.case.kernel in _COPYING and row.case.size >= COPY_FROM]
    several = [row for row in rows if row.case.variant in _FASTER.get(row.case.kernel, ())]
    return [
        _bar("ours / copy, from 16 MiB", COPY_BAR, "copy", copied),
        _bar("ours / best of torch, every size", 1.0, "best", several),
    ]


def _bar(name: str, bar: float, peer: str, rows: Sequence[Row]) -> dict[str, Any]:
    ratios = {f"{row.line.section}, {row.line.name}": row.line.ratios[peer].median for row in rows}
    worst = max(ratios, key=lambda case: ratios[case], default="")
    missed = [case for case, ratio in ratios.items() if ratio >= bar]
    found = {"cases": len(ratios), "worst": worst, "value": ratios.get(worst), "missed": missed}
    return {"name": name, "bar": bar, **found}


def bar_line(bar: Mapping[str, Any]) -> Text:
    """Return a bar and what became of it, as a sentence."""
    if not bar["cases"]:
        return Text(f"{bar['name']}: no case measured")
    beyond = f"{len(bar['missed'])} of {bar['cases']} beyond it"
    text = Text(f"{bar['name']}: worst {bar['value']:.3f} ({bar['worst']}), {beyond}; bar ")
    return text.append_text(met(bar["bar"], not bar["missed"]))


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
