"""What a reducer is told once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from dataparallel.errors import chosen

#: ``"processes"``: the mean over the processes, as in torch. ``"samples"``: the mean weighted by
#: each process's number of samples, or by a weight that the user gives. ``"none"``: the sum.
AverageKind: TypeAlias = Literal["processes", "samples", "none"]

MIB = 2**20
#: As in torch: small, so that communication begins early.
FIRST_BUCKET_BYTES = MIB
#: As in torch.
BUCKET_BYTES = 25 * MIB
#: Without processes nothing is sent, and what a bucket holds is freed when it is summed: small
#: buckets keep less alive.
LOCAL_BUCKET_BYTES = 4 * MIB


@dataclass(frozen=True)
class ReducerOptions:
    """Options of a reducer.

    Attributes:
        first_bucket_bytes: Limit of the first bucket.
        bucket_bytes: Limit of the further ones, or a limit for each.
        average: How the processes' gradients are put together.
        find_unused_parameters: ``None`` handles parameters without gradient as they come; ``True``
            and ``False`` are torch's: gradients that come twice are an error, and with ``False``
            so are parameters without one.
        static_graph: Whether the same parameters are used in every backward.
        gradient_as_bucket_view: Whether ``.grad`` is a part of the bucket.
        deterministic: Whether sums over processes are made in rank order.
        reduce_dtype: Of what is sent. Default: the parameters' own.
        delayed: Parameters that are reduced after all others.
        num_local: How many parameters, the last ones, are not reduced over processes.
    """

    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    bucket_bytes: int | tuple[int, ...] = BUCKET_BYTES
    average: AverageKind = "processes"
    find_unused_parameters: bool | None = None
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    deterministic: bool = False
    reduce_dtype: torch.dtype | None = None
    delayed: frozenset[int] = frozenset()
    num_local: int = 0


def check_average(average: str) -> AverageKind:
    """Return ``average`` if there is such a way, else raise a ValueError that lists them."""
    found: AverageKind = chosen("average", average, get_args(AverageKind))
    return found
