"""The parts that benchmarks share: options, phases, ours beside its peers as a table, JSON."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.command import add_rounds
from dataparallel.tools.bench.harness import Outcome, Spread, geometric_mean, ratios, spread
from dataparallel.tools.bench.runner import Report, agreement, new_table, span

#: Repetitions of something small beyond which more say nothing new.
_ENOUGH = 200


@dataclass(frozen=True)
class Line:
    """Ours beside its peers in one case.

    Attributes:
        section: The heading of the table.
        name: The name of the case within the section.
        seconds: By contestant, ``"ours"`` among them.
        ratios: Ours / each peer, round by round.
        right: True if all results were right.
        note: Other values to show.
    """

    section: str
    name: str
    seconds: dict[str, Spread]
    ratios: dict[str, Spread]
    right: bool
    note: str = ""


def compare(
    section: str, name: str, seconds: Mapping[str, Sequence[float]], right: bool, note: str = ""
) -> Line:
    """Compare ours with its peers round by round; each contestant has one figure per round."""
    peers = {who: ratios(seconds["ours"], own) for who, own in seconds.items() if who != "ours"}
    return Line(
        section, name, {who: spread(own) for who, own in seconds.items()}, peers, right, note
    )


def phase(who: str, section: str, name: str) -> str:
    """Return the key of a contestant's seconds in a case, for contestants that share a process."""
    return f"{who} | {section} | {name}"


def rounds_of(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], dict[str, tuple[float, ...]]]:
    """Return the seconds of each round, by section and name, and by contestant."""
    found: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {}
    for outcome in outcomes:
        for key, seconds in outcome.seconds.items():
            who, section, name = key.split(" | ")
            found.setdefault((section, name), {})[who] = seconds
    return found


def wrong_cases(outcomes: Sequence[Outcome]) -> set[tuple[str, str]]:
    """Return section and name of each case that any process found wrong, before or afterwards."""
    said = [each for one in outcomes for each in (*one.checked, *one.finished)]
    return {tuple(case) for each in said for case in each["wrong"]}


def lines_of(outcomes: Sequence[Outcome]) -> list[Line]:
    """Return a line for each case."""
    wrong = wrong_cases(outcomes)
    return [compare(*key, own, key not in wrong) for key, own in rounds_of(outcomes).items()]


def report(
    title: str, lines: Sequence[Line], arguments: argparse.Namespace, notes: Sequence[str]
) -> Report:
    """Report the measurements, with the geometric mean of ours / the first peer by section."""
    sections = dict.fromkeys(line.section for line in lines)
    lines = sorted(lines, key=lambda line: list(sections).index(line.section))
    means = {}
    for section in sections:
        own = [line.ratios for line in lines if line.section == section]
        means[section] = next(iter(own[0])), geometric_mean(each[next(iter(each))] for each in own)
    rounds = f"medians of {arguments.rounds} interleaved rounds; means are geometric"
    return Report(
        [
            _table(lines, title),
            *(f"{section}: mean of ours / {peer} {mean.median:.3f} ({span(mean)})"
              for section, (peer, mean) in means.items()),
        ],
        [f"{rounds}; ✓ all results are right", *notes],
        {"lines": lines},
        all(line.right for line in lines),
    )  # fmt: skip


def _table(lines: Sequence[Line], title: str) -> Table:
    peers = list(dict.fromkeys(who for line in lines for who in line.ratios))
    of_peers = [heading for peer in peers for heading in (peer, f"ours\n/{peer}", "min..max")]
    table = new_table(title, "ours", "min..max", *of_peers, "")
    for number, line in enumerate(lines):
        if number == 0 or line.section != lines[number - 1].section:
            table.add_section()
            table.add_row(Text(line.section, style="bold"))
        cells = list(_duration(line.seconds["ours"]))
        for ratio, theirs in ((line.ratios.get(who), line.seconds.get(who)) for who in peers):
            known = ratio and theirs and (_duration(theirs)[0], f"{ratio.median:.2f}", span(ratio))
            cells += known or ("", "", "")
        table.add_row(agreement(f"  {line.name}", line.right), *cells, line.note)
    return table


def _duration(seconds: Spread) -> tuple[str, str]:
    """Return a median with its unit, and the range in the same unit."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next((each for each in units if seconds.median >= each[1]), units[-1])
    # Three digits or a little more.
    digits = 0 if seconds.median >= 100 * scale else 1 if seconds.median >= 10 * scale else 2
    median, low, high = (f"{each / scale:.{digits}f}" for each in dataclasses.astuple(seconds))
    return f"{median} {unit}", f"{low}..{high}"


def new_parser(name: str, summary: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; its help ends with examples."""
    command = f"python -m benchmarks.{name}"
    parser = argparse.ArgumentParser(
        prog=command,
        description=summary,
        epilog="\n".join(["examples:", *(f"  {command} {each}".rstrip() for each in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_rounds(parser)
    return parser


def main(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> int:
    """Parse the words of the command line and run; what cannot be measured is wrong usage."""
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except ValueError as error:
        parser.error(str(error))


def size_name(kib: int) -> str:
    """Return a number of KiB, as MiB where it is a whole number of those."""
    return f"{kib} KiB" if kib % 1024 else f"{kib // 1024} MiB"


def repetitions(size: int, largest_size: int, steps: int) -> int:
    """Count the repetitions in a turn, if the largest of its kind has ``steps`` of them.

    Smaller ones take as much time together, up to a number that is enough.
    """
    return max(steps, min(_ENOUGH, steps * (largest_size // size)))
