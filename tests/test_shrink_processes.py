"""A device of one of several processes is lost; all of them go on, exactly."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from torch import Tensor, nn

import dataparallel
from dataparallel import virtual
from dataparallel.shrinking import DeviceLost, survive_device_loss
from tests.cluster import Cluster
from tests.shrink_cases import Training, assert_close, batch_of, make_net, undisturbed, weights_of

STEPS = 5


def _train(
    rank: int, world_size: int, points: list[int], average: Literal["processes", "samples", "none"]
) -> list[tuple[list[Tensor], int, int, int]]:
    """Rank 1 loses a device after so many operations, once for each point."""
    found = []
    for after in points:
        home = f"virtual:{2 * rank}"
        other = f"virtual:{2 * rank + 1}"
        devices = [home, other, home] if rank else [home, other]
        wrapped = make_net().to(home)
        model = dataparallel.DistributedDataParallel(wrapped, devices, timeout=20, average=average)
        keeper = survive_device_loss(model)
        training = Training(model, keeper, home)
        for step in range(STEPS):
            if rank == 1 and step == 1:
                virtual.lose_device(other, after=after)
            training.step(step, rank)
            if rank == 1 and step == 3 and virtual.is_lost(other):
                virtual.restore_device(other)
                model.add_replica(other)
        virtual.restore_device(other)
        found.append(
            (weights_of(model), training.calls, len(keeper.history), len(model.device_ids))
        )
        model.close()
    return found


@pytest.mark.parametrize("average", ["processes", "samples", "none"])
def test_all_processes_go_on(cluster: Cluster, average: str) -> None:
    points = [0, 9, 17, 22, 26, 28, 31] if average == "processes" else [27]
    expected = undisturbed(STEPS, 2, average)
    results: Any = cluster.run(_train, 2, points, average, virtual=True, timeout=100)
    for first, second in zip(*results, strict=True):
        assert second[2:] == (1, 3)
        assert first[2:] == (0, 2)
        # A step that is run again is run again in both.
        assert first[1] == second[1]
        assert_close(first[0], expected)
        assert_close(second[0], expected)
    calls = [second[1] for second in results[1]]
    assert STEPS + 1 in calls


def _misfortunes(rank: int, world_size: int) -> dict[str, Any]:
    """One after the other; after each of them training goes on."""
    home, other = f"virtual:{2 * rank}", f"virtual:{2 * rank + 1}"
    model = dataparallel.DistributedDataParallel(
        make_net().to(home), [home, other, home], timeout=5
    )
    keeper = survive_device_loss(model)
    training = Training(model, keeper, home)
    found: dict[str, Any] = {}

    # An error of the user's own before backward: the other process need not wait for the timeout.
    def refuse() -> None:
        if rank == 1:
            raise ValueError("no such file")
        x, y = (t.to(home) for t in batch_of(0, rank))
        nn.functional.mse_loss(model(x), y).backward()

    with pytest.raises((ValueError, RuntimeError)) as caught:
        keeper.step(refuse)
    found["own error"] = (type(caught.value).__name__, str(caught.value), notes_of(caught.value))
    found["gradients"] = [p.grad is None for p in model.parameters()]
    training.step(0, rank)

    # Within no_sync() the step is run again by one process alone.
    def accumulated() -> None:
        x, y = (t.to(home) for t in batch_of(1, rank))
        (nn.functional.mse_loss(model(x), y) / 2).backward()

    training.optimizer.zero_grad()
    if rank == 1:
        virtual.lose_device(other, after=27)
    with model.no_sync():
        keeper.step(accumulated)
    keeper.step(accumulated)
    training.optimizer.step()
    found["weights"] = weights_of(model)
    found["history"] = len(keeper.history)

    # A backward through replicas that are gone fails in all processes.
    virtual.restore_device(other)
    x, y = (t.to(home) for t in batch_of(2, rank))
    loss = nn.functional.mse_loss(model(x), y)
    if rank == 1:
        model.add_replica(other)
    with pytest.raises(RuntimeError) as caught_backward:
        loss.backward()
    found["backward"] = str(caught_backward.value)

    # Without the first device of a process there is nothing left to go on with.
    x, y = (t.to(home) for t in batch_of(2, rank))
    if rank == 1:
        virtual.lose_device(home)
    with pytest.raises((RuntimeError, TimeoutError)) as caught_home:
        keeper.step(lambda: nn.functional.mse_loss(model(x), y).backward())
    found["home"] = str(caught_home.value)
    assert isinstance(caught_home.value, DeviceLost) == (rank == 1)
    virtual.restore_device()
    return found


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_misfortunes(cluster: Cluster) -> None:
    results: Any = cluster.run(_misfortunes, 2, virtual=True, timeout=60)
    first, second = results
    kind, _, notes = first["own error"]
    assert kind == "OtherRanksFailed"
    assert notes == ["the step is not run again: rank 1: ValueError: no such file"]
    assert second["own error"] == (
        "ValueError",
        "no such file",
        ["the step is not run again: rank 1: ValueError: no such file"],
    )
    assert all(first["gradients"]) and all(second["gradients"])
    assert (first["history"], second["history"]) == (0, 1)
    assert_close(first["weights"], undisturbed(2, 2))
    assert_close(second["weights"], undisturbed(2, 2))
    assert "replicas were dropped or added after the forward" in second["backward"]
    assert "rank 1" in first["backward"]
    assert "the device of replica 0 is lost, virtual:2" in second["home"]
    assert "load the last checkpoint" in second["home"]
