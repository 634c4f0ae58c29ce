"""The view in a notebook: a real Jupyter kernel, a run in its cells, other cells meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from dataparallel.tools.monitor import notebook
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.sampler import Sampler
from tests.monitor.made_up_machine import make_sample

TRAIN = """
import time, torch, dataparallel
from torch import nn
from dataparallel.monitor import StepMonitor
from dataparallel.tools.monitor.notebook import show
model = dataparallel.DataParallel(nn.Linear(8, 1), ["cpu", "cpu"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = StepMonitor(model, publish=False)
view = show(monitor, interval=0.02, source="cpu")
with monitor:
    until = time.monotonic() + 30
    # What has been read before the last sample is shown.
    while view._sampler.num_samples < 5 and time.monotonic() < until:
        model(torch.ones(6, 8)).sum().backward()
        optimizer.step()
print("trained", view)
"""

STOP = """
view.stop(); view.stop()
print(view, view.is_running)
"""


class Cells:
    """Cells that are executed one after another in one kernel."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, code: str) -> tuple[str, list[dict[str, str]]]:
        """Execute a cell; what it printed, and what was shown or updated meanwhile."""
        self._client.execute(code)
        text, shown, deadline = "", [], time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=5)
            except queue.Empty:
                continue
            content, kind = message["content"], message["msg_type"]
            if kind == "stream":
                text += content["text"]
            elif kind in ("display_data", "update_display_data"):
                shown.append(content["data"])
            elif kind == "error":
                raise AssertionError("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return text, shown
        raise TimeoutError(f"the cell did not end within 60 s; it printed {text!r}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_is_kept_up_to_date_while_a_cell_trains() -> None:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    try:
        cells = Cells(client)
        text, shown = cells.run(TRAIN)
        assert "trained <monitor: running; stop() ends it>" in text
        views = [data for data in shown if "text/html" in data]
        assert len(views) >= 3
        last = views[-1]
        assert last["text/html"].startswith("<pre") and "background-color" in last["text/html"]
        assert "Linear" in last["text/plain"] and "steps/s" in last["text/plain"]
        text, _ = cells.run(STOP)
        assert text.strip() == "<monitor: stopped> False"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# --- without a kernel ----------------------------------------------------------------------------


class FakeDisplay:
    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.changed = threading.Event()

    def update(self, content: Any, **options: Any) -> None:
        assert options == {"raw": True}
        self.shown.append(content)
        self.changed.set()


class Endless(Sampler):
    def __init__(self, fails: bool = False) -> None:
        super().__init__((), interval=0.01)
        self.closed = threading.Event()
        self._fails = fails

    def sample(self) -> Sample:
        if self._fails:
            raise OSError("the sampler broke")
        return make_sample()

    def samples(self) -> Iterator[Sample]:
        return super().samples()

    def close(self) -> None:
        super().close()
        self.closed.set()


def test_it_ends_by_itself_after_its_time() -> None:
    display, sampler = FakeDisplay(), Endless()
    view = notebook.NotebookView(sampler, display, seconds=0.05, width=80)
    assert sampler.closed.wait(30)
    view.stop()
    assert not view.is_running and repr(view) == "<monitor: stopped>"
    assert all(len(line) <= 80 for line in display.shown[0]["text/plain"].splitlines())


def test_a_failure_is_told_by_stop_once() -> None:
    sampler = Endless(fails=True)
    view = notebook.NotebookView(sampler, FakeDisplay())
    assert sampler.closed.wait(30)
    assert "the sampler broke" in repr(view)
    with pytest.raises(RuntimeError, match="the view has ended with OSError"):
        view.stop()
    view.stop()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="a StepMonitor or the number of a process, but got str"):
        notebook.show("run")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds must be more than 0, but got -1"):
        notebook.show(seconds=-1)
    with pytest.raises(RuntimeError, match="in a terminal use: dataparallel monitor top"):
        notebook.show()
