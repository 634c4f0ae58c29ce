"""Other people's code around the wrapper: libraries that unwrap it, loaders, profilers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.utils.data import DataLoader, TensorDataset

from dataparallel import DataParallel
from tests.models import WRAPPERS, assert_all_close


def net(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)


@pytest.mark.usefixtures("accelerate_anew")
@WRAPPERS
def test_accelerate_keeps_the_signature_and_unwraps(wrapper: Any) -> None:
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    inner = wrapper(nn.Linear(3, 2), ["cpu", "cpu"])
    model = accelerator.prepare(inner)
    assert list(inspect.signature(model.forward).parameters) == ["input"]
    assert model(torch.ones(4, 3)).shape == (4, 2)
    accelerator.unwrap_model(model)
    assert list(inspect.signature(inner.forward).parameters) == ["input"]
    assert extract_model_from_parallel(inner) is inner.module


def test_torch_distributed_checkpoint(slots: list[str]) -> None:
    model, other = (DataParallel(net(slots[0]), slots[:2]) for _ in range(2))
    state = checkpoints.get_model_state_dict(model)
    assert set(state) == set(model.module.state_dict())
    checkpoints.set_model_state_dict(other, state)
    assert_all_close(other.state_dict().values(), model.state_dict().values())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    found = checkpoints.get_optimizer_state_dict(model, optimizer)
    assert set(found["state"]) == {name for name, _ in model.named_parameters()}


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
