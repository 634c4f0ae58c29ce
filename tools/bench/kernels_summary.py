"""What is concluded from timed kernels. Pure functions over plain records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.tools.bench.collectives_tasks import size_name
from dataparallel.tools.bench.kernels_cases import KernelCase, moved
from dataparallel.tools.bench.kernels_timing import Turn
from dataparallel.tools.bench.summary import Spread, ratios, spread

#: Least share of the copy's bytes per second, from a size on at which launches count little.
SHARE_BAR, SHARE_FROM = 0.90, 16 * 2**20
_SHARED = ("reduce_add", "flatten", "unflatten")
#: Where torch has no single operation for it: these must be faster at every size.
_FASTER = {
    "reduce_add": ("2 inputs", "4 inputs", "8 inputs"),
    "flatten": ("400 tensors",),
    "unflatten": ("400 tensors",),
}


@dataclass(frozen=True)
class Alternative:
    """What torch offers instead.

    Attributes:
        name: Its operations.
        seconds: Of a call.
        launch: Seconds of the host per call; None where the host itself computes.
        ratio: Time of ours / its, round by round.
        hidden: Whether no time contains launches: the device had enough to do in all turns. None
            where the host itself computes.
    """

    name: str
    seconds: Spread
    launch: Spread | None
    ratio: Spread
    hidden: bool | None


@dataclass(frozen=True)
class KernelRow:
    """One call beside a copy that moves as many bytes, and beside torch's alternatives.

    Attributes:
        case: What was called.
        moved: Bytes that it must move.
        seconds: Of a call of ours.
        launch: Seconds of the host per call of ours; None where the host itself computes.
        rate: Bytes per second of ours.
        copy_rate: Bytes per second of the copy, read and written ones.
        share: Of the copy's bytes per second, round by round.
        alternatives: Torch's, the fastest first.
        hidden: Whether no time of ours and of the copy contains launches; None where the host
            itself computes.
        agrees: Whether the results were right.
        left_out: Alternatives that torch does not have here.
    """

    case: KernelCase
    moved: int
    seconds: Spread
    launch: Spread | None
    rate: Spread
    copy_rate: Spread
    share: Spread
    alternatives: tuple[Alternative, ...]
    hidden: bool | None
    agrees: bool
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Alternative | None:
        """The fastest alternative; None if torch has none here."""
        return self.alternatives[0] if self.alternatives else None


@dataclass(frozen=True)
class KernelVerdict:
    """A bar, and how many cases are within it.

    Attributes:
        name: What is asked.
        cases: How many were judged.
        missed: The names of those beyond the bar.
        worst: The name of the case with the worst figure; empty without cases.
        value: The worst figure, a median; None without cases.
        bar: The limit.
    """

    name: str
    cases: int
    missed: tuple[str, ...]
    worst: str
    value: float | None
    bar: float

    @property
    def met(self) -> bool | None:
        """Whether all cases are within the bar; None if there was none."""
        return None if self.cases == 0 else not self.missed


def summarize(
    case: KernelCase,
    turns: Mapping[str, Sequence[Turn]],
    *,
    agrees: bool,
    left_out: tuple[str, ...] = (),
) -> KernelRow:
    """One line of the results.

    Args:
        case: What was called.
        turns: By name of the contestant: ``"ours"``, ``"copy"`` and torch's alternatives.
        agrees: Whether the results were right.
        left_out: Alternatives that were not measured.
    """
    seconds = {name: [turn.seconds for turn in own] for name, own in turns.items()}
    ours, copies, size = seconds["ours"], seconds["copy"], moved(case)
    alternatives = [
        Alternative(
            name, spread(own), _launch(turns[name]), ratios(ours, own), _hidden(turns[name])
        )
        for name, own in seconds.items()
        if name not in ("ours", "copy")
    ]
    # A copy has whole bytes on each side.
    copied = size // 2 * 2
    return KernelRow(
        case=case,
        moved=size,
        seconds=spread(ours),
        launch=_launch(turns["ours"]),
        rate=spread([size / each for each in ours]),
        copy_rate=spread([copied / each for each in copies]),
        share=ratios([size / each for each in ours], [copied / each for each in copies]),
        alternatives=tuple(sorted(alternatives, key=lambda each: each.seconds.median)),
        hidden=_hidden([*turns["ours"], *turns["copy"]]),
        agrees=agrees,
        left_out=left_out,
    )


def _hidden(turns: Sequence[Turn]) -> bool | None:
    behind = [turn.behind for turn in turns]
    return None if None in behind else all(behind)


def _launch(turns: Sequence[Turn]) -> Spread | None:
    known = [turn.launch for turn in turns if turn.launch is not None]
    return spread(known) if known else None


def judge(rows: Sequence[KernelRow]) -> list[KernelVerdict]:
    """The bars of all kernels.

    Args:
        rows: All that was measured.

    Returns:
        First the share of the copy, of large cases of the kernels that only move and add; then the
        time beside torch's best alternative, of all cases for which torch needs several operations.
    """
    shares = {
        _name(row): row.share.median
        for row in rows
        if row.case.kernel in _SHARED and row.case.size >= SHARE_FROM
    }
    times = {
        _name(row): row.best.ratio.median
        for row in rows
        if row.best and row.case.variant in _FASTER.get(row.case.kernel, ())
    }
    least = min(shares, key=lambda name: shares[name], default="")
    slowest = max(times, key=lambda name: times[name], default="")
    slow = tuple(name for name, value in times.items() if value >= 1.0)
    return [
        KernelVerdict(
            "share of the copy's bytes/s, from 16 MiB",
            len(shares),
            tuple(name for name, value in shares.items() if value < SHARE_BAR),
            least,
            shares.get(least),
            SHARE_BAR,
        ),
        KernelVerdict(
            "ours / best of torch, every size", len(times), slow, slowest, times.get(slowest), 1.0
        ),
    ]


def slower_launches(rows: Sequence[KernelRow]) -> tuple[int, int]:
    """How many calls of ours take the host longer than torch's best; and of how many."""
    pairs = [
        (row.launch.median, row.best.launch.median)
        for row in rows
        if row.launch and row.best and row.best.launch
    ]
    return sum(ours > torch for ours, torch in pairs), len(pairs)


def _name(row: KernelRow) -> str:
    return f"{row.case.name}, {size_name(row.case.size)}"
