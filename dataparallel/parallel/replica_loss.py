"""What one replica does for ``model.loss``: its forward, and the criterion on its own device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dataparallel.parallel.criterion import PreparedCriterion
from dataparallel.parallel.denominators import Part
from dataparallel.threads.timeline import Timeline


@dataclass(frozen=True)
class LossCall:
    """How the scattered arguments divide into those of the module and those of the criterion.

    Attributes:
        prepared: The criterion.
        num_inputs: How many of the positional arguments are the module's.
        target_names: Names of the keyword arguments that are the criterion's.
        timeline: Is told when the loss is computed.
    """

    prepared: PreparedCriterion
    num_inputs: int
    target_names: tuple[str, ...]
    timeline: Timeline

    @staticmethod
    def name(target_name: str) -> str:
        """The name under which a keyword argument of the criterion is scattered."""
        return f"targets[{target_name!r}]"

    def __call__(
        self,
        replica: nn.Module,
        criterion: nn.Module | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Part:
        """Run one replica and its criterion; called in the replica's thread.

        Args:
            replica: The clone of the module.
            criterion: The clone of the criterion, ``None`` for a function.
            args: Positional arguments of one chunk, the module's first.
            kwargs: Keyword arguments of one chunk.
            samples: Number of samples in the chunk.

        Returns:
            What the replica contributes to the loss.
        """
        scattered = {self.name(name): name for name in self.target_names}
        own = {name: value for name, value in kwargs.items() if name not in scattered}
        targets = {name: kwargs[key] for key, name in scattered.items()}
        output = replica(*args[: self.num_inputs], **own)
        with self.timeline.span_here("loss"):
            return self.prepared.local(
                output, args[self.num_inputs :], targets, samples=samples, replica=criterion
            )
