"""What a terminal can show: which characters, and whether there are colors."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.text import Text

#: What is broken; what is to be looked at; what is one's own.
ALARM, WARNING, ACCENT = "#f05a5a", "#e6b450", "#5fd0dc"


@dataclass(frozen=True)
class Look:
    """What a terminal can show.

    Attributes:
        unicode: Whether it knows more than ASCII.
        color: Whether it has colors, and they are wanted.
    """

    unicode: bool = True
    color: bool = True

    @staticmethod
    def of(console: Console, options: ConsoleOptions) -> Look:
        """The look of a console."""
        color = console.color_system is not None and not console.no_color
        return Look(unicode=not options.ascii_only, color=color)

    @property
    def dot(self) -> str:
        """What stands between facts in a line."""
        return " · " if self.unicode else " - "

    @property
    def dash(self) -> str:
        """The line of a frame."""
        return "─" if self.unicode else "-"

    @property
    def celsius(self) -> str:
        """The unit of temperature."""
        return "°C" if self.unicode else "C"

    @property
    def branch(self) -> str:
        """What stands before a part of the device above."""
        return "└ " if self.unicode else "` "

    @property
    def levels(self) -> str:
        """Characters of growing height, the first one empty."""
        return " ▁▂▃▄▅▆▇█" if self.unicode else " .:-=+*#"

    def clean(self, text: str) -> str:
        """Text of others in one line, without what steers a terminal or cannot be shown."""
        printable = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
        if not self.unicode:
            printable = printable.encode("ascii", "replace").decode()
        return printable


def styled(text: str, style: str) -> Text:
    """Text in a style that what is appended to it does not take over."""
    return Text.assemble((text, style))


def padded(text: Text, width: int, *, right: bool = False) -> Text:
    """A copy that takes exactly ``width`` cells; what is longer is cut off."""
    copy = text.copy()
    copy.truncate(max(0, width), overflow="crop")
    missing = max(0, width - copy.cell_len)
    if right:
        copy.pad_left(missing)
    else:
        copy.pad_right(missing)
    return copy


def fitted(parts: list[Text], width: int, separator: str) -> Text:
    """As many parts as have room in a line, the first one first; that one is cut if need be."""
    line = Text()
    for part in parts:
        if not part:
            continue
        if not line:
            line.append_text(padded(part, min(part.cell_len, width)))
        elif line.cell_len + len(separator) + part.cell_len <= width:
            line.append(separator, style="dim").append_text(part)
    return line


def wrapped(text: str, width: int, style: str = "", indent: int = 0) -> list[Text]:
    """Lines of at most ``width`` cells; those after the first are indented."""
    spaces = " " * min(indent, max(0, width - 8))
    lines = textwrap.wrap(text, max(1, width), subsequent_indent=spaces)
    return [styled(line, style) for line in lines]
