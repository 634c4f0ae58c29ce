"""Tests that are marked ``on_worker0`` run there, among the workers that this folder shares."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tests.distributed_autograd.rpc_workers import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """Four workers."""
    with World() as started:
        yield started


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("on_worker0") is None:
        return None
    function = pyfuncitem.obj
    given = [pyfuncitem.funcargs[name] for name in inspect.signature(function).parameters]
    world: World = pyfuncitem._request.getfixturevalue("world")
    world.run(function, *given)
    return True
