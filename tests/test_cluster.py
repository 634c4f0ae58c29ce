"""Errors in the processes in which functions of tests run come back."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch.distributed as dist

from tests.cluster import Cluster, RankDied


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} of {second}")


def fail(rank: int, world_size: int, how: str) -> str:
    """Fail in rank 1; the others are content, or wait for it."""
    if rank == 1:
        if how == "ends":
            os._exit(3)
        if how == "hangs":
            threading.Event().wait(30)
        if how == "is not pickled":
            raise Unpicklable(1, 2)
        if how == "warns":
            warnings.warn("beware", stacklevel=1)
        if how == "in a thread":
            thread = threading.Thread(target=fail, args=(1, 2, "raises"))
            thread.start()
            thread.join()
            return "fine"
        raise KeyError("lost")
    if how == "is awaited":
        dist.barrier()
    return "fine"


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raises", KeyError, "lost"),
        ("is awaited", KeyError, "lost"),
        ("is not pickled", Exception, "Unpicklable: 1 of 2"),
        ("warns", UserWarning, "beware"),
        ("in a thread", RuntimeError, r"outside of the function(?s:.*)KeyError: 'lost'"),
        ("ends", RankDied, "exit code 3"),
        ("hangs", RankDied, r"timeout 2 s(?s:.*)in fail"),
    ],
)
def test_an_error_comes_back_with_the_rank_and_the_traceback(
    cluster: Cluster, how: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        # To make a group may take longer on a busy machine.
        hangs = how == "hangs"
        cluster.run(fail, 2, how, timeout=2.0 if hangs else 60.0, init_group=not hangs)
    assert "in rank 1:" in str(caught.value.__cause__)
    assert how != "raises" or 'raise KeyError("lost")' in str(caught.value.__cause__)
    # A process that has ended is replaced; and exceptions can be results.
    fine, failed = cluster.run(fail, 2, "raises", expect_errors=True)
    assert fine == "fine" and isinstance(failed, KeyError)
