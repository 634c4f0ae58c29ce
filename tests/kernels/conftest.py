"""Kernels on the host, for every test that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataparallel.kernels import backend
from tests.kernels.host_backend import HostBackend


@pytest.fixture
def host_kernels() -> Iterator[HostBackend]:
    """Within the test, CPU tensors are served by the kernels, compiled for the host."""
    host = HostBackend()
    with backend.registered([host]):
        yield host


@pytest.fixture(params=["reference", "kernel"])
def either(request: pytest.FixtureRequest) -> str:
    """The test runs twice: without kernels, and with those of the host."""
    if request.param == "kernel":
        request.getfixturevalue("host_kernels")
    return str(request.param)
