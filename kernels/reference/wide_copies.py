"""Small floats as the wider ones that they are computed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.kernels.dtypes import wide


class WideCopies:
    """Tensors in the type that they are computed in, to change and then to write back once.

    Args:
        originals: Those of a wide type are changed themselves.

    Attributes:
        tensors: The originals, or copies of them.
    """

    def __init__(self, originals: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensor.to(wide(tensor.dtype)) for tensor in originals)
        self._small = [
            (original, copy)
            for original, copy in zip(originals, self.tensors, strict=True)
            if copy is not original
        ]

    def write(self) -> None:
        """Round the copies to the originals."""
        if self._small:
            originals, copies = zip(*self._small, strict=True)
            torch_internals.foreach_copy_(originals, copies)


def wide_gradients(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], scale: float
) -> tuple[torch.Tensor, ...]:
    """Gradients in the types that the steps of parameters are computed in, scaled.

    Args:
        gradients: Of any floating-point dtypes; they are not changed.
        parameters: What they are gradients of.
        scale: What they are multiplied with.
    """
    converted = tuple(
        gradient.to(wide(parameter.dtype))
        for gradient, parameter in zip(gradients, parameters, strict=True)
    )
    return converted if scale == 1 else tuple(torch_internals.foreach_mul(converted, scale))
