"""What the steps of a run add up to, per replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo
from dataparallel.threads.timeline import PHASES, Phase

#: Phases in which a replica may go at its own speed.
_COMPUTING: tuple[Phase, ...] = ("forward", "loss", "backward")


@dataclass(frozen=True)
class ReplicaTotals:
    """One replica in several steps.

    Attributes:
        index: Index of the replica within the process.
        device: Name of its device.
        samples: How many samples it got.
        seconds: Per phase that occurs, its seconds.
    """

    index: int
    device: str
    samples: float
    seconds: Mapping[Phase, float]


@dataclass(frozen=True)
class RunTotals:
    """Several steps of a run.

    Attributes:
        num_steps: How many there are.
        seconds: How long they took together.
        samples: How many samples they had in this process.
        replicas: What each replica did.
        own_phases: The phases in which replicas compute at their own speed, see
            :func:`own_phases`.
    """

    num_steps: int
    seconds: float
    samples: float
    replicas: tuple[ReplicaTotals, ...]
    own_phases: tuple[Phase, ...]

    @property
    def step_seconds(self) -> float:
        """How long one step took on average; 0 without steps."""
        return self.seconds / self.num_steps if self.num_steps else 0.0

    def mean(self, phase: Phase) -> float:
        """Seconds per step in a phase, the mean over the replicas."""
        values = [replica.seconds.get(phase, 0.0) for replica in self.replicas]
        return sum(values) / len(values) / self.num_steps if values and self.num_steps else 0.0

    def compute(self, replica: int) -> float:
        """Seconds per step in which a replica computes at its own speed."""
        seconds = self.replicas[replica].seconds
        return sum(seconds.get(phase, 0.0) for phase in self.own_phases) / max(1, self.num_steps)


def total_steps(steps: Sequence[StepRecord], info: RunInfo) -> RunTotals:
    """Add up steps.

    Args:
        steps: They have the same replicas.
        info: The run whose steps they are.
    """
    replicas = []
    for i, device in enumerate(info.devices):
        own = [step.replicas[i] for step in steps if i < len(step.replicas)]
        seconds: dict[Phase, float] = {}
        for one in own:
            for phase, length in one.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + length
        replicas.append(ReplicaTotals(i, device, sum(one.samples for one in own), seconds))
    alike = bool(steps) and all(_alike([r.seconds for r in step.replicas]) for step in steps)
    return RunTotals(
        len(steps),
        sum(step.seconds for step in steps),
        sum(step.samples for step in steps),
        tuple(replicas),
        own_phases([replica.seconds for replica in replicas], info, common_backward=alike),
    )


def make_totals(
    num_steps: int, seconds: float, samples: float, replicas: Sequence[ReplicaTotals], info: RunInfo
) -> RunTotals:
    """Totals of replicas that have been added up already."""
    own = own_phases([replica.seconds for replica in replicas], info)
    return RunTotals(num_steps, seconds, samples, tuple(replicas), own)


def own_phases(
    seconds: Sequence[Mapping[Phase, float]],
    info: RunInfo,
    *,
    common_backward: bool | None = None,
) -> tuple[Phase, ...]:
    """The phases that tell how fast each replica is.

    The loss does where the replicas compute it, and not where the first one does it for all. The
    backward does not where autograd runs through all replicas at once, for then it begins and ends
    for all of them together.

    Args:
        seconds: Per replica, the seconds of each phase.
        info: The run.
        common_backward: Whether it did so in each step. Default: if the seconds are the same.
    """
    if len(seconds) < 2:
        return _COMPUTING
    if common_backward is None:
        common_backward = _alike(seconds)
    chosen: list[Phase] = ["forward"]
    if sum(one.get("loss", 0.0) > 0 for one in seconds) > 1:
        chosen.append("loss")
    if info.num_buckets and not common_backward:
        chosen.append("backward")
    return tuple(chosen)


def _alike(seconds: Sequence[Mapping[Phase, float]]) -> bool:
    values = [one.get("backward", 0.0) for one in seconds]
    return max(values) - min(values) <= 1e-6 * max(values)


def in_order(seconds: Mapping[Phase, float]) -> dict[Phase, float]:
    """The same numbers, the phases in the order in which they are shown."""
    return {phase: seconds[phase] for phase in PHASES if phase in seconds}
