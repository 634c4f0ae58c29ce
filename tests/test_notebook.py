"""Training in a notebook: a real Jupyter kernel, interrupted in the middle, used further."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

SETUP = """
import torch, threading
from torch import nn
from dataparallel import DataParallel
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
model = DataParallel(net, ["cpu", "cpu"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(64, 20); y = x[:, :1] * 2
def step():
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()
print("first", step())
"""

FOREVER = """
import itertools
for i in itertools.count():
    step()
    if i == 20:
        print("under way", flush=True)
"""

SLOW_FORWARD = """
import time
class Slow(nn.Module):
    def forward(self, x):
        print("in forward", flush=True)
        for _ in range(600):
            time.sleep(0.05)
        return x
slow = DataParallel(Slow(), ["cpu", "cpu"])
slow(x)
"""

AFTER = """
threads = {t for t in threading.enumerate() if t.name.startswith("dataparallel-replica")}
losses = [step() for _ in range(200)]
bare = net(x)
print("same", torch.allclose(model(x), bare, atol=1e-6))
print("learns", losses[-1] < losses[0])
print("threads", len(threads) <= 4)
"""


class Notebook:
    """Cells executed one after another in one kernel."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self.manager = manager
        self.client = client

    def run(self, code: str, interrupt_at: str | None = None) -> tuple[str, str | None]:
        """Execute a cell; returns its output and the name of the exception that ended it."""
        self.client.execute(code)
        text, error, deadline = "", None, time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=5)
            except queue.Empty:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
                if interrupt_at is not None and interrupt_at in text:
                    self.manager.interrupt_kernel()
                    interrupt_at = None
            elif message["msg_type"] == "error":
                error = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return text, error
        raise TimeoutError(f"the cell did not end within 60 s; it printed {text!r}")


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    try:
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("cell", "mark"),
    [(FOREVER, "under way"), (SLOW_FORWARD, "in forward")],
    ids=["between steps", "within a forward"],
)
def test_an_interrupted_cell_leaves_the_notebook_usable(
    notebook: Notebook, cell: str, mark: str
) -> None:
    text, error = notebook.run(SETUP)
    assert error is None and "first" in text, (text, error)
    text, error = notebook.run(cell, interrupt_at=mark)
    assert error == "KeyboardInterrupt", text
    text, error = notebook.run(AFTER)
    assert error is None
    assert text.split() == ["same", "True", "learns", "True", "threads", "True"]
