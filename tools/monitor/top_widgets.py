"""The parts of `monitor top` beside those of textual: lines, a table with a cursor, panels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Horizontal, VerticalScroll
from textual.filter import LineFilter
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Button, Static

from dataparallel.tools.monitor.bars import in_ascii

_CURSOR = Style(reverse=True)


class Ascii(LineFilter):
    """A filter for terminals that show ASCII alone."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments in ASCII."""
        return [Segment(in_ascii(text), style, control) for text, style, control in segments]


class Lines(ScrollView):
    """Lines that scroll; they are drawn as they are, which is much cheaper than laying them out."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._lines: Sequence[Text] = ()

    def show(self, lines: Sequence[Text]) -> None:
        """Show these lines from now on."""
        self._lines = lines
        self.virtual_size = Size(max((line.cell_len for line in lines), default=0), len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return the part of a line that can be seen."""
        return self._part(y + self.scroll_offset.y)

    def _part(self, place: int) -> Strip:
        line = self._lines[place] if place < len(self._lines) else Text()
        console, left = self.app.console, self.scroll_offset.x
        # A text without spans leaves its own style out, and textual's filters need one.
        base = console.get_style(line.style)
        parts = [Segment(text, base + (style or base)) for text, style, _ in line.render(console)]
        return Strip(parts).crop_extend(left, left + self.size.width, Style())


class Table(Lines):
    """Lines below a head that stays in its place, one of which is chosen with keys or the mouse.

    Attributes:
        cursor: Place of the line that is chosen, from 0.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(0, -1)", show=False),
        Binding("pagedown", "move(0, 1)", show=False),
        Binding("home", f"move({-sys.maxsize})", show=False),
        Binding("end", f"move({sys.maxsize})", show=False),
    ]

    class HeadClicked(Message):
        """The head was clicked on: so many cells from its beginning."""

        def __init__(self, x: int) -> None:
            super().__init__()
            self.x = x

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.cursor = 0

    def render_line(self, y: int) -> Strip:
        """Return the head, or the part of a line that can be seen."""
        place = y + self.scroll_offset.y if y else 0
        strip = self._part(place)
        is_chosen = place and place == self.cursor + 1
        # All of it in one color.
        return Strip([Segment(strip.text, _CURSOR)]) if is_chosen else strip

    def choose(self, place: int, *, is_seen: bool = True) -> None:
        """Choose a line, or the one that is next to it, and scroll so that it ``is_seen``."""
        self.cursor = max(0, min(place, len(self._lines) - 2))
        lowest, highest = self.cursor + 2 - self.size.height, self.cursor
        if is_seen and not lowest <= self.scroll_offset.y <= highest:
            self.scroll_to(y=min(max(self.scroll_offset.y, lowest), highest), animate=False)
        self.refresh()

    def action_move(self, lines: int = 0, pages: int = 0) -> None:
        """Choose the line that is so many lines, or so many times what is seen, further down."""
        self.choose(self.cursor + lines + pages * (self.size.height - 1))

    def on_click(self, event: events.Click) -> None:
        """Choose a line, or tell where the head was clicked on."""
        if event.y:
            self.choose(event.y + self.scroll_offset.y - 1)
        else:
            self.post_message(self.HeadClicked(event.x + self.scroll_offset.x))


class Panel(ModalScreen[bool]):
    """A text that scrolls, and is read and closed; or a question: Enter alone means no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,n,question_mark", "answer(False)"),
        Binding("y", "answer(True)"),
    ]

    def __init__(self, title: str, text: Text, *, is_question: bool = False) -> None:
        super().__init__()
        hint = "" if is_question else "   Esc closes"
        self._text = Text.assemble((title, "bold"), (hint, "dim"), "\n\n", text)
        self._is_question = is_question

    def compose(self) -> ComposeResult:
        """Yield the text, and the buttons of a question."""
        with VerticalScroll(can_focus=not self._is_question):
            yield Static(self._text)
            if self._is_question:
                yield Horizontal(
                    Button("No (n)", compact=True),
                    Button("Yes (y)", id="yes", variant="error", compact=True),
                )

    def action_answer(self, is_yes: bool) -> None:
        """Handle a key that was pressed."""
        self.dismiss(is_yes and self._is_question)

    @on(Button.Pressed)
    def _answer(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")
