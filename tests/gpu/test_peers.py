"""Kernels that read the memory of other devices."""

from __future__ import annotations

import pytest
import torch

from dataparallel import comm
from dataparallel.comm.local import can_add
from dataparallel.kernels.backend import Backend, registered
from dataparallel.kernels.dtypes import SUFFIXES
from tests.cluster import Cluster
from tests.gpu.backends import quiet_backend_of
from tests.kernels.virtual_backend import VirtualBackend

DTYPES = tuple(SUFFIXES)


def _late(kind: str, value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that its device has not computed yet."""
    tensor = torch.zeros(100_003, dtype=dtype, device=device)
    if kind == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(20_000_000)
    return tensor.add_(value)


def _add(kind: str) -> None:
    devices = [torch.device(kind, index) for index in range(2)]
    for dtype in DTYPES:
        for destination in devices:
            terms = [_late(kind, i + 1, dtype, device) for i, device in enumerate(devices * 2)]
            assert can_add(terms, destination)
            total = comm.reduce_add(terms, destination)
            # Those who own the terms may change them at once.
            for term in terms:
                term.fill_(9)
            assert total.device == destination
            assert total.unique().tolist() == [10]
            terms = [torch.arange(-50, 51).to(dtype).to(device) / 1 for device in devices * 2]
            terms = [(term * (i + 1)).to(dtype) for i, term in enumerate(terms)]
            mine = comm.reduce_add(terms, destination)
            assert torch.equal(mine.cpu(), comm.reduce_add([term.cpu() for term in terms]))


def _on_gpus(rank: int, world_size: int) -> str:
    device = torch.device("cuda", 0)
    backend = quiet_backend_of(device)
    if backend is None:
        return 'needs CuPy: pip install "dataparallel[cuda13]"'
    if not backend.can_read(device, torch.device("cuda", 1)):
        return "needs GPUs that can read each other's memory"
    _add("cuda")
    return ""


@pytest.mark.multi_gpu(2)
def test_sums_of_terms_on_several_gpus(cluster: Cluster) -> None:
    (missing,) = cluster.run(_on_gpus, 1, init_group=False, timeout=200)
    if missing:
        pytest.skip(missing)


def test_sums_of_terms_on_several_virtual_devices() -> None:
    backends: list[Backend] = [VirtualBackend()]
    with registered(backends):
        _add("virtual")
