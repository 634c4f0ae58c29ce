"""The workers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed_autograd.rpc_workers import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """Four workers."""
    started = World()
    yield started
    started.close()
