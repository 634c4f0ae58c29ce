"""Communication hooks: what they get, what is accepted as one, what becomes of their futures."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as TorchsGradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.futures import Future

from dataparallel.reducer import builtin_hooks
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hooks import check_hook, name_of, resolve_hook
from dataparallel.reducer.pending_hook import HookSender, PendingHook, run_hook
from dataparallel.reducer.storage import BucketStorage
from tests.cluster import Cluster

Hook = Callable[[Any, GradBucket], Any]


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One contiguous, one with channels last, and one that is transposed."""
    weight = torch.zeros(2, 3, dtype=dtype)
    images = torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
    return [weight, images, torch.zeros(4, 2, dtype=dtype).t()]


NAMES = ["weight", "images", "turned"]


def a_bucket(
    dtype: torch.dtype = torch.float32, index: int = 0, *, is_last: bool = True
) -> GradBucket:
    """A bucket with the numbers 0, 1, 2 and so on in the order of memory."""
    storage = BucketStorage(parameters(dtype))
    storage.flat.copy_(torch.arange(storage.flat.numel()))
    return GradBucket(index, storage.flat, storage.views, parameters(dtype), NAMES, is_last=is_last)


def completed(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def run(hook: Hook, bucket: GradBucket | None = None, state: Any = None) -> PendingHook:
    return run_hook(resolve_hook(hook, state), bucket or a_bucket())


def result_of(hook: Hook, bucket: GradBucket | None = None) -> Tensor:
    return run(hook, bucket).wait(5.0, "the test")


# --- the bucket ------------------------------------------------------------------------------


def test_a_bucket_has_the_methods_of_torchs() -> None:
    theirs = {name for name in dir(TorchsGradBucket) if not name.startswith("_")}
    assert theirs == {"buffer", "gradients", "index", "is_last", "parameters", "set_buffer"}
    assert theirs <= set(dir(GradBucket))


def test_what_a_bucket_tells() -> None:
    given = parameters()
    storage = BucketStorage(given)
    bucket = GradBucket(3, storage.flat, storage.views, given, NAMES, is_last=False)
    assert bucket.index() == 3
    assert not bucket.is_last()
    assert a_bucket().is_last()
    assert bucket.names() == NAMES
    assert all(a is b for a, b in zip(bucket.parameters(), given, strict=True))
    assert bucket.buffer().data_ptr() == storage.flat.data_ptr()
    assert repr(bucket) == (
        "GradBucket(index=3, numel=38, dtype=torch.float32, names=['weight', 'images', 'turned'])"
    )


def test_gradients_are_views_in_the_layout_of_the_parameters() -> None:
    bucket = a_bucket()
    for gradient, parameter in zip(bucket.gradients(), parameters(), strict=True):
        assert gradient.shape == parameter.shape
        assert gradient.stride() == parameter.stride()
    bucket.buffer().zero_()
    bucket.gradients()[1].fill_(1)
    assert bucket.buffer().tolist() == [0.0] * 6 + [1.0] * 24 + [0.0] * 8


def test_gradients_follow_another_buffer() -> None:
    bucket = a_bucket()
    before = bucket.gradients()
    replaced = bucket.buffer().to(torch.float16)
    bucket.set_buffer(replaced)
    assert bucket.buffer() is replaced
    for gradient, old in zip(bucket.gradients(), before, strict=True):
        assert gradient.dtype == torch.float16
        assert gradient.stride() == old.stride()
        assert torch.equal(gradient.float(), old)
    bucket.gradients()[2].zero_()
    assert replaced[-8:].count_nonzero() == 0
    assert before[2].count_nonzero() == 8


def test_a_buffer_within_a_larger_storage() -> None:
    """Views count from the start of the storage, and a buffer may begin further on."""
    flat = torch.arange(10.0)[4:]
    bucket = GradBucket(0, flat, [flat.view(2, 3)], [torch.zeros(2, 3)], ["w"], is_last=True)
    bucket.set_buffer(torch.arange(20.0)[7:13])
    assert bucket.gradients()[0].tolist() == [[7.0, 8.0, 9.0], [10.0, 11.0, 12.0]]


def test_gradients_in_the_order_of_memory() -> None:
    """As torch's bucket gives them; a contiguous one is the same in both."""
    bucket = a_bucket()
    bucket.in_memory_order = True
    for gradient, parameter in zip(bucket.gradients(), parameters(), strict=True):
        assert gradient.shape == parameter.shape
        assert gradient.is_contiguous()
    together = torch.cat([gradient.view(-1) for gradient in bucket.gradients()])
    assert torch.equal(together, bucket.buffer())
    bucket.gradients()[1].zero_()
    assert bucket.buffer().count_nonzero() == 38 - 1 - 24


def test_a_hook_may_resize_the_buffer() -> None:
    storage = BucketStorage(parameters())
    storage.flat.fill_(1)
    bucket = GradBucket(0, storage.flat, storage.views, parameters(), NAMES, is_last=True)
    bucket.buffer().resize_(4096)
    bucket.buffer().fill_(2)
    assert storage.flat.shape == (38,)
    assert storage.flat.tolist() == [2.0] * 38
    assert all((view == 2).all() for view in storage.views)


def test_a_sparse_bucket() -> None:
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1, 3]]), torch.ones(2, 2), (5, 2), check_invariants=True
    )
    bucket = GradBucket(0, gradient, [gradient], [torch.zeros(5, 2)], ["table"], is_last=True)
    assert bucket.buffer() is gradient
    bucket.set_buffer(gradient * 2)
    assert bucket.gradients()[0].to_dense().sum() == 8


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(5), r"shape \(5,\), but its gradients have 38 elements; pass a tensor of"),
        (torch.zeros(38, 1), r"shape \(38, 1\), but its gradients have 38 elements"),
        (torch.zeros(76)[::2], r"stride 2, but gradients are cut .*; pass tensor.contiguous\(\)"),
    ],
)
def test_buffers_without_gradients(buffer: Tensor, message: str) -> None:
    bucket = a_bucket()
    bucket.set_buffer(buffer)
    assert bucket.buffer() is buffer
    with pytest.raises(ValueError, match=message):
        bucket.gradients()


def test_a_buffer_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="bucket 0 cannot have a buffer of type list; pass a tens"):
        a_bucket().set_buffer([1.0])  # type: ignore[arg-type]


# --- what is a hook --------------------------------------------------------------------------


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


# --- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: (t,)])
def test_the_value_may_be_in_a_list(wrap: Callable[[Tensor], object]) -> None:
    result = torch.ones(38)
    assert result_of(lambda state, bucket: completed(wrap(result))) is result


def test_the_hook_gets_its_state_and_the_bucket() -> None:
    seen: list[object] = []

    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        seen.extend([state, bucket])
        return completed(bucket.buffer())

    bucket = a_bucket()
    run(hook, bucket, "state").wait(5.0, "the test")
    assert seen == ["state", bucket]


def test_a_future_may_be_completed_by_any_thread() -> None:
    future: Future[Tensor] = Future()
    pending = run(lambda state, bucket: future)
    assert not pending.done()
    thread = threading.Timer(0.05, future.set_result, [torch.ones(38)])
    thread.start()
    assert pending.wait(10.0, "the test").sum() == 38
    assert pending.done()
    assert pending.wait(0.0, "the test, again,").sum() == 38
    thread.join()


def test_a_future_is_completed_behind_the_work_on_its_stream() -> None:
    """The thread that waits must have its stream wait for that of the thread that computed."""
    device = torch.device("virtual", 0)
    flat = torch.zeros(4, device=device)
    bucket = GradBucket(0, flat, [flat], [flat], ["w"], is_last=True)
    future: Future[Tensor] = Future(devices=[device])

    def compute() -> None:
        with torch.Stream(device):
            future.set_result(torch.zeros(4, device=device).add_(5))

    pending = run(lambda state, bucket: future, bucket)
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join(10)
    side = torch.Stream(device)
    with side:
        doubled = pending.wait(10.0, "the test") * 2
    side.synchronize()
    assert doubled.tolist() == [10.0] * 4


def test_another_precision_is_put_into_the_buffer() -> None:
    storage = BucketStorage(parameters())
    bucket = GradBucket(0, storage.flat, storage.views, parameters(), NAMES, is_last=True)

    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        bucket.set_buffer(bucket.buffer().half())
        return completed(bucket.buffer().fill_(0.5))

    result = result_of(hook, bucket)
    assert result.dtype == torch.float32
    assert result.data_ptr() == storage.flat.data_ptr()
    assert storage.flat.tolist() == [0.5] * 38


def test_complex_numbers_come_back_as_pairs() -> None:
    bucket = a_bucket(torch.complex64)
    bucket.buffer().mul_(1 + 2j)
    result = result_of(lambda state, bucket: completed(torch.view_as_real(bucket.buffer())), bucket)
    assert result.dtype == torch.complex64
    assert torch.equal(result, bucket.buffer())


def test_a_resized_buffer_that_has_its_shape_again() -> None:
    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        padded = bucket.buffer().resize_(64)
        return completed(padded.mul_(2).resize_(38))

    assert torch.equal(result_of(hook), 2 * torch.arange(38.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:5], r"of shape \(5,\), torch.float32 on cpu, but bucket 0 \(weight, images"),
        (lambda t: torch.cat([t, t]), r"shape \(76,\), .* has shape \(38,\), torch.float32 on cpu"),
        (lambda t: t.view(2, 19), r"shape \(2, 19\), .* has shape \(38,\)"),
        (lambda t: t.int(), "torch.int32 on cpu, but .* has .* torch.float32 on cpu; return a"),
        (lambda t: t.to(torch.complex64), "torch.complex64 on cpu, but .* has .* torch.float32"),
        (lambda t: t.to("virtual:1"), "torch.float32 on virtual:1, but .* torch.float32 on cpu"),
        (lambda t: t.to_sparse(), "on cpu, torch.sparse_coo, but .* torch.float32 on cpu; return"),
    ],
)
def test_results_that_are_not_like_the_buffer(
    change: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        result_of(lambda state, bucket: completed(change(bucket.buffer())))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"must have a tensor, or a list of one, but has None for bucket 0 \(weight"),
        (3.0, "but has a float for"),
        ([], r"but has a list of 0 \(empty\) for"),
        ([torch.ones(1)] * 2, r"but has a list of 2 \(Tensor\) for"),
    ],
)
def test_values_that_are_no_tensor(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        result_of(lambda state, bucket: completed(value))


class Work:
    def get_future(self) -> None: ...


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "but returned None for bucket 0 .*; return the future of the collective"),
        (torch.ones(1), "but returned a Tensor for .* future.set_result"),
        (Work(), r"but returned a Work for .*; return work.get_future\(\)"),
    ],
)
def test_what_is_no_future(returned: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(lambda state, bucket: returned)


# --- errors ----------------------------------------------------------------------------------


class OwnError(Exception):
    pass


WHERE = r"in the communication hook for bucket 2 \(weight, images, turned\)"


def test_an_error_of_the_hook_keeps_its_type() -> None:
    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        raise OwnError("too large")

    with pytest.raises(OwnError, match=rf"too large\n{WHERE}"):
        run(hook, a_bucket(index=2))


def test_an_error_of_the_future_keeps_its_type() -> None:
    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        future.set_exception(OwnError("lost"))  # type: ignore[arg-type]
        return future

    with pytest.raises(OwnError, match=rf"lost\n{WHERE}"):
        result_of(hook, a_bucket(index=2))


def test_an_error_of_a_callback() -> None:
    def hook(state: object, bucket: GradBucket) -> Future[Any]:
        future: Future[Any] = completed(1).then(lambda done: done.value() / 0)
        return future

    with pytest.raises(RuntimeError, match=rf"(?s)ZeroDivisionError.*{WHERE}"):
        result_of(hook, a_bucket(index=2))


def test_a_future_that_nobody_completes() -> None:
    future: Future[Tensor] = Future()

    def never(state: object, bucket: GradBucket) -> Future[Tensor]:
        return future

    pending = run(never, a_bucket(index=2))
    begin = time.monotonic()
    message = (
        r"hook \S+never did not finish bucket 2 \(weight, images, turned\) within 0.1 s, for which "
        "the last step waits: nobody has completed its future; make sure"
    )
    with pytest.raises(TimeoutError, match=message):
        pending.wait(0.1, "the last step")
    assert time.monotonic() - begin < 5
    future.set_result(torch.ones(38))
    assert pending.wait(1.0, "the test").sum() == 38


def one_rank_waits(rank: int, world_size: int) -> str:
    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        return completed(bucket.buffer()) if rank == 0 else Future()

    try:
        result_of_soon = run(hook).wait(0.05, "the backward")
    except TimeoutError as error:
        return str(error)
    return f"{result_of_soon.numel()} elements"


def test_a_timeout_tells_the_rank(cluster: Cluster) -> None:
    first, second = cluster.run(one_rank_waits, 2)
    assert first == "38 elements"
    assert "within 0.05 s in rank 1 of 2, for which the backward waits" in second


# --- hooks with processes --------------------------------------------------------------------

_kept: list[object] = []


def keep_group() -> None:
    """Let the default group live until the next test of this process.

    Callbacks that run in gloo's threads hold the group. If one of them lets go of it last, the
    thread frees the group, waits for itself, and the process aborts.
    """
    _kept[:] = [dist.group.WORLD]


def means(rank: int, world_size: int, dtype: torch.dtype) -> list[Tensor]:
    """The results of our hooks, and of torch's, for the same numbers."""
    keep_group()
    hooks: Sequence[object] = [
        "allreduce",
        default_hooks.allreduce_hook,
        "fp16_compress",
        default_hooks.fp16_compress_hook,
        default_hooks.fp16_compress_wrapper(builtin_hooks.allreduce_hook),
        "bf16_compress",
        default_hooks.bf16_compress_hook,
        "noop",
    ]
    results = []
    for hook in hooks:
        bucket = a_bucket(dtype)
        bucket.buffer().add_(rank).mul_(0.3)
        results.append(run_hook(resolve_hook(hook), bucket).wait(10.0, "the test").clone())
    return results


def test_hooks_by_name_agree_with_torchs(cluster: Cluster) -> None:
    for rank, results in enumerate(cluster.run(means, 2, torch.float32)):
        ours, theirs, fp16, their_fp16, wrapped, bf16, their_bf16, noop = results
        mean = (torch.arange(38.0) + 0.5) * 0.3
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, mean)
        assert torch.equal(fp16, their_fp16)
        assert torch.equal(fp16, wrapped)
        assert not torch.equal(fp16, ours)
        torch.testing.assert_close(fp16, mean, atol=1e-2, rtol=1e-3)
        assert torch.equal(bf16, their_bf16)
        torch.testing.assert_close(bf16, mean, atol=1e-2, rtol=1e-2)
        assert torch.equal(noop, (torch.arange(38.0) + rank) * 0.3)


def complex_means(rank: int, world_size: int) -> list[Tensor]:
    keep_group()
    results = []
    for hook in ("allreduce", default_hooks.allreduce_hook):
        bucket = a_bucket(torch.complex64)
        bucket.buffer().mul_(1j * (rank + 1))
        results.append(run_hook(resolve_hook(hook), bucket).wait(10.0, "the test").clone())
    return results


def test_complex_gradients(cluster: Cluster) -> None:
    for results in cluster.run(complex_means, 2):
        for result in results:
            torch.testing.assert_close(result, torch.arange(38.0) * 1.5j)


def test_without_processes_a_mean_is_what_there_is() -> None:
    for name in ("allreduce", "fp16_compress", "bf16_compress"):
        result = run_hook(resolve_hook(name), a_bucket()).wait(1.0, "the test")
        assert torch.equal(result, torch.arange(38.0))


# --- several buckets -------------------------------------------------------------------------


def sent_by(hook: Hook, buckets: int = 3) -> list[Tensor]:
    storages = [BucketStorage(parameters()) for _ in range(buckets)]
    for number, storage in enumerate(storages):
        storage.flat.fill_(number)
    sender = HookSender(resolve_hook(hook), [parameters()] * buckets, [NAMES] * buckets, 10.0)
    sent = [
        sender.send(number, storage, number == buckets - 1)
        for number, storage in enumerate(storages)
    ]
    return [one.wait() for one in sent]


def slow(log: list[str]) -> Hook:
    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        log.append(f"begin {bucket.index()}")
        future: Future[Tensor] = Future()

        def finish() -> None:
            log.append(f"end {bucket.index()}")
            future.set_result(bucket.buffer().add_(10))

        threading.Timer(0.05, finish).start()
        return future

    return hook


def test_a_hook_gets_the_next_bucket_at_once() -> None:
    log: list[str] = []
    results = sent_by(slow(log))
    assert log[:3] == ["begin 0", "begin 1", "begin 2"]
    assert [result.mean().item() for result in results] == [10.0, 11.0, 12.0]


def test_a_hook_that_wants_one_bucket_at_a_time() -> None:
    log: list[str] = []
    hook = slow(log)
    hook.one_bucket_at_a_time = True  # type: ignore[attr-defined]
    results = sent_by(hook)
    assert log == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]
    assert [result.mean().item() for result in results] == [10.0, 11.0, 12.0]


def test_a_hook_may_complete_all_buckets_with_the_last() -> None:
    waiting: list[tuple[Future[Tensor], Tensor]] = []

    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        waiting.append((future, bucket.buffer()))
        if bucket.is_last():
            for one, buffer in waiting:
                one.set_result(buffer.mul_(2))
        return future

    assert [result.mean().item() for result in sent_by(hook)] == [0.0, 2.0, 4.0]


def test_a_round_after_one_that_failed() -> None:
    """What was left of it is not waited for."""
    futures: list[Future[Tensor]] = []

    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        futures.append(completed(bucket.buffer()) if futures else Future())
        return futures[-1]

    hook.one_bucket_at_a_time = True  # type: ignore[attr-defined]
    storage = BucketStorage(parameters())
    sender = HookSender(resolve_hook(hook), [parameters()] * 2, [NAMES] * 2, 0.05)
    sender.send(0, storage, False)
    with pytest.raises(TimeoutError, match=r"hook did not finish bucket 0 \(weight"):
        sender.send(1, storage, True)
    sender.send(0, storage, False).wait()
    assert sender.send(1, storage, True).wait().numel() == 38


def power_sgd_means(rank: int, world_size: int) -> float:
    """PowerSGD of full rank is exact; its collectives are launched from callbacks."""
    keep_group()
    torch.manual_seed(rank)
    state = powerSGD_hook.PowerSGDState(
        None, 2, start_powerSGD_iter=2, min_compression_rate=0.01, use_error_feedback=False
    )
    weights = [torch.zeros(8, 2), torch.zeros(2, 2, 2, 1).to(memory_format=torch.channels_last)]
    hook = resolve_hook(powerSGD_hook.powerSGD_hook, state)
    sender = HookSender(hook, [weights] * 8, [["a", "b"]] * 8, 30.0)
    largest = 0.0
    for _ in range(5):
        storages = [BucketStorage(weights) for _ in range(8)]
        expected = []
        for storage in storages:
            mean = storage.flat.normal_().clone()
            dist.all_reduce(mean)
            expected.append(mean / world_size)
        sent = [sender.send(i, storage, i == 7) for i, storage in enumerate(storages)]
        for one, mean in zip(sent, expected, strict=True):
            largest = max(largest, (one.wait() - mean).abs().max().item())
    assert state.iter == 5
    assert state.total_numel_after_compression > 0
    return largest


def test_power_sgd_with_several_buckets(cluster: Cluster) -> None:
    """Torch's wrapper crashes here: the callbacks of its buckets run in another order per rank."""
    assert max(cluster.run(power_sgd_means, 2)) < 1e-5


def test_wrappers_of_torch_update_parameters_through_the_bucket() -> None:
    """A hook followed by an optimizer finds gradients in the parameters' layout."""

    class Descent:
        def step_param(self, parameter: Tensor, gradient: Tensor) -> None:
            parameter.sub_(gradient)

    given = parameters()
    storage = BucketStorage(given)
    expected = [torch.randn(parameter.shape) for parameter in given]
    for view, gradient in zip(storage.views, expected, strict=True):
        view.copy_(gradient)
    hook = optimizer_overlap_hooks._hook_then_optimizer(
        builtin_hooks.noop_hook, optimizer_overlap_hooks._OptimizerHookState(Descent())
    )
    bucket = GradBucket(0, storage.flat, storage.views, given, NAMES, is_last=True)
    result_of(hook, bucket)
    for parameter, gradient in zip(given, expected, strict=True):
        assert torch.equal(parameter, -gradient)
