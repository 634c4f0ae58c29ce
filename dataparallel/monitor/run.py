"""The facts that a run tells those who watch it."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dataparallel.monitor.from_json import record_of
from dataparallel.monitor.record import Kind, StepRecord, StepTotals
from dataparallel.threads import Phase


@dataclass(frozen=True)
class RunInfo:
    """The facts that stay the same while a run goes on.

    Attributes:
        model: Name of the class of the module, or of the optimizer.
        wrapper: In what the module is wrapped: a class of this package; ``"DDP"``, ``"FSDP"``,
            ``"fully_shard"`` or ``"torch.compile"`` of torch's; ``"module"`` if in nothing,
            ``"optimizer"`` if the monitor got one.
        devices: The device of each replica.
        uuids: The identity of each of them; None if it has none.
        world_size: How many processes there are.
        local_world_size: How many of them are on this machine.
        num_parameters: Number of elements of all parameters.
        num_buckets: How many buckets gradients are reduced in; 0 if there are none.
        bucket_bytes: Size of the largest bucket.
        num_threads: With how many threads torch computes an operator on the CPU.
        num_cpus: How many processors its processes on this machine may use; a quota may be a part
            of one.
        wait_policy: The value of ``OMP_WAIT_POLICY``; empty if it is not set.
        is_hooked: True if the module is no wrapper of this package, and hooks watch it.
        faster_option: The option of its optimizer that would make the step faster; empty if there
            is none.
        labels: The ``container``, ``pod``, ``pod_uid`` and ``slurm_job`` that it is in.
    """

    model: str
    wrapper: str
    devices: tuple[str, ...]
    uuids: tuple[str | None, ...]
    world_size: int = 1
    local_world_size: int = 1
    num_parameters: int = 0
    num_buckets: int = 0
    bucket_bytes: int = 0
    num_threads: int = 1
    num_cpus: float = 1.0
    wait_policy: str = ""
    is_hooked: bool = False
    faster_option: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def hides_waiting(self) -> bool:
        """True if the waiting for other processes is a part of the forward and the backward."""
        return self.is_hooked and self.world_size > 1


@dataclass(frozen=True)
class RunState:
    """A run at one moment.

    Attributes:
        job: The name that all ranks of a job share, and no other job has.
        rank: Its rank among the processes.
        host: Name of the machine.
        pid: Its process.
        number: The number of the monitor among those of its process, from 0.
        time: The moment, in seconds since 1970.
        started: When watching began, likewise.
        info: The facts that do not change.
        now: Per replica the phase in which it is, and for how many seconds already.
        kinds: All steps so far, by kind: those that train, and those without gradients.
        memory: Per replica, the bytes that torch's tensors occupy on its device; 0 on the CPU.
        last: The last step that has ended; None if there is none.
        monitor_seconds: Processor seconds that watching itself has taken in this process.
        memory_peak: Per replica, the most bytes that tensors have occupied; 0 on the CPU.
        memory_total: Per replica, the bytes that its device has; 0 on the CPU.
        memory_retries: Per replica, how often the allocator had to give back its cache and try
            again since watching began.
        answers: False if the process does not answer: these are its last words.
    """

    job: str
    rank: int
    host: str
    pid: int
    number: int
    time: float
    started: float
    info: RunInfo
    now: tuple[tuple[Phase, float], ...]
    kinds: Mapping[Kind, StepTotals]
    memory: tuple[int, ...]
    last: StepRecord | None
    monitor_seconds: float = 0.0
    memory_peak: tuple[int, ...] = ()
    memory_total: tuple[int, ...] = ()
    memory_retries: tuple[int, ...] = ()
    answers: bool = True

    @property
    def monitor_share(self) -> float:
        """The share of a processor that watching has taken since it began."""
        return self.monitor_seconds / max(1e-9, self.time - self.started)

    @property
    def num_steps(self) -> int:
        """The number of steps of all kinds so far."""
        return sum(one.steps for one in self.kinds.values())

    @property
    def main(self) -> StepTotals:
        """The steps that train; if none does, the others."""
        none = StepTotals.none(len(self.now))
        return self.kinds.get("train") or self.kinds.get("inference", none)

    @property
    def order(self) -> tuple[str, int, int, int]:
        """Runs are shown in this order."""
        return self.job, self.rank, self.pid, self.number

    @property
    def identity(self) -> tuple[str, int, int]:
        """Return the identity that no other run has; a process may have several."""
        return self.host, self.pid, self.number

    def without_answer(self, time: float) -> RunState:
        """Return the state of a process that has not answered since, as far as it is known."""
        passed = max(0.0, time - self.time)
        now = tuple((phase, seconds + passed) for phase, seconds in self.now)
        return replace(self, time=time, now=now, answers=False)

    def to_json(self) -> dict[str, Any]:
        """Return the state as values for ``json``; see :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> RunState:
        """Return the state that :meth:`to_json` has described; a ValueError if it is none."""
        found = record_of(RunState, data, "state of a run")
        found.check()
        return found

    def check(self) -> None:
        """Raise a ValueError unless all that is told per replica is told of each one."""
        count = len(self.info.devices)
        each: list[Sized] = [self.info.uuids, self.now, self.memory]
        each += [told for one in self.kinds.values() for told in (one.seconds, one.host_bound)]
        # Older versions leave out all three.
        later = (self.memory_peak, self.memory_total, self.memory_retries)
        each += later if any(later) else ()
        if any(len(told) != count for told in each):
            raise ValueError(
                f"this is no state of a run: it tells of {count} devices, and of another "
                "number of replicas"
            )
        info = self.info
        if min(info.world_size, info.local_world_size, info.num_threads, info.num_cpus) <= 0:
            raise ValueError("this is no state of a run: it has no processes or no processors")
