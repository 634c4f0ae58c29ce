"""A pool on CPU replicas: items of unequal cost, overhead, small models, latency of requests."""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import functools
import itertools
import multiprocessing
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.common import Line, compare
from dataparallel import Pool
from dataparallel.tools.arguments import count
from dataparallel.tools.bench.runner import Report, progress, publish

#: Throughput with unequal items / that of the static split, at least; seconds per item, at most.
THROUGHPUT_BAR, OVERHEAD_BAR = 1.15, 150e-6
SLOTS, WIDTHS = ["cpu", "cpu"], (16, 128, 512)
UNEQUAL, OVERHEAD, SMALL, REQUESTS = (
    "unequal items", "overhead per item", "20 small layers", "p99 of requests"
)  # fmt: skip
SHUFFLED, SORTED = "shuffled", "shorter first"
#: Each static split in the order that is not made for it.
_JUDGED = {"halves": SORTED, "in step": SHUFFLED}
#: The joining of requests, their rates, and the seconds of a wait for one unit of a device's work.
_MAX_BATCH, _MAX_WAIT, _RATES, _UNIT = 16, 0.02, (50, 200), 1e-3

#: Workers are started anew, as on a machine with GPUs.
_context: Any = multiprocessing.get_context("spawn")

#: One turn of each contestant of a case: it returns seconds, and whether all was right.
Turns: TypeAlias = Mapping[str, Callable[[], tuple[float, bool]]]


def build_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool",
        description="A pool on two CPU replicas beside a static split, replicas in step, threads "
        "of concurrent.futures and processes of multiprocessing, with one intra-op thread each.",
        epilog="examples:\n"
        "  python -m benchmarks.pool\n"
        "  python -m benchmarks.pool --rounds 15 --items 300\n"
        "  python -m benchmarks.pool --calls 10000 --json pool.json\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=count, default=7, metavar="N",
        help="turns of each contestant; default: 7")  # fmt: skip
    add("--items", type=count, default=48, metavar="N",
        help="items of unequal cost, or of a small model; default: 48")  # fmt: skip
    add("--calls", type=count, default=2000, metavar="N",
        help="items that cost nothing, and requests * 10; default: 2000")  # fmt: skip
    add("--json", metavar="FILE", help="write all rounds and conclusions to FILE, or to - (stdout)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure, show, and return the exit status."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = []
    try:
        with _context.Pool(len(SLOTS), _begin_process) as processes:
            cases = _unequal(arguments.items, processes)
            cases |= _overhead(arguments.calls, processes) | _small(arguments.items)
            cases |= _requests(max(1, arguments.calls // 10))
            with progress(arguments.rounds * sum(map(len, cases.values()))) as tell:
                for key, turns in cases.items():
                    lines.append(_measure(*key, turns, arguments.rounds, tell))
    finally:
        torch.set_num_threads(threads)
    reports = [
        common.report(section, [line for line in lines if line.section == section], arguments, [])
        for section in (UNEQUAL, OVERHEAD, SMALL, REQUESTS)
    ]
    parts = [part for report in reports for part in report.parts]
    notes = [*judge(lines), *reports[0].notes]
    return publish(
        Report(parts, notes, {"lines": lines}, all(each.is_right for each in reports)), arguments
    )


def _measure(
    section: str, name: str, turns: Turns, rounds: int, tell: Callable[[str, int], None]
) -> Line:
    """Let the contestants of a case take turns, after one that does not count."""
    seconds: dict[str, list[float]] = {who: [] for who in turns}
    right = all(turn()[1] for turn in turns.values())
    for _ in range(rounds):
        for who, turn in turns.items():
            tell(f"{section}, {name}: {who}", 1)
            spent, is_right = turn()
            seconds[who].append(spent)
            right &= is_right
    return compare(section, name, seconds, right)


def judge(lines: Sequence[Line]) -> list[str]:
    """Three bars, each with its worst case."""
    throughput = {
        f"{peer}, {line.name}": 1 / line.ratios[peer].median
        for line in lines
        for peer, order in _JUDGED.items()
        if line.section == UNEQUAL and line.name.endswith(order)
    }
    overhead = {
        line.name: line.seconds["ours"].median for line in lines if line.section == OVERHEAD
    }
    latency = {line.name: line.ratios["limit"].median for line in lines if line.section == REQUESTS}
    least = min(throughput, key=lambda name: throughput[name])
    most, last = (max(each, key=lambda name: each[name]) for each in (overhead, latency))
    return [
        f"throughput / static split: worst {throughput[least]:.2f} ({least}); "
        f"bar {THROUGHPUT_BAR:.2f} {_said(throughput[least] >= THROUGHPUT_BAR)}",
        f"overhead per item: worst {1e6 * overhead[most]:.0f} µs ({most}), "
        f"{1 / overhead[most]:,.0f} items per second; "
        f"bar {1e6 * OVERHEAD_BAR:.0f} µs {_said(overhead[most] <= OVERHEAD_BAR)}",
        f"p99 of requests / (max_wait and one batch): worst {latency[last]:.2f} ({last}); "
        f"bar 1.00 {_said(latency[last] <= 1)}",
    ]


def _said(is_met: bool) -> str:
    return "met" if is_met else "missed"


# --- items of unequal cost ---------------------------------------------------------------------


class Costly(nn.Module):
    """A module that costs what the item says: it computes a layer so often, or waits so long.

    While it waits, the host is free, as while an accelerator computes.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Tensor, times: int, computes: bool) -> Tensor:
        for _ in range(times if computes else 0):
            x = torch.tanh(self.layer(x))
        if not computes:
            time.sleep(times * _UNIT)
        return x


#: The module of a process of ``multiprocessing``.
_own: list[nn.Module] = []


def _begin_process() -> None:
    torch.set_num_threads(1)
    _own.append(Costly().eval())


def _call_own(item: tuple[Any, int, bool]) -> Any:
    """Call a process's own module; arrays travel as bytes, and tensors would as open files."""
    with torch.inference_mode():
        return _own[0](torch.from_numpy(item[0]), *item[1:]).numpy()


def _unequal(num_items: int, processes: Any) -> dict[tuple[str, str], Turns]:
    """Return the turns for items whose costs have a long tail, in two orders."""
    net, draw = Costly().eval(), random.Random(0)
    times = [1 + min(100, int(draw.lognormvariate(2.0, 1.0))) for _ in range(num_items)]
    pool, clones = Pool(net, SLOTS), [net, copy.deepcopy(net)]

    def others(items: Sequence[Any]) -> list[Tensor]:
        plain = [(x.numpy(), *rest) for x, *rest in items]
        return [torch.from_numpy(each) for each in processes.imap(_call_own, plain)]

    contestants: dict[str, Callable[[Sequence[Any]], list[Tensor]]] = {
        "ours": lambda items: list(pool.map(items)),
        "halves": functools.partial(_in_halves, clones),
        "in step": functools.partial(_in_step, clones),
        "threads": functools.partial(_in_threads, clones),
        "processes": others,
    }
    found: dict[tuple[str, str], Turns] = {}
    for order, computes in itertools.product((SHUFFLED, SORTED), (False, True)):
        rows = torch.randn(num_items, 64, 256)
        items = [(x, each, computes) for x, each in zip(rows, sorted(times), strict=True)]
        with torch.inference_mode():
            want = [net(*item) if computes else item[0] for item in items]
        cases = list(zip(items, want, strict=True))
        # Each contestant meets the same orders, another one each round.
        found[UNEQUAL, f"{'compute' if computes else 'wait'}, {order}"] = {
            who: functools.partial(
                _timed_items, turn, cases, random.Random(1) if order == SHUFFLED else None
            )
            for who, turn in contestants.items()
        }
    return found


def _timed_items(
    turn: Callable[[Sequence[Any]], list[Tensor]],
    cases: list[tuple[Any, Tensor]],
    shuffler: random.Random | None,
) -> tuple[float, bool]:
    own = [*cases]
    if shuffler is not None:
        shuffler.shuffle(own)
    items, want = [item for item, _ in own], [output for _, output in own]
    return _timed(lambda: turn(items), want)


def _timed(turn: Callable[[], list[Tensor]], want: list[Tensor]) -> tuple[float, bool]:
    begin = time.perf_counter()
    found = turn()
    seconds = time.perf_counter() - begin
    are_right = [torch.allclose(a, b, atol=1e-5) for a, b in zip(found, want, strict=True)]
    return seconds, all(are_right)


def _in_halves(clones: Sequence[nn.Module], items: Sequence[Any]) -> list[Tensor]:
    """Give each clone a half of the items, as accelerate's split_between_processes does."""
    middle = (len(items) + 1) // 2
    found: list[list[Tensor]] = [[], []]

    def work(slot: int, own: Sequence[Any]) -> None:
        with torch.inference_mode():
            found[slot] = [clones[slot](*item) for item in own]

    _join(work, (items[:middle], items[middle:]))
    return found[0] + found[1]


def _in_step(clones: Sequence[nn.Module], items: Sequence[Any]) -> list[Tensor]:
    """Give each clone one item, and wait for all, as a loop with torch.nn.DataParallel does."""
    found = []
    for start in range(0, len(items), len(clones)):
        step: dict[int, Tensor] = {}

        def work(slot: int, item: Any, step: dict[int, Tensor] = step) -> None:
            with torch.inference_mode():
                step[slot] = clones[slot](*item)

        _join(work, items[start : start + len(clones)])
        found += [step[slot] for slot in sorted(step)]
    return found


def _join(work: Callable[[int, Any], None], shares: Sequence[Any]) -> None:
    threads = [threading.Thread(target=work, args=share) for share in enumerate(shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _in_threads(clones: Sequence[nn.Module], items: Sequence[Any]) -> list[Tensor]:
    """Give each clone the next item, in threads of concurrent.futures."""
    free: queue.SimpleQueue[nn.Module] = queue.SimpleQueue()
    for clone in clones:
        free.put(clone)

    def call(item: Any) -> Tensor:
        clone = free.get()
        try:
            with torch.inference_mode():
                output: Tensor = clone(*item)
                return output
        finally:
            free.put(clone)

    with concurrent.futures.ThreadPoolExecutor(len(clones)) as executor:
        return list(executor.map(call, items))


# --- overhead, and small models ----------------------------------------------------------------


def _overhead(num_calls: int, processes: Any) -> dict[tuple[str, str], Turns]:
    """Return the turns for a function and a module that do nothing: seconds per item."""
    numbers, rows = range(num_calls), list(torch.randn(num_calls, 4))
    function, module = Pool(abs, SLOTS), Pool(nn.Identity().eval(), SLOTS)
    executor = concurrent.futures.ThreadPoolExecutor(len(SLOTS))
    submit: Any = executor.submit

    def one_by_one(submit: Callable[[int], Any]) -> Iterator[int]:
        return (submit(number).result() for number in numbers)

    def per_item(results: Callable[[], Iterator[Any]]) -> tuple[float, bool]:
        begin = time.perf_counter()
        total = sum(1 for _ in results())
        return (time.perf_counter() - begin) / num_calls, total == num_calls

    turns: dict[str, dict[str, Callable[[], Iterator[Any]]]] = {
        "map, a function": {
            "ours": lambda: function.map(numbers),
            "threads": lambda: executor.map(abs, numbers),
            "processes": lambda: processes.imap(abs, numbers),
        },
        "map, a module": {
            "ours": lambda: module.map(rows),
            "threads": lambda: executor.map(nn.Identity(), rows),
        },
        "submit, result": {
            "ours": lambda: one_by_one(function.submit),
            "threads": lambda: one_by_one(functools.partial(submit, abs)),
            "processes": lambda: (processes.apply(abs, (number,)) for number in numbers),
        },
    }
    return {
        (OVERHEAD, name): {who: functools.partial(per_item, turn) for who, turn in own.items()}
        for name, own in turns.items()
    }


def _small(num_items: int) -> dict[tuple[str, str], Turns]:
    """Return the turns for 20 layers of several widths, beside the bare module in a loop."""
    found: dict[tuple[str, str], Turns] = {}
    for width in WIDTHS:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(20)]).eval()
        items = list(torch.randn(num_items, 32, width))

        def bare(net: nn.Module = net, items: list[Tensor] = items) -> list[Tensor]:
            with torch.inference_mode():
                return [net(item) for item in items]

        def ours(pool: Pool = Pool(net, SLOTS), items: list[Tensor] = items) -> list[Tensor]:  # noqa: B008
            return list(pool.map(items))

        want = bare()
        found[SMALL, f"{width} wide"] = {
            "ours": functools.partial(_timed, ours, want),
            "bare": functools.partial(_timed, bare, want),
        }
    return found


# --- requests ----------------------------------------------------------------------------------


class Batched(nn.Module):
    """A layer whose time grows with the batch; the host is free while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep((4 + len(x)) * _UNIT)
        output: Tensor = self.layer(x)
        return output


def _requests(num_requests: int) -> dict[tuple[str, str], Turns]:
    """Return the turns: the 99th percentile of the latency, and the limit for it."""
    torch.manual_seed(0)
    net, draw = Batched().eval(), random.Random(0)
    pool = Pool(net, SLOTS, max_batch=_MAX_BATCH, max_wait=_MAX_WAIT)
    rows = torch.randn(num_requests, 1, 256)
    with torch.inference_mode():
        want = net.layer(rows.flatten(0, 1))

    ends: dict[int, float] = {}

    def note_end(number: int, _: object) -> None:
        ends[number] = time.perf_counter()

    def ours(per_second: float) -> tuple[float, bool]:
        futures, begins = [], []
        due = time.perf_counter()
        for number, row in enumerate(rows):
            # They come by chance, and not in step with the pool.
            due += draw.expovariate(per_second)
            time.sleep(max(0.0, due - time.perf_counter()))
            begins.append(time.perf_counter())
            futures.append(pool.submit(row))
            futures[-1].add_done_callback(functools.partial(note_end, number))
        found = torch.cat([future.result() for future in futures])
        waits = sorted(ends[number] - begin for number, begin in enumerate(begins))
        return waits[int(0.99 * len(waits))], torch.allclose(found, want, atol=1e-5)

    def limit() -> tuple[float, bool]:
        """Measure one whole batch of the bare module, and add the wait."""
        begin = time.perf_counter()
        with torch.inference_mode():
            net(rows[:_MAX_BATCH].flatten(0, 1))
        return _MAX_WAIT + time.perf_counter() - begin, True

    return {
        (REQUESTS, f"{rate} per second"): {"ours": functools.partial(ours, rate), "limit": limit}
        for rate in _RATES
    }


if __name__ == "__main__":
    raise SystemExit(common.main(build_parser(), run))
