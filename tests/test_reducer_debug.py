"""Debug messages of a reducer: which parameters they name, and the plan of the buckets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from dataparallel.comm.bucket_plan import plan_buckets
from dataparallel.reducer import debug


@pytest.fixture
def kept_level() -> Iterator[None]:
    before = get_debug_level()
    yield
    set_debug_level(before)


PARAMETERS = [f"layer{i}.weight" for i in range(14)]


@pytest.mark.usefixtures("kept_level")
def test_messages_name_three_parameters_or_all() -> None:
    set_debug_level(DebugLevel.OFF)
    assert debug.level() == "OFF"
    assert debug.describe_parameters([3, 1], PARAMETERS) == "3 (layer3.weight), 1 (layer1.weight)"
    assert debug.describe_names(PARAMETERS[:3]) == ", ".join(PARAMETERS[:3])
    text = debug.describe_parameters(range(14), PARAMETERS)
    assert text.startswith("0 (layer0.weight), 1 (layer1.weight)")
    assert text.endswith("2 (layer2.weight) and 11 more (TORCH_DISTRIBUTED_DEBUG=DETAIL names all)")
    set_debug_level(DebugLevel.DETAIL)
    assert debug.describe_names(PARAMETERS) == ", ".join(PARAMETERS)


@pytest.mark.usefixtures("kept_level")
def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tensors = [torch.zeros(300, 300), torch.zeros(10), torch.zeros(1024, 512)]
    plan = plan_buckets(tensors, first_bytes=2**10, cap_bytes=2**20)
    names = ["a", "b", "c"]
    with caplog.at_level(logging.INFO, "dataparallel"):
        set_debug_level(DebugLevel.OFF)
        debug.log_plan(plan, names, "as planned")
        assert not caplog.messages
        set_debug_level(DebugLevel.INFO)
        debug.log_plan(plan, names, "as planned")
    assert caplog.messages == [
        "3 parameters, 2.3 MiB, in 2 buckets as planned",
        "bucket 0, 2.0 MiB: 1 (b), 2 (c)",
        "bucket 1, 351.6 KiB: 0 (a)",
    ]
