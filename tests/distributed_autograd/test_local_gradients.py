"""Gradients over workers that are threads are those of ordinary autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tests.distributed_autograd.local_cases import Program, call, check


def run(module: nn.Module, x: Tensor) -> Any:
    return torch.tanh(module(x))


def to_place_of(module: nn.Module, x: Tensor) -> Tensor:
    return x.to(next(module.parameters()).device)


def one_call(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    return [call("worker0", run_here, modules[0], x).sum()]


def one_after_the_other(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    hidden = x
    for index, module in enumerate(modules):
        hidden = call(f"worker{index}", run_here, module, hidden)
    return [hidden.square().sum()]


def run_here(module: nn.Module, x: Tensor) -> Any:
    return run(module, to_place_of(module, x))


class Rest:
    """The layers that are still to run; by reference, as it is no container."""

    def __init__(self, modules: Sequence[nn.Module], index: int) -> None:
        self.modules = modules
        self.index = index


def run_rest(rest: Rest, x: Tensor) -> Any:
    hidden = run_here(rest.modules[rest.index], x)
    if rest.index + 1 < len(rest.modules):
        following = Rest(rest.modules, rest.index + 1)
        deeper = call(f"worker{following.index}", run_rest, following, hidden)
        return hidden + deeper.to(hidden.device)
    return hidden


def nested_over_four(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    return [call("worker0", run_rest, Rest(modules, 0), x).sum()]


def there_and_back(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """main -> worker0 -> main -> worker0 -> worker1 -> worker0, each with work of its own."""
    return [call("worker0", bounce, Rest(modules, 0), x * 2, 4).mean(), (x * 3).sum()]


def bounce(rest: Rest, x: Tensor, depth: int) -> Any:
    hidden = run_here(rest.modules[depth % 2], x)
    if depth == 0:
        return hidden
    to = ("worker0", "worker1", "worker0", "main")[depth - 1]
    return call(to, bounce, rest, hidden, depth - 1).to(hidden.device) * hidden


def to_itself(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    own = call("main", torch.mul, x, 3.0)
    return [call("worker0", twice_there, modules[0], own).sum()]


def twice_there(module: nn.Module, x: Tensor) -> Any:
    return call("worker0", run_here, module, call("worker0", run_here, module, x)) * 2


def unused_results(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    used, unused = call("worker0", two, modules[0], x)
    call("worker1", run_here, modules[1], unused)
    call("worker1", run_here, modules[1], x)
    return [used.sum()]


def two(module: nn.Module, x: Tensor) -> Any:
    hidden = run_here(module, x)
    return hidden * 2, hidden.exp()


def several_roots(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    first, second = call("worker2", two, modules[2], x)
    third = call("worker3", run_here, modules[3], second)
    return [first.sum(), third.sum().to(first.device), second.mean(), (x * x).sum()]


def shared_module(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Two workers and the main one use one layer, one of them twice."""
    hidden = call("worker0", run_here, modules[0], x)
    hidden = call("worker1", run_here, modules[0], hidden)
    again = call("worker0", run_here, modules[0], hidden)
    own = run_here(modules[0], x)
    return [(again.cpu() * hidden.cpu() + own.cpu()).sum()]


def residuals(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    hidden = x
    for index in (0, 1, 0, 1):
        hidden = hidden + call(f"worker{index}", run_here, modules[index], hidden).cpu()
    return [hidden.square().sum()]


def same_tensor_twice(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    hidden = x * 2
    return [call("worker0", add_if_same, modules[0], hidden, [hidden, {"x": hidden}, x]).sum()]


def add_if_same(module: nn.Module, x: Tensor, others: list[Any]) -> Any:
    assert others[0] is x
    assert others[1]["x"] is x
    return run_here(module, x) + to_place_of(module, x * others[0] * others[2])


def in_place(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    hidden = x * 1.0
    result = call("worker0", change, modules[0], hidden)
    kept = call("worker0", run_here, modules[0], hidden)
    result.mul_(3)
    return [(result + kept).sum()]


def change(module: nn.Module, x: Tensor) -> Any:
    hidden = run_here(module, x) * 1.0
    hidden.add_(to_place_of(module, x)).mul_(2)
    return hidden


def without_gradients(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        constant = call("worker0", torch.mul, x, 2.0)
    assert not constant.requires_grad
    return [call("worker1", run_here, modules[1], constant.to(x.device) * x).sum()]


def parameter_of_main(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    weight = next(modules[3].parameters())
    return [call("worker1", scaled, modules[1], x, weight).sum()]


def scaled(module: nn.Module, x: Tensor, weight: Tensor) -> Any:
    return run_here(module, x) @ to_place_of(module, weight)


def packed(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    batch = x.unsqueeze(-1) * torch.ones(4, dtype=x.dtype)
    sequences = pack_padded_sequence(batch, torch.tensor([3, 2]), batch_first=True)
    return [call("worker0", sum_packed, sequences).data.sum()]


def sum_packed(sequences: PackedSequence) -> PackedSequence:
    assert sequences.batch_sizes.device.type == "cpu"
    return sequences._replace(data=sequences.data.square())


PROGRAMS = [
    one_call,
    one_after_the_other,
    nested_over_four,
    there_and_back,
    to_itself,
    unused_results,
    several_roots,
    shared_module,
    residuals,
    same_tensor_twice,
    in_place,
    without_gradients,
    parameter_of_main,
    packed,
]


# Torch 2.11's advice about speed, once a leaf has been used on another device than its own.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_one_device(program: Program, slots: list[str]) -> None:
    check(program, slots)


class Table(nn.Module):
    """Rows of a table, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)

    def forward(self, indices: Tensor) -> Tensor:
        return self.rows(indices)  # type: ignore[no-any-return]


def look_up(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    first = call("worker0", run, modules[0], torch.tensor([0, 3]))
    second = call("worker0", run, modules[0], torch.tensor([3, 1]))
    return [(first * x).sum() + second.sum()]


def test_sparse_gradients_stay_sparse_and_add_up() -> None:
    check(look_up, ["cpu"] * 4, [Table()])
