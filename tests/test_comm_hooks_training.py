"""Training with communication hooks: torch's own, as under torch's wrapper, and users' own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel import DistributedDataParallel
from dataparallel.reducer.builtin_hooks import allreduce_hook
from tests.cluster import Cluster
from tests.test_comm_hooks import keep_group

STEPS = 6
#: Makes three buckets of a model of 1.3 KB.
SMALL = 0.0001


class Net(nn.Module):
    """Linear layers and a convolution, whose weight may have its channels last."""

    def __init__(self, layout: torch.memory_format) -> None:
        super().__init__()
        self.first = nn.Linear(12, 18)
        self.images = nn.Conv2d(2, 4, 2)
        self.last = nn.Linear(16, 3)
        move: Any = self.to
        move(memory_format=layout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).view(-1, 2, 3, 3)
        output: Tensor = self.last(torch.tanh(self.images(x)).flatten(1))
        return output


def net(layout: torch.memory_format = torch.channels_last) -> Net:
    torch.manual_seed(1)
    return Net(layout)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)


# --- torch's hooks ---------------------------------------------------------------------------


def power_sgd(**options: Any) -> powerSGD_hook.PowerSGDState:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, **options}
    return powerSGD_hook.PowerSGDState(None, **options)


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


def train(model: nn.Module, rank: int, steps: int = STEPS, *, step_here: bool) -> list[Tensor]:
    """The parameters and the last gradients after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if step_here:
            optimizer.step()
    own = list(model.parameters())
    return [p.detach().clone() for p in own] + [p.grad.clone() for p in own if p.grad is not None]


def with_torch(rank: int, world_size: int, name: str, view: bool) -> list[Tensor]:
    keep_group()
    cap = 25 if name in ONE_BUCKET else SMALL
    model = TorchsDDP(net_for(name), bucket_cap_mb=cap, gradient_as_bucket_view=view)
    REGISTER[name](model)
    return train(model, rank, step_here="optimizer" not in name)


def with_ours(rank: int, world_size: int, name: str, view: bool, replicas: int) -> list[Tensor]:
    keep_group()
    cap = 25 if name in ONE_BUCKET else SMALL
    model = DistributedDataParallel(
        net_for(name), ["cpu"] * replicas, bucket_cap_mb=cap, gradient_as_bucket_view=view
    )
    REGISTER[name](model)
    results = train(model, rank, step_here="optimizer" not in name)
    model.close()
    return results


@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
@pytest.mark.parametrize("name", REGISTER)
def test_torchs_hooks(cluster: Cluster, name: str, view: bool) -> None:
    """The same parameters and gradients as torch's wrapper, with one replica and with two."""
    theirs = cluster.run(with_torch, 2, name, view)
    for replicas in (1, 2):
        ours = cluster.run(with_ours, 2, name, view, replicas)
        loose = name in ROUNDED and replicas > 1
        for rank in range(2):
            assert len(ours[rank]) == len(theirs[rank]) == 12
            for got, expected in zip(ours[rank], theirs[rank], strict=True):
                tolerance = 3e-3 if loose else 2e-5
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
        return f"{type(error).__name__}: {error}", []


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


# --- our hooks -------------------------------------------------------------------------------


def by_name(rank: int, world_size: int, hook: Any, replicas: int) -> list[Tensor]:
    keep_group()
    model: Any = TorchsDDP(net(), bucket_cap_mb=SMALL) if replicas == 0 else None
    if model is None:
        model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL)
        model.register_comm_hook(None, hook)
    elif hook is not None:
        model._register_builtin_comm_hook(BuiltinCommHookType.__members__[hook])
    return train(model, rank, step_here=True)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_hooks(cluster: Cluster, name: str) -> None:
    theirs = cluster.run(by_name, 2, name, 0)
    for hook in (name.lower(), BuiltinCommHookType.__members__[name]):
        ours = cluster.run(by_name, 2, hook, 1)
        for rank in range(2):
            torch.testing.assert_close(ours[rank], theirs[rank], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_bf16(cluster: Cluster, replicas: int) -> None:
    """Torch's wrapper asks for CUDA."""
    ours = cluster.run(by_name, 2, "bf16_compress", replicas)
    expected = cluster.run(by_name, 2, None, 0)
    for rank in range(2):
        torch.testing.assert_close(ours[rank], expected[rank], rtol=3e-2, atol=3e-2)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)


def exact_power_sgd(rank: int, world_size: int, replicas: int) -> list[Tensor]:
    """Of full rank, PowerSGD is a mean; there are several buckets."""
    keep_group()
    state = power_sgd(
        matrix_approximation_rank=64, min_compression_rate=0.01, use_error_feedback=False
    )
    model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    results = train(model, rank, step_here=True)
    assert len(state.p_memory_dict) == 3
    model.close()
    return results


@pytest.mark.parametrize("replicas", [1, 2])
def test_power_sgd_with_several_buckets(cluster: Cluster, replicas: int) -> None:
    ours = cluster.run(exact_power_sgd, 2, replicas)
    expected = cluster.run(by_name, 2, None, 0)
    for rank in range(2):
        torch.testing.assert_close(ours[rank], expected[rank], rtol=1e-3, atol=1e-4)


def what_hooks_see(rank: int, world_size: int, replicas: int) -> list[tuple[Any, ...]]:
    """Per call: the bucket's facts, its gradients, and whether its parameters are the originals."""
    keep_group()
    module = net()
    named = {name: parameter for name, parameter in module.named_parameters()}
    seen: list[tuple[Any, ...]] = []

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        original = [named[name] for name in bucket.names()]
        same = all(a is b for a, b in zip(bucket.parameters(), original, strict=True))
        gradients = [gradient.clone() for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), bucket.names(), same, gradients))
        return allreduce_hook(None, bucket)

    model = DistributedDataParallel(module, ["cpu"] * replicas, bucket_cap_mb=SMALL)
    model.register_comm_hook(None, hook)
    train(model, rank, 2, step_here=True)
    model.close()
    return seen


def test_a_hook_gets_the_sum_of_the_replicas(cluster: Cluster) -> None:
    one = cluster.run(what_hooks_see, 2, 1)
    for replicas in (2, 3):
        for seen, expected in zip(cluster.run(what_hooks_see, 2, replicas), one, strict=True):
            assert [call[:4] for call in seen] == [call[:4] for call in expected]
            for call, other in zip(seen, expected, strict=True):
                torch.testing.assert_close(call[4], other[4], rtol=1e-5, atol=1e-6)
    assert not torch.equal(one[0][0][4][0], one[1][0][4][0]), "the ranks have different batches"
    begins = [number for number, call in enumerate(one[0]) if call[0] == 0]
    assert len(begins) == 2
    for round_ in (one[0][: begins[1]], one[0][begins[1] :]):
        count = len(round_)
        assert count > 2
        assert [call[0] for call in round_] == list(range(count))
        assert [call[1] for call in round_] == [False] * (count - 1) + [True]
        names = [name for call in round_ for name in call[2]]
        assert sorted(names) == sorted(name for name, _ in net().named_parameters())
        assert all(call[3] for call in round_)


# --- failures --------------------------------------------------------------------------------


class HookError(Exception):
    pass


def raises(bucket: Any) -> Future[Tensor]:
    raise HookError("no")


def fails_later(bucket: Any) -> Future[Tensor]:
    def fail(done: Any) -> Tensor:
        raise HookError("no")

    future: Future[Tensor] = allreduce_hook(None, bucket).then(fail)
    return future


def never_completes(bucket: Any) -> Future[Tensor]:
    return Future()


def returns_less(bucket: Any) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer()[1:])
    return future


FAILURES: dict[str, tuple[Callable[[Any], Future[Tensor]], type[Exception], str]] = {
    "raises": (raises, HookError, "no\nin the communication hook for bucket 1 ("),
    "fails later": (fails_later, RuntimeError, "HookError: no"),
    "never completes": (never_completes, TimeoutError, "did not finish bucket 1 ("),
    "returns less": (returns_less, ValueError, "bucket 1 ("),
}


def recovers(
    rank: int, world_size: int, name: str, replicas: int, *ranks: int
) -> tuple[str, float, list[Tensor]]:
    """A hook fails once, in the second step and the second bucket, on some ranks."""
    keep_group()
    failure, kind, _ = FAILURES[name]
    if rank not in ranks:
        kind = RuntimeError
    state = {"step": 0, "failed": 0}

    def hook(state: dict[str, int], bucket: Any) -> Future[Tensor]:
        now = state["step"] == 1 and bucket.index() == 1 and not state["failed"]
        if now and rank in ranks:
            state["failed"] = 1
            return failure(bucket)
        return allreduce_hook(None, bucket)

    model = DistributedDataParallel(
        net(), ["cpu"] * replicas, bucket_cap_mb=SMALL, timeout=1.0 if "never" in name else 20.0
    )
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text, took = "", 0.0
    for step in range(4):
        state["step"] = step
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        begin = time.monotonic()
        try:
            loss.backward()
        except kind as error:
            assert step == 1
            text, took = str(error), time.monotonic() - begin
            continue
        optimizer.step()
    model.close()
    return text, took, [p.detach().clone() for p in model.parameters()]


def without_second_step(rank: int, world_size: int) -> list[Tensor]:
    model = TorchsDDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2, 3):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", FAILURES)
def test_the_step_after_a_failure_is_right(cluster: Cluster, name: str, replicas: int) -> None:
    expected = cluster.run(without_second_step, 2)
    for rank, (text, took, results) in enumerate(cluster.run(recovers, 2, name, replicas, 0, 1)):
        assert FAILURES[name][2] in text
        assert took < 10
        torch.testing.assert_close(results, expected[rank], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_that_raises_on_one_rank(cluster: Cluster, replicas: int) -> None:
    expected = cluster.run(without_second_step, 2)
    first, second = cluster.run(recovers, 2, "raises", replicas, 1)
    assert "rank 1" in first[0], "the others are not told who has failed"
    assert FAILURES["raises"][2] in second[0]
    assert max(first[1], second[1]) < 10
    torch.testing.assert_close([first[2], second[2]], expected, rtol=2e-5, atol=2e-5)


def registers(rank: int, world_size: int, options: dict[str, Any], hooks: list[Any]) -> None:
    model = DistributedDataParallel(net(), ["cpu"], **options)
    for hook in hooks:
        model.register_comm_hook(None, hook)


@pytest.mark.parametrize(
    ("options", "hooks", "kind", "message"),
    [
        ({}, ["noop", "noop"], RuntimeError, "can only be called once"),
        ({"deterministic": True}, ["noop"], ValueError, "deterministic=True .*; use one of them"),
        ({}, ["none"], ValueError, "there is no communication hook 'none'; pass a function"),
        ({}, [7], TypeError, "must be callable as hook"),
    ],
)
def test_hooks_that_are_refused(
    cluster: Cluster,
    options: dict[str, Any],
    hooks: list[Any],
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        cluster.run(registers, 2, options, hooks)


def test_a_hook_without_processes() -> None:
    model = DistributedDataParallel(net(), ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"no process group; call torch\.distributed\.init"):
        model.register_comm_hook(None, "allreduce")
    model.close()
