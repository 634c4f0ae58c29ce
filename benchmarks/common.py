"""The parts that benchmarks share: options, ours beside its peers as a table, a bar, JSON."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from dataparallel.tools.arguments import Parser, above_zero
from dataparallel.tools.bench.command import add_rounds
from dataparallel.tools.bench.harness import (
    Outcome,
    Spread,
    geometric_mean,
    largest,
    ratios,
    spread,
)
from dataparallel.tools.bench.runner import Report, agreement, met, new_table, span

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: Repetitions of something small beyond which more say nothing new.
_ENOUGH = 200


# --- results -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Ours beside its peers in one case.

    Attributes:
        section: The heading of the table.
        name: The name of the case within the section.
        seconds: By contestant, ``"ours"`` among them.
        ratios: Ours / each peer, round by round; without peers that took no time.
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
    peers = {who: own for who, own in seconds.items() if who != "ours" and min(own) > 0.0}
    return Line(
        section,
        name,
        {who: spread(own) for who, own in seconds.items()},
        {who: ratios(seconds["ours"], own) for who, own in peers.items()},
        right,
        note,
    )


def error_of(outcomes: Sequence[Outcome], phase: str) -> float:
    """Return the largest error of a phase that any process found, before or after the rounds."""
    said = [each["errors"] for one in outcomes for each in (*one.checked, *one.finished)]
    return largest([errors[phase] for errors in said if phase in errors])


def means(lines: Sequence[Line]) -> dict[str, tuple[str, Spread]]:
    """By section, its first peer and the geometric mean of ours / that peer over its lines."""
    found = {}
    for section in dict.fromkeys(line.section for line in lines):
        own = [line.ratios for line in lines if line.section == section]
        peer = next(iter(own[0]), "")
        each = [some[peer] for some in own if peer in some]
        # There is no mean if, for one, computation hides all of ours.
        if each and all(one.low > 0.0 for one in each):
            found[section] = peer, geometric_mean(each)
    return found


def build_table(lines: Sequence[Line], title: str) -> Table:
    """Return a line for each case, in the order of their sections."""
    peers = list(dict.fromkeys(who for line in lines for who in line.seconds if who != "ours"))
    of_peers = [heading for peer in peers for heading in (peer, f"ours\n/{peer}", "min..max")]
    notes = [""] if any(line.note for line in lines) else []
    table = new_table(title, "ours", "min..max", *of_peers, *notes)
    before = None
    for line in lines:
        if line.section != before:
            before = line.section
            table.add_section()
            table.add_row(Text(before, style="bold"))
        cells = list(duration(line.seconds["ours"]))
        for peer in peers:
            theirs, ratio = line.seconds.get(peer), line.ratios.get(peer)
            cells.append(duration(theirs)[0] if theirs else "")
            cells += [f"{ratio.median:.2f}", span(ratio)] if ratio else ["", ""]
        table.add_row(agreement(f"  {line.name}", line.right), *cells, *([line.note] * len(notes)))
    return table


def duration(seconds: Spread) -> tuple[str, str]:
    """Return a median with its unit, and the range in the same unit."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next((each for each in units if seconds.median >= each[1]), units[-1])
    # Three digits or a little more.
    digits = 0 if seconds.median >= 100 * scale else 1 if seconds.median >= 10 * scale else 2
    median, low, high = (f"{each / scale:.{digits}f}" for each in dataclasses.astuple(seconds))
    return f"{median} {unit}", f"{low}..{high}"


# --- the command line --------------------------------------------------------------------------


def new_parser(name: str, summary: str, examples: Sequence[str]) -> Parser:
    """Return a parser with the options that all benchmarks have; its help ends with examples."""
    command = f"python -m benchmarks.{name}"
    parser = Parser(
        prog=command,
        description=summary,
        epilog="\n".join(["examples:", *(f"  {command} {each}".rstrip() for each in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_rounds(parser)
    return parser


def add_bar(parser: Parser) -> None:
    """Add the option that makes a run fail if ours takes too long."""
    parser.add_argument(
        "--bar",
        type=above_zero,
        metavar="R",
        help="upper limit of ours / the first peer, the geometric mean of each section; exit with "
        "status 1 if it is missed",
    )


def main(parser: Parser, run: Callable[[argparse.Namespace], int]) -> int:
    """Parse the words of the command line and run; what cannot be measured is wrong usage."""
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except ValueError as error:
        parser.error(str(error))


def report(
    title: str, lines: Sequence[Line], arguments: argparse.Namespace, notes: Sequence[str]
) -> Report:
    """Report the measurements, and if all is right and no bar is missed."""
    found = means(lines)
    bar = arguments.bar
    missed = [section for section, (_, mean) in found.items() if bar and mean.median > bar]
    told = []
    for section, (peer, mean) in found.items():
        text = Text(f"{section}: mean of ours / {peer} {mean.median:.3f} ({span(mean)})")
        if bar:
            text.append("  bar ").append_text(met(bar, section not in missed))
        told.append(text)
    rounds = f"medians of {arguments.rounds} interleaved rounds; means are geometric"
    content = {
        "lines": lines,
        "means": {section: mean for section, (_, mean) in found.items()},
        "missed": missed,
    }
    return Report(
        [build_table(lines, title), *told],
        [f"{rounds}; ✓ all results are right", *notes],
        content,
        not missed and all(line.right for line in lines),
    )


def sizes(text: str) -> list[int]:
    """Convert a list such as ``1KiB,64MiB`` from the command line; a bare number means bytes."""
    found = []
    for word in text.split(","):
        parts = re.fullmatch(r"([1-9]\d*)\s*(B|KiB|MiB|GiB)?", word.strip())
        if not parts:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no size; say for example 1KiB,64KiB,16MiB, or a number of bytes"
            )
        found.append(int(parts[1]) * _UNITS[parts[2] or "B"])
    return sorted(set(found))


def size_name(size: int) -> str:
    """Return a number of bytes in the largest unit in which it is a whole number."""
    unit = max((name for name in _UNITS if size % _UNITS[name] == 0), key=lambda name: _UNITS[name])
    return f"{size // _UNITS[unit]} {unit}"


def repetitions(size: int, largest_size: int, steps: int) -> int:
    """Count the repetitions in a turn, if the largest of its kind has ``steps`` of them.

    Smaller ones take as much time together, up to a number that is enough.
    """
    return max(steps, min(_ENOUGH, steps * (largest_size // size)))
