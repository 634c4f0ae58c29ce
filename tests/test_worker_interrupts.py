"""Ctrl-C, the exit of the interpreter, and forks while worker threads are alive."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel.threads.workers import WorkerPools

LABELS = [f"in replica {i} on device cpu" for i in range(8)]


def run(pools: WorkerPools, *tasks: Callable[[], Any], **options: Any) -> list[Any]:
    return pools.run(tasks, LABELS.__getitem__, **options)


INTERRUPTED = """
    import os, signal, sys, threading, time
    import torch
    from dataparallel.threads.apply import parallel_apply
    from dataparallel.threads.meeting import current_rendezvous

    def compute(x):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            x = x + 1
        return x

    def sleep(x):
        time.sleep(20)

    def meet(x):
        # Replica 1 never comes: it computes until it is interrupted.
        return current_rendezvous().exchange("k", x, lambda values: values)

    def run(*functions):
        begin = time.monotonic()
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            parallel_apply(functions, [torch.zeros(4)] * len(functions))
        except KeyboardInterrupt:
            print("interrupted after", time.monotonic() - begin, flush=True)
        else:
            sys.exit("not interrupted")
        assert time.monotonic() - begin < 6, "the interrupt took too long"
        outputs = parallel_apply([torch.exp] * 3, [torch.zeros(2)] * 3)
        assert [y.tolist() for y in outputs] == [[1.0, 1.0]] * 3

    run(compute, compute)
    time.sleep(0.2)
    names = [t.name for t in threading.enumerate()]
    assert len(names) == 1 + 3, names
    run(meet, compute, compute)
    run(sleep, compute)
    print("usable")
"""


def python(code: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        **options,
    )


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_ends_the_call_and_the_next_call_works() -> None:
    result = python(INTERRUPTED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("usable\n")
    assert result.stdout.count("interrupted after") == 3
    assert "Traceback" not in result.stderr


def test_an_interrupted_wait_releases_tasks_that_wait_for_each_other() -> None:
    pools = WorkerPools()
    released = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        released.wait(20)

    with pytest.raises(KeyboardInterrupt):
        run(pools, lambda: released.wait(20), interrupt, on_interrupt=released.set)
    assert released.is_set()
    assert run(pools, int, int) == [0, 0]
    pools.close()


# --- processes -------------------------------------------------------------------------------


def test_the_interpreter_exits_with_pools_alive_and_replicas_stuck() -> None:
    result = python(
        """
        import threading, time
        from dataparallel.threads.workers import WorkerPools
        from dataparallel.threads.apply import parallel_apply
        pools = WorkerPools()
        pools.run([int, int], "ab".__getitem__)
        parallel_apply([int, int], [1, 2])
        stuck = lambda: time.sleep(600)
        def call():
            pools.run([stuck, int], "ab".__getitem__)
        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.2)
        print("end")
        """,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
    assert not result.stderr


def _in_child(pools: WorkerPools, connection: Any) -> None:
    try:
        connection.send(run(pools, *[os.getpid] * 2))
    finally:
        connection.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads() -> None:
    pools = WorkerPools()
    run(pools, int, int)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_in_child, args=(pools, theirs))
    child.start()
    assert ours.poll(30), "the forked child hangs"
    assert ours.recv() == [child.pid] * 2
    child.join(30)
    assert child.exitcode == 0
    assert run(pools, *[os.getpid] * 2) == [os.getpid()] * 2
    pools.close()


class _Dataset(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, pools: WorkerPools) -> None:
        self.pools = pools

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(sum(run(self.pools, lambda: index, lambda: index)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_data_loader_workers_can_use_pools_and_end() -> None:
    pools = WorkerPools()
    run(pools, int, int)
    loader = torch.utils.data.DataLoader(
        _Dataset(pools), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    pools.close()
