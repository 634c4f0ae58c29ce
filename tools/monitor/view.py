"""All that `monitor top` shows, as something that rich prints at any width and height."""

from __future__ import annotations

import itertools
import platform
import time
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.alerts import Alert, find_alerts
from dataparallel.tools.monitor.bars import bar
from dataparallel.tools.monitor.device_panel import DeviceFacts, Size, device_lines
from dataparallel.tools.monitor.history import History, in_order
from dataparallel.tools.monitor.look import (
    ACCENT,
    ALARM,
    WARNING,
    Look,
    fitted,
    padded,
    styled,
    wrapped,
)
from dataparallel.tools.monitor.process_table import process_lines
from dataparallel.tools.monitor.reading import DeviceReading, HostReading, Sample
from dataparallel.tools.monitor.replica_panel import replica_lines, run_lines, thread_lines

#: From here on there are frames, and from here on devices stand beside each other.
_FRAMED, _BESIDE = 50, 130
_GAP = 3
#: Where there is no room for all, a warning has at most so many lines.
_ALERT_LINES = 3


@dataclass(frozen=True)
class _Detail:
    """How much is told, and for how many lines beside that there has to be room."""

    size: Size
    tall: bool
    framed: bool
    spare: int


#: From all to little; the first one for which there is room is taken.
_DETAILS = (
    _Detail("large", True, True, 12),
    _Detail("medium", True, True, 10),
    _Detail("small", True, True, 9),
    _Detail("small", False, True, 7),
    _Detail("small", False, False, 3),
    _Detail("small", False, False, 0),
)


class View:
    """What is known, as something that rich prints at any width and height.

    Example::

        view = View(interval=1.0)
        view.add(sample)
        rich.print(view)

    Args:
        interval: Seconds between samples, for the heading. Default: it is not told.
        hint: What the keys do, for the heading. Default: nothing.
        fits_screen: Whether it is no higher than the terminal. Default: it is as high as it is, or
            as high as ``rich`` is told.
    """

    def __init__(
        self, interval: float | None = None, hint: str = "", *, fits_screen: bool = False
    ) -> None:
        self._fits_screen = fits_screen
        self.history = History()
        self._hint = hint
        self._interval = interval
        self._alerts: list[Alert] = []

    def tell(self, hint: str) -> None:
        """Say this about the keys from now on."""
        self._hint = hint

    def add(self, sample: Sample) -> None:
        """Show this sample from now on."""
        self.history.add(sample)
        self._alerts = find_alerts(self.history)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look = Look.of(console, options)
        width = max(1, options.max_width)
        # Within a Live the height that it has is not passed on.
        height = console.size.height if self._fits_screen else options.height
        for line in self.lines(width, height, look):
            yield Text.assemble(line, no_wrap=True, overflow="crop")

    def lines(self, width: int, height: int | None, look: Look) -> list[Text]:
        """The lines, each of at most ``width`` cells, and at most ``height`` of them."""
        lines = self._lines(width, height, look)[:height]
        return [padded(line, min(width, line.cell_len)) for line in lines]

    # --- what there is room for ------------------------------------------------------------------

    def _lines(self, width: int, height: int | None, look: Look) -> list[Text]:
        if self.history.sample is None:
            return [padded(styled("waiting for the first sample", "dim"), width)]
        top = self._heading(width, look)
        for detail in _DETAILS:
            middle = self._middle(detail, width, look)
            everything = self._alert_lines(None, width, look) + self._process_lines(
                None, detail, width, look
            )
            spare = None if height is None else height - len(top) - len(middle)
            if spare is None or spare >= min(detail.spare, len(everything)):
                break
        if spare is None:
            return [*top, *self._alert_lines(None, width, look), *middle, *self._below(width, look)]
        alerts = self._alert_lines(max(0, spare), width, look)
        spare -= len(alerts)
        processes = self._process_lines(max(0, spare), detail, width, look)
        notes = self._note_lines(width, look)
        spare -= len(processes)
        return [*top, *alerts, *middle, *processes, *(notes if len(notes) <= spare else [])]

    # --- sections --------------------------------------------------------------------------------

    @property
    def _sample(self) -> Sample:
        assert self.history.sample is not None
        return self.history.sample

    def _below(self, width: int, look: Look) -> list[Text]:
        return self._process_lines(None, _DETAILS[0], width, look) + self._note_lines(width, look)

    def _middle(self, detail: _Detail, width: int, look: Look) -> list[Text]:
        """Devices and replicas."""
        framed = detail.framed and width >= _FRAMED
        inner = width - 4 if framed else width
        sample, run = self._sample, self.history.run
        devices = self._device_lines(sample, detail.size, inner, look)
        title = "devices" if width < _FRAMED else "devices, with their utilization over time"
        lines = _frame(title, devices, framed, width, look)
        if run.state is not None:
            about = run_lines(run, inner, look)
            about.extend(replica_lines(run, inner, look, tall=detail.tall))
            if sample.host is not None and detail.tall:
                about.extend(thread_lines(sample.host.threads, inner, look))
            title = "replicas" if run.gone_for is None else "replicas, as they were last"
            lines.extend(_frame(title, about, framed, width, look))
        return lines

    def _process_lines(
        self, spare: int | None, detail: _Detail, width: int, look: Look
    ) -> list[Text]:
        framed = detail.framed and width >= _FRAMED
        borders = 2 if framed else 1 if width < _FRAMED else 0
        limit = None if spare is None else spare - borders - 1
        if limit is not None and limit < 1:
            return []
        run, inner = self.history.run.state, width - 4 if framed else width
        own = None if run is None else run.pid
        table = process_lines(self._sample.processes, own, inner, look, limit)
        return _frame("processes", table, framed, width, look)

    def _note_lines(self, width: int, look: Look) -> list[Text]:
        notes = (wrapped(f"note: {look.clean(n)}", width, "dim", 6) for n in self._sample.notes)
        return list(itertools.chain.from_iterable(notes))

    def _heading(self, width: int, look: Look) -> list[Text]:
        sample = self._sample
        sources = dict.fromkeys(device.source for device in sample.devices)
        every = f"every {self._interval:g} s" if self._interval else ""
        parts = [
            styled(clock_text(sample.time), "bold"),
            styled(look.clean(platform.node()), ACCENT),
            Text(" + ".join(look.clean(source) for source in sources)),
            Text(every),
            Text(f"a sample takes {units.seconds_text(sample.cost)}"),
        ]
        title = styled("dataparallel monitor  ", "bold") if width >= 60 else Text()
        hint = styled(self._hint, "dim") if width >= 40 else Text()
        room = width - title.cell_len - hint.cell_len - (1 if hint else 0)
        first = title.append_text(padded(fitted(parts, room, look.dot), room))
        lines = [first.append(" ").append_text(hint) if hint else first]
        if sample.host is not None:
            lines.append(_host_line(sample.host, width, look))
        return lines

    def _alert_lines(self, spare: int | None, width: int, look: Look) -> list[Text]:
        """What to look at, in whole if there is room, else what is worst, a few lines for each."""
        blocks: list[list[Text]] = []
        for alert in self._alerts:
            style = f"bold {ALARM}" if alert.severity == "error" else WARNING
            mark = "! " if not look.unicode else "✖ " if alert.severity == "error" else "▲ "
            blocks.append(wrapped(mark + look.clean(alert.text), width, style, indent=2))
        # Where it is narrow, one line of a warning says too little, and more than a process.
        most = 0 if spare is None else max(spare // 2 if width >= _FRAMED else spare, len(blocks))
        if spare is None or sum(map(len, blocks)) <= most:
            return list(itertools.chain.from_iterable(blocks))
        shown = blocks[: max(0, spare if len(blocks) <= spare else spare - 1)]
        room, lines = most - len(blocks), list[Text]()
        for block in shown:
            more = min(len(block) - 1, _ALERT_LINES - 1, max(0, room))
            room -= more
            lines.extend(_cut(block, 1 + more, width, look))
        if spare and len(shown) < len(blocks):
            lines.append(styled(f"and {len(blocks) - len(shown)} more warnings", "dim"))
        return lines

    def _device_lines(self, sample: Sample, size: Size, width: int, look: Look) -> list[Text]:
        groups: list[list[DeviceReading]] = []
        for device in in_order(sample.devices):
            if groups and device.parent == groups[-1][0].device:
                groups[-1].append(device)
            else:
                groups.append([device])
        if not groups:
            return [styled("no device could be read", "dim")]
        beside = width >= _BESIDE and len(groups) > 1
        part = (width - _GAP) // 2 if beside else width
        drawn = [
            [line for device in group for line in self._one_device(device, part, size, look)]
            for group in groups
        ]
        if not beside:
            return list(itertools.chain.from_iterable(drawn))
        total, left, right = sum(map(len, drawn)), list[Text](), list[Text]()
        for block in drawn:
            side = left if not right and 2 * len(left) < total else right
            side.extend(block)
        return [
            padded(one, part).append(" " * _GAP).append_text(other)
            for one, other in itertools.zip_longest(left, right, fillvalue=Text())
        ]

    def _one_device(self, device: DeviceReading, width: int, size: Size, look: Look) -> list[Text]:
        facts = DeviceFacts(device, self._course(device), self._tag(device))
        smaller: dict[Size, Size] = {"large": "medium", "medium": "small", "small": "small"}
        # A part of a device has less to tell.
        return device_lines(facts, width, size if device.parent is None else smaller[size], look)

    def _course(self, device: DeviceReading) -> tuple[float | None, ...]:
        return tuple(self.history.course(device.device, "utilization"))

    def _tag(self, device: DeviceReading) -> str:
        """Which replicas are on a device."""
        state = self.history.run.state
        if state is None:
            return ""
        pairs = zip(state.info.devices, state.info.uuids, strict=False)
        mine = [
            i
            for i, (name, uuid) in enumerate(pairs)
            if name == device.device or (uuid is not None and uuid == device.uuid)
        ]
        if not mine:
            return ""
        return f"{'replica' if len(mine) == 1 else 'replicas'} {', '.join(map(str, mine))}"


def _cut(lines: list[Text], count: int, width: int, look: Look) -> list[Text]:
    """The first lines of several, with a sign that more follow."""
    if len(lines) <= count:
        return lines
    sign = "…" if look.unicode else "..."
    last = lines[count - 1]
    last = padded(last, min(last.cell_len, max(0, width - len(sign))))
    return [*lines[: count - 1], last.append(sign)]


def _host_line(host: HostReading, width: int, look: Look) -> Text:
    memory = units.bytes_of_text(host.memory_used, host.memory_total)
    share = host.memory_used / host.memory_total if host.memory_total else None
    cpu = f"{units.percent_text(host.utilization)} of {host.num_cpus:g} CPUs"
    if width < 60:
        return fitted([Text(cpu), Text(memory)], width, look.dot)
    room = min(24, (width - 60) // 2 + 8)
    return Text.assemble(
        ("host  ", "dim"),
        bar(host.utilization, room, look, "#3fb8e8"),
        f" {cpu}   ",
        bar(share, room, look, "#5fc27e"),
        f" {memory}",
    )


def _frame(title: str, lines: list[Text], framed: bool, width: int, look: Look) -> list[Text]:
    """Lines under a title, in a frame if that is wanted; nothing for no lines."""
    if not lines:
        return []
    if not framed:
        return [styled(title, "dim bold"), *lines] if width < _FRAMED else lines
    corners = "╭╮╰╯│" if look.unicode else "++++|"
    style = "#5a6472"
    head = styled(f"{corners[0]}{look.dash} ", style).append(title, style="bold #9fb4cc")
    head.append(f" {look.dash * (width - len(title) - 5)}{corners[1]}", style=style)
    side = styled(corners[4], style)
    body = [Text.assemble(side, " ", padded(line, width - 4), " ", side) for line in lines]
    return [head, *body, styled(f"{corners[2]}{look.dash * (width - 2)}{corners[3]}", style)]


def clock_text(seconds: float) -> str:
    """A moment as the time of day here."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
