"""What becomes of gradients that are not finite, and how they are reported."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from dataparallel.errors import MOST, chosen, listed

#: ``"ignore"``: nobody looks. ``"skip"``: the step is skipped in all processes. ``"raise"``: all
#: processes raise :class:`NonFiniteGradients`.
NonFiniteAction: TypeAlias = Literal["ignore", "skip", "raise"]

_log = logging.getLogger("dataparallel")


class NonFiniteGradients(FloatingPointError):
    """Gradients are NaN or infinite. All processes raise it with the same text."""


#: The place of what is infinite although nothing that was added up is.
SUM = "the sum"


class Finding(NamedTuple):
    """A gradient that is not finite."""

    #: Who has made it, as messages call that; or :data:`SUM`.
    place: str
    name: str
    #: ``"NaN"`` or ``"infinity"``.
    kind: str
    parameter: torch.Tensor


@dataclass
class NonFinitePolicy:
    """What one wrapper does about gradients that are not finite; outlives its reducers.

    Example::

        policy = NonFinitePolicy.of("skip")

    Attributes:
        action: See :data:`NonFiniteAction`.
        num_skipped: How many backwards were skipped so far.
    """

    action: NonFiniteAction = "ignore"
    num_skipped: int = 0

    @staticmethod
    def of(action: object) -> NonFinitePolicy:
        """The policy for what a user has passed.

        Raises:
            ValueError: There is no such action.
        """
        return NonFinitePolicy(chosen("nonfinite", action, get_args(NonFiniteAction)))

    @property
    def looks(self) -> bool:
        """Whether gradients are looked at."""
        return self.action != "ignore"

    def refuse_steps_in_backward(self) -> None:
        """Raise an error: optimizers step in backward, bucket by bucket.

        Raises:
            ValueError: Gradients are looked at.
        """
        if self.looks:
            raise ValueError(
                f"nonfinite={self.action!r} and optimizers in backward do not go together: when a "
                "gradient is found that is not finite, other parameters have taken their step "
                "already; leave nonfinite at 'ignore', or take the step after backward"
            )

    def refuse_kept_nan(self, hook: str) -> None:
        """Raise an error: a communication hook remembers a NaN for ever.

        Args:
            hook: What messages call it.

        Raises:
            ValueError: Training is to go on after a NaN.
        """
        if self.action == "skip":
            raise ValueError(
                f"nonfinite='skip' and the communication hook {hook} do not go together: it adds "
                "what it has rounded away to the next steps, so that after one NaN all of them "
                "would be skipped; leave nonfinite at 'ignore', pass 'raise', or use another hook, "
                "such as 'bf16_compress'"
            )

    def act(self, text: str) -> None:
        """Do what the user wants: log and count, or raise an error.

        Args:
            text: What was found, see :func:`describe`.

        Raises:
            NonFiniteGradients: The action is ``"raise"``.
        """
        if self.action == "raise":
            raise NonFiniteGradients(
                f"{text}. No gradient of this step was kept, in no process, and .grad is None; all "
                "can go on with the next step"
            )
        self.num_skipped += 1
        _log.warning(
            "%s. The step is skipped: .grad is None in all processes (skipped so far: %d)",
            text,
            self.num_skipped,
        )


def to_json(findings: Sequence[Finding]) -> list[Any]:
    """What one process tells the others: per place, names and how many there are."""
    by_place: dict[str, list[str]] = {}
    for finding in findings:
        by_place.setdefault(finding.place, []).append(f"{finding.name} ({finding.kind})")
    return [[place, names[:MOST], len(names)] for place, names in sorted(by_place.items())]


def describe(told: Sequence[Sequence[Any]]) -> str:
    """What is not finite, from what :func:`to_json` gave in each process, in the order of ranks."""
    places: list[str] = []
    sums: list[str] = []
    for rank, entries in enumerate(told):
        process = f"rank {rank} of {len(told)}, " if len(told) > 1 else ""
        for place, names, number in entries:
            text = listed(names, number=number)
            if place != SUM:
                places.append(f"{process}{place}: {text}")
            elif text not in sums:
                sums.append(text)
    if places:
        return f"gradients are not finite on {'; on '.join(places)}"
    return (
        "sums of gradients are not finite, although each gradient is: they are too large for "
        f"their dtype, or .grad held something else before ({'; '.join(sums)})"
    )
