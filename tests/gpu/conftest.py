"""The places of tests of GPUs: these, and the host, which shows that the tests are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dataparallel.kernels import backend
from tests.gpu.kernel_cases import quiet_backend_of
from tests.kernels.host_backend import HostBackend


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device on which kernels run."""
    device = torch.device(request.param)
    if device.type == "cpu":
        with backend.registered([HostBackend()]):
            yield device
        return
    if quiet_backend_of(device) is None:
        pytest.skip('needs CuPy: pip install ".[cuda13]"')
    yield device
    torch.cuda.synchronize(device)
