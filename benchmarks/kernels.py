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
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import common
from benchmarks.kernel_cases import (
    DTYPES,
    KERNELS,
    MANY,
    Call,
    KernelCase,
    calls_of,
    moved,
    plan_cases,
)
from dataparallel import devices
from dataparallel.kernels.backend import backend_of
from dataparallel.tools.arguments import count, counts, names_in
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.harness import Contestant, Outcome, Task
from dataparallel.tools.bench.seat import enable_virtual_devices

#: Most of ours / the copy (0.90 of its bytes per second), for the kernels that only copy. It counts
#: from a size on at which launches matter little.
COPY_BAR, COPY_FROM = 1 / 0.9, 16 * 1024
_COPYING = ("flatten", "unflatten")
#: Most zeroings of the buffer before a call.
_MOST_FLUSHES = 64


def build_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = common.new_parser(
        "kernels",
        "Time of the kernels beside a copy of as many bytes, and beside torch's alternatives.",
        [
            "",
            "--kernels flatten,unflatten --kib 16384,262144 --json results.json",
            "--device cpu --dtypes bfloat16 --rounds 3 --steps 20",
        ],
    )
    add = parser.add_argument
    add("--kernels", type=names_in(KERNELS), default=list(KERNELS), metavar="LIST",
        help=f"{','.join(KERNELS)}; default: all")  # fmt: skip
    add("--kib", type=counts, default=[64 * 4**i for i in range(6)], metavar="LIST",
        help="of all tensors together; default: 64 to 65536 by factors of 4")  # fmt: skip
    add("--dtypes", type=names_in(list(DTYPES)), default=list(DTYPES), metavar="LIST",
        help=f"of the tensors; default: {','.join(DTYPES)}")  # fmt: skip
    add("--device", default=None, metavar="DEVICE",
        help="for example cuda:0 or cpu; default: the first accelerator, or the CPU")  # fmt: skip
    add("--flush-mib", type=count, default=256, metavar="N",
        help="of the buffer that is zeroed before each call on an accelerator, to leave nothing in "
        "its caches; default: 256")  # fmt: skip
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    given = arguments.device
    device = devices.parse_device(given) if given else devices.parse_devices(None)[0]
    cases = plan_cases(arguments.kernels, arguments.dtypes, arguments.kib)
    task = KernelsTask(
        "ours", (str(device),), cases=tuple(cases), flush=arguments.flush_mib * 2**20
    )
    plans = {"kernels": [Contestant("kernels", "kernels and torch", (task,))]}
    return runner.run(
        arguments, plans, lambda measured: conclude(cases, measured["kernels"], arguments)
    )


# --- the worker process ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelsTask(Task):
    """Calls on one device, and the bytes to zero before each."""

    cases: tuple[KernelCase, ...]
    flush: int

    def begin(self) -> KernelCalls:
        """Make the object that measures, in the worker process."""
        return KernelCalls(self)


class KernelCalls:
    """The calls of one device in turn: of each case ours, the copy and torch's alternatives."""

    def __init__(self, task: KernelsTask) -> None:
        self.task = task
        enable_virtual_devices(task.devices)
        self.device = devices.parse_device(task.devices[0])
        self.late: set[str] = set()
        if devices.is_accelerator(self.device):
            self.buffer = torch.zeros(task.flush, dtype=torch.uint8, device=self.device)

    def check(self, steps: int) -> dict[str, Any]:
        """Compare each result with torch's, and tell what launches our calls."""
        wrong = []
        for case in self.task.cases:
            calls, is_right = calls_of(case, self.device)
            calls["ours"]()
            if not is_right():
                wrong.append((case.section, common.size_name(case.kib)))
        backend = backend_of(self.device)
        return {"wrong": wrong, "backend": type(backend).__name__ if backend else ""}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Return the seconds of each call, and on an accelerator those of its launch."""
        seconds: dict[str, list[float]] = {}
        for case in self.task.cases:
            size = common.size_name(case.kib)
            times = common.repetitions(case.kib, self.task.cases[-1].kib, steps)
            for who, call in calls_of(case, self.device)[0].items():
                key = common.phase(who, case.section, size)
                # To compile, allocate, and make what is kept from then on.
                call()
                if not devices.is_accelerator(self.device):
                    seconds[key] = [_seconds_of(call) for _ in range(times)]
                    continue
                took = [self._queue(call, key) for _ in range(times)]
                seconds[key], launches = map(list, zip(*took, strict=True))
                seconds[common.phase(f"launch {who}", case.section, size)] = launches
        return seconds

    def _queue(self, call: Call, key: str) -> tuple[float, float]:
        """Return the seconds of the device and of the launch. See Note [Time of a kernel]."""
        flushes, hidden, begin = 1, False, 0.0
        while not hidden and flushes <= _MOST_FLUSHES:
            for _ in range(flushes):
                self.buffer.zero_()
            started = devices.timing_event(self.device)
            launch = _seconds_of(call)
            ended = devices.timing_event(self.device)
            assert started is not None and ended is not None
            hidden = not started.query()
            devices.synchronize(self.device)
            begin = started.elapsed_time(ended) * 1e-3
            flushes *= 2
        if not hidden:
            self.late.add(key)
        return begin, launch

    def finish(self) -> dict[str, Any]:
        """Check once more, and tell for which calls the device has waited."""
        return {**self.check(1), "late": sorted(self.late)}


def _seconds_of(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# --- conclusions -------------------------------------------------------------------------------


def conclude(
    cases: Sequence[KernelCase], outcomes: Sequence[Outcome], arguments: argparse.Namespace
) -> runner.Report:
    """Compare ours with the copy and with the best of torch, and judge them."""
    wrong, rounds = common.wrong_cases(outcomes), common.rounds_of(outcomes)
    lines = {}
    for case in cases:
        key = case.section, common.size_name(case.kib)
        lines[case] = line_of(case, rounds[key], key not in wrong)
    backend = outcomes[0].checked[0]["backend"]
    late = len(outcomes[0].finished[0]["late"])
    runs = f"kernels, launched by {backend}" if backend else "torch's references, not kernels"
    notes = [
        "copy: moves as many bytes; best: the fastest of torch's alternatives, named at the end",
        "GB/s: of what must move: each input read once, each result written once",
        "launch: the host's time per call, of ours and of the best",
        f"the device had to wait for launches, which are in the times: {late} calls",
    ]
    title = f"{runs}; {outcomes[0].contestant.tasks[0].devices[0]}, torch {torch.__version__}"
    report = common.report(title, list(lines.values()), arguments, notes)
    table, bars = report.parts[0], judge(lines) if backend else []
    return runner.Report([table, *bars], report.notes, report.content, report.is_right)


def line_of(case: KernelCase, rounds: Mapping[str, Sequence[float]], right: bool) -> common.Line:
    """Return ours beside the copy and the best of torch's alternatives."""
    medians = {who: statistics.median(own) for who, own in rounds.items()}
    best = min(
        (who for who in rounds if who not in ("ours", "copy") and not who.startswith("launch")),
        key=lambda who: medians[who],
    )
    note = f"{moved(case) / medians['ours'] * 1e-9:.3g} GB/s, {best}"
    if "launch ours" in medians:
        launches = [medians["launch ours"] * 1e6, medians[f"launch {best}"] * 1e6]
        note += ", launch {:.3g} {:.3g} µs".format(*launches)
    seconds = {"ours": rounds["ours"], "copy": rounds["copy"], "best": rounds[best]}
    return common.compare(case.section, common.size_name(case.kib), seconds, right, note)


def judge(lines: Mapping[KernelCase, common.Line]) -> list[str]:
    """Two bars, each with its worst case and the number of those that miss it.

    First ours / copy, of large cases of the kernels that only copy. Then ours / best of torch, of
    their cases with many tensors, for which torch has no single operation. As fast is not faster.
    """
    copied = [case for case in lines if case.kernel in _COPYING and case.kib >= COPY_FROM]
    several = [case for case in lines if case.kernel in _COPYING and case.count == MANY]
    told = []
    for name, bar, peer, judged in (
        ("ours / copy, from 16 MiB", COPY_BAR, "copy", copied),
        ("ours / best of torch, every size", 1.0, "best", several),
    ):
        found = {case: lines[case].ratios[peer].median for case in judged}
        missed = sum(ratio >= bar for ratio in found.values())
        if not found:
            told.append(f"{name}: no case measured")
            continue
        worst = max(found, key=lambda case: found[case])
        told.append(
            f"{name}: worst {found[worst]:.3f} ({worst.section}, {common.size_name(worst.kib)}), "
            f"{missed} of {len(found)} beyond it; bar {bar:.2f} {'missed' if missed else 'met'}"
        )
    return told


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
