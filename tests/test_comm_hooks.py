"""What is accepted as a communication hook, what it gets, and what becomes of what it returns."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as TorchsGradBucket
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.futures import Future

from dataparallel import DistributedDataParallel
from dataparallel.comm_hooks import bf16_compress_hook
from tests.comm_hook_cases import SMALL, Known, completed, keep_group, net, train

Hook = Callable[[Any, Any], Any]


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """This process is a group of its own: a hook has the last word on its gradients."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    keep_group()
    yield
    dist.destroy_process_group()


def reduced(
    hook: object, state: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    """The gradients that a hook has made of those of :class:`Known`."""
    model = DistributedDataParallel(Known(dtype), ["cpu"], **{"timeout": 5.0, **options})
    try:
        model.register_comm_hook(state, hook)
        model(torch.ones(1)).backward()
    finally:
        model.close()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def numbers(factor: complex = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The gradients of :class:`Known` themselves."""
    return {
        name: factor * torch.arange(1.0, p.numel() + 1).view(p.shape).to(dtype)
        for name, p in Known().named_parameters()
    }


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    for name, parameter in Known().named_parameters():
        assert found[name].stride() == parameter.stride()


# --- what is accepted ------------------------------------------------------------------------


def with_default(state: object, bucket: Any, size: int = 3) -> Future[Tensor]:
    return completed(bucket.buffer().mul_(2))


class Callable_:
    def __call__(self, state: object, bucket: Any) -> Future[Tensor]:
        return with_default(state, bucket)


@pytest.mark.parametrize(
    "hook",
    [
        with_default,
        Callable_(),
        Callable_().__call__,
        functools.partial(with_default, size=5),
        lambda *args: with_default(*args),
    ],
)
@pytest.mark.parametrize("view", [False, True])
def test_what_is_accepted(hook: Hook, view: bool) -> None:
    check(reduced(hook, gradient_as_bucket_view=view), numbers(2))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["allreduce", "noop"], [torch.float32, torch.complex64]),
        *itertools.product(["FP16_compress", "bf16_compress"], [torch.float32, torch.float64]),
    ],
)
def test_hooks_by_name(name: str, dtype: torch.dtype) -> None:
    check(reduced(name, dtype=dtype), numbers(dtype=dtype))


def test_gradients_of_a_single_process_may_be_changed_before_they_are_added_to() -> None:
    """A sum over one process may be taken again; nobody has to know what of it is reduced."""
    net = Known()
    model = DistributedDataParallel(net, ["cpu"] * 2, average="none")
    model.register_comm_hook(None, "allreduce")
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    check(found, numbers(1.5))


@pytest.mark.parametrize(
    "kind", [k for k in DDPCommHookType if "QUANT" not in k.name], ids=lambda kind: str(kind.name)
)
def test_torchs_types_register_themselves(kind: DDPCommHookType) -> None:
    model = DistributedDataParallel(Known(), ["cpu"])
    register_ddp_comm_hook(kind, model)
    model(torch.ones(1)).backward()
    model.close()


@pytest.mark.parametrize("hook", ["fp16_compress", functools.partial(bf16_compress_hook)])
def test_hooks_of_16_bits_refuse_complex_numbers(hook: object) -> None:
    with pytest.raises(TypeError, match=r"of 16 bits, but .* are torch\.complex64, .*'allreduce'"):
        reduced(hook, dtype=torch.complex64)


def one_argument(bucket: Any) -> None: ...


@pytest.mark.parametrize(
    ("hook", "kind", "message"),
    [
        (3, TypeError, r"no communication hook 3; pass a function hook\(state, bucket\)"),
        (one_argument, TypeError, r"(?s)2 were given.*in the communication hook for bucket 0 \("),
        ("sum", ValueError, r"no communication hook 'sum'; .* 'fp16_compress', 'noop'"),
    ],
)
def test_what_is_refused(hook: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        reduced(hook)


# --- the bucket ------------------------------------------------------------------------------


def test_a_bucket_has_the_methods_of_torchs() -> None:
    theirs = {name for name in dir(TorchsGradBucket) if not name.startswith("_")}
    assert theirs == {"buffer", "gradients", "index", "is_last", "parameters", "set_buffer"}

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        assert theirs <= set(dir(bucket))
        assert repr(bucket) == "bucket 0 (weight, images, turned)"
        return completed(bucket.buffer())

    reduced(hook)


def test_gradients_are_views_of_the_buffer_in_the_layout_of_the_parameters() -> None:
    def hook(state: object, bucket: Any) -> Future[Tensor]:
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.stride() == parameter.stride()
            gradient.mul_(3)
        return completed(bucket.buffer())

    check(reduced(hook), numbers(3))


def test_gradients_follow_another_buffer() -> None:
    def hook(state: object, bucket: Any) -> Future[Tensor]:
        before = [gradient.clone() for gradient in bucket.gradients()]
        room = torch.empty(100, dtype=torch.float64)[7:45]
        bucket.set_buffer(room.copy_(bucket.buffer()))
        assert bucket.buffer() is room
        for gradient, old in zip(bucket.gradients(), before, strict=True):
            assert gradient.dtype == torch.float64
            assert torch.equal(gradient.float(), old)
            gradient.mul_(2)
        return completed(room)

    check(reduced(hook), numbers(2))


def test_a_hook_may_resize_the_buffer() -> None:
    def hook(state: object, bucket: Any) -> Future[Tensor]:
        padded = bucket.buffer().resize_(64)
        return completed(padded.mul_(2).resize_(38))

    for view in (False, True):
        check(reduced(hook, gradient_as_bucket_view=view), numbers(2))


@pytest.mark.parametrize(
    ("buffer", "kind", "message"),
    [
        (torch.zeros(5), RuntimeError, r"split_sizes to sum exactly to 5"),
        (torch.zeros(76)[::2], ValueError, r"of stride \(2,\); pass a contiguous .* \(38,\) to s"),
    ],
)
def test_buffers_without_gradients(buffer: Tensor, kind: type[Exception], message: str) -> None:
    def hook(state: object, bucket: Any) -> Future[Tensor]:
        bucket.set_buffer(buffer)
        bucket.gradients()
        return completed(buffer)

    with pytest.raises(kind, match=message):
        reduced(hook)


# --- what becomes of the future --------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.clone(),
        lambda t: [t.clone()],
        lambda t: (t,),
        lambda t: t.half(),
        lambda t: t.double(),
        lambda t: torch.stack([t, t], 1)[:, 0],
    ],
)
def test_what_a_future_may_have(change: Callable[[Tensor], object]) -> None:
    check(reduced(lambda state, bucket: completed(change(bucket.buffer()))), numbers())


def test_complex_numbers_come_back_as_pairs() -> None:
    def hook(state: object, bucket: Any) -> Future[Tensor]:
        return completed(torch.view_as_real(bucket.buffer() * 2j))

    check(reduced(hook, dtype=torch.complex64), numbers(2j, torch.complex64))


def test_a_future_may_be_completed_by_any_thread() -> None:
    def hook(state: float, bucket: Any) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        threading.Timer(0.05, future.set_result, [bucket.buffer() * state]).start()
        return future

    check(reduced(hook, 3.0), numbers(3))


def test_a_future_is_completed_behind_the_work_on_its_stream() -> None:
    """The thread that waits must have its stream wait for that of the thread that computed."""
    device = torch.device("virtual", 0)

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        future: Future[Tensor] = Future(devices=[device])

        def compute() -> None:
            with torch.Stream(device):
                future.set_result(torch.zeros_like(bucket.buffer()).add_(5))

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join(10)
        return future

    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device), [device])
    model.register_comm_hook(None, hook)
    side = torch.Stream(device)
    with side:
        model(torch.ones(2, 3, device=device)).sum().backward()
        assert model.module.weight.grad is not None
        doubled = model.module.weight.grad * 2
    side.synchronize()
    assert doubled.tolist() == [[10.0] * 3]
    model.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:5], r"real numbers of shape \(5,\) on cpu"),
        (lambda t: t.view(2, 19), r"shape \(2, 19\)"),
        (lambda t: t.int(), "whole numbers"),
        (lambda t: t.to(torch.complex64), "complex numbers"),
        (lambda t: t.to("virtual:1"), "on virtual:1"),
        (lambda t: t.to_sparse(), "on cpu, torch.sparse_coo"),
        (lambda t: None, "a NoneType"),
        (lambda t: [], "a list"),
        (lambda t: [t, t], "a list"),
    ],
)
def test_values_that_are_not_like_the_buffer(
    change: Callable[[Tensor], object], message: str
) -> None:
    text = r"real numbers of shape \(38,\) on cpu, torch.strided, .* but its future has"
    with pytest.raises(ValueError, match=f"{text}.*{message}"):
        reduced(lambda state, bucket: completed(change(bucket.buffer())))


@pytest.mark.parametrize("returned", [None, torch.ones(1)])
def test_what_is_no_future(returned: object) -> None:
    text = r"(?s)no attribute 'add_done_callback'.*for bucket 0 \("
    with pytest.raises(AttributeError, match=text):
        reduced(lambda state, bucket: returned)


class OwnError(Exception):
    pass


def raises(state: object, bucket: Any) -> Future[Tensor]:
    raise OwnError("no")


def has_an_error(state: object, bucket: Any) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_exception(OwnError("no"))  # type: ignore[arg-type]
    return future


def divides(state: object, bucket: Any) -> Future[Any]:
    future: Future[Any] = completed(1).then(lambda done: done.value() / 0)
    return future


@pytest.mark.parametrize(
    ("hook", "kind", "message"),
    [
        (raises, OwnError, "no"),
        (has_an_error, OwnError, "no"),
        (divides, RuntimeError, "ZeroDivisionError"),
    ],
)
def test_an_error_tells_the_bucket(hook: Hook, kind: type[Exception], message: str) -> None:
    text = rf"(?s){message}.*in the communication hook for bucket 0 \(\w+, \w+, \w+\)"
    with pytest.raises(kind, match=text):
        reduced(hook)


def test_a_future_that_nobody_completes() -> None:
    begin = time.monotonic()
    text = (
        r"(?s)the future of the communication hook \S+ over 1 processes did not complete within .*"
        r"in the communication hook for bucket 0 \(\w+, \w+, \w+\)"
    )
    with pytest.raises(TimeoutError, match=text):
        reduced(lambda state, bucket: Future(), timeout=0.2)
    assert time.monotonic() - begin < 5


# --- several buckets -------------------------------------------------------------------------


def marked(hook: Hook) -> Hook:
    hook.one_bucket_at_a_time = True  # type: ignore[attr-defined]
    return hook


@pytest.mark.parametrize(
    ("alone", "wrap"),
    [
        (False, lambda hook: hook),
        (False, default_hooks.fp16_compress_wrapper),
        (True, marked),
        (True, lambda hook: functools.partial(marked(hook))),
        (True, lambda hook: default_hooks.bf16_compress_wrapper(marked(hook))),
    ],
)
def test_when_a_hook_gets_the_next_bucket(alone: bool, wrap: Callable[[Hook], Hook]) -> None:
    log: list[str] = []

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        log.append(f"begin {bucket.index()}")
        future: Future[Tensor] = Future()

        def finish() -> None:
            log.append(f"end {bucket.index()}")
            future.set_result(bucket.buffer())

        threading.Timer(0.05, finish).start()
        return future

    model = DistributedDataParallel(net(), ["cpu"], bucket_cap_mb=SMALL)
    model.register_comm_hook(None, wrap(hook))
    train(model, 0, 1, step_here=False)
    model.close()
    count = len(log) // 2
    assert count > 2
    begins, ends = ([f"{what} {i}" for i in range(count)] for what in ("begin", "end"))
    if alone:
        assert log == [text for pair in zip(begins, ends, strict=True) for text in pair]
    else:
        assert log[:count] == begins


def test_torchs_hooks_that_launch_from_callbacks_get_one_bucket_at_a_time() -> None:
    """Quantization gathers twice: the second time from a callback of the first."""
    hook = functools.partial(quantization_hooks.quantization_pertensor_hook)
    model = DistributedDataParallel(net(), ["cpu"], bucket_cap_mb=SMALL)
    model.register_comm_hook(None, hook)
    assert model.options.hook is not None
    assert model.options.hook.one_bucket_at_a_time
    model.close()


def test_a_hook_may_complete_all_buckets_with_the_last() -> None:
    waiting: list[tuple[Future[Tensor], Tensor]] = []

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        waiting.append((future, bucket.buffer()))
        if bucket.is_last():
            for one, buffer in waiting:
                one.set_result(buffer.mul_(2))
        return future

    check(reduced(hook, bucket_cap_mb=1e-5), numbers(2))
    assert len(waiting) > 1
