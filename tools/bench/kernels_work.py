"""The calls of `bench kernels`: ours and torch's on the same buffers, and are ours right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dataparallel import kernels, torch_internals
from dataparallel.kernels import reference
from dataparallel.tools.bench.kernels_buffers import BufferSet, is_close, tensor_list, values
from dataparallel.tools.bench.kernels_cases import DTYPES, KernelCase, moved
from dataparallel.tools.bench.kernels_timing import FOOTPRINT, Call, Contestant, num_sets

#: The contestants beside torch's alternatives.
OURS, COPY = "ours", "copy"

#: Of gradients, as between two replicas.
_SCALE = 0.5


@dataclass(frozen=True)
class Work:
    """All that is measured for one case.

    Attributes:
        contestants: By name: :data:`OURS`, :data:`COPY`, and torch's alternatives.
        agrees: Whether ours gives what torch does, to rounding.
        left_out: Alternatives that torch does not have on this device or for this type.
    """

    contestants: dict[str, Contestant]
    agrees: bool
    left_out: tuple[str, ...]


def prepare(case: KernelCase, device: torch.device, footprint: int = FOOTPRINT) -> Work:
    """Make buffers for a case, and compare results.

    Args:
        case: What is called.
        device: Where.
        footprint: Bytes of all sets of buffers together, if the number of sets allows.
    """
    build, size = _BUILDERS[case.kernel], moved(case)
    sets = [build(case, device) for _ in range(num_sets(size, footprint))]
    agrees = sets[0].is_right()
    left_out = tuple(name for name, call in sets[0].others.items() if not _exists(call))
    contestants = {
        OURS: Contestant([each.ours for each in sets]),
        COPY: Contestant([_copy(size, device) for _ in sets]),
    }
    for name in sets[0].others:
        if name not in left_out:
            contestants[name] = Contestant([each.others[name] for each in sets])
    return Work(contestants, agrees, left_out)


def _exists(call: Call) -> bool:
    try:
        call()
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    return True


def _copy(size: int, device: torch.device) -> Call:
    # Half is read, half written.
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _reduce_add(case: KernelCase, device: torch.device) -> BufferSet:
    inputs = [values(case.numel, DTYPES[case.dtype], device) for _ in range(case.count)]
    out = torch.empty_like(inputs[0])
    total = torch.empty_like(out)

    def add() -> Tensor:
        torch.add(inputs[0], inputs[1], out=total)
        for term in inputs[2:]:
            total.add_(term)
        return total

    def foreach_add() -> None:
        # As with buckets that are summed in place: the numbers grow, the time does not.
        for term in inputs[1:]:
            torch_internals.foreach_add_([total], [term])

    def is_right() -> bool:
        expected = torch.stack([term.double() for term in inputs]).sum(0)
        bound = case.count * 4 * torch.finfo(out.dtype).eps
        return is_close(kernels.reduce_add(inputs, out=out), expected, bound)

    return BufferSet(
        lambda: kernels.reduce_add(inputs, out=out),
        {
            "stack": lambda: torch.stack(inputs).sum(0),
            "foreach": foreach_add,
            "add_": add,
        },
        is_right,
    )


def _flatten(case: KernelCase, device: torch.device) -> BufferSet:
    tensors = tensor_list(case, device)
    bucket = torch.empty(case.numel, dtype=DTYPES[case.dtype], device=device)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))

    layout = kernels.BucketLayout(bucket, views)

    def foreach_copy() -> None:
        torch_internals.foreach_copy_(views, tensors)
        bucket.mul_(_SCALE)

    def is_right() -> bool:
        kernels.flatten(tensors, bucket, _SCALE, views=layout)
        return is_close(bucket, torch.cat(tensors) * _SCALE)

    return BufferSet(
        lambda: kernels.flatten(tensors, bucket, _SCALE, views=layout),
        {
            "cat": lambda: torch.cat(tensors, out=bucket).mul_(_SCALE),
            "foreach": foreach_copy,
        },
        is_right,
    )


def _unflatten(case: KernelCase, device: torch.device) -> BufferSet:
    tensors = tensor_list(case, device)
    bucket = values(case.numel, DTYPES[case.dtype], device)
    views = list(torch.split(bucket, [each.numel() for each in tensors]))

    layout = kernels.BucketLayout(bucket, views)

    def is_right() -> bool:
        kernels.unflatten(bucket, tensors, views=layout)
        return is_close(torch.cat(tensors), bucket)

    return BufferSet(
        lambda: kernels.unflatten(bucket, tensors, views=layout),
        {"foreach": lambda: torch_internals.foreach_copy_(tensors, views)},
        is_right,
    )


def _fingerprint(case: KernelCase, device: torch.device) -> BufferSet:
    tensors = tensor_list(case, device)
    return BufferSet(
        lambda: kernels.fingerprint(tensors),
        {"reference": lambda: reference.fingerprint(tensors)},
        lambda: bool((kernels.fingerprint(tensors) == reference.fingerprint(tensors)).all()),
    )


_BUILDERS: dict[str, Callable[[KernelCase, torch.device], BufferSet]] = {
    "reduce_add": _reduce_add,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "fingerprint": _fingerprint,
}
