"""What is accepted as a communication hook, what it gets, and what becomes of what it returns."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.futures import Future

from dataparallel import DistributedDataParallel
from tests.comm_hook_cases import SMALL, completed, keep_group, net, train

Hook: TypeAlias = Callable[[Any, Any], Any]
F32, F64, C64 = torch.float32, torch.float64, torch.complex64


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """This process is a group of its own: a hook has the last word on its gradients."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    keep_group()
    yield
    dist.destroy_process_group()


class Known(nn.Module):
    """Its gradients are the numbers from 1 on, times the input; one parameter has any layout."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        images = torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.images = nn.Parameter(images)
        self.turned = nn.Parameter(torch.zeros(4, 2, dtype=dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for parameter in self.parameters():
            numbers = torch.arange(1.0, parameter.numel() + 1, device=x.device)
            total = total + (parameter * numbers.view(parameter.shape)).sum() * x.sum()
        return total.real


def reduced(hook: object, dtype: torch.dtype = F32, **options: Any) -> dict[str, Tensor]:
    """The gradients that a hook has made of those of :class:`Known`."""
    model = DistributedDataParallel(Known(dtype), ["cpu"], **{"timeout": 5.0, **options})
    try:
        model.register_comm_hook(None if isinstance(hook, str) else 3.0, hook)
        model(torch.ones(1)).backward()
    finally:
        model.close()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(found: dict[str, Tensor], factor: complex = 1.0, dtype: torch.dtype = F32) -> None:
    """Whether these are the gradients of :class:`Known`, times a factor."""
    for name, parameter in Known().named_parameters():
        numbers = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)
        torch.testing.assert_close(found[name], (factor * numbers).to(dtype))
        assert found[name].stride() == parameter.stride()


# --- what works ------------------------------------------------------------------------------


def doubles(state: object, bucket: Any) -> Future[Tensor]:
    return completed(bucket.buffer().mul_(2))


class Doubles:
    def __call__(self, state: object, bucket: Any) -> Future[Tensor]:
        assert repr(bucket) == "bucket 0 (weight, images, turned)"
        return doubles(state, bucket)


def writes_gradients(state: object, bucket: Any) -> Future[Tensor]:
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.stride() == parameter.stride()
        gradient.mul_(2)
    return completed(bucket.buffer())


def sets_another_buffer(state: object, bucket: Any) -> Future[Tensor]:
    """The gradients follow it."""
    before = [gradient.clone() for gradient in bucket.gradients()]
    room = torch.empty(100, dtype=F64)[7:45]
    bucket.set_buffer(room.copy_(bucket.buffer()))
    assert bucket.buffer() is room
    for gradient, old in zip(bucket.gradients(), before, strict=True):
        assert gradient.dtype == F64
        assert torch.equal(gradient.float(), old)
        gradient.mul_(2)
    return completed(room)


def resizes(state: object, bucket: Any) -> Future[Tensor]:
    padded = bucket.buffer().resize_(64)
    return completed(padded.mul_(2).resize_(38))


def completes_in_a_thread(state: float, bucket: Any) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    threading.Timer(0.02, future.set_result, [bucket.buffer() * (state - 1)]).start()
    return future


class CompletesAllWithTheLast:
    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Tensor], Tensor]] = []

    def __call__(self, state: object, bucket: Any) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self.waiting.append((future, bucket.buffer()))
        if bucket.is_last():
            assert len(self.waiting) > 1
            for one, buffer in self.waiting:
                one.set_result(buffer.mul_(2))
        return future


def returning(change: Callable[[Tensor], object]) -> Hook:
    return lambda state, bucket: completed(change(bucket.buffer()))


VIEW = {"gradient_as_bucket_view": True}
#: Each doubles the gradients.
DOUBLING: list[tuple[Hook, dict[str, Any]]] = [
    (doubles, {}),
    (doubles, VIEW),
    (Doubles(), {}),
    (writes_gradients, {}),
    (sets_another_buffer, {}),
    (resizes, {}),
    (resizes, VIEW),
    (completes_in_a_thread, {}),
    (CompletesAllWithTheLast(), {"bucket_cap_mb": 1e-5}),
    (returning(lambda t: [2 * t]), {}),
    (returning(lambda t: (t.mul_(2),)), {}),
    (returning(lambda t: 2 * t.half()), {}),
    (returning(lambda t: torch.stack([2 * t, t], 1)[:, 0]), {}),
    (returning(lambda t: torch.view_as_real(2 * t)), {"dtype": C64}),
]


@pytest.mark.parametrize(("hook", "options"), DOUBLING)
def test_hooks_of_users(hook: Hook, options: dict[str, Any]) -> None:
    check(reduced(hook, **options), 2, options.get("dtype", F32))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["allreduce", "noop"], [F32, C64]),
        *itertools.product(["FP16_compress", "bf16_compress"], [F32, F64]),
    ],
)
def test_hooks_by_name(name: str, dtype: torch.dtype) -> None:
    check(reduced(name, dtype), dtype=dtype)


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

    model = DistributedDataParallel(nn.Linear(3, 1).to(device), [device])
    model.register_comm_hook(None, hook)
    side = torch.Stream(device)
    with side:
        model(torch.ones(2, 3, device=device)).sum().backward()
        assert model.module.weight.grad is not None
        doubled = model.module.weight.grad * 2
    side.synchronize()
    assert doubled.tolist() == [[10.0] * 3]
    model.close()


# --- what is refused, and what fails ---------------------------------------------------------


class OwnError(Exception):
    pass


def one_argument(bucket: Any) -> None: ...


def raises(state: object, bucket: Any) -> Future[Tensor]:
    raise OwnError("no")


def has_an_error(state: object, bucket: Any) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_exception(OwnError("no"))  # type: ignore[arg-type]
    return future


def divides(state: object, bucket: Any) -> Future[Any]:
    future: Future[Any] = completed(1).then(lambda done: done.value() / 0)
    return future


def sets(buffer: Tensor) -> Hook:
    def hook(state: object, bucket: Any) -> Any:
        bucket.set_buffer(buffer)
        return bucket.gradients()

    return hook


IN = r"in the communication hook for bucket 0 \(\w+, \w+, \w+\)"
HAS = r"real numbers of shape \(38,\) on cpu, torch.strided, .* but its future has"
ONCE: dict[str, Any] = {"timeout": 0.2}
REFUSED: list[tuple[object, dict[str, Any], type[Exception], str]] = [
    (3, {}, TypeError, r"no communication hook 3; pass a function hook\(state, bucket\)"),
    ("sum", {}, ValueError, r"no communication hook 'sum'; .* 'fp16_compress', 'noop'"),
    ("noop", {"deterministic": True}, ValueError, "deterministic=True .*; use one of them"),
    ("fp16_compress", {"dtype": C64}, TypeError, r"of 16 bits, but .* are torch\.complex64"),
    (one_argument, {}, TypeError, f"2 were given.*{IN}"),
    (raises, {}, OwnError, f"no.*{IN}"),
    (has_an_error, {}, OwnError, f"no.*{IN}"),
    (divides, {}, RuntimeError, f"ZeroDivisionError.*{IN}"),
    (lambda state, bucket: Future(), ONCE, TimeoutError, rf"hook \S+ over 1 processes did .*{IN}"),
    (lambda state, bucket: None, {}, AttributeError, f"no attribute 'add_done_callback'.*{IN}"),
    (sets(torch.zeros(5)), {}, RuntimeError, "split_sizes to sum exactly to 5"),
    (sets(torch.zeros(76)[::2]), {}, ValueError, r"of stride \(2,\); pass a contiguous .* \(38,\)"),
    (returning(lambda t: t[:5]), {}, ValueError, rf"{HAS}.*real numbers of shape \(5,\) on cpu"),
    (returning(Tensor.int), {}, ValueError, f"{HAS}.*whole numbers"),
    (returning(lambda t: t.to(C64)), {}, ValueError, f"{HAS}.*complex numbers"),
    (returning(lambda t: t.to("virtual:1")), {}, ValueError, f"{HAS}.*on virtual:1"),
    (returning(Tensor.to_sparse), {}, ValueError, f"{HAS}.*on cpu, torch.sparse_coo"),
    (returning(lambda t: None), {}, ValueError, f"{HAS}.*a NoneType"),
    (returning(lambda t: [t, t]), {}, ValueError, f"{HAS}.*a list"),
]


@pytest.mark.parametrize(("hook", "options", "kind", "message"), REFUSED)
def test_what_is_refused(
    hook: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        reduced(hook, **options)


def test_a_second_hook_and_one_without_processes_are_refused() -> None:
    model = DistributedDataParallel(net(), ["cpu"])
    model.register_comm_hook(None, "noop")
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, "noop")
    alone = DistributedDataParallel(net(), ["cpu", "cpu"], process_group=False)
    with pytest.raises(ValueError, match=r"no process group; call torch\.distributed\.init"):
        alone.register_comm_hook(None, "allreduce")


# --- several buckets -------------------------------------------------------------------------


def marked(hook: Hook) -> Hook:
    hook.one_bucket_at_a_time = True  # type: ignore[attr-defined]
    return hook


@pytest.mark.parametrize(
    ("alone", "wrap"),
    [
        (False, default_hooks.fp16_compress_wrapper),
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
    train(model, 0, 1)
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
    model = DistributedDataParallel(net(), ["cpu"], bucket_cap_mb=SMALL)
    model.register_comm_hook(
        None, functools.partial(quantization_hooks.quantization_pertensor_hook)
    )
    assert model.options.hook is not None
    assert model.options.hook.one_bucket_at_a_time
