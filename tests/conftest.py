"""Every test process has four virtual devices, so several accelerators are tested anywhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

import dataparallel.virtual
from tests.cluster import Cluster

dataparallel.virtual.enable(4)

# A shell that starts a process in the background lets it ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only hardware can show."""
    gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; this machine has none"))
        marker = item.get_closest_marker("multi_gpu")
        if marker and gpus < marker.args[0]:
            reason = f"needs {marker.args[0]} NVIDIA GPUs; this machine has {gpus}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", "virtual"])
def slots(request: pytest.FixtureRequest) -> list[str]:
    """Four device slots: four replicas on the CPU, or four virtual devices."""
    if request.param == "cpu":
        return ["cpu"] * 4
    return [f"virtual:{i}" for i in range(4)]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Processes that run functions of a test: ``cluster.run(function, world_size, *args)``."""
    processes = Cluster()
    yield processes
    processes.close()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test starts from the same seed and leaves the thread settings as they were."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads, "the test changed the number of intra-op threads"
