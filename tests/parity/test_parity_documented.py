"""What torch's documentation of DataParallel promises beside outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel


def batch(device: str, samples: int = 9) -> Tensor:
    return torch.randn(samples, 3, device=device, dtype=torch.float64)


def gradients(net: nn.Module) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found


def assert_same_step(net: nn.Module, slots: list[str], x: Tensor) -> None:
    expected = net(x)
    expected.square().sum().backward()
    grads = gradients(net)
    out = DataParallel(net, slots)(x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(net), grads)


def test_scalar_outputs_become_a_vector_with_one_element_per_replica(slots: list[str]) -> None:
    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    x = batch(slots[0], 8)
    out = DataParallel(Total(), slots)(x)
    torch.testing.assert_close(out, x.reshape(4, -1).sum(1))


def test_hooks_run_once_per_replica(slots: list[str]) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(slots[0], torch.float64)
    calls: list[str] = []
    net[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    net[0].register_forward_hook(lambda *_: calls.append("after"))
    net[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    DataParallel(net, slots)(batch(slots[0], 8)).sum().backward()
    assert {name: calls.count(name) for name in calls} == {"before": 4, "after": 4, "backward": 4}


def test_a_forward_hook_may_replace_the_output(slots: list[str]) -> None:
    net = nn.Linear(3, 3).to(slots[0], torch.float64)
    net.register_forward_hook(lambda module, args, output: output * 2)
    assert_same_step(net, slots, batch(slots[0]))


def test_in_place_updates_of_buffers_on_the_first_device_are_kept(slots: list[str]) -> None:
    class Counting(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x

    net = Counting().to(slots[0])
    model = DataParallel(net, slots)
    for _ in range(3):
        model(batch(slots[0]))
    assert net.steps == 3


def test_batch_norm_keeps_the_statistics_of_the_first_chunk(slots: list[str]) -> None:
    net = nn.BatchNorm1d(3).to(slots[0], torch.float64)
    alone = nn.BatchNorm1d(3).to(slots[0], torch.float64)
    x = batch(slots[0], 8)
    DataParallel(net, slots)(x)
    alone(x[:2])
    torch.testing.assert_close(dict(net.named_buffers()), dict(alone.named_buffers()))


def test_attributes_set_in_the_first_replica_are_kept(slots: list[str]) -> None:
    """torch loses them; the bare module keeps them."""

    class Remember(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = len(x)
            return x

    net = Remember()
    DataParallel(net, slots)(batch(slots[0], 8))
    assert net.seen == 2


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(slots: list[str], name: str) -> None:
    torch.manual_seed(1)
    inner = getattr(parametrizations, name)(nn.Linear(3, 3))
    # In training the spectral norm refines a buffer at each call, so no two calls are the same.
    net = nn.Sequential(inner, nn.Linear(3, 2)).to(slots[0], torch.float64).eval()
    assert_same_step(net, slots, batch(slots[0]))


def test_spectral_norm_in_training_moves_the_originals_buffer(slots: list[str]) -> None:
    net = parametrizations.spectral_norm(nn.Linear(3, 3)).to(slots[0], torch.float64).train()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    DataParallel(net, slots)(batch(slots[0]))
    assert any(not torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weight_norm_by_hooks(slots: list[str]) -> None:
    """The older form, which sets an ordinary attribute from a forward hook."""
    net = nn.utils.weight_norm(nn.Linear(3, 2).to(slots[0], torch.float64))
    assert_same_step(net, slots, batch(slots[0]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(slots: list[str], reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.second, self.first(x), use_reentrant=reentrant)
            return found

    assert_same_step(Checkpointed().to(slots[0], torch.float64), slots, batch(slots[0]))


def test_dataparallel_saved_tensors_hooks(slots: list[str]) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = batch(slots[0], 8).requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = DataParallel(Square(), slots)(x)
    assert len(packed) >= 2 * 4
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, 2 * x)


def test_packed_sequences_as_the_recurrent_recipe_has_them(slots: list[str]) -> None:
    """Pack and unpack within forward, and pad to the length that the whole batch has."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
            total = padded.size(1)
            packed = pack_padded_sequence(
                padded, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            output, _ = self.rnn(packed)
            return pad_packed_sequence(output, batch_first=True, total_length=total)[0]

    net = Packed().to(slots[0], torch.float64)
    x = torch.randn(7, 5, 3, device=slots[0], dtype=torch.float64)
    lengths = torch.tensor([5, 1, 2, 4, 3, 2, 1])
    expected = net(x, lengths)
    torch.testing.assert_close(DataParallel(net, slots)(x, lengths), expected)


def test_nested_wrappers(slots: list[str]) -> None:
    net = nn.Linear(3, 3).to(slots[0], torch.float64)
    x = batch(slots[0])
    outer = nn.Sequential(DataParallel(net, slots[:2]), nn.Tanh())
    torch.testing.assert_close(outer(x), net(x).tanh())


def test_the_module_may_change_between_the_calls(slots: list[str]) -> None:
    net = nn.Sequential(nn.Linear(3, 3)).to(slots[0], torch.float64)
    model = DataParallel(net, slots)
    x = batch(slots[0])
    for change in (
        lambda: net.append(nn.Linear(3, 2).to(slots[0], torch.float64)),
        lambda: net[0].get_parameter("weight").data.mul_(2),
        lambda: net[0].requires_grad_(False),
        lambda: net.__delitem__(1),
        lambda: net.register_forward_hook(lambda module, args, output: output + 1),
    ):
        change()
        torch.testing.assert_close(model(x), net(x))
        assert model(x).requires_grad == net(x).requires_grad
