"""Communication hooks for several buckets, and with processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from dataparallel.reducer import builtin_hooks
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hooks import resolve_hook
from dataparallel.reducer.pending_hook import HookSender, run_hook
from dataparallel.reducer.storage import BucketStorage
from tests.cluster import Cluster
from tests.comm_hook_cases import NAMES, Hook, a_bucket, completed, keep_group, parameters

# --- hooks with processes --------------------------------------------------------------------


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


def large_means(rank: int, world_size: int) -> list[Tensor]:
    keep_group()
    results = []
    for hook in ("fp16_compress", "bf16_compress", default_hooks.fp16_compress_hook):
        bucket = a_bucket()
        bucket.buffer().fill_(1000.0 if rank else 70001.0)
        results.append(run_hook(resolve_hook(hook), bucket).wait(10.0, "the test").clone())
    return results


def test_numbers_are_divided_before_they_are_rounded(cluster: Cluster) -> None:
    """70001 is no float16, but half of it is; torch's hook rounds first."""
    for fp16, bf16, theirs in cluster.run(large_means, 2):
        torch.testing.assert_close(fp16, torch.full((38,), 35500.5), rtol=1e-3, atol=0)
        torch.testing.assert_close(bf16, torch.full((38,), 35500.5), rtol=1e-2, atol=0)
        assert theirs.isinf().all()


def sent_dtypes(rank: int, world_size: int) -> list[torch.dtype]:
    """What each hook gives to the all-reduce; the bucket keeps its dtype."""
    keep_group()
    all_reduce, sent = dist.all_reduce, []

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        for name in ("allreduce", "fp16_compress", "bf16_compress"):
            for dtype in (torch.float32, torch.float64):
                mean = run_hook(resolve_hook(name), a_bucket(dtype)).wait(10.0, "the test")
                assert mean.dtype == dtype
                torch.testing.assert_close(mean, torch.arange(38.0, dtype=dtype))
    return sent


def test_what_hooks_send_has_16_bits(cluster: Cluster) -> None:
    for sent in cluster.run(sent_dtypes, 2):
        assert sent == [
            *(torch.float32, torch.float64),
            *(torch.float16, torch.float16),
            *(torch.bfloat16, torch.bfloat16),
        ]


def outside(rank: int, world_size: int, name: str) -> str:
    group = dist.new_group([0])
    try:
        run_hook(resolve_hook(name, group), a_bucket()).wait(10.0, "the test")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["allreduce", "fp16_compress"])
def test_a_process_that_is_not_in_the_group(cluster: Cluster, name: str) -> None:
    first, second = cluster.run(outside, 2, name)
    assert first == ""
    assert "this process is not in the group of the communication hook" in second


def complex_means(rank: int, world_size: int) -> list[Tensor]:
    keep_group()
    results = []
    for hook in ("allreduce", default_hooks.allreduce_hook, "bf16_compress"):
        bucket = a_bucket(torch.complex64)
        bucket.buffer().mul_(1j * (rank + 1))
        results.append(run_hook(resolve_hook(hook), bucket).wait(10.0, "the test").clone())
    return results


def test_complex_gradients(cluster: Cluster) -> None:
    expected = torch.arange(38.0) * 1.5j
    for ours, theirs, rounded in cluster.run(complex_means, 2):
        torch.testing.assert_close([ours, theirs], [expected] * 2)
        torch.testing.assert_close(rounded, expected, rtol=1e-2, atol=0)


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
