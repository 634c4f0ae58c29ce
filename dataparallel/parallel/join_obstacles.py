"""What a process that has joined could not take part in."""

from __future__ import annotations

from torch import nn

from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.torch_internals import BatchNorm


def refuse_shared_statistics(module: nn.Module, *, synced: bool) -> None:
    """Raise where a forward would wait for the processes that have joined, in a batch norm layer.

    Example::

        refuse_shared_statistics(model.module, synced=model.buffer_policy == "sync")

    Args:
        module: What a wrapper of several processes runs.
        synced: Whether the wrapper synchronizes batch norm between them.

    Raises:
        ValueError: There is such a layer.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            waits = layer.training and layer.group != "local"
        elif isinstance(layer, nn.SyncBatchNorm):
            waits = layer.training
        else:
            waits = synced and isinstance(layer, BatchNorm) and _uses_batch(layer)
        if waits:
            named = f"{name!r} ({type(layer).__name__})"
            raise ValueError(
                f"the batch norm {named} takes statistics over all processes, but one that has "
                "joined has no batch to give to them, and the others would wait for it; use "
                "buffers='mean' or a layer of torch.nn, or join(throw_on_early_termination=True), "
                "which ends the epoch in all processes as soon as one has no more"
            )


def _uses_batch(layer: BatchNorm) -> bool:
    return layer.training or layer.running_mean is None
