"""Several processes save one generation: equal state once, and all learn how it went."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataparallel import DistributedDataParallel, ShardedOptimizer, checkpoint
from tests.cluster import Cluster
from tests.process_groups import new_group

TIMEOUT = 20.0


def build(rank: int, kind: str = "adamw", replicas: int = 1) -> tuple[Any, Any]:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(4, 200), nn.BatchNorm1d(200), nn.Dropout(0.3), nn.Linear(200, 200),
        nn.Linear(200, 2),
    )  # fmt: skip
    # Statistics of the batches stay each process's own.
    model = DistributedDataParallel(net, ["cpu"] * replicas, broadcast_buffers=False)
    if kind == "zero":
        with warnings.catch_warnings():
            # Torch's own, at the import.
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
        )
    if kind == "sharded":
        return model, ShardedOptimizer(torch.optim.AdamW, model, lr=0.01)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        x = torch.rand(8, 4) + random.random()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def result(model: Any) -> dict[str, Tensor]:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.close()
    checkpoint.close()
    return {**values, "drawn": torch.rand(3), "python": torch.tensor(random.random())}


def save_and_go_on(
    rank: int, world_size: int, directory: pathlib.Path, kind: str, asynchronous: bool
) -> dict[str, Tensor]:
    model, optimizer = build(rank, kind)
    torch.manual_seed(rank)
    random.seed(rank)
    train(model, optimizer, 2)
    saving = checkpoint.save(
        directory, model, optimizer, step=2, asynchronous=asynchronous, timeout=TIMEOUT
    )
    train(model, optimizer, 2)
    assert saving.wait(TIMEOUT) == 0
    return result(model)


def load_and_go_on(
    rank: int, world_size: int, directory: pathlib.Path, kind: str, replicas: int, steps: int
) -> dict[str, Tensor]:
    model, optimizer = build(rank, kind, replicas)
    loaded = checkpoint.load(directory, model, optimizer, timeout=TIMEOUT)
    assert (loaded.step, loaded.processes) == (2, 2)
    train(model, optimizer, steps)
    return result(model)


def assert_equal(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not different, f"rank {rank}"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "sharded", "zero"])
def test_all_goes_on_as_it_would_have(
    cluster: Cluster, kind: str, asynchronous: bool, tmp_path: pathlib.Path
) -> None:
    expected = cluster.run(save_and_go_on, 2, tmp_path, kind, asynchronous)
    got = cluster.run(load_and_go_on, 2, tmp_path, kind, 1, 2)
    assert_equal(got, expected)
    # The processes have buffers and random numbers of their own.
    assert not torch.equal(got[0]["1.running_mean"], got[1]["1.running_mean"])
    assert not torch.equal(got[0]["drawn"], got[1]["drawn"])


def test_equal_state_is_written_once(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    cluster.run(save_and_go_on, 2, tmp_path, "adamw", False)
    folder = tmp_path / "generation-00000000"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    # Parameters, and two moments of each.
    once = 3 * 4 * (4 * 200 + 200 + 400 + 200 * 200 + 200 + 200 * 2 + 2)
    assert once < sum(sizes.values()) < 1.2 * once
    # Rank 0 writes it; the other writes its random numbers, and statistics of its batches.
    assert sizes["shared-00000.safetensors"] > once
    assert sizes["rank-00001-00000.safetensors"] < 0.1 * once


@pytest.mark.parametrize("kind", ["adamw", "zero"])
def test_other_numbers_of_processes_and_replicas(
    cluster: Cluster, kind: str, tmp_path: pathlib.Path
) -> None:
    cluster.run(save_and_go_on, 2, tmp_path, kind, False)
    two = cluster.run(load_and_go_on, 2, tmp_path, kind, 1, 0)
    three = cluster.run(load_and_go_on, 3, tmp_path, kind, 2, 0)
    one = cluster.run(load_and_go_on, 1, tmp_path, kind, 1, 0)
    assert_equal(three[:2], two)
    assert_equal(one, two[:1])
    # The third has numbers of its own, the same ones at every load.
    assert len({tuple(each["drawn"].tolist()) for each in three}) == 3
    assert_equal(cluster.run(load_and_go_on, 3, tmp_path, kind, 2, 0), three)
    weights = {name: value for name, value in two[0].items() if "running" not in name}
    third = three[2]
    assert all(torch.equal(third[k], v) for k, v in weights.items() if k.endswith("weight"))
    # And all can be trained on.
    cluster.run(load_and_go_on, 3, tmp_path, kind, 2, 2)


# --- failures ------------------------------------------------------------------------------------


def save_with_a_failure(
    rank: int, world_size: int, directory: pathlib.Path, where: str, asynchronous: bool
) -> tuple[str, int, float]:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)
    original = os.fsync

    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    user: Any = None
    if rank == 1 and where == "write":
        os.fsync = fsync  # type: ignore[assignment]
    if rank == 1 and where == "value":
        user = {"a": object()}
    started = time.monotonic()
    try:
        checkpoint.save(
            directory, step=2, user=user, asynchronous=asynchronous, timeout=TIMEOUT
        ).wait(TIMEOUT)
        text = "saved"
    except (checkpoint.CheckpointError, TypeError) as error:
        text = str(error)
    seconds = time.monotonic() - started
    os.fsync = original
    number = checkpoint.save(directory, step=3, timeout=TIMEOUT).wait()
    checkpoint.close()
    return text, number, seconds


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["write", "value"])
def test_a_failure_in_one_is_an_error_in_all(
    cluster: Cluster, where: str, asynchronous: bool, tmp_path: pathlib.Path
) -> None:
    results = cluster.run(save_with_a_failure, 2, tmp_path, where, asynchronous)
    message = "No space left on device" if where == "write" else r"user.a is a builtins.object"
    texts = [text for text, _, _ in results]
    assert all(message in text for text in texts)
    assert "rank 1 on " in texts[0] and (texts[0] == texts[1] or where == "value")
    assert [number for _, number, _ in results] == [1, 1]
    assert max(seconds for _, _, seconds in results) < TIMEOUT / 2
    assert [info.complete for info in checkpoint.generations(tmp_path)] == [True, True]


def save_different_things(
    rank: int, world_size: int, directory: pathlib.Path, what: str
) -> list[str]:
    model = nn.Linear(2, 2) if what == "parts" and rank == 1 else None
    place = directory / str(rank) if what == "directory" else directory
    texts = []
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.save(place, model, step=1, timeout=TIMEOUT)
        texts.append(str(caught.value))
    checkpoint.close()
    return texts


@pytest.mark.parametrize("what", ["parts", "directory"])
def test_all_save_the_same(cluster: Cluster, what: str, tmp_path: pathlib.Path) -> None:
    results = cluster.run(save_different_things, 2, tmp_path, what)
    assert results[0] == results[1]
    assert f"rank 1 saves {what} " in results[0][0] and "but rank 0 " in results[0][0]


def die_in_a_save(rank: int, world_size: int, directory: pathlib.Path) -> str:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.save(directory, step=2, timeout=TIMEOUT)
    assert time.monotonic() - started < TIMEOUT / 2
    checkpoint.close()
    return str(caught.value)


def test_a_process_that_dies(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    survivor, _ = cluster.run(die_in_a_save, 2, tmp_path, expect_errors=True, timeout=40)
    assert isinstance(survivor, str), survivor
    assert "nothing was saved" in survivor and "rank 1" in survivor
    assert checkpoint.load(tmp_path).step == 1
    checkpoint.save(tmp_path, step=2)
    assert checkpoint.load(tmp_path).step == 2
    checkpoint.close()


def load_what_does_not_fit(rank: int, world_size: int, directory: pathlib.Path) -> tuple[str, bool]:
    net = nn.Linear(2 + rank, 2)
    before = net.weight.detach().clone()
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(directory, net, timeout=TIMEOUT)
    with pytest.raises(checkpoint.NoCheckpoint):
        checkpoint.load(directory / "other", net, timeout=TIMEOUT)
    assert checkpoint.load(directory / "other", net, missing_ok=True, timeout=TIMEOUT).step == 0
    return str(caught.value), torch.equal(net.weight, before)


def test_nobody_loads_what_does_not_fit_somewhere(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    checkpoint.close()
    results = cluster.run(load_what_does_not_fit, 2, tmp_path)
    assert results[0] == results[1] and results[0][1]
    assert "rank 1 on " in results[0][0] and "(2, 3) here" in results[0][0]


def new_group_in_one_process(rank: int, world_size: int, directory: pathlib.Path) -> list[int]:
    numbers = []
    for _ in range(3):
        group = new_group([0, 1])
        numbers.append(
            checkpoint.save(directory, step=1, process_group=group, timeout=TIMEOUT).wait()
        )
        dist.destroy_process_group(group)
    checkpoint.close()
    return numbers


def test_groups_that_come_and_go(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    assert cluster.run(new_group_in_one_process, 2, tmp_path) == [[0, 1, 2]] * 2


def save_between_failures(rank: int, world_size: int, directory: pathlib.Path) -> list[int]:
    numbers = []
    for step in range(4):
        if step in (1, 2) and rank == step - 1:
            # One alone gives its connections up, as after an error that others do not notice.
            checkpoint.close()
        numbers.append(checkpoint.save(directory, step=step, timeout=TIMEOUT).wait())
    checkpoint.close()
    return numbers


def test_a_link_that_one_process_has_given_up(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    assert cluster.run(save_between_failures, 2, tmp_path, timeout=50) == [[0, 1, 2, 3]] * 2


# --- what one does wrong, and what the others can know of it -------------------------------------


def save_with_an_argument(
    rank: int, world_size: int, directory: pathlib.Path, options: dict[str, Any]
) -> tuple[str, int, bool]:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)
    begin = time.monotonic()
    with pytest.raises((checkpoint.CheckpointError, ValueError, TypeError)) as caught:
        wrong = options if rank == 1 else {}
        checkpoint.save(directory, **{"step": 2, "timeout": TIMEOUT, **wrong})
    seconds = time.monotonic() - begin
    number = checkpoint.save(directory, step=3, timeout=TIMEOUT).wait()
    checkpoint.close()
    return str(caught.value), number, seconds < TIMEOUT / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "ValueError: step is a whole number, at least 0, but got -1"),
        ({"model": 3}, "TypeError: model is a torch.nn.Module, but got int"),
    ],
)
def test_an_argument_that_is_wrong_in_one_process(
    cluster: Cluster, options: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    ours, theirs = cluster.run(save_with_an_argument, 2, tmp_path, options)
    assert f": {message}" in ours[0] and "failed in rank 1 on " in ours[0]
    assert theirs[0] in message
    assert ours[1:] == theirs[1:] == (1, True)


def die_around_the_commit(
    rank: int, world_size: int, directory: pathlib.Path, dies: int
) -> tuple[str, list[bool]]:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)
    replace = os.replace

    def dying(source: Any, target: Any) -> None:
        replace(source, target)
        # Of rank 1 the last file; of rank 0 that which makes it a generation.
        if dies == 1 or str(target).endswith("manifest.json"):
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == dies:
        os.replace = dying  # type: ignore[assignment]
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.save(directory, step=2, timeout=TIMEOUT)
    checkpoint.close()
    return str(caught.value), [info.complete for info in checkpoint.generations(directory)]


@pytest.mark.parametrize(
    ("dies", "message", "complete"),
    [(0, "whether generation 1 was saved to {} is not known: ", [True, True]),
     (1, "nothing was saved to {}: ", [True])],
)  # fmt: skip
def test_a_process_that_dies_around_the_commit(
    cluster: Cluster, dies: int, message: str, complete: list[bool], tmp_path: pathlib.Path
) -> None:
    results = cluster.run(die_around_the_commit, 2, tmp_path, dies, expect_errors=True, timeout=40)
    survivor = results[1 - dies]
    assert isinstance(survivor, tuple), survivor
    assert survivor[0].startswith(message.format(tmp_path)) and f"rank {dies}" in survivor[0]
    assert survivor[1] == complete
