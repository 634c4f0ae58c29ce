"""Kernels where they are meant to run: equal to their references, on any stream and thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dataparallel import kernels
from dataparallel.kernels.backend import registered
from tests.gpu.kernel_cases import CASES, Case, keep_busy, side_stream, sizes, some_sizes

NO_KERNELS = {"BucketLayout", "warm_up"}
OFFSETS = (0, 1, 3)

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def results(case: Case, device: torch.device, numels: Sequence[int]) -> list[torch.Tensor]:
    found = [case(device, size, offset) for size in numels for offset in OFFSETS]
    return [tensor for tensors in found for tensor in tensors]


def expected(case: Case, numels: Sequence[int]) -> list[torch.Tensor]:
    """Return the references' results on the host, where the offset makes no difference."""
    with registered([]):
        found = [case(torch.device("cpu"), size, 0) for size in numels]
    return [tensor for tensors in found for _ in OFFSETS for tensor in tensors]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        here = mine.cpu()
        assert here.dtype == theirs.dtype and here.shape == theirs.shape, i
        torch.testing.assert_close(here, theirs, rtol=0, atol=0, equal_nan=True)


def test_every_kernel_has_a_case() -> None:
    assert {case.__name__ for case in CASES} == set(kernels.__all__) - NO_KERNELS


@by_case
def test_kernels_equal_their_references(case: Case, device: torch.device) -> None:
    for size in sizes(device):
        assert_same(results(case, device, [size]), expected(case, [size]))


@by_case
def test_on_a_side_stream(case: Case, device: torch.device) -> None:
    with side_stream(device):
        got = results(case, device, some_sizes(device))
        assert_same(got, expected(case, some_sizes(device)))


def test_kernels_wait_for_their_stream(device: torch.device) -> None:
    size = sizes(device)[-1]
    ones = torch.ones(size, device=device)
    with side_stream(device):
        made = torch.zeros(size, device=device)
        keep_busy(device)
        made += ones
        bucket = kernels.flatten([made, made], torch.empty(2 * size, device=device))
        made.fill_(9)
        assert torch.equal(bucket, torch.ones_like(bucket))


@by_case
def test_from_several_threads(case: Case, device: torch.device) -> None:
    wanted = expected(case, some_sizes(device))

    def run(_: int) -> list[torch.Tensor]:
        with side_stream(device):
            return [tensor.cpu() for tensor in results(case, device, some_sizes(device))]

    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(run, range(4)):
            assert_same(got, wanted)


def test_copies_in_a_cuda_graph(device: torch.device) -> None:
    """A launch can be captured: it allocates nothing, copies nothing and waits for nothing."""
    tensors = [torch.full((1001,), 1.0, device=device) for _ in range(3)]
    bucket = torch.zeros(3003, device=device)
    layout = kernels.BucketLayout(bucket, list(bucket.split(1001)))
    kernels.flatten(tensors, bucket, views=layout)
    assert bucket.unique().tolist() == [1.0]
    if device.type == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        kernels.flatten(tensors, bucket, views=layout)
    for value in (2.0, 3.0):
        for tensor in tensors:
            tensor.fill_(value)
        graph.replay()
        assert bucket.unique().tolist() == [value]
