"""Readings of virtual devices: of this process, and of a run that tells about itself."""

from __future__ import annotations

import pytest
import torch

from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import Phase
from dataparallel.tools.monitor.sources.virtual import ComputingShare, VirtualSource
from tests.monitor.made_up_samples import run_state


def test_the_devices_of_this_process() -> None:
    before = VirtualSource().read()
    kept = torch.zeros(1 << 20, device="virtual:2")
    after = VirtualSource().read()
    assert [device.device for device in after.devices] == [f"virtual:{i}" for i in range(4)]
    used = [
        (now.value("memory_used") or 0.0) - (then.value("memory_used") or 0.0)
        for now, then in zip(after.devices, before.devices, strict=True)
    ]
    assert used == [0.0, 0.0, float(kept.nbytes), 0.0]
    for device in after.devices:
        total = device.value("memory_total")
        assert total is not None and total >= (device.value("memory_free") or 0.0) > 0
        assert device.value("utilization") is None
    assert after.processes == ()


def test_the_devices_of_a_run() -> None:
    devices = ("virtual:10", "virtual:9", "cpu", "virtual:9")
    state = run_state(
        {"forward": 1.0, "idle": 3.0},
        {"backward": 1.0, "idle": 3.0},
        {"forward": 4.0},
        {"optimizer": 2.0, "scatter": 2.0},
        devices=devices,
        memory=(5, 7, 0, 7),
    )
    reading = VirtualSource(lambda: state, pid=4711).read()
    # Replicas that share a device: their shares add up, its memory is the same.
    assert [
        (d.device, d.value("utilization"), d.value("memory_used")) for d in reading.devices
    ] == [
        ("virtual:9", 0.75, 7.0),
        ("virtual:10", 0.25, 5.0),
    ]
    assert [d.value("memory_total") for d in reading.devices] == [None, None]
    assert [(p.device, p.pid, p.memory) for p in reading.processes] == [
        ("virtual:9", 4711, 7.0),
        ("virtual:10", 4711, 5.0),
    ]


def test_a_run_that_is_gone_has_no_devices() -> None:
    assert VirtualSource(lambda: None, pid=4711).read().devices == ()


def one(
    totals: dict[Phase, float], time: float, phase: Phase = "forward", since: float = 0.0
) -> RunState:
    return run_state(totals, devices=("virtual:0",), time=time, now=((phase, since),))


def test_the_share_is_that_of_the_steps_since_the_last_reading() -> None:
    share = ComputingShare()
    assert share.read(one({}, 0.0), [0]) is None
    first: dict[Phase, float] = {"forward": 1.0, "idle": 1.0}
    assert share.read(one(first, 2.0), [0]) == pytest.approx(0.5)
    # Nothing but waiting since then.
    second: dict[Phase, float] = {"forward": 1.0, "idle": 2.0, "input": 3.0}
    assert share.read(one(second, 6.0), [0]) == pytest.approx(0.0)
    third: dict[Phase, float] = {"forward": 1.0, "backward": 3.0, "idle": 3.0, "input": 3.0}
    assert share.read(one(third, 10.0), [0]) == pytest.approx(0.75)


def test_a_step_that_does_not_end_counts_as_what_it_does() -> None:
    share = ComputingShare()
    totals: dict[Phase, float] = {"forward": 1.0, "idle": 1.0}
    share.read(one(totals, 2.0), [0])
    # It has changed its phase meanwhile: nothing better is known than what was.
    assert share.read(one(totals, 3.0, "backward", 0.5), [0]) == pytest.approx(0.5)
    assert share.read(one(totals, 4.0, "backward", 1.5), [0]) == 1.0
    assert share.read(one(totals, 5.0, "reduce across processes", 1.0), [0]) == 0.0


def test_a_run_that_begins_anew_is_no_negative_share() -> None:
    share = ComputingShare()
    share.read(one({"forward": 100.0}, 100.0), [0])
    assert share.read(one({"forward": 1.0, "idle": 3.0}, 104.0), [0]) == pytest.approx(0.25)
