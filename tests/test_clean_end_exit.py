"""The end of the interpreter: no error, no output, no wait, whatever is under way.

A process of multiprocessing ends by ``os._exit``. So nothing is seen of the end of an interpreter:
of daemon threads that are still at work then, for one. To start an interpreter and to import torch
takes seconds. So this file, run as a script, is one interpreter, which forks for each case. Each
child calls its function, and comes to the end of the script.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

# The imports of a reducer come once, and not in each child.
import torch.fx.experimental.symbolic_shapes
from torch import nn
from torch._C._distributed_c10d import FileStore

import dataparallel as dp
from dataparallel import checkpoint, virtual
from dataparallel.comm.errors import CollectiveError
from dataparallel.monitor import StepMonitor
from tests import forkserver

ROOT = pathlib.Path(__file__).parents[1]
#: Seconds that an interpreter may take.
LIMIT = 60

Net = dp.DataParallel[nn.Module]


def wrapped(kind: str = "ddp") -> Net:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.GroupNorm(8, 64), nn.Linear(64, 4))
    if kind == "virtual":
        virtual.enable(2)
        return dp.DistributedDataParallel(net.to("virtual:0"), ["virtual:0", "virtual:1"])
    wrapper = dp.DataParallel if kind == "dp" else dp.DistributedDataParallel
    return wrapper(net, ["cpu", "cpu"])


def step(model: Net, width: int = 8) -> None:
    place = next(model.parameters()).device
    model(torch.ones(8, width, device=place)).sum().backward()


# --- what an interpreter may be doing when it ends: what is returned lives until then ----------


def trained(kind: str = "ddp") -> Net:
    model = wrapped(kind)
    step(model)
    return model


def closed() -> Net:
    model = trained()
    model.close()
    return model


def monitored() -> object:
    model = wrapped()
    monitor = StepMonitor(model)
    monitor.__enter__()
    step(model)
    return monitor


def balanced() -> object:
    model = wrapped("dp")
    balancer = dp.balance(model)
    step(model)
    return model, balancer


def saving(folder: str) -> object:
    """A checkpoint is still to be written."""
    return checkpoint.save(f"{folder}/run", nn.Linear(300, 300), step=7, asynchronous=True)


def after_an_error() -> Net:
    model = trained()
    with contextlib.suppress(RuntimeError):
        step(model, 3)
    return model


def ends_by_an_error() -> None:
    step(trained(), 3)


def ends_by_exit() -> None:
    in_a_cycle: Any = trained()
    in_a_cycle.itself = [in_a_cycle]
    sys.exit(3)


def left_behind() -> None:
    """The caller was interrupted, and replicas are still in operations of torch."""

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.set()
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                with contextlib.suppress(BaseException):
                    x = (x @ x).clamp(0, 1)
            return x

    def interrupt() -> None:
        entered.wait(20)
        _thread.interrupt_main()

    entered = threading.Event()
    model = dp.DataParallel(Slow(), ["cpu", "cpu"])
    threading.Thread(target=interrupt).start()
    with contextlib.suppress(KeyboardInterrupt):
        model(torch.rand(2, 300, 300))
        raise AssertionError("there was no interrupt")
    sys.exit(3)


def after_fork() -> Net:
    """A child that has forked while threads were there ends as well, and can train before."""
    model = wrapped()
    model(torch.ones(8, 8))
    child = forkserver.fork()
    if child == 0:
        # If it hangs, nobody else would end it.
        signal.alarm(LIMIT)
        model(torch.ones(8, 8))
        return model
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def in_processes(folder: str, rank: int, world_size: int, name: str) -> Net:
    """In one case a process fails; groups are given back when the interpreter ends."""
    store = FileStore(f"{folder}/{name}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = trained()
    with contextlib.suppress(CollectiveError, ValueError), dp.telling_failures():
        if name == "fails" and rank == 1:
            raise ValueError("no more data")
        step(model)
    if name == "destroys":
        dist.destroy_process_group()
    return model


CASES: dict[str, Callable[[str], object]] = {
    "dp": lambda _: trained("dp"),
    "several": lambda _: (trained("virtual"), trained("dp"), trained("virtual")),
    "closed": lambda _: closed(),
    "monitored": lambda _: monitored(),
    "balanced": lambda _: balanced(),
    "saving": saving,
    "after an error": lambda _: after_an_error(),
    "after a fork": lambda _: after_fork(),
    "ends by an error": lambda _: ends_by_an_error(),
    "ends by exit": lambda _: ends_by_exit(),
    # If replicas come out of torch when the interpreter is gone, that aborts the process.
    "left behind": lambda _: left_behind(),
}
PROCESSES = {"destroys": 2, "leaves": 2, "fails": 4}
for _name, _size in PROCESSES.items():
    for _rank in range(_size):
        CASES[f"{_name}, rank {_rank}"] = lambda folder, each=(_rank, _size, _name): in_processes(  # type: ignore[misc]
            folder, *each
        )
STATUS = {"ends by an error": 1, "ends by exit": 3, "left behind": 3}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return the exit status of each case, and its output on stdout and on stderr."""
    folder = tmp_path_factory.mktemp("exits")
    command = [sys.executable, "-W", "error", "-m", "tests.test_clean_end_exit", str(folder)]
    interface = "lo" if sys.platform == "linux" else "lo0"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=4 * LIMIT
    )
    # The forking process has ended as a real interpreter does, after a training.
    assert (done.returncode, done.stderr) == (0, "")
    statuses = json.loads(done.stdout)
    loaded = checkpoint.load(folder / "run", nn.Linear(300, 300))
    assert loaded.step == 7 and not loaded.rejected
    return {
        name: (status, *((folder / f"{name}.{end}").read_text() for end in ("out", "err")))
        for name, status in statuses.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_the_end_is_clean(ends: dict[str, tuple[int, str, str]], name: str) -> None:
    status, out, err = ends[name]
    if name == "ends by an error":
        assert err.startswith("Traceback") and err.count("Traceback") == 1
        assert "in replica 0 on device cpu" in err.splitlines()[-2]
        err = ""
    assert (status, out, err) == (STATUS.get(name, 0), "", "")


# --- in the interpreter that forks -------------------------------------------------------------


def fork(name: str, folder: str) -> int:
    """Return a process that writes to files of its own; 0 in that one."""
    process = os.fork()
    if process == 0:
        for number, suffix in ((1, "out"), (2, "err")):
            file = os.open(f"{folder}/{name}.{suffix}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, number)
            os.close(file)
        # Shows the stacks of what takes too long, and ends it.
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(LIMIT)
    return process


def main(folder: str) -> object:
    """Fork for every case, a few at a time; in a child, the case."""
    # At its end an interpreter looks for garbage in all that it has imported.
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "other threads do not survive the fork"
    running: dict[int, str] = {}
    statuses: dict[str, int] = {}
    # Those of one group have to run at the same time.
    for name in sorted(CASES, key=lambda name: "rank" in name):
        while len(running) >= max(PROCESSES.values()):
            process, status = os.wait()
            statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
        process = fork(name, folder)
        if process == 0:
            return CASES[name](folder)
        running[process] = name
    for process, name in running.items():
        statuses[name] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps(statuses))
    return trained()


if __name__ == "__main__":
    # It lives until the end of the interpreter.
    kept = main(sys.argv[1])
