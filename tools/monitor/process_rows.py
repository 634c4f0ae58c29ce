"""The processes on the devices as rows of a table: sorted, filtered, or below their parents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from dataparallel.monitor.readings.host_processes import HostProcesses
from dataparallel.monitor.readings.reading import ProcessReading
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.bars import ACCENT, ALARM, clean


@dataclass(frozen=True)
class Row:
    """A process on a device, and what is drawn before its command in a tree."""

    process: ProcessReading
    branch: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """Return the row's key: a process may be on several devices."""
        return self.process.pid, self.process.device


@dataclass(frozen=True)
class Column:
    """One column: its head, what rows are sorted by (None comes last), and the text of a cell."""

    name: str
    value: Callable[[ProcessReading], Any]
    shown: Callable[[Any], str]
    is_number: bool = True

    def text(self, row: Row) -> str:
        """Return the text in the cell of a row."""
        value = self.value(row.process)
        text = units.NOT_AVAILABLE if value is None else self.shown(value)
        return row.branch + text if self.name == "command" else text


COLUMNS = (
    Column("pid", lambda p: p.pid, str),
    Column("user", lambda p: p.user, clean, is_number=False),
    Column("device", lambda p: p.device or None, clean, is_number=False),
    Column("memory", lambda p: p.memory, units.bytes_text),
    Column("util", lambda p: p.utilization, units.percent_text),
    Column("cpu", lambda p: p.cpu, units.percent_text),
    Column("host mem", lambda p: p.host_memory, units.bytes_text),
    Column("running", lambda p: p.running, units.seconds_text),
    Column("command", lambda p: p.command or p.name, clean, is_number=False),
)
#: From so many cells on there is room for all of them.
_WIDE = 100
NAMES = tuple(column.name for column in COLUMNS)


def arranged(
    processes: Iterable[ProcessReading], sort: str, *, descending: bool, pattern: str = ""
) -> list[Row]:
    """Return the rows that a filter lets through, sorted; those with unknown values come last.

    The words of the pattern must all occur in a row; ``user:NAME`` and ``device:NAME`` only there.
    """
    value = COLUMNS[NAMES.index(sort)].value
    rows = [Row(one) for one in processes if _matches(one, pattern.lower().split())]
    rows.sort(key=lambda row: row.key)
    known = [row for row in rows if value(row.process) is not None]
    known.sort(key=lambda row: value(row.process), reverse=descending)
    return known + [row for row in rows if value(row.process) is None]


def _matches(process: ProcessReading, words: Sequence[str]) -> bool:
    fields = {"user": process.user or "", "device": process.device}
    whole = (
        f"{process.pid} {process.name or ''} {process.command or ''} {' '.join(fields.values())}"
    )
    for word in words:
        field, colon, text = word.partition(":")
        if colon and field in fields:
            # cuda:1 is not cuda:10.
            value = fields[field].lower()
            if text not in (value, value.rpartition(":")[2]):
                return False
        elif word not in whole.lower():
            return False
    return True


def ancestors(processes: Iterable[ProcessReading], host: HostProcesses) -> list[ProcessReading]:
    """Return the parents of processes, and their parents."""
    found: dict[int, ProcessReading] = {}
    for process in processes:
        pid = process.parent
        while pid and pid not in found:
            told = host.describe(pid)
            if told is None:
                break
            found[pid] = ProcessReading("", pid, **told)
            pid = told.get("parent")
    host.keep(found)
    return list(found.values())


def as_tree(rows: Sequence[Row], ancestors: Iterable[ProcessReading]) -> list[Row]:
    """Return the rows and their ancestors below their parents, siblings in the rows' order."""
    own = {row.process.pid for row in rows}
    everyone = [*rows, *(Row(one) for one in ancestors if one.pid not in own)]
    pids = {row.process.pid for row in everyone}
    children: dict[int | None, list[Row]] = {}
    for row in everyone:
        parent = row.process.parent
        children.setdefault(parent if parent in pids else None, []).append(row)
    found: list[Row] = []

    def add(parent: int | None, before: str) -> None:
        family = children.pop(parent, [])
        siblings = list(dict.fromkeys(row.process.pid for row in family))
        for pid in siblings:
            fork, rest = ("└─ ", "   ") if pid == siblings[-1] else ("├─ ", "│  ")
            if parent is None:
                fork = rest = ""
            mine = (row.process for row in family if row.process.pid == pid)
            found.extend(Row(process, before + fork) for process in mine)
            add(pid, before + rest)

    add(None, "")
    # Numbers are reused while they are read: a process that is its parent's parent is shown too.
    while children:
        add(next(iter(children)), "")
    return found


def table(
    rows: Sequence[Row], own: Mapping[int, str], width: int, sort: str = "", mark: str = ""
) -> tuple[list[Text], dict[str, int]]:
    """Return a head and the rows, and where each column ends.

    Processes of runs that are watched (``own``) have a sign each, and ``mark`` stands behind the
    column ``sort``. A small ``width`` is for the command.
    """
    columns = [one for one in COLUMNS if width >= _WIDE or one.name != "running"]
    heads = [one.name + mark * (one.name == sort) for one in columns]
    texts = [heads, *([one.text(row) for one in columns] for row in rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*texts, strict=True)]
    lines = []
    for row, cells in zip((None, *rows), texts, strict=True):
        pid = None if row is None else row.process.pid
        sign, style = " ", "bold underline" if row is None else ""
        if pid is not None and pid in own:
            sign = own[pid]
            style = f"bold {ACCENT if sign == '>' else ALARM}"
        padded = [sign]
        for one, cell, size in zip(columns, cells, widths, strict=True):
            room = " " * (size - cell_len(cell))
            padded.append(room + cell if one.is_number else cell + room)
        lines.append(Text("  ".join(padded).rstrip(), style))
    ends = itertools.accumulate((size + 2 for size in widths), initial=1)
    return lines, dict(
        zip((one.name for one in columns), itertools.islice(ends, 1, None), strict=True)
    )
