"""Communication hooks: what is accepted as one, and what is known of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as TorchsGradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.futures import Future

from dataparallel.reducer import builtin_hooks
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hooks import check_hook, name_of, resolve_hook
from tests.comm_hook_cases import Hook, completed, result_of


def with_default(state: object, bucket: GradBucket, size: int = 3) -> Future[Tensor]:
    return completed(bucket.buffer())


def annotated(state: object, bucket: TorchsGradBucket) -> Future[Tensor]:
    return completed(bucket.buffer())


def loosely_annotated(state: Any, bucket: Any) -> Any:
    return completed(bucket.buffer())


def variadic(*args: Any) -> Future[Tensor]:
    return completed(args[1].buffer())


class Callable_:
    def __call__(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        return completed(bucket.buffer())

    def method(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        return completed(bucket.buffer())


@pytest.mark.parametrize(
    "hook",
    [
        with_default,
        annotated,
        loosely_annotated,
        variadic,
        Callable_(),
        Callable_().method,
        functools.partial(with_default, size=5),
        lambda state, b: completed(b.buffer()),
    ],
)
def test_what_is_accepted(hook: Hook) -> None:
    assert torch.equal(result_of(hook), torch.arange(38.0))


@pytest.mark.parametrize("kind", DDPCommHookType, ids=lambda kind: str(kind.name))
def test_torchs_own_hooks_are_accepted(kind: DDPCommHookType) -> None:
    class Model:
        def register_comm_hook(self, state: Any, hook: Hook) -> None:
            check_hook(state, hook)

    register_ddp_comm_hook(kind, Model())
    assert resolve_hook(kind).name == f"DDPCommHookType.{kind.name}"


def no_arguments() -> None: ...
def one_argument(bucket: GradBucket) -> None: ...
def keyword_only(state: object, *, bucket: GradBucket) -> None: ...
async def asynchronous(state: object, bucket: GradBucket) -> None: ...
def takes_a_tensor(state: object, bucket: Tensor) -> Future[Tensor]: ...  # type: ignore[empty-body]
def returns_a_tensor(state: object, bucket: GradBucket) -> Tensor: ...  # type: ignore[empty-body]
def wrong_twice(state: object, bucket: int) -> None: ...


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (3, r"must be callable as hook\(state, bucket\), but got 3 of type int; .*'allreduce'"),
        (no_arguments, r"no_arguments\(\) -> 'None' is called as hook\(state, bucket\), with two"),
        (one_argument, r"too many positional arguments; bind what else it needs with functools"),
        (keyword_only, "too many positional arguments; bind"),
        (functools.partial(keyword_only, 1), "too many positional arguments; bind"),
        (asynchronous, r"asynchronous is a coroutine function, .* return a torch.futures.Future"),
    ],
)
def test_what_cannot_be_called(hook: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        resolve_hook(hook)


@pytest.mark.parametrize(
    ("hook", "messages"),
    [
        (takes_a_tensor, ["the annotation of 'bucket' is Tensor, not GradBucket; correct the"]),
        (returns_a_tensor, [r"the return annotation is Tensor, not torch.futures.Future\[Tensor"]),
        (wrong_twice, ["annotation of 'bucket' is int", "and the return annotation is None"]),
    ],
)
def test_wrong_annotations(hook: Hook, messages: list[str]) -> None:
    for message in messages:
        with pytest.raises(ValueError, match=message):
            check_hook(None, hook)


@pytest.mark.parametrize(
    "hook", [powerSGD_hook.powerSGD_hook, post_localSGD_hook.post_localSGD_hook]
)
def test_a_hook_with_a_state_of_its_own(hook: Hook) -> None:
    with pytest.raises(TypeError, match=r"needs a P\w+State as its state, but got None; pass P"):
        check_hook(None, hook)
    check_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    # Whatever behaves like it will do, as in torch.
    check_hook(object(), hook)


def test_hooks_by_name() -> None:
    group: Any = object()
    for name, function in builtin_hooks.BUILTIN.items():
        assert resolve_hook(name, group)[:3] == (function, group, name)
    for kind in (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS):
        found = resolve_hook(kind, group)
        assert found.function is builtin_hooks.BUILTIN[kind.name.lower()]
        assert found.name == f"BuiltinCommHookType.{kind.name}"
    assert resolve_hook("quantize_per_tensor").function is (
        quantization_hooks.quantization_pertensor_hook
    )
    found = resolve_hook("POWER_SGD_rank2", group)
    assert found.function is powerSGD_hook.powerSGD_hook
    assert found.state.matrix_approximation_rank == 2
    assert found.state.process_group is group


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"no communication hook 'sum'; .* 'fp16_compress', 'noop'"
    ):
        resolve_hook("sum")


def test_names_of_hooks() -> None:
    assert name_of(with_default) == "with_default"
    assert name_of(functools.partial(with_default, size=1)) == "with_default"
    assert name_of(Callable_()) == "Callable_"
    assert name_of(Callable_().method) == "Callable_.method"


def marked(state: object, bucket: GradBucket) -> Future[Tensor]:
    return completed(bucket.buffer())


marked.one_bucket_at_a_time = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hook", "alone", "in_memory_order"),
    [
        (default_hooks.allreduce_hook, False, False),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), False, False),
        (with_default, False, False),
        (marked, True, False),
        (functools.partial(marked), True, False),
        (default_hooks.bf16_compress_wrapper(marked), True, False),
        (quantization_hooks.quantization_perchannel_hook, True, False),
        (functools.partial(quantization_hooks.quantization_perchannel_hook), True, False),
        (powerSGD_hook.batched_powerSGD_hook, True, True),
        (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), True, True),
    ],
)
def test_what_is_known_of_a_hook(hook: Hook, alone: bool, in_memory_order: bool) -> None:
    found = resolve_hook(hook, "the state")
    assert found.one_bucket_at_a_time is alone
    assert found.in_memory_order is in_memory_order


def test_a_hook_that_calls_power_sgd_is_known_by_its_state() -> None:
    def hook(state: Any, bucket: Any) -> Future[Tensor]:
        future: Future[Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
        return future

    found = resolve_hook(hook, powerSGD_hook.PowerSGDState(None))
    assert found.one_bucket_at_a_time
    assert found.in_memory_order
