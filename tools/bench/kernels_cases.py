"""Which calls `bench kernels` measures, and the bytes each must move. Pure functions.

Note [Bytes that a kernel must move]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Counted is what a perfect kernel cannot avoid: each element of each input read once, each element
of each result written once, with nothing for tables of addresses or for what stays in registers.
A copy is counted in the same way, one read and one write, and the copy beside a call moves as many
bytes as the call: a share of 1.0 is then the same time. The bytes are those of the operation, not
of the way in which someone does it: a torch expression that goes through memory three times has
the same count, and a low rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

KERNELS = (
    "reduce_add",
    "flatten",
    "unflatten",
    "fingerprint",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Where memory is what limits; on the CPU, where the references run, fewer are enough.
SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
SIZES_ON_CPU = "64KiB,1MiB,16MiB"
#: So that each of many tensors has elements.
LEAST_SIZE = 4096

MANY, FEW = 400, 4
_LISTS = (f"{MANY} tensors", f"{FEW} tensors")
_VARIANTS = {
    "reduce_add": ("2 inputs", "4 inputs", "8 inputs"),
}
#: Elements of the tensors of a transformer's layer of width d, as multiples of d * d and of d.
_LAYER = (
    (0, 1),
    (0, 1),
    (3, 0),
    (0, 3),
    (1, 0),
    (0, 1),
    (0, 1),
    (0, 1),
    (4, 0),
    (0, 4),
    (4, 0),
    (0, 1),
)


@dataclass(frozen=True)
class KernelCase:
    """One call that is measured.

    Attributes:
        kernel: One of :data:`KERNELS`.
        variant: How many inputs or tensors.
        dtype: The name of the elements' type.
        size: Bytes: of each input of reduce_add; of all tensors of a list.
    """

    kernel: str
    variant: str
    dtype: str
    size: int

    @property
    def name(self) -> str:
        """Kernel, variant and type."""
        return f"{self.kernel}, {self.variant}, {self.dtype}"

    @property
    def numel(self) -> int:
        """How many elements have that size."""
        return self.size // DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        """How many inputs or tensors there are."""
        return int(self.variant.split()[0])


def plan_cases(
    names: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int]
) -> list[KernelCase]:
    """All variants of some kernels.

    Args:
        names: Of kernels.
        dtypes: Names of types.
        sizes: Bytes, see :class:`KernelCase`.

    Returns:
        The cases by kernel, type, variant and size.

    Raises:
        ValueError: A size is too small to be divided into many tensors.
    """
    if min(sizes) < LEAST_SIZE:
        raise ValueError(
            f"--sizes has {min(sizes)} bytes, too few for {MANY} tensors; the least is {LEAST_SIZE}"
        )
    return [
        KernelCase(name, variant, dtype, size)
        for name in names
        for dtype in dtypes
        for variant in _VARIANTS.get(name, _LISTS)
        for size in sizes
    ]


def moved(case: KernelCase) -> int:
    """See Note [Bytes that a kernel must move].

    Example::

        moved(KernelCase("reduce_add", "8 inputs", "float32", 2**20))   # 9 * 2**20
    """
    size = case.numel * DTYPES[case.dtype].itemsize
    if case.kernel == "reduce_add":
        return (case.count + 1) * size
    if case.kernel == "fingerprint":
        return size
    return 2 * size


def tensor_sizes(numel: int, count: int) -> list[int]:
    """Elements of each tensor of a list.

    Args:
        numel: Of all.
        count: :data:`FEW` for equal ones, else those of a transformer, layer after layer, whose
            width is what fits.

    Returns:
        As many numbers as tensors; their sum is ``numel``.
    """
    shares = [1.0] * count
    width = 0.0
    if count > FEW:
        layers = count / len(_LAYER)
        squares, rows = (sum(part) * layers for part in zip(*_LAYER, strict=True))
        width = (math.sqrt(rows * rows + 4 * squares * numel) - rows) / (2 * squares)
        of_layer = [a * width * width + b * width for a, b in _LAYER]
        shares = [of_layer[i % len(_LAYER)] for i in range(count)]
    # Widths of larger models are multiples of 16 or more.
    unit = 16 if width >= 64 else 1
    scale, ends, end = numel / sum(shares) / unit, [0], 0.0
    for share in shares:
        end += share * scale
        ends.append(round(end) * unit)
    ends[-1] = numel
    return [stop - start for start, stop in itertools.pairwise(ends)]
