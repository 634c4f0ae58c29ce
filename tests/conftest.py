"""Every test process has four virtual devices, so several accelerators are tested anywhere."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

import dataparallel.virtual
from dataparallel import torch_internals
from dataparallel.tools.bench import harness
from tests import forkserver
from tests.cluster import Cluster

# The options --faults, --all-cases and --renew-golden, and fixtures.
pytest_plugins = ["tests.faults.harness", "tests.monitor.golden", "tests.pairs"]

# Uses of memory that no wait orders are errors: in the processes that tests start, too.
os.environ.setdefault("DATAPARALLEL_VIRTUAL_RACES", "1")

# Tests marked gpu need no virtual devices, and run on machines that cannot compile them, too.
if os.environ.get("DATAPARALLEL_TESTS_WITHOUT_VIRTUAL_DEVICES") != "1":
    dataparallel.virtual.enable(4)

# torch asks the name server for the name of every address that a TCPStore meets, the loopback
# interface's too. An answer that is lost takes five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A shell that starts a process in the background lets it ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only hardware can show; give time to those that compile."""
    gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; this machine has none"))
        # The first of them compiles an extension; on a busy machine that takes minutes.
        if item.path.parent.name in ("device_only", "distributed_autograd"):
            item.add_marker(pytest.mark.timeout(900))
        marker = item.get_closest_marker("multi_gpu")
        if marker and gpus < marker.args[0]:
            reason = f"needs {marker.args[0]} NVIDIA GPUs; this machine has {gpus}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Let the collections of garbage, which many tests ask for, pass over what is there to stay.

    Those are torch and the tests, and later what tests have imported and compiled.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", "virtual"])
def slots(request: pytest.FixtureRequest) -> list[str]:
    """Four device slots: four replicas on the CPU, or four virtual devices."""
    if request.param == "cpu":
        return ["cpu"] * 4
    return [f"virtual:{i}" for i in range(4)]


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards as in a process that compiles nothing; those of others wait at their start."""
    monkeypatch.setattr(torch_internals, "is_anything_compiled", lambda: False)


@pytest.fixture
def accelerate_anew() -> Iterator[None]:
    """Settings of accelerate, which are the process's, are those of the test alone."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(params=["torch for the CPU", "torch for CUDA without a GPU"])
def no_accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without accelerators, whatever torch was built for."""
    built_for = torch.device("cuda") if "CUDA" in request.param else None

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else built_for

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Processes that run functions of a test: ``cluster.run(function, world_size, *args)``."""
    processes = Cluster(most_loops=12)
    yield processes
    processes.close()


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of benchmarks start in a moment. Each benchmark has a run without this, too."""
    monkeypatch.setattr(harness, "_context", forkserver.context())


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test starts from the same seed and leaves the thread settings as they were."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads, "the test changed the number of intra-op threads"


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    """Replicas run in turn where something was compiled; that must not depend on earlier tests."""
    yield
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if getattr(compiler, "cached_backends", None):
        torch._dynamo.reset()
