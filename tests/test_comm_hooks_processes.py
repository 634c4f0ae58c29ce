"""Training with communication hooks over processes: torch's, hooks by name, and hooks that fail."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
    register_ddp_comm_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel import DistributedDataParallel
from dataparallel.comm_hooks import allreduce_hook
from tests.cluster import Cluster
from tests.comm_hook_cases import SMALL, completed, keep_group, net, train

#: Torch's types do not tell that this is the default group.
ALL: Any = None
BUILT_IN: Any = BuiltinCommHookType.__members__


def registers(hook: Any, state: Any = None) -> Callable[[Any], object]:
    return lambda model: model.register_comm_hook(state, hook)


def power_sgd(hook: Any = powerSGD_hook.powerSGD_hook, **options: Any) -> Callable[[Any], object]:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, **options}
    return lambda model: model.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, **options), hook
    )


def local_sgd(model: Any) -> None:
    alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


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


def nothing(model: Any) -> None: ...


@dataclass(frozen=True)
class Hook:
    """How a hook is registered with ours and with torch's wrapper, by default in the same way.

    Attributes:
        one_bucket: With more than one, torch's wrapper crashes.
        tolerance: These round to half precision; where the sum of two replicas differs from the
            gradient of one in the last bit, they may round to the next number.
        layout: Of the module. Torch's bucket gives gradients in the order of memory, whatever the
            parameter's layout is, so that optimizers mix up the channels there.
    """

    ours: Callable[[Any], object]
    theirs: Callable[[Any], object] | None = None
    one_bucket: bool = False
    tolerance: float = 2e-5
    layout: torch.memory_format = torch.channels_last


fp16_wrapper = default_hooks.fp16_compress_wrapper
HOOKS = {
    "allreduce of a group": Hook(
        lambda m: m.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    ),
    "noop": Hook(registers(debugging_hooks.noop_hook)),
    "type": Hook(
        lambda m: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, m), tolerance=3e-3
    ),
    "by a name": Hook(
        registers("allreduce"), lambda m: m._register_builtin_comm_hook(BUILT_IN["ALLREDUCE"])
    ),
    "by torch's type": Hook(registers(BUILT_IN["ALLREDUCE"]), nothing),
    # Torch's asks for CUDA.
    "bf16": Hook(registers("bf16_compress"), nothing, tolerance=3e-2),
    "power_sgd": Hook(power_sgd(), one_bucket=True),
    # Of full rank it is a mean.
    "power_sgd with several buckets": Hook(
        power_sgd(
            matrix_approximation_rank=64, min_compression_rate=0.01, use_error_feedback=False
        ),
        nothing,
        tolerance=1e-3,
    ),
    "fp16 of power_sgd": Hook(
        power_sgd(fp16_wrapper(powerSGD_hook.powerSGD_hook)), one_bucket=True, tolerance=3e-3
    ),
    "local sgd": Hook(local_sgd),
    "overlapped optimizer": Hook(overlapped, layout=torch.contiguous_format),
    "overlapped optimizer in any layout": Hook(overlapped, nothing),
}


def _compare(rank: int, world_size: int, name: str) -> None:
    """With one replica and with two, the parameters and gradients of torch's wrapper."""
    keep_group()
    hook = HOOKS[name]
    cap = 25 if hook.one_bucket else SMALL

    def trained(wrapper: Any, register: Any, *args: Any, **options: Any) -> list[Tensor]:
        model = wrapper(net(hook.layout), *args, bucket_cap_mb=cap, **options)
        register(model)
        results = train(model, rank, step_here=register is not overlapped)
        if wrapper is not TorchsDDP:
            model.close()
        return results

    expected = trained(TorchsDDP, hook.theirs or hook.ours)
    for replicas in (1, 2):
        options = {"gradient_as_bucket_view": replicas > 1}
        got = trained(DistributedDataParallel, hook.ours, ["cpu"] * replicas, **options)
        tolerance = hook.tolerance if replicas > 1 or hook.theirs is not None else 2e-5
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert [t.stride() for t in got] == [t.stride() for t in expected]
        if name == "bf16":
            assert not torch.allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HOOKS)
def test_training_is_that_of_torch(cluster: Cluster, name: str) -> None:
    cluster.run(_compare, 2, name)


# --- hooks that fail -------------------------------------------------------------------------


class HookError(Exception):
    pass


def raises(bucket: Any) -> Future[Tensor]:
    raise HookError("no")


def fails_later(bucket: Any) -> Future[Tensor]:
    reduced: Any = allreduce_hook(ALL, bucket)
    future: Future[Tensor] = reduced.then(raises)
    return future


def never_completes(bucket: Any) -> Future[Tensor]:
    return Future()


def returns_less(bucket: Any) -> Future[Tensor]:
    return completed(bucket.buffer()[1:])


FAILURES: dict[str, tuple[Callable[[Any], Future[Tensor]], type[Exception], str]] = {
    "raises": (raises, HookError, "no\nin the communication hook for bucket {} ("),
    "fails later": (fails_later, RuntimeError, "HookError: no"),
    "never completes": (never_completes, TimeoutError, "the future of the communication hook "),
    "returns less": (returns_less, ValueError, "bucket {} ("),
}


def _recovers(
    rank: int, world_size: int, name: str, replicas: int, ranks: tuple[int, ...], index: int
) -> tuple[str, float]:
    """A hook fails once, in the second step, in one bucket and on some ranks."""
    keep_group()
    failure, kind, _ = FAILURES[name]
    fails = False

    def hook(state: None, bucket: Any) -> Future[Tensor]:
        nonlocal fails
        if fails and bucket.index() == index:
            fails = False
            return failure(bucket)
        return allreduce_hook(ALL, bucket)

    timeout = 0.5 if "never" in name else 20.0
    model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL, timeout=timeout)
    model.register_comm_hook(None, hook)
    theirs = TorchsDDP(net())
    train(model, rank, 1)
    train(theirs, rank, 1)
    fails = rank in ranks
    begin = time.monotonic()
    with pytest.raises(kind if fails else RuntimeError) as caught:
        train(model, rank, 1, first=1)
    took = time.monotonic() - begin
    results = [train(each, rank, 2, first=2) for each in (model, theirs)]
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)
    model.close()
    return str(caught.value), took


@pytest.mark.parametrize(
    ("name", "replicas", "ranks", "index"),
    [
        ("raises", 1, (0, 1), 1),
        ("fails later", 2, (0, 1), 1),
        ("never completes", 2, (0, 1), 1),
        ("returns less", 2, (0, 1), 1),
        # The last bucket is sent nevertheless, since the others wait for it.
        ("raises", 2, (1,), 0),
        ("raises", 1, (1,), 1),
        ("raises", 2, (1,), 2),
    ],
)
def test_the_step_after_a_failure_is_right(
    cluster: Cluster, name: str, replicas: int, ranks: tuple[int, ...], index: int
) -> None:
    for rank, (text, took) in enumerate(cluster.run(_recovers, 2, name, replicas, ranks, index)):
        assert (FAILURES[name][2].format(index) if rank in ranks else "rank 1") in text
        assert took < 10


def _fails_for_good(rank: int, world_size: int, kind: type[BaseException]) -> list[str]:
    """What each of four steps ends with, where a hook fails on rank 1 in the first."""
    keep_group()
    step = 0

    def hook(state: None, bucket: Any) -> Future[Tensor]:
        if rank == 1 and step == 0:
            raise kind("no")
        return allreduce_hook(ALL, bucket)

    model = DistributedDataParallel(nn.Linear(3, 2, bias=False), ["cpu"], timeout=30.0)
    model.register_comm_hook(None, hook)
    found = []
    for step in range(4):
        if step == 3:
            # What is made anew is not forgotten.
            model.close()
        model.zero_grad()
        began = time.monotonic()
        # Before the time limit of a collective, and of the hook. Results would be those of
        # different steps.
        with pytest.raises((Exception, KeyboardInterrupt)) as caught:
            model(torch.full((1, 3), 10.0**step)).sum().backward()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
        assert time.monotonic() - began < 5.0
    model.close()
    return found


@pytest.mark.parametrize("kind", [HookError, KeyboardInterrupt])
def test_a_hook_that_sends_no_zeros_either(cluster: Cluster, kind: type[BaseException]) -> None:
    """Rank 0 has begun a collective, and rank 1 has none for it: nothing may be matched with it."""
    first, second = cluster.run(_fails_for_good, 2, kind, timeout=120)
    for text in (*first[1:], *second[1:]):
        assert text.startswith("CollectiveError: ")
        assert "s: rank 1 (" in text and "collectives of a communication hook that no" in text
        assert "; start all processes again" in text
    assert "CollectiveError" in first[0] and "rank 1" in first[0]
    assert f"{kind.__name__}: no" in first[0] and f"{kind.__name__}: no" in second[0]
