"""One change of how batches are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Change:
    """One change of the chunks, with its reason.

    Attributes:
        step: Number of the step before the change, from 1; 0 if no step has ended.
        reason: ``"speed"``: the measurements promise shorter steps. ``"worse"``: steps became
            longer, and the Balancer takes a change back. ``"memory"``: a replica ran out of memory.
        before: Samples per replica before the change, for a batch of the last size.
        after: Samples per replica after the change.
        gain: Predicted part of a step's time that the change saves, 0 to 1; None for the other two
            reasons.
        why: The reason in words.
    """

    step: int
    reason: Literal["speed", "worse", "memory"]
    before: tuple[int, ...]
    after: tuple[int, ...]
    gain: float | None
    why: str

    def __str__(self) -> str:
        return (
            f"after step {self.step}: a batch of {sum(self.after)} is divided into {self.after} "
            f"instead of {self.before}, since {self.why}"
        )
