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
        total = kernels.reduce_add([made, made, made])
        made.fill_(9)
        assert torch.equal(total, ones * 3)


@by_case
def test_from_several_threads(case: Case, device: torch.device) -> None:
    wanted = expected(case, some_sizes(device))

    def run(_: int) -> list[torch.Tensor]:
        with side_stream(device):
            return [tensor.cpu() for tensor in results(case, device, some_sizes(device))]

    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(run, range(4)):
            assert_same(got, wanted)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_sums_in_a_cuda_graph(count: int, device: torch.device) -> None:
    """A launch can be captured: it allocates nothing, copies nothing and waits for nothing."""
    terms = [torch.full((1001,), 1.0, device=device) for _ in range(count)]
    out = torch.zeros(1001, device=device)
    kernels.warm_up(device)
    if device.type == "cpu":
        kernels.reduce_add(terms, out=out)
        assert out.unique().tolist() == [count]
        return
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        kernels.reduce_add(terms, out=out)
    for value in (1.0, 2.0):
        for term in terms:
            term.fill_(value)
        graph.replay()
        assert out.unique().tolist() == [count * value]
