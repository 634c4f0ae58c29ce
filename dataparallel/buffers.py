"""What becomes of the buffers that the replicas wrote in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch

from dataparallel import comm
from dataparallel.clones import ModuleClones

#: ``"replica0"``: those of replica 0 are kept, as in torch. ``"mean"``: floating-point buffers
#: become the mean over the replicas, weighted by samples. ``"sync"``: batch norm uses the
#: statistics of the whole batch, so that all replicas write the same.
BufferPolicy: TypeAlias = Literal["replica0", "mean", "sync"]


def check_policy(policy: str) -> BufferPolicy:
    """Return ``policy`` if there is such a policy, else raise a ValueError that lists them."""
    for known in get_args(BufferPolicy):
        if policy == known:
            return policy  # type: ignore[return-value]
    raise ValueError(f"buffers must be one of {get_args(BufferPolicy)}, but got {policy!r}")


def merge_mean(clones: ModuleClones, samples: Sequence[int]) -> None:
    """Set each floating-point buffer that was written to its mean over the replicas.

    Args:
        clones: Clones whose forward is done, each with buffers of its own. Buffers that cannot be
            averaged become those of replica 0.
        samples: Number of samples of each replica, its weight in the mean.
    """
    total = sum(samples)
    with torch.no_grad():
        for original in clones.written_buffers():
            written = [replica[id(original)] for replica in clones.counterparts]
            if original.is_floating_point() or original.is_complex():
                pairs = zip(written, samples, strict=True)
                mean = comm.reduce_add([b * (count / total) for b, count in pairs], original.device)
                original.copy_(mean)
            else:
                original.copy_(written[0])
