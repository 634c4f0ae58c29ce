"""Debug levels, and parameters in messages.

The level is that of ``torch.distributed``: the environment variable ``TORCH_DISTRIBUTED_DEBUG`` is
``OFF`` (default), ``INFO`` or ``DETAIL``. Messages always name parameters; at ``DETAIL`` they name
all of them. At ``INFO`` and ``DETAIL`` the logger ``dataparallel`` tells which buckets there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from dataparallel.comm.bucket_plan import BucketPlan
from dataparallel.errors import MOST, listed

_log = logging.getLogger("dataparallel")


def level() -> str:
    """The debug level: ``"OFF"``, ``"INFO"`` or ``"DETAIL"``."""
    if not dist.is_available():
        return "OFF"
    return dist.distributed_c10d.get_debug_level().name


def describe_parameters(indices: Iterable[int], names: Sequence[str]) -> str:
    """Parameters for a message, by index and name.

    Example::

        describe_parameters([3, 4], names)    # "3 (head.weight), 4 (head.bias)"

    Args:
        indices: Which parameters; named in this order.
        names: The names of all parameters.

    Returns:
        The first three, and how many more there are; all of them at level ``DETAIL``.
    """
    return _listed([f"{index} ({names[index]})" for index in indices])


def describe_names(names: Iterable[str]) -> str:
    """Names for a message: the first three, and how many more; all of them at level ``DETAIL``."""
    return _listed(list(names))


def _listed(entries: Sequence[str]) -> str:
    if len(entries) <= MOST:
        return listed(entries)
    if level() == "DETAIL":
        return ", ".join(entries)
    return f"{listed(entries)} (TORCH_DISTRIBUTED_DEBUG=DETAIL names all)"


def log_plan(plan: BucketPlan, names: Sequence[str], why: str) -> None:
    """Log the buckets, one line each, if the level is ``INFO`` or ``DETAIL``.

    Args:
        plan: The buckets.
        names: The names of all parameters.
        why: What the plan is, for example ``"in the order in which gradients arrived"``.
    """
    if level() == "OFF" or not _log.isEnabledFor(logging.INFO):
        return
    count = sum(len(bucket) for bucket in plan.buckets)
    _log.info("%d parameters, %s, in %d buckets %s", count, _size(sum(plan.bytes)), len(plan), why)
    for number, (bucket, num_bytes) in enumerate(zip(plan.buckets, plan.bytes, strict=True)):
        _log.info("bucket %d, %s: %s", number, _size(num_bytes), describe_parameters(bucket, names))


def _size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 2**10:.1f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:.1f} MiB"
