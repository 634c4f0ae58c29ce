"""Scripts that run in processes of their own, with what torchrun tells them.

To start torchrun, and the processes that it starts, takes seconds; some tests do that too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import runpy
import sys
import warnings
from unittest import mock

import torch.distributed.rpc as torch_rpc

from tests.cluster import Cluster, free_port


def launched(
    script: pathlib.Path, processes: int, folder: pathlib.Path, *options: str, virtual: bool
) -> str:
    """Return a script's output in a folder, rank after rank. Its warnings are errors."""
    with contextlib.closing(Cluster()) as cluster:
        arguments = free_port(), str(script), str(folder), options
        texts = cluster.run(
            _run, processes, *arguments, timeout=120.0, init_group=False, virtual=virtual
        )
    return "".join(texts)


def _run(
    rank: int, world_size: int, port: int, script: str, folder: str, options: tuple[str, ...]
) -> str:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    numbers |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    os.chdir(folder)
    sys.argv = [script, *options]
    # The first is from init_rpc and its process group, the others from Lightning and torch.
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    printed = io.StringIO()
    # With other transports a worker looks for messages all the time, on the cores that others need.
    only_sockets = torch_rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    init_rpc = functools.partial(torch_rpc.init_rpc, rpc_backend_options=only_sockets)
    with (
        mock.patch.object(torch_rpc, "init_rpc", init_rpc),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
