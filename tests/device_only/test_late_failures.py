"""Collectives that fail when nobody waits for them any more: an error, never a wrong number."""

from __future__ import annotations

import datetime
import os
import pathlib
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dataparallel import checkpoint, torch_internals
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.link import ProcessLink
from dataparallel.virtual import strict_mode
from tests.cluster import Cluster, RankDied
from tests.ddp_cases import FailInBackward
from tests.device_only.backend import take_records
from tests.device_only.cases import (
    State,
    check,
    make_net,
    mean_loss,
    optimizer_of,
    share,
    state_of,
    steps,
    train_bare,
    wrap,
)

LOST = (CollectiveError, CollectiveTimeout, checkpoint.CheckpointError)


def connected(purpose: str, here: str, timeout: float = 20.0) -> ProcessLink:
    """A link that has a communicator for a device."""
    link = ProcessLink(timeout=timeout, purpose=purpose)
    link.all_reduce(torch.ones(3, device=here), what="the first tensor").wait()
    return link


def late(link: ProcessLink, here: str) -> None:
    """A collective to which the other process does not come: fails after the wait for it.

    With NCCL this is what TORCH_NCCL_ASYNC_ERROR_HANDLING=2 does, which ends no process.
    """
    device = torch.device(here)
    torch_internals.set_time_limit(link.group, device, datetime.timedelta(seconds=1))
    with torch.Stream(here):
        pending = link.all_reduce(torch.ones(3, device=here), what="a tensor")
        pending.wait()
    assert not pending.done(), "the host does not wait"
    while not pending.done():
        time.sleep(0.05)
    (kill,) = take_records().kills
    assert "ALLREDUCE" in kill and link.name in kill


def fail_late(rank: int, size: int, then: str, folder: str) -> str:
    """Rank 0 alone launches; then both go on with something else."""
    here = f"virtual:{rank}"
    model = wrap(make_net(), rank)
    link = connected("extra", here)
    if rank == 0:
        late(link, here)
    try:
        if then == "the same link":
            if rank == 0:
                link.all_reduce(torch.ones(3, device=here), what="another one").wait()
            link.all_gather_json(rank, what="ranks")
        elif then == "another link":
            model.check_replicas()
        elif then == "a checkpoint":
            checkpoint.save(folder, model, step=1, timeout=20).wait(20)
        else:
            steps(model, rank)
    except LOST as error:
        return str(error)
    finally:
        checkpoint.close()
    return "no error"


@pytest.mark.parametrize("then", ["the same link", "another link", "a checkpoint", "a forward"])
def test_whoever_comes_next_is_told(cluster: Cluster, tmp_path: pathlib.Path, then: str) -> None:
    texts = cluster.run(fail_late, 2, then, str(tmp_path), virtual=True, backend="vccl")
    for text in texts:
        assert "all_reduce of a tensor (collective 2)" in text and "'extra'" in text, text


def fail_both(rank: int, size: int) -> tuple[str, State]:
    """Each rank launches where the other does not come; rank 1 hears of rank 0's failure first."""
    here = f"virtual:{rank}"
    model = wrap(make_net(), rank)
    links = [connected(name, here) for name in ("left", "right")]
    late(links[rank], here)
    time.sleep(rank)
    text = "no error"
    try:
        if rank == 0:
            model.check_replicas()
        else:
            model(share(0, rank)[0].to(here))
    except LOST as error:
        text = str(error)
    # All have been told, and make new links now.
    steps(model, rank, [0])
    return text, state_of(model)


def test_new_links_let_nothing_be_forgotten(cluster: Cluster) -> None:
    first, second = cluster.run(fail_both, 2, virtual=True, backend="vccl")
    assert "for 'left' over 2 processes" in first[0]
    assert second[0].startswith("rank 1:") and "for 'right' over 2 processes" in second[0]
    check([first[1], second[1]], train_bare(numbers=[0]))


def launch_while_failing(rank: int, size: int) -> State:
    """The backward of all ranks fails, and another thread has a bucket to launch meanwhile."""
    net, here, errors = make_net(), f"virtual:{rank}", [ArithmeticError("on purpose")]
    model = wrap(net, rank)
    optimizer, report = optimizer_of(model), ProcessLink.report
    steps(model, rank, [0], optimizer)

    def report_late(link: ProcessLink, *args: Any, **kwargs: Any) -> None:
        # The thread has looked for failures just before.
        model._training.processes.buckets.all_reduce(torch.ones(3, device=here), what="a bucket")
        report(link, *args, **kwargs)

    def failing(_: Any, __: Any, output: torch.Tensor) -> Any:
        return FailInBackward.apply(output, errors.pop() if errors else None)

    next(net.children()).register_forward_hook(failing)
    with (
        mock.patch.object(ProcessLink, "report", report_late),
        pytest.raises(ArithmeticError, match="on purpose"),
    ):
        steps(model, rank, [1], optimizer)
    steps(model, rank, [2], optimizer)
    return state_of(model)


def test_an_error_that_was_raised_is_not_raised_again(cluster: Cluster) -> None:
    results = cluster.run(launch_while_failing, 2, virtual=True, backend="vccl")
    check(results, train_bare(numbers=[0, 2]))


def give_up_what_is_under_way(rank: int, size: int) -> str:
    """Rank 0 has launched what rank 1 does not come to, with a minute left for it."""
    here = f"virtual:{rank}"
    link = connected("extra", here, timeout=60)
    # Rank 0 gives up only when both are connected: rank 1 would wait for it forever.
    torch.accelerator.synchronize(here)
    dist.barrier()
    reason = ""
    if rank == 0:
        with torch.Stream(here):
            pending = link.all_reduce(torch.ones(3, device=here), what="a tensor")
            pending.wait()
        link.give_up()
        deadline = time.monotonic() + 20
        while not pending.done() and time.monotonic() < deadline:
            time.sleep(0.05)
        reason = str(pending.reason()) if pending.done() else "it is still under way"
    # Until then the connections are open.
    dist.barrier()
    return reason


def test_what_is_given_up_ends(cluster: Cluster) -> None:
    backend = "cpu:gloo,virtual:vccl"
    reason, _ = cluster.run(give_up_what_is_under_way, 2, virtual=True, backend=backend)
    assert reason and "still under way" not in reason, reason


def die_in_a_step(rank: int, size: int) -> str:
    """Rank 1 ends before its second backward, while rank 0 defers all its work.

    Nobody waits in that backward: rank 0 hears of it when it reads the vote, in its next forward.
    """
    with strict_mode():
        here = f"virtual:{rank}"
        model = wrap(make_net(), rank)
        optimizer = optimizer_of(model)
        for step in range(3):
            x, y = share(step, rank)
            try:
                loss = mean_loss(model(x.to(here)), y)
                if rank == 1 and step == 1:
                    os._exit(3)
                loss.backward()
            except LOST as error:
                return f"step {step}: {error}"
            optimizer.step()
            optimizer.zero_grad()
    return "no error"


def test_a_rank_that_ends_in_a_step(cluster: Cluster) -> None:
    first, second = cluster.run(die_in_a_step, 2, virtual=True, backend="vccl", expect_errors=True)
    assert isinstance(second, RankDied)
    assert isinstance(first, str) and first.startswith(("step 1:", "step 2:")), first
    assert "rank 1" in first and "ended" in first


def train_and_read(rank: int, size: int, path: str) -> str:
    """Return torch's output on the standard error in some steps; it warns there without Python."""
    torch.set_warn_always(True)
    kept = os.dup(2)
    with open(f"{path}-{rank}", "w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            model = wrap(make_net(), rank)
            steps(model, rank)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            torch.set_warn_always(False)
        file.seek(0)
        return file.read()


def test_looking_for_failures_warns_of_nothing(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "said")
    for said in cluster.run(train_and_read, 2, path, virtual=True, backend="vccl"):
        assert "deprecated" not in said
