"""Training with torch's communication hooks: as under torch's wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel import DistributedDataParallel
from tests.cluster import Cluster
from tests.comm_hook_cases import SMALL, Net, keep_group, net, power_sgd, train


def alone() -> dist.ProcessGroup:
    """The group of this process alone; every process makes its own."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def overlapped(model: Any) -> None:
    """An optimizer whose step follows the all-reduce of each bucket."""
    with warnings.catch_warnings():
        # Torch's functional optimizers are scripts, which are deprecated.
        warnings.simplefilter("ignore")
        import torch.distributed.algorithms._optimizer_overlap.optimizer_overlap as overlap

        optimizer = overlap._as_overlapped_optim(
            torch.optim.SGD, model.parameters(), 0.1, momentum=0.9
        )
    optimizer.register_ddp(model)


def local_sgd(**options: Any) -> post_localSGD_hook.PostLocalSGDState:
    return post_localSGD_hook.PostLocalSGDState(None, alone(), 3, **options)


#: How each hook is registered, with torch's wrapper or with ours.
REGISTER: dict[str, Callable[[Any], object]] = {
    "allreduce": lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook),
    "allreduce of a group": lambda m: m.register_comm_hook(
        dist.group.WORLD, default_hooks.allreduce_hook
    ),
    "fp16": lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "fp16 wrapper": lambda m: m.register_comm_hook(
        None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "noop": lambda m: m.register_comm_hook(None, debugging_hooks.noop_hook),
    "type": lambda m: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, m),
    "power_sgd": lambda m: m.register_comm_hook(power_sgd(), powerSGD_hook.powerSGD_hook),
    "power_sgd of rank 2, cold": lambda m: m.register_comm_hook(
        power_sgd(matrix_approximation_rank=2, warm_start=False), powerSGD_hook.powerSGD_hook
    ),
    "power_sgd without feedback, batched by shape": lambda m: m.register_comm_hook(
        power_sgd(use_error_feedback=False, batch_tensors_with_same_shape=True),
        powerSGD_hook.powerSGD_hook,
    ),
    "fp16 of power_sgd": lambda m: m.register_comm_hook(
        power_sgd(), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    ),
    "batched power_sgd, not begun": lambda m: m.register_comm_hook(
        power_sgd(start_powerSGD_iter=100), powerSGD_hook.batched_powerSGD_hook
    ),
    "local sgd": lambda m: m.register_comm_hook(local_sgd(), post_localSGD_hook.post_localSGD_hook),
    "local sgd without groups": lambda m: m.register_comm_hook(
        local_sgd(post_local_gradient_allreduce=False), post_localSGD_hook.post_localSGD_hook
    ),
    "overlapped optimizer": overlapped,
}

#: Torch's bucket gives gradients in the order of memory, whatever the parameter's layout is; an
#: optimizer that takes them from there is right for contiguous parameters only.
CONTIGUOUS = {"overlapped optimizer"}
#: These round to half precision; where the sum of two replicas differs from the gradient of one in
#: the last bit, they may round to the next number.
ROUNDED = {"fp16", "fp16 wrapper", "fp16 of power_sgd", "type"}
#: Torch's wrapper crashes under these if there is more than one bucket.
ONE_BUCKET = {name for name in REGISTER if "power_sgd" in name}


def net_for(name: str) -> Net:
    return net(torch.contiguous_format if name in CONTIGUOUS else torch.channels_last)


def with_hook(rank: int, world_size: int, name: str, replicas: int) -> list[Tensor]:
    """Trained by our wrapper, whose gradients are views with several; by torch's for 0 replicas."""
    keep_group()
    cap = 25 if name in ONE_BUCKET else SMALL
    options: dict[str, Any] = {"bucket_cap_mb": cap, "gradient_as_bucket_view": replicas > 1}
    model: Any = None
    if replicas == 0:
        model = TorchsDDP(net_for(name), **options)
    else:
        model = DistributedDataParallel(net_for(name), ["cpu"] * replicas, **options)
    REGISTER[name](model)
    results = train(model, rank, step_here="optimizer" not in name)
    if replicas:
        model.close()
    return results


@pytest.mark.parametrize("name", REGISTER)
def test_torchs_hooks(cluster: Cluster, name: str) -> None:
    """The same parameters and gradients as torch's wrapper, with one replica and with two."""
    theirs = cluster.run(with_hook, 2, name, 0)
    for replicas in (1, 2):
        ours = cluster.run(with_hook, 2, name, replicas)
        tolerance = 3e-3 if name in ROUNDED and replicas > 1 else 2e-5
        for rank in range(2):
            assert len(ours[rank]) == len(theirs[rank]) == 12
            for got, expected in zip(ours[rank], theirs[rank], strict=True):
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
                assert got.stride() == expected.stride()


def with_ours_and_sgd(rank: int, world_size: int, replicas: int) -> list[Tensor]:
    model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL)
    results = train(model, rank, step_here=True)
    model.close()
    return results


def with_ours_and_overlap(rank: int, world_size: int, replicas: int) -> list[Tensor]:
    keep_group()
    model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL)
    overlapped(model)
    results = train(model, rank, step_here=False)
    model.close()
    return results


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_overlapped_optimizer_in_any_layout(cluster: Cluster, replicas: int) -> None:
    """Torch's wrapper trains wrongly here: its optimizer mixes up the channels."""
    ours = cluster.run(with_ours_and_overlap, 2, replicas)
    expected = cluster.run(with_ours_and_sgd, 2, replicas)
    for rank in range(2):
        torch.testing.assert_close(ours[rank], expected[rank], rtol=2e-5, atol=2e-5)


# --- torch's hooks that do not run everywhere ------------------------------------------------


#: These fail with gloo, or in this version of torch; a hook that works elsewhere does so here.
UNCERTAIN: dict[str, Callable[[Any], object]] = {
    "per tensor": lambda m: m.register_comm_hook(
        None, quantization_hooks.quantization_pertensor_hook
    ),
    "per channel": lambda m: m.register_comm_hook(
        None, quantization_hooks.quantization_perchannel_hook
    ),
    "batched power_sgd": lambda m: m.register_comm_hook(
        power_sgd(), powerSGD_hook.batched_powerSGD_hook
    ),
}


def outcome(rank: int, world_size: int, name: str, replicas: int) -> tuple[str, list[Tensor]]:
    """What went wrong, and otherwise the results; with torch's wrapper if ``replicas`` is 0."""
    keep_group()
    model: Any = TorchsDDP(net()) if replicas == 0 else None
    if model is None:
        model = DistributedDataParallel(net(), ["cpu"] * replicas, timeout=5.0)
    UNCERTAIN[name](model)
    try:
        return "", train(model, rank, step_here=True)
    except (AssertionError, RuntimeError) as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error}\n{notes}", []


@pytest.mark.parametrize("name", UNCERTAIN)
def test_hooks_of_torch_that_do_not_run_everywhere(cluster: Cluster, name: str) -> None:
    """What works under torch's wrapper works, and what fails there fails for the same reason."""
    theirs = cluster.run(outcome, 2, name, 0)
    for replicas in (1, 2):
        ours = cluster.run(outcome, 2, name, replicas)
        for (failure, results), (their_failure, their_results) in zip(ours, theirs, strict=True):
            assert bool(failure) == bool(their_failure)
            torch.testing.assert_close(results, their_results, rtol=2e-5, atol=2e-5)
            if failure:
                assert failure.split(":")[0] == their_failure.split(":")[0]
                assert "in the communication hook for bucket 0 (" in failure


def with_zero(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model: Any = DistributedDataParallel(net(), ["cpu"])
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)


def test_zeros_hook_refuses_gloo_as_under_torchs_wrapper(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="Gloo backend using Overlapping DDP with ZeRO may"):
        cluster.run(with_zero, 2)
