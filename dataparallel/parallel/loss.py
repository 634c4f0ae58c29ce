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
    """The forward and the loss of one replica.

    Targets are scattered as keyword arguments beside the module's, under names of their own.

    Attributes:
        prepared: The criterion.
        targets: From the name under which a target is scattered to its position or its name.
        timeline: Is told when the loss is computed.
    """

    prepared: PreparedCriterion
    targets: Mapping[str, int | str]
    timeline: Timeline

    def __call__(
        self,
        replica: nn.Module,
        criterion: nn.Module | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Part:
        """Run one replica and its criterion; called in the replica's thread."""
        own = {name: value for name, value in kwargs.items() if name not in self.targets}
        output = replica(*args, **own)
        given = [(key, kwargs[name]) for name, key in self.targets.items()]
        positional = [value for key, value in given if isinstance(key, int)]
        named = {key: value for key, value in given if isinstance(key, str)}
        with self.timeline.span_here("loss"):
            return self.prepared.local(
                output, positional, named, samples=samples, replica=criterion
            )
