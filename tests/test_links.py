"""The test of links between devices: a copy that changes bytes is named before anybody trains."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dataparallel as dp
from dataparallel import devices
from dataparallel.comm import links
from dataparallel.tools import cli
from tests.models import WRAPPERS

DEVICES = [torch.device("virtual", index) for index in range(3)]


class _BrokenLink(TorchDispatchMode):
    """A link from one device to another one, on which copies lose a bit of the tenth word."""

    def __init__(self, source: int, destination: int) -> None:
        super().__init__()
        self._route = DEVICES[source], DEVICES[destination]
        self.copies: list[tuple[torch.device, torch.device, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self.copies.append((args[1].device, args[0].device, args[1].nbytes))
            if self._route == (args[1].device, args[0].device):
                args[0][9] ^= 4
        return result


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let virtual devices have links that may fail, of which none was tested yet."""
    monkeypatch.setattr(devices, "has_hardware_links", devices.is_accelerator)
    monkeypatch.setattr(links, "_sound", set())
    with contextlib.suppress(KeyError):
        monkeypatch.delenv(links.SWITCH)
    yield


@WRAPPERS
@pytest.mark.usefixtures("hardware")
def test_a_wrapper_refuses_devices_whose_copies_change_bytes(wrapper: Any) -> None:
    module = nn.Linear(2, 2)
    told = (
        r"(?s)virtual:2 -> virtual:1: 1 of 262,144 words of 4 bytes differ; word 9 left as 0x\w+ "
        r"and came as 0x\w+\n.*IOMMU.*ACS.*dataparallel doctor.*DATAPARALLEL_CHECK_LINKS=0"
    )
    for _ in range(2):
        with _BrokenLink(2, 1), pytest.raises(RuntimeError, match=told):
            wrapper(module, DEVICES)
    assert module.weight.device.type == "cpu", "a refused module has moved"
    # Without the broken link, and once the link works.
    with _BrokenLink(2, 1):
        wrapper(module, DEVICES[:2])
    wrapper(module, DEVICES)


@pytest.mark.usefixtures("hardware")
def test_a_link_is_tested_once_in_a_process() -> None:
    with _BrokenLink(0, 0) as seen:
        dp.DataParallel(nn.Linear(2, 2), DEVICES[:2])
        assert [copy for copy in seen.copies if copy[2] == 2**20] == [
            (DEVICES[0], DEVICES[1], 2**20),
            (DEVICES[1], DEVICES[0], 2**20),
        ]
        seen.copies.clear()
        dp.DataParallel(nn.Linear(2, 2), [*DEVICES[:2], *DEVICES[:2]])
        assert not [copy for copy in seen.copies if copy[2] == 2**20]
        dp.DataParallel(nn.Linear(2, 2), DEVICES)
        assert len([copy for copy in seen.copies if copy[2] == 2**20]) == 4


@pytest.mark.usefixtures("hardware")
def test_an_environment_variable_leaves_the_test_of_links_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(links.SWITCH, "0")
    with _BrokenLink(0, 1) as seen:
        dp.DataParallel(nn.Linear(2, 2), DEVICES)
    assert not [copy for copy in seen.copies if copy[2] == 2**20]


def test_devices_without_links_are_not_tested() -> None:
    with _BrokenLink(0, 1) as seen:
        dp.DataParallel(nn.Linear(2, 2), DEVICES)
        dp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    assert not [copy for copy in seen.copies if copy[2] == 2**20]


def test_doctor_names_the_pairs_whose_copies_change_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        mock.patch.object(dp, "accelerators", return_value=tuple(DEVICES)),
        mock.patch("dataparallel.tools.doctor.accelerators._LINK_BYTES", 2**20),
    ):
        cli.main(["doctor"])
        assert "all at once: all 6 pairs are sound" in capsys.readouterr().out
        with _BrokenLink(1, 2):
            cli.main(["doctor"])
    out = capsys.readouterr().out
    matrix = [
        "0     1     2",
        "0      .    ok    ok",
        "1     ok     . WRONG",
        "2     ok    ok     .",
    ]
    shown = [line.strip() for line in out.splitlines()]
    assert [line for line in matrix if line not in shown] == []
    for way in ("alone", "all at once"):
        assert f"{way}: virtual:1 -> virtual:2: 1 of 262,144 words" in out
    assert "do: Often the machine's IOMMU or PCIe ACS" in out


# --- devices that are not alike, or of no use ------------------------------------------------


def _properties(**attributes: list[float]) -> Any:
    """Give each virtual device properties of its own."""

    def get(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"GPU {device.index}", **{k: v[device.index] for k, v in attributes.items()}
        )

    return mock.patch.object(torch.get_device_module("virtual"), "get_device_properties", get)


@pytest.mark.parametrize(
    ("memory", "processors", "told"),
    [
        ([24, 24, 24], [80, 80, 80], ""),
        ([24, 18, 24], [80, 60, 80], ""),
        ([24, 24, 17], [80, 80, 80], "virtual:2 has 17 GiB of memory, virtual:0 has 24."),
        ([24, 24, 24], [59, 80, 80], "virtual:0 has 59 multiprocessors, virtual:1 has 80."),
    ],
)
def test_devices_that_differ_by_a_quarter_are_named(
    memory: list[float], processors: list[float], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [size * 2**30 for size in memory]
    with _properties(total_memory=sizes, multi_processor_count=processors):
        with caplog.at_level(logging.WARNING, "dataparallel"):
            dp.DataParallel(nn.Linear(2, 2), DEVICES)
        dp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    assert told in caplog.text
    assert bool(caplog.records) == bool(told)


def test_a_device_without_streams_is_refused() -> None:
    with mock.patch.object(torch.mps, "device_count", return_value=1):
        for slots in (["mps"], ["mps", "mps"], [torch.device("mps", 0)]):
            with pytest.raises(ValueError, match=r"replicas cannot be on .*mps.* no streams"):
                dp.DataParallel(nn.Linear(2, 2), slots)
        with mock.patch.object(
            torch.accelerator, "current_accelerator", return_value=torch.device("mps")
        ):
            assert devices.accelerators() == ()
            assert devices.parse_devices(None) == (torch.device("cpu"),)


@pytest.mark.parametrize(
    ("capabilities", "built_for", "taken"),
    [
        ([(8, 0), (9, 0)], "sm_80 sm_90", [0, 1]),
        ([(8, 6), (8, 9)], "sm_80", [0, 1]),
        ([(8, 0), (7, 5)], "sm_80 sm_90", [0]),
        ([(8, 6), (8, 0)], "sm_86", [0]),
        ([(8, 0), (12, 0)], "sm_80 sm_90", [0]),
        ([(8, 0), (12, 0)], "sm_80 compute_90", [0, 1]),
        ([(9, 0), (10, 0)], "sm_90a compute_90a", [0]),
        ([(10, 3), (10, 0), (6, 1)], "sm_100", [0, 1]),
        # Torch's own errors tell more.
        ([(5, 0), (5, 0)], "sm_80", [0, 1]),
        ([(5, 0), (8, 0)], "", [0, 1]),
    ],
)
def test_all_devices_are_those_that_torch_has_kernels_for(
    capabilities: list[tuple[int, int]],
    built_for: str,
    taken: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = tuple(torch.device("cuda", index) for index in range(len(capabilities)))
    with (
        mock.patch.object(devices, "accelerators", return_value=there),
        mock.patch.object(torch.cuda, "get_device_capability", lambda one: capabilities[one.index]),
        mock.patch.object(torch.cuda, "get_arch_list", built_for.split),
        mock.patch.object(
            torch.cuda,
            "get_device_properties",
            lambda one: SimpleNamespace(name=f"GPU {one.index}"),
        ),
        caplog.at_level(logging.WARNING, "dataparallel"),
    ):
        for cached in (devices.lacks_kernels, devices._tell_of_lacking):
            cached.cache_clear()
        try:
            for _ in range(2):
                assert [device.index for device in devices.parse_devices(None)] == taken
        finally:
            devices.lacks_kernels.cache_clear()
    left_out = [f"cuda:{i} (GPU {i})" for i in range(len(there)) if i not in taken]
    assert len(caplog.records) == bool(left_out)
    assert all(name in caplog.text for name in left_out)
