"""One training step under the magnifying glass: which replica did what, and when."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import dataparallel

CALLER = "caller"
_COLOURS = {
    "split, replicate": "#b0b0b0",
    "forward": "#4477aa",
    "gather, loss": "#ccbb44",
    "backward": "#cc6677",
    "sum": "#aa4499",
    "step": "#228833",
}
_LABELS = {"backward": "backward (first to last gradient)", "sum": "sum of gradients"}


@dataclass(frozen=True)
class Span:
    """A stretch of time.

    Attributes:
        row: Who was busy, ``"caller"`` or a replica.
        what: A key of the colours.
        begin: Seconds since the beginning of the step.
        end: Likewise.
    """

    row: str
    what: str
    begin: float
    end: float


def record_step(
    model: dataparallel.DataParallel[Any],
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
) -> list[Span]:
    """Run five training steps and note when each part of them began and ended.

    Args:
        model: The wrapper.
        loss_of: Runs the forward and returns the loss.
        optimizer: Makes the step.

    Returns:
        Spans of the caller and of each replica, of the shortest step.
    """
    # The same hooks for all: new ones would make each step the first of its kind.
    recorder = _Recorder(model.module)
    steps = [_record_once(recorder, loss_of, optimizer) for _ in range(5)]
    recorder.remove_hooks()
    return min(steps, key=lambda spans: max(span.end for span in spans))


def _record_once(
    recorder: _Recorder,
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
) -> list[Span]:
    recorder.restart()
    begin = recorder.now()
    optimizer.zero_grad()
    loss = loss_of()
    loss_done = recorder.now()
    loss.backward()
    backward_done = recorder.now()
    optimizer.step()
    step_done = recorder.now()
    spans = recorder.spans()
    forwards = [span for span in spans if span.what == "forward"]
    backwards = [span for span in spans if span.what == "backward"]
    last_gradient = max((span.end for span in backwards), default=loss_done)
    return [
        Span(CALLER, "split, replicate", begin, min(span.begin for span in forwards)),
        Span(CALLER, "gather, loss", max(span.end for span in forwards), loss_done),
        Span(CALLER, "sum", last_gradient, backward_done),
        Span(CALLER, "step", backward_done, step_done),
        *spans,
    ]


class _Recorder:
    """Hooks that note when the replicas' forwards and backwards begin and end."""

    def __init__(self, module: nn.Module) -> None:
        self._start = time.perf_counter()
        self._times: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave),
        ]
        self._of_tensors: list[Any] = []

    def restart(self) -> None:
        """Forget the step before, and begin to count time."""
        _remove(self._of_tensors)
        self._times.clear()
        self._start = time.perf_counter()

    def now(self) -> float:
        if torch.accelerator.is_available():
            # Work on accelerators is queued; without waiting, only the queueing would be seen.
            for index in range(torch.accelerator.device_count()):
                torch.accelerator.synchronize(index)
        return time.perf_counter() - self._start

    def _note(self, row: str, what: str, *ignored: Any) -> None:
        moment = self.now()
        with self._lock:
            self._times.setdefault((row, what), []).append(moment)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._note(_row(), "forward")

    def _leave(self, module: nn.Module, args: Any, output: Tensor) -> None:
        row = _row()
        self._note(row, "forward")
        note = functools.partial(self._note, row, "backward")
        for tensor in (output, *module.parameters()):
            if tensor.requires_grad:
                handle = tensor.register_hook(note)
                with self._lock:
                    self._of_tensors.append(handle)

    def spans(self) -> list[Span]:
        return [
            Span(row, what, min(times), max(times))
            for (row, what), times in sorted(self._times.items())
        ]

    def remove_hooks(self) -> None:
        _remove(self._handles)
        _remove(self._of_tensors)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _row() -> str:
    replica = dataparallel.current_replica()
    return f"replica {replica.index} ({replica.device})" if replica else "replica 0"


def draw_timeline(axes: Axes, spans: list[Span]) -> None:
    """Draw one bar per span, one row for the caller and one per replica; time in milliseconds."""
    rows = [CALLER, *sorted({span.row for span in spans} - {CALLER})]
    for span in spans:
        width = (span.end - span.begin) * 1e3
        axes.barh(
            rows.index(span.row),
            width,
            left=span.begin * 1e3,
            color=_COLOURS[span.what],
            height=0.6,
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, max(span.end for span in spans) * 1e3)
    axes.set_xlabel("milliseconds since the step began")
    axes.set_title("One training step", loc="left")
    used = [what for what in _COLOURS if any(span.what == what for span in spans)]
    handles = [axes.barh(0, 0, color=_COLOURS[what]) for what in used]
    labels = [_LABELS.get(what, what) for what in used]
    axes.legend(
        handles,
        labels,
        ncols=len(used),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
        frameon=False,
        handlelength=1,
        fontsize="small",
    )
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
