"""What the package offers, and that it is what code written for torch.nn.parallel calls."""

from __future__ import annotations

import inspect
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import resources
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.parallel as theirs
from torch.nn.parallel import comm as their_comm
from torch.nn.parallel.scatter_gather import scatter_kwargs as their_scatter_kwargs

import dataparallel
from dataparallel import checkpoint, comm, comm_hooks, distributed_autograd, kernels, virtual

EXPORTED = {
    dataparallel: [
        "DataParallel",
        "DistributedDataParallel",
        "MixedPrecision",
        "Replica",
        "Replicate",
        "ShardedOptimizer",
        "accelerators",
        "balance",
        "checkpoint",
        "collectives",
        "comm",
        "compute_bucket_assignment_by_size",
        "current_replica",
        "data_parallel",
        "distributed_autograd",
        "gather",
        "init_process_group",
        "monitor",
        "parallel_apply",
        "replicate",
        "scatter",
        "scatter_kwargs",
        "telling_failures",
        "virtual",
    ],
    checkpoint: [
        "CheckpointError",
        "GenerationInfo",
        "Loaded",
        "NoCheckpoint",
        "ResumableSampler",
        "Saving",
        "close",
        "export",
        "generations",
        "load",
        "save",
    ],
    comm: [
        "broadcast",
        "broadcast_coalesced",
        "gather",
        "reduce_add",
        "reduce_add_coalesced",
        "scatter",
    ],
    comm_hooks: [
        "allreduce_hook",
        "bf16_compress_hook",
        "fp16_compress_hook",
        "noop_hook",
    ],
    distributed_autograd: [
        "DistributedOptimizer",
        "RRef",
        "WorkerError",
        "backward",
        "context",
        "debug_info",
        "get_gradients",
        "remote",
        "rpc_async",
        "rpc_sync",
    ],
    kernels: [
        "BucketLayout",
        "fingerprint",
        "flatten",
        "reduce_add",
        "unflatten",
        "warm_up",
    ],
    virtual: [
        "counters",
        "device_count",
        "enable",
        "enable_from_environment",
        "is_enabled",
        "is_strict",
        "pending",
        "reset_counters",
        "set_memory_limit",
        "set_strict",
        "strict_mode",
    ],
}

#: What the wrapper adds to the methods of torch.nn.DataParallel.
OWN_METHODS = ["add_replica", "close", "drop_replica", "loss"]


@pytest.mark.parametrize("module", EXPORTED, ids=lambda module: module.__name__)
def test_exported_names(module: ModuleType) -> None:
    assert module.__all__ == EXPORTED[module]
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("module", EXPORTED, ids=lambda module: module.__name__)
def test_what_is_not_exported_is_a_part_of_the_package(module: ModuleType) -> None:
    """No helper, and nothing of torch, can be taken for a part of the interface."""
    others = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in module.__all__ and not inspect.ismodule(value)
    ]
    assert not others


def test_methods_of_the_wrapper() -> None:
    def public(owner: type) -> set[str]:
        return {name for name in vars(owner) if not name.startswith("_")}

    known = {name for ancestor in theirs.DataParallel.__mro__ for name in public(ancestor)}
    assert sorted(public(dataparallel.DataParallel) - known) == OWN_METHODS


# --- the same calls as in torch --------------------------------------------------------------

FUNCTIONS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (theirs.data_parallel, dataparallel.data_parallel),
    (theirs.parallel_apply, dataparallel.parallel_apply),
    (theirs.replicate, dataparallel.replicate),
    (theirs.scatter, dataparallel.scatter),
    (their_scatter_kwargs, dataparallel.scatter_kwargs),
    (theirs.gather, dataparallel.gather),
    *((getattr(their_comm, name), getattr(comm, name)) for name in comm.__all__),
    *(
        (getattr(theirs.DataParallel, name), getattr(dataparallel.DataParallel, name))
        for name in ("__init__", "forward", "scatter", "replicate", "parallel_apply", "gather")
    ),
    *(
        (getattr(torch.nn.Module, name), getattr(dataparallel.DataParallel, name))
        for name in ("named_parameters", "named_buffers")
    ),
]


def test_every_name_of_torch_that_is_about_data_parallel_is_here() -> None:
    assert not set(theirs.__all__) - set(dataparallel.__all__)
    public = {
        name
        for name, value in vars(their_comm).items()
        if inspect.isfunction(value) and value.__module__ == their_comm.__name__
    }
    assert public == set(comm.__all__)


@pytest.mark.parametrize(("torchs", "ours"), FUNCTIONS, ids=lambda f: f.__qualname__)
def test_every_call_that_torch_takes_is_taken(
    torchs: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    """Torch's parameters come first, with their names, kinds and defaults; others are optional."""
    expected = list(inspect.signature(torchs).parameters.values())
    if ours.__name__ in comm.__all__ and torchs is getattr(their_comm, ours.__name__):
        expected = [p for p in expected if p.name not in ("streams", "out")]
    got = list(inspect.signature(ours).parameters.values())
    assert [(p.name, p.kind, p.default) for p in got[: len(expected)]] == [
        (p.name, p.kind, p.default) for p in expected
    ]
    for extra in got[len(expected) :]:
        assert extra.kind is inspect.Parameter.KEYWORD_ONLY, extra
        assert extra.default is not inspect.Parameter.empty, extra


# --- type information ------------------------------------------------------------------------


def test_the_package_says_that_it_has_types() -> None:
    assert resources.files("dataparallel").joinpath("py.typed").is_file()


def test_public_functions_are_annotated() -> None:
    for _, ours in FUNCTIONS:
        signature = inspect.signature(ours)
        bare = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is inspect.Parameter.empty and p.name != "self"
        ]
        assert not bare, f"{ours.__qualname__}: {bare}"
        assert signature.return_annotation is not inspect.Signature.empty, ours.__qualname__


USE = """
    import torch
    from torch import nn

    import dataparallel

    model = dataparallel.DataParallel(nn.Linear(3, 2), ["cpu", 0, torch.device("cpu")])
    layer: nn.Linear = model.module
    width: int = model.module.in_features
    replicas: list[nn.Linear] = dataparallel.replicate(nn.Linear(3, 2), ["cpu"])
    x = torch.ones(4, 3)
    loss: torch.Tensor = model.loss(nn.MSELoss(), x, x, weight="samples")
    torchs: "nn.DataParallel[nn.Linear]" = model
    here: dataparallel.Replica | None = dataparallel.current_replica()
"""

MISUSE = {
    "model: dataparallel.DataParallel[nn.Conv2d] = dataparallel.DataParallel(nn.Linear(3, 2))": (
        "type"
    ),
    'dataparallel.DataParallel(nn.Linear(3, 2), buffers="average")': "buffers",
    'dataparallel.DataParallel(nn.Linear(3, 2), scalars="median")': "scalars",
    "dataparallel.DataParallel(nn.Linear(3, 2), [1.5])": "List item 0",
    "dataparallel.virtual.enable('four')": "enable",
}


@pytest.mark.slow
def test_types_as_a_user_sees_them(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    head = "import dataparallel\nfrom torch import nn\n"
    (tmp_path / "use.py").write_text(textwrap.dedent(USE))
    (tmp_path / "misuse.py").write_text(head + "\n".join(MISUSE) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--explicit-package-bases",
        "use.py",
        "misuse.py",
    ]
    root = pathlib.Path(dataparallel.__file__).parents[1]
    done = subprocess.run(
        # With the cache of `make check`, in which torch is.
        [
            *command,
            "--config-file=",
            "--python-version=3.10",
            f"--cache-dir={root / '.mypy_cache'}",
        ],
        cwd=tmp_path,
        # A link there leads to the kernels; in an installed package they are where they belong.
        env={"MYPYPATH": f"{root}:{root / 'typings'}"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    complaints = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not done.stderr
    assert not [line for line in complaints if not line.startswith("misuse.py")]
    for number, (line, about) in enumerate(MISUSE.items(), start=3):
        assert [c for c in complaints if c.startswith(f"misuse.py:{number}:") and about in c], line


def test_the_version_is_that_of_the_project() -> None:
    project = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{dataparallel.__version__}"\n' in project


def test_names_that_threads_ask_for_first_at_the_same_time() -> None:
    """Each thread imports another end of modules that need each other."""
    code = """
        import importlib, sys, threading
        import torch
        import dataparallel
        sys.setswitchinterval(1e-5)
        calls = [lambda n=name: getattr(dataparallel, n) for name in dataparallel.__all__]
        others = "optim.sharded", "collectives", "replicas.values", "parallel.buffers"
        calls += [lambda n=n: importlib.import_module("dataparallel." + n) for n in others]
        barrier, got = threading.Barrier(len(calls)), []
        def ask(call):
            barrier.wait()
            got.append(call())
        threads = [threading.Thread(target=ask, args=[call], daemon=True) for call in calls]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
        assert len(got) == len(calls)
    """
    for _ in range(3):
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
