"""State that several threads share, where another one comes between a look and what follows it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

import dataparallel as dp
from tests.ddp_cases import Net, backward, batch, grads
from tests.models import assert_all_close

DEVICES = ["virtual:0", "virtual:1"]


# --- objects that outlive their last use ---------------------------------------------------------
#
# Without the interpreter's lock an object dies when the thread that made it runs again.


def test_what_a_backward_has_left_behind_is_in_no_other_round() -> None:
    """The graph of gradients belongs to the backward that has made it, which has ended."""
    left: list[Any] = []

    def keep(_: Tensor) -> None:
        for each in gc.get_objects():
            if str(getattr(type(each), "__module__", "")).startswith("dataparallel."):
                left.append(each)

    def results(wrapped: bool) -> list[Tensor | None]:
        t = torch.full((6,), 1.5, dtype=torch.float64, requires_grad=True)
        net = Net(DEVICES[0], lambda net, x: net.layers[0](x).cpu() * t.exp())
        model: Any = dp.DistributedDataParallel(net, DEVICES) if wrapped else net
        x = batch(DEVICES[0], grad=True)
        register: Any = x.register_hook
        handle = register(keep)
        y = model(x).pow(2).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        handle.remove()
        backward(y + slope.cpu().pow(2).sum())
        return [*grads(net), t.grad, x.grad]

    assert_all_close(*([None if r is None else r.cpu() for r in results(w)] for w in (True, False)))
    assert left
