"""Who takes part in a measurement, as plain records that travel to worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

Kind = Literal["ours", "watched", "bare", "ddp"]
Wrapper = Literal["dp", "ddp"]
Mode = Literal["step", "forward-backward", "forward", "inference"]
Loss = Literal["gathered", "replicas"]
Optimizer = Literal["sgd", "momentum", "adamw"]

#: What each mode repeats.
MODES: dict[Mode, str] = {
    "step": "zero_grad, forward, loss, backward, optimizer step",
    "forward-backward": "zero_grad, forward, loss, backward",
    "forward": "forward in training, with a graph",
    "inference": "forward under no_grad",
}


@dataclass(frozen=True)
class Task:
    """One worker process's place in its contestant.

    Attributes:
        kind: ``"ours"``: our wrapper over this process's devices; ``"watched"``: the same within a
            ``StepMonitor``; ``"bare"``: the module alone,
            whole batch, on the first device; ``"ddp"``: one of torch's DDP processes.
        devices: This process's own, one per replica.
        replicas: Into how many parts the whole batch is divided, over all processes.
        threads: Intra-op threads per replica.
        wrapper: Which of our wrappers is ours.
        bucket_view: ``gradient_as_bucket_view`` of our DDP; torch's always has it.
        rank: Index of the process within the contestant.
        world_size: Number of processes of the contestant.
        meeting_point: File through which the processes of one contestant find each other.
    """

    #: What kind of worker takes the task.
    subject: ClassVar[str] = ""

    kind: Kind
    devices: tuple[str, ...]
    replicas: int = 1
    threads: int = 1
    wrapper: Wrapper = "ddp"
    bucket_view: bool = False
    rank: int = 0
    world_size: int = 1
    meeting_point: str = ""

    @property
    def joins(self) -> bool:
        """Whether the process is member of a process group."""
        return self.kind == "ddp" or self.world_size > 1


@dataclass(frozen=True, kw_only=True)
class TrainTask(Task):
    """Train a model.

    Attributes:
        case: Name of the model.
        batch: Number of samples of the whole batch; a multiple of ``replicas``.
        mode: What is repeated.
        loss: Whether ours takes the loss of the gathered output or of each replica.
        optimizer: Which of torch's.
        statistics: Whether the wrapper's own timings of each backward are collected.
    """

    subject: ClassVar[str] = "train"

    case: str
    batch: int
    mode: Mode = "step"
    loss: Loss = "gathered"
    optimizer: Optimizer = "sgd"
    statistics: bool = False


@dataclass(frozen=True, kw_only=True)
class ReducerTask(Task):
    """Reduce gradients whose computation costs next to nothing.

    Attributes:
        gradients: Names of sets of parameters, each of which is a model of its own.
        bucket_cap_mb: Size limit of a bucket, in MiB. Default: the wrapper's own.
    """

    subject: ClassVar[str] = "reducer"

    gradients: tuple[str, ...]
    bucket_cap_mb: float | None = None


@dataclass(frozen=True)
class Contestant:
    """One or more worker processes that are measured as one.

    Attributes:
        name: Key in the results.
        title: What is shown.
        tasks: One per process.
    """

    name: str
    title: str
    tasks: tuple[Task, ...]


def plan_contestants(
    task: Task, devices: Sequence[Sequence[str]], peers: Sequence[str]
) -> tuple[Contestant, ...]:
    """Who is measured, in the order of a round.

    Example::

        task = TrainTask("ours", (), case="mlp", batch=256, meeting_point="/tmp/x")
        plan_contestants(task, [["cpu", "cpu"]], ["bare", "ddp"])   # ours, bare, ddp

    Args:
        task: What all have in common; the place in the contestant is filled in.
        devices: Those of each of our processes, one per replica. torch DDP gets as many processes
            as there are replicas, each with the device of one.
        peers: ``"bare"``, ``"ddp"`` and ``"watched"``, in any order.

    Returns:
        Ours, then the peers in the order given.

    Raises:
        ValueError: The processes have different numbers of devices.
    """
    if len({len(each) for each in devices}) != 1:
        raise ValueError(
            "all processes need the same number of devices, so that their parts of the batch are "
            f"alike, but got {[list(each) for each in devices]}"
        )
    of_replicas = [device for each in devices for device in each]

    def team(kind: Kind, of_processes: Sequence[Sequence[str]]) -> tuple[Task, ...]:
        return tuple(
            replace(
                task,
                kind=kind,
                devices=tuple(own),
                replicas=len(of_replicas),
                rank=rank,
                world_size=len(of_processes),
                meeting_point=f"{task.meeting_point}-{kind}",
            )
            for rank, own in enumerate(of_processes)
        )

    name = "our DDP" if task.wrapper == "ddp" else "DataParallel"
    ours = f"{name} {len(devices)}x{len(devices[0])}"
    known = {
        "watched": Contestant("watched", f"{ours}, watched", team("watched", devices)),
        "bare": Contestant("bare", "bare module", team("bare", [of_replicas[:1]])),
        "ddp": Contestant(
            "ddp",
            f"torch DDP {len(of_replicas)}x1",
            team("ddp", [[device] for device in of_replicas]),
        ),
    }
    return (Contestant("ours", ours, team("ours", devices)), *(known[peer] for peer in peers))
