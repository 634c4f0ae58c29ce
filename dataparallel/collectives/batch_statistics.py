"""Batch norm with the statistics of a batch whose chunks several members of a group have.

Note [Synchronized batch norm]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each member computes mean, sum of squared deviations and number of values of its chunk. One
collective in the middle of forward brings these to all, and each normalizes its own chunk with the
statistics of the whole batch:

    chunk 0 ── statistics ──┐                   ┌── statistics of all ── output 0
    chunk 1 ── statistics ──┤ all_gather_tensor ├── statistics of all ── output 1
    chunk n-1 ─ statistics ─┘                   └── statistics of all ── output n-1

All other steps are ordinary differentiable operations of one member, so with the derivative of the
collective gradients of any order come out right. All members combine the same numbers in the same
order, so their running statistics stay equal without being sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.collectives import process_ops
from dataparallel.collectives.collective import AllGather
from dataparallel.collectives.functional import all_gather_tensor, wait_tensor
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.refusals import refuse_in_backward
from dataparallel.threads.meeting import current_rendezvous
from dataparallel.torch_internals import BatchNorm, check_input_of, untraced


@dataclass(frozen=True)
class _GatherStatistics(AllGather):
    """A gather that bears the name of its layer, so that no layer takes another's statistics."""

    label: str

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.label

    def __str__(self) -> str:
        return f"{self.label}, statistics"


class _Chunk(NamedTuple):
    """What one member knows of its own input, in the dtype of the statistics."""

    num_values: int
    mean: Tensor
    #: Of the shape of the input.
    deviations: Tensor


def check_input(layer: BatchNorm, input: Tensor, label: str) -> None:
    """Raise an error if a batch norm does not take such an input.

    Args:
        layer: The batch norm; its own check comes first.
        input: Of shape ``(N, C, ...)``.
        label: Names the layer in messages.
    """
    check_input_of(layer, input)
    if input.size(1) != layer.num_features:
        raise RuntimeError(
            f"{label} is for {layer.num_features} channels, but the input of shape "
            f"{tuple(input.shape)} has {input.size(1)}"
        )
    if not input.is_floating_point():
        raise TypeError(
            f"{label} takes floating-point numbers, but the input is {input.dtype}; convert it "
            "with .float()"
        )


def is_alone(group: str | LocalGroup, label: str) -> bool:
    """Whether a group, as from ``groups.resolve``, has one member here.

    Args:
        group: Who takes part.
        label: Names the layer in messages.

    Raises:
        RuntimeError: It has, but in backward, where a part of forward that runs again would not
            meet the replicas that it had met.
    """
    if isinstance(group, str):
        return process_ops.group_size(group) == 1
    return _is_only_replica(group, label)


@untraced
def _is_only_replica(group: LocalGroup, label: str) -> bool:
    if isinstance(group, HybridGroup) and group.has_other_processes():
        # How many members there are, only a collective could tell.
        return False
    if current_rendezvous() is None:
        refuse_in_backward(label)
    return LocalGroup.size(group) == 1


def batch_norm(layer: BatchNorm, input: Tensor, group: str | LocalGroup, label: str) -> Tensor:
    """What ``layer`` does with batch statistics, over the chunks of all members.

    See Note [Synchronized batch norm].

    Args:
        layer: Where parameters and running statistics are; these are updated as usual.
        input: The chunk of this member, which may be empty; checked by :func:`check_input`.
        group: Who takes part, as from ``groups.resolve``.
        label: Names the layer in messages; the same at all members.

    Returns:
        A new tensor like ``input``.

    Raises:
        ValueError: All members together have one value per channel.
    """
    chunk = _chunk_of(input)
    everywhere = _from_all(chunk, group, label)
    if chunk.num_values <= 1:
        # Only now, since on an accelerator to look at the number is to wait for the device.
        total = int(everywhere[:, -1].sum())
        if total == 0:
            ordinary: Tensor = BatchNorm.forward(layer, input)
            return ordinary
        if total == 1:
            raise ValueError(
                "expected more than 1 value per channel when training, but the whole batch has 1 "
                f"(input size {tuple(input.shape)} in {label})"
            )
    mean, variance, count = _combined(everywhere, layer.num_features)
    _update_running_statistics(layer, mean, variance, count)
    return _normalized(layer, input, chunk, mean, variance)


def _chunk_of(input: Tensor) -> _Chunk:
    # In half precision a sum over a batch loses most of its digits.
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    num_values = values.size(0) * values.shape[2:].numel()
    # A mean of no values would be nan, and so would be all gradients.
    mean = values.sum(_all_but_channels(values)) / max(num_values, 1)
    return _Chunk(num_values, mean, values - _per_channel(mean, values))


def _from_all(chunk: _Chunk, group: str | LocalGroup, label: str) -> Tensor:
    """A row per member: means, sums of squared deviations, number of values."""
    deviations = chunk.deviations
    squares = (deviations * deviations).sum(_all_but_channels(deviations))
    count = squares.new_full((1,), chunk.num_values)
    row = torch.cat((chunk.mean, squares, count)).unsqueeze(0)
    if isinstance(group, str):
        return wait_tensor(all_gather_tensor(row, 0, group))
    return group.run(_GatherStatistics(0, label), row)


def _combined(everywhere: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values of the union of the chunks.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    means, squares = everywhere[:, :num_channels], everywhere[:, num_channels:-1]
    counts = everywhere[:, -1:].detach()
    count = counts.sum()
    mean = (means * (counts / count)).sum(0)
    between = counts * (means - mean) ** 2
    return mean, (squares + between).sum(0) / count, count


def _update_running_statistics(
    layer: BatchNorm, mean: Tensor, variance: Tensor, count: Tensor
) -> None:
    if not (layer.training and layer.track_running_stats):
        return
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    if layer.running_mean is None or layer.running_var is None:
        return
    with torch.no_grad():
        unbiased = variance * (count / (count - 1))
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)


def _normalized(
    layer: BatchNorm, input: Tensor, chunk: _Chunk, mean: Tensor, variance: Tensor
) -> Tensor:
    scale = torch.rsqrt(variance + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    # From the deviations, which backward needs anyway: a second tensor of the size of the input
    # would be kept for it else.
    offset = (chunk.mean - mean) * scale
    if layer.bias is not None:
        offset = offset + layer.bias
    output = torch.addcmul(
        _per_channel(offset, input), chunk.deviations, _per_channel(scale, input)
    )
    return output.to(input.dtype)


def _all_but_channels(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _per_channel(vector: Tensor, values: Tensor) -> Tensor:
    return vector.reshape([1, -1, *[1] * (values.dim() - 2)])
