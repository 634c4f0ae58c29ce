"""One call of each kernel, on inputs that are the same on every device.

Run as a program, it launches each kernel on small tensors: for a sanitizer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dataparallel import kernels
from dataparallel.kernels.backend import Backend, backend_of

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EXACT = (torch.int32, torch.int64)
FEW = (0, 1, 7, 33, 1000)
MANY = (*FEW, 255, 256, 257, 4101, 100_003, 2**20 + 3)
#: Sizes for tests of something else: most of the time goes into the expected results of large ones,
#: which the host computes.
SOME = (33, 4101, 100_003)

#: For a sanitizer: less than a block has threads, more than one block, and neither divisible.
WATCHED = ((33, 0), (33, 1), (4101, 0), (4101, 3))

#: Called with a device, the number of elements, and how many of them lie before an aligned address.
Case = Callable[[torch.device, int, int], list[Tensor]]


def quiet_backend_of(device: torch.device) -> Backend | None:
    """As :func:`dataparallel.kernels.backend.backend_of`, which may import CuPy.

    Warnings of CuPy, or of its use of NumPy, at its import are no fault of ours.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return backend_of(device)


def sizes(device: torch.device) -> Sequence[int]:
    """Compute on the host what a block does, thread by thread."""
    return FEW if device.type == "cpu" else MANY


def some_sizes(device: torch.device) -> Sequence[int]:
    """Return a few of them."""
    return FEW if device.type == "cpu" else SOME


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Another stream than the default one; of a CPU there is none."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    stream: Any = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def keep_busy(device: torch.device) -> None:
    """Let the current stream do nothing for some milliseconds."""
    if device.type != "cpu":
        torch.cuda._sleep(20_000_000)


@functools.lru_cache(maxsize=64)
def values(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """On the host; floats have few bits, so that sums of their squares are exact."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-50, 50, (size,), generator=generator) / 4).to(dtype)


def at(device: torch.device, offset: int, content: Tensor) -> Tensor:
    """Return the content on a device, so many elements behind an aligned address."""
    memory = torch.empty(offset + content.numel(), dtype=content.dtype, device=device)
    return memory[offset:].copy_(content)


def _lists(device: torch.device, size: int, offset: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of several layouts."""
    side = int(size**0.5)
    square = at(device, offset, values(side * side, dtype, 1)).view(side, side)
    cube = at(device, 0, values(side * 6, dtype, 2)).view(2, 3, side).permute(2, 0, 1)
    return [at(device, offset, values(size, dtype, 3)), square.t(), cube, square[:, ::2]]


def flatten(device: torch.device, size: int, offset: int) -> list[Tensor]:
    results = []
    for dtype in FLOATS:
        for into in FLOATS:
            tensors = _lists(device, size, offset, dtype)
            total = sum(tensor.numel() for tensor in tensors)
            bucket = at(device, offset, torch.zeros(total, dtype=into))
            results.append(kernels.flatten(tensors, bucket, 0.5))
    return results


def unflatten(device: torch.device, size: int, offset: int) -> list[Tensor]:
    results = []
    for dtype in FLOATS:
        for into in FLOATS:
            tensors = [torch.zeros_like(tensor) for tensor in _lists(device, size, offset, into)]
            total = sum(tensor.numel() for tensor in tensors)
            kernels.unflatten(at(device, offset, values(total, dtype, 4)), tensors, 0.5)
            results += tensors
    return results


def fingerprint(device: torch.device, size: int, offset: int) -> list[Tensor]:
    dtypes = (*FLOATS, *EXACT, torch.uint8, torch.bool)
    return [kernels.fingerprint(_lists(device, size, offset, dtype)) for dtype in dtypes]


CASES: tuple[Case, ...] = (flatten, unflatten, fingerprint)


def main() -> None:
    """Launch each kernel on the device that is named."""
    device = torch.device(sys.argv[1])
    assert quiet_backend_of(device) is not None, f"no kernels on {device}"
    for case in CASES:
        for size, offset in WATCHED:
            for result in case(device, size, offset):
                result.cpu()
        print(case.__name__, flush=True)


if __name__ == "__main__":
    main()
