"""The processes on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.look import ACCENT, Look, padded, styled
from dataparallel.tools.monitor.reading import ProcessReading


@dataclass(frozen=True)
class _Column:
    head: str
    #: What is more important stays longer; 0 is the most important.
    rank: int
    values: list[str]
    right: bool = False

    @property
    def width(self) -> int:
        return max(Text(text).cell_len for text in (self.head, *self.values))


def process_lines(
    processes: Sequence[ProcessReading],
    own: int | None,
    width: int,
    look: Look,
    limit: int | None = None,
) -> list[Text]:
    """A heading and a line per process, each at most ``width`` cells.

    Args:
        processes: What was read.
        own: Number of the process that is watched; it comes first and is set off.
        width: Columns are left out until the rest has room.
        look: What the terminal can show.
        limit: At most so many processes; how many more there are is told. Default: all.
    """
    if not processes:
        return []
    ordered = sorted(processes, key=lambda p: (p.pid != own, -(p.memory or 0), p.device, p.pid))
    shown = ordered if limit is None or len(ordered) <= limit else ordered[: max(0, limit - 1)]
    columns = _chosen(_columns(shown, own, look), width)
    lines = [_row([column.head for column in columns], columns, width, "dim")]
    for row, process in enumerate(shown):
        style = f"bold {ACCENT}" if process.pid == own else ""
        lines.append(_row([column.values[row] for column in columns], columns, width, style))
    if len(shown) < len(ordered):
        lines.append(styled(f"and {len(ordered) - len(shown)} more", "dim"))
    return lines


def _columns(processes: Sequence[ProcessReading], own: int | None, look: Look) -> list[_Column]:
    unseen = units.NOT_AVAILABLE
    mark = {True: "> ", False: "  "}
    return [
        _Column("  pid", 0, [mark[p.pid == own] + str(p.pid) for p in processes]),
        _Column("user", 5, [look.clean(p.user or unseen) for p in processes]),
        _Column("device", 1, [look.clean(p.device) for p in processes]),
        _Column("memory", 2, [units.bytes_text(p.memory) for p in processes], True),
        _Column("util", 4, [units.percent_text(p.utilization) for p in processes], True),
        _Column("cpu", 3, [units.percent_text(p.cpu) for p in processes], True),
        _Column("host memory", 7, [units.bytes_text(p.host_memory) for p in processes], True),
        _Column("command", 6, [look.clean(p.name or unseen) for p in processes]),
    ]


def _chosen(columns: list[_Column], width: int) -> list[_Column]:
    """The columns that have room; the last one, if it is there, may be cut."""
    last = columns[-1]
    kept: list[_Column] = []
    used = 0
    for column in sorted(columns, key=lambda one: one.rank):
        need = min(column.width, 12) if column is last else column.width
        if kept and used + 2 + need > width:
            # What is less important does not take the place of what is more so.
            break
        kept.append(column)
        used += need + (2 if len(kept) > 1 else 0)
    return [column for column in columns if column in kept]


def _row(texts: Sequence[str], columns: Sequence[_Column], width: int, style: str) -> Text:
    line = Text()
    for i, (text, column) in enumerate(zip(texts, columns, strict=True)):
        line.append("  " if i else "")
        line.append_text(padded(styled(text, style), column.width, right=column.right))
    return padded(line, min(width, line.cell_len))
