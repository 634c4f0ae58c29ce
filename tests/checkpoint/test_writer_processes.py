"""Several processes save: what one of them does wrong, and what the others can know of it."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from dataparallel import checkpoint
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from dataparallel.extras.checkpoint.peers import Peers
from tests.cluster import Cluster

TIMEOUT = 20.0


def save_with_an_argument(
    rank: int, world_size: int, directory: pathlib.Path, options: dict[str, Any]
) -> tuple[str, int, bool]:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)
    begin = time.monotonic()
    with pytest.raises(checkpoint.CheckpointError) as caught:
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
    results = cluster.run(save_with_an_argument, 2, tmp_path, options)
    assert results[0] == results[1]
    assert f": {message}" in results[0][0] and "failed in rank 1 on " in results[0][0]
    assert results[0][1:] == (1, True)


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_around_the_commit(
    rank: int, world_size: int, directory: pathlib.Path, dies: int
) -> tuple[str, list[bool]]:
    checkpoint.save(directory, step=1, timeout=TIMEOUT)
    share: Callable[..., Any] = Peers.share
    commit = GenerationWriter.commit

    def dying_share(self: Peers, what: str, *args: Any, **options: Any) -> Any:
        return (die if what == "writing the manifest" else share)(self, what, *args, **options)

    if rank == dies == 1:
        Peers.share = dying_share  # type: ignore[method-assign]
    if rank == dies == 0:
        GenerationWriter.commit = lambda *args: die(commit(*args))  # type: ignore[method-assign]
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.save(directory, step=2, timeout=TIMEOUT)
    checkpoint.close()
    return str(caught.value), [info.complete for info in checkpoint.generations(directory)]


@pytest.mark.parametrize(
    ("dies", "message"),
    [(0, "whether generation 1 was saved to {} is not known: "),
     (1, "generation 1 was saved to {}, but not all know it: ")],
)  # fmt: skip
def test_a_process_that_dies_around_the_commit(
    cluster: Cluster, dies: int, message: str, tmp_path: pathlib.Path
) -> None:
    results = cluster.run(die_around_the_commit, 2, tmp_path, dies, expect_errors=True, timeout=40)
    survivor = results[1 - dies]
    assert isinstance(survivor, tuple), survivor
    assert survivor[0].startswith(message.format(tmp_path)) and f"rank {dies}" in survivor[0]
    assert survivor[1] == [True, True]
