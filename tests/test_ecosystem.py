"""Other people's code around the wrapper: libraries that unwrap it, loaders, profilers, hooks."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.utils.data import DataLoader, TensorDataset

from dataparallel import DataParallel, current_replica
from tests.models import Shared, assert_all_close, grads_of, twins


def net(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)


# --- libraries that unwrap -------------------------------------------------------------------


def test_accelerate_unwraps(slots: list[str]) -> None:
    from accelerate.utils import extract_model_from_parallel

    inner = net(slots[0])
    assert extract_model_from_parallel(DataParallel(inner, slots)) is inner


def test_torch_distributed_checkpoint_state_dict(slots: list[str]) -> None:
    inner = net(slots[0])
    model = DataParallel(inner, slots[:2])
    state = get_model_state_dict(model)
    assert set(state) == set(inner.state_dict())
    other = DataParallel(net(slots[0]), slots[:2])
    set_model_state_dict(other, state)
    assert_all_close(other.state_dict().values(), inner.state_dict().values())


def test_torch_distributed_checkpoint_optimizer_state() -> None:
    model = DataParallel(net("cpu"), ["cpu", "cpu"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}


# --- what a training script has around it ----------------------------------------------------


def test_forked_loader_workers(slots: list[str]) -> None:
    model = DataParallel(net(slots[0]), slots[:2])
    data = TensorDataset(torch.randn(16, 3), torch.randint(0, 2, (16,)))
    model(data.tensors[0])  # The replicas' threads exist before the fork.
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    seen = 0
    for _ in range(2):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y.to(slots[0])).backward()
            seen += len(x)
    assert seen == 32


def test_the_profiler_shows_the_replicas(slots: list[str]) -> None:
    model = DataParallel(net(slots[0]), slots[:3])
    x = torch.randn(6, 3)
    model(x)
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options
    ) as profile:
        model(x)
    names = {event.key for event in profile.key_averages()}
    assert {f"replica {i} on {torch.device(slot)}" for i, slot in enumerate(slots[:3])} <= names
    assert "DataParallel.forward" in names


def test_hooks_on_originals_run_once_on_the_sum(slots: list[str]) -> None:
    bare, inner = twins(lambda: Shared([0, 1]), slots[0])
    model = DataParallel(inner, slots)
    calls: list[Tensor] = []
    after: list[Tensor] = []
    weight = inner.layers[0].weight  # type: ignore[union-attr, index]
    weight.register_hook(lambda grad: calls.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    x = torch.randn(9, 4, dtype=torch.double, device=slots[0])
    bare(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    expected = bare.layers[0].weight.grad  # type: ignore[union-attr, index]
    assert len(calls) == len(after) == 1
    torch.testing.assert_close(calls[0], expected)
    torch.testing.assert_close(after[0], expected)


def test_module_hooks_fire_once_per_replica_and_know_where(slots: list[str]) -> None:
    model = DataParallel(net(slots[0]), slots[:3])
    seen: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        replica = current_replica()
        assert replica is not None
        assert output.device == replica.device
        seen.append(replica.index)

    backward: list[torch.device] = []
    model.module[0].register_forward_hook(note)

    def note_backward(module: nn.Module, grad_in: Any, grad_out: Any) -> None:
        backward.append(grad_out[0].device)

    model.module[0].register_full_backward_hook(note_backward)
    model(torch.randn(6, 3, requires_grad=True)).sum().backward()
    assert sorted(seen) == [0, 1, 2]
    assert sorted(map(str, backward)) == sorted(str(torch.device(s)) for s in slots[:3])


# --- the caller's context in the replicas ----------------------------------------------------


class Probe(nn.Module):
    """Notes what holds in each replica's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.notes: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        self.notes.append(
            {
                "dtype": output.dtype,
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "made": torch.empty(1).device.type,
                "variable": variable.get(),
                "thread": threading.get_ident(),
            }
        )
        return output.float()


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@contextlib.contextmanager
def _variable_set() -> Iterator[None]:
    token = variable.set("set")
    yield
    variable.reset(token)


@pytest.mark.parametrize(
    ("enter", "key", "inside", "outside"),
    [
        (torch.no_grad, "grad", False, True),
        (torch.inference_mode, "inference", True, False),
        (lambda: torch.device("meta"), "made", "meta", "cpu"),
        (_variable_set, "variable", "set", "unset"),
    ],
    ids=["no_grad", "inference_mode", "default device", "contextvar"],
)
def test_the_callers_context_holds_in_the_replicas(
    slots: list[str], enter: Any, key: str, inside: Any, outside: Any
) -> None:
    probe = Probe().to(slots[0])
    model = DataParallel(probe, slots[:3])
    x = torch.randn(6, 3, device=slots[0])
    with enter():
        model(x)
    assert [note[key] for note in probe.notes] == [inside] * 3
    probe.notes.clear()
    model(x)
    assert [note[key] for note in probe.notes] == [outside] * 3
    assert len({note["thread"] for note in probe.notes}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_has_the_callers_dtype(slots: list[str], dtype: torch.dtype) -> None:
    probe = Probe().to(slots[0])
    model = DataParallel(probe, slots[:3])
    x = torch.randn(6, 3, device=slots[0])
    with torch.autocast(torch.device(slots[0]).type, dtype=dtype):
        model(x).sum().backward()
    assert [note["dtype"] for note in probe.notes] == [dtype] * 3
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads_of(probe))


def test_saved_tensor_hooks_reach_the_replicas(slots: list[str]) -> None:
    bare, inner = twins(lambda: Shared([0, 1, 2]), slots[0])
    model = DataParallel(inner, slots[:3])
    x = torch.randn(6, 4, dtype=torch.double, device=slots[0])
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(threading.get_ident())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    assert len(set(packed) - {threading.get_ident()}) == 3
    output.sum().backward()
    bare(x).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))
