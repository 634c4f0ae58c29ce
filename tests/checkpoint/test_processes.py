"""Several processes save one generation and load it, and all learn how it went."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataparallel import DistributedDataParallel, ShardedOptimizer, checkpoint
from tests.checkpoint.helpers import Box, complete, folder
from tests.cluster import Cluster, RankDied
from tests.faults.harness import Figures
from tests.process_groups import new_group

TIMEOUT = 90.0


class Net(nn.Sequential):
    """With a parameter that each process has for itself."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 200), nn.BatchNorm1d(200), nn.Dropout(0.3), nn.Linear(200, 2))
        self.mine = nn.Parameter(torch.ones(2))
        names = ["mine"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output * self.mine


def build(kind: str = "adamw", replicas: int = 1) -> tuple[Any, Any]:
    torch.manual_seed(1)
    # Statistics of the batches stay each process's own.
    model = DistributedDataParallel(Net(), ["cpu"] * replicas, broadcast_buffers=False)
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
    model, optimizer = build(kind)
    torch.manual_seed(rank)
    random.seed(rank)
    train(model, optimizer, 2)
    saving = checkpoint.save(
        directory, model, optimizer, step=2, user={"of": rank}, asynchronous=asynchronous,
        timeout=TIMEOUT,
    )  # fmt: skip
    train(model, optimizer, 2)
    assert saving.wait(TIMEOUT) == 0
    return result(model)


def load_and_go_on(
    rank: int, world_size: int, directory: pathlib.Path, kind: str, replicas: int, steps: int
) -> dict[str, Tensor]:
    model, optimizer = build(kind, replicas)
    loaded = checkpoint.load(directory, model, optimizer, timeout=TIMEOUT)
    assert (loaded.step, loaded.processes, loaded.user) == (2, 2, {"of": rank % 2})
    train(model, optimizer, steps)
    return result(model)


def assert_equal(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not different, f"rank {rank}"


@pytest.mark.parametrize(("kind", "asynchronous"), [("adamw", True), ("sharded", False)])
def test_all_goes_on_as_it_would_have(
    cluster: Cluster, kind: str, asynchronous: bool, tmp_path: pathlib.Path
) -> None:
    expected = cluster.run(save_and_go_on, 2, tmp_path, kind, asynchronous)
    got = cluster.run(load_and_go_on, 2, tmp_path, kind, 1, 2)
    assert_equal(got, expected)
    # The processes have buffers, ignored parameters and random numbers of their own.
    for name in ("1.running_mean", "mine", "drawn"):
        assert not torch.equal(got[0][name], got[1][name])
    # Rank 0 writes what all have: parameters, and two moments of each.
    once = 3 * 4 * (4 * 200 + 200 + 400 + 200 * 2 + 2)
    sizes = [path.stat().st_size for path in sorted(folder(tmp_path, 0).glob("rank-*"))]
    assert once < sizes[0] < 2 * once and sizes[1] < 0.6 * once
    # With other numbers of processes and replicas.
    two = cluster.run(load_and_go_on, 2, tmp_path, kind, 1, 0)
    three = cluster.run(load_and_go_on, 3, tmp_path, kind, 2, 0)
    one = cluster.run(load_and_go_on, 1, tmp_path, kind, 1, 0)
    assert_equal(three[:2], two)
    assert_equal(one, two[:1])
    # The third has numbers of its own, the same ones at every load.
    assert len({tuple(each["drawn"].tolist()) for each in three}) == 3
    assert_equal(cluster.run(load_and_go_on, 3, tmp_path, kind, 2, 0), three)
    assert torch.equal(three[2]["3.weight"], two[0]["3.weight"])


# --- failures ------------------------------------------------------------------------------------


def save_with_a_failure(
    rank: int, world_size: int, directory: pathlib.Path, where: str, asynchronous: bool
) -> tuple[str, int]:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)

    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    user = {"a": object()} if rank == 1 and where == "value" else None
    model: Any = nn.Linear(2, 2) if rank == 1 and where == "entries" else None
    place = directory / str(rank) if where == "directory" else directory
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1 and where == "write":
            patched.setattr(os, "fsync", fsync)
        try:
            checkpoint.save(
                place, model, step=2, user=user, asynchronous=asynchronous, timeout=TIMEOUT
            ).wait(TIMEOUT)
            text = "saved"
        except (checkpoint.CheckpointError, TypeError) as error:
            text = str(error)
    number = checkpoint.save(directory, step=3, timeout=TIMEOUT).wait()
    checkpoint.close()
    return text, number


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("write", "No space left on device"),
        ("value", "user.a is a builtins.object"),
        ("entries", "rank 1 saves entries ['model', 'rng', 'user'], but rank 0 ['rng', 'user']"),
        ("directory", "rank 1 saves directory 1, but rank 0 0"),
    ],
)
def test_a_failure_in_one_is_an_error_in_all(
    cluster: Cluster, where: str, message: str, asynchronous: bool, tmp_path: pathlib.Path
) -> None:
    results = cluster.run(save_with_a_failure, 2, tmp_path, where, asynchronous)
    texts = [text for text, _ in results]
    assert all(message in text for text in texts), texts
    assert "rank 1" in texts[0]
    assert results[0][1] == results[1][1]
    assert complete(tmp_path) == [True, True]


def save_modules(rank: int, world_size: int, directory: pathlib.Path) -> list[str]:
    torch.manual_seed(0)
    bare, other, batch_norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
    # Statistics that the next forward takes from rank 0.
    inner = nn.Sequential(DistributedDataParallel(batch_norm, ["cpu"]), bare)
    batch_norm.get_buffer("running_mean").add_(rank)
    theirs = nn.parallel.DistributedDataParallel(Net())
    dict(theirs.module.named_parameters())["mine"].data.fill_(rank)
    told = []

    def attempt(**parts: Any) -> None:
        try:
            checkpoint.save(directory, step=1, timeout=TIMEOUT, asynchronous=True, **parts).wait()
            told.append("saved")
        except checkpoint.CheckpointError as error:
            told.append(str(error))

    attempt(model=bare, states={"other": other, "inner": inner, "theirs": theirs})
    with torch.no_grad():
        other.weight[2, 3] += rank
    attempt(model=bare, states={"other": other})
    # This one trains for itself.
    attempt(model=DistributedDataParallel(other, ["cpu"], process_group=False))
    attempt(model=bare, user=other.state_dict())
    user = checkpoint.load(directory, bare, timeout=TIMEOUT).user
    assert torch.equal(user["weight"], other.weight)
    checkpoint.close()
    return told


def test_modules_that_no_wrapper_keeps_the_same(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    results = cluster.run(save_modules, 2, tmp_path)
    texts = [f"{name} is not the same in rank 0 and rank 1; pass" for name in ("other", "model")]
    for first, *refused, last in results:
        assert (first, last) == ("saved", "saved")
        assert all(text in told for text, told in zip(texts, refused, strict=True)), refused


def die(rank: int, world_size: int, directory: pathlib.Path, dies: int, when: str) -> Any:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)
    replace = os.replace

    def dying(source: Any, target: Any) -> None:
        replace(source, target)
        if str(target).endswith(when):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patched:
        if rank == dies and when:
            patched.setattr(os, "replace", dying)
        elif rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.save(directory, step=2, timeout=TIMEOUT)
    checkpoint.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("dies", "when", "message", "step"),
    [
        (1, "", "rank 1 ", 1),
        (1, ".safetensors", "nothing was saved to {}: ", 1),
        # This file makes it a generation.
        (0, "manifest.json", "whether generation 1 was saved is not known to {}: ", 2),
    ],
)
def test_a_process_that_dies(
    cluster: Cluster, dies: int, when: str, message: str, step: int, tmp_path: pathlib.Path
) -> None:
    results = cluster.run(die, 2, tmp_path, dies, when, expect_errors=True, timeout=40)
    survivor = results[1 - dies]
    assert isinstance(survivor, str), survivor
    assert message.format(tmp_path) in survivor and f"rank {dies}" in survivor
    assert checkpoint.load(tmp_path).step == step
    checkpoint.save(tmp_path, step=7)
    assert checkpoint.load(tmp_path).step == 7
    checkpoint.close()


def save_with_groups(rank: int, world_size: int, directory: pathlib.Path) -> list[int]:
    numbers = []
    for step in range(3):
        group = new_group([0, 1])
        place: dict[str, Any] = {"process_group": group, "timeout": TIMEOUT}
        numbers.append(checkpoint.save(directory, step=step, **place).wait())
        dist.destroy_process_group(group)
    for step in range(4):
        if step in (1, 2) and rank == step - 1:
            # One alone gives its connections up, as after an error that others do not notice.
            checkpoint.close()
        numbers.append(checkpoint.save(directory, step=step, timeout=TIMEOUT).wait())
    checkpoint.close()
    return numbers


def test_groups_and_links_that_come_and_go(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    assert cluster.run(save_with_groups, 2, tmp_path, timeout=50) == [[*range(7)]] * 2


# --- loading -------------------------------------------------------------------------------------


def load_and_fail(
    rank: int, world_size: int, directory: pathlib.Path, error: type[BaseException] | None
) -> str:
    # Without an error it does not fit in one process.
    net = nn.Linear(2 + (error is None and rank == 1), 2)
    states = {"failing": Box(1, error if rank == 1 else None)}
    with pytest.raises((checkpoint.CheckpointError, KeyboardInterrupt)) as caught:
        checkpoint.load(directory, net, states=states, timeout=TIMEOUT)
    with pytest.raises(checkpoint.NoCheckpoint, match=r"nothing was saved in .*missing_ok=True"):
        checkpoint.load(directory / "other", net, timeout=TIMEOUT)
    assert checkpoint.load(directory / "other", net, missing_ok=True, timeout=TIMEOUT).step == 0
    return str(caught.value)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, None])
def test_a_failure_in_one_process_is_an_error_in_all(
    cluster: Cluster, error: type[BaseException] | None, tmp_path: pathlib.Path
) -> None:
    checkpoint.save(tmp_path, nn.Linear(2, 2), step=1, states={"failing": Box(1)})
    checkpoint.close()
    texts = cluster.run(load_and_fail, 2, tmp_path, error)
    if error is not KeyboardInterrupt:
        why = "the user's own" if error else "size mismatch for weight"
        assert all(why in text for text in texts) and "rank 1 on " in texts[0]


def load_own(rank: int, world_size: int, directory: pathlib.Path) -> Any:
    try:
        loaded = checkpoint.load(directory / str(rank), timeout=TIMEOUT)
    except checkpoint.CheckpointError as error:
        return str(error)
    return loaded.step, loaded.rejected


def damage(directory: pathlib.Path, rank: int, number: int) -> None:
    (folder(directory / str(rank), number) / "manifest.json").write_bytes(b"x")


def test_the_newest_that_is_good_for_all(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    for step in range(4):
        checkpoint.save(tmp_path / "0", step=step, keep=9)
    # As machines that see one directory, and each some of it damaged.
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    damage(tmp_path, 0, 2)
    damage(tmp_path, 1, 3)
    (step, rejected), same = cluster.run(load_own, 2, tmp_path)
    assert (step, rejected) == same
    assert step == 1 and [number for number, _ in rejected] == [3, 2]
    assert rejected[0][1].startswith("rank 1: ") and rejected[1][1].startswith("rank 0: ")
    # Directories that are not the same.
    for rank in (0, 1):
        shutil.rmtree(tmp_path / str(rank))
        checkpoint.save(tmp_path / str(rank), step=rank)
    texts = cluster.run(load_own, 2, tmp_path)
    assert all("the processes see different ones" in text for text in texts)
    shutil.rmtree(tmp_path / "0")
    texts = cluster.run(load_own, 2, tmp_path)
    assert all("no generation is good for all processes" in text for text in texts)


# --- lost work -----------------------------------------------------------------------------------

STEPS = 8
# A generation on the disk at every so many steps.
EVERY = 3


def train_with_memory(
    rank: int, world_size: int, memory: pathlib.Path, disk: pathlib.Path, killed_at: int
) -> tuple[int, dict[str, Tensor]]:
    """Train to the end, or until this process is killed in a step."""
    model, optimizer = build()
    torch.manual_seed(rank)
    random.seed(rank)
    state = (model, optimizer)
    loaded = checkpoint.load(memory, *state, missing_ok=True, timeout=TIMEOUT)
    if loaded.number is None:
        loaded = checkpoint.load(disk, *state, missing_ok=True, timeout=TIMEOUT)
    for step in range(loaded.step + 1, STEPS + 1):
        model(torch.rand(8, 4)).sum().backward()
        if rank == 1 and step == killed_at:
            # In the middle of a step that the others may have finished.
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(memory, *state, step=step, keep=2, timeout=TIMEOUT)
        if step % EVERY == 0:
            checkpoint.save(disk, *state, step=step, timeout=TIMEOUT)
    return loaded.step, result(model)


@pytest.mark.parametrize("lost", ["process", "machine"])
def test_lost_work(
    lost: str, cluster: Cluster, tmp_path: pathlib.Path, repeats: Callable[..., int],
    figures: Figures,
) -> None:  # fmt: skip
    """At most one step with generations in memory, else as many as from one to the next."""
    expected = cluster.run(train_with_memory, 2, tmp_path / "a", tmp_path / "b", 0)
    worst, count = 0, repeats(quick=1, long=25)
    for number in range(count):
        places = (tmp_path / f"memory-{number}", tmp_path / f"disk-{number}")
        killed_at = random.Random(number).randint(EVERY + 1, STEPS)
        results = cluster.run(
            train_with_memory, 2, *places, killed_at, expect_errors=True, timeout=60
        )
        assert isinstance(results[1], RankDied)
        if lost == "machine":
            shutil.rmtree(places[0])
        again = cluster.run(train_with_memory, 2, *places, 0)
        assert {step for step, _ in again} == {again[0][0]}
        worst = max(worst, killed_at - again[0][0])
        assert_equal([got for _, got in again], [whole for _, whole in expected])
    what = f"steps lost when a {lost} is lost, bit for bit the same at the end"
    limit = 1 if lost == "process" else EVERY
    figures.record(what, worst, "steps", limit, repeats=count)
