"""Device lists, streams and shares of threads; the four virtual devices are the accelerators."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataparallel import devices

CPU = torch.device("cpu")
VIRTUAL = [torch.device("virtual", i) for i in range(4)]
THESE_EXIST = "the devices of this machine are: virtual:0, virtual:1, virtual:2, virtual:3, cpu"


# --- which devices there are -----------------------------------------------------------------


def test_all_accelerators_in_index_order() -> None:
    assert devices.accelerators() == tuple(VIRTUAL)
    assert devices.parse_devices(None) == tuple(VIRTUAL)


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_there_is_one_cpu_slot() -> None:
    assert devices.accelerators() == ()
    assert devices.parse_devices(None) == (CPU,)
    assert devices.parse_devices(["cpu", "cpu"]) == (CPU, CPU)


@pytest.mark.usefixtures("no_accelerator")
def test_an_index_without_accelerators_says_how_to_ask_for_the_cpu() -> None:
    with pytest.raises(ValueError, match=r'this machine has none: .* device_ids=\["cpu", "cpu"\]'):
        devices.parse_devices([0, 1])


@pytest.mark.usefixtures("no_accelerator")
def test_devices_that_exist_without_accelerators() -> None:
    with pytest.raises(ValueError, match=r"the devices of this machine are: cpu; of"):
        devices.parse_device("nonsense")


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        (0, VIRTUAL[0]),
        (3, VIRTUAL[3]),
        ("virtual:2", VIRTUAL[2]),
        (torch.device("virtual", 1), VIRTUAL[1]),
        ("cpu", CPU),
        ("cpu:0", CPU),
        (torch.device("cpu", 0), CPU),
    ],
)
def test_parse_device(spec: devices.DeviceLike, device: torch.device) -> None:
    parsed = devices.parse_device(spec)
    assert (parsed.type, parsed.index) == (device.type, device.index)


@pytest.mark.parametrize("spec", ["virtual", torch.device("virtual")])
def test_a_type_without_index_is_the_current_device(spec: devices.DeviceLike) -> None:
    assert devices.parse_device(spec) == VIRTUAL[0]
    with devices.use_device(VIRTUAL[3]):
        assert devices.parse_device(spec) == VIRTUAL[3]


def test_slots_keep_order_and_repeats() -> None:
    assert devices.parse_devices([2, "cpu", "virtual:2", torch.device("virtual:0"), 2]) == (
        VIRTUAL[2],
        CPU,
        VIRTUAL[2],
        VIRTUAL[0],
        VIRTUAL[2],
    )
    assert devices.parse_devices((1, 0)) == (VIRTUAL[1], VIRTUAL[0])


@pytest.mark.parametrize("spec", [4, -1, "virtual:4", torch.device("virtual", 9), "cuda:77"])
def test_a_device_that_does_not_exist(spec: devices.DeviceLike) -> None:
    message = f"device {spec!r} does not exist; {THESE_EXIST}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        devices.parse_device(spec)


@pytest.mark.parametrize("spec", ["nonsense", "", "virtual:-1", "virtual:x"])
def test_what_is_no_device_at_all(spec: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{re.escape(repr(spec))} is not a device: .*; {THESE_EXIST}$"
    ):
        devices.parse_device(spec)


def test_a_type_that_this_torch_lacks() -> None:
    with pytest.raises(ValueError, match=f"^'opengl:0' is not a device: .*; {THESE_EXIST}$"):
        devices.parse_device("opengl:0")


@pytest.mark.parametrize("spec", ["meta", torch.device("meta")])
def test_meta_computes_nothing(spec: devices.DeviceLike) -> None:
    with pytest.raises(ValueError, match=r"meta.* is not a device"):
        devices.parse_device(spec)


@pytest.mark.parametrize("spec", [True, 1.0, None, [0], torch.tensor(0)])
def test_what_is_not_a_device_specification(spec: Any) -> None:
    kind = type(spec).__name__
    with pytest.raises(TypeError, match=f"an int, a str or a torch.device, but got .* {kind}$"):
        devices.parse_device(spec)
    with pytest.raises(TypeError, match=f"an int, a str or a torch.device, but got .* {kind}$"):
        devices.parse_devices([0, spec])


@pytest.mark.parametrize("spec", ["cpu", 0, 2, torch.device("cpu"), 1.5])
def test_one_device_is_not_a_list(spec: Any) -> None:
    message = f"but got {spec!r}; write [{spec!r}] for one device, range(n) for n of them, "
    with pytest.raises(TypeError, match=re.escape(message)):
        devices.parse_devices(spec)


def test_a_range_or_a_repeated_device_is_a_list() -> None:
    assert devices.parse_devices(range(2)) == devices.accelerators()[:2]
    assert devices.parse_devices(["cpu"] * 2) == (torch.device("cpu"),) * 2


def test_an_empty_list() -> None:
    with pytest.raises(ValueError, match=f"device_ids is empty, .*{THESE_EXIST}$"):
        devices.parse_devices([])


@pytest.mark.parametrize(
    ("spec", "device"),
    [(None, VIRTUAL[3]), (-1, CPU), (1, VIRTUAL[1]), ("cpu", CPU), ("virtual:0", VIRTUAL[0])],
)
def test_output_device(spec: devices.DeviceLike | None, device: torch.device) -> None:
    assert devices.parse_output_device(spec, VIRTUAL[3]) == device


def test_output_device_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=f"device -2 does not exist; {THESE_EXIST}$"):
        devices.parse_output_device(-2, CPU)


# --- what differs between device types -------------------------------------------------------


def test_kinds_of_devices() -> None:
    assert not devices.is_accelerator(CPU)
    assert devices.is_accelerator(VIRTUAL[1])
    assert torch.get_device_module(VIRTUAL[1]).device_count() == 4


@pytest.mark.parametrize("index", range(4))
def test_backward_runs_in_a_thread_of_its_own_where_it_is_said_to(index: int) -> None:
    threads: dict[str, int] = {}
    for device in (CPU, VIRTUAL[index]):
        x = torch.ones(2, device=device, requires_grad=True)
        y = x * 2

        def note(_: torch.Tensor, kind: str = device.type) -> None:
            threads[kind] = threading.get_ident()

        y.register_hook(note)
        y.sum().backward()
        own_thread = threads[device.type] != threading.get_ident()
        assert own_thread == devices.is_accelerator(device)


def test_use_device_is_restored() -> None:
    assert torch.accelerator.current_device_index() == 0
    with devices.use_device(VIRTUAL[2]):
        with devices.use_device(VIRTUAL[1]), devices.use_device(CPU):
            assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_device_index() == 2
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(KeyError, match="inside"), devices.use_device(VIRTUAL[2]):
        raise KeyError("inside")
    assert torch.accelerator.current_device_index() == 0


def test_memory_allocated() -> None:
    assert devices.memory_allocated(CPU) == 0
    before = devices.memory_allocated(VIRTUAL[1])
    tensor = torch.zeros(1000, device=VIRTUAL[1])
    grown = devices.memory_allocated(VIRTUAL[1]) - before
    assert 4000 <= grown < 8000
    del tensor
    assert devices.memory_allocated(VIRTUAL[1]) == before


# --- intra-op threads ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "slots", "shares"),
    [
        (8, [CPU], (8,)),
        (8, [CPU] * 2, (4, 4)),
        (8, [CPU] * 3, (3, 3, 2)),
        (8, [CPU] * 4, (2, 2, 2, 2)),
        (8, [CPU] * 5, (2, 2, 2, 1, 1)),
        (2, [CPU] * 3, (1, 1, 1)),
        (8, [VIRTUAL[0], CPU, VIRTUAL[1], CPU, CPU], (8, 3, 8, 3, 2)),
        (8, VIRTUAL[:2], (8, 8)),
        (8, [], ()),
    ],
)
def test_intra_op_shares(threads: int, slots: list[torch.device], shares: tuple[int, ...]) -> None:
    assert devices.intra_op_shares(tuple(slots), threads) == shares


@given(threads=st.integers(1, 64), slots=st.lists(st.sampled_from([CPU, *VIRTUAL]), max_size=9))
def test_shares_use_all_threads_and_starve_no_slot(threads: int, slots: list[torch.device]) -> None:
    shares = devices.intra_op_shares(tuple(slots), threads)
    on_cpu = [share for share, device in zip(shares, slots, strict=True) if device == CPU]
    assert all(
        share == threads for share, device in zip(shares, slots, strict=True) if device != CPU
    )
    assert sum(on_cpu) == (max(threads, len(on_cpu)) if on_cpu else 0)
    assert on_cpu == sorted(on_cpu, reverse=True)
    assert not on_cpu or on_cpu[0] - on_cpu[-1] <= 1
