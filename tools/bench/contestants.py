"""Who takes part in a measurement, as plain records that travel to worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["ours", "bare", "ddp"]
Mode = Literal["step", "forward-backward", "forward", "inference"]
Loss = Literal["gathered", "replicas"]

#: What each mode repeats.
MODES: dict[Mode, str] = {
    "step": "zero_grad, forward, loss, backward, optimizer step",
    "forward-backward": "zero_grad, forward, loss, backward",
    "forward": "forward in training, with a graph",
    "inference": "forward under no_grad",
}


@dataclass(frozen=True)
class Task:
    """What one worker process measures.

    Attributes:
        kind: ``"ours"``: DataParallel over all devices; ``"bare"``: the module alone, whole batch,
            on the first device; ``"ddp"``: one of torch's DDP processes, on its own device.
        case: Name of the model.
        batch: Number of samples of the whole batch; a multiple of the number of devices.
        devices: One device per replica.
        threads: Intra-op threads per replica.
        mode: What is repeated.
        loss: Whether ours takes the loss of the gathered output or of each replica.
        rank: Index of the process within the contestant.
        world_size: Number of processes of the contestant.
        meeting_point: File through which the processes of one contestant find each other.
    """

    kind: Kind
    case: str
    batch: int
    devices: tuple[str, ...]
    threads: int = 1
    mode: Mode = "step"
    loss: Loss = "gathered"
    rank: int = 0
    world_size: int = 1
    meeting_point: str = ""


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
    case: str,
    batch: int,
    devices: Sequence[str],
    peers: Sequence[str],
    *,
    threads: int,
    mode: Mode,
    loss: Loss,
    meeting_point: str,
) -> tuple[Contestant, ...]:
    """Who is measured in one case, in the order of a round.

    Example::

        plan_contestants("mlp", 256, ["cpu", "cpu"], ["bare", "ddp"], threads=1, mode="step",
                         loss="gathered", meeting_point="/tmp/x")   # ours, bare, ddp

    Args:
        case: Name of the model.
        batch: Number of samples of the whole batch; rounded down to equal chunks.
        devices: One device per replica.
        peers: ``"bare"`` and ``"ddp"``, in any order.
        threads: Intra-op threads per replica.
        mode: What is repeated.
        loss: Where ours takes the loss.
        meeting_point: A path that does not exist yet.

    Returns:
        Ours, then the peers in the order given.

    Raises:
        ValueError: The batch has fewer samples than there are devices.
    """
    replicas = len(devices)
    if batch < replicas:
        raise ValueError(f"case {case!r} has {batch} samples, but there are {replicas} devices")
    batch = batch // replicas * replicas

    def task(kind: Kind, rank: int = 0, world_size: int = 1) -> Task:
        return Task(
            kind, case, batch, tuple(devices), threads, mode, loss, rank, world_size, meeting_point
        )

    known = {
        "bare": Contestant("bare", "bare module", (task("bare"),)),
        "ddp": Contestant(
            "ddp",
            f"torch DDP x{replicas}",
            tuple(task("ddp", rank, replicas) for rank in range(replicas)),
        ),
    }
    ours = Contestant("ours", f"DataParallel x{replicas}", (task("ours"),))
    return (ours, *(known[peer] for peer in peers))
