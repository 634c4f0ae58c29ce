"""The view of `monitor top` below a notebook's cell, kept up to date while other cells run."""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dataparallel.monitor.step_monitor import StepMonitor
from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.command import add_sampler_options
from dataparallel.tools.monitor.opening import open_sampler
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.sampler import Sampler

with needs_extra("monitor"):
    from rich.console import Console

    from dataparallel.tools.monitor.view import View

#: Dark as a terminal, for which the colors are made.
_PAGE = (
    '<pre style="background:#14181f;color:#d5dae2;padding:10px;line-height:1.2;overflow-x:auto;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace;font-size:12px\">{code}</pre>"
)


class Display(Protocol):
    """What a notebook gives for an output that can be changed later."""

    def update(self, content: Any, **options: Any) -> None:
        """Put something else in its place."""


class NotebookView:
    """The view below a cell; made by :func:`show`.

    Args:
        sampler: What is shown; it is closed at the end.
        display: Where it is shown.
        change: Applied to each sample before it is shown. Default: nothing is.
        seconds: For how long; ``inf`` until it is stopped.
        width: In characters.
    """

    def __init__(
        self,
        sampler: Sampler,
        display: Display,
        *,
        change: Callable[[Sample], Sample] = lambda sample: sample,
        seconds: float = math.inf,
        width: int = 110,
    ) -> None:
        self._sampler = sampler
        self._display = display
        self._change = change
        self._width = width
        self._view = View(interval=sampler.interval)
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataparallel-notebook", daemon=True)
        self._thread.start()
        if math.isfinite(seconds):
            threading.Thread(target=self._stop_after, args=(seconds,), daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether it is still kept up to date."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Keep it as it is from now on. A second call does nothing.

        Raises:
            RuntimeError: It had ended by itself, because sampling or showing failed.
        """
        self._stopped.set()
        self._sampler.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"the view has ended with {error!r}") from error

    def __repr__(self) -> str:
        if self._error is not None:
            return f"<monitor: ended with {self._error!r}>"
        return f"<monitor: {'running; stop() ends it' if self.is_running else 'stopped'}>"

    def _stop_after(self, seconds: float) -> None:
        if not self._stopped.wait(seconds):
            self._sampler.stop()

    def _run(self) -> None:
        try:
            for sample in self._sampler.samples():
                self._view.add(self._change(sample))
                self._display.update(as_output(self._view, self._width), raw=True)
        except Exception as error:
            self._error = error
        finally:
            self._sampler.close()


def as_output(view: View, width: int) -> dict[str, str]:
    """A view as a notebook shows it: HTML, and text for whatever shows no HTML."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
        legacy_windows=False,
        # A notebook has colors, whatever the environment says of terminals.
        no_color=False,
    )
    console.print(view)
    html = console.export_html(inline_styles=True, code_format=_PAGE, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}


def show(
    monitor_or_pid: StepMonitor | int | None = None,
    seconds: float | None = None,
    *,
    interval: float = 1.0,
    source: str = "auto",
    width: int = 110,
) -> NotebookView:
    """Show below this cell what `dataparallel monitor top` shows, while other cells run.

    Example, in a notebook::

        monitor = dataparallel.monitor.StepMonitor(model)
        view = show(monitor)
        with monitor:
            train()
        view.stop()

    Args:
        monitor_or_pid: The run to watch: a StepMonitor of this notebook, or the number of another
            process that has one. Default: none; devices only.
        seconds: For how long. Default: until ``stop()``.
        interval: Seconds between samples. Default: 1.
        source: As for ``--source``. Default: ``"auto"``.
        width: In characters. Default: 110.

    Returns:
        The view. It runs in a thread of its own; ``stop()`` ends it.

    Raises:
        RuntimeError: This is no notebook.
        TypeError: ``monitor_or_pid`` is neither a StepMonitor nor the number of a process.
        ValueError: ``seconds`` is not positive; or there is no such run or source.
    """
    is_pid = isinstance(monitor_or_pid, int) and not isinstance(monitor_or_pid, bool)
    if not (monitor_or_pid is None or is_pid or isinstance(monitor_or_pid, StepMonitor)):
        raise TypeError(
            "show takes a StepMonitor or the number of a process, but got "
            f"{type(monitor_or_pid).__name__}; write show(monitor), or show() for devices only"
        )
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds must be more than 0, but got {seconds}")
    display = _open_display()

    def with_run(sample: Sample) -> Sample:
        assert isinstance(monitor_or_pid, StepMonitor)
        return dataclasses.replace(sample, run=monitor_or_pid.state())

    return NotebookView(
        _open_sampler(source, interval, ["--attach", str(monitor_or_pid)] if is_pid else []),
        display,
        change=with_run if isinstance(monitor_or_pid, StepMonitor) else lambda sample: sample,
        seconds=math.inf if seconds is None else seconds,
        width=width,
    )


def _open_sampler(source: str, interval: float, words: list[str]) -> Sampler:
    parser = argparse.ArgumentParser()
    add_sampler_options(parser)
    # What a namespace has already, no default replaces.
    given = argparse.Namespace(interval=interval)
    return open_sampler(parser.parse_args([f"--source={source}", *words], given))


def _open_display() -> Display:
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ModuleNotFoundError:
        shell = None
    else:
        shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        raise RuntimeError(
            "show is for notebooks, and this is none; in a terminal use: dataparallel monitor top"
        )
    handle: Display = display(  # type: ignore[no-untyped-call]
        {"text/plain": "waiting for the first sample"}, raw=True, display_id=True
    )
    return handle
