"""How many intra-op threads the caller and the replicas use around a call of CPU replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel


@pytest.fixture
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Watching(DataParallel[nn.Module]):
    """Notes the caller's number of threads while it splits and gathers."""

    seen: dict[str, int]

    def scatter(self, *args: Any) -> Any:
        self.seen["scatter"] = torch.get_num_threads()
        return super().scatter(*args)

    def gather(self, *args: Any) -> Any:
        self.seen["gather"] = torch.get_num_threads()
        return super().gather(*args)


@pytest.mark.usefixtures("_four_threads")
@pytest.mark.parametrize(
    ("devices", "around", "inside"),
    [(["cpu", "cpu"], 1, 2), (["virtual:0", "virtual:1"], 4, 4), (["cpu"], 4, 4)],
    ids=["two on the CPU", "virtual", "one on the CPU"],
)
def test_the_caller_uses_one_thread_around_several_cpu_replicas(
    devices: list[str], around: int, inside: int
) -> None:
    seen: dict[str, int] = {}

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen["forward"] = torch.get_num_threads()
            return x

    model = Watching(Notes(), devices)
    model.seen = seen
    model(torch.randn(4, 2, device=devices[0]))
    assert seen["scatter"] == around
    assert seen.get("gather", around) == around
    assert seen["forward"] == inside
    assert torch.get_num_threads() == 4
