"""Synchronized batch norm as a module."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from dataparallel.collectives.batch_statistics import batch_norm, check_input, is_alone
from dataparallel.collectives.groups import Group, resolve
from dataparallel.errors import listed
from dataparallel.torch_internals import BatchNorm

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class SyncBatchNorm(BatchNorm):
    """Batch norm over the whole batch, of which each member has a chunk.

    In training each member normalizes with the mean and variance of the chunks of all members.
    Outputs, gradients of any order and running statistics are those of one module with the whole
    batch, also if chunks differ in size or are empty. All members call the same layers in the same
    order. If one of them computes gradients of the input, all must.

    In evaluation the members exchange nothing, as in torch: the layer uses its running statistics,
    or those of the chunk if it has none. If the group has one member, the layer works as
    ``torch.nn.BatchNorm1d`` does.

    Example::

        net = collectives.SyncBatchNorm.convert(net)
        model = dataparallel.DistributedDataParallel(net)

    Args:
        num_features: Number of channels ``C``; the input has the shape ``(N, C, ...)``.
        eps: Added to the variance. Default: 1e-5.
        momentum: Weight of a batch in the running statistics; None for their plain mean. Default:
            0.1.
        affine: Whether there are a weight and a bias. Default: True.
        track_running_stats: Whether there are running statistics. Default: True.
        group: The members: ``"hybrid"`` (the replicas of all processes; without a process
            group, of this one), ``"local"`` (the replicas of this process), or any other group
            that :func:`~dataparallel.collectives.all_reduce` takes. A ``ProcessGroup`` is kept by
            its name. Default: ``"hybrid"``.
        device: Of the parameters and buffers. Default: torch's.
        dtype: Of the parameters and running statistics. Default: torch's.
        bias: Whether an affine layer has a bias. Default: True.

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
        self.group, self.label = _kept(group), label

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
            input: Of shape ``(N, C, ...)``, of any floating-point type; ``N`` may be 0.

        Returns:
            A new tensor like ``input``.

        Raises:
            ValueError: The input has no channels, or all members together have one value per
                channel.
            RuntimeError: The input has another number of channels; or the layer runs in one of
                several replicas with a group of processes, or under activation checkpointing.
            TypeError: The input is not of a floating-point type.
        """
        check_input(self, input, self.label)
        if self.training:
            target = resolve(self.group)
            if not is_alone(target, self.label):
                return batch_norm(self, input, target, self.label)
        output: Tensor = super().forward(input)
        return output

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
        layers = {name: part for name, part in module.named_modules() if _is_batch_norm(part)}
        faults = [
            f"{name!r} ({type(layer).__name__}) {fault}"
            for name, layer in layers.items()
            if (fault := _fault(layer)) is not None
        ]
        if faults:
            raise TypeError(f"cannot synchronize batch norm: {listed(faults, '; ')}")
        for name, layer in layers.items():
            _become(cls, layer, name, group)
        return module

    @classmethod
    def convert_sync_batchnorm(cls, module: ModuleT, process_group: Group | None = None) -> ModuleT:
        """:meth:`convert` under torch's name.

        Example::

            net = collectives.SyncBatchNorm.convert_sync_batchnorm(net)

        Args:
            module: See :meth:`convert`.
            process_group: The ``group`` of :meth:`convert`.

        Returns:
            ``module`` itself.
        """
        return cls.convert(module, process_group)


def _is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, BatchNorm)


def _fault(layer: nn.Module) -> str | None:
    """Why a layer cannot be converted."""
    if isinstance(layer, SyncBatchNorm):
        return None
    if isinstance(layer, LazyModuleMixin):
        return "does not know its number of channels yet; run a forward first"
    if is_parametrized(layer):
        return "is parametrized; convert it before it is parametrized"
    known = (BatchNorm.forward, nn.SyncBatchNorm.forward)
    if type(layer).forward not in known or "forward" in vars(layer):
        return "has a forward of its own; use a layer of torch.nn"
    return None


def _become(cls: type[SyncBatchNorm], layer: Any, name: str, group: Group | None) -> None:
    own = vars(layer).pop("process_group", None) if isinstance(layer, nn.SyncBatchNorm) else None
    if isinstance(layer, SyncBatchNorm):
        own = layer.group
    else:
        layer.__class__ = cls
    if group is None:
        group = "hybrid" if own is None else own
    layer._join(group, f"batch norm {name!r}" if name else "batch norm")


def _kept(group: Group) -> Group:
    """The group as the layer keeps it: a ProcessGroup can be neither copied nor pickled."""
    return group.group_name if isinstance(group, dist.ProcessGroup) else group
