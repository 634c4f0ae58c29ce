"""Lists of tensors for fused steps, and what one has to know to compare them bit for bit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from dataparallel import torch_internals
from dataparallel.kernels import backend
from dataparallel.kernels.optimizer_step import CHUNK
from tests.kernels.host_backend import HostBackend

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, 65504.0, 1.0)

#: Sizes around packs and chunks.
SIZES = st.lists(
    st.one_of(st.integers(0, 40), st.integers(CHUNK - 3, CHUNK + 9)), min_size=1, max_size=4
)
#: How many elements after an address of 64 bytes tensors begin: all alike, or each somewhere.
OFFSETS = st.one_of(st.integers(0, 9).map(lambda n: [n]), st.lists(st.integers(0, 9), min_size=5))
DTYPE = st.sampled_from(DTYPES)
SEED = st.integers(0, 2**20)


class Lists:
    """A gradient and some states for each size.

    Args:
        sizes: The numbers of elements.
        dtype: Of the states.
        gradient_dtype: Of the gradients.
        num_states: How many lists there are beside the gradients.
        offsets: Where the tensors of each list begin, in elements; used in turn.
        seed: Of the values.
        special: Whether some values are infinite, no numbers, or at the ends of the range.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        num_states: int,
        offsets: Sequence[int] = (0,),
        seed: int = 0,
        special: bool = False,
    ) -> None:
        self._offsets = offsets
        generator = torch.Generator().manual_seed(seed)

        def values(size: int, dtype: torch.dtype, square: bool) -> torch.Tensor:
            value = torch.randn(size, generator=generator, dtype=torch.float64)
            if special and size:
                places = torch.randint(size, (2,), generator=generator)
                chosen = torch.randint(len(SPECIAL), (2,), generator=generator)
                value[places] = torch.tensor(SPECIAL, dtype=torch.float64)[chosen]
            return (value.square() if square else value).to(dtype)

        self.gradients = self._placed([values(n, gradient_dtype, False) for n in sizes], 0)
        self.states = [
            # Averages of squares are not negative.
            self._placed([values(n, dtype, k >= 2) for n in sizes], k + 1)
            for k in range(num_states)
        ]

    def copies(self) -> list[list[torch.Tensor]]:
        """Copies of the states, with the same alignments."""
        return [self._placed(tensors, k + 1) for k, tensors in enumerate(self.states)]

    def _placed(self, tensors: Sequence[torch.Tensor], k: int) -> list[torch.Tensor]:
        placed = []
        for tensor in tensors:
            offset = self._offsets[k % len(self._offsets)]
            # Torch's memory begins at a multiple of 64 bytes.
            copy = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)[offset:]
            placed.append(copy.copy_(tensor))
        return placed


def assert_bits(found: Any, expected: Any) -> None:
    """Compare lists of lists of tensors; all that are no numbers are equal."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@contextlib.contextmanager
def host_kernels(schedule: int = 0) -> Iterator[HostBackend]:
    """As the fixture, for tests that draw many examples."""
    host = HostBackend(schedule)
    with backend.registered([host]):
        yield host


@contextlib.contextmanager
def exact_roots() -> Iterator[None]:
    """Have torch round square roots to the nearest, as GPUs and C++ do; on the CPU it may not."""

    def root(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = tensor.detach().to("cpu", torch.float64, copy=True).apply_(_root)
        return found.to(tensor.device, tensor.dtype)

    def roots(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(map(root, tensors))

    with (
        mock.patch.object(torch_internals, "foreach_sqrt", roots),
        mock.patch.object(torch.Tensor, "sqrt", root),
    ):
        yield


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan
