"""Replicas that compute in another dtype than the one in which the parameters are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataparallel.errors import suggesting


@suggesting
@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes with which replicas compute and send gradients.

    The module's own parameters and their gradients keep their dtype, so optimizers and checkpoints
    do not change. Only floating-point tensors are converted.

    Example::

        model = DistributedDataParallel(net, mixed_precision=MixedPrecision(torch.bfloat16))

    Args:
        param_dtype: Of the replicas' parameters and inputs. Default: no change.
        reduce_dtype: Of the gradients that the reducer sends. Default: ``param_dtype``.
        buffer_dtype: Of the module's buffers, which the constructor converts. Default: no change.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @staticmethod
    def of(config: Any) -> MixedPrecision:
        """Read a configuration: None, one of this class, or torch's ``_MixedPrecision``."""
        if config is None:
            return MixedPrecision()
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(hasattr(config, name) for name in names):
            raise TypeError(
                f"mixed_precision must have {', '.join(names)}, as dataparallel.MixedPrecision "
                f"has, but got {type(config).__name__}"
            )
        dtypes = {name: getattr(config, name) for name in names}
        for name, dtype in dtypes.items():
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating-point dtype, but got {dtype}")
        dtypes["reduce_dtype"] = dtypes["reduce_dtype"] or dtypes["param_dtype"]
        return MixedPrecision(**dtypes)

    def convert_buffers(self, module: nn.Module) -> None:
        """Convert the floating-point buffers of a module, in place."""
        if self.buffer_dtype is None:
            return
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.buffer_dtype)

    def convert_input(self, value: Any) -> Any:
        """A leaf of a forward's arguments as the replicas get it; gradients flow back."""
        converts = self.param_dtype is not None and isinstance(value, torch.Tensor)
        return value.to(self.param_dtype) if converts and value.is_floating_point() else value


#: Nothing is converted.
FULL = MixedPrecision()
