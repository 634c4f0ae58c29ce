"""What becomes of the buffers that the replicas wrote in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch

from dataparallel import comm
from dataparallel.errors import chosen
from dataparallel.replicas.clones import ModuleClones

#: ``"replica0"``: those of replica 0 are kept, as in torch. ``"mean"``: floating-point buffers
#: become the mean over the replicas, weighted by samples. ``"sync"``: batch norm uses the
#: statistics of the whole batch, so that all replicas write the same.
BufferPolicy: TypeAlias = Literal["replica0", "mean", "sync"]


def check_policy(policy: str) -> BufferPolicy:
    """Return ``policy`` if there is such a policy, else raise a ValueError that lists them."""
    found: BufferPolicy = chosen("buffers", policy, get_args(BufferPolicy))
    return found


def merge_mean(clones: ModuleClones, samples: Sequence[int]) -> None:
    """Set each floating-point buffer that was written to its mean over the replicas.

    Args:
        clones: Clones whose forward is done, each with buffers of its own. Buffers that cannot be
            averaged (integers, other shapes) become those of replica 0.
        samples: Number of samples of each replica, its weight in the mean.
    """
    total = sum(samples)
    with torch.no_grad():
        for original in clones.written_buffers():
            written = [replica[id(original)] for replica in clones.counterparts]
            if total and (original.is_floating_point() or original.is_complex()):
                original.copy_(_mean(written, samples, original.device))
            else:
                original.copy_(written[0])
        for clone, name, values in clones.assigned_buffers():
            averages = values[0].is_floating_point() or values[0].is_complex()
            if total and averages and all(v.shape == values[0].shape for v in values):
                clone._buffers[name] = _mean(values, samples, values[0].device)


def _mean(
    values: Sequence[torch.Tensor], samples: Sequence[int], device: torch.device
) -> torch.Tensor:
    total = sum(samples)
    shares = [v * (count / total) for v, count in zip(values, samples, strict=True)]
    return comm.reduce_add(shares, device)
