"""The check of copies between devices: a copy that changes bytes is named before anybody trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dataparallel as dp
from dataparallel import devices
from dataparallel.comm import copy_check
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
    """Let virtual devices have links that may fail, of which none was checked yet."""
    monkeypatch.setattr(devices, "has_hardware_links", devices.is_accelerator)
    monkeypatch.setattr(copy_check, "_sound", set())
    with contextlib.suppress(KeyError):
        monkeypatch.delenv(copy_check.SWITCH)
    yield


@WRAPPERS
@pytest.mark.usefixtures("hardware")
def test_a_wrapper_refuses_devices_whose_copies_change_bytes(wrapper: Any) -> None:
    module = nn.Linear(2, 2)
    told = (
        r"(?s)virtual:2 -> virtual:1: 1 of 262,144 words of 4 bytes differ; word 9 left as 0x\w+ "
        r"and came as 0x\w+\n.*IOMMU.*ACS.*dataparallel doctor.*DATAPARALLEL_CHECK_COPIES=0"
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
def test_copies_are_checked_once_in_a_process() -> None:
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
def test_an_environment_variable_leaves_the_check_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(copy_check.SWITCH, "0")
    with _BrokenLink(0, 1) as seen:
        dp.DataParallel(nn.Linear(2, 2), DEVICES)
    assert not [copy for copy in seen.copies if copy[2] == 2**20]


def test_devices_without_links_are_not_checked() -> None:
    with _BrokenLink(0, 1) as seen:
        dp.DataParallel(nn.Linear(2, 2), DEVICES)
        dp.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    assert not [copy for copy in seen.copies if copy[2] == 2**20]


def test_doctor_names_the_pairs_whose_copies_change_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        mock.patch.object(dp, "accelerators", return_value=tuple(DEVICES)),
        mock.patch("dataparallel.tools.doctor.accelerators._COPY_BYTES", 2**20),
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
