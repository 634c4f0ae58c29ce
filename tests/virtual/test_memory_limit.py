"""Devices that have only so much memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import set_memory_limit, strict_mode


@pytest.fixture(autouse=True)
def _no_limits() -> Iterator[None]:
    yield
    set_memory_limit(None, None)


@pytest.fixture(params=["eager", "strict"])
def used(request: pytest.FixtureRequest) -> Iterator[int]:
    """Bytes that device 1 has in tensors now, in either mode."""
    with strict_mode(request.param == "strict"):
        yield virtual.memory_allocated(1)


def test_what_does_not_fit_raises_and_changes_nothing(used: int) -> None:
    set_memory_limit("virtual:1", used + 1000)
    x = torch.ones(150, device="virtual:1")
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"^virtual:1 is out of memory\. Tried to allocate 600 bytes; \d+ are in use, and "
        rf"dataparallel\.virtual\.set_memory_limit allows {used + 1000}\.$",
    ):
        x * 2
    assert virtual.memory_allocated(1) == used + 600
    assert x.sum().item() == 150


def test_memory_that_is_free_again_can_be_used(used: int) -> None:
    set_memory_limit(1, used + 1000)
    for _ in range(5):
        x = torch.ones(200, device="virtual:1")
        del x
    assert torch.ones(240, device="virtual:1").sum().item() == 240


def test_a_copy_to_the_device_counts() -> None:
    set_memory_limit("virtual:1", 100)
    with pytest.raises(torch.OutOfMemoryError, match="virtual:1 is out of memory"):
        torch.ones(100).to("virtual:1")


def test_the_other_devices_have_no_limit() -> None:
    set_memory_limit("virtual:1", 0)
    assert torch.ones(1000, device="virtual:2").sum().item() == 1000


def test_all_devices_can_be_limited_at_once() -> None:
    set_memory_limit(None, 0)
    for i in range(4):
        with pytest.raises(torch.OutOfMemoryError, match=f"virtual:{i} is out of memory"):
            torch.ones(1000, device=f"virtual:{i}")
    set_memory_limit(None, None)
    assert torch.ones(1000, device="virtual:3").sum().item() == 1000


def test_backward_can_run_out_of_memory_too() -> None:
    x = torch.ones(1000, device="virtual:1", requires_grad=True)
    y = (x * 2).sum()
    set_memory_limit("virtual:1", virtual.memory_allocated(1) + 100)
    with pytest.raises(torch.OutOfMemoryError, match="virtual:1 is out of memory"):
        y.backward()
    set_memory_limit("virtual:1", None)
    assert x.grad is None


def test_free_and_total_memory_are_those_of_the_limit(used: int) -> None:
    set_memory_limit("virtual:1", used + 1000)
    assert virtual.mem_get_info(1) == (1000, used + 1000)
    assert virtual.get_device_properties(1).total_memory == used + 1000
    set_memory_limit("virtual:1", None)
    assert virtual.mem_get_info(1)[1] > used + 1000


@pytest.mark.parametrize(
    ("device", "limit", "error", "message"),
    [
        ("cpu", 10, ValueError, "expected a virtual device, got cpu"),
        ("virtual:9", 10, ValueError, "there is no device virtual:9: 4 are enabled"),
        ("virtual:1", -1, ValueError, "at least 0, or None, but got -1"),
        ("virtual:1", 1.5, TypeError, "a number of bytes or None, but got 1.5"),
    ],
)
def test_wrong_arguments(device: str, limit: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        set_memory_limit(device, limit)
