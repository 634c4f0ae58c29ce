"""One change of how batches are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Change:
    """When the chunks of the replicas became others, and why.

    Attributes:
        step: Number of the step after which that was, from 1; 0 before the first.
        reason: ``"speed"`` after measurements, ``"worse"`` where such a change has not helped and
            was taken back, ``"memory"`` where a replica ran out of it.
        before: Samples per replica, of a batch as the last one.
        after: Likewise, from then on.
        gain: Predicted part of a step's time that is saved, 0 to 1; None where it was no choice.
        why: The same in words.
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
