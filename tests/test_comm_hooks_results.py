"""What becomes of the future of a communication hook: its result, and its errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
from torch.futures import Future

from dataparallel.reducer import builtin_hooks
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.storage import BucketStorage
from tests.cluster import Cluster
from tests.comm_hook_cases import NAMES, a_bucket, completed, parameters, result_of, run


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
