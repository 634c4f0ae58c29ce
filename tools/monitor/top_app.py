"""The interactive `monitor top`: what the view tells, a table of processes, and keys and mouse."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.filter import LineFilter
from textual.widgets import Footer, Input, Label

from dataparallel.monitor.readings.host_processes import HostProcesses
from dataparallel.monitor.readings.reading import ProcessReading
from dataparallel.monitor.sample import Sample
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.bars import clean
from dataparallel.tools.monitor.process_control import end_process
from dataparallel.tools.monitor.process_rows import (
    COLUMNS,
    NAMES,
    Row,
    ancestors,
    arranged,
    as_tree,
    table,
)
from dataparallel.tools.monitor.top_widgets import Lines, Panel, Table
from dataparallel.tools.monitor.view import View

#: New samples, a signal and the end of sampling are seen within so many seconds.
_TICK = 0.1
#: So many rows of the table stay visible beside details, and beside what is not left out.
_ROWS, _FEWEST_ROWS = 5, 3
_PATTERN = "words, user:NAME or device:NAME; Enter keeps, Esc ends it"


class TopApp(App[None]):
    """An app that shows samples as they come, until it is told to quit.

    Another thread adds the samples that have ``arrived``, and the first signal that is ``received``
    ends it. ``has_ended`` tells whether no more samples come; what it raises is the ``failure``.
    Processes that are not ``is_live``, on this machine now, are not asked anything.
    """

    TITLE = "dataparallel monitor top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Lines { scrollbar-size: 0 1; }
    #head { overflow: hidden; }
    #processes { height: 1fr; }
    #filter { height: 1; }
    .hidden { display: none; }
    Panel { align: center middle; }
    Panel VerticalScroll { width: 90%; max-width: 110; height: auto; max-height: 90%; }
    Panel VerticalScroll { border: round $primary; padding: 0 1; scrollbar-size-vertical: 1; }
    Panel Static { height: auto; }
    Panel Horizontal { height: auto; align-horizontal: right; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,h", "help", "help", key_display="?", tooltip="all keys"),
        Binding("q", "quit", "quit", tooltip="quit; so does Ctrl-C"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("n", "messages", show=False, tooltip="all warnings, advice and notes in full"),
        Binding("slash", "filter", "filter", key_display="/", tooltip=f"processes with {_PATTERN}"),
        Binding("comma,less_than_sign", "sort(-1)", show=False),
        Binding(
            "full_stop,greater_than_sign",
            "sort(1)",
            "sort",
            key_display="<>",
            tooltip="sort by the column further left or right, or by the one you click on",
        ),
        Binding("r", "reverse", show=False, tooltip="sort the other way around"),
        Binding("t", "tree", "tree", tooltip="processes below their parents"),
        Binding("I", "end('INT')", "int", tooltip="SIGINT to the process, as Ctrl-C sends it"),
        Binding("T", "end('TERM')", "term", tooltip="SIGTERM, which asks the process to end"),
        Binding("K", "end('KILL')", "kill", tooltip="SIGKILL, which no process can refuse"),
    ]

    def __init__(
        self,
        view: View,
        arrived: deque[Sample],
        has_ended: Callable[[], bool],
        received: Sequence[int] = (),
        *,
        is_live: bool = True,
        read_only: bool = False,
        line_filters: Sequence[LineFilter] = (),
    ) -> None:
        # The terminal's own colors, so that it may be dark or bright; and none with NO_COLOR.
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.failure: BaseException | None = None
        self._view = view
        self._arrived = arrived
        self._has_ended = has_ended
        self._received = received
        self._is_live = is_live
        self._read_only = read_only
        self._is_over = False
        self._rows: list[Row] = []
        self._parents = HostProcesses()
        self._sort, self._descending, self._is_tree = "memory", True, False
        self._ends: Mapping[str, int] = {}
        self._head, self._machine = Lines("head"), Lines("machine")
        self._table = Table("processes")
        self._pattern = Input(placeholder=_PATTERN, compact=True)
        self._filter = Horizontal(Label("filter "), self._pattern, id="filter", classes="hidden")
        self._line_filters = line_filters

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield from (self._head, self._machine, self._table, self._filter, Footer(compact=True))

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return what changes the lines at last, for terminals that have less."""
        return [*super().get_line_filters(), *self._line_filters]

    def on_mount(self) -> None:
        """Begin to show what comes."""
        self._table.focus()
        self.call_after_refresh(self._tick)
        self.set_interval(_TICK, self._tick)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True if a key does something now."""
        return action != "end" or (self._is_live and not self._read_only)

    # --- what is shown ---------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._received:
            self.exit()
            return
        # Asked first: what came before the end is still to be shown.
        try:
            is_over = self._has_ended()
        except RuntimeError as error:
            self.failure = error
            self.exit()
            return
        has_changed = bool(self._arrived) or is_over != self._is_over
        self._is_over = is_over
        while self._arrived:
            self._view.add(self._arrived.popleft())
        if has_changed:
            self._draw()

    def on_resize(self) -> None:
        """Handle another size of the terminal, which is known once this has been handled."""
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        width, height = self.size.width, self.size.height
        sample = self._view.history.sample
        head = self._view.heading(width, "the end" if self._is_over else "")
        head += self._view.summary(width, height // 6)
        self._head.show(head)
        self._head.set_styles(height=len(head))
        self._draw_rows(() if sample is None else sample.processes)
        has_table = bool(self._rows or self._pattern.value)
        if has_table and self._table.has_class("hidden") and not self._pattern.has_focus:
            self._table.focus()
        self._table.set_class(not has_table, "hidden")
        has_filter = not self._filter.has_class("hidden")
        rooms = [
            height - len(head) - 1 - has_filter - (min(len(self._rows), rows) + 1) * has_table
            for rows in (max(_ROWS, height // 4), _FEWEST_ROWS)
        ]
        lines = self._view.machine(width - 1, rooms[0])
        self._machine.show(lines)
        self._machine.set_styles(height=max(1, min(len(lines), rooms[1])) if has_table else "1fr")

    def _draw_rows(self, processes: Sequence[ProcessReading]) -> None:
        selected = self._selected
        before = None if selected is None else selected.key
        rows = arranged(
            processes, self._sort, descending=self._descending, pattern=self._pattern.value
        )
        if self._is_tree:
            own = [row.process for row in rows]
            rows = as_tree(rows, ancestors(own, self._parents) if self._is_live else ())
        self._rows = rows
        mark = "↓" if self._descending else "↑"
        watched, width = self._view.own_pids(), self.size.width
        lines, self._ends = table(rows, watched, width, self._sort, mark)
        self._table.show(lines)
        # The selection stays on its row wherever that goes, also out of sight.
        places: dict[object, int] = {row.key: place for place, row in enumerate(rows)}
        self._table.choose(places.get(before, self._table.cursor), is_seen=False)

    @property
    def _selected(self) -> Row | None:
        place = self._table.cursor
        return self._rows[place] if place < len(self._rows) else None

    # --- keys and mouse --------------------------------------------------------------------------

    def action_help(self) -> None:
        """Show all keys."""
        bindings = [one for one in self.BINDINGS if isinstance(one, Binding) and one.tooltip]
        told = [
            (one.key_display or one.key, one.tooltip)
            for one in bindings
            if self.check_action(one.action.partition("(")[0], ())
        ]
        told += [
            ("Esc", "end the filter"),
            ("↑ ↓ PgUp PgDn", "choose a process, or scroll; so does the mouse"),
            ("← →", "scroll the table sideways"),
            ("Tab", "go between the table and what is above it"),
        ]
        text = Text()
        for key, what in told:
            text.append(f"{key:>14}  ", "bold").append(f"{what}\n")
        self.push_screen(Panel("keys", text))

    def action_messages(self) -> None:
        """Show warnings, advice and notes in full."""
        width = min(104, int(0.9 * self.size.width) - 6)
        lines = [*self._view.alerts(width), *self._view.notes(width)]
        self.push_screen(Panel("to look at", Text("\n").join(lines) or Text("nothing")))

    def action_filter(self) -> None:
        """Ask for a filter."""
        self._filter.remove_class("hidden")
        self._pattern.focus()
        self._draw()

    @on(Input.Changed)
    def _filter_now(self) -> None:
        self._draw()

    @on(Input.Submitted)
    def _keep_filter(self) -> None:
        self._filter.set_class(not self._pattern.value, "hidden")
        self._table.focus()
        self._draw()

    def key_escape(self) -> None:
        """End the filter."""
        self._pattern.clear()
        self._keep_filter()

    @on(Table.HeadClicked)
    def _sort_by_head(self, event: Table.HeadClicked) -> None:
        for name, end in self._ends.items():
            if event.x < end:
                self._sort_by(name)
                break

    def action_sort(self, step: int) -> None:
        """Sort by the column further left or right."""
        self._sort_by(NAMES[(NAMES.index(self._sort) + step) % len(NAMES)])

    def action_reverse(self) -> None:
        """Sort the other way around."""
        self._sort_by(self._sort)

    def _sort_by(self, name: str) -> None:
        is_number = COLUMNS[NAMES.index(name)].is_number and name != "pid"
        self._descending = not self._descending if name == self._sort else is_number
        self._sort = name
        self._draw()

    def action_tree(self) -> None:
        """Show processes below their parents, or not any more."""
        self._is_tree = not self._is_tree
        self._draw()

    def action_end(self, name: str) -> None:
        """Ask whether the selected process shall get a signal."""
        if self._selected is None:
            return
        process = self._selected.process
        told = f"{process.user or units.NOT_AVAILABLE}  {process.command or process.name or ''}"

        def answered(is_wanted: bool | None) -> None:
            if is_wanted:
                try:
                    how = signal.Signals[f"SIG{name}"]
                    end_process(process.pid, how, started=process.started)
                except OSError as error:
                    self.notify(clean(str(error)), severity="error", markup=False)

        title = f"SIG{name} to process {process.pid}?"
        self.push_screen(Panel(title, Text(clean(told)), is_question=True), answered)
