"""Ranks that fail where no host waits: all raise equally often, and go on with the same step."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dataparallel as dp
from dataparallel.comm.link import Pending, ProcessLink
from tests.cluster import Cluster
from tests.ddp_cases import grads
from tests.device_only.cases import batch, make_net, mean_loss, share, wrap
from tests.device_only.test_late_failures import connected
from tests.models import assert_all_close


class Run:
    """The training of a rank, as far as it has come."""

    def __init__(self, rank: int) -> None:
        self.rank, self.here = rank, f"virtual:{rank}"
        self.model = wrap(make_net(), rank)
        self.extra: ProcessLink = connected("extra", self.here)
        # Its declared type differs from one version of torch to the next.
        self.own: Any = dist.new_group(backend="gloo")
        self.place: tuple[int, str] = (0, "")
        self.handle: Any = None

    def comes_to(self, rank: int, step: int, where: str) -> bool:
        return (self.rank, *self.place) == (rank, step, where)

    def meet(self) -> None:
        """Wait for the other rank in a group of the test's, in which nothing fails."""
        dist.barrier(self.own)

    def wait_for_failure(self) -> None:
        """Wait until the thread that looks for failures has seen that of rank 1."""
        while not self.model._training.processes.is_broken:
            time.sleep(0.01)


def fail(*_: object) -> None:
    raise ArithmeticError("on purpose")


def seen_by_a_thread(run: Run) -> None:
    """Only the thread that looks for failures sees that of rank 1, before the next forward."""
    if run.place == (1, "end"):
        # The vote and the buckets of both ranks have come, and the thread looks on.
        run.model.state_dict()
        run.extra.all_reduce(torch.ones(3, device=run.here), what="a tensor").wait()
        torch.accelerator.synchronize(run.here)
        run.meet()
    if run.comes_to(1, 2, "begin"):
        fail()
    if run.comes_to(0, 2, "begin"):
        run.wait_for_failure()
        # It needs nobody.
        with torch.no_grad():
            run.model.eval()(share(2, 0)[0].to(run.here))
        run.model.train()


def others_ahead(run: Run) -> None:
    """Rank 0 is given a step in which rank 1 begins no round."""
    if run.comes_to(0, 2, "end"):
        run.meet()
    if run.comes_to(1, 2, "begin"):
        run.meet()
        fail()


def others_ahead_of_a_round(run: Run) -> None:
    """Rank 0 is given a round that fails in rank 1."""
    if run.comes_to(0, 2, "end"):
        run.meet()
    if run.comes_to(1, 2, "begin"):

        def fail_late(_: torch.Tensor) -> None:
            run.meet()
            fail()

        def hook(_: Any, __: Any, output: torch.Tensor) -> None:
            output.register_hook(fail_late)

        run.handle = next(run.model.module.children()).register_forward_hook(hook)
    if run.comes_to(1, 3, "begin"):
        run.handle.remove()


def others_behind(run: Run) -> None:
    """Rank 1 fails in a step while rank 0 has not begun the round before."""
    if run.comes_to(0, 1, "backward"):
        run.extra.all_reduce(torch.ones(3, device=run.here), what="a tensor")
        run.meet()
        run.wait_for_failure()
    if run.comes_to(1, 2, "begin"):
        run.meet()
        fail()


def buckets_under_way(run: Run) -> None:
    """Rank 1 fails in a step while the devices are in the one before."""
    if run.comes_to(0, 1, "backward"):
        # The device is behind a collective to which rank 1 does not come.
        run.extra.all_reduce(torch.ones(3, device=run.here), what="a tensor").wait()
    if run.comes_to(0, 1, "end"):
        run.meet()
    if run.comes_to(1, 2, "begin"):
        run.meet()
        fail()


def stay(done: Callable[[Pending], bool]) -> Callable[[Pending], bool]:
    """Let the thread that looks for failures find something under way as long as it lives."""
    return lambda each: threading.current_thread().name != "dataparallel-watch" and done(each)


def train(rank: int, size: int, event: Callable[[Run], None]) -> dict[int, str]:
    """Train, and return the errors by step; the gradients of all steps behind them are right."""
    run, said = Run(rank), dict[int, str]()
    watched = mock.patch.object(Pending, "done", stay(Pending.done))
    with watched if event is seen_by_a_thread else contextlib.nullcontext():
        for step in range(7):
            run.model.zero_grad()
            try:
                with dp.telling_failures():
                    for where in ("begin", "backward", "end"):
                        run.place = step, where
                        event(run)
                        if where == "begin":
                            x, y = share(step, rank)
                            loss = mean_loss(run.model(x.to(run.here)), y)
                        elif where == "backward":
                            loss.backward()
            except (ArithmeticError, RuntimeError) as error:
                said[step] = str(error)
                if "check_replicas()" in said[step]:
                    run.model.check_replicas()
            else:
                # The host waits for the device here.
                if step == 0 or step > max(said, default=6):
                    bare, (x, y) = make_net(), batch(step)
                    mean_loss(bare(x), y).backward()
                    assert_all_close(grads(run.model.module), grads(bare))
    run.model.close()
    return said


FAILED = "rank 1 .*on purpose"
LEFT = f"^this step is left out, as in the other processes: {FAILED}"
PARTED = r"^the gradients of step {} were reduced in ranks? {}, which .*{}.*check_replicas\(\).*"
AHEAD = PARTED.format(3, "0", "but rank 1 failed in it") + FAILED
BEHIND = PARTED.format(2, "1", "but rank 0 failed in it") + FAILED
UNDER_WAY = PARTED.format(2, "0, 1", "had not arrived") + FAILED


@pytest.mark.parametrize(
    ("event", "first", "second"),
    [
        (seen_by_a_thread, {2: LEFT}, {2: "^on purpose"}),
        (others_ahead, {3: AHEAD}, {2: "^on purpose", 3: AHEAD}),
        (others_ahead_of_a_round, {3: AHEAD}, {2: "^on purpose", 3: AHEAD}),
        (others_behind, {1: FAILED, 2: LEFT, 3: BEHIND}, {2: "^on purpose", 3: BEHIND}),
        (buckets_under_way, {2: FAILED, 3: UNDER_WAY}, {2: "^on purpose", 3: UNDER_WAY}),
    ],
)
def test_all_go_on_with_the_same_step(
    cluster: Cluster,
    event: Callable[[Run], None],
    first: dict[int, str],
    second: dict[int, str],
) -> None:
    for said, texts in zip(
        cluster.run(train, 2, event, virtual=True, backend="vccl", timeout=20.0),
        (first, second),
        strict=True,
    ):
        assert said.keys() == texts.keys(), said
        for step, text in texts.items():
            assert re.search(text, said[step], re.DOTALL), said[step]
