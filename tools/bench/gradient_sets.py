"""The sets of parameters whose gradients `bench reducer` reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GradientSet:
    """Shapes of parameters.

    Attributes:
        name: The word on the command line.
        shapes: One per parameter, in the order in which a forward uses them.
    """

    name: str
    shapes: Shapes

    @property
    def numbers(self) -> int:
        """How many numbers all parameters have."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)


_SMALL: Shapes = ((64, 64), (64,)) * 201
_LARGE: Shapes = ((1024, 1024),) * 8
_MIXED: Shapes = ((768, 256), (768,), (256, 256), (256,), (256,), (1024, 256), (1024,)) * 8

#: By name. Overhead per parameter; bytes; both, as a transformer has them.
GRADIENT_SETS = {
    each.name: each
    for each in (
        GradientSet("small", _SMALL),
        GradientSet("large", _LARGE),
        GradientSet("mixed", _MIXED),
    )
}


class KnownGradients(nn.Module):
    """A model that computes next to nothing and whose gradients are known beforehand.

    It maps samples ``(N, 1)`` to ``(N,)``. Each parameter has a node of its own in the graph, so
    gradients arrive one by one, the last parameter's first, and each in memory of its own.

    Args:
        shapes: Those of the parameters, which are zero.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, samples: Tensor) -> Tensor:
        scale = samples.mean()
        total = torch.stack([(weight * scale).sum() for weight in self.weights]).sum()
        return samples.squeeze(1) * total


def known_gradient(samples: Tensor, replicas: int) -> float:
    """Every element of every gradient of the mean output over all samples.

    Example::

        known_gradient(torch.tensor([[1.0], [3.0]]), replicas=2)   # (1 * 1 + 3 * 3) / 2

    Args:
        samples: The whole batch, ``(N, 1)``.
        replicas: Among how many replicas it is divided equally.
    """
    means = torch.stack([chunk.mean() for chunk in samples.chunk(replicas)])
    return means.square().mean().item()
