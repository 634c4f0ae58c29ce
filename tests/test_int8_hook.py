"""The hook that sends int8: what it computes, sends and keeps, in processes."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import kernels
from dataparallel.reducer import int8_hook
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hooks import resolve_hook
from dataparallel.reducer.int8_hook import Int8CompressState, int8_compress_hook
from dataparallel.reducer.pending_hook import run_hook
from tests.cluster import Cluster
from tests.comm_hook_cases import keep_group


def bucket_of(values: Tensor, parameter: Tensor | None = None, index: int = 0) -> GradBucket:
    like = torch.zeros(values.shape) if parameter is None else parameter
    return GradBucket(index, values, [values], [like], ["weight"], is_last=True)


def mean_of(state: Int8CompressState, values: Tensor, parameter: Tensor | None = None) -> Tensor:
    hook = resolve_hook(int8_compress_hook, state)
    return run_hook(hook, bucket_of(values, parameter)).wait(20.0, "the test").clone()


def by_hand(grads: list[Tensor], errors: list[Tensor], part_errors: list[Tensor]) -> Tensor:
    """The mean, with compressions one after the other; the errors are updated."""
    world_size, size = len(grads), len(grads[0])
    length = -(-size // (256 * world_size)) * 256
    result = torch.empty(size)
    for rank in range(world_size):
        here = slice(min(rank * length, size), min((rank + 1) * length, size))
        mean = torch.zeros(size)[here]
        for grad, error in zip(grads, errors, strict=True):
            sent = kernels.compress(
                grad.float()[here], torch.int8, 1 / world_size, error=error[here]
            )
            kernels.decompress(sent, mean, add=True)
        sent = kernels.compress(mean, torch.int8, error=part_errors[rank][: len(mean)])
        kernels.decompress(sent, result[here])
    return result


def gradients(size: int, step: int, world_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator) for _ in range(world_size)]


def means(
    rank: int, world_size: int, size: int, dtype: torch.dtype, feedback: bool
) -> list[Tensor]:
    keep_group()
    state = Int8CompressState(error_feedback=feedback)
    parameter = torch.zeros(size)
    return [
        mean_of(state, gradients(size, step, world_size)[rank].to(dtype), parameter)
        for step in range(3)
    ]


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "forgetful"])
@pytest.mark.parametrize(
    ("world_size", "size", "dtype"),
    [
        (2, 1, torch.float32),
        (2, 5000, torch.float32),
        (3, 256, torch.float32),
        (3, 1537, torch.float32),
        (3, 1000, torch.bfloat16),
        (2, 700, torch.float64),
    ],
)
def test_all_processes_have_the_mean_computed_by_hand(
    cluster: Cluster, world_size: int, size: int, dtype: torch.dtype, feedback: bool
) -> None:
    """Bit for bit, over steps."""
    results = cluster.run(means, world_size, size, dtype, feedback)
    errors = [torch.zeros(size) for _ in range(world_size)]
    part_errors = [torch.zeros(size) for _ in range(world_size)]
    for step in range(3):
        if not feedback:
            errors = [torch.zeros(size) for _ in range(world_size)]
            part_errors = [torch.zeros(size) for _ in range(world_size)]
        grads = [grad.to(dtype) for grad in gradients(size, step, world_size)]
        expected = by_hand(grads, errors, part_errors).to(dtype)
        for result in results:
            assert torch.equal(result[step], expected)
        mean = torch.stack(grads).double().mean(0)
        torch.testing.assert_close(expected.double(), mean, rtol=0, atol=0.15)


def complex_mean(rank: int, world_size: int) -> Tensor:
    keep_group()
    values = torch.arange(300.0) * (1 + 2j) * (rank + 1)
    return mean_of(Int8CompressState(), values)


def test_complex_gradients(cluster: Cluster) -> None:
    expected = torch.arange(300.0) * (1.5 + 3j)
    for result in cluster.run(complex_mean, 2):
        torch.testing.assert_close(result, expected, rtol=0, atol=8.0)


def not_finite(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    keep_group()
    state, parameter = Int8CompressState(), torch.zeros(1500)
    values = torch.ones(1500)
    if rank == 1:
        values[300] = torch.inf
    return mean_of(state, values, parameter), mean_of(state, torch.ones(1500), parameter)


def test_numbers_that_are_not_finite_are_seen_by_all_and_forgotten(cluster: Cluster) -> None:
    for bad, good in cluster.run(not_finite, 2):
        assert bad[256:512].isnan().all()
        assert bad[:256].isfinite().all() and bad[512:].isfinite().all()
        torch.testing.assert_close(good, torch.ones(1500), rtol=0, atol=0.02)


# --- what is sent ----------------------------------------------------------------------------


def traffic(rank: int, world_size: int, without: bool) -> tuple[dict[str, int], Tensor]:
    """The bytes that were passed to each collective, and the result."""
    keep_group()
    counted: dict[str, int] = {}

    def counting(name: str, which: int) -> Any:
        function = getattr(dist, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counted[name] = counted.get(name, 0) + args[which].nbytes
            if without and name == "all_to_all_single":
                raise RuntimeError("Backend gloo does not support alltoall_base")
            return function(*args, **kwargs)

        return count

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting("all_to_all_single", 1))
        patch.setattr(dist, gather, counting(gather, 0))
        result = mean_of(Int8CompressState(), gradients(40000, 0, world_size)[rank])
    return {name.split("_single")[0].split("_into")[0]: n for name, n in counted.items()}, result


def test_two_bytes_are_sent_per_element(cluster: Cluster) -> None:
    """With the scales; all-reducing float32 takes eight."""
    for counted, _ in cluster.run(traffic, 2, False):
        assert set(counted) == {"all_to_all", "all_gather"}
        assert all(1.0 < n / 40000 < 1.03 for n in counted.values())


def test_a_backend_without_all_to_all(cluster: Cluster) -> None:
    for (counted, result), (_, expected) in zip(
        cluster.run(traffic, 3, True), cluster.run(traffic, 3, False), strict=True
    ):
        assert counted["all_gather"] / 40000 > 3
        assert torch.equal(result, expected)


# --- what is kept ----------------------------------------------------------------------------


def kept(rank: int, world_size: int) -> dict[str, bool]:
    """Whether the errors of one bucket are used for another."""
    keep_group()
    state = Int8CompressState()
    first, second = torch.zeros(600), torch.zeros(600)
    grads = gradients(600, 0, world_size)[rank]

    def mean(parameter: Tensor, size: int = 600) -> Tensor:
        return mean_of(state, grads[:size].clone(), parameter)

    fresh = mean(first)
    found = {"the next step has other errors": not torch.equal(mean(first), fresh)}
    found["another model begins anew"] = torch.equal(mean(second), fresh)
    found["so does another size"] = torch.equal(mean(first, 256), fresh[:256])
    found["and the first size again"] = torch.equal(mean(first), fresh)
    mean(first)
    state.reset()
    found["and after a reset"] = torch.equal(mean(first), fresh)
    copies = [pickle.loads(pickle.dumps(state)), copy.deepcopy(state)]
    for one in copies:
        found["and a copy"] = torch.equal(mean_of(one, grads.clone(), first), fresh)
    mean(second)
    gone = len(state._errors)
    del first, second
    # The thread that has completed the last future may still hold its bucket.
    deadline = time.monotonic() + 10
    while len(state._errors) and time.monotonic() < deadline:
        gc.collect()
    found["errors are freed with the parameters"] = (gone, len(state._errors)) == (2, 0)
    return found


def test_errors_belong_to_parameters(cluster: Cluster) -> None:
    for found in cluster.run(kept, 2):
        assert found and all(found.values()), found


def test_errors_of_buckets_that_are_no_more_are_freed() -> None:
    state = Int8CompressState()
    parameters = [torch.zeros(256) for _ in range(4)]

    def errors_of(of: list[Tensor]) -> Any:
        values = torch.zeros(256 * len(of))
        bucket = GradBucket(0, values, list(values.split(256)), of, ["w"] * len(of), is_last=True)
        return state._errors_of(bucket, values, int8_hook._Parts(len(values), 2, 0))

    first = errors_of(parameters[:2]), errors_of(parameters[2:])
    assert errors_of(parameters[:2]) is first[0]
    other = errors_of(parameters[:1] + parameters[3:])
    assert other is not first[0], "the bucket has as many elements, but another parameter"
    second = errors_of(parameters[1:]), errors_of(parameters[:1])
    assert [state._errors[p] for p in parameters] == [second[1], *[second[0]] * 3]


def test_what_a_state_pickles() -> None:
    state = pickle.loads(pickle.dumps(Int8CompressState(error_feedback=False)))
    assert (state.process_group, state.error_feedback) == (None, False)


# --- names, arguments, one process -----------------------------------------------------------


def test_the_hook_by_name() -> None:
    group: Any = object()
    found = resolve_hook("INT8_compress", group)
    assert found.function is int8_compress_hook and found.one_bucket_at_a_time
    assert found.state.process_group is group and found.state.error_feedback
    state = Int8CompressState()
    assert resolve_hook("int8_compress", state).state is state
    assert resolve_hook("int8_compress").state is not state


def test_one_process_sends_and_rounds_nothing() -> None:
    values = torch.randn(300)
    assert torch.equal(mean_of(Int8CompressState(), values.clone()), values)


@pytest.mark.parametrize(
    ("state", "values", "message"),
    [
        (None, torch.ones(3), "needs an Int8CompressState, but got a NoneType; register it as reg"),
        (Int8CompressState(), torch.ones(3).to_sparse(), "takes dense gradients, but that of buc"),
    ],
)
def test_what_the_hook_does_not_take(state: Any, values: Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run_hook(resolve_hook(int8_compress_hook, state), bucket_of(values))


def outside(rank: int, world_size: int) -> str:
    group: Any = dist.new_group([0])
    try:
        mean_of(Int8CompressState(group), torch.ones(3))
    except ValueError as error:
        return str(error)
    return ""


def test_a_process_that_is_not_in_the_group(cluster: Cluster) -> None:
    first, second = cluster.run(outside, 2)
    assert first == ""
    assert "this process is not in the group of the communication hook" in second
