"""The record of one training step: the time of each replica in each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dataparallel.threads import PHASES, Phase

Kind: TypeAlias = Literal["train", "inference"]


@dataclass(frozen=True)
class Segment:
    """A stretch of a step in which one replica is in one phase.

    Attributes:
        phase: One of :data:`dataparallel.threads.PHASES`.
        begin: Seconds since the step began.
        end: Likewise.
    """

    phase: Phase
    begin: float
    end: float


@dataclass(frozen=True)
class ReplicaStep:
    """One replica in one step.

    Attributes:
        index: Index of the replica within the process.
        device: Name of its device.
        samples: How many samples it got.
        segments: The phases from the beginning of the step to its end, without gaps.
        host_bound: Seconds of its backward (of its forward, where there is none) in which its
            device waited for the host to issue work; 0 on the CPU.
    """

    index: int
    device: str
    samples: int
    segments: tuple[Segment, ...]
    host_bound: float = 0.0

    @property
    def seconds(self) -> dict[Phase, float]:
        """Per phase that occurs, its seconds; together they are the length of the step."""
        total: dict[Phase, float] = {}
        for segment in self.segments:
            length = segment.end - segment.begin
            total[segment.phase] = total.get(segment.phase, 0.0) + length
        return {phase: total[phase] for phase in PHASES if phase in total}


@dataclass(frozen=True)
class StepRecord:
    """One step, from the end of the one before to its own end.

    Attributes:
        number: Number of the step, from 1.
        kind: ``"train"``, or ``"inference"`` for a forward without gradients.
        time: When it began, in seconds since 1970.
        seconds: How long it took.
        samples: How many samples it had in this process.
        replicas: The record of each replica.
        calls: How many forwards it had.
    """

    number: int
    kind: Kind
    time: float
    seconds: float
    samples: int
    replicas: tuple[ReplicaStep, ...]
    calls: int = 1

    @property
    def has_pause(self) -> bool:
        """True if it began with a pause that was far longer than the usual step."""
        return any(one.segments and one.segments[0].phase == "pause" for one in self.replicas)


@dataclass(frozen=True)
class StepTotals:
    """All steps of one kind, added up.

    Attributes:
        steps: How many there were.
        samples: How many samples they had, in this process.
        seconds: Per replica and phase, their seconds.
        host_bound: Per replica, the seconds in which its device waited for the host to issue work;
            see :class:`ReplicaStep`.
        pauses: How many of them began with a long pause.
    """

    steps: int
    samples: int
    seconds: tuple[Mapping[Phase, float], ...]
    host_bound: tuple[float, ...]
    pauses: int = 0

    @staticmethod
    def none(num_replicas: int) -> StepTotals:
        """Return the totals of no steps."""
        return StepTotals(0, 0, ({},) * num_replicas, (0.0,) * num_replicas)

    def plus(self, step: StepRecord, times: int) -> StepTotals:
        """Return the totals with a step that counts several times."""
        seconds = []
        for total, replica in zip(self.seconds, step.replicas, strict=True):
            own = replica.seconds
            phases = [phase for phase in PHASES if phase in total or phase in own]
            seconds.append({p: total.get(p, 0.0) + times * own.get(p, 0.0) for p in phases})
        bound = zip(self.host_bound, step.replicas, strict=True)
        return StepTotals(
            self.steps + times,
            self.samples + times * step.samples,
            tuple(seconds),
            tuple(before + times * replica.host_bound for before, replica in bound),
            self.pauses + times * step.has_pause,
        )
