"""Batch statistics over all replicas of a wrapper.

How they are computed is in ``collectives/batch_statistics.py``; here the batch norm layers of the
clones are made to do so.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from dataparallel.collectives.batch_statistics import batch_norm, check_input, is_alone
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.replicas.clones import Counterparts, Parts
from dataparallel.threads.apply import current_replica
from dataparallel.threads.meeting import current_rendezvous
from dataparallel.torch_internals import BatchNorm, untraced


def synchronize(group: LocalGroup, parts: Parts, replicas: Sequence[Counterparts]) -> None:
    """Let the batch norm layers of clones use the statistics of the whole batch.

    Layers that are a :class:`SyncBatchNorm` stay as they are: they know their group.

    Args:
        group: The replicas that have the batch.
        parts: Those of the original.
        replicas: For each replica, from the id of an original module to its clone.
    """
    for name, module in zip(parts.names, parts.modules, strict=True):
        if isinstance(module, nn.DataParallel):
            raise TypeError(
                f"cannot synchronize batch norm over the replicas of {name!r} "
                "within replicas; unwrap the inner module"
            )
        if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm):
            if type(module).forward is not BatchNorm.forward or "forward" in vars(module):
                raise TypeError(
                    f"cannot synchronize the batch norm {name!r} ({type(module).__name__}), "
                    "which has a forward of its own; use a layer of torch.nn, or another buffers="
                )
            for replica in replicas:
                layer = replica[id(module)]
                # Weak, since the layer is to hold this, and would hold itself through it.
                layer.__dict__["forward"] = functools.partial(
                    _forward, weakref.ref(layer), group, f"batch norm {name!r}"
                )


@untraced
def _forward(
    reference: weakref.ref[BatchNorm], group: LocalGroup, label: str, input: Tensor
) -> Tensor:
    """What ``BatchNorm.forward`` does, with statistics over all replicas."""
    layer = reference()
    assert layer is not None
    check_input(layer, input, label)
    uses_batch = layer.training or layer.running_mean is None
    if uses_batch and current_rendezvous() is None and current_replica() is None:
        raise RuntimeError(
            f"{label} is synchronized between replicas but was called outside of their forward, "
            "for example recomputed by activation checkpointing, where the other replicas cannot "
            "take part; leave synchronized layers out of the checkpointed part"
        )
    if not uses_batch or is_alone(group, label):
        return type(layer).forward(layer, input)
    return batch_norm(layer, input, group, label)
