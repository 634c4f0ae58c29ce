"""Scripts that run in forked processes, with what torchrun tells them.

To start torchrun, and the processes that it starts, takes seconds; some tests do that too.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import runpy
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

import torch

import dataparallel.virtual
from tests import forkserver
from tests.cluster import free_port

#: Seconds until all processes have ended.
_TIMEOUT = 120.0


def launched(
    script: pathlib.Path, processes: int, folder: pathlib.Path, *options: str, virtual: bool
) -> str:
    """What a script prints in a folder, rank after rank. Its warnings are errors."""
    context, port = forkserver.context(), free_port()
    running = []
    for rank in range(processes):
        answer, theirs = context.Pipe(duplex=False)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        numbers |= {"LOCAL_WORLD_SIZE": processes}
        arguments = (theirs, numbers, str(script), str(folder), options, virtual)
        process = context.Process(target=_run, args=arguments, daemon=True)
        process.start()
        theirs.close()
        running.append((process, answer))
    try:
        told = [answer.recv() if answer.poll(_TIMEOUT) else None for _, answer in running]
    finally:
        for process, answer in running:
            process.kill()
            process.join()
            answer.close()
    failed = [error for _, error in filter(None, told) if error]
    assert not failed, "\n".join(failed)
    assert None not in told, f"the script has not ended after {_TIMEOUT:g} s"
    return "".join(printed for printed, _ in filter(None, told))


def _run(
    answer: Connection,
    numbers: dict[str, int],
    script: str,
    folder: str,
    options: tuple[str, ...],
    virtual: bool,
) -> None:
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    # On the loopback interface: the machine's name may lead elsewhere, or nowhere.
    interface = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = [script, *options]
    if virtual:
        dataparallel.virtual.enable(4)
    warnings.simplefilter("error")
    # What init_rpc does with its process group, and Lightning with torch.
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    printed = io.StringIO()
    error = ""
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except BaseException:
        error = traceback.format_exc()
    answer.send((printed.getvalue(), error))
