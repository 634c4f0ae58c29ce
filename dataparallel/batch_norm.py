"""Batch statistics over all replicas of one process, with no process group.

Note [Synchronised batch norm]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each replica computes mean and sum of squared deviations of its chunk. The replicas meet in the
middle of forward and exchange these, and each normalises with the statistics of the whole batch:

    chunk 0 ── statistics ──┐                         ┌── statistics of all ── output 0
    chunk 1 ── statistics ──┤  one node, n inputs,    ├── statistics of all ── output 1
    chunk n-1 ─ statistics ─┘  n outputs per layer    └── statistics of all ── output n-1

One autograd node for the whole exchange, and not one per replica that waits for the others: on the
CPU a single thread runs all of backward and would wait for itself. All other steps are ordinary
differentiable operations, so gradients of any order come out right.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dataparallel import comm
from dataparallel.clones import ModuleClones
from dataparallel.compiled import untraced
from dataparallel.functions import apply_function
from dataparallel.parallel_apply import current_replica
from dataparallel.rendezvous import current_rendezvous


class _Statistics(NamedTuple):
    num_values: int
    #: Shape ``(2, C)``: mean and sum of squared deviations of a chunk, per channel.
    moments: Tensor


def synchronise(clones: ModuleClones) -> None:
    """Let the batch norm layers of some clones use the statistics of the whole batch.

    Args:
        clones: Refreshed clones; the change lasts until their next refresh.
    """
    for module in clones.parts.modules:
        if isinstance(module, nn.DataParallel):
            raise TypeError(
                f"cannot synchronise batch norm over the replicas of {clones.name_of(module)!r} "
                "within replicas; unwrap the inner module"
            )
        if isinstance(module, _BatchNorm):
            name = clones.name_of(module)
            if type(module).forward is not _BatchNorm.forward or "forward" in vars(module):
                raise TypeError(
                    f"cannot synchronise the batch norm {name!r} ({type(module).__name__}), "
                    "which has a forward of its own; use a layer of torch.nn, or another buffers="
                )
            layers = [replica[id(module)] for replica in clones.counterparts]
            # Weak, since the layer is to hold this, and would hold itself through it.
            forwards = [
                functools.partial(_forward, weakref.ref(layer), f"batch norm {name!r}")
                for layer in layers
            ]
            clones.override(module, "forward", forwards)


@untraced
def _forward(reference: weakref.ref[_BatchNorm], key: str, input: Tensor) -> Tensor:
    """What ``_BatchNorm.forward`` does, with statistics over all replicas."""
    layer = reference()
    assert layer is not None
    layer._check_input_dim(input)  # type: ignore[no-untyped-call]
    if input.size(1) != layer.num_features:
        raise RuntimeError(
            f"{key} is for {layer.num_features} channels, but the input of shape "
            f"{tuple(input.shape)} has {input.size(1)}"
        )
    uses_batch = layer.training or layer.running_mean is None
    rendezvous = current_rendezvous()
    if not uses_batch or (input.numel() == 0 and rendezvous is not None):
        return type(layer).forward(layer, input)
    if rendezvous is None:
        if current_replica() is not None:
            return type(layer).forward(layer, input)
        raise RuntimeError(
            f"{key} is synchronised between replicas but was called outside of their forward, "
            "for example recomputed by activation checkpointing, where the other replicas cannot "
            "take part; leave synchronised layers out of the checkpointed part"
        )
    local = _local_statistics(input)
    everywhere: list[_Statistics] = rendezvous.exchange(key, local, _exchange)
    count = sum(part.num_values for part in everywhere)
    if count <= 1:
        raise ValueError(
            "expected more than 1 value per channel when training, but the whole batch has "
            f"{count} (input size {tuple(input.shape)} in {key})"
        )
    mean, variance = _combine(everywhere, count)
    momentum = _count_batch(layer)
    if layer.training and layer.track_running_stats:
        _update_running_statistics(layer, momentum, mean, variance, count)
    return _normalise(layer, input, mean, variance)


def _count_batch(layer: _BatchNorm) -> float:
    if not (layer.training and layer.track_running_stats):
        return 0.0
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            return 1.0 / float(layer.num_batches_tracked)
    return 0.0 if layer.momentum is None else layer.momentum


def _local_statistics(input: Tensor) -> _Statistics:
    # In half precision a sum over a batch loses most of its digits.
    values = input.to(_statistics_dtype(input))
    dims = [dim for dim in range(values.dim()) if dim != 1]
    mean = values.mean(dims)
    deviations = values - mean.reshape(_channels_second(values))
    moments = torch.stack((mean, (deviations * deviations).sum(dims)))
    return _Statistics(values.numel() // values.size(1), moments)


def _exchange(statistics: Sequence[_Statistics]) -> list[list[_Statistics]]:
    moments = apply_function(_Everywhere, *[part.moments for part in statistics])
    n = len(statistics)
    return [
        [_Statistics(part.num_values, moments[i * n + j]) for j, part in enumerate(statistics)]
        for i in range(n)
    ]


class _Everywhere(torch.autograd.Function):
    """n tensors on n devices to all n tensors on every device: one node, n x n outputs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.devices = [tensor.device for tensor in tensors]
        copies = [comm.broadcast(tensor, ctx.devices) for tensor in tensors]
        n = len(tensors)
        # Aliases, since one tensor may serve several replicas on its device.
        return tuple(copies[j][i].view_as(copies[j][i]) for i in range(n) for j in range(n))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return apply_function(_SumEverywhere, ctx.devices, *grads)


class _SumEverywhere(torch.autograd.Function):
    """The transpose of :class:`_Everywhere`: sums in replica order, one per device."""

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *grads: Tensor) -> Any:
        n = len(devices)
        return tuple(
            comm.reduce_add([grads[i * n + j] for i in range(n)], devices[j]) for j in range(n)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *apply_function(_Everywhere, *grads)


def _combine(everywhere: Sequence[_Statistics], count: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the union of the chunks.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    mean = _sum([part.moments[0] * (part.num_values / count) for part in everywhere])
    deviations = [
        part.moments[1] + part.num_values * (part.moments[0] - mean) ** 2 for part in everywhere
    ]
    return mean, _sum(deviations) / count


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _update_running_statistics(
    layer: _BatchNorm,
    momentum: float,
    mean: Tensor,
    variance: Tensor,
    count: int,
) -> None:
    assert layer.running_mean is not None and layer.running_var is not None
    with torch.no_grad():
        unbiased = variance * (count / (count - 1))
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)


def _normalise(layer: _BatchNorm, input: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    shape = _channels_second(input)
    scale = torch.rsqrt(variance + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    centred = input.to(_statistics_dtype(input)) - mean.reshape(shape)
    output = centred * scale.reshape(shape)
    if layer.bias is not None:
        output = output + layer.bias.reshape(shape)
    return output.to(input.dtype)


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


def _channels_second(input: Tensor) -> list[int]:
    return [1, -1, *[1] * (input.dim() - 2)]
