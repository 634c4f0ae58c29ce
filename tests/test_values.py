"""When a copy is made anew, and when not."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from dataparallel import comm
from dataparallel.replicas.values import Values

CPU = torch.device("cpu")
DEVICES = [torch.device("virtual", i) for i in range(3)]


def make() -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0, device=DEVICES[0]).reshape(2, 3))


class DataOptimizer(torch.optim.Optimizer):
    """Writes through ``.data``, which bumps no version counter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)


def replace_storage(parameter: nn.Parameter) -> None:
    parameter.data = torch.full((2, 3), 7.0, device=parameter.device)


def write_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def write_one_element(parameter: nn.Parameter) -> None:
    parameter.data[1, 2] += 1e-6


def flip_signs(parameter: nn.Parameter) -> None:
    parameter.data.neg_()


def swap_rows(parameter: nn.Parameter) -> None:
    parameter.data.copy_(parameter.data.flip(0).clone())


def step(parameter: nn.Parameter) -> None:
    DataOptimizer([parameter]).step()


CHANGES: list[Callable[[nn.Parameter], None]] = [
    replace_storage,
    write_in_place,
    write_one_element,
    flip_signs,
    swap_rows,
    step,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("looks_before", [1, 3])
def test_each_kind_of_change_is_seen(
    change: Callable[[nn.Parameter], None], looks_before: int
) -> None:
    parameter, copies = make(), Values(DEVICES)
    for _ in range(looks_before):
        copies.update([parameter], 3)
    change(parameter)
    for slot in copies.update([parameter], 3):
        assert torch.equal(slot[0].cpu(), parameter.cpu())


def test_nothing_is_copied_while_nothing_changes() -> None:
    parameter, copies = make(), Values(DEVICES)
    first = copies.update([parameter], 3)
    with mock.patch.object(comm, "broadcast_coalesced") as broadcast:
        for _ in range(3):
            again = copies.update([parameter], 3)
    broadcast.assert_not_called()
    assert all(a[0] is b[0] for a, b in zip(first, again, strict=True))
    assert again[0][0] is parameter


def test_slots_on_one_device_share_parameters() -> None:
    parameter = nn.Parameter(torch.ones(3))
    shared = Values([CPU] * 3).update([parameter], 3)
    assert all(slot[0] is parameter for slot in shared)
    devices = [DEVICES[0], DEVICES[1], DEVICES[1]]
    there = Values(devices).update([make()], 3)
    assert there[1][0] is there[2][0]


def test_private_copies_have_memory_of_their_own() -> None:
    buffer, copies = torch.zeros(3), Values([CPU] * 3, "first")
    slots = copies.update([buffer], 3)
    assert slots[0][0] is buffer
    assert len({slot[0].data_ptr() for slot in slots}) == 3
    slots[2][0].add_(1)
    assert copies.update([buffer], 3)[2][0].eq(0).all(), "a written copy was not made anew"


def test_a_graph_keeps_the_values_that_it_was_made_with() -> None:
    parameter, copies = make(), Values(DEVICES)
    before = copies.update([parameter], 2)[1][0]
    values = before.cpu()
    write_in_place(parameter)
    copies.update([parameter], 2)
    assert torch.equal(before.cpu(), values)


def test_class_and_attributes_of_parameters_are_kept() -> None:
    class Quantized(nn.Parameter):
        scale: torch.Tensor
        bits: int

    original = Quantized(torch.zeros(2, device=DEVICES[0]), requires_grad=False)
    original.scale = torch.ones(2, device=DEVICES[0])
    original.bits = 4
    copy = Values(DEVICES).update([original], 2)[1][0]
    assert isinstance(copy, Quantized)
    assert copy.bits == 4
    assert copy.scale.device == DEVICES[1]


def test_copies_made_in_inference_mode_can_be_trained_with() -> None:
    parameter, copies = make(), Values(DEVICES)
    with torch.inference_mode():
        copy = copies.update([parameter], 2)[1][0]
    (copy * copy).sum().backward()
    assert not copy.is_inference()


def test_layouts_are_kept() -> None:
    original = torch.randn(2, 3, 4, 4, device=DEVICES[0]).to(memory_format=torch.channels_last)
    copy = Values(DEVICES).update([original], 2)[1][0]
    assert copy.stride() == original.stride()


def test_attributes_of_a_parameter_are_a_part_of_it() -> None:
    class Quantized(nn.Parameter):
        scale: torch.Tensor

    original = Quantized(torch.zeros(2, device=DEVICES[0]), requires_grad=False)
    copies = Values(DEVICES)
    for value in (2.0, 5.0):
        original.scale = torch.tensor(value, device=DEVICES[0])
        assert copies.update([original], 2)[1][0].scale.item() == value  # type: ignore[attr-defined]
    original.scale.mul_(2)
    assert copies.update([original], 2)[1][0].scale.item() == 10.0  # type: ignore[attr-defined]


def test_a_sparse_neighbor_hides_nothing() -> None:
    sparse = torch.eye(3, device=DEVICES[0]).to_sparse_coo()
    dense = torch.ones(3, device=DEVICES[0])
    copies = Values(DEVICES)
    for value in (5.0, 6.0):
        copies.update([sparse, dense], 2)
        dense.data.fill_(value)
        assert copies.update([sparse, dense], 2)[1][1].eq(value).all()
        sparse._values().data.fill_(value)
        assert copies.update([sparse, dense], 2)[1][0]._values().eq(value).all()


def test_an_answer_of_the_device_is_read_however_far_ahead_the_host_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter, copies = make(), Values(DEVICES)
    for _ in range(12):
        copies.update([parameter], 2)
    events: list[mock.Mock] = []

    def to_host_later(value: torch.Tensor) -> tuple[torch.Tensor, mock.Mock]:
        events.append(mock.Mock(query=mock.Mock(return_value=False)))
        return value, events[-1]

    torch.accelerator.synchronize(DEVICES[0])
    monkeypatch.setattr("dataparallel.devices.to_host_later", to_host_later)
    flip_signs(parameter)
    for _ in range(3):
        copies.update([parameter], 2)
    events[0].query.return_value = True
    with pytest.warns(UserWarning, match=r"written through \.data"):
        copy = copies.update([parameter], 2)[1][0]
    assert torch.equal(copy.cpu(), parameter.cpu())
