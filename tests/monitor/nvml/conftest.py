"""NVIDIA's library for these tests: a stand-in, loaded by the real nvidia-ml-py."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from dataparallel.tools.monitor.sources.nvml import NvmlSource
from tests.monitor.nvml.stub import Stub, compile_stub


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The clock by which sources measure rates."""
    return Clock()


@pytest.fixture(scope="session")
def libraries(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], pathlib.Path]:
    """Compiles variants of the stand-in, each once: "", "OLD_DRIVER", "NEW_DRIVER"."""
    known: dict[str, pathlib.Path] = {}

    def library(variant: str) -> pathlib.Path:
        if variant not in known:
            options = [f"-D{variant}"] if variant else []
            known[variant] = compile_stub(tmp_path_factory.mktemp("nvml"), *options)
        return known[variant]

    return library


@pytest.fixture
def stub(
    request: pytest.FixtureRequest,
    libraries: Callable[[str], pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Stub]:
    """The library that nvidia-ml-py loads, with one device; indirect parameters name a variant."""
    one = Stub(libraries(getattr(request, "param", "")))
    one.script("devices 1")

    def load(name: str, *args: Any, **options: Any) -> ctypes.CDLL:
        assert name == "libnvidia-ml.so.1"
        return one.library

    monkeypatch.setattr(pynvml, "CDLL", load)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield one
    one.library.stub_reset()


@pytest.fixture
def source(stub: Stub, clock: Clock) -> Iterator[NvmlSource]:
    """A source that reads the stand-in."""
    one = NvmlSource(environment={}, clock=clock, sees_host=True)
    yield one
    one.close()
    assert stub.opened == 0
