"""Synchronized batch norm: as a module, and over the replicas of a wrapper.

Note [Synchronized batch norm]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each member computes mean, sum of squared deviations and number of values of its chunk. One gather
in the middle of forward brings these to all, and each normalizes its own chunk with the statistics
of the whole batch. All other steps are ordinary differentiable operations of one member, so with
the derivative of the collective gradients of any order come out right. All members combine the same
numbers in the same order, so their running statistics stay equal without being sent.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from dataparallel.collectives.functional import Group, all_gather_tensor, resolve, wait_tensor
from dataparallel.collectives.groups import HybridGroup, LocalGroup, refuse_in_backward
from dataparallel.collectives.operations import AllGather
from dataparallel.collectives.process_group import place_in
from dataparallel.replicas.clones import Counterparts, Parts
from dataparallel.threads.apply import current_replica
from dataparallel.threads.meeting import current_rendezvous
from dataparallel.torch_internals import BatchNorm, InstanceNorm, check_input_of, untraced

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class SyncBatchNorm(BatchNorm):
    """Batch norm over the whole batch, of which each member has a chunk.

    In training each member normalizes with the mean and variance of the chunks of all members.
    Outputs, gradients of any order and running statistics are those of one module with the whole
    batch. That holds for chunks of different sizes and empty ones, too. All members call the same
    layers in the same order. If one of them computes gradients of the input, all must.

    In evaluation the members exchange nothing, as in torch: the layer uses its running statistics,
    or those of the chunk if it has none. If the group has one member, the layer works as
    ``torch.nn.BatchNorm1d`` does.

    Example::

        net = collectives.SyncBatchNorm.convert(net)
        model = dataparallel.DistributedDataParallel(net)

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: See
            ``torch.nn.BatchNorm1d``; the input has the shape ``(N, C, ...)``.
        group: The members: ``"hybrid"`` (the replicas of all processes; without a process group, of
            this one) or ``"local"`` (the replicas of this process). Or any other group that
            :func:`~dataparallel.collectives.all_reduce` takes. A ``ProcessGroup`` is kept by its
            name. Default: ``"hybrid"``.

    Attributes:
        group: The members.
        label: Names the layer in messages, and keeps layers apart where members meet.
    """

    group: Group
    label: str

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: Group = "hybrid",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            # Torch's own argument for it is not in all versions.
            self.register_parameter("bias", None)
        self._join(group, "batch norm")

    def _join(self, group: Group, label: str) -> None:
        # A ProcessGroup can be neither copied nor pickled.
        self.group = group.group_name if isinstance(group, dist.ProcessGroup) else group
        self.label = label

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"{self.label} takes an input of shape (N, C, ...), but got {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the input; in training the layer waits for the other members.

        Example::

            output = layer(input)

        Args:
            input: A tensor of shape ``(N, C, ...)``, of any floating-point type; ``N`` may be 0.

        Returns:
            A new tensor like ``input``.

        Raises:
            ValueError: The input has no channels, or all members together have one value per
                channel.
            RuntimeError: The input has another number of channels; or the layer runs in one of
                several replicas with a group of processes, or under activation checkpointing.
            TypeError: The input is not of a floating-point type.
        """
        return _forward(self, input, self.group, self.label, uses_batch=self.training)

    def extra_repr(self) -> str:
        """Torch's text, and the group."""
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{text}, group={self.group!r}"

    @classmethod
    def convert(cls, module: ModuleT, group: Group | None = None) -> ModuleT:
        """Make all batch norm layers of a module synchronized ones.

        The layers change their class in place. So shared layers, hooks, optimizers and the names in
        the ``state_dict`` stay as they are.

        Example::

            net = collectives.SyncBatchNorm.convert(net)

        Args:
            module: With layers ``BatchNorm1d``, ``2d``, ``3d`` or ``torch.nn.SyncBatchNorm``, at
                any depth, or such a layer itself.
            group: The members, see :class:`SyncBatchNorm`. Default: ``"hybrid"``, or the group
                that a synchronized layer has already.

        Returns:
            ``module`` itself.

        Raises:
            TypeError: A layer cannot be converted. Then no layer changes.
        """
        layers = {n: part for n, part in module.named_modules() if isinstance(part, BatchNorm)}
        for name, layer in layers.items():
            if isinstance(layer, SyncBatchNorm):
                continue
            _refuse_own_forward(name, layer)
            if isinstance(layer, LazyModuleMixin) or is_parametrized(layer):
                raise TypeError(
                    f"cannot synchronize the batch norm {name!r} ({type(layer).__name__}), which "
                    "is lazy or parametrized; run a forward first, or parametrize it afterwards"
                )
        for name, layer in layers.items():
            _become(cls, layer, name, group)
        return module

    @classmethod
    def convert_sync_batchnorm(cls, module: ModuleT, process_group: Group | None = None) -> ModuleT:
        """:meth:`convert` under torch's name.

        Example::

            net = collectives.SyncBatchNorm.convert_sync_batchnorm(net)

        Args:
            module, process_group: The ``module`` and the ``group`` of :meth:`convert`.

        Returns:
            ``module`` itself.
        """
        return cls.convert(module, process_group)


def _become(cls: type[SyncBatchNorm], layer: Any, name: str, group: Group | None) -> None:
    own = vars(layer).pop("process_group", None) if isinstance(layer, nn.SyncBatchNorm) else None
    if isinstance(layer, SyncBatchNorm):
        own = layer.group
    else:
        layer.__class__ = cls
    if group is None:
        group = "hybrid" if own is None else own
    layer._join(group, f"batch norm {name!r}" if name else "batch norm")


def _has_own_forward(layer: nn.Module, *known: Any) -> bool:
    return type(layer).forward not in known or "forward" in vars(layer)


def _refuse_own_forward(name: str, layer: nn.Module) -> None:
    if _has_own_forward(layer, BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise TypeError(
            f"cannot synchronize the batch norm {name!r} ({type(layer).__name__}), which has a "
            "forward of its own; use a layer of torch.nn"
        )


# --- the replicas of a wrapper ---------------------------------------------------------------


def synchronize(
    group_of: Callable[[nn.Module], LocalGroup | None],
    parts: Parts,
    replicas: Sequence[Counterparts],
) -> None:
    """Let norm layers of clones use the statistics of the whole batch.

    ``group_of`` tells with whom a layer does; with None it stays as it is. So does a
    :class:`SyncBatchNorm`, which knows its group. For each replica there is its clone by the id of
    the original module.
    """
    named = list(zip(parts.names, parts.modules, strict=True))
    wrappers = [name for name, module in named if isinstance(module, nn.DataParallel)]
    for name, module in named:
        alone = isinstance(module, nn.SyncBatchNorm) and len(replicas) == 1
        if alone or isinstance(module, InstanceNorm):
            # One with a forward of its own does what that says.
            wanted = not _has_own_forward(module, nn.SyncBatchNorm.forward, InstanceNorm.forward)
        else:
            wanted = isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm)
        group = group_of(module) if wanted else None
        if group is None:
            continue
        for wrapper in wrappers:
            if not wrapper or name.startswith(f"{wrapper}."):
                raise TypeError(
                    f"cannot synchronize batch norm over the replicas of {wrapper!r} "
                    "within replicas; unwrap the inner module"
                )
        forward: Any = _forward_of_instance_norm
        if isinstance(module, BatchNorm):
            _refuse_own_forward(name, module)
            forward = _forward_of_batch_norm
        for replica in replicas:
            layer = replica[id(module)]
            # Weak, since the layer is to hold this, and would hold itself through it.
            layer.__dict__["forward"] = functools.partial(
                forward, weakref.ref(layer), group, name, len(replicas)
            )


@untraced
def _forward_of_batch_norm(
    reference: weakref.ref[BatchNorm], group: LocalGroup, name: str, replicas: int, input: Tensor
) -> Tensor:
    layer, label = reference(), f"batch norm {name!r}"
    assert layer is not None
    if not layer.training and isinstance(layer, nn.SyncBatchNorm):
        # In evaluation, processes exchange nothing, as in torch.
        group = LocalGroup()
    uses_batch = layer.training or layer.running_mean is None
    uses_batch = uses_batch and _has_others(group, label, replicas)
    return _forward(layer, input, group, label, uses_batch=uses_batch)


@untraced
def _forward_of_instance_norm(
    reference: weakref.ref[InstanceNorm], group: LocalGroup, name: str, replicas: int, input: Tensor
) -> Tensor:
    """Normalize each sample by itself; running statistics become the means over all samples."""
    layer, label = reference(), f"instance norm {name!r}"
    assert layer is not None
    mean, variance = layer.running_mean, layer.running_var
    shares = layer.training and mean is not None and _has_others(group, label, replicas)
    output: Tensor = InstanceNorm.forward(layer, input)
    if shares:
        assert mean is not None and variance is not None
        with torch.no_grad():
            own = torch.cat((mean, variance)).to(torch.promote_types(mean.dtype, torch.float32))
            # Those of no samples are nan.
            own = own if len(input) else torch.zeros_like(own)
            row = torch.cat((own, own.new_full((1,), len(input)))).unsqueeze(0)
            rows = group.run(AllGather(dim=0, label=label), row)
            counts = rows[:, -1:]
            whole = (rows[:, :-1] * (counts / counts.sum())).sum(0)
            mean.copy_(whole[: len(mean)])
            variance.copy_(whole[len(mean) :])
    return output


def _has_others(group: LocalGroup, label: str, replicas: int) -> bool:
    """True if a layer of one of so many replicas has others to meet; refuses if it cannot."""
    if replicas > 1 and current_replica() is None:
        raise RuntimeError(
            f"{label} is synchronized between replicas but was called outside of their forward, "
            "for example recomputed by activation checkpointing, where the other replicas cannot "
            "take part; leave synchronized layers out of the checkpointed part"
        )
    return replicas > 1 or (isinstance(group, HybridGroup) and not group.is_alone())


# --- what it computes ------------------------------------------------------------------------


def _forward(
    layer: BatchNorm, input: Tensor, group: Group, label: str, *, uses_batch: bool
) -> Tensor:
    """Run ``layer``, with the statistics of all members if it uses those of the batch."""
    check_input_of(layer, input)
    if input.size(1) != layer.num_features:
        raise RuntimeError(
            f"{label} is for {layer.num_features} channels, but the input of shape "
            f"{tuple(input.shape)} has {input.size(1)}"
        )
    if not input.is_floating_point():
        raise TypeError(f"{label} takes floating-point numbers, but the input is {input.dtype}")
    target = resolve(group) if uses_batch else None
    if target is not None and not _is_alone(target, label):
        return _over_all(layer, input, target, label)
    output: Tensor = BatchNorm.forward(layer, input)
    return output


def _is_alone(group: str | LocalGroup, label: str) -> bool:
    """True if a group has one member here."""
    return place_in(group)[1] == 1 if isinstance(group, str) else _is_only_replica(group, label)


@untraced
def _is_only_replica(group: LocalGroup, label: str) -> bool:
    if isinstance(group, HybridGroup) and not group.is_alone():
        # Only a collective could count the members.
        return False
    if current_rendezvous() is None:
        # A part of forward that runs again would not meet the replicas that it had met.
        refuse_in_backward(label)
    return LocalGroup.size(group) == 1


def _over_all(layer: BatchNorm, input: Tensor, group: str | LocalGroup, label: str) -> Tensor:
    """See Note [Synchronized batch norm]. Chunks may be empty.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    # In half precision a sum over a batch loses most of its digits.
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    own_count = values.size(0) * values.shape[2:].numel()
    # A mean of no values would be nan, and so would be all gradients.
    own_mean = values.sum(_all_but_channels(values)) / max(own_count, 1)
    deviations = values - _per_channel(own_mean, values)
    own_squares = (deviations * deviations).sum(_all_but_channels(values))
    row = torch.cat((own_mean, own_squares, own_squares.new_full((1,), own_count))).unsqueeze(0)
    if isinstance(group, str):
        rows = wait_tensor(all_gather_tensor(row, 0, group))
    else:
        rows = group.run(AllGather(dim=0, label=label), row)

    if own_count <= 1:
        # Only now, since on an accelerator to look at the number is to wait for the device.
        total = int(rows[:, -1].sum())
        if total == 0:
            ordinary: Tensor = BatchNorm.forward(layer, input)
            return ordinary
        if total == 1:
            raise ValueError(
                "expected more than 1 value per channel when training, but the whole batch has 1 "
                f"(input size {tuple(input.shape)} in {label})"
            )
    means, squares = rows[:, : layer.num_features], rows[:, layer.num_features : -1]
    counts = rows[:, -1:].detach()
    count = counts.sum()
    mean = (means * (counts / count)).sum(0)
    variance = (squares + counts * (means - mean) ** 2).sum(0) / count
    if layer.training and layer.track_running_stats:
        _update_running_statistics(layer, mean, variance * (count / (count - 1)))

    scale = torch.rsqrt(variance + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    # From the deviations, which backward needs anyway: a second tensor of the size of the input
    # would be kept for it else.
    offset = (own_mean - mean) * scale
    if layer.bias is not None:
        offset = offset + layer.bias
    output = torch.addcmul(_per_channel(offset, input), deviations, _per_channel(scale, input))
    return output.to(input.dtype)


def _update_running_statistics(layer: BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    if layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)


def _all_but_channels(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _per_channel(vector: Tensor, values: Tensor) -> Tensor:
    return vector.reshape([1, -1, *[1] * (values.dim() - 2)])
