"""The models that are measured, each chosen for what limits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits ``(..., classes)`` and targets ``(...)``."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class TrainCase:
    """A model and its batch.

    Attributes:
        batch: Number of samples of the whole batch, over all replicas.
        build: Makes the model, from torch's default generator.
        data: Makes inputs and targets for a number of samples.
        criterion: The mean loss of outputs and targets.
        rate: Learning rate of SGD.
    """

    batch: int
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    criterion: Callable[[Tensor, Tensor], Tensor] = criterion
    rate: float = 0.01


def _mlp(width: int, depth: int = 8) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        # With torch's default, gradients fade with depth to numbers that are slow to compute with
        # and too small to compare.
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _conv() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, *[64] * 6):
        layers += [nn.Conv2d(channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class _Transformer(nn.Module):
    """Tokens ``(N, T)`` to logits ``(N, T, vocabulary)``."""

    def __init__(self, width: int = 256, layers: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def _vectors(width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, width), torch.randint(10, (samples,)))


def _images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))


def _tokens(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, (samples, 64)), torch.randint(1000, (samples, 64))


#: By name.
CASES = {
    # Matrix products; memory traffic; number of launches; a usual mixture; convolution.
    "mlp": TrainCase(256, lambda: _mlp(1024), _vectors(1024)),
    "wide": TrainCase(128, lambda: _mlp(2048), _vectors(2048)),
    "deep": TrainCase(64, lambda: _mlp(64, 200), _vectors(64)),
    "transformer": TrainCase(16, _Transformer, _tokens),
    "conv": TrainCase(32, _conv, _images),
}


def case_of(name: str) -> TrainCase:
    """Return one of :data:`CASES`; or, for a number, so many parameters without arithmetic."""
    if name in CASES:
        return CASES[name]
    layers, width = int(name) // 2, 4

    def build() -> nn.Module:
        stack = [nn.Linear(width, width) for _ in range(layers)]
        for layer in stack:
            # So that a thousand of them neither shrink nor swell what passes through.
            nn.init.orthogonal_(layer.weight)
        return nn.Sequential(*stack)

    def data(samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, width), torch.randn(samples, width)

    return TrainCase(16, build, data, nn.functional.mse_loss, rate=0.1 / layers)


def whole_batch(case: str, replicas: int) -> int:
    """Return the batch of a case, rounded down to equal parts."""
    samples = CASES[case].batch
    if samples < replicas:
        raise ValueError(f"case {case!r} has {samples} samples, but there are {replicas} replicas")
    return samples // replicas * replicas
